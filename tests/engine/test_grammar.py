"""Constrained output on a tiny random model, which left alone says anything at all."""

import asyncio
import gc
import json
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import jsonschema
import mlx.core as mx
import pytest

from mlxcel.engine.grammar import BadGrammar, Constraint
from mlxcel.engine.sequence import Delta, Sampling
from mlxcel.errors import InvalidRequest
from tests.engine.test_reuse import assert_same, generation, prompt, serving
from tests.harness import GREEDY, collect
from tests.schemas import schema
from tests.tiny import EOS, tiny_model

ROOT = Path(__file__).parent.parent.parent
WARM = Sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
HOT = replace(WARM, temperature=5.0)  # the weights differ from run to run: no digit may be liked for ever


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
                following(model, "json_schema", json.dumps(s), prompt(i + j, 20), replace(HOT, seed=i + j))
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


async def test_a_row_that_follows_a_grammar_leaves_its_neighbours_bit_for_bit_alone(model, mlx_thread):
    """The fourth row is there for as many steps either way, so that the arithmetic has the same shapes."""
    neighbours = [generation(prompt(i, 30), False, 30) for i in range(2)]
    neighbours.append(generation(prompt(2, 30), False, 30, replace(WARM, seed=5)))
    fourth = generation(prompt(9, 30), False, 30)
    bound = following(model, "grammar", "root ::= [a-z]+", prompt(9, 30), max_tokens=30, ignore_eos=True)
    async with serving(model, mlx_thread) as scheduler:
        free = await asyncio.gather(*(collect(scheduler, g) for g in [*neighbours, fourth]))
        beside = await asyncio.gather(*(collect(scheduler, g) for g in [*neighbours, bound]))
    for one, other in zip(free[:3], beside[:3], strict=True):
        assert one.tokens == other.tokens and one.logprobs == other.logprobs
    assert len(beside[3].text) == 30 and beside[3].text.isascii() and beside[3].text.islower()
    assert free[3].text != beside[3].text


async def test_rows_that_join_and_leave_keep_their_own_place_in_their_own_grammar(model, mlx_thread):
    words = ["one" * n for n in (1, 9, 2, 14, 3)]
    async with serving(model, mlx_thread, num_slots=2) as scheduler:
        asked = [following(model, "grammar", f'root ::= "{word}"', prompt(i, 20 + i)) for i, word in enumerate(words)]
        results = await asyncio.gather(*(collect(scheduler, a) for a in asked))
    assert [r.text for r in results] == words


@pytest.mark.parametrize("sampling", [GREEDY, replace(WARM, seed=3)])
async def test_a_cached_prefix_changes_nothing(model, mlx_thread, sampling):
    text = '{"type":"array","items":{"enum":["a","b",1]},"minItems":8,"maxItems":12}'
    async with serving(model, mlx_thread) as scheduler:
        asked = [
            following(model, "json_schema", text, prompt(5, 80), sampling, cached=cached)
            for cached in (False, True, True)
        ]
        cold, first, warm = [await collect(scheduler, a) for a in asked]
    assert first.cached == 0 < warm.cached
    assert cold.text == first.text == warm.text and len(json.loads(cold.text)) >= 8
    assert_same(first, cold)
    assert_same(warm, cold)


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_next"])
async def test_other_kinds_of_models_follow_a_grammar_too(mlx_thread, family):
    model = mlx_thread.submit(tiny_model, family).result()
    async with serving(model, mlx_thread) as scheduler:
        asked = [following(model, "grammar", "root ::= [a-c]{9}", prompt(i, 20), WARM, cached=True) for i in range(3)]
        results = await asyncio.gather(*(collect(scheduler, a) for a in asked))
    assert all(len(r.text) == 9 and set(r.text) <= set("abc") and r.end.stop_type == "eos" for r in results)


async def test_nothing_of_a_grammar_is_kept_for_a_sequence_that_has_ended(model, mlx_thread):
    async with serving(model, mlx_thread) as scheduler:
        ends = [
            collect(scheduler, following(model, "grammar", "root ::= [a-c]{9}", prompt(i, 20), max_tokens=n))
            for i, n in enumerate((3, 20))
        ]
        await asyncio.gather(*ends)
        cancelled = scheduler.submit(following(model, "grammar", "root ::= [a-c]+ [d-f]", prompt(3, 20)))
        async for event in cancelled.events():
            if isinstance(event, Delta):
                break
        scheduler.cancel(cancelled)
        while scheduler.num_active:
            await asyncio.sleep(0)
        gc.collect()
        assert not [o for o in gc.get_objects() if isinstance(o, Constraint)]


async def test_a_limit_cuts(model, mlx_thread):
    async with serving(model, mlx_thread) as scheduler:
        cut = await collect(scheduler, following(model, "grammar", 'root ::= "abcdefgh"', prompt(1, 9), max_tokens=3))
    assert (cut.text, cut.end.stop_type) == ("abc", "limit")


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "number", "minimum": 7, "maximum": 8}, "7." + "7" * 16),
        ({"type": "integer"}, "7" * 20),
        ({"type": "string", "pattern": "^[0-9]{30}$"}, '"' + "7" * 30 + '"'),
        ({"type": "number", "minimum": 1e-19, "maximum": 8e-19}, "0.0000000000000000007"),
        ({"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}, f"[{'7' * 20}, {'7' * 20}]"),
    ],
)
async def test_a_digit_that_the_model_loves_is_not_written_for_ever(model, mlx_thread, schema, text):
    seven = model.tokenizer.encode("7", add_special=False)[0]
    point = model.tokenizer.encode(".", add_special=False)[0]
    fond = replace(GREEDY, logit_bias=((seven, 1000.0), (point, 500.0)))
    async with serving(model, mlx_thread) as scheduler:
        result = await collect(scheduler, following(model, "json_schema", json.dumps(schema), prompt(1, 9), fond))
    assert result.end.stop_type == "eos"
    jsonschema.validate(json.loads(result.text), schema)
    assert result.text == text


async def test_ignoring_the_end_goes_on_while_the_grammar_does(model, mlx_thread):
    async with serving(model, mlx_thread) as scheduler:
        asked = [
            following(model, "grammar", grammar, prompt(1, 9), max_tokens=20, ignore_eos=True)
            for grammar in ('root ::= "abc"', 'root ::= "x" | "x" root')
        ]
        short, long = [await collect(scheduler, a) for a in asked]
    assert (short.text, short.end.stop_type) == ("abc", "eos")
    assert (long.text, long.end.stop_type) == ("x" * 20, "limit")


@pytest.mark.parametrize("sampling", [GREEDY, WARM])
async def test_a_banned_token_is_taken_where_the_grammar_leaves_no_other(model, mlx_thread, sampling):
    a, b = (model.tokenizer.encode(char, add_special=False)[0] for char in "ab")
    banned = replace(sampling, logit_bias=((a, float("-inf")), (EOS, float("-inf"))))
    loved = replace(sampling, logit_bias=((b, 1000.0),))
    async with serving(model, mlx_thread) as scheduler:
        asked = [
            following(model, "grammar", grammar, prompt(1, 9), wanted)
            for grammar, wanted in (('root ::= "aba"', banned), ("root ::= [a-c]{9}", banned), ('root ::= "aa"', loved))
        ]
        forced, avoided, kept = [await collect(scheduler, g) for g in asked]
    assert (forced.text, forced.end.stop_type) == ("aba", "eos")
    assert len(avoided.text) == 9 and "a" not in avoided.text
    assert kept.text == "aa"


async def test_a_grammar_that_outgrows_its_limits_fails_its_own_row(model, mlx_thread):
    """Three thousand ways to go on at once are more than llguidance follows, which it says when it gets there."""
    many = "root ::= s\ns ::= " + " | ".join(f'"a{i}" s?' for i in range(3000))
    async with serving(model, mlx_thread) as scheduler:
        asked = [following(model, "grammar", many, prompt(i, 9)) for i in range(20)]
        results = await asyncio.gather(collect(scheduler, generation(prompt(30, 9), False, 30)), *(
            collect(scheduler, a) for a in asked
        ))  # fmt: skip
    free, *stuck = results
    assert len(free.tokens) == 30
    for result in stuck:
        assert isinstance(result.end.error, InvalidRequest) and result.end.error.param == "grammar"
        assert "cannot be followed any further here" in result.end.error.message


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        ("grammar", "root ::= foo", "foo"),
        ("grammar", "", "root"),
        ("grammar", 'root ::= ("a"', "line 1"),
        ("grammar", "root ::= root", "nothing matches"),
        ("json_schema", '{"type":"banana"}', "banana"),
        ("json_schema", '{"oneOf":[{"type":"string"},{"type":"string"}]}', "oneOf"),
        ("json_schema", "false", "nothing matches"),
        ("json_schema", "5", "object"),
        ("json_schema", "{", "line 1"),
        ("json_schema", '{"$ref":"#"}', "nothing matches"),
        ("json_schema", '{"type":"string","pattern":"(?=a)b"}', "look-around"),
        ("json_schema", '{"type":"array","uniqueItems":true}', "uniqueItems"),
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


async def test_deep_chains_do_not_overflow_the_stack(model, mlx_thread):
    """llguidance recurses over them; on an ordinary stack 3000 references end the process."""
    rules = "root ::= r0\n" + "".join(f'r{i} ::= "x" r{i + 1}\n' for i in range(20_000)) + 'r20000 ::= "a" root?'
    defs = {f"d{i}": {"type": "array", "minItems": 1, "items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(5000)}
    schema = json.dumps({"$defs": defs | {"d5000": {"type": "null"}}, "$ref": "#/$defs/d0"})
    async with serving(model, mlx_thread) as scheduler:
        for kind, text in (("grammar", rules), ("json_schema", schema)):
            result = await collect(scheduler, following(model, kind, text, prompt(1, 9), max_tokens=5))
            assert len(result.text) == 5


def test_what_takes_too_long_to_compile_is_given_up_and_does_not_hold_the_process():
    """Twenty patterns at once keep llguidance busy for hours."""
    code = """
import json
from mlxcel.engine import grammar
from tests.tiny import byte_tokenizer
grammar.COMPILE_SECONDS = 0.3
grammars = grammar.Grammars(byte_tokenizer())
slow = [{"allOf": [{"type": "string", "pattern": f".*{i}.*{j}"} for i in range(20)]} for j in range(3)]
for schema in slow:
    try:
        grammars.compile("json_schema", json.dumps(schema))
    except grammar.BadGrammar as error:
        print(error)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == [
        "it takes more than 0.3 seconds to compile",
        "it takes more than 0.3 seconds to compile",
        "other grammars are being compiled and take too long, try again later",
    ]
