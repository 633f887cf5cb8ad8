"""What the store's own work costs: lookups, inserts, and the memory of its Python objects. No model.

    python benchmarks/cache.py

Times are medians in milliseconds, on a store of 1,024 entries of 8,000 tokens with SHA-256 chains; memory is what
tracemalloc counts for 200 entries that share 1,000 of their 2,000 tokens, as a ratio to their token data (4 bytes
a token, every entry counted whole).
"""

from __future__ import annotations

import random
import statistics
import sys
import time
import tracemalloc
from array import array
from collections.abc import Callable
from dataclasses import dataclass

from mlxcel.cache.key import CacheContext
from mlxcel.cache.limits import Limits
from mlxcel.cache.store import Store


@dataclass(frozen=True, slots=True)
class NoSegment:
    """A segment without data, so that only the store's own objects are measured."""

    num_tokens: int
    nbytes: int = 0

    def __len__(self) -> int:
        return self.num_tokens

    def split(self, n: int) -> tuple[NoSegment, NoSegment]:
        return NoSegment(n), NoSegment(self.num_tokens - n)

    def __add__(self, other: NoSegment) -> NoSegment:
        return NoSegment(self.num_tokens + other.num_tokens)


def context(session: int) -> CacheContext:
    return CacheContext(model_id="m", template_sig="0" * 64, session_key=f"session-{session}")


def tokens(rng: random.Random, n: int) -> array[int]:
    return array("i", [rng.randrange(50_000) for _ in range(n)])


def donate(store: Store, key: CacheContext, sequence: array[int], now: float) -> None:
    start = store.held(key, sequence)
    segment = NoSegment(len(sequence) - start) if start < len(sequence) else None
    assert store.insert(key, sequence, start, segment, now) is not None


def median_ms(work: Callable[[int], object], times: int) -> float:
    spent = []
    for i in range(times):
        began = time.perf_counter()
        work(i)
        spent.append((time.perf_counter() - began) * 1000)
    return statistics.median(spent)


def times(num_entries: int, length: int) -> None:
    rng = random.Random(0)
    system = tokens(rng, 1000)
    store = Store(Limits(capacity_bytes=1 << 40, max_entries=num_entries))
    stored = [system + tokens(rng, length - 1000) for _ in range(num_entries)]
    for i, sequence in enumerate(stored):
        donate(store, context(i), sequence, float(i))
    fresh = [system + tokens(rng, length - 1000) for _ in range(30)]
    now = float(num_entries)
    rows = {
        "lookup, the whole conversation": lambda i: store.lookup(context(i), stored[i] + system, now),
        "lookup, the shared system prompt only": lambda i: store.lookup(context(i), fresh[i], now),
        "lookup, nothing in common": lambda i: store.lookup(context(i), fresh[i][::-1], now),
        "lookup, anonymous session": lambda i: store.lookup(context(-1), fresh[i], now),
        "insert, evicting the oldest": lambda i: donate(store, context(5000 + i), fresh[i], now + i),
    }
    print(f"\n{num_entries} entries of {length} tokens | ms\n---|---")
    for name, work in rows.items():
        print(f"{name} | {median_ms(work, 30):.2f}")
    print(f"stats | {median_ms(lambda i: store.stats(), 10):.2f}")


def memory(num_entries: int, shared: int, length: int) -> None:
    rng = random.Random(0)
    system = tokens(rng, shared)
    tracemalloc.start()
    store = Store(Limits(capacity_bytes=1 << 40, max_entries=num_entries))
    for i in range(num_entries):
        donate(store, context(i), system + tokens(rng, length - shared), float(i))
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    data = 4 * num_entries * length
    print(f"\n{num_entries} entries sharing {shared} of {length} tokens: {held} bytes, {held / data:.2f} of token data")


def main() -> int:
    times(1024, 8000)
    memory(200, 1000, 2000)
    return 0


if __name__ == "__main__":
    sys.exit(main())
