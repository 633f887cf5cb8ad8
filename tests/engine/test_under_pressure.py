"""Eviction, resets and cancels while others adopt: nobody ever answers with somebody else's state."""

import asyncio
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import mlx.core as mx
import pytest

from mlxcel.cache.limits import Limits, SnapshotLimits
from mlxcel.cache.snapshots import SnapshotStore
from tests.engine.test_reuse import assert_same, generation, prompt
from tests.engine.test_reuse import serving as serving_kv
from tests.engine.test_sessions import MINE
from tests.engine.test_sessions import serving as serving_snapshots
from tests.harness import collect
from tests.tiny import tiny_model


@pytest.fixture(scope="module")
def mlx_thread():
    with ThreadPoolExecutor(1) as pool:
        yield pool
        pool.submit(mx.clear_streams).result()


def tight(family, thread):
    """A store that holds a few of the conversations at a time."""
    model = thread.submit(tiny_model, family).result()
    if model.reuse == "kv":
        nbytes = 300 * model.layout.bytes_per_token
        return serving_kv(model, thread, Limits(min_prefix=8, block_size=16, capacity_bytes=nbytes, max_entries=2))
    return serving_snapshots(model, thread, store=SnapshotStore(SnapshotLimits(min_prefix=8, max_entries=12)))


@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "gemma3_text", "qwen3_next"])
async def test_thirty_conversations_in_a_store_for_a_few(family, mlx_thread):
    rng = random.Random(3)
    async with tight(family, mlx_thread) as scheduler:
        shared = prompt(0, 40)
        asked = [
            replace(
                generation(shared + prompt(i, 40), True, 6), cache=replace(MINE, session_key=f"s{i % 9}"), boundary=79
            )
            for i in range(30)
        ]
        cold = [await collect(scheduler, replace(g, cache=None)) for g in asked]

        async def one(i):
            if rng.random() < 0.2:
                doomed = scheduler.submit(asked[i])
                await asyncio.sleep(0)
                scheduler.cancel(doomed)
            if rng.random() < 0.1:
                scheduler.reuse.store.reset()
            for _ in range(2):
                assert_same(await collect(scheduler, asked[i]), cold[i])

        for start in range(0, 30, 5):
            await asyncio.gather(*(one(i) for i in range(start, start + 5)))
        store = scheduler.reuse.store
        assert store.totals.hits > 0 and store.totals.evictions["lru"] > 0
        assert store.num_entries <= store.limits.max_entries


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
async def test_a_reset_leaves_running_sequences_as_they_are_and_the_next_lookup_cold(family, mlx_thread):
    async with tight(family, mlx_thread) as scheduler:
        asked = replace(generation(prompt(1, 60), True, 30), cache=MINE, boundary=59)
        await collect(scheduler, asked)
        cold = await collect(scheduler, replace(asked, cache=None))
        running = asyncio.create_task(collect(scheduler, asked))
        while not scheduler.num_active:
            await asyncio.sleep(0)
        scheduler.reuse.store.reset()
        assert scheduler.reuse.store.num_entries == scheduler.reuse.store.nbytes == 0
        first = await collect(scheduler, replace(asked, cache=replace(MINE, salt="x")))
        assert_same(await running, cold)
        assert_same(first, cold)
        assert first.cached == 0
