"""GET /metrics: what clients were told adds up to what is counted, whatever the route, the mode and the end."""

import asyncio
import re

import pytest

from tests.http.serving import ROUTES, asking, serving

LONG = "a beginning that is long enough to be worth keeping in the prompt cache of the server "


async def scrape(server):
    async with server.session.get("/metrics") as response:
        assert response.status == 200
        assert response.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert int(response.headers["Process-Start-Time-Unix"]) > 0
        text = await response.text()
    assert text.endswith("\n")
    names = re.findall(r"^# TYPE (\S+) \S+$", text, re.MULTILINE)
    assert names == re.findall(r"^# HELP (\S+) .+$", text, re.MULTILINE) and len(names) == len(set(names))
    samples = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in samples}


def usage_of(body):
    if "usage" in body:
        used = body["usage"]
        return used["prompt_tokens"], used["completion_tokens"], used["prompt_tokens_details"]["cached_tokens"]
    return body["tokens_evaluated"], body["tokens_predicted"], body["timings"]["cache_n"]


@pytest.mark.parametrize("route", ROUTES)
async def test_totals_are_the_sum_of_what_both_modes_reported(route):
    async with serving() as server:
        before = await scrape(server)
        told = []
        for text in ("<<one>>", LONG + "<<two>>"):
            ask = asking(route, text)
            told.append(usage_of((await server.post(route, ask))[1]))
            events = await server.stream(route, ask | {"stream_options": {"include_usage": True}})
            told.append(usage_of(events.data[-1]))
            await server.stream(route, ask | {"max_tokens": 2})
            told.append((told[-1][0], 2, None))
        after = await scrape(server)

    def moved(name):
        return after[name] - before[name]

    assert moved('mlxcel_requests_ended_total{end="completed"}') == moved("mlxcel_requests_total") == 6
    assert moved("llamacpp:tokens_predicted_total") == sum(predicted for _, predicted, _ in told)
    computed, cached = moved("llamacpp:prompt_tokens_total"), moved("llamacpp:prompt_tokens_cached_total")
    assert computed + cached == sum(prompt for prompt, _, _ in told)
    assert cached > 0
    assert moved("mlxcel_request_ttft_ms_count") == 6


async def test_each_request_ends_in_one_place():
    async with serving(bounds={"num_slots": 1}) as server:
        ask = asking("/completion", "<<x>>")
        assert (await server.post("/completion", ask | {"n": 0}))[0] == 400
        assert (await server.post("/completion", b"{"))[0] == 400
        assert (await server.post("/v1/chat/completions", {"messages": []}))[0] == 400
        assert (await server.post("/completion", asking("/completion", "x" * 200_000)))[0] == 400
        assert (await server.post("/completion", ask))[0] == 200
        server.engine.faults["decode"] = RuntimeError("x")
        assert (await server.post("/completion", ask | {"stream": True}))[0] == 500
        server.engine.faults.clear()
        _, writer = await server.open("/completion", asking("/completion", "babble", stream=True))
        await server.until(lambda: server.scheduler.totals.completion_tokens > 5)
        writer.close()
        await server.idle()
        counted = await scrape(server)
    assert counted["mlxcel_requests_refused_total"] == 4
    assert counted["mlxcel_requests_total"] == 3
    ends = {end: counted[f'mlxcel_requests_ended_total{{end="{end}"}}'] for end in ("completed", "failed", "cancelled")}
    assert ends == {"completed": 1, "failed": 1, "cancelled": 1}


async def test_gauges_are_back_at_zero_when_clients_have_left_queued_and_running():
    async with serving(bounds={"num_slots": 2}) as server:
        server.engine.gate.clear()
        connections = []
        for i in range(9):
            body = asking("/completion", f"<<{i}>>" if i % 3 else "babble", stream=bool(i % 2), cache_prompt=False)
            connections.append(await server.open("/completion", body))
        await server.until(lambda: server.state() == (1, 8))  # the step that admits a second one is held back
        during = await scrape(server)
        assert during["llamacpp:requests_processing"] == 1
        assert during["llamacpp:requests_deferred"] == during["mlxcel_queue_depth"] == 8
        for _, writer in connections[::2]:
            writer.close()
        server.engine.gate.set()
        await asyncio.sleep(0.05)
        for _, writer in connections:
            writer.close()
        await server.idle()
        idle = await scrape(server)
    assert idle["llamacpp:requests_processing"] == idle["llamacpp:requests_deferred"] == 0
    assert idle["mlxcel_slots_available"] == idle["mlxcel_slots_total"] == 2


async def test_hits_and_misses_are_the_lookups_and_nothing_else():
    async with serving() as server:

        async def ask(text, **members):
            await server.post("/completion", asking("/completion", text, **members))

        for text in ("<<short>>", LONG + "<<a>>", LONG[::-1] + "<<b>>"):
            await ask(text)
        await ask(LONG + "<<c>>")
        await ask(LONG[::-1] + "<<d>>")
        await ask(LONG + "<<e>>", cache_prompt=False)
        counted = await scrape(server)
    assert counted["mlxcel_prompt_cache_hits_total"] == 2
    assert counted["mlxcel_prompt_cache_misses_total"] == 3
    by_reason = sum(v for k, v in counted.items() if k.startswith("mlxcel_prompt_cache_misses_by_reason_total"))
    assert by_reason == 3
    assert counted["mlxcel_prompt_cache_prefix_tokens_reused_total"] == counted["llamacpp:prompt_tokens_cached_total"]
