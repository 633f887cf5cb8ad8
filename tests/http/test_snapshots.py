"""Snapshots as clients and operators meet them, on real tiny models: salts, opting out, explain, warm, reset, stats."""

from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import pytest

from mlxcel.cache.limits import SnapshotLimits
from tests.http.serving import ROUTES, asking, serving
from tests.models.chats import ROUTE, Chat
from tests.tiny import tiny_model

CAPACITY = 8_000_000
LONG = "This is a long enough beginning for a snapshot to be worth storing, and it is longer than the window. "


@pytest.fixture(scope="module")
def mlx_thread():
    with ThreadPoolExecutor(1) as pool:
        yield pool
        pool.submit(mx.clear_streams).result()


@pytest.fixture(params=["gemma3_text", "mamba2", "qwen3_next"])
def served(request, mlx_thread):
    return serving(
        model=mlx_thread.submit(tiny_model, request.param).result(), pool=mlx_thread, disable_cache_warmup=True
    )


def cached(body) -> int:
    return body["usage"]["prompt_tokens_details"]["cached_tokens"] if "usage" in body else body["timings"]["cache_n"]


async def ask(server, route, text=LONG, **members):
    status, body = await server.post(route, asking(route, text, max_tokens=4, temperature=0, **members))
    assert status == 200, body
    return body


@pytest.mark.parametrize("route", ROUTES)
async def test_a_salt_shares_with_itself_only(served, route):
    async with served as server:
        salts = ({"cache_salt": "a"}, {"cache_salt": "b"}, {})
        first = [cached(await ask(server, route, user="u", **salt)) for salt in salts]
        again = [cached(await ask(server, route, user="u", **salt)) for salt in salts]
    assert first == [0, 0, 0]
    assert all(n > 90 for n in again)


@pytest.mark.parametrize("route", ROUTES)
async def test_opting_out_neither_reads_nor_writes(served, route):
    async with served as server:
        await ask(server, route, cache_prompt=False)
        assert server.services.snapshots.num_entries == server.services.snapshots.totals.lookups == 0
        await ask(server, route)
        before = server.services.snapshots.stats()
        assert cached(await ask(server, route, cache_prompt=False)) == 0
        assert server.services.snapshots.stats() == before
        assert cached(await ask(server, route)) > 0


async def test_the_same_session_on_another_route_shares_nothing(served):
    async with served as server:
        await ask(server, "/v1/completions", user="u")
        assert cached(await ask(server, "/v1/chat/completions", user="u")) == 0
        _, told = await server.post("/v1/cache/explain", asking("/v1/completions", LONG, user="v"))
        assert (told["outcome"], told["reason"]) == ("miss", "other_session") and told["hint"]
        assert told["best"]["same_session"] is False


async def test_an_edited_history_is_explained_with_the_first_difference(served):
    async with served as server:
        chat = Chat(server, "s")
        await chat.turn("What is the tallest mountain?")
        messages = [
            {"role": "system", "content": chat.system},
            *chat.messages,
            {"role": "user", "content": "And then?"},
        ]
        body = {"messages": messages, "prompt_cache_key": "s"}
        _, told = await server.post("/v1/cache/explain", body)
        assert told["outcome"] == "hit" and told["matched_tokens"] == told["best"]["tokens"]
        messages[1] = {"role": "user", "content": "What is the smallest mountain?"}
        _, told = await server.post("/v1/cache/explain", body)
        assert told["reason"] in ("wrapped_window", "cannot_truncate")
        assert told["first_difference"]["prompt"].startswith("smallest")
        assert told["first_difference"]["entry"].startswith("tallest")
        turn = await chat.ask("And then?")
        assert turn.cached > 0, "explaining touches nothing"


async def test_a_prompt_is_warmed_and_pinned(served):
    async with served as server:
        body = asking("/v1/completions", LONG)
        _, told = await server.post("/v1/cache/warm", body | {"pin": True})
        assert told["stored"] and told["pinned"] and told["bytes"] > 0 and told["cached_tokens"] == 0
        assert cached(await ask(server, "/v1/completions", LONG + "And on it goes.")) == told["prompt_tokens"] - 1
        _, told = await server.post("/v1/cache/warm", body | {"pin": False})
        assert told["stored"] and not told["pinned"] and told["cached_tokens"] == told["prompt_tokens"] - 1


async def test_a_reset_empties_both_stores_and_is_idempotent(served):
    async with served as server:
        await ask(server, ROUTE)
        nbytes, entries = server.services.snapshots.nbytes, server.services.snapshots.num_entries
        _, told = await server.post("/v1/cache/reset", {})
        assert told == {"cleared": True, "freed_bytes": nbytes, "freed_entries": entries} and nbytes
        _, told = await server.post("/v1/cache/reset", {})
        assert told == {"cleared": True, "freed_bytes": 0, "freed_entries": 0}
        assert cached(await ask(server, ROUTE)) == 0


async def test_the_numbers_agree_everywhere(served):
    async with served as server:
        answers = [await ask(server, ROUTE, user="u") for _ in range(3)]
        await ask(server, ROUTE, user="v")
        _, stats = await server.get("/v1/cache/stats")
        async with server.session.get("/metrics") as response:
            metrics = await response.text()
    reused = sum(cached(answer) for answer in answers)
    assert (stats["snapshot_lookups"], stats["snapshot_hits"], stats["snapshot_tokens_reused"]) == (4, 2, reused)
    assert stats["snapshot_misses"] == {"empty": 1, "other_session": 1}
    assert stats["entries"] == stats["snapshot_entries"] and stats["bytes"] == stats["snapshot_bytes"] > 0
    name = "mlxcel_prompt_cache_snapshot_"
    for line in (f"{name}hits_total 2", f"{name}misses_total 2", f"{name}tokens_reused_total {reused}"):
        assert line + "\n" in metrics
    assert f'{name}misses_by_reason_total{{reason="other_session"}} 1' in metrics
    assert f"{name}entries {stats['snapshot_entries']}\n" in metrics


async def test_a_state_that_cannot_be_put_back_costs_the_hit_and_nothing_else(served):
    """As after a model file was exchanged under the same name."""
    async with served as server:
        cold = await ask(server, ROUTE, cache_prompt=False)
        await ask(server, ROUTE, user="u")
        for snapshot in server.services.snapshots:
            leaves = snapshot.payload.leaves
            object.__setattr__(snapshot.payload, "leaves", leaves[:-1])
        again = await ask(server, ROUTE, user="u")
        _, stats = await server.get("/v1/cache/stats")
    assert cached(again) == 0 and again["choices"][0]["message"] == cold["choices"][0]["message"]
    assert stats["snapshot_refusals"] == {"layer_kinds": 1} and stats["snapshot_misses"]["unrestorable"] == 1
    assert stats["snapshot_hits"] + sum(stats["snapshot_misses"].values()) == stats["snapshot_lookups"]


async def test_two_hundred_turns_of_twenty_sessions_cost_what_the_stats_say(mlx_thread):
    model = mlx_thread.submit(tiny_model, "qwen3_next").result()
    async with serving(model=model, pool=mlx_thread, disable_cache_warmup=True) as server:
        store = server.services.snapshots
        store.limits = SnapshotLimits(capacity_bytes=CAPACITY)
        await ask(server, ROUTE)
        await server.post("/v1/cache/reset", {})
        before = mlx_thread.submit(_memory).result()
        chats = [Chat(server, f"s{i}") for i in range(20)]
        for turn in range(10):
            for chat in chats:
                await chat.turn(f"Question {turn}?")
                assert store.nbytes <= CAPACITY
        await server.idle()
        grown = mlx_thread.submit(_memory).result() - before
        assert store.totals.hits > 30 and store.totals.evictions["lru"] > 0
        assert abs(grown - store.nbytes) < 0.1 * store.nbytes


def _memory() -> int:
    mx.clear_cache()
    return mx.get_active_memory()
