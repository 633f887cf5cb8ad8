"""The snapshot store: whole model states, for models whose state cannot be cut at any token.

Theory of operation. A snapshot is the state after exactly its tokens, opaque here but for its size and for what it
says of being cut shorter (`refusal`). It belongs to one bucket and one session and is lent to that session only. A
lookup takes the longest snapshot that the prompt extends; one that the prompt leaves midway may lend its common part
if its payload can be cut there. A lent payload is copied by whoever restores it and never written. The snapshots of
a session form a chain per origin (boundary, completion): a newer one removes the shorter ones it extends, before its
bytes are counted, so that a conversation holds two of them however long it grows; with `min_step` boundaries that far
apart are kept, for conversations that go back. Anonymous callers share one session and therefore supersede nothing.

Like the store of KV it is plain synchronous code: no locks, no clock, no MLX. Every lookup ends in a hit or in one
named reason, every refused capture is counted by its reason.
"""

from __future__ import annotations

import logging
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal, Protocol

from mlxcel.cache.key import ANONYMOUS, CacheContext, key_digest
from mlxcel.cache.limits import SnapshotLimits
from mlxcel.cache.lookup import Miss, MissReason, differing
from mlxcel.cache.radix import Tokens, common_prefix

log = logging.getLogger(__name__)

Origin = Literal["boundary", "completion"]
PINNED_SHARE = 0.5  # of the capacity, as in the store of KV
WARNED_SESSIONS = 4096


class Payload(Protocol):
    """A state that nobody writes to."""

    @property
    def nbytes(self) -> int: ...

    def refusal(self, length: int) -> MissReason | None:
        """Why it cannot stand for its first `length` tokens; None when it can."""
        ...


@dataclass(slots=True, eq=False)
class Snapshot:
    context: CacheContext
    tokens: array[int]
    payload: Payload
    origin: Origin
    digest: bytes
    created_at: float
    last_used: float
    pinned: bool = False

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def nbytes(self) -> int:
        """Bytes of the payload and of the tokens' ids."""
        return self.payload.nbytes + len(self.tokens) * self.tokens.itemsize

    @property
    def lru_order(self) -> tuple[float, bytes]:
        return self.last_used, self.digest


@dataclass(frozen=True, slots=True)
class Lent:
    """The first `length` tokens of `snapshot`; all of them unless it was cut."""

    snapshot: Snapshot
    length: int


@dataclass(slots=True)
class Totals:
    """What happened since the start; `refusals` are captures and restores that the engine refused, by reason."""

    lookups: int = 0
    hits: int = 0
    tokens_reused: int = 0
    inserts: int = 0
    supersedes: int = 0
    self_evictions: int = 0
    rejections_oversized: int = 0
    warmups_run: int = 0
    warmups_skipped: int = 0
    evictions: Counter[str] = field(default_factory=Counter)
    misses: Counter[MissReason] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)


Chains = dict[str | None, list[Snapshot]]


class SnapshotStore:
    """See the module. `limits.min_prefix` is the shortest snapshot worth keeping, in tokens."""

    def __init__(self, limits: SnapshotLimits) -> None:
        self.limits = limits
        self.totals = Totals()
        self.nbytes = 0
        self._buckets: dict[tuple[object, ...], Chains] = {}
        self._all: dict[Snapshot, None] = {}
        self._warned_oversized = False
        self._warned_sessions: set[tuple[object, ...]] = set()

    @property
    def enabled(self) -> bool:
        return self.limits.enabled and self.limits.room > 0

    @property
    def num_entries(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Snapshot]:
        return iter(self._all)

    # --- reading

    def lookup(self, context: CacheContext, tokens: Tokens[int], now: float) -> Lent | Miss:
        """The longest usable snapshot of the session, or the one reason why there is none. A hit refreshes it."""
        if not self.enabled:
            return Miss(MissReason.DISABLED)
        expired = self.sweep(now)
        self.totals.lookups += 1
        verdict = self.judge(context, tokens, expired)
        if isinstance(verdict, Miss):
            self.totals.misses[verdict.reason] += 1
            return verdict
        verdict.snapshot.last_used = now
        self.totals.hits += 1
        self.totals.tokens_reused += verdict.length
        return verdict

    def take_back(self, length: int) -> None:
        """What was lent last could not be put back: count it as a miss."""
        self.totals.hits -= 1
        self.totals.tokens_reused -= length
        self.totals.misses[MissReason.UNRESTORABLE] += 1

    def judge(self, context: CacheContext, tokens: Tokens[int], expired: Iterable[Snapshot] = ()) -> Lent | Miss:
        """What a lookup would say now. Counts and touches nothing."""
        if len(tokens) - 1 < self.limits.min_prefix:
            return Miss(MissReason.PROMPT_TOO_SHORT)
        own = self._own(context)
        best: tuple[int, bool, float, Snapshot] | None = None
        nearest: tuple[int, MissReason] | None = None
        for snapshot in own:
            common = min(common_prefix(tokens, snapshot.tokens), len(tokens) - 1)
            if common < self.limits.min_prefix:
                continue
            refused = None if common == snapshot.num_tokens else snapshot.payload.refusal(common)
            if refused is not None:
                nearest = max(nearest or (0, refused), (common, refused))
                continue
            rank = (common, common == snapshot.num_tokens, snapshot.created_at, snapshot)
            best = rank if best is None or rank[:3] > best[:3] else best
        if best is not None:
            return Lent(best[3], best[0])
        return Miss(nearest[1], nearest[0]) if nearest else self._classify(context, own, tokens, expired)

    def _classify(
        self, context: CacheContext, own: list[Snapshot], tokens: Tokens[int], expired: Iterable[Snapshot]
    ) -> Miss:
        if own:
            return Miss(MissReason.DIVERGED, max(common_prefix(tokens, s.tokens) for s in own))
        gone = [s for s in expired if s.context.bucket == context.bucket]
        if any(s.context.session_key == context.session_key for s in gone):
            return Miss(MissReason.EXPIRED)
        others = [s for s in self._all if s.context.salt == context.salt]
        if not others:
            return Miss(MissReason.EMPTY)
        here = [s for s in others if s.context.bucket == context.bucket]
        if here:
            return Miss(MissReason.OTHER_SESSION, max(common_prefix(tokens, s.tokens) for s in here))
        return Miss(min((differing(context, s.context) for s in others), key=len)[0])

    def nearest(self, context: CacheContext, tokens: Tokens[int]) -> Snapshot | None:
        """The snapshot of the same salt that tells most about a miss: own session, own bucket, most common tokens."""
        kin = [s for s in self._all if s.context.salt == context.salt]
        return max(
            kin,
            key=lambda s: (
                s.context.bucket == context.bucket,
                s.context.session_key == context.session_key,
                common_prefix(tokens, s.tokens),
                s.created_at,
            ),
            default=None,
        )

    def covers(self, context: CacheContext, tokens: Tokens[int]) -> bool:
        """Whether the session has a snapshot of all of `tokens` or of a longer sequence."""
        own = self._own(context)
        return any(common_prefix(tokens, s.tokens) == len(tokens) for s in own)

    def find(self, context: CacheContext, tokens: Tokens[int]) -> Snapshot | None:
        """The longest snapshot of the session that `tokens` begin with. Touches nothing."""
        own = self._own(context)
        whole = [s for s in own if common_prefix(tokens, s.tokens) == s.num_tokens]
        return max(whole, key=lambda s: s.num_tokens, default=None)

    def _own(self, context: CacheContext) -> list[Snapshot]:
        return self._buckets.get(context.bucket, {}).get(context.session_key, [])

    # --- filling

    def insert(
        self, context: CacheContext, tokens: array[int], payload: Payload, origin: Origin, now: float
    ) -> Snapshot | None:
        """Keep the state of `tokens`. None, with nothing stored, when it is off, too short, too large or outdated.

        Outdated is what the session has longer already, of the same origin: a warm-up that a new turn overtook.
        """
        if not self.enabled or len(tokens) < self.limits.min_prefix:
            return None
        digest = key_digest(context, tokens)
        snapshot = Snapshot(context, tokens, payload, origin, digest, now, now)
        if not self._fits(snapshot.nbytes) or not self._extend(snapshot):
            return None
        self._buckets.setdefault(context.bucket, {}).setdefault(context.session_key, []).append(snapshot)
        self._all[snapshot] = None
        self.nbytes += snapshot.nbytes
        self.totals.inserts += 1
        self._make_room_in_session(snapshot)
        self._make_room(snapshot)
        return snapshot if snapshot in self._all else None

    def _extend(self, new: Snapshot) -> bool:
        """Remove what `new` stands in for; False when the session has a longer one of its chain already."""
        named = _is_named(new.context)
        for old in list(self._own(new.context)):
            common = common_prefix(old.tokens, new.tokens)
            if common == old.num_tokens == new.num_tokens:
                new.pinned = old.pinned
                self._drop(old)
            elif named and old.origin == new.origin and common == new.num_tokens:
                return False
            elif named and old.origin == new.origin and common == old.num_tokens and not old.pinned:
                self._abandon(old, new)
                if not self._is_a_step(old):
                    self._supersede(old)
        return True

    def _is_a_step(self, old: Snapshot) -> bool:
        """Whether a superseded boundary stays: far enough from the one that the conversation would go back to else."""
        if self.limits.min_step is None or old.origin != "boundary":
            return False
        before = [s.num_tokens for s in self._own(old.context) if s.origin == "boundary" and _extends(old, s)]
        return old.num_tokens - max(before, default=0) >= self.limits.min_step

    def _supersede(self, old: Snapshot) -> None:
        self.totals.supersedes += 1
        self._drop(old)

    def _abandon(self, boundary: Snapshot, new: Snapshot) -> None:
        """The completions of a superseded boundary that the conversation did not go on from: the template renders a
        reply otherwise than it was generated, so that they would pile up and never match."""
        if boundary.origin != "boundary":
            return
        for other in list(self._own(new.context)):
            goes_on = common_prefix(other.tokens, new.tokens) == other.num_tokens
            if other.origin == "completion" and _extends(other, boundary) and not goes_on and not other.pinned:
                self._supersede(other)

    def _fits(self, nbytes: int) -> bool:
        if nbytes <= self.limits.capacity_bytes:
            return True
        self.totals.rejections_oversized += 1
        if not self._warned_oversized:
            self._warned_oversized = True
            log.warning(
                "prompt-cache: a snapshot of %d bytes can never fit the capacity of %d bytes, so such conversations "
                "stay cold; raise --prompt-cache-snapshot-capacity-bytes (MLXCEL_PROMPT_CACHE_SNAPSHOT_CAPACITY_BYTES)",
                nbytes,
                self.limits.capacity_bytes,
            )
        return False

    def pin(self, snapshot: Snapshot) -> bool:
        """Keep it from LRU, TTL and its successors until unpinned or reset; at most half of the store is pinned."""
        held = sum(s.nbytes for s in self._all if s.pinned and s is not snapshot)
        snapshot.pinned = held + snapshot.nbytes <= self.limits.capacity_bytes * PINNED_SHARE
        return snapshot.pinned

    def unpin(self, snapshot: Snapshot) -> None:
        snapshot.pinned = False
        self._make_room(snapshot)

    def discard(self, context: CacheContext, tokens: Tokens[int]) -> None:
        """Forget the session's snapshots that `tokens` begin with; no eviction is counted."""
        for snapshot in list(self._own(context)):
            if common_prefix(tokens, snapshot.tokens) == snapshot.num_tokens:
                self._drop(snapshot)

    # --- leaving

    def sweep(self, now: float) -> list[Snapshot]:
        """Evict and return what has outlived its TTL."""
        if not self.limits.ttl:
            return []
        expired = [s for s in self._all if not s.pinned and now - s.last_used >= self.limits.ttl]
        for snapshot in expired:
            self.totals.evictions["ttl"] += 1
            self._drop(snapshot)
        return expired

    def _make_room_in_session(self, newest: Snapshot) -> None:
        """What a session has beyond its share counts as superseded by its newest."""
        own = self._own(newest.context)
        excess = max(len(own) - self.limits.per_session, 0) if _is_named(newest.context) else 0
        others = (s for s in own if s is not newest and not s.pinned)
        for victim in sorted(others, key=lambda s: s.lru_order)[:excess]:
            self._supersede(victim)

    def _make_room(self, newest: Snapshot) -> None:
        while self.num_entries > self.limits.max_entries or self.nbytes > self.limits.capacity_bytes:
            victim = min((s for s in self._all if not s.pinned), key=lambda s: s.lru_order, default=None)
            if victim is None:
                return
            self.totals.evictions["lru"] += 1
            self._drop(victim)
            self._note_self_eviction(victim, newest)

    def _note_self_eviction(self, victim: Snapshot, newest: Snapshot) -> None:
        """A store that cannot hold one conversation evicts what that conversation needs next."""
        session = (*victim.context.bucket, victim.context.session_key)
        if session != (*newest.context.bucket, newest.context.session_key):
            return
        self.totals.self_evictions += 1
        if session not in self._warned_sessions and len(self._warned_sessions) < WARNED_SESSIONS:
            self._warned_sessions.add(session)
            log.warning(
                "prompt-cache: the snapshot store (%d bytes) evicts a conversation's own snapshot; raise "
                "MLXCEL_PROMPT_CACHE_SNAPSHOT_CAPACITY_BYTES (--prompt-cache-snapshot-capacity-bytes)",
                self.limits.capacity_bytes,
            )

    def _drop(self, snapshot: Snapshot) -> None:
        del self._all[snapshot]
        self.nbytes -= snapshot.nbytes
        context = snapshot.context
        chains = self._buckets[context.bucket]
        chains[context.session_key].remove(snapshot)
        if not chains[context.session_key]:
            del chains[context.session_key]
        if not chains:
            del self._buckets[context.bucket]

    def reset(self) -> tuple[int, int]:
        """Forget everything stored; totals stay. Returns (freed bytes, freed entries)."""
        freed = self.nbytes, self.num_entries
        self._buckets.clear()
        self._all.clear()
        self.nbytes = 0
        return freed

    # --- telling

    def stats(self) -> dict[str, object]:
        """The snapshot_* members of GET /v1/cache/stats."""
        limits, totals = self.limits, self.totals
        return {
            "snapshot_entries": self.num_entries,
            "snapshot_bytes": self.nbytes,
            "snapshot_bytes_per_entry": self.nbytes // self.num_entries if self.num_entries else 0,
            "snapshot_capacity_bytes": limits.capacity_bytes,
            "snapshot_bytes_left": max(limits.capacity_bytes - self.nbytes, 0),
            "snapshot_max_entries": limits.max_entries,
            "snapshot_ttl_seconds": limits.ttl,
            "snapshot_hits": totals.hits,
            "snapshot_lookups": totals.lookups,
            "snapshot_hit_rate": totals.hits / totals.lookups if totals.lookups else 0.0,
            "snapshot_tokens_reused": totals.tokens_reused,
            "snapshot_inserts": totals.inserts,
            "snapshot_supersedes": totals.supersedes,
            "snapshot_self_evictions": totals.self_evictions,
            "snapshot_evictions_lru": totals.evictions["lru"],
            "snapshot_evictions_ttl": totals.evictions["ttl"],
            "snapshot_rejections_oversized": totals.rejections_oversized,
            "snapshot_warmups_run": totals.warmups_run,
            "snapshot_warmups_skipped": totals.warmups_skipped,
            "snapshot_misses": {reason.value: n for reason, n in totals.misses.items()},
            "snapshot_refusals": dict(totals.refusals),
        }


def _is_named(context: CacheContext) -> bool:
    return context.session_key not in (None, ANONYMOUS)


def _extends(longer: Snapshot, shorter: Snapshot) -> bool:
    """Whether `longer` begins with all tokens of `shorter`, another snapshot."""
    return longer is not shorter and common_prefix(longer.tokens, shorter.tokens) == shorter.num_tokens
