"""What the prompt cache decides for each sequence, between the scheduler and the store: what it takes up when it is
admitted, what is copied out of it while it is prefilled and when it ends, and what that becomes in the store.

`KVReuse` is for models whose state is plain KV (the store, any prefix), `SnapshotReuse` for all others (whole states
of a session). Both are synchronous and run on the event loop; they know neither the queue nor the engine. Invariant:
the tokens of what is stored are exactly those whose state was copied.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from mlxcel.cache.entry import Entry
from mlxcel.cache.lookup import Hit, Miss, MissReason, usable
from mlxcel.cache.radix import common_prefix
from mlxcel.cache.snapshots import Lent, Origin, SnapshotStore
from mlxcel.cache.store import Store
from mlxcel.engine.plan import Outcome, Prefill, Retire
from mlxcel.engine.sequence import Sequence

log = logging.getLogger(__name__)

DONATE_EVERY = 256  # prompt tokens; fewer only when somebody waits for them


class Reuse(Protocol):
    """What the scheduler asks. `now` is the scheduler's clock, in seconds."""

    trace: Trace

    def adopt(self, sequence: Sequence, now: float) -> None: ...

    def resume(self, warming: Sequence) -> None: ...

    def lends(self, other: Sequence, sequence: Sequence) -> int: ...

    def split_at(self, sequence: Sequence) -> int: ...

    def prefill(self, sequence: Sequence, end: int, wanted: bool) -> Prefill: ...

    def prefilled(self, sequence: Sequence, prefill: Prefill, outcome: Outcome, now: float) -> None: ...

    def retire(self, sequence: Sequence) -> Retire: ...

    def retired(self, sequence: Sequence, retire: Retire, outcome: Outcome, now: float) -> None: ...

    def unrestored(self, sequence: Sequence, reason: str) -> None: ...

    def forget(self, sequence: Sequence) -> None: ...


@dataclass(frozen=True, slots=True)
class Reject:
    """A sequence of `context_len` tokens got or left nothing; `common` tokens are those of the best candidate."""

    reason: str
    seq_id: int
    context_len: int
    common: int
    at_unix_ms: int


class Trace:
    """One line for each decision of the prompt cache, at INFO with MLXCEL_APC_TRACE=1, and the last rejection."""

    def __init__(self, loud: bool) -> None:
        self._level = logging.INFO if loud else logging.DEBUG
        self.last_reject: Reject | None = None

    def reject(self, reason: str, sequence: Sequence, context_len: int, common: int = 0) -> None:
        self.last_reject = Reject(reason, sequence.id, context_len, common, int(time.time() * 1000))
        self("reject", "reason=%s seq_id=%d context_len=%d", reason, sequence.id, common or context_len)

    def missed(self, sequence: Sequence, miss: Miss) -> None:
        sequence.miss_reason = miss.reason
        if miss.reason is not MissReason.DISABLED:
            self.reject(miss.reason, sequence, sequence.num_prompt, miss.common)

    def __call__(self, event: str, fields: str, *values: object) -> None:
        log.log(self._level, f"prompt-cache {event}: apc_event={event.split()[0]} {fields}", *values)


class KVReuse:
    """`bytes_per_token` of stored KV (0: it cannot be stored); `regime` gives the key's tag for a length."""

    def __init__(self, store: Store, bytes_per_token: int, regime: Callable[[int], int | None], trace: Trace) -> None:
        self.store = store
        self._bytes_per_token = bytes_per_token
        self._regime = regime
        self.trace = trace
        self._adopting: dict[int, Hit] = {}
        self._entries: dict[int, Entry | None] = {}

    def adopt(self, sequence: Sequence, now: float) -> None:
        context = sequence.generation.cache
        if context is None or not self._bytes_per_token:
            return
        sequence.storable = self._fits(sequence.num_prompt)
        found = self.store.lookup(context, sequence.prompt, now)
        if isinstance(found, Miss):
            self.trace.missed(sequence, found)
            return
        self._adopting[sequence.id] = found
        sequence.num_cached = sequence.num_prefilled = sequence.num_stored = found.length
        self.trace("adopt", "seq_id=%d matched_len=%d total_tokens=%d", sequence.id, found.length, sequence.num_prompt)

    def resume(self, warming: Sequence) -> None:
        """Plain KV needs no warming up: its prefixes are stored already."""

    def _fits(self, num_tokens: int) -> bool:
        return self._bytes_per_token > 0 and self.store.fits(num_tokens * self._bytes_per_token)

    def lends(self, other: Sequence, sequence: Sequence) -> int:
        """How many tokens `sequence` will be able to adopt of the prompt that `other` is prefilling; 0 if too few."""
        context, limits = sequence.generation.cache, self.store.limits
        theirs = other.generation.cache
        if context is None or theirs is None or not other.storable or theirs.bucket != context.bucket:
            return 0
        shared = min(common_prefix(other.prompt, sequence.prompt), other.num_prompt - 1)
        if not limits.block_size and shared < other.num_prompt - 1:
            return 0  # without APC only the whole prompt can be adopted
        lent = usable(shared, sequence.num_prompt, limits.block_size)
        return lent if lent >= limits.min_prefix else 0

    def split_at(self, sequence: Sequence) -> int:
        """Where the next chunk must end at the latest."""
        return sequence.num_prompt - 1

    def prefill(self, sequence: Sequence, end: int, wanted: bool) -> Prefill:
        """The order for prompt tokens up to `end`; `wanted` says that somebody waits, who may share them."""
        adopted = self._adopting.pop(sequence.id, None)
        donate_from = None
        if self._is_donation_due(sequence, end, wanted):
            context = sequence.generation.cache
            assert context is not None
            donate_from = min(self.store.held(context, sequence.prompt[:end]), end)
        segments = adopted.segments if adopted else ()
        tokens = sequence.prompt[sequence.num_prefilled : end]
        return Prefill(sequence.id, tokens, segments, donate_from=donate_from)  # type: ignore[arg-type]

    def _is_donation_due(self, sequence: Sequence, end: int, wanted: bool) -> bool:
        if not sequence.storable or end < self.store.limits.min_prefix:
            return False
        return end == sequence.num_prompt - 1 or wanted or end - sequence.num_stored >= DONATE_EVERY

    def prefilled(self, sequence: Sequence, prefill: Prefill, outcome: Outcome, now: float) -> None:
        if prefill.donate_from is not None:
            self._donate(sequence, sequence.prompt[: sequence.num_prefilled], prefill.donate_from, outcome, now)

    def retire(self, sequence: Sequence) -> Retire:
        context, length = sequence.generation.cache, sequence.num_prompt + len(sequence.tokens)
        if context is None or not sequence.storable or not sequence.tokens or not self._fits(length):
            return Retire(sequence.id)
        if context.rope_regime != self._regime(length):
            self.trace.reject("rope_regime_mismatch", sequence, length)
            return Retire(sequence.id)
        return Retire(sequence.id, self.store.held(context, sequence.prompt + sequence.tokens), length)

    def retired(self, sequence: Sequence, retire: Retire, outcome: Outcome, now: float) -> None:
        if retire.donate_from is not None and retire.id not in outcome.failed:
            self._donate(sequence, sequence.prompt + sequence.tokens, retire.donate_from, outcome, now)
        self.forget(sequence)

    def _donate(self, sequence: Sequence, tokens: array[int], start: int, outcome: Outcome, now: float) -> None:
        context = sequence.generation.cache
        assert context is not None
        segment = outcome.segments.get(sequence.id)
        if segment is None and start < len(tokens):
            return  # the copy failed; the sequence itself goes on
        entry = self.store.insert(context, tokens, start, segment, now, replaces=self._entries.get(sequence.id))
        self._entries[sequence.id] = entry
        sequence.num_stored = len(tokens)
        if entry is not None:
            self.trace("store", "seq_id=%d matched_len=%d", sequence.id, len(tokens))

    def unrestored(self, sequence: Sequence, reason: str) -> None:
        """Plain KV that was found can always be put back."""

    def forget(self, sequence: Sequence) -> None:
        self._adopting.pop(sequence.id, None)
        self._entries.pop(sequence.id, None)


class SnapshotReuse:
    """`boundaries` False takes no snapshot at the end of the history (MLXCEL_DISABLE_BOUNDARY_SNAPSHOT)."""

    def __init__(self, store: SnapshotStore, boundaries: bool, trace: Trace) -> None:
        self.store = store
        self._boundaries = boundaries
        self.trace = trace
        self._restoring: dict[int, Lent] = {}

    def adopt(self, sequence: Sequence, now: float) -> None:
        context = sequence.generation.cache
        if context is None:
            return
        found = self.store.lookup(context, sequence.prompt, now)
        if isinstance(found, Miss):
            self.trace.missed(sequence, found)
            return
        self._restoring[sequence.id] = found
        sequence.num_cached = sequence.num_prefilled = found.length
        self.trace(
            "adopt (snapshot)",
            "seq_id=%d matched_len=%d total_tokens=%d stored=%d",
            sequence.id,
            found.length,
            sequence.num_prompt,
            found.snapshot.num_tokens,
        )

    def resume(self, warming: Sequence) -> None:
        """Take up the session's longest snapshot for a warm-up; no request, so no lookup is counted."""
        context = warming.generation.cache
        assert context is not None
        snapshot = self.store.find(context, warming.prompt)
        if snapshot is not None:
            self._restoring[warming.id] = Lent(snapshot, snapshot.num_tokens)
            warming.num_cached = warming.num_prefilled = snapshot.num_tokens

    def lends(self, other: Sequence, sequence: Sequence) -> int:
        """Sessions do not share, and a session's turns follow one another."""
        return 0

    def split_at(self, sequence: Sequence) -> int:
        """The boundary, also for a request that stores nothing: so that it computes in the same pieces."""
        boundary = sequence.generation.boundary
        last = sequence.num_prompt - 1
        return boundary if boundary is not None and sequence.num_prefilled < boundary < last else last

    def prefill(self, sequence: Sequence, end: int, wanted: bool) -> Prefill:
        lent = self._restoring.pop(sequence.id, None)
        state = (lent.snapshot.payload, lent.length) if lent else None
        capture = end if self._is_boundary_due(sequence, end) else None
        tokens = sequence.prompt[sequence.num_prefilled : end]
        return Prefill(sequence.id, tokens, state=state, capture=capture)  # type: ignore[arg-type]

    def _is_boundary_due(self, sequence: Sequence, end: int) -> bool:
        if sequence.generation.cache is None or not self._boundaries or end == sequence.num_cached:
            return False
        return end == sequence.generation.boundary and self._is_worth_it(end)

    def _is_worth_it(self, length: int) -> bool:
        return self.store.enabled and length >= self.store.limits.min_prefix

    def prefilled(self, sequence: Sequence, prefill: Prefill, outcome: Outcome, now: float) -> None:
        if prefill.capture is not None:
            self._keep(sequence, sequence.prompt[: prefill.capture], "boundary", outcome, now)

    def retire(self, sequence: Sequence) -> Retire:
        """A completion is stored once it has ended well; what was cut off by the client is not."""
        length = sequence.num_prompt + len(sequence.tokens) if sequence.tokens else sequence.num_prefilled
        stored = sequence.generation.boundary if self._boundaries else None
        wanted = sequence.generation.cache is not None and not sequence.cancelled and self._is_worth_it(length)
        return Retire(sequence.id, length=length, capture=wanted and length not in (stored, sequence.num_cached))

    def retired(self, sequence: Sequence, retire: Retire, outcome: Outcome, now: float) -> None:
        if retire.capture and retire.id not in outcome.failed:
            tokens = (sequence.prompt + sequence.tokens)[: retire.length]
            self._keep(sequence, tokens, "completion", outcome, now)
        self.forget(sequence)

    def _keep(self, sequence: Sequence, tokens: array[int], origin: Origin, outcome: Outcome, now: float) -> None:
        context, state = sequence.generation.cache, outcome.states.get(sequence.id)
        assert context is not None
        if state is None:
            self._refuse(sequence, outcome.refused.get(sequence.id, "capture_failed"), len(tokens))
        elif self.store.insert(context, tokens, state, origin, now):
            self.trace("store (snapshot)", "seq_id=%d matched_len=%d origin=%s", sequence.id, len(tokens), origin)

    def _refuse(self, sequence: Sequence, reason: str, length: int) -> None:
        self.store.totals.refusals[reason] += 1
        self.trace.reject(reason, sequence, length)

    def unrestored(self, sequence: Sequence, reason: str) -> None:
        """The engine could not put the state back: the sequence starts cold, and the hit was none."""
        log.warning("prompt-cache: a snapshot of %d tokens cannot be restored: %s", sequence.num_cached, reason)
        self.store.take_back(sequence.num_cached)
        sequence.miss_reason = MissReason.UNRESTORABLE
        self._refuse(sequence, reason, sequence.num_cached)

    def forget(self, sequence: Sequence) -> None:
        self._restoring.pop(sequence.id, None)
