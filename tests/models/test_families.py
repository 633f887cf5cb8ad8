"""Every family of mlx-lm that runs here: reuse never changes an answer, and docs/models.md is true."""

import sys
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import pytest

from tests.models.chats import three_turns
from tests.models.families import RUNNABLE
from tests.models.table import DOC, facts, parse
from tests.tiny import tiny_model


@pytest.fixture(scope="module")
def mlx_thread():
    with ThreadPoolExecutor(1) as pool:
        yield pool
        pool.submit(mx.clear_streams).result()


@pytest.mark.parametrize("family", RUNNABLE)
async def test_three_turns_answer_as_if_cold(family, mlx_thread):
    model = mlx_thread.submit(tiny_model, family).result()
    outcome = await three_turns(model, mlx_thread)
    if model.reuse == "none":
        assert [t.cached for t in outcome.plain + outcome.warmed + outcome.beside] == [0] * 9
        return
    assert all(turn.share >= 0.7 for turn in outcome.plain[1:])
    assert outcome.warmed[1].share >= 0.9 or model.reuse == "kv"


@pytest.mark.parametrize("family", RUNNABLE)
def test_the_table_in_the_docs_says_what_the_self_test_finds(family, mlx_thread):
    if sys.platform == "darwin":
        pytest.skip("the table is that of Linux: on Metal other families may run")
    assert parse(DOC.read_text())[family] == facts(mlx_thread.submit(tiny_model, family).result()), "run: make models"


def test_the_table_holds_nothing_else():
    assert sorted(parse(DOC.read_text())) == RUNNABLE
