"""The prompt cache as clients and operators meet it: salts, sessions, opting out, explain, warm, pins."""

from dataclasses import replace

import pytest

from mlxcel.cache.limits import Limits
from tests.http.serving import MODEL, ROUTES, asking, serving
from tests.prompt.templates import KEEPS_THINKING, STRIPS_THINKING

LONG = "This is a long enough beginning that everybody shares, word for word. " * 3
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}


def cached(body) -> int:
    if "usage" in body:
        return body["usage"]["prompt_tokens_details"]["cached_tokens"]
    return body["timings"]["cache_n"]


async def ask(served, route, text=LONG, **members):
    status, body = await served.post(route, asking(route, text + "<<ok>>", max_tokens=4, **members))
    assert status == 200, body
    return body


# --- salts


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("nested", [False, True])
async def test_a_salt_shares_with_itself_only_on_every_route(route, nested):
    def salted(salt):
        return {"extra_body": {"cache_salt": salt}} if nested else {"cache_salt": salt}

    async with serving() as served:
        first = [cached(await ask(served, route, **fields)) for fields in (salted("tenant-a"), salted("tenant-b"), {})]
        again = [cached(await ask(served, route, **fields)) for fields in (salted("tenant-a"), salted("tenant-b"), {})]
    assert first == [0, 0, 0]
    assert all(n > 0 for n in again)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("salt", ["", "  ", 5, [], {}, True, "x" * 2000])
async def test_a_bad_salt_is_refused_by_name(route, salt):
    async with serving() as served:
        status, body = await served.post(route, asking(route, LONG, cache_salt=salt))
        assert served.services.store.num_entries == 0
    assert status == 400 and body["error"]["param"] == "cache_salt" and "cache_salt" in body["error"]["message"]


async def test_a_null_salt_is_no_salt():
    async with serving() as served:
        await ask(served, "/v1/completions")
        assert cached(await ask(served, "/v1/completions", cache_salt=None)) > 0


@pytest.mark.parametrize("route", [*ROUTES, "/v1/cache/warm"])
async def test_a_server_that_requires_salts_refuses_requests_without_one(route):
    async with serving(require_cache_salt=True) as served:
        status, body = await served.post(route, asking(route, LONG))
        assert status == 400 and body["error"]["param"] == "cache_salt"
        status, _ = await served.post(route, asking(route, LONG + "<<ok>>", max_tokens=2, cache_salt="a"))
        assert status == 200


async def test_a_salt_is_nowhere_to_be_seen(caplog):
    secret = "tenant-secret-4711"
    caplog.set_level("DEBUG")
    async with serving() as served:
        told = [await ask(served, route, cache_salt=secret, user="u", verbose=True) for route in ROUTES]
        for path in ("/v1/cache/explain", "/v1/cache/warm"):
            told.append(await served.post(path, asking(ROUTES[0], LONG, cache_salt=secret)))
        told.append(await served.post(ROUTES[0], asking(ROUTES[0], LONG, cache_salt=secret, temperature="hot")))
        told.append(await served.get("/v1/cache/stats"))
        async with served.session.get("/metrics") as response:
            told.append(await response.text())
        told.append(repr([entry.context for entry in served.services.store._entries]))
    assert secret not in str(told) and secret not in caplog.text


# --- sessions and opting out


async def test_another_session_lends_and_the_own_one_is_preferred():
    async with serving() as served:
        await ask(served, ROUTES[0], prompt_cache_key="one")
        _, told = await served.post("/v1/cache/explain", asking(ROUTES[0], LONG + "<<ok>>", user="two"))
        assert told["outcome"] == "hit" and told["best"]["same_session"] is False
        await ask(served, ROUTES[0], user="two")
        _, told = await served.post("/v1/cache/explain", asking(ROUTES[0], LONG + "<<ok>>", user="two"))
        assert told["best"]["same_session"] is True


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("fields", [{"cache_prompt": False}, {"extra_body": {"cache_prompt": False}}])
async def test_opting_out_neither_reads_nor_writes_nor_counts(route, fields):
    async with serving() as served:
        await ask(served, route)
        before = served.services.store.stats()
        assert cached(await ask(served, route, **fields)) == 0
        assert served.services.store.stats() == before
        assert cached(await ask(served, route)) > 0, "the twin that hits"


async def test_a_conversation_hits_on_its_whole_history():
    async with serving() as served:
        messages = [{"role": "system", "content": LONG}, {"role": "user", "content": "first <<the answer>>"}]
        _, body = await served.post(ROUTES[0], {"messages": messages, "max_tokens": 30})
        history = body["usage"]["prompt_tokens"] + body["usage"]["completion_tokens"]
        messages += [body["choices"][0]["message"], {"role": "user", "content": "second <<more>>"}]
        _, body = await served.post(ROUTES[0], {"messages": messages, "max_tokens": 30})
    assert cached(body) == history - history % 16


# --- templates that strip or keep thinking


def thinking_turns(**reply):
    return [
        {"role": "user", "content": LONG},
        {"role": "assistant", "content": "answer", **reply},
        {"role": "user", "content": "and now?"},
    ]


@pytest.mark.parametrize(
    ("template", "kwargs", "kept"),
    [
        (KEEPS_THINKING, {}, True),
        (KEEPS_THINKING, {"preserve_thinking": False}, False),
        (STRIPS_THINKING, {}, False),
        (STRIPS_THINKING, {"preserve_thinking": True}, False),
    ],
)
async def test_thinking_is_kept_across_turns_by_templates_that_can_unless_the_request_says_no(template, kwargs, kept):
    async with serving(template=template) as served:
        body = {"messages": thinking_turns(reasoning_content="because"), "chat_template_kwargs": kwargs}
        _, told = await served.post("/apply-template", body)
    assert ("because" in told["prompt"]) is kept


async def test_without_a_cache_the_template_decides_on_thinking():
    async with serving(template=KEEPS_THINKING, limits=Limits(enabled=False)) as served:
        _, told = await served.post("/apply-template", {"messages": thinking_turns(reasoning_content="because")})
    assert "because" not in told["prompt"]


async def test_the_default_of_preserve_thinking_is_no_part_of_the_signature():
    async with serving(template=KEEPS_THINKING) as served:
        signatures = []
        for kwargs in ({}, {"preserve_thinking": True}):
            body = {"messages": thinking_turns(), "chat_template_kwargs": kwargs}
            signatures.append((await served.post("/v1/cache/explain", body))[1]["template_sig"])
        absent = (await served.post("/v1/cache/explain", {"messages": thinking_turns()}))[1]["template_sig"]
    assert signatures[0] == absent != signatures[1]


# --- explain


async def explained(served, body):
    status, told = await served.post("/v1/cache/explain", body)
    assert status == 200, told
    assert (told["outcome"] == "hit") == (told["reason"] is None) == (told["hint"] is None)
    return told


async def test_explain_shows_where_two_prompts_part():
    async with serving() as served:
        await ask(served, "/v1/completions", LONG + "the old end")
        told = await explained(served, {"prompt": LONG + "the new end"})
    assert told["outcome"] == "hit"
    at = told["first_difference"]
    assert at["index"] == len(LONG) + 4 and at["before"].endswith(" the ")
    assert at["prompt"].startswith("new end") and at["entry"].startswith("old end")
    assert told["matched_tokens"] == at["index"] // 16 * 16
    assert told["floored_tokens"] == at["index"] - told["matched_tokens"]


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"messages": [{"role": "user", "content": LONG}], "chat_template_kwargs": {"a": 1}}, "kwargs"),
        ({"messages": [{"role": "user", "content": LONG}], "tool_choice": "none"}, "tools"),
        ({"prompt": LONG}, "template"),
        ({"messages": [{"role": "user", "content": LONG}], "cache_salt": "other"}, "empty"),
        ({"messages": [{"role": "user", "content": LONG}], "cache_prompt": False}, "opted_out"),
        ({"messages": [{"role": "system", "content": "Different from the first word on."}]}, "diverged"),
    ],
)  # fmt: skip
async def test_explain_names_the_reason_and_the_next_lookup_agrees(asked, reason):
    async with serving() as served:
        await ask(served, ROUTES[0])
        told = await explained(served, asked)
        assert told["reason"] == reason
        assert (told["best"] is None) == (reason in ("empty", "opted_out"))
        route = ROUTES[0] if "messages" in asked else "/v1/completions"
        before = served.services.store.stats()["misses"].get(reason)
        await served.post(route, {**asked, "max_tokens": 1})
        if before is not None:
            assert served.services.store.stats()["misses"][reason] == before + 1


async def test_explain_on_an_empty_store_a_short_prompt_and_a_store_that_is_off():
    async with serving() as served:
        assert (await explained(served, {"prompt": LONG}))["reason"] == "empty"
        assert (await explained(served, {"prompt": "short"}))["reason"] == "prompt_too_short"
    async with serving(limits=Limits(enabled=False)) as served:
        assert (await explained(served, {"prompt": LONG}))["reason"] == "disabled"
    async with serving(model=replace(MODEL, layout=None)) as served:
        assert (await explained(served, {"prompt": LONG}))["reason"] == "family"


async def test_explain_counts_and_refreshes_nothing():
    async with serving() as served:
        await ask(served, ROUTES[1])
        before = served.services.store.stats()
        entry = next(iter(served.services.store._entries))
        used = entry.last_used
        await explained(served, {"prompt": LONG})
        assert served.services.store.stats() == before and entry.last_used == used
        assert served.scheduler.totals.submitted == 1


@pytest.mark.parametrize("path", ["/v1/cache/explain", "/v1/cache/warm"])
@pytest.mark.parametrize(
    "body", [b"{", b"[]", b"{}", b'{"messages": 5}', b'{"prompt": LONG}', b'{"prompt": "x", "pin": 1}']
)
async def test_bad_bodies_are_refused_in_one_form(path, body):
    async with serving() as served:
        status, told = await served.post(path, body)
    assert status == 400 and told["error"]["type"] == "invalid_request_error"


async def test_prompts_on_two_sides_of_a_rope_boundary_have_different_keys():
    async with serving(bounds={"rope_boundary": 100}) as served:
        await ask(served, "/v1/completions")
        assert cached(await ask(served, "/v1/completions")) > 0
        told = await explained(served, {"prompt": LONG[:90]})
    assert told["reason"] == "rope" and told["key_differences"] == ["rope"]


# --- warm and pin


async def test_a_warmed_prompt_is_adopted_by_the_first_request():
    async with serving() as served:
        status, told = await served.post("/v1/cache/warm", {"prompt": LONG + "<<ok>>"})
        assert status == 200 and told["stored"] and told["cached_tokens"] == 0 and not told["pinned"]
        assert told["prefilled_tokens"] == told["prompt_tokens"] == len(LONG) + 6
        assert told["bytes"] > 0 and len(told["digest"]) == 16
        assert served.scheduler.totals.completion_tokens == 0
        assert cached(await ask(served, "/v1/completions")) > len(LONG) - 16
        _, again = await served.post("/v1/cache/warm", {"prompt": LONG + "<<ok>>"})
        assert (
            again["cached_tokens"] > 0 and again["cached_tokens"] + again["prefilled_tokens"] == again["prompt_tokens"]
        )


async def test_a_pinned_prompt_survives_eviction_until_it_is_unpinned():
    async with serving(limits=Limits(max_entries=2)) as served:
        body = {"prompt": LONG + "<<ok>>"}
        assert (await served.post("/v1/cache/warm", {**body, "pin": True}))[1]["pinned"] is True
        for i in range(5):
            await ask(served, "/v1/completions", f"{i} other beginnings push out what is old. " * 3)
        assert (await explained(served, body))["best"]["pinned"] is True
        assert (await served.get("/v1/cache/stats"))[1]["pinned_entries"] == 1
        assert (await served.post("/v1/cache/warm", {**body, "pin": False}))[1]["pinned"] is False
        for i in range(5):
            await ask(served, "/v1/completions", f"{i} more beginnings push out what is old. " * 3)
        assert (await explained(served, body))["outcome"] == "miss"


async def test_what_cannot_be_stored_cannot_be_warmed():
    async with serving(limits=Limits(enabled=False)) as served:
        status, told = await served.post("/v1/cache/warm", {"prompt": LONG})
    assert status == 400 and "--prompt-cache-enabled" in told["error"]["message"]


async def test_a_reset_says_what_it_freed_and_leaves_running_requests_alone():
    async with serving() as served:
        await ask(served, "/v1/completions")
        entries, held = served.services.store.num_entries, served.services.store.nbytes
        assert await served.post("/v1/cache/reset", b"") == (
            200,
            {"cleared": True, "freed_bytes": held, "freed_entries": entries},
        )
        assert (await served.post("/v1/cache/reset", b""))[1] == {"cleared": True, "freed_bytes": 0, "freed_entries": 0}
        assert cached(await ask(served, "/v1/completions")) == 0


async def test_every_decision_is_one_line_when_traced(caplog):
    caplog.set_level("DEBUG", logger="mlxcel.engine.reuse")
    async with serving() as served:
        await ask(served, "/v1/completions")
        await ask(served, "/v1/completions")
    events = [r.getMessage().split("apc_event=")[1] for r in caplog.records if "apc_event=" in r.getMessage()]
    assert [e.split()[0] for e in events] == ["reject", "store", "store", "adopt", "store", "store"]
    assert "reason=empty" in events[0] and "matched_len=" in events[3]
