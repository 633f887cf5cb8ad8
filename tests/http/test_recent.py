"""GET /v1/cache/recent: what the prompt cache did for the last requests, and nothing about who sent them."""

import orjson

from mlxcel.cache.limits import Limits
from mlxcel.engine.recent import LENGTH, Recent
from mlxcel.engine.sequence import Finished, Generation, Sequence
from mlxcel.text import TextStream
from tests.http.serving import ROUTES, asking, encode, serving

LONG = "a long beginning that two requests share, word for word. "


async def recent(server):
    status, body = await server.get("/v1/cache/recent")
    assert status == 200
    return body


async def test_a_miss_a_hit_and_a_request_without_lookup_newest_first():
    async with serving() as server:
        for members in ({}, {}, {"cache_prompt": False}):
            await server.post(ROUTES[0], asking(ROUTES[0], LONG + "<<hello>>", **members))
        off, hit, miss = (await recent(server))["requests"]
        assert (miss["outcome"], miss["reason"], miss["cached_tokens"]) == ("miss", "empty", 0)
        assert (hit["outcome"], hit["reason"]) == ("hit", None) and hit["cached_tokens"] > 32
        assert (off["outcome"], off["reason"], off["cached_tokens"]) == ("off", None, 0)
        assert off["prompt_tokens"] == hit["prompt_tokens"] == miss["prompt_tokens"] > len(LONG)
        assert {r["completion_tokens"] for r in (off, hit, miss)} == {len("hello") + 1}
        assert off["at_unix_ms"] >= hit["at_unix_ms"] >= miss["at_unix_ms"] > 1.7e12
        assert all(r["total_ms"] > 0 for r in (off, hit, miss))


async def test_a_cache_that_is_off_and_a_prompt_that_is_too_short_are_told_apart():
    for limits, told in ((Limits(enabled=False), ("off", None)), (Limits(), ("miss", "prompt_too_short"))):
        async with serving(limits=limits) as server:
            await server.post("/completion", asking("/completion", "<<ok>>"))
            request = (await recent(server))["requests"][0]
            assert (request["outcome"], request["reason"]) == told


async def test_it_tells_what_is_in_flight():
    async with serving(bounds={"num_slots": 1}) as server:
        server.engine.gate.clear()
        writers = [(await server.open("/completion", asking("/completion", "<<hi>>")))[1] for _ in range(3)]
        await server.until(lambda: server.state() == (1, 2))
        body = await recent(server)
        assert body == {"requests": [], "running": 1, "waiting": 2, "slots": 1}
        for writer in writers:
            writer.close()


async def test_salts_sessions_and_texts_are_not_in_it():
    async with serving() as server:
        secrets = {"cache_salt": "tenant-a", "prompt_cache_key": "conversation-b", "user": "somebody"}
        await server.post(ROUTES[0], asking(ROUTES[0], LONG + "<<hello>>", **secrets))
        body = await recent(server)
        assert set(body["requests"][0]) == {
            "at_unix_ms", "prompt_tokens", "cached_tokens", "completion_tokens", "total_ms", "outcome", "reason"
        }  # fmt: skip
        text = orjson.dumps(body).decode()
        assert not any(secret in text for secret in [*secrets.values(), "hello", "word"])


async def test_it_needs_the_key():
    async with serving(api_key=("sesame",)) as server:
        assert (await server.get("/v1/cache/recent"))[0] == 401


def test_it_holds_the_last_fifty():
    kept = Recent(clock=lambda: 12.5)
    for n in range(LENGTH + 10):
        sequence = Sequence(n, Generation(encode("x")), TextStream(bytes.decode, ()), 1, submitted_at=1.0)
        sequence.first_token_at = 1.25
        kept.observe(sequence, Finished("eos", "", 1, n, 0, False, prompt_ms=100.0, predicted_ms=50.0))
    requests = kept.requests()
    assert [r.completion_tokens for r in requests] == list(range(LENGTH + 9, 9, -1)) and LENGTH == 50
    assert (requests[0].at_unix_ms, requests[0].total_ms) == (12_500, 300.0), "from its arrival, waiting included"
