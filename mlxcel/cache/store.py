"""The store: every stored KV segment, found by key and longest prefix, bounded and counted.

Theory of operation. There is one trie per bucket (all dimensions of the key but session and tokens, the salt
among them), so KV can never cross a bucket. An entry marks where a donated sequence ends; a shared prefix is held
once however many entries run through it, and `nbytes` counts each live segment once. A lookup reads and never
consumes: any number of sequences adopt the same segments, which are never written again. A donation is two calls,
because copying KV out of a live sequence happens on another thread: `held()` says how much of the sequence the
trie already has, `insert()` takes the KV of the rest and refuses it when the held part has gone meanwhile.

The store is plain synchronous code on the event loop: no locks, no clock (`now` is an argument, in seconds), no
MLX (segments are opaque). Every lookup ends in a hit or in one named miss reason; every entry leaves through
`_drop` and every byte is in a trie.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

from mlxcel.cache.blocks import block_chain, leading_equal
from mlxcel.cache.entry import Entry
from mlxcel.cache.key import CacheContext, key_digest
from mlxcel.cache.limits import Limits
from mlxcel.cache.lookup import Hit, Match, Miss, MissReason, choose, differing, usable
from mlxcel.cache.radix import Segment, Tokens, Trie

log = logging.getLogger(__name__)

EvictReason = Literal["lru", "ttl"]

PINNED_SHARE = 0.5  # of the capacity; the rest stays for what nobody announced


@dataclass(slots=True)
class Totals:
    """What happened since the start; a reset of the store does not touch these."""

    lookups: int = 0
    hits: int = 0
    tokens_reused: int = 0
    inserts: int = 0
    rejections_oversized: int = 0
    evictions: Counter[EvictReason] = field(default_factory=Counter)
    misses: Counter[MissReason] = field(default_factory=Counter)


class Bucket:
    def __init__(self, context: CacheContext) -> None:
        self.context = replace(context, session_key=None)
        self.trie = Trie()
        self.num_entries = 0

    def holds(self, context: CacheContext) -> bool:
        return self.context.bucket == context.bucket


class Store:
    """See the module for how it works; `limits` for what bounds it."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.totals = Totals()
        self._buckets: dict[tuple[object, ...], Bucket] = {}
        self._entries: dict[Entry, None] = {}
        self._num_blocks = 0
        self._warned_oversized = False

    @property
    def enabled(self) -> bool:
        return self.limits.enabled and self.limits.capacity_bytes > 0 and self.limits.max_entries > 0

    @property
    def nbytes(self) -> int:
        return sum(bucket.trie.nbytes for bucket in self._buckets.values())

    @property
    def num_entries(self) -> int:
        return len(self._entries)

    # --- reading

    def peek(self, context: CacheContext, tokens: Tokens[int]) -> int:
        """How many tokens a lookup would lend now. Counts and touches nothing."""
        verdict = self.judge(context, tokens)
        return verdict.length if isinstance(verdict, Match) else 0

    def lookup(self, context: CacheContext, tokens: Tokens[int], now: float) -> Hit | Miss:
        """The longest usable stored prefix of `tokens`, or the one reason why there is none.

        A hit refreshes the entry's place in the LRU order and its TTL. A disabled store counts nothing.
        """
        if not self.enabled:
            return Miss(MissReason.DISABLED)
        expired = self.sweep(now)
        self.totals.lookups += 1
        verdict = self.judge(context, tokens, expired)
        if isinstance(verdict, Miss):
            self.totals.misses[verdict.reason] += 1
            return verdict
        verdict.entry.last_used = now
        self.totals.hits += 1
        self.totals.tokens_reused += verdict.length
        trie = self._buckets[context.bucket].trie
        node, _ = trie.walk(tokens[: verdict.length])
        return Hit(verdict, tuple(trie.segments(node, verdict.length)))

    def judge(self, context: CacheContext, tokens: Tokens[int], expired: Iterable[Entry] = ()) -> Match | Miss:
        """What a lookup would say now; `expired` are the entries that left just before. Counts and touches nothing."""
        match = self._match(context, tokens)
        if match is not None and match.length >= max(self.limits.min_prefix, 1):
            return match
        return self._classify(context, tokens, expired)

    def _match(self, context: CacheContext, tokens: Tokens[int]) -> Match | None:
        bucket = self._buckets.get(context.bucket)
        if not self.enabled or bucket is None:
            return None
        match = choose(bucket.trie, tokens, context.session_key, self.limits.block_size)
        if match is None or not self.limits.block_size or not match.entry.chain:
            return match
        # The trie compared the tokens; the chains must say the same, or the hash inputs (media, salt) differ.
        chain = self._chain(context, tokens[: match.length + 1])
        blocks = leading_equal(chain, match.entry.chain)
        return replace(match, length=min(match.length, usable(blocks * self.limits.block_size, len(tokens), None)))

    def _classify(self, context: CacheContext, tokens: Tokens[int], expired: Iterable[Entry]) -> Miss:
        if len(tokens) - 1 < self.limits.min_prefix:
            return Miss(MissReason.PROMPT_TOO_SHORT)
        if any(entry.context.bucket == context.bucket for entry in expired):
            return Miss(MissReason.EXPIRED)
        bucket = self._buckets.get(context.bucket)
        if bucket is None:
            nearest = self.nearest(context)
            return Miss(differing(context, nearest.context)[0] if nearest else MissReason.EMPTY)
        _, common = bucket.trie.walk(tokens)
        if min(common, len(tokens) - 1) < self.limits.min_prefix:
            return Miss(MissReason.DIVERGED, common)
        return Miss(MissReason.BLOCK_FLOOR if self.limits.block_size else MissReason.PARTIAL_ENTRY, common)

    def bucket(self, context: CacheContext) -> Bucket | None:
        return self._buckets.get(context.bucket)

    def nearest(self, context: CacheContext) -> Bucket | None:
        """The other bucket that differs in the fewest dimensions. Buckets of another salt do not exist here."""
        others = [b for b in self._buckets.values() if b.context.salt == context.salt and not b.holds(context)]
        return min(others, key=lambda other: len(differing(context, other.context)), default=None)

    # --- donating

    def held(self, context: CacheContext, tokens: Tokens[int]) -> int:
        """How many leading tokens of a sequence are stored already, so that only the rest needs copying."""
        bucket = self._buckets.get(context.bucket)
        return bucket.trie.walk(tokens)[1] if bucket else 0

    def fits(self, nbytes: int) -> bool:
        """Whether an entry of that size could be kept at all. A refusal is counted, and explained once."""
        if not self.enabled:
            return False
        if nbytes <= self.limits.capacity_bytes:
            return True
        self.totals.rejections_oversized += 1
        if not self._warned_oversized:
            self._warned_oversized = True
            log.warning(
                "prompt-cache: an entry of %d bytes can never fit the capacity of %d bytes, so such requests stay "
                "cold; raise --prompt-cache-capacity-bytes (MLXCEL_PROMPT_CACHE_CAPACITY_BYTES)",
                nbytes,
                self.limits.capacity_bytes,
            )
        return False

    def insert(
        self,
        context: CacheContext,
        tokens: Tokens[int],
        start: int,
        segment: Segment | None,
        now: float,
        replaces: Entry | None = None,
    ) -> Entry | None:
        """Mark an entry for all of `tokens`, given the KV of tokens[start:] (None when start is the end).

        `replaces` is the same sequence's shorter entry: with APC on the longer one serves all it served. Returns
        None, with nothing stored, when the store is off, the entry too short or too large, or tokens[:start] gone.
        """
        if not self.enabled or len(tokens) < self.limits.min_prefix:
            return None
        digest = key_digest(context, tokens)  # before anything is held: a context that cannot be hashed raises
        bucket = self._buckets.get(context.bucket) or Bucket(context)
        node = bucket.trie.extend(tokens, start, segment)
        if node is None:
            return None
        self._buckets[context.bucket] = bucket
        if not self.fits(sum(n.segment.nbytes for n in node.ancestry() if n.segment)):
            bucket.trie.prune(node)
            self._forget_if_empty(bucket)
            return None
        entry = node.entries.get(context.session_key)
        if entry is None:
            entry = self._mark(bucket, Entry(context, node, digest, b"", now, now), tokens)
        entry.last_used = now
        if replaces is not None and replaces is not entry and self.limits.block_size:
            self._supersede(replaces)
        self.totals.inserts += 1
        self._make_room()
        return entry if entry in self._entries else None

    def _supersede(self, entry: Entry) -> None:
        if entry in self._entries and not entry.pinned:
            self._drop(entry)

    def find(self, context: CacheContext, tokens: Tokens[int]) -> Entry | None:
        """The entry of exactly this key, if it is stored. Touches nothing."""
        bucket = self._buckets.get(context.bucket)
        if bucket is None:
            return None
        node, depth = bucket.trie.walk(tokens)
        return node.entries.get(context.session_key) if depth == node.depth == len(tokens) else None

    def export(self, context: CacheContext, tokens: Tokens[int]) -> tuple[int, tuple[tuple[Segment, int], ...]]:
        """How many leading tokens are stored, and the segments that hold them. Touches nothing."""
        bucket = self._buckets.get(context.bucket)
        if bucket is None:
            return 0, ()
        node, length = bucket.trie.walk(tokens)
        return length, tuple(bucket.trie.segments(node, length))

    def discard(self, context: CacheContext, tokens: Tokens[int]) -> None:
        """Forget the entry of exactly this key, if there is one; no eviction is counted."""
        if (entry := self.find(context, tokens)) is not None:
            self._drop(entry)

    def pin(self, entry: Entry) -> bool:
        """Keep an entry from LRU and TTL until unpinned or reset; False when pins would hold over half the store."""
        held = sum(e.nbytes for e in self._entries if e.pinned and e is not entry)
        entry.pinned = held + entry.nbytes <= self.limits.capacity_bytes * PINNED_SHARE
        return entry.pinned

    def unpin(self, entry: Entry) -> None:
        entry.pinned = False
        self._make_room()

    def _mark(self, bucket: Bucket, entry: Entry, tokens: Tokens[int]) -> Entry:
        if self.limits.block_size:
            entry.chain = self._chain(entry.context, tokens)
        entry.node.entries[entry.context.session_key] = entry
        self._entries[entry] = None
        self._num_blocks += entry.num_blocks
        bucket.num_entries += 1
        return entry

    def _chain(self, context: CacheContext, tokens: Tokens[int]) -> bytes:
        assert self.limits.block_size is not None
        return block_chain(tokens, self.limits.block_size, self.limits.hash, context.mm_digest, context.salt)

    # --- leaving

    def sweep(self, now: float) -> list[Entry]:
        """Evict and return what has outlived its TTL."""
        if not self.limits.ttl:
            return []
        expired = [e for e in self._entries if not e.pinned and now - e.last_used >= self.limits.ttl]
        for entry in expired:
            self._evict(entry, "ttl")
        return expired

    def _over(self) -> bool:
        limits = self.limits
        too_many_blocks = limits.num_blocks is not None and self._num_blocks > limits.num_blocks
        return len(self._entries) > limits.max_entries or self.nbytes > limits.capacity_bytes or too_many_blocks

    def _make_room(self) -> None:
        while self._over():
            victim = min((e for e in self._entries if not e.pinned), key=lambda e: e.lru_order, default=None)
            if victim is None:
                return
            self._evict(victim, "lru")

    def _evict(self, entry: Entry, reason: EvictReason) -> None:
        self.totals.evictions[reason] += 1
        self._drop(entry)

    def _drop(self, entry: Entry) -> None:
        bucket = self._buckets[entry.context.bucket]
        del self._entries[entry]
        del entry.node.entries[entry.context.session_key]
        self._num_blocks -= entry.num_blocks
        bucket.num_entries -= 1
        bucket.trie.prune(entry.node)
        self._forget_if_empty(bucket)

    def _forget_if_empty(self, bucket: Bucket) -> None:
        if not bucket.num_entries:
            self._buckets.pop(bucket.context.bucket, None)

    def reset(self) -> tuple[int, int]:
        """Forget everything stored; totals stay. Returns (freed bytes, freed entries)."""
        freed = self.nbytes, self.num_entries
        self._buckets.clear()
        self._entries.clear()
        self._num_blocks = 0
        return freed

    # --- telling

    def stats(self) -> dict[str, object]:
        """The flat JSON object of GET /v1/cache/stats; bytes and tokens as integers, rates in 0..1."""
        limits, totals = self.limits, self.totals
        return {
            "enabled": self.enabled,
            "apc_enabled": bool(self.enabled and limits.block_size),
            "block_size": limits.block_size or 0,
            "hash": limits.hash,
            "entries": self.num_entries,
            "bytes": self.nbytes,
            "capacity_bytes": limits.capacity_bytes,
            "max_entries": limits.max_entries,
            "min_prefix": limits.min_prefix,
            "ttl_seconds": limits.ttl,
            "hits": totals.hits,
            "lookups": totals.lookups,
            "hit_rate": totals.hits / totals.lookups if totals.lookups else 0.0,
            "tokens_reused": totals.tokens_reused,
            "pinned_entries": sum(1 for entry in self._entries if entry.pinned),
            "inserts": totals.inserts,
            "evictions_lru": totals.evictions["lru"],
            "evictions_ttl": totals.evictions["ttl"],
            "rejections_oversized": totals.rejections_oversized,
            "total_blocks_stored": self._num_blocks,
            "unique_block_hashes": self._unique_blocks(),
            "apc_active_entries": sum(1 for entry in self._entries if entry.chain),
            "misses": {reason.value: totals.misses[reason] for reason in MissReason},
        }

    def _unique_blocks(self) -> int:
        """Distinct block hashes: a full block ends at one place of a trie, a partial one at one entry's end."""
        size = self.limits.block_size
        if not size:
            return 0
        total = 0
        for bucket in self._buckets.values():
            for node in bucket.trie.root.subtree():
                total += node.depth // size - node.start // size
                total += bool(node.entries and node.depth % size)
        return total
