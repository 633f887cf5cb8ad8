"""Clients that leave, stall or come too many; engines that break: who is told what, and that nothing is left."""

import asyncio
import socket

import orjson
import pytest

from tests.http.serving import ROUTES, Events, asking, said, serving

every_route = pytest.mark.parametrize("route", ROUTES)
both_modes = pytest.mark.parametrize("stream", [True, False], ids=["stream", "body"])
LONG = "word " * 200


# --- clients that leave


@every_route
@both_modes
async def test_a_client_that_leaves_while_tokens_are_generated_frees_its_slot(route, stream):
    async with serving(bounds={"num_slots": 1}) as server:
        _, writer = await server.open(route, asking(route, "babble", stream=stream))
        await server.until(lambda: server.engine.plans and server.engine.plans[-1].decode)
        writer.close()
        await server.idle()
        assert server.scheduler.totals.cancelled == 1
        steps = len(server.engine.plans)
        assert said((await server.post(route, asking(route, "<<hi>>")))[1]) == "hi"
        assert len(server.engine.plans) < steps + 20
        assert server.scheduler.totals.completed == 1


@every_route
@both_modes
async def test_a_client_that_leaves_during_prefill_frees_its_slot(route, stream):
    async with serving(bounds={"num_slots": 1}) as server:
        server.engine.gate.clear()
        _, writer = await server.open(route, asking(route, LONG, stream=stream))
        await server.until(lambda: server.scheduler.num_active)
        writer.close()
        await server.until(lambda: server.scheduler.active()[0].cancelled)
        server.engine.gate.set()
        await server.idle()
        assert server.engine.num_prefilled <= 64, "the chunk in progress and no more"
        assert (server.scheduler.totals.cancelled, server.scheduler.totals.completion_tokens) == (1, 0)


@every_route
@both_modes
async def test_a_client_that_leaves_the_queue_frees_its_place_and_costs_nothing(route, stream):
    async with serving(bounds={"num_slots": 1, "max_queue": 1}) as server:
        server.engine.gate.clear()
        holder = asyncio.create_task(server.post(route, asking(route, "<<first>>")))
        await server.until(lambda: server.state() == (1, 0))
        _, writer = await server.open(route, asking(route, "queued", stream=stream))
        await server.until(lambda: server.state() == (1, 1))
        writer.close()
        await server.until(lambda: server.scheduler._waiting[0].cancelled)
        server.engine.gate.set()
        assert said((await holder)[1]) == "first"
        await server.idle()
        assert (server.scheduler.totals.cancelled, server.scheduler.totals.completed) == (1, 1)


@both_modes
async def test_closing_only_the_sending_half_counts_as_leaving(stream):
    async with serving() as server:
        _, writer = await server.open("/completion", asking("/completion", "babble", stream=stream))
        await server.until(lambda: server.scheduler.num_active)
        writer.write_eof()
        await server.idle()
        writer.close()
        assert server.scheduler.totals.cancelled == 1


async def test_with_several_choices_a_leaving_client_takes_all_of_them_along():
    async with serving() as server:
        _, writer = await server.open("/completion", asking("/completion", "babble", n=4, stream=True))
        await server.until(lambda: server.scheduler.num_active == 4)
        writer.close()
        await server.idle()
        assert server.scheduler.totals.cancelled == 4


async def test_many_requests_given_up_at_odd_moments_leave_nothing_behind():
    async with serving() as server:

        async def one(i):
            task = asyncio.create_task(server.post("/completion", asking("/completion", "x" * 30_000 + f"<<{i}>>")))
            for _ in range(i % 25):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        await asyncio.gather(*(one(i) for i in range(40)))
        await server.idle()
        totals = server.scheduler.totals
        assert totals.submitted == totals.completed + totals.cancelled + totals.failed


async def test_a_client_that_leaves_is_no_error_in_the_log(caplog):
    async with serving() as server:
        for i in range(40):
            reader, writer = await server.open(ROUTES[0], asking(ROUTES[0], "babble", stream=True))
            for _ in range(i):
                await reader.readuntil(b"\n\n")
            writer.close()
            await server.idle()
        assert server.scheduler.totals.cancelled == 40
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


# --- clients that stop reading


async def test_a_client_that_stops_reading_is_given_up_and_holds_nobody_back():
    async with serving(timeout=0.3) as server:
        stalled = socket.socket()
        stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stalled.connect(("127.0.0.1", server.port))
        stalled.setblocking(False)
        body = orjson.dumps(asking("/completion", "babble", stream=True, n_probs=100))
        head = f"POST /completion HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        await asyncio.get_running_loop().sock_sendall(stalled, head.encode() + body)
        await server.until(lambda: server.scheduler.num_active)
        served = [await server.post("/completion", asking("/completion", f"<<{i}>>")) for i in range(5)]
        assert [said(body) for _, body in served] == list("01234")
        await server.idle()
        assert server.scheduler.totals.cancelled == 1
        stalled.close()


async def test_a_client_that_reads_slowly_loses_nothing():
    async with serving(timeout=30) as server:
        ask = asking("/completion", "<<" + "ab" * 400 + ">>", stream=True, n_probs=20)
        reader, writer = await server.open("/completion", ask)
        await server.until(lambda: server.scheduler.totals.completed)
        raw = b""
        while piece := await reader.read(1 << 16):
            raw += piece
            if raw.endswith(b"0\r\n\r\n"):
                break
        writer.close()
        assert raw.count(b'"content":"a"') == raw.count(b'"content":"b"') == 400


# --- silence


@every_route
async def test_a_silent_stream_gets_comments_while_queued_and_during_prefill(route):
    async with serving(sse_ping_interval=0.05, bounds={"num_slots": 1}) as server:
        server.engine.gate.clear()
        first = asyncio.create_task(server.stream(route, asking(route, "<<first>>")))
        await server.until(lambda: server.state() == (1, 0))
        queued = asyncio.create_task(server.stream(route, asking(route, "<<second>>")))
        await server.until(lambda: server.state() == (1, 1))
        await asyncio.sleep(0.25)
        server.engine.gate.set()
        for events, text in ((await first, "first"), (await queued, "second")):
            assert events.text() == text
            assert 2 <= events.num_pings <= 10


async def test_no_comment_comes_into_a_body_or_into_a_stream_that_wants_none():
    async with serving(sse_ping_interval=0.02) as server:
        server.engine.gate.clear()
        ask = asking("/completion", "<<a>>")
        body = asyncio.create_task(server.post("/completion", ask))
        quiet = asyncio.create_task(server.stream("/completion", ask | {"sse_ping_interval": -1}))
        await server.until(lambda: sum(server.state()) == 2)
        await asyncio.sleep(0.1)
        server.engine.gate.set()
        assert said((await body)[1]) == "a"
        assert (await quiet).num_pings == 0


async def test_a_client_that_left_is_noticed_while_its_stream_is_silent():
    async with serving(sse_ping_interval=0.05) as server:
        server.engine.gate.clear()
        reader, writer = await server.open("/completion", asking("/completion", LONG, stream=True))
        assert b"200 OK" in await reader.readuntil(b"\r\n"), "the first comment sends the status"
        writer.close()
        await server.until(lambda: server.scheduler.active()[0].cancelled)


async def test_what_proxies_need_to_know_is_in_the_headers():
    async with serving() as server:
        body = asking("/completion", "<<x>>", stream=True)
        async with server.session.post("/completion", json=body) as response:
            assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
            assert response.headers["Cache-Control"] == "no-cache"
            assert response.headers["X-Accel-Buffering"] == "no"
            assert "Content-Length" not in response.headers and "Content-Encoding" not in response.headers
            await response.read()


# --- engines that break


@every_route
@both_modes
@pytest.mark.parametrize("when", ["prefill", "decode"])
async def test_a_failure_before_the_first_byte_has_a_status_of_its_own(route, stream, when):
    async with serving() as server:
        server.engine.faults[when] = RuntimeError("secret detail")
        status, body = await server.post(route, asking(route, "<<x>>", stream=stream))
        assert (status, body["error"]["code"], body["error"]["type"]) == (500, 500, "server_error")
        assert "secret" not in str(body)
        server.engine.faults.clear()
        assert said((await server.post(route, asking(route, "<<ok>>")))[1]) == "ok"
        assert (server.scheduler.totals.failed, server.scheduler.totals.completed) == (1, 1)


@every_route
async def test_a_failure_in_mid_stream_is_one_error_event_and_no_done(route):
    async with serving() as server:

        async def fail_soon():
            await server.until(lambda: server.scheduler.totals.completion_tokens > 5)
            server.engine.faults["decode"] = RuntimeError("secret detail")

        breaking = asyncio.create_task(fail_soon())
        events = await server.stream(route, asking(route, "babble"))
        await breaking
        assert events.text().startswith("xxxxx")
        assert events.data[-1]["error"]["code"] == 500 and not events.done
        assert len([event for event in events.data if "error" in event]) == 1
        assert "secret" not in str(events.data[-1]) and not events.reasons


async def test_a_bug_in_a_handler_is_that_requests_500_and_a_traceback_in_the_log(caplog):
    async with serving() as server:
        server.services.store.stats = None
        status, body = await server.get("/v1/cache/stats")
        assert status == 500 and "NoneType" not in str(body)
        assert "NoneType" in caplog.text
        assert (await server.get("/health"))[0] == 200


# --- too many


@both_modes
async def test_what_does_not_fit_the_queue_is_503_with_retry_after_before_any_stream(stream):
    async with serving(bounds={"num_slots": 1, "max_queue": 2}) as server:
        server.engine.gate.clear()
        ask = asking("/completion", "<<x>>", cache_prompt=False)
        held = [asyncio.create_task(server.post("/completion", ask)) for _ in range(3)]
        await server.until(lambda: server.state() == (1, 2))
        async with server.session.post("/completion", json=ask | {"stream": stream}) as response:
            assert response.status == 503
            assert int(response.headers["Retry-After"]) > 0
            assert (await response.json())["error"]["type"] == "unavailable_error"
        server.engine.gate.set()
        assert [status for status, _ in await asyncio.gather(*held)] == [200] * 3


async def test_choices_that_do_not_all_fit_leave_none_behind():
    async with serving(bounds={"num_slots": 1, "max_queue": 3}) as server:
        server.engine.gate.clear()
        held = [asyncio.create_task(server.post("/completion", asking("/completion", "<<x>>"))) for _ in range(2)]
        await server.until(lambda: sum(server.state()) == 2)
        status, _ = await server.post("/completion", asking("/completion", "babble", n=4))
        assert status == 503
        server.engine.gate.set()
        assert [status for status, _ in await asyncio.gather(*held)] == [200, 200]
        await server.idle()
        assert server.scheduler.totals.completed == 2


async def test_a_huge_prompt_does_not_keep_others_from_being_answered():
    """It is just short enough not to be refused by its length alone: a token is at most 13 bytes here."""
    async with serving(bounds={"n_ctx": 80_000}) as server:
        big = asyncio.create_task(server.post("/completion", asking("/completion", "word " * 200_000)))
        loop = asyncio.get_running_loop()
        began, gaps = loop.time(), []
        while not big.done():
            asked = loop.time()
            assert (await server.get("/health"))[0] == 200
            gaps.append(loop.time() - asked)
        assert (await big)[0] == 400
        assert max(gaps) < (loop.time() - began) / 2, "on the loop, one gap would be nearly all of the time"


async def test_a_text_that_cannot_fit_is_refused_without_being_tokenised():
    async with serving(bounds={"n_ctx": 100}) as server:
        for route, text in (("/completion", "x" * 5000), ("/v1/chat/completions", "x" * 5000)):
            status, body = await server.post(route, asking(route, text))
            assert (status, body["error"]["type"]) == (400, "exceed_context_size_error")
            assert 100 <= body["error"]["n_prompt_tokens"] < 5000, "as few as there can be: nobody counted them"


# --- shutting down


async def test_a_draining_server_refuses_at_once_and_closes_the_connection():
    async with serving() as server:
        assert (await server.get("/health"))[0] == 200
        server.services.draining = True
        for path in ("/health", "/v1/models"):
            async with server.session.get(path) as response:
                assert response.status == 503
                assert int(response.headers["Retry-After"]) > 0
                assert response.headers["Connection"] == "close"


@both_modes
async def test_a_drain_lets_running_requests_finish(stream):
    async with serving() as server:
        server.engine.gate.clear()
        ask = asking("/completion", "<<hello>>")
        running = asyncio.create_task(server.stream("/completion", ask) if stream else server.post("/completion", ask))
        await server.until(lambda: server.scheduler.num_active)
        draining = asyncio.create_task(server.scheduler.drain(10))
        await asyncio.sleep(0)
        status, body = await server.post("/completion", ask)
        assert status == 503 and "shutting down" in body["error"]["message"]
        server.engine.gate.set()
        await draining
        answer = await running
        assert (answer.text() if isinstance(answer, Events) else said(answer[1])) == "hello"


async def test_what_outlasts_the_drain_ends_with_an_error_event():
    async with serving() as server:
        running = asyncio.create_task(server.stream("/completion", asking("/completion", "babble")))
        waiting = asyncio.create_task(server.post("/completion", asking("/completion", "babble")))
        await server.until(lambda: server.scheduler.totals.completion_tokens > 5)
        await server.scheduler.drain(0)
        events, (status, _) = await running, await waiting
        assert events.data[-1]["error"]["code"] == 503 and not events.done
        assert status == 503
