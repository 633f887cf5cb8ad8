"""Next turns that are computed ahead while the server is idle, for models that are stored as snapshots.

A boundary snapshot ends before the assistant's answer, so the next turn would compute that answer as a prompt again.
After a reply the API offers the tokens that any next turn of the conversation must begin with; when nobody waits or
runs, the scheduler prefills them on top of the session's snapshot, a chunk at a time, and stores the result as the
new boundary. Real work always comes first: it waits for one chunk at most. Everything here may be dropped at any
time; what is lost is only speed.
"""

from __future__ import annotations

import logging
from array import array
from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from mlxcel.cache.key import CacheContext
from mlxcel.cache.snapshots import SnapshotStore
from mlxcel.engine.health import attempt
from mlxcel.engine.plan import Outcome, Plan, Retire
from mlxcel.engine.sequence import Generation, Sequence, State
from mlxcel.text import TextStream

if TYPE_CHECKING:
    from mlxcel.engine.reuse import Reuse

log = logging.getLogger(__name__)

MAX_QUEUED = 8


class Warmups:
    """The queue; the oldest offer gives way to a new one."""

    def __init__(self, store: SnapshotStore) -> None:
        self._store = store
        self._queue: deque[tuple[CacheContext, array[int]]] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def offer(self, context: CacheContext, tokens: array[int]) -> None:
        if len(self._queue) == MAX_QUEUED:
            self._queue.popleft()
            self.skip()
        self._queue.append((context, tokens))

    def take(self) -> Generation | None:
        """The next one worth doing, as a generation without tokens whose boundary is its whole text."""
        while self._queue:
            context, tokens = self._queue.popleft()
            if self.is_worth_it(context, tokens) and self._store.find(context, tokens) is not None:
                return Generation(tokens + tokens[-1:], max_tokens=0, cache=context, boundary=len(tokens))
            self.skip()
        return None

    def is_worth_it(self, context: CacheContext, tokens: array[int]) -> bool:
        """Not once the conversation has gone on, and its own boundary covers this."""
        return len(tokens) >= self._store.limits.min_prefix and not self._store.covers(context, tokens)

    def skip(self) -> None:
        self._store.totals.warmups_skipped += 1

    def ran(self) -> None:
        self._store.totals.warmups_run += 1

    def clear(self) -> None:
        for _ in range(len(self._queue)):
            self.skip()
        self._queue.clear()


class Warming:
    """The next turn that is under way, if any. The scheduler steps it while nobody waits or runs."""

    def __init__(self, offers: Warmups, reuse: Reuse, ids: Iterator[int]) -> None:
        self.offers = offers
        self._reuse = reuse
        self._ids = ids
        self._sequence: Sequence | None = None

    def __bool__(self) -> bool:
        return self.is_under_way or bool(self.offers)

    @property
    def is_under_way(self) -> bool:
        return self._sequence is not None

    def goes_on(self, now: float) -> bool:
        """Whether there is something to do: the one under way, to be dropped if it is of no use now, or a new one."""
        if self._sequence is None:
            generation = self.offers.take()
            if generation is None:
                return False
            text = TextStream(lambda ids: "", ())
            self._sequence = Sequence(next(self._ids), generation, text, 0, now, state=State.PREFILLING)
            self._reuse.resume(self._sequence)
        generation = self._sequence.generation
        assert generation.cache is not None
        if not self.offers.is_worth_it(generation.cache, generation.prompt[:-1]):
            self._sequence.cancelled = True
        return True

    def plan(self, budget: int) -> Plan:
        """Its next chunk, or its end."""
        sequence = self._sequence
        assert sequence is not None
        left = sequence.num_prompt - 1 - sequence.num_prefilled
        if sequence.cancelled or not left:
            return Plan(retire=(Retire(sequence.id),))
        end = sequence.num_prefilled + min(left, budget)
        return Plan(prefills=(self._reuse.prefill(sequence, end, wanted=False),))

    def owns(self, plan: Plan) -> bool:
        return self._sequence is not None and self._sequence.id in plan.ids

    def commit(self, plan: Plan, outcome: Outcome, now: float) -> None:
        """A chunk is done, or it has left the engine. What fails is dropped: nobody waits for it."""
        sequence = self._sequence
        assert sequence is not None
        has_failed = bool(outcome.failed or outcome.unrestored)
        if plan.prefills and not has_failed:
            sequence.num_prefilled += len(plan.prefills[0].tokens)
            error = attempt(partial(self._reuse.prefilled, sequence, plan.prefills[0], outcome, now))
            if error is not None:
                log.error("a next turn is not computed ahead: %s", error, exc_info=error)
                sequence.cancelled = True
            elif sequence.num_prefilled == sequence.num_prompt - 1:
                self.offers.ran()
            return
        if has_failed or sequence.cancelled:
            self.offers.skip()
        self._reuse.forget(sequence)
        self._sequence = None

    def clear(self) -> None:
        """Nothing that was offered is computed any more."""
        self.offers.clear()
        if self._sequence is not None:
            self._sequence.cancelled = True
