"""Next turns that are computed ahead while the server is idle, for models that are stored as snapshots.

A boundary snapshot ends before the assistant's answer, so the next turn would compute that answer as a prompt again.
After a reply the API offers the tokens that any next turn of the conversation must begin with; when nobody waits or
runs, the scheduler prefills them on top of the session's snapshot, a chunk at a time, and stores the result as the
new boundary. Real work always comes first: it waits for one chunk at most. Everything here may be dropped at any
time; what is lost is only speed.
"""

from __future__ import annotations

from array import array
from collections import deque

from mlxcel.cache.key import CacheContext
from mlxcel.cache.snapshots import SnapshotStore
from mlxcel.engine.sequence import Generation

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
