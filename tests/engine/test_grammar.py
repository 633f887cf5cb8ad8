"""Constrained output on a tiny random model, which left alone says anything at all."""

import asyncio
import json
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import jsonschema
import mlx.core as mx
import pytest

from mlxcel.engine.grammar import BadGrammar
from mlxcel.engine.sequence import Sampling
from tests.engine.test_reuse import assert_same, generation, prompt, serving
from tests.harness import GREEDY, collect
from tests.schemas import schema
from tests.tiny import tiny_model

INTEGERS = '{"type":"array","items":{"type":"integer","maximum":999},"minItems":9,"maxItems":12}'
WARM = Sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)


@pytest.fixture(scope="module")
def mlx_thread():
    with ThreadPoolExecutor(1) as pool:
        yield pool
        pool.submit(mx.clear_streams).result()


@pytest.fixture(scope="module")
def model(mlx_thread):
    return mlx_thread.submit(tiny_model, "llama").result()


def following(model, kind, text, tokens, sampling=GREEDY, cached=False, max_tokens=400, **fields):
    plain = generation(tokens, cached, max_tokens, sampling)
    return replace(plain, **{"ignore_eos": False, "grammar": model.grammars.compile(kind, text)} | fields)


async def test_every_answer_validates_against_its_schema(model, mlx_thread):
    rng = random.Random(1)
    schemas = [schema(rng, i % 4) for i in range(60)]
    async with serving(model, mlx_thread) as scheduler:
        for i in range(0, len(schemas), 6):
            asked = [
                following(model, "json_schema", json.dumps(s), prompt(i + j, 20), replace(WARM, seed=i + j))
                for j, s in enumerate(schemas[i : i + 6])
            ]
            results = await asyncio.gather(*(collect(scheduler, a) for a in asked))
            for wanted, result in zip(schemas[i : i + 6], results, strict=True):
                assert result.end.stop_type == "eos", (wanted, result.text)
                jsonschema.validate(json.loads(result.text), wanted)


@pytest.mark.parametrize(
    ("grammar", "allowed"),
    [
        ('root ::= "yes" | "no"', {"yes", "no"}),
        ('root ::= ("a" | "b"){3}', {a + b + c for a in "ab" for b in "ab" for c in "ab"}),
        ("root ::= [0-9] [0-9]\n", {f"{i:02}" for i in range(100)}),
        ('root ::= digit "-" digit\ndigit ::= [1-3]', {f"{a}-{b}" for a in "123" for b in "123"}),
    ],
)
async def test_gbnf_leaves_only_its_own_words(model, mlx_thread, grammar, allowed):
    async with serving(model, mlx_thread) as scheduler:
        asked = [following(model, "grammar", grammar, prompt(i, 9), replace(WARM, seed=i)) for i in range(6)]
        results = await asyncio.gather(*(collect(scheduler, a) for a in asked))
    assert {r.text for r in results} <= allowed and all(r.end.stop_type == "eos" for r in results)


async def test_a_row_that_follows_a_grammar_leaves_its_neighbours_alone(model, mlx_thread):
    async with serving(model, mlx_thread) as scheduler:
        free = [generation(prompt(i, 30 + i), False, 30) for i in range(3)]
        alone = [await collect(scheduler, g) for g in free]
        bound = following(
            model,
            "json_schema",
            INTEGERS,
            prompt(9, 20),
        )
        both = await asyncio.gather(*(collect(scheduler, g) for g in [*free, bound]))
    for one, other in zip(alone, both[:3], strict=True):
        assert_same(one, other)
    assert len(json.loads(both[3].text)) >= 9


async def test_a_cached_prefix_changes_nothing(model, mlx_thread):
    async with serving(model, mlx_thread) as scheduler:
        asked = [
            following(model, "json_schema", '{"type":"object"}', prompt(5, 80), cached=c, max_tokens=40)
            for c in (False, True, True)
        ]
        cold, first, warm = [await collect(scheduler, a) for a in asked]
    assert (first.cached, warm.cached) == (0, 79)
    assert_same(first, cold)
    assert_same(warm, cold)


async def test_a_limit_cuts_and_ignoring_the_end_does_not_run_on(model, mlx_thread):
    async with serving(model, mlx_thread) as scheduler:
        cut = await collect(scheduler, following(model, "grammar", 'root ::= "abcdefgh"', prompt(1, 9), max_tokens=3))
        whole = await collect(scheduler, following(model, "grammar", 'root ::= "abc"', prompt(1, 9), ignore_eos=True))
    assert (cut.text, cut.end.stop_type) == ("abc", "limit")
    assert (whole.text, whole.end.stop_type) == ("abc", "eos")


async def test_a_bias_against_all_that_is_allowed_ends_the_answer(model, mlx_thread):
    banned = replace(GREEDY, logit_bias=((model.tokenizer.encode("a", add_special=False)[0], float("-inf")),))
    async with serving(model, mlx_thread) as scheduler:
        result = await collect(
            scheduler, following(model, "grammar", 'root ::= "aaa"', prompt(1, 9), banned, max_tokens=9)
        )
        after = await collect(scheduler, generation(prompt(1, 9), False, 4))
    assert result.end.completion_tokens <= 9 and len(after.tokens) == 4


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        ("grammar", "root ::= foo", "foo"),
        ("grammar", "", "root"),
        ("grammar", 'root ::= ("a"', "line 1"),
        ("json_schema", '{"type":"banana"}', "banana"),
        ("json_schema", '{"oneOf":[{"type":"string"},{"type":"string"}]}', "oneOf"),
        ("json_schema", "false", "nothing"),
        ("json_schema", '{"$ref":"#/nowhere"}', "nowhere"),
    ],
)
def test_what_does_not_compile_says_why_on_one_line(model, kind, text, reason):
    with pytest.raises(BadGrammar) as bad:
        model.grammars.compile(kind, text)
    assert reason in str(bad.value) and "\n" not in str(bad.value) and len(str(bad.value)) <= 300


def test_a_grammar_is_compiled_once(model):
    first = model.grammars.compile("grammar", 'root ::= "once"')
    assert model.grammars.compile("grammar", 'root ::= "once"') is first
