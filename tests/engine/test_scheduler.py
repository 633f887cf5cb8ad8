"""The scheduler over a scripted engine: order, sharing, ends, cancels, failures. No model, no sleeps."""

import asyncio
import itertools
from array import array
from dataclasses import replace

import pytest

from mlxcel.cache.limits import Limits
from mlxcel.engine.health import MAX_FAILED_STEPS, EngineFailed
from mlxcel.engine.sequence import Delta, Failed, Finished, Generation
from mlxcel.errors import ContextExceeded, InvalidRequest, Unavailable
from tests.harness import BOUNDS, CONTEXT, GREEDY, collect, scheduling
from tests.scripted import ScriptedEngine
from tests.segments import BYTES_PER_TOKEN, tokens
from tests.tiny import EOS, byte_tokenizer

TOKENIZER = byte_tokenizer()
POISON = 251  # a token that nothing else is made of


def encode(text: str) -> array:
    return TOKENIZER.encode(text, add_special=False)


def run(n: int, first: int = 0) -> array:
    return array("i", [(first + i) % 250 for i in range(n)])


def saying(text: str, eos: bool = True) -> ScriptedEngine:
    return ScriptedEngine(lambda prompt: [*encode(text), *([EOS] if eos else [])], filler=encode("x")[0])


def generation(prompt: array, max_tokens: int | None = 8, **fields) -> Generation:
    return Generation(prompt, GREEDY, max_tokens, cache=fields.pop("cache", CONTEXT), **fields)


def serving(engine, limits=Limits(), **bounds):  # noqa: B008
    return scheduling(
        engine, TOKENIZER, bounds=replace(BOUNDS, **bounds), limits=limits, bytes_per_token=BYTES_PER_TOKEN
    )


# --- ends


@pytest.mark.parametrize(
    ("script", "fields", "text", "stop_type", "num"),
    [
        ("hello", {}, "hello", "eos", 6),
        ("", {}, "", "eos", 1),
        ("hello", {"max_tokens": 3}, "hel", "limit", 3),
        ("hello", {"max_tokens": 0}, "", "limit", 0),
        ("hello", {"stop": ("ll",)}, "he", "word", 4),
        ("hello", {"stop": ("hello world",)}, "hello", "eos", 6),
        ("hello", {"max_tokens": 4, "stop": ("low",)}, "hell", "limit", 4),
        ("héllo", {"max_tokens": 2}, "h\ufffd", "limit", 2),
        ("a\n  b\nc", {"least_indent": 2}, "a\n  b\n", "limit", 7),
        ("a\n  b\n  c", {"least_indent": 2}, "a\n  b\n  c", "eos", 10),
    ],
)
async def test_each_way_to_end(script, fields, text, stop_type, num):
    async with serving(saying(script)) as scheduler:
        result = await collect(scheduler, generation(run(50), **{"max_tokens": 20} | fields))
    assert result.text == text
    assert (result.end.stop_type, result.end.completion_tokens, result.end.truncated) == (stop_type, num, False)


async def test_a_time_limit_ends_a_generation_with_its_next_line_only():
    ticks = itertools.count()  # a second passes whenever the time is asked for
    for max_ms, text in ((1, "ab\n"), (0, "ab\ncd\n"), (10**9, "ab\ncd\n")):
        clocked = scheduling(saying("ab\ncd\n"), TOKENIZER, bytes_per_token=BYTES_PER_TOKEN, clock=lambda: next(ticks))
        async with clocked as scheduler:
            result = await collect(scheduler, generation(run(50), max_tokens=20, max_ms=max_ms))
        assert result.text == text
        assert (result.end.stop_type, result.end.truncated) == ("limit" if max_ms == 1 else "eos", False)


async def test_progress_begins_with_what_was_adopted_and_ends_with_the_whole_prompt():
    async with serving(saying("x")) as scheduler:
        for cached in (0, 192):
            progress = (await collect(scheduler, generation(run(200)))).progress
            assert [p.processed for p in progress] == sorted(p.processed for p in progress)
            assert {(p.total, p.cached) for p in progress} == {(200, cached)}
            assert (progress[0].processed, progress[-1].processed) == (cached, 200)


async def test_the_context_ends_a_generation_as_truncated():
    async with serving(saying("hello", eos=False), n_ctx=60) as scheduler:
        result = await collect(scheduler, generation(run(50), max_tokens=None))
    assert (result.end.stop_type, result.end.completion_tokens, result.end.truncated) == ("limit", 10, True)


@pytest.mark.parametrize("n", [60, 61, 1000])
async def test_a_prompt_that_leaves_no_room_is_refused_with_both_numbers(n):
    async with serving(saying("x"), n_ctx=60) as scheduler:
        with pytest.raises(ContextExceeded) as refused:
            scheduler.submit(generation(run(n)))
        assert (await collect(scheduler, generation(run(59)))).end.completion_tokens == 1
    assert refused.value.extra == {"n_prompt_tokens": n, "n_ctx": 60}


async def test_an_empty_prompt_is_refused():
    async with serving(saying("x")) as scheduler:
        with pytest.raises(InvalidRequest, match="empty"):
            scheduler.submit(generation(array("i")))


# --- sharing


async def test_eight_at_once_over_one_system_prompt_cost_one_prefill_of_it():
    engine = saying("ok")
    system = run(1000)
    async with serving(engine, chunk=256) as scheduler:
        await asyncio.gather(*(collect(scheduler, generation(system + run(20, 7 * i))) for i in range(8)))
    assert engine.num_prefilled <= 1019 + 7 * (19 + 16 + 8), "the other seven prefill their own part and a block"


async def test_fifty_conversations_hold_their_system_prompt_once():
    system = run(1000)
    async with serving(saying("ok")) as scheduler:
        for i in range(50):
            await collect(scheduler, generation(system + array("i", [i, 251, i, 252]) * 5))
        held = scheduler.reuse.store.nbytes // BYTES_PER_TOKEN
    assert 1000 + 50 * 20 < held <= 1000 + 50 * (20 + 3)


async def test_a_sequence_that_waits_for_a_prefix_takes_over_when_its_maker_is_cancelled():
    engine = saying("ok")
    async with serving(engine, chunk=64) as scheduler:
        engine.gate.clear()
        first = scheduler.submit(generation(run(1000)))
        second = asyncio.create_task(collect(scheduler, generation(run(1000) + run(5, 99))))
        while not engine.plans and first.state != "prefilling":
            await asyncio.sleep(0)
        scheduler.cancel(first)
        engine.gate.set()
        result = await second
    assert isinstance(result.end, Finished)
    assert scheduler.totals.cancelled == 1


async def test_an_immediate_resend_hits_because_the_donation_comes_before_the_end():
    async with serving(saying("a longer answer")) as scheduler:
        first = await collect(scheduler, generation(run(100), max_tokens=30))
        again = await collect(scheduler, generation(run(100) + first.tokens + tokens(EOS) + run(10, 50)))
    assert again.cached == (100 + first.end.completion_tokens) // 16 * 16


async def test_what_a_sequence_of_another_salt_prefills_is_not_waited_for():
    engine = saying("ok")
    async with serving(engine, chunk=64) as scheduler:
        salted = replace(CONTEXT, salt="tenant")
        results = await asyncio.gather(
            collect(scheduler, generation(run(500))), collect(scheduler, generation(run(500), cache=salted))
        )
    assert [r.cached for r in results] == [0, 0] and engine.num_prefilled == 2 * 499


async def test_a_short_prompt_overtakes_a_long_one():
    engine = saying("ok")
    ends = []
    async with serving(engine, chunk=64) as scheduler:

        async def ended(name, g):
            await collect(scheduler, g)
            ends.append(name)

        await asyncio.gather(ended("long", generation(run(3000))), ended("short", generation(run(40, 100))))
    assert ends == ["short", "long"]


async def test_a_long_prefill_lets_a_running_sequence_decode_between_its_chunks():
    engine = saying("", eos=False)
    async with serving(engine, chunk=512, latency=0.1) as scheduler:
        running = scheduler.submit(generation(run(40), max_tokens=200))
        events = running.events()
        while not isinstance(await anext(events), Delta):
            pass
        await collect(scheduler, generation(run(3000, 100), max_tokens=1))
        scheduler.cancel(running)
    mixed = [p for p in engine.plans if p.prefills and p.decode]
    # the scripted engine reports a millisecond a token: 100 ms are 96 tokens
    assert max(len(p.tokens) for plan in mixed[2:] for p in plan.prefills) == 96
    assert sum(len(p.tokens) for plan in mixed for p in plan.prefills) >= 2900


async def test_kv_of_the_two_rope_tables_is_never_mixed():
    def asking(prompt):
        return replace(generation(prompt), cache=replace(CONTEXT, rope_regime=int(len(prompt) > 100)))

    async with serving(saying("ok"), rope_boundary=100) as scheduler:
        assert (await collect(scheduler, asking(run(99)))).cached == 0
        assert [e.num_tokens for e in scheduler.reuse.store._entries] == [98], "its end lies beyond the boundary"
        assert (await collect(scheduler, asking(run(120)))).cached == 0
        assert (await collect(scheduler, asking(run(99)))).cached == 96
        assert (await collect(scheduler, asking(run(120)))).cached == 112


@pytest.mark.parametrize("continuous", [True, False])
async def test_without_continuous_batching_a_request_joins_only_while_no_reply_is_running(continuous):
    engine = saying("", eos=False)
    async with serving(engine, continuous=continuous) as scheduler:
        first = scheduler.submit(generation(run(50), max_tokens=50))
        while not first.tokens:
            await asyncio.sleep(0)
        others = [asyncio.create_task(collect(scheduler, generation(run(60, 9)))) for _ in range(3)]
        await asyncio.gather(*others)
    began = {s.id: at for at, plan in enumerate(engine.plans) for s in plan.start}
    left = {r.id: at for at, plan in enumerate(engine.plans) for r in plan.retire}
    firsts = [at for id, at in began.items() if id != first.id]
    assert (min(firsts) < left[first.id]) is continuous
    assert max(firsts) < min(at for id, at in left.items() if id != first.id), "those who waited run together"


# --- leaving early


@pytest.mark.parametrize("when", ["waiting", "prefilling", "running"])
async def test_a_cancelled_sequence_frees_its_slot_and_its_neighbour_is_untouched(when):
    engine = saying("", eos=False)
    async with serving(engine, num_slots=1 if when == "waiting" else 2, chunk=64) as scheduler:
        neighbour = asyncio.create_task(collect(scheduler, generation(run(100), max_tokens=50)))
        await asyncio.sleep(0)
        ours = scheduler.submit(generation(run(2000, 100), max_tokens=1000))
        while ours.state != when:
            await asyncio.sleep(0)
        scheduler.cancel(ours)
        scheduler.cancel(ours)
        result = await neighbour
        assert result.text == "x" * 50
        while scheduler.num_active:
            await asyncio.sleep(0)
    assert scheduler.totals.cancelled == 1 and scheduler.totals.completed == 1


async def test_a_sequence_cancelled_while_running_leaves_what_it_computed():
    async with serving(saying("", eos=False)) as scheduler:
        ours = scheduler.submit(generation(run(100), max_tokens=1000))
        while len(ours.tokens) < 20:
            await asyncio.sleep(0)
        scheduler.cancel(ours)
        while scheduler.num_active:
            await asyncio.sleep(0)
        (entry,) = scheduler.reuse.store._entries
        assert entry.num_tokens == 100 + len(ours.tokens)


async def test_a_full_queue_refuses_at_once_and_a_cancel_makes_room():
    engine = saying("ok")
    async with serving(engine, num_slots=1, max_queue=2) as scheduler:
        engine.gate.clear()
        first = [scheduler.submit(generation(run(50, i))) for i in range(3)]
        with pytest.raises(Unavailable) as refused:
            scheduler.submit(generation(run(50)))
        assert refused.value.retry_after
        scheduler.cancel(first[2])
        engine.gate.set()
        while scheduler.num_waiting > 1:
            await asyncio.sleep(0)
        await collect(scheduler, generation(run(50)))


# --- failures


async def test_a_failed_prefill_fails_that_sequence_alone():
    engine = saying("", eos=False)
    async with serving(engine) as scheduler:
        neighbour = scheduler.submit(generation(run(50), max_tokens=40))
        while not neighbour.tokens:
            await asyncio.sleep(0)
        engine.faults["prefill"] = RuntimeError("out of memory")
        failed = await collect(scheduler, generation(run(80, 9)))
        engine.faults.clear()
        assert isinstance(failed.end, Failed) and failed.end.error.status == 500
        assert "out of memory" not in failed.end.error.message, "the cause is for the log, not for the client"
        while neighbour.state != "finished":
            await asyncio.sleep(0)
        assert len(neighbour.tokens) == 40
        assert isinstance((await collect(scheduler, generation(run(80, 9)))).end, Finished)


async def test_a_failed_decode_fails_its_batch_and_the_next_request_works():
    engine = saying("ok")
    async with serving(engine) as scheduler:
        engine.faults["decode"] = RuntimeError("kernel failed")
        results = await asyncio.gather(*(collect(scheduler, generation(run(50, i))) for i in range(3)))
        engine.faults.clear()
        assert all(isinstance(r.end, Failed) for r in results)
        assert (await collect(scheduler, generation(run(50)))).text == "ok"


@pytest.mark.parametrize("what", ["prefill", "decode"])
async def test_an_engine_that_fails_whatever_runs_ends_the_loop_and_answers_everybody(what):
    engine = saying("ok")
    engine.faults[what] = RuntimeError("kernel failed")
    with pytest.raises(EngineFailed, match="kernel failed"):
        async with serving(engine, num_slots=1) as scheduler:
            results = await asyncio.gather(*(collect(scheduler, generation(run(50, i))) for i in range(12)))
            assert all(isinstance(r.end, Failed) for r in results)
            with pytest.raises(Unavailable):
                scheduler.submit(generation(run(50)))


async def test_a_request_that_fails_however_often_ends_nobody_but_itself():
    engine = saying("ok")
    engine.poison = POISON
    async with serving(engine, num_slots=1) as scheduler:
        for _ in range(3 * MAX_FAILED_STEPS):
            assert isinstance((await collect(scheduler, generation(run(50) + tokens(POISON) * 2))).end, Failed)
        assert (await collect(scheduler, generation(run(50)))).text == "ok"


async def test_nor_does_it_beside_somebody_whose_prefill_takes_longer():
    engine = saying("ok")
    engine.poison = POISON
    async with serving(engine, chunk=64) as scheduler:
        neighbour = asyncio.create_task(collect(scheduler, generation(run(4000))))
        poisonous = [generation(tokens(*[POISON] * (5 + i))) for i in range(3 * MAX_FAILED_STEPS)]
        failed = [await collect(scheduler, g) for g in poisonous]
        assert not neighbour.done(), "it was prefilling all the time"
        assert all(isinstance(r.end, Failed) for r in failed) and (await neighbour).text == "ok"


@pytest.mark.parametrize("fields", [{"slot": "no number"}, {"cache": "no context"}])
async def test_what_fails_while_it_is_admitted_fails_alone_and_frees_its_slot(fields):
    async with serving(saying("ok"), num_slots=1) as scheduler:
        await collect(scheduler, generation(run(50)))
        ends = await asyncio.gather(
            collect(scheduler, generation(run(60), **fields)), collect(scheduler, generation(run(60)))
        )
    assert [type(r.end) for r in ends] == [Failed, Finished]
    assert ends[0].end.error.status == 500
    assert (scheduler.totals.failed, scheduler.totals.completed) == (1, 2)


async def test_what_cannot_be_stored_is_answered_all_the_same():
    async with serving(saying("ok")) as scheduler:
        for _ in range(2):
            unnamed = replace(CONTEXT, session_key=["no text"])  # so it has no digest
            result = await collect(scheduler, generation(run(50), cache=unnamed))
            assert result.text == "ok" and result.cached == 0
        assert scheduler.reuse.store.num_entries == 0


async def test_draining_lets_the_running_finish_and_refuses_the_new():
    async with serving(saying("hello")) as scheduler:
        ours = asyncio.create_task(collect(scheduler, generation(run(50))))
        await asyncio.sleep(0)
        await scheduler.drain(10)
        assert (await ours).text == "hello"
        with pytest.raises(Unavailable):
            scheduler.submit(generation(run(50)))


async def test_draining_fails_what_does_not_finish_in_time():
    async with serving(saying("", eos=False)) as scheduler:
        ours = asyncio.create_task(collect(scheduler, generation(run(50), max_tokens=4000)))
        await asyncio.sleep(0)
        await scheduler.drain(0)
        assert isinstance((await ours).end, Failed)


async def test_log_probabilities_come_with_the_tokens_whose_text_they_complete():
    async with serving(saying("héé")) as scheduler:
        result = await collect(scheduler, generation(run(50), top_logprobs=2))
    assert [entry.token for entry in result.logprobs] == list(encode("héé")) == list(result.tokens)
    assert all(len(entry.top) == 2 for entry in result.logprobs)
