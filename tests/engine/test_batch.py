"""One step of the real engine on a tiny model: who fails, fails alone."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import mlx.core as mx
import pytest

from mlxcel.engine.batch import Engine
from mlxcel.engine.grammar import Grammar
from mlxcel.engine.plan import Plan, Prefill, Start
from tests.engine.test_reuse import prompt
from tests.harness import GREEDY
from tests.tiny import tiny_model

UNUSABLE = Grammar("grammar", "root ::= x", None)


@pytest.fixture(scope="module")
def mlx_thread():
    with ThreadPoolExecutor(1) as pool:
        yield pool
        pool.submit(mx.clear_streams).result()


def joined(model, *bad: int) -> tuple[dict[int, list[int]], set[int]]:
    """The tokens of four sequences that join in one step, by id, and who failed; the `bad` cannot join."""
    engine, tokens = Engine(model), {}
    asked = {id: prompt(id, 20 + id) for id in range(1, 5)}
    plan = Plan(
        prefills=tuple(Prefill(id, text[:-1]) for id, text in asked.items()),
        start=tuple(Start(id, text, GREEDY, None, UNUSABLE if id in bad else None) for id, text in asked.items()),
        decode=True,
    )
    first = engine.step(plan)
    for outcome in (first, *(engine.step(Plan(decode=True)) for _ in range(5))):
        for id, token, _ in outcome.tokens:
            tokens.setdefault(id, []).append(token)
    return tokens, set(first.failed)


@pytest.mark.parametrize("batches", [True, False])
def test_one_that_cannot_join_fails_alone(mlx_thread, batches):
    model = mlx_thread.submit(tiny_model, "llama").result()
    model = replace(model, proven=replace(model.proven, batches=batches))
    whole, failed = mlx_thread.submit(joined, model).result()
    assert failed == set() and set(whole) == {1, 2, 3, 4}
    for bad in ({1}, {3}, {2, 4}, {1, 2, 3, 4}):
        tokens, failed = mlx_thread.submit(joined, model, *bad).result()
        assert failed == bad
        assert tokens == {id: said for id, said in whole.items() if id not in bad}
