"""Embeddings over HTTP, computed by a real tiny model beside running replies."""

import asyncio
import base64
import math
import struct

import pytest

from mlxcel.errors import NotSupported
from tests.http.serving import Events, encode, serving
from tests.tiny import tiny_model

ON = {"model": tiny_model("llama"), "embeddings": True}
PATHS = ("/embedding", "/embeddings", "/v1/embeddings")


@pytest.mark.parametrize("path", PATHS)
async def test_without_the_flag_the_routes_are_not_supported(path):
    async with serving() as server:
        status, body = await server.post(path, {"input": "hello"})
        assert (status, body["error"]["type"]) == (501, "not_supported_error")
        assert "--embeddings" in body["error"]["message"]


@pytest.mark.parametrize("path", ["/embedding", "/embeddings"])
async def test_the_native_form_is_an_array_of_arrays_of_vectors(path):
    async with serving(**ON) as server:
        status, body = await server.post(path, {"input": ["one", "two"]})
        assert status == 200 and [e["index"] for e in body] == [0, 1]
        assert [len(e["embedding"]) for e in body] == [1, 1] and len(body[0]["embedding"][0]) == 64
        assert body[0]["embedding"] != body[1]["embedding"]
        assert math.isclose(math.hypot(*body[0]["embedding"][0]), 1, rel_tol=1e-5)


async def test_the_openai_form_counts_tokens_and_echoes_the_model():
    async with serving(**ON) as server:
        status, body = await server.post("/v1/embeddings", {"input": ["one", "three"], "model": "mine"})
        assert status == 200 and body["object"] == "list" and body["model"] == "mine"
        assert body["usage"] == {"prompt_tokens": 8, "total_tokens": 8}
        assert [(e["object"], e["index"], len(e["embedding"])) for e in body["data"]] == [
            ("embedding", 0, 64), ("embedding", 1, 64)
        ]  # fmt: skip
        _, body = await server.post("/v1/embeddings", {"input": "one"})
        assert body["model"] == "tiny-llama" and len(body["data"]) == 1


async def test_content_in_place_of_input_is_answered_in_the_native_form_everywhere():
    async with serving(**ON) as server:
        answers = [await server.post(path, {"content": "one"}) for path in PATHS]
        assert all(answer == answers[0] for answer in answers) and answers[0][1][0]["index"] == 0


async def test_text_its_token_ids_and_both_mixed_are_the_same_input():
    ids = encode("abcd").tolist()
    async with serving(**ON) as server:
        forms = ["abcd", ids, ["ab", *ids[2:]], ["abcd"], [ids]]
        answers = [await server.post("/v1/embeddings", {"input": form}) for form in forms]
        assert all(answer == answers[0] for answer in answers)
        _, body = await server.post("/v1/embeddings", {"input": ["x", ids]})
        assert body["data"][1]["embedding"] == answers[0][1]["data"][0]["embedding"]


async def test_base64_holds_the_same_numbers_as_32_bit_floats():
    async with serving(**ON) as server:
        _, plain = await server.post("/v1/embeddings", {"input": "one"})
        _, packed = await server.post("/v1/embeddings", {"input": "one", "encoding_format": "base64"})
        entry = packed["data"][0]
        assert entry["encoding_format"] == "base64"
        numbers = struct.unpack("<64f", base64.b64decode(entry["embedding"]))
        assert numbers == pytest.approx(plain["data"][0]["embedding"], rel=1e-6)


async def test_the_request_decides_on_its_normalisation_and_else_the_flag():
    async with serving(**ON, embd_normalize=1) as server:
        _, taxicab = await server.post("/embedding", {"input": "one"})
        assert math.isclose(sum(map(abs, taxicab[0]["embedding"][0])), 1, rel_tol=1e-5)
        _, bare = await server.post("/embedding", {"input": "one", "embd_normalize": -1})
        assert math.hypot(*bare[0]["embedding"][0]) > 1.5


async def test_without_pooling_there_is_a_vector_for_each_token_and_no_openai_form():
    async with serving(**ON, pooling="none") as server:
        _, body = await server.post("/embedding", {"input": "four"})
        assert len(body[0]["embedding"]) == 4
        status, body = await server.post("/v1/embeddings", {"input": "four"})
        assert status == 400 and "not OAI compatible" in body["error"]["message"]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "input"),
        ({"input": None, "content": 5}, "content"),
        ({"input": 5}, "input"),
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": [9999]}, "input"),
        ({"input": [-1]}, "input"),
        ({"input": ["x"] * 2049}, "input"),
        ({"input": "x", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "x", "encoding_format": 5}, "encoding_format"),
        ({"input": "x", "embd_normalize": "2"}, "embd_normalize"),
        ({"input": "x", "embd_normalize": -2}, "embd_normalize"),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_a_bad_body_names_its_field(body, field):
    async with serving(**ON) as server:
        status, answer = await server.post("/v1/embeddings", body)
        assert status == 400 and answer["error"]["param"] == field


async def test_an_input_beyond_the_context_is_too_large():
    async with serving(**ON, bounds={"n_ctx": 8}) as server:
        assert (await server.post("/embedding", {"input": "12345678"}))[0] == 200
        status, body = await server.post("/embedding", {"input": ["1", "123456789"]})
        assert (status, body["error"]["type"]) == (500, "server_error")
        assert "too large" in body["error"]["message"] and "9 tokens" in body["error"]["message"]


async def test_a_model_without_a_known_body_is_not_supported():
    async with serving(model=tiny_model("gemma3n"), embeddings=True) as server:
        status, body = await server.post("/embedding", {"input": "one"})
        assert (status, body["error"]["type"]) == (NotSupported.status, "not_supported_error")


async def test_embeddings_neither_read_nor_fill_the_prompt_cache():
    async with serving(**ON) as server:
        await server.post("/embedding", {"input": "x" * 200})
        await server.post("/embedding", {"input": "x" * 200})
        stats = server.services.store.stats()
        assert (stats["lookups"], stats["entries"]) == (0, 0)


async def test_a_long_input_is_computed_between_the_steps_of_a_running_reply():
    async with serving(**ON, bounds={"chunk": 16}) as server:
        alone = await server.stream("/completion", {"prompt": "hello", "n_predict": 60, "temperature": 0})
        together, embedded = await asyncio.gather(
            server.stream("/completion", {"prompt": "hello", "n_predict": 60, "temperature": 0, "cache_prompt": False}),
            server.post("/embedding", {"input": ["y" * 300, "z" * 300]}),
        )
        assert isinstance(together, Events) and together.text() == alone.text()
        assert embedded[0] == 200


async def test_the_openai_sdk_gets_its_vectors():
    openai = pytest.importorskip("openai")
    async with serving(**ON) as server:
        client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none")
        answer = await client.embeddings.create(model="m", input=["one", "two"])  # asks for base64 by itself
        _, plain = await server.post("/v1/embeddings", {"input": ["one", "two"]})
        assert answer.usage.total_tokens == 6
        assert answer.data[1].embedding == pytest.approx(plain["data"][1]["embedding"], rel=1e-6)
        await client.close()
