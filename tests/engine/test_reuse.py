"""A hit must never change an answer: warm against cold, by tokens and log-probabilities, on real tiny models."""

import asyncio
import random
from array import array
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import mlx.core as mx
import pytest

from mlxcel.cache.limits import Limits
from mlxcel.engine.batch import Engine
from mlxcel.engine.sequence import Generation, Sampling
from tests.harness import BOUNDS, CONTEXT, GREEDY, collect, scheduling
from tests.tiny import COLD, DENSE, tiny_model

LIMITS = Limits(min_prefix=1, block_size=16)
SHARED = (0, 1, 15, 16, 17, 119)  # the last is all tokens of the prompt but the last


@pytest.fixture(scope="module")
def mlx_thread():
    """The one thread that everything of MLX runs on, as in the server."""
    with ThreadPoolExecutor(1) as pool:
        yield pool
        pool.submit(mx.clear_streams).result()


@pytest.fixture(params=DENSE)
def dense(request, mlx_thread):
    return mlx_thread.submit(tiny_model, request.param).result()


def serving(model, thread, limits=LIMITS, **bounds):
    nbytes = model.layout.bytes_per_token if model.layout else 0
    return scheduling(
        Engine(model),
        model.tokenizer,
        bounds=replace(BOUNDS, **bounds),
        limits=limits,
        bytes_per_token=nbytes,
        executor=thread,
    )


def prompt(seed: int, n: int = 120) -> array:
    rng = random.Random(seed)
    return array("i", [rng.randrange(256) for _ in range(n)])


def generation(tokens: array, cached: bool, max_tokens: int = 8, sampling: Sampling = GREEDY) -> Generation:
    return Generation(tokens, sampling, max_tokens, ignore_eos=True, top_logprobs=3, cache=CONTEXT if cached else None)


def assert_same(warm, cold):
    """Equal tokens, and log-probabilities as near as float32 allows; a wrong KV row moves them by far more."""
    assert warm.tokens == cold.tokens
    for a, b in zip(warm.logprobs, cold.logprobs, strict=True):
        assert a.token == b.token and abs(a.logprob - b.logprob) < 1e-3
        assert [t for t, _ in a.top] == [t for t, _ in b.top]


@pytest.mark.parametrize("shared", SHARED)
async def test_a_prompt_that_shares_some_tokens_answers_as_if_cold(dense, mlx_thread, shared):
    async with serving(dense, mlx_thread) as scheduler:
        await collect(scheduler, generation(prompt(1), True))
        ours = prompt(1)[:shared] + prompt(2)[shared:]
        cold = await collect(scheduler, generation(ours, False))
        warm = await collect(scheduler, generation(ours, True))
    assert cold.cached == 0
    assert warm.cached == shared - shared % 16
    assert_same(warm, cold)


@pytest.mark.parametrize("shared", SHARED)
async def test_the_same_beside_seven_others(dense, mlx_thread, shared):
    async with serving(dense, mlx_thread) as scheduler:
        await collect(scheduler, generation(prompt(1), True))
        ours = prompt(1)[:shared] + prompt(2)[shared:]
        cold = await collect(scheduler, generation(ours, False))
        noise = [generation(prompt(50 + i, 20 + 17 * i), i % 2 == 0, max_tokens=20) for i in range(7)]
        warm, *_ = await asyncio.gather(*(collect(scheduler, g) for g in [generation(ours, True), *noise]))
    assert warm.cached == shared - shared % 16
    assert_same(warm, cold)


@pytest.mark.parametrize("reuses", [1, 2, 10])
async def test_an_entry_answers_the_same_however_often_it_is_reused(dense, mlx_thread, reuses):
    async with serving(dense, mlx_thread) as scheduler:
        cold = await collect(scheduler, generation(prompt(1), False))
        await collect(scheduler, generation(prompt(1), True))
        for _ in range(reuses):
            warm = await collect(scheduler, generation(prompt(1), True))
    assert warm.cached == 112
    assert_same(warm, cold)


async def test_a_conversation_reuses_what_was_generated(dense, mlx_thread):
    async with serving(dense, mlx_thread) as scheduler:
        history = prompt(1, 40)
        for turn in range(4):
            cold = await collect(scheduler, generation(history, False, max_tokens=20))
            warm = await collect(scheduler, generation(history, True, max_tokens=20))
            assert_same(warm, cold)
            if turn:
                assert warm.cached >= len(history) - 10 - 16
            history = history + warm.tokens + prompt(100 + turn, 10)


async def test_two_that_adopt_the_same_entry_at_once_leave_it_unchanged(dense, mlx_thread):
    async with serving(dense, mlx_thread) as scheduler:
        stem = prompt(1, 96)
        await collect(scheduler, generation(stem, True))
        forks = [stem + prompt(seed, 24) for seed in (2, 3)]
        cold = [await collect(scheduler, generation(fork, False)) for fork in forks]
        for _ in range(2):
            warm = await asyncio.gather(*(collect(scheduler, generation(fork, True)) for fork in forks))
            for ours, twin in zip(warm, cold, strict=True):
                assert ours.cached >= 80
                assert_same(ours, twin)


async def test_what_was_generated_beside_others_of_other_lengths_can_be_reused(dense, mlx_thread):
    async with serving(dense, mlx_thread) as scheduler:
        prompts = [prompt(seed, n) for seed, n in ((1, 150), (2, 20), (3, 75), (4, 33))]
        first = await asyncio.gather(
            *(collect(scheduler, generation(p, True, max_tokens=20 + 9 * i)) for i, p in enumerate(prompts))
        )
        followups = [p + r.tokens + prompt(60 + i, 12) for i, (p, r) in enumerate(zip(prompts, first, strict=True))]
        cold = [await collect(scheduler, generation(f, False)) for f in followups]
        warm = await asyncio.gather(*(collect(scheduler, generation(f, True)) for f in followups))
    for ours, twin, length in zip(warm, cold, (170, 49, 113, 80), strict=True):
        assert ours.cached == length - length % 16
        assert_same(ours, twin)


async def test_a_segment_that_was_cut_several_times_still_holds_the_right_rows(dense, mlx_thread):
    async with serving(dense, mlx_thread) as scheduler:
        await collect(scheduler, generation(prompt(1), True))
        for seed, shared in ((2, 70), (3, 100), (4, 35), (5, 90), (6, 119)):
            ours = prompt(1)[:shared] + prompt(seed)[shared:]
            cold = await collect(scheduler, generation(ours, False))
            warm = await collect(scheduler, generation(ours, True))
            assert warm.cached == shared - shared % 16
            assert_same(warm, cold)


async def test_cache_prompt_false_neither_reads_nor_writes(dense, mlx_thread):
    async with serving(dense, mlx_thread) as scheduler:
        await collect(scheduler, generation(prompt(1), False))
        assert scheduler.reuse.store.num_entries == scheduler.reuse.store.totals.lookups == 0
        await collect(scheduler, generation(prompt(1), True))
        before = scheduler.reuse.store.stats()
        cold = await collect(scheduler, generation(prompt(1), False))
        assert cold.cached == 0 and scheduler.reuse.store.stats() == before


@pytest.mark.parametrize("family", COLD)
async def test_a_family_whose_state_is_not_plain_kv_is_served_cold_and_right(family, mlx_thread):
    model = mlx_thread.submit(tiny_model, family).result()
    assert model.layout is None
    async with serving(model, mlx_thread) as scheduler:
        alone = [await collect(scheduler, generation(prompt(s, n), True)) for s, n in ((1, 120), (2, 30), (3, 75))]
        again = await asyncio.gather(
            *(collect(scheduler, generation(prompt(s, n), True)) for s, n in ((1, 120), (2, 30), (3, 75)))
        )
        assert scheduler.reuse.store.num_entries == 0
    for one, other in zip(again, alone, strict=True):
        assert one.cached == 0
        assert_same(one, other)


@pytest.mark.parametrize("family", ["gemma2", "llama4"])
def test_a_family_whose_batched_decode_is_wrong_is_found_out_at_load(family, mlx_thread):
    assert not mlx_thread.submit(tiny_model, family).result().proven.batches


@pytest.mark.parametrize("family", ["llama", "qwen3", "deepseek_v3", "mamba2", "qwen3_next", "gemma3_text"])
def test_a_family_whose_batched_decode_is_right_is_batched(family, mlx_thread):
    assert mlx_thread.submit(tiny_model, family).result().proven.batches


async def test_one_seed_gives_one_text_alone_in_a_batch_cold_and_warm(mlx_thread):
    model = mlx_thread.submit(tiny_model, "llama").result()
    seeded = Sampling(temperature=1.0, top_k=40, top_p=0.95, min_p=0.05, seed=7)
    async with serving(model, mlx_thread) as scheduler:
        alone = await collect(scheduler, generation(prompt(1), False, 16, seeded))
        noise = [generation(prompt(9, 50), False, 16, Sampling(temperature=1.5, seed=s)) for s in range(3)]
        beside, *others = await asyncio.gather(
            *(collect(scheduler, g) for g in [generation(prompt(1), True, 16, seeded), *noise])
        )
        warm = await collect(scheduler, generation(prompt(1), True, 16, seeded))
    assert alone.tokens == beside.tokens == warm.tokens and warm.cached > 0
    assert len({bytes(o.tokens) for o in others}) == 3


async def test_bytes_in_the_store_are_those_of_its_arrays(mlx_thread):
    model = mlx_thread.submit(tiny_model, "llama").result()
    async with serving(model, mlx_thread) as scheduler:
        await collect(scheduler, generation(prompt(1), True, max_tokens=8))
        assert scheduler.reuse.store.nbytes == 128 * model.layout.bytes_per_token


@pytest.mark.parametrize(
    ("config", "boundary"),
    [
        ({"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 4096}, 4096),
        ({"rope_scaling": {"rope_type": "su"}, "original_max_position_embeddings": 128}, 128),
        ({"rope_scaling": {"rope_type": "llama3"}, "original_max_position_embeddings": 8192}, None),
        ({"rope_scaling": None}, None),
        ({}, None),
    ],
)
def test_only_longrope_models_have_a_boundary_between_two_tables(config, boundary, mlx_thread):
    assert replace(mlx_thread.submit(tiny_model, "llama").result(), config=config).rope_boundary == boundary
