"""What every request passes before it reaches a route: CORS, loading, keys, routing, limits; and the plain routes."""

import asyncio

import aiohttp
import pytest

from mlxcel import __version__
from mlxcel.api import cache, infill, lora, props, slots, unsupported
from mlxcel.api.app import MAX_BODY, ROUTES
from mlxcel.api.llama import MAX_TOKENS
from mlxcel.api.prepare import MAX_TEXT
from tests.http.serving import asking, encode, serving

KEY = {"api_key": ("sesame", "other")}


# --- keys


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Authorization": "Bearer sesame"}, 200),
        ({"Authorization": "sesame"}, 200),
        ({"Authorization": "Bearer other"}, 200),
        ({"Authorization": "bearer sesame"}, 401),
        ({"Authorization": "Bearer sesam"}, 401),
        ({"Authorization": "Bearer "}, 401),
        ({"X-Api-Key": "sesame"}, 200),
        ({"X-Api-Key": "Bearer sesame"}, 200),
        ({"Authorization": "Bearer wrong", "X-Api-Key": "sesame"}, 401),
        ({"Authorization": "", "X-Api-Key": "sesame"}, 200),
    ],
    ids=str,
)
async def test_a_key_is_read_from_authorization_and_only_then_from_x_api_key(headers, status):
    async with serving(**KEY) as server:
        got, body = await server.get("/v1/models", headers=headers)
        assert got == status
        if status == 401:
            assert body == {"error": {"code": 401, "message": "Invalid API Key", "type": "authentication_error"}}
            assert (await server.get("/no/such/path", headers=headers))[0] == 401, "before the routing"
            assert (await server.post("/completion", b"{", headers=headers))[0] == 401, "before the body"


async def test_health_needs_no_key():
    async with serving(**KEY) as server:
        for path in ("/health", "/v1/health"):
            assert await server.get(path) == (200, {"status": "ok"})


async def test_a_probe_may_ask_with_head():
    async with serving() as server, server.session.head("/health") as response:
        assert (response.status, await response.read()) == (200, b"")


async def test_no_keys_means_open():
    async with serving() as server:
        assert (await server.get("/v1/models"))[0] == 200


# --- CORS


@pytest.mark.parametrize(
    ("settings", "origin", "allowed"),
    [
        ({}, "https://a.example", "https://a.example"),
        ({}, None, ""),
        ({"cors_credentials": False}, "https://a.example", "*"),
        ({"cors_origins": "https://b.example"}, "https://a.example", "https://b.example"),
        ({"cors_origins": "localhost"}, "http://localhost:3000", "http://localhost:3000"),
        ({"cors_origins": "localhost"}, "http://[::1]:3000", "http://[::1]:3000"),
        ({"cors_origins": "localhost"}, "https://localhost.example", None),
        ({"cors_origins": "localhost"}, "http://[", None),
    ],
    ids=str,
)
async def test_the_origin_header_of_every_reply(settings, origin, allowed):
    headers = {} if origin is None else {"Origin": origin}
    async with serving(**settings, **KEY) as server:
        for path in ("/health", "/v1/models", "/no/such/path"):
            async with server.session.get(path, headers=headers) as response:
                assert response.headers.get("Access-Control-Allow-Origin") == allowed


async def test_a_stream_carries_the_origin_header_too():
    async with serving() as server:
        body = asking("/completion", "<<x>>", stream=True)
        async with server.session.post("/completion", json=body, headers={"Origin": "http://a"}) as response:
            assert response.headers["Access-Control-Allow-Origin"] == "http://a"
            assert response.headers["Server"] == f"mlxcel/{__version__}"
            await response.read()


async def test_an_origin_that_cannot_be_sent_back_breaks_nothing():
    async with serving() as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nOrigin: \xff\xfe\r\nConnection: close\r\n\r\n")
        assert b"200 OK" in await reader.read()
        writer.close()


@pytest.mark.parametrize("loaded", [True, False])
async def test_a_preflight_is_answered_on_any_path_without_a_key_and_while_loading(loaded):
    async with serving(loaded=loaded, **KEY) as server:
        for path in ("/v1/chat/completions", "/no/such/path"):
            async with server.session.options(path, headers={"Origin": "http://a"}) as response:
                assert (response.status, response.content_type, await response.read()) == (200, "text/html", b"")
                assert response.headers["Access-Control-Allow-Methods"] == "GET, POST, DELETE, OPTIONS"
                assert response.headers["Access-Control-Allow-Headers"] == "*"
                assert response.headers["Access-Control-Allow-Credentials"] == "true"


# --- loading, routing, limits


async def test_while_the_model_loads_everything_is_503_even_without_a_key():
    async with serving(loaded=False, **KEY) as server:
        for path in ("/health", "/v1/models", "/no/such/path"):
            status, body = await server.get(path)
            assert status == 503
            assert body == {"error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}}


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/nope"), ("GET", "/v1/chat/completions"), ("POST", "/health"), ("DELETE", "/completion"), ("PUT", "/")],
)
async def test_an_unknown_path_and_a_wrong_method_are_404_in_json(method, path):
    async with serving() as server, server.session.request(method, path) as response:
        assert response.status == 404
        body = await response.json()
        assert body == {"error": {"code": 404, "message": "File Not Found", "type": "not_found_error"}}


ALIASES = [
    ("GET", "/health", "/v1/health"),
    ("GET", "/models", "/v1/models"),
    ("POST", "/completion", "/completions"),
    ("POST", "/chat/completions", "/v1/chat/completions"),
]


@pytest.mark.parametrize(("method", "path", "alias"), ALIASES, ids=str)
async def test_both_names_of_a_route_answer_alike(method, path, alias):
    async with serving() as server:
        told = []
        for each in (path, alias):
            body = asking(path, "<<x>>") if method == "POST" else None
            async with server.session.request(method, each, json=body) as response:
                assert response.status == 200
                assert response.headers["Content-Type"] == "application/json; charset=utf-8"
                told.append(await response.json())
        assert told[0].keys() == told[1].keys()


RERANK = [prefix + name for prefix in ("", "/v1") for name in ("/rerank", "/reranking")]
AUDIO = ["/audio/transcriptions", "/v1/audio/transcriptions"]


@pytest.mark.parametrize("path", [*RERANK, *AUDIO, "/v1/systemone"])
@pytest.mark.parametrize("body", [b"{}", b"not json"], ids=["json", "anything"])
async def test_what_a_text_model_cannot_do_is_501_whatever_is_asked(path, body):
    async with serving() as server:
        status, answer = await server.post(path, body)
    assert (status, answer["error"]["code"], answer["error"]["type"]) == (501, 501, "not_supported_error")


@pytest.mark.parametrize("path", ["/tools", "/cors-proxy"])
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_what_is_left_off_for_safety_is_403_without_a_code(method, path):
    async with serving() as server, server.session.request(method, path) as response:
        error = (await response.json())["error"]
    assert response.status == 403
    assert error.keys() == {"message", "type"} and error["type"] == "feature_disabled"


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/tools"), ("POST", "/cors-proxy"), ("POST", "/v1/rerank"), ("POST", "/infill"), ("POST", "/slots/0"),
     ("POST", "/props"), ("GET", "/lora-adapters"), ("POST", "/v1/chat/completions/input_tokens")],
)  # fmt: skip
async def test_loading_comes_before_the_key_and_the_key_before_what_the_server_can_do(method, path):
    for loaded, headers, wanted in ((False, {}, 503), (True, {}, 401), (True, {"X-Api-Key": "sesame"}, None)):
        async with serving(loaded=loaded, **KEY) as server:
            async with server.session.request(method, path, headers=headers) as response:
                assert response.status == wanted or (wanted is None and response.status not in (401, 503))
            async with server.session.options(path) as response:
                assert response.status == 200


@pytest.mark.parametrize(("kind", "name"), [("image_url", "image"), ("input_audio", "audio"), ("input_video", "video")])
async def test_media_are_refused_in_the_words_that_clients_look_for(kind, name):
    async with serving() as server:
        body = {"messages": [{"role": "user", "content": [{"type": kind, kind: {}}]}]}
        status, answer = await server.post("/v1/chat/completions", body)
    assert status == 400 and f"{name} input is not supported" in answer["error"]["message"]


async def test_a_prefix_stands_before_every_route_and_health_stays_public():
    async with serving(api_prefix="/llm", **KEY) as server:
        assert (await server.get("/llm/health"))[0] == 200
        assert (await server.get("/llm/v1/models"))[0] == 401
        headers = {"Authorization": "Bearer sesame"}
        assert (await server.get("/llm/v1/models", headers=headers))[0] == 200
        assert (await server.get("/v1/models", headers=headers))[0] == 404


NOT_READING = {cache.reset, infill.infill, lora.scale, props.change, slots.act}  # nor all of `unsupported`
READING = [
    path
    for method, paths, do in ROUTES
    if method == "POST" and do not in NOT_READING and do.__module__ != unsupported.__name__
    for path in paths
]


@pytest.mark.parametrize("path", READING)
@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b'"x"', b'{"a": NaN}', b"\xff\xfe{\x00", b"[" * 5000], ids=lambda b: b[:9].hex()
)
async def test_a_bad_body_is_400_in_json_on_every_route(path, body):
    async with serving(embeddings=True) as server:
        status, answer = await server.post(path, body, headers={"Content-Type": "text/nonsense"})
        assert status == 400
        assert answer["error"]["code"] == 400 and answer["error"]["type"] == "invalid_request_error"
        assert (await server.get("/health"))[0] == 200


@pytest.mark.parametrize("size", [900_000, 1_100_000, 8_000_000])
async def test_large_bodies_reach_the_validation(size):
    async with serving() as server:
        status, body = await server.post("/completion", asking("/completion", [-1], padding="x" * size))
        assert (status, body["error"]["param"]) == (400, "prompt")


async def test_a_body_beyond_the_limit_is_413_in_json():
    async with serving() as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(f"POST /completion HTTP/1.1\r\nHost: x\r\nContent-Length: {MAX_BODY + 1}\r\n\r\n".encode())

        async def send():
            for _ in range(MAX_BODY // (1 << 20) + 1):
                writer.write(b"x" * (1 << 20))
                await writer.drain()

        sending = asyncio.create_task(send())
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"413" in head and b"application/json" in head
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        writer.close()


async def test_a_body_that_never_comes_whole_is_408():
    async with serving(timeout=0.05) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"POST /completion HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n{")
        assert b" 408 " in await reader.readuntil(b"\r\n")
        writer.close()


async def test_a_body_that_is_not_what_its_encoding_says_is_400():
    async with serving() as server:
        status, _ = await server.post("/completion", b"not gzip", headers={"Content-Encoding": "gzip"})
        assert status == 400


async def test_several_addresses_and_a_unix_socket_are_listened_on_at_once(tmp_path):
    path = f"{tmp_path}/mlxcel.sock"
    async with serving(host=f"127.0.0.1, {path}") as server:
        assert (await server.get("/health"))[0] == 200
        connector = aiohttp.UnixConnector(path)
        async with aiohttp.ClientSession(connector=connector) as session, session.get("http://x/health") as response:
            assert response.status == 200


# --- plain routes


async def test_metrics_are_off_unless_asked_for_and_say_how():
    async with serving(metrics=False) as server:
        status, body = await server.get("/metrics")
        assert (status, body["error"]["type"]) == (501, "not_supported_error")
        assert "--metrics" in body["error"]["message"]


async def test_tokenize_and_detokenize_are_each_others_reverse():
    async with serving() as server:
        _, body = await server.post("/tokenize", {"content": "héllo<|im_end|>"})
        assert body["tokens"] == encode("héllo<|im_end|>").tolist()
        assert (await server.post("/detokenize", body))[1] == {"content": "héllo<|im_end|>"}
        assert (await server.post("/tokenize", {}))[1] == {"tokens": []}
        assert (await server.post("/detokenize", {}))[1] == {"content": ""}
        _, mixed = await server.post("/tokenize", {"content": ["a", 5, "b"]})
        assert mixed["tokens"] == [*encode("a"), 5, *encode("b")]


async def test_tokenize_shows_pieces():
    async with serving() as server:
        _, body = await server.post("/tokenize", {"content": "ab", "with_pieces": True})
        assert [entry["piece"] for entry in body["tokens"]] == ["a", "b"]
        assert [entry["id"] for entry in body["tokens"]] == encode("ab").tolist()


async def test_tokenize_leaves_special_tokens_alone_when_asked_to():
    async with serving() as server:
        for parse_special, num in ((True, 2), (False, 11), (None, 2), ("no", 2)):
            _, body = await server.post("/tokenize", {"content": "a<|im_end|>", "parse_special": parse_special})
            assert len(body["tokens"]) == num
        _, body = await server.post("/tokenize", {"content": "a", "with_pieces": "yes", "add_special": 5})
        assert body["tokens"] == encode("a").tolist(), "a switch of a wrong type is as good as none"


@pytest.mark.parametrize("tokens", [[320], [-1], ["a"], [1.5], "x", [True]])
async def test_detokenize_takes_ids_of_the_vocabulary_only(tokens):
    async with serving() as server:
        status, body = await server.post("/detokenize", {"tokens": tokens})
        assert (status, body["error"]["param"]) == (400, "tokens")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"content": "a" * (MAX_TEXT + 1)}),
        ("/tokenize", {"content": [5, "a" * (MAX_TEXT + 1)]}),
        ("/detokenize", {"tokens": [5] * (MAX_TOKENS + 1)}),
        ("/v1/chat/completions/input_tokens", {"messages": [{"role": "user", "content": "a" * (MAX_TEXT + 1)}]}),
    ],
)
async def test_what_would_take_minutes_to_tokenise_is_refused(path: str, body: dict[str, object]):
    async with serving() as server:
        status, answer = await server.post(path, body)
        assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
        assert str(MAX_TEXT) in answer["error"]["message"] or str(MAX_TOKENS) in answer["error"]["message"]


async def test_apply_template_renders_without_generating():
    async with serving() as server:
        _, body = await server.post("/apply-template", {"messages": [{"role": "user", "content": "hi"}]})
        assert body == {"prompt": "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"}
        _, body = await server.post(
            "/apply-template", {"messages": [{"role": "user", "content": "hi"}], "add_generation_prompt": False}
        )
        assert body["prompt"].endswith("<|im_end|>\n")
        assert not server.engine.plans


async def test_the_cache_can_be_looked_at_and_emptied():
    async with serving() as server:
        await server.post("/completion", asking("/completion", "x" * 100 + "<<y>>"))
        _, stats = await server.get("/v1/cache/stats")
        assert stats["enabled"] and stats["entries"] >= 1 and stats["bytes"] > 0
        _, first = await server.post("/v1/cache/reset", b"")
        assert first == {"cleared": True, "freed_bytes": stats["bytes"], "freed_entries": stats["entries"]}
        assert (await server.post("/v1/cache/reset", b""))[1] == {"cleared": True, "freed_bytes": 0, "freed_entries": 0}
        _, after = await server.get("/v1/cache/stats")
        assert (after["entries"], after["inserts"]) == (0, stats["inserts"])
