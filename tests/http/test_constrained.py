"""Constrained output as clients ask for it, on a real tiny model that left alone says anything at all."""

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor

import jsonschema
import mlx.core as mx
import pytest

from tests.http.serving import ROUTES, asking, said, serving
from tests.tiny import tiny_model

SCHEMA = {
    "type": "object",
    "properties": {"size": {"type": "integer", "minimum": 0, "maximum": 99}, "kind": {"enum": ["a", "b"]}},
    "required": ["size", "kind"],
    "additionalProperties": False,
}
FORMS = {
    "json_schema": {"json_schema": SCHEMA},
    "response_format": {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
    "json_object": {"response_format": {"type": "json_object", "schema": SCHEMA}},
}
MANY = "root ::= s\ns ::= " + " | ".join(f'"a{i}" s?' for i in range(3000))

every_route = pytest.mark.parametrize("route", ROUTES)


@pytest.fixture(scope="module")
def mlx_thread():
    with ThreadPoolExecutor(1) as pool:
        yield pool
        pool.submit(mx.clear_streams).result()


@pytest.fixture
def serve(mlx_thread):
    model = mlx_thread.submit(tiny_model, "llama").result()
    return lambda **changes: serving(model=model, pool=mlx_thread, **changes)


@every_route
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
async def test_the_answer_validates_in_one_piece_and_streamed(serve, route, form):
    async with serve() as server:
        body = asking(route, "hello", seed=1, temperature=5, max_tokens=200, **form)
        status, whole = await server.post(route, body)
        stream = await server.stream(route, body)
    assert status == 200, whole
    jsonschema.validate(json.loads(said(whole)), SCHEMA)
    assert stream.text() == said(whole) and stream.reasons[-1] in ("stop", "eos")


@every_route
async def test_each_request_of_a_batch_follows_its_own_form(serve, route):
    async with serve() as server:
        bodies = [asking(route, f"hello {i}", seed=i, max_tokens=30, grammar=f'root ::= "row {i}"') for i in range(3)]
        free = asking(route, "hello", temperature=0, max_tokens=30)
        _, alone = await server.post(route, free)
        answers = await asyncio.gather(*(server.post(route, body) for body in [*bodies, free]))
    *rows, beside = [said(answer) for _, answer in answers]
    assert rows == ["row 0", "row 1", "row 2"] and beside == said(alone)


@every_route
@pytest.mark.parametrize(
    ("members", "param", "reason"),
    [
        ({"grammar": "root ::= foo"}, "grammar", "line 1: there is no rule named foo"),
        ({"json_schema": {"type": "banana"}}, "json_schema", "banana"),
        ({"json_schema": {"$ref": "#"}}, "json_schema", "nothing matches it"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "banana"}}}},
            "response_format.json_schema.schema",
            "banana",
        ),
        ({"response_format": {"type": "json_object", "schema": {"not": {}}}}, "response_format.schema", "not"),
        ({"response_format": {"type": "regex"}}, "response_format", "type must be"),
    ],
)
async def test_a_form_that_does_not_compile_is_refused_by_name(serve, route, members, param, reason):
    async with serve() as server:
        status, body = await server.post(route, asking(route, "hello", **members))
    assert status == 400 and body["error"]["param"] == param and body["error"]["type"] == "invalid_request_error"
    assert reason in body["error"]["message"] and "\n" not in body["error"]["message"]


async def test_a_grammar_that_outgrows_its_limits_is_the_requests_fault(serve):
    async with serve() as server:
        status, body = await server.post("/completion", {"prompt": "hello", "grammar": MANY})
        assert status == 400 and body["error"]["param"] == "grammar"
        status, body = await server.post("/completion", {"prompt": "hello", "max_tokens": 3})
        assert status == 200


async def test_the_servers_own_form_holds_for_those_who_bring_none(serve):
    async with serve(grammar='root ::= "mine"') as server:
        texts = []
        for members in ({}, {"grammar": 'root ::= "yours"'}, {"json_schema": {"const": 7}}, {"grammar": ""}):
            status, body = await server.post("/completion", {"prompt": "hello", "max_tokens": 12, "seed": 1} | members)
            assert status == 200, body
            texts.append(body["content"])
    assert texts[:3] == ["mine", "yours", "7"] and texts[3] not in texts[:3]
    async with serve(json_schema='{"const": [1, 2]}') as server:
        assert said((await server.post("/v1/completions", {"prompt": "hello"}))[1]) == "[1, 2]"


async def test_the_settings_of_an_answer_show_its_form(serve):
    async with serve() as server:
        shown = []
        for members in ({"grammar": 'root ::= "x"'}, {"json_schema": {"const": 1}}, {}):
            _, body = await server.post("/completion", {"prompt": "hello", "max_tokens": 3} | members)
            shown.append(body["generation_settings"]["grammar"])
    assert shown == ['root ::= "x"', '{"const":1}', ""]


async def test_compiling_does_not_hold_other_requests_back(serve):
    """Every rule doubles the one before it; llguidance takes a second or more to find that this is too much."""
    doubling = "root ::= r0\n" + "".join(f"r{i} ::= r{i + 1} r{i + 1}\n" for i in range(400)) + 'r400 ::= "a"'
    loop = asyncio.get_running_loop()
    async with serve() as server:
        began, slowest = loop.time(), 0.0
        refused = asyncio.create_task(server.post("/completion", {"prompt": "hello", "grammar": doubling}))
        while not refused.done():
            asked = loop.time()
            assert (await server.get("/health"))[0] == 200
            slowest = max(slowest, loop.time() - asked)
        status, body = await refused
    assert status == 400
    assert body["error"]["message"].endswith(
        ("too big (limit for this grammar: 1000000)", "it takes more than 10 seconds to compile")
    )
    assert slowest < (loop.time() - began) / 2
