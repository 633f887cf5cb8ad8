"""Coming back to a streamed reply: the generation goes on without its client, and every byte of it can be had again."""

import asyncio
from contextlib import asynccontextmanager

import orjson
import pytest

from mlxcel.api.streams import MAX_BYTES
from tests.http.serving import ROUTES, Events, asking, said, serving

every_route = pytest.mark.parametrize("route", ROUTES)
HEADER = {"X-Conversation-Id": "talk"}
TEXT = "a reply that is worth coming back for"


@asynccontextmanager
async def begun(server, route, text, name="talk", **members):
    """What a client of its own reads that has sent its request, and that leaves at the end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    data = orjson.dumps(asking(route, text, stream=True, **members))
    head = f"POST {route} HTTP/1.1\r\nHost: x\r\nX-Conversation-Id: {name}\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    await server.until(lambda: server.services.streams.find(name))
    try:
        yield reader
    finally:
        writer.close()
        await writer.wait_closed()


async def replay(server, start=0, name="talk"):
    async with server.session.get("/v1/stream", params={"conv_id": name, "from": str(start)}) as response:
        assert response.status == 200, await response.text()
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        return await response.read()


async def rest(reader):
    """Until the end of a chunked answer."""
    async with asyncio.timeout(10):
        return await reader.readuntil(b"\r\n0\r\n\r\n")


async def lookup(server, *names):
    status, found = await server.post("/v1/streams/lookup", {"conversation_ids": names})
    assert status == 200
    return found


async def stop(server, name="talk"):
    async with server.session.delete("/v1/stream", params={"conv_id": name}) as response:
        return response.status, await response.read()


# --- the reply goes on


@every_route
async def test_a_client_that_left_finds_the_whole_reply(route):
    async with serving(bounds={"num_slots": 1}) as server:
        server.engine.gate.clear()
        async with begun(server, route, f"<<{TEXT}>>"):
            pass
        assert [found["is_done"] for found in await lookup(server, "talk")] == [False]
        server.engine.gate.set()
        events = Events.of(await replay(server))
        assert events.text() == TEXT and events.reasons
        await server.idle()
        assert (server.scheduler.totals.completed, server.scheduler.totals.cancelled) == (1, 0)
        assert said((await server.post(route, asking(route, "<<next>>")))[1]) == "next", "the slot is free"


@every_route
async def test_what_the_first_client_reads_is_what_a_later_one_reads(route):
    async with serving() as server:
        async with server.session.post(route, json=asking(route, f"<<{TEXT}>>", stream=True), headers=HEADER) as first:
            assert first.headers["X-Accel-Buffering"] == "no"
            whole = await first.read()
        assert Events.of(whole).text() == TEXT
        assert await replay(server) == whole
        assert await replay(server, 10) == whole[10:]
        assert await replay(server, len(whole)) == b""
        assert await replay(server, len(whole) + 1000) == b""


async def test_any_number_of_readers_follow_at_once_and_each_gets_all():
    async with serving() as server:
        server.engine.gate.clear()
        async with begun(server, "/completion", f"<<{TEXT}>>"):
            readers = [asyncio.create_task(replay(server, start)) for start in (0, 0, 7)]
            server.engine.gate.set()
            first, second, third = await asyncio.gather(*readers)
        assert Events.of(first).text() == TEXT
        assert first == second == first[:7] + third


async def test_a_reader_that_leaves_takes_nobody_along():
    async with serving() as server, begun(server, "/completion", "babble") as reader:
        await reader.readuntil(b"\n\n")
        async with server.session.get("/v1/stream?conv_id=talk") as response:
            await response.content.readuntil(b"\n\n")
        steps = len(server.engine.plans)
        await server.until(lambda: len(server.engine.plans) > steps + 20)
        assert not server.scheduler.totals.cancelled
        assert b"data:" in await reader.readuntil(b"\n\n")
        await stop(server)


async def test_comments_of_a_silent_stream_are_bytes_of_it():
    async with serving(sse_ping_interval=0.02) as server:
        server.engine.gate.clear()
        async with (
            begun(server, "/completion", f"<<{TEXT}>>"),
            server.session.get("/v1/stream?conv_id=talk") as response,
        ):
            assert await response.content.readexactly(3) == b":\n\n"
            server.engine.gate.set()
            rest = await response.read()
        assert await replay(server) == b":\n\n" + rest


async def test_several_choices_are_one_stream():
    async with serving() as server:
        body = asking("/v1/chat/completions", "<<both>>", stream=True, n=2)
        async with server.session.post("/v1/chat/completions", json=body, headers=HEADER):
            pass
        events = Events.of(await replay(server))
        assert (events.text(0), events.text(1)) == ("both", "both")


async def test_a_reply_nobody_waits_for_fills_the_cache_as_any_other():
    async with serving() as server:
        prompt = "word " * 100 + "<<x>>"
        async with begun(server, "/completion", prompt):
            pass
        await replay(server)
        assert (await server.post("/completion", asking("/completion", prompt)))[1]["timings"]["cache_n"] > 400


# --- what ends it


async def test_without_the_header_a_client_that_leaves_ends_its_reply():
    async with serving() as server:
        _, writer = await server.open("/completion", asking("/completion", "babble", stream=True))
        await server.until(lambda: server.scheduler.num_active)
        writer.close()
        await server.idle()
        assert server.scheduler.totals.cancelled == 1


@pytest.mark.parametrize("headers", [HEADER, {"X-Conversation-Id": ""}])
async def test_only_streams_with_an_id_can_be_come_back_to(headers):
    async with serving() as server:
        ask = asking("/completion", "<<x>>", stream=not headers["X-Conversation-Id"])
        async with server.session.post("/completion", json=ask, headers=headers) as response:
            assert response.status == 200
            await response.read()
        assert await lookup(server, "talk", "") == []


async def test_stopping_ends_the_generation_and_its_readers_and_forgets_it():
    async with serving(bounds={"num_slots": 1}) as server:
        async with begun(server, "/completion", "babble") as reader:
            await reader.readuntil(b"\n\n")
            assert await stop(server) == (204, b"")
            assert b"[DONE]" not in await rest(reader)
        await server.idle()
        assert server.scheduler.totals.cancelled == 1
        assert await lookup(server, "talk") == []
        assert await stop(server) == (204, b""), "as often as one likes"


async def test_a_new_request_takes_the_place_of_the_conversations_last_one():
    async with serving(bounds={"num_slots": 1}) as server:
        async with begun(server, "/completion", "babble") as reader:
            await reader.readuntil(b"\n\n")
            ask = asking("/completion", "<<second>>", stream=True)
            async with server.session.post("/completion", json=ask, headers=HEADER) as response:
                assert Events.of(await response.read()).text() == "second"
            assert b"second" not in await rest(reader)
        assert Events.of(await replay(server)).text() == "second"
        assert (server.scheduler.totals.completed, server.scheduler.totals.cancelled) == (1, 1)


async def test_a_request_that_is_refused_leaves_the_conversations_last_reply():
    async with serving() as server:
        async with server.session.post("/completion", json=asking("/completion", "<<x>>", stream=True), headers=HEADER):
            pass
        status, _ = await server.post("/completion", {"prompt": [-1], "stream": True}, headers=HEADER)
        assert status == 400
        assert Events.of(await replay(server)).text() == "x"


@every_route
async def test_a_failure_before_the_first_byte_has_its_status_and_leaves_nothing_to_come_back_to(route):
    async with serving() as server:
        server.engine.faults["prefill"] = RuntimeError("secret detail")
        status, body = await server.post(route, asking(route, "<<x>>", stream=True), headers=HEADER)
        assert (status, body["error"]["type"]) == (500, "server_error")
        assert await lookup(server, "talk") == []


async def test_a_failure_in_mid_stream_is_told_to_those_who_come_back():
    async with serving() as server:
        async with begun(server, "/completion", "babble") as reader:
            await reader.readuntil(b"\n\n")
        server.engine.faults["decode"] = RuntimeError("secret detail")
        events = Events.of(await replay(server))
        assert events.data[-1]["error"]["code"] == 500 and "secret" not in str(events.data[-1])
        assert [found["is_done"] for found in await lookup(server, "talk")] == [True]


async def test_what_outlasts_the_drain_ends_with_an_error_event():
    async with serving() as server:
        for name in ("gone", "talk"):
            async with begun(server, "/completion", "babble", name):
                pass
        follower = asyncio.create_task(replay(server))
        await server.until(lambda: server.services.streams.find("talk").num_bytes > 1000)
        await server.scheduler.drain(0)
        assert Events.of(await follower).data[-1]["error"]["code"] == 503
        await server.until(lambda: server.services.streams.find("gone").is_done)


async def test_a_drain_lets_a_reply_finish_that_nobody_reads():
    async with serving() as server:
        server.engine.gate.clear()
        async with begun(server, "/completion", "<<hello>>"):
            pass
        draining = asyncio.create_task(server.scheduler.drain(10))
        server.engine.gate.set()
        await draining
        assert server.scheduler.totals.completed == 1


async def test_readers_that_fall_too_far_behind_are_cut_off_and_told_so_when_they_return():
    async with serving() as server:
        async with begun(server, "/completion", "babble"):
            pass
        recording = server.services.streams.find("talk")
        async with server.session.get("/v1/stream?conv_id=talk") as response:
            await response.content.readexactly(10)
            await recording.send(b"x" * 2 * MAX_BYTES)
            with pytest.raises(Exception, match=r"payload|Connection"):
                await response.read()
        status, body = await server.get("/v1/stream?conv_id=talk&from=0")
        assert (status, body["error"]["param"]) == (400, "from")
        await stop(server)


# --- asking for it


@pytest.mark.parametrize(
    ("query", "status", "param"),
    [
        ("", 400, "conv_id"),
        ("?conv_id=", 400, "conv_id"),
        ("?conv_id=nobody", 404, None),
        ("?conv_id=talk&from=-1", 400, "from"),
        ("?conv_id=talk&from=x", 400, "from"),
        ("?conv_id=talk&from=" + "9" * 5000, 400, "from"),
    ],
)
async def test_what_cannot_be_replayed_is_an_error_that_says_why(query, status, param):
    async with serving() as server:
        async with server.session.post("/completion", json=asking("/completion", "<<x>>", stream=True), headers=HEADER):
            pass
        got, body = await server.get("/v1/stream" + query)
        assert (got, body["error"].get("param")) == (status, param)


async def test_stopping_without_an_id_is_400():
    async with serving() as server, server.session.delete("/v1/stream") as response:
        assert (response.status, (await response.json())["error"]["param"]) == (400, "conv_id")


async def test_a_lookup_tells_of_the_named_conversations_and_of_no_other():
    async with serving() as server:
        for name in ("one::model/a", "one", "two", "oneself"):
            ask = asking("/completion", "<<x>>", stream=True)
            async with server.session.post("/completion", json=ask, headers={"X-Conversation-Id": name}) as response:
                whole = await response.read()
        found = await lookup(server, "two", "one", "two", "nobody", 7)
        assert [one["conversation_id"] for one in found] == ["two", "one::model/a", "one"]
        assert found[0].keys() == {"conversation_id", "is_done", "total_bytes", "started_at", "completed_at"}
        assert found[0]["is_done"] and abs(found[0]["total_bytes"] - len(whole)) < 100
        assert 1_700_000_000 < found[0]["started_at"] <= found[0]["completed_at"]
        assert await server.post("/v1/streams/lookup", {}) == (200, [])
        for body in (b"{", [], {"conversation_ids": "one"}):
            assert (await server.post("/v1/streams/lookup", body))[0] == 400


async def test_a_reply_that_runs_is_not_completed_yet():
    async with serving() as server:
        async with begun(server, "/completion", "babble"):
            pass
        (found,) = await lookup(server, "talk")
        assert (found["is_done"], found["completed_at"]) == (False, 0)
        await stop(server)


async def test_an_id_that_is_no_text_is_refused():
    async with serving() as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"POST /completion HTTP/1.1\r\nHost: x\r\nX-Conversation-Id: \xff\r\nContent-Length: 2\r\n\r\n{}")
        assert b" 400 " in await reader.readuntil(b"\r\n")
        writer.close()


async def test_coming_back_needs_the_key():
    async with serving(api_key=("k",)) as server:
        assert (await server.get("/v1/stream?conv_id=talk"))[0] == 401
        assert (await server.post("/v1/streams/lookup", {"conversation_ids": ["talk"]}))[0] == 401
        assert (await stop(server))[0] == 401
        assert (await server.get("/v1/stream?conv_id=talk", headers={"Authorization": "Bearer k"}))[0] == 404
