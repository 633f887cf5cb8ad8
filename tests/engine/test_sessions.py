"""Snapshots must never change an answer: turns of a conversation against their cold twins, on real tiny models.

A turn is history, a new user message and a generation prompt of three tokens. The next turn's history holds the reply
and, as chat templates have it, no generation prompt.
"""

import asyncio
import random
from array import array
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import mlx.core as mx
import pytest

from mlxcel.cache.limits import SnapshotLimits
from mlxcel.cache.lookup import MissReason
from mlxcel.cache.snapshots import SnapshotStore
from mlxcel.engine.batch import Engine
from mlxcel.engine.reuse import SnapshotReuse, Trace
from mlxcel.engine.sequence import Generation
from mlxcel.engine.warmup import Warmups
from tests.engine.test_reuse import assert_same, prompt
from tests.harness import BOUNDS, CONTEXT, GREEDY, collect, scheduling
from tests.tiny import tiny_model

STATEFUL = ("gemma3_text", "llama4", "mamba2", "qwen3_next", "lfm2")
WINDOWED = ("gemma3_text", "llama4")
RECURRENT = ("mamba2", "qwen3_next", "lfm2")
SCAFFOLD = array("i", [251, 252, 253])
MINE = replace(CONTEXT, session_key="mine")


@pytest.fixture(scope="module")
def mlx_thread():
    with ThreadPoolExecutor(1) as pool:
        yield pool
        pool.submit(mx.clear_streams).result()


@pytest.fixture(params=STATEFUL)
def model(request, mlx_thread):
    return mlx_thread.submit(tiny_model, request.param).result()


def serving(model, thread, *, store=None, warmups=False, boundaries=True, **bounds):
    store = store or SnapshotStore(SnapshotLimits(min_prefix=8))
    return scheduling(
        Engine(model),
        model.tokenizer,
        reuse=SnapshotReuse(store, boundaries, Trace(loud=False)),
        warmups=Warmups(store) if warmups else None,
        bounds=replace(BOUNDS, **bounds),
        executor=thread,
    )


def asking(history: array, user: array, context=MINE, max_tokens: int = 8) -> Generation:
    tokens = history + user + SCAFFOLD
    return Generation(
        tokens, GREEDY, max_tokens, ignore_eos=True, top_logprobs=3, cache=context, boundary=len(tokens) - len(SCAFFOLD)
    )


@dataclass
class Conversation:
    scheduler: object
    context: object = MINE
    history: array = field(default_factory=lambda: array("i"))

    async def turn(self, user: array, max_tokens: int = 8):
        """The reply and its cold twin, which must be the same."""
        generation = asking(self.history, user, self.context, max_tokens)
        cold = await collect(self.scheduler, replace(generation, cache=None))
        warm = await collect(self.scheduler, generation)
        assert cold.cached == 0
        assert_same(warm, cold)
        self.history = self.history + user + warm.tokens
        return warm


async def test_each_turn_takes_up_the_boundary_of_the_turn_before(model, mlx_thread):
    async with serving(model, mlx_thread) as scheduler:
        chat, ends = Conversation(scheduler), []
        for turn, length in enumerate((30, 10, 70, 12)):
            reply = await chat.turn(prompt(turn, length))
            assert reply.cached == (ends[-1] if ends else 0)
            ends.append(len(chat.history) - len(reply.tokens))


async def test_the_same_beside_others(model, mlx_thread):
    async with serving(model, mlx_thread) as scheduler:
        chats = [Conversation(scheduler, replace(MINE, session_key=f"s{i}")) for i in range(3)]
        for turn in range(3):
            replies = await asyncio.gather(
                *(chat.turn(prompt(10 * i + turn, 20 + 25 * i), 6 + i) for i, chat in enumerate(chats))
            )
            assert all((reply.cached > 0) == (turn > 0) for reply in replies)


async def test_raw_prompts_that_grow_take_up_what_was_generated(model, mlx_thread):
    async with serving(model, mlx_thread) as scheduler:
        tokens = prompt(1, 90)
        for turn in range(3):
            generation = Generation(tokens, GREEDY, 8, ignore_eos=True, top_logprobs=3, cache=MINE)
            cold = await collect(scheduler, replace(generation, cache=None))
            warm = await collect(scheduler, generation)
            assert_same(warm, cold)
            assert warm.cached == (len(tokens) - 10 if turn else 0)
            tokens = tokens + warm.tokens + prompt(50 + turn, 10)


async def test_the_same_turn_again_and_again(model, mlx_thread):
    async with serving(model, mlx_thread) as scheduler:
        generation = asking(prompt(1, 70), prompt(2, 20))
        cold = await collect(scheduler, replace(generation, cache=None))
        for again in range(4):
            warm = await collect(scheduler, generation)
            assert_same(warm, cold)
            assert warm.cached == (90 if again else 0)


@pytest.mark.parametrize("length", [1, 2, 9, 10])
async def test_a_prompt_of_hardly_any_token(model, mlx_thread, length):
    async with serving(model, mlx_thread) as scheduler:
        generation = Generation(
            prompt(3, length), GREEDY, 4, ignore_eos=True, top_logprobs=3, cache=MINE, boundary=length - 1
        )
        cold = await collect(scheduler, replace(generation, cache=None))
        for _ in range(2):
            assert_same(await collect(scheduler, generation), cold)


@pytest.mark.parametrize("family", WINDOWED)
@pytest.mark.parametrize(("stored", "shared"), [(40, 25), (63, 62), (64, 30)])
async def test_a_window_that_has_not_wrapped_lends_the_common_part(family, stored, shared, mlx_thread):
    model = mlx_thread.submit(tiny_model, family).result()
    async with serving(model, mlx_thread) as scheduler:
        await collect(scheduler, asking(array("i"), prompt(1, stored), max_tokens=0))
        generation = asking(prompt(1, stored)[:shared], prompt(2, 30))
        cold = await collect(scheduler, replace(generation, cache=None))
        warm = await collect(scheduler, generation)
    assert warm.cached == shared
    assert_same(warm, cold)


@pytest.mark.parametrize(
    ("families", "reason"), [(WINDOWED, MissReason.WRAPPED_WINDOW), (RECURRENT, MissReason.CANNOT_TRUNCATE)]
)
async def test_an_edited_history_is_refused_by_its_reason(families, reason, mlx_thread):
    for family in families:
        model = mlx_thread.submit(tiny_model, family).result()
        async with serving(model, mlx_thread) as scheduler:
            chat = Conversation(scheduler)
            await chat.turn(prompt(1, 100))
            edited = Conversation(scheduler, history=chat.history[:60] + prompt(9, 40))
            reply = await edited.turn(prompt(2, 10))
            store = scheduler.reuse.store
            assert reply.cached == 0
            assert store.totals.misses == {MissReason.EMPTY: 1, reason: 1}


async def test_another_session_and_another_salt_share_nothing(model, mlx_thread):
    async with serving(model, mlx_thread) as scheduler:
        await Conversation(scheduler).turn(prompt(1, 80))
        for context, reason in (
            (replace(MINE, session_key="yours"), MissReason.OTHER_SESSION),
            (replace(MINE, salt="other"), MissReason.EMPTY),
        ):
            reply = await Conversation(scheduler, context).turn(prompt(1, 80))
            assert reply.cached == 0
            assert scheduler.reuse.store.totals.misses[reason] >= 1


async def test_a_lent_snapshot_is_never_written(model, mlx_thread):
    async with serving(model, mlx_thread) as scheduler:
        chat = Conversation(scheduler)
        await chat.turn(prompt(1, 80))
        await chat.turn(prompt(2, 20))
        store = scheduler.reuse.store
        before = {s.digest: _sums(s) for s in store}
        forks = [Conversation(scheduler, history=chat.history[:]) for _ in range(2)]
        replies = await asyncio.gather(*(fork.turn(prompt(60 + i, 30)) for i, fork in enumerate(forks)))
        assert all(reply.cached > 0 for reply in replies)
        assert all(_sums(s) == before[s.digest] for s in store if s.digest in before)


def _sums(snapshot):
    arrays = [a for leaf in snapshot.payload.leaves for a in leaf.arrays if a is not None]
    return [bytes(memoryview(a)) if a.size else b"" for a in arrays]


async def test_bytes_are_those_of_the_arrays_and_a_session_holds_two_snapshots(model, mlx_thread):
    async with serving(model, mlx_thread) as scheduler:
        chat, store = Conversation(scheduler), scheduler.reuse.store
        for turn in range(5):
            await chat.turn(prompt(turn, 30))
            held = [a for s in store for leaf in s.payload.leaves for a in leaf.arrays if a is not None]
            ids = sum(4 * s.num_tokens for s in store)
            assert store.nbytes == sum(a.nbytes for a in held) + ids
            assert sorted(s.origin for s in store) == ["boundary", "completion"]
        assert store.totals.supersedes == 8, "four turns replaced a boundary and the completion that led nowhere"


async def test_a_cancelled_reply_is_not_stored_as_a_completion(model, mlx_thread):
    async with serving(model, mlx_thread) as scheduler:
        sequence = scheduler.submit(asking(prompt(1, 60), prompt(2, 20), max_tokens=2000))
        async for _ in sequence.events():
            if sequence.tokens:
                break
        scheduler.cancel(sequence)
        again = await collect(scheduler, asking(prompt(1, 60), prompt(2, 20)))
        cold = await collect(scheduler, replace(asking(prompt(1, 60), prompt(2, 20)), cache=None))
        assert again.cached == 80
        assert_same(again, cold)


async def test_the_next_turn_is_warmed_up_while_nobody_waits(model, mlx_thread):
    async with serving(model, mlx_thread, warmups=True) as scheduler:
        chat, store = Conversation(scheduler), scheduler.reuse.store
        await chat.turn(prompt(1, 80), max_tokens=40)
        scheduler.warm(MINE, chat.history[:])
        async with asyncio.timeout(20):
            while not store.totals.warmups_run:
                await asyncio.sleep(0.001)
        expected = len(chat.history)
        reply = await chat.turn(prompt(2, 10))
        assert reply.cached == expected
        assert store.totals.hits == 1, "a warm-up is no request"


async def test_a_warm_up_gives_way_to_a_request_and_to_the_turn_that_overtakes_it(model, mlx_thread):
    async with serving(model, mlx_thread, warmups=True, chunk=8, latency=1e-9) as scheduler:
        chat, store = Conversation(scheduler), scheduler.reuse.store
        await chat.turn(prompt(1, 80), max_tokens=60)
        scheduler.warm(MINE, chat.history[:])
        reply = await chat.turn(prompt(2, 10))
        assert reply.cached >= 80
        async with asyncio.timeout(20):
            while not store.totals.warmups_skipped + store.totals.warmups_run:
                await asyncio.sleep(0.001)
        await chat.turn(prompt(3, 10))


async def test_without_boundaries_only_the_completion_is_stored(model, mlx_thread):
    async with serving(model, mlx_thread, boundaries=False) as scheduler:
        await Conversation(scheduler).turn(prompt(1, 80))
        assert [s.origin for s in scheduler.reuse.store] == ["completion"]


async def test_random_edits_of_histories_never_change_an_answer(model, mlx_thread):
    """Insert, delete, change, swap, fork, other session: what is refused is cold, what is lent is right."""
    rng = random.Random(7)
    async with serving(model, mlx_thread) as scheduler:
        chats = [Conversation(scheduler, replace(MINE, session_key=f"s{i}")) for i in range(3)]
        for step in range(100):
            chat = rng.choice(chats)
            cut = rng.randrange(len(chat.history) + 1)
            match rng.randrange(6):
                case 0:
                    chat.history = chat.history[:cut]
                case 1:
                    chat.history = chat.history[:cut] + prompt(step, 5) + chat.history[cut:]
                case 2:
                    chat.history = chat.history[cut:] + chat.history[:cut]
                case 3:
                    chat.context = rng.choice(chats).context
            if len(chat.history) > 300:
                chat.history = array("i")
            await chat.turn(prompt(100 + step, rng.randrange(1, 60)), max_tokens=rng.randrange(1, 12))
        totals = scheduler.reuse.store.totals
        assert totals.hits + sum(totals.misses.values()) == totals.lookups == 100
        assert totals.hits > 0
