"""The first run, sleep and waking, on a real model in a file."""

import asyncio
import logging
import weakref
from array import array
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from mlxcel.cache.key import CacheContext
from mlxcel.cache.limits import Limits
from mlxcel.cache.store import Store
from mlxcel.engine.bounds import Bounds
from mlxcel.engine.embedding import embed
from mlxcel.engine.lifecycle import Sleeper, run_once, sleep_when_idle
from mlxcel.engine.model import load_model
from mlxcel.engine.plan import Plan, Prefill, Retire, Start
from mlxcel.engine.reuse import KVReuse, Trace
from mlxcel.engine.scheduler import Scheduler
from mlxcel.engine.sequence import Finished, Generation, Sampling
from mlxcel.errors import ModelError
from tests.engine.tiny_gguf import random_weights, write_gguf

PROMPT = array("i", range(40, 90))
GREEDY = Sampling(temperature=0)


@pytest.fixture
def load(tmp_path):
    """What loads the model; `times` counts."""
    path = write_gguf(tmp_path / "tiny.gguf", "llama", random_weights("llama", tied=False))

    def load():
        load.times += 1
        return load_model(path, dtype="auto", model_id="tiny", self_test=False)

    load.times, load.path = 0, path
    return load


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def generated(engine, length=5):
    """Tokens of one sequence from beginning to end."""
    start = Start(1, PROMPT, GREEDY, None)
    plans = [Plan(prefills=(Prefill(1, PROMPT[:-1]),), start=(start,), decode=True)] + [Plan(decode=True)] * length
    tokens = [token for plan in plans for _, token, _ in engine.step(plan).tokens]
    engine.step(Plan(retire=(Retire(1),)))
    return tokens


def test_a_sleeping_engine_holds_no_network_and_the_next_step_gives_the_same_tokens(load):
    clock = Clock()
    engine = Sleeper(load(), load, clock)
    before = generated(engine)
    net = engine.lend(lambda model: weakref.ref(model.net))
    clock.now = 10
    assert engine.sleep(10) and engine.is_asleep and net() is None
    assert not engine.sleep(10), "it sleeps already"
    assert generated(engine) == before and not engine.is_asleep and load.times == 2


def test_whatever_needs_the_model_wakes_it(load):
    engine = Sleeper(load(), load)
    before = engine.lend(lambda model: embed(model, PROMPT, "mean"))
    assert engine.sleep(0)
    assert engine.lend(lambda model: embed(model, PROMPT, "mean")) == before


def test_it_does_not_sleep_before_its_time_and_every_use_begins_it_anew(load):
    clock = Clock()
    engine = Sleeper(load(), load, clock)
    clock.now = 9
    assert not engine.sleep(10)
    generated(engine)
    clock.now = 18
    assert not engine.sleep(10)
    engine.lend(lambda model: None)
    clock.now = 27
    assert engine.seconds_idle == 9 and not engine.sleep(10)
    clock.now = 28
    assert engine.sleep(10)


def test_what_was_proven_of_the_model_is_known_after_sleep_too(load):
    model = load()
    model = replace(model, proven=replace(model.proven, batches=False))
    engine = Sleeper(model, load)
    engine.sleep(0)
    assert engine.lend(lambda woken: woken.proven) == model.proven


def test_a_model_that_was_changed_meanwhile_is_not_served(load):
    engine = Sleeper(load(), load)
    engine.sleep(0)
    write_gguf(load.path, "qwen3", random_weights("qwen3", tied=False))
    with pytest.raises(ModelError, match="has been changed"):
        generated(engine)


def test_an_engine_may_end_asleep(load):
    pool = ThreadPoolExecutor(1)
    engine = pool.submit(lambda: Sleeper(load(), load)).result()
    pool.submit(engine.sleep, 0).result()
    pool.submit(engine.close).result()
    pool.shutdown()
    assert engine.is_asleep


def test_the_first_run_leaves_nothing_in_flight_and_survives_a_model_that_fails(load, caplog):
    engine = Sleeper(load(), load)
    with caplog.at_level(logging.WARNING):
        run_once(engine)
    assert caplog.text == ""
    assert engine.step(Plan(decode=True)).tokens == []
    broken = Sleeper(replace(load(), net=None), load)
    with caplog.at_level(logging.WARNING):
        run_once(broken)
    assert "the model failed on its first run" in caplog.text


async def test_the_idle_server_sleeps_forgets_and_serves_the_next_request_as_a_cold_one(load):
    pool = ThreadPoolExecutor(1)
    in_pool = lambda *work: asyncio.get_running_loop().run_in_executor(pool, *work)  # noqa: E731
    model = await in_pool(load)
    engine = await in_pool(Sleeper, model, load)
    store = Store(Limits(min_prefix=1))
    bounds = Bounds(num_slots=2, n_ctx=512, max_queue=4, chunk=16, latency=0.1)
    reuse = KVReuse(store, model.layout.bytes_per_token, bounds.rope_regime, Trace(False))
    scheduler = Scheduler(engine, pool, reuse, model.tokenizer, bounds)
    slept = asyncio.Event()

    def forget():
        store.reset()
        slept.set()

    async def ask(tokens):
        context = CacheContext(model_id="tiny", template_sig="none")
        sequence = scheduler.submit(Generation(PROMPT, GREEDY, max_tokens=tokens, ignore_eos=True, cache=context))
        return [e async for e in sequence.events()][-1]

    running = asyncio.create_task(scheduler.run())
    sleeping = asyncio.create_task(sleep_when_idle(engine, scheduler, pool, 0.05, forget))
    async with asyncio.timeout(60):
        end = await ask(300)
        assert isinstance(end, Finished) and load.times == 1, "no sleep while it ran"
        assert store.num_entries
        for wakes in (2, 3):
            await slept.wait()
            assert engine.is_asleep and store.num_entries == 0
            slept.clear()
            end = await ask(3)
            assert isinstance(end, Finished) and end.cached_tokens == 0 and load.times == wakes
        sleeping.cancel()
        await scheduler.drain(1)
        await running
    await in_pool(engine.close)
    pool.shutdown()
