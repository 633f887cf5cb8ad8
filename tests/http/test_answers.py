"""Answers over HTTP: the same in every mode, and in the form that clients of each dialect expect."""

import pytest

from tests.http.serving import ROUTES, asking, encode, said, serving


def encode_ids(text):
    return encode(text).tolist()


every_route = pytest.mark.parametrize("route", ROUTES)

TEXTS = {
    "plain": "the quick brown fox",
    "utf-8": "한글 테스트 ďábel 🙂👍",
    "joiners": "e\u0301 🏳️‍🌈 👍🏽",
    "newlines": "a\n\nb\r\n",
    "json": '{"a": "\\"b\\""}',
    "empty": "",
}


@every_route
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
async def test_stream_and_body_say_the_same_and_count_alike(route, text):
    async with serving() as server:
        ask = asking(route, f"<<{text}>>", stream_options={"include_usage": True}, cache_prompt=False)
        status, body = await server.post(route, ask)
        events = await server.stream(route, ask)
    assert status == 200
    assert said(body) == events.text() == text
    assert len(events.reasons) == 1
    if route == "/completion":
        last = events.data[-1]
        for key in ("tokens_evaluated", "tokens_predicted", "tokens_cached", "stop_type", "has_new_line", "prompt"):
            assert last[key] == body[key], key
        assert not events.done
    else:
        usage = [event["usage"] for event in events.data if event.get("usage")]
        assert usage == [body["usage"]]
        assert body["usage"]["completion_tokens"] == len(text.encode()) + 1, "the end token counts"
        assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert events.done


# --- how an answer ends


@every_route
@pytest.mark.parametrize(
    ("stop", "text", "num_tokens"),
    [
        (["own fo"], "the quick br", 18),
        (["quick brown"], "the ", 15),
        (["zzz", "brown"], "the quick ", 15),
        (["quick", "the quick brown"], "the ", 9),
        ("t", "", 1),
        (["zzz", ""], "the quick brown fox", 20),
        (["fox and more"], "the quick brown fox", 20),
    ],
)
async def test_a_stop_string_ends_both_modes_at_the_same_place(route, stop, text, num_tokens):
    async with serving() as server:
        ask = asking(route, "<<the quick brown fox>>", stop=stop)
        _, body = await server.post(route, ask)
        events = await server.stream(route, ask)
    assert said(body) == events.text() == text
    assert set(events.reasons) <= {"stop", "word", "eos"}
    num = body["tokens_predicted"] if route == "/completion" else body["usage"]["completion_tokens"]
    assert num == num_tokens


@every_route
@pytest.mark.parametrize(
    ("members", "text", "reason", "stop_type"),
    [
        ({"max_tokens": 3}, "hel", "length", "limit"),
        ({"max_tokens": 1}, "h", "length", "limit"),
        ({"max_tokens": 0}, "", "length", "limit"),
        ({"max_tokens": 6}, "hello", "stop", "eos"),
        ({"max_tokens": -1}, "hello", "stop", "eos"),
    ],
)
async def test_the_reason_for_the_end(route, members, text, reason, stop_type):
    async with serving() as server:
        ask = asking(route, "<<hello>>", **members)
        _, body = await server.post(route, ask)
        events = await server.stream(route, ask)
    assert said(body) == events.text() == text
    assert events.reasons == [stop_type if route == "/completion" else reason]


@every_route
async def test_a_character_cut_by_the_limit_is_one_replacement_in_both_modes(route):
    async with serving() as server:
        ask = asking(route, "<<a🙂>>", max_tokens=3)
        _, body = await server.post(route, ask)
        events = await server.stream(route, ask)
    assert said(body) == events.text() == "a\ufffd"


@every_route
@pytest.mark.parametrize("limit", [None, -1, 10**8, 2**63])
async def test_the_end_of_the_context_is_a_length_and_not_an_error(route, limit):
    async with serving(bounds={"n_ctx": 120}) as server:
        status, body = await server.post(route, asking(route, "babble", max_tokens=limit))
    assert status == 200
    if route == "/completion":
        assert (body["stop_type"], body["truncated"]) == ("limit", True)
        assert body["tokens_evaluated"] + body["tokens_predicted"] == 120
    else:
        assert body["choices"][0]["finish_reason"] == "length"
        assert body["usage"]["total_tokens"] == 120


@every_route
@pytest.mark.parametrize("stream", [True, False])
async def test_a_prompt_beyond_the_context_is_refused_with_both_numbers(route, stream):
    async with serving(bounds={"n_ctx": 120}) as server:
        status, body = await server.post(route, asking(route, "x" * 200, stream=stream))
    assert status == 400
    assert body["error"]["type"] == "exceed_context_size_error"
    assert body["error"]["n_prompt_tokens"] >= 200 and body["error"]["n_ctx"] == 120


# --- usage


@pytest.mark.parametrize("route", ROUTES[:2])
@pytest.mark.parametrize(
    ("stream_options", "extra"),
    [({"include_usage": True}, 1), ({"include_usage": False}, 0), ({}, 0), (None, 0)],
    ids=str,
)
async def test_include_usage_decides_on_one_chunk_without_choices(route, stream_options, extra):
    async with serving() as server:
        events = await server.stream(route, asking(route, "<<hello>>", stream_options=stream_options))
    without_choices = [event for event in events.data if not event["choices"]]
    assert len(without_choices) == extra
    assert without_choices == events.data[len(events.data) - extra :], "it is the last"
    with_usage = [event for event in events.data if event.get("usage")]
    assert len(with_usage) == (1 if extra or route == "/v1/completions" else 0)


LONG = "a long enough beginning that several blocks of it are worth keeping in the prompt cache "


@pytest.mark.parametrize("route", ROUTES[:2])
@pytest.mark.parametrize("stream", [True, False])
async def test_cached_tokens_are_an_integer_in_every_mode_and_0_on_a_miss(route, stream):
    async def cached(server, text):
        ask = asking(route, text, stream_options={"include_usage": True})
        if stream:
            usage = (await server.stream(route, ask)).data[-1]["usage"]
        else:
            usage = (await server.post(route, ask))[1]["usage"]
        assert 0 <= usage["prompt_tokens_details"]["cached_tokens"] < usage["prompt_tokens"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    async with serving() as server:
        assert await cached(server, LONG + "<<one>>") == 0
        prefilled = server.engine.num_prefilled
        again = await cached(server, LONG + "<<two>>")
        assert again >= len(LONG) // 16 * 16 and again % 16 == 0
        assert server.engine.num_prefilled - prefilled < prefilled - again + 8, "what is said was not computed"
        assert server.scheduler.totals.cached_tokens == again


async def test_native_numbers_tell_occupancy_from_reuse():
    async with serving() as server:
        for cold in (True, False):
            ask = asking("/completion", LONG + "<<hello>>", n_predict=8)
            _, body = await server.post("/completion", ask)
            last = (await server.stream("/completion", ask | {"cache_prompt": False})).data[-1]
            assert (body["tokens_evaluated"], body["tokens_predicted"]) == (len(LONG) + 9, 6)
            assert body["tokens_cached"] == body["tokens_evaluated"] + body["tokens_predicted"] - 1
            assert (body["timings"]["cache_n"] == 0) is cold
            assert body["timings"]["prompt_n"] == body["tokens_evaluated"] - body["timings"]["cache_n"]
            same = ("tokens_evaluated", "tokens_predicted", "tokens_cached", "stop", "stop_type")
            assert {k: last[k] for k in same} == {k: body[k] for k in same}


# --- the prompt cache as a request steers it


async def reused(server, route, text=LONG + "<<x>>", **members):
    _, body = await server.post(route, asking(route, text, **members))
    return body["timings"]["cache_n"]


@every_route
async def test_opting_out_neither_reads_nor_writes_nor_counts(route):
    async with serving() as server:
        await reused(server, route)
        before = server.services.store.stats()
        for members in ({"cache_prompt": False}, {"extra_body": {"cache_prompt": False}}):
            assert await reused(server, route, **members) == 0
            assert await reused(server, route, LONG[::-1] + "<<y>>", **members) == 0
        assert server.services.store.stats() == before
        assert await reused(server, route) > 0


@every_route
async def test_a_salt_shares_with_itself_alone(route):
    async with serving() as server:

        async def with_salt(salt, **members):
            return await reused(server, route, user="u", prompt_cache_key="k", cache_salt=salt, **members)

        assert await with_salt("s1") == 0
        assert await with_salt("s1") > 0, "the positive control"
        assert await with_salt("s2") == 0
        assert await with_salt(None) == 0
        assert await with_salt(None, extra_body={"cache_salt": "s1"}) > 0, "nested is the same as at the top level"
        assert await with_salt("s2") > 0
        assert await with_salt(None) > 0


async def test_raw_prompts_share_among_their_routes_and_never_with_chats():
    async with serving() as server:
        text = server.services.live.template.render([{"role": "user", "content": LONG + "<<x>>"}])
        assert await reused(server, "/v1/chat/completions") == 0
        assert await reused(server, "/completion", text) == 0
        assert await reused(server, "/v1/completions", text) > 0


async def test_a_server_that_requires_salts_says_so_on_every_route():
    async with serving(require_cache_salt=True) as server:
        for route in ROUTES:
            status, body = await server.post(route, asking(route, "<<x>>"))
            assert (status, body["error"]["param"]) == (400, "cache_salt")
            assert (await server.post(route, asking(route, "<<x>>", cache_salt="s")))[0] == 200


async def test_other_template_kwargs_are_another_bucket_and_their_order_is_not():
    template = "{{ messages[-1].content }}{{ a }}{{ b }}"
    async with serving(template=template, chat_template_kwargs={"b": 2}) as server:

        async def with_kwargs(**kwargs):
            return await reused(server, "/v1/chat/completions", chat_template_kwargs=kwargs)

        assert await with_kwargs(a=1) == 0
        assert await with_kwargs(b=2, a=1) > 0, "the server's default written out"
        assert await with_kwargs(a=1, b=3) == 0


# --- several choices, several prompts


@every_route
@pytest.mark.parametrize("stream", [True, False])
async def test_n_choices_of_one_prompt_share_its_prefill_and_count_it_once(route, stream):
    async with serving() as server:
        ask = asking(route, LONG + "<<hello>>", n=3, stream_options={"include_usage": True})
        if stream:
            events = await server.stream(route, ask)
            assert [events.text(i) for i in range(3)] == ["hello"] * 3
            assert len(events.reasons) == 3
            usage = events.data[-1].get("usage")
        else:
            _, body = await server.post(route, ask)
            parts = body if route == "/completion" else body["choices"]
            assert [part["index"] for part in parts] == [0, 1, 2]
            assert [said(p if route == "/completion" else {"choices": [p]}) for p in parts] == ["hello"] * 3
            usage = None if route == "/completion" else body["usage"]
        if route != "/completion":
            assert usage["completion_tokens"] == 18
            assert usage["prompt_tokens"] < 2 * len(LONG)
        assert server.engine.num_prefilled < 2 * len(LONG)


async def test_choices_have_seeds_of_their_own():
    async with serving() as server:
        _, body = await server.post("/completion", asking("/completion", "<<x>>", n=3, seed=7))
    assert [part["generation_settings"]["seed"] for part in body] == [7, 8, 9]


@pytest.mark.parametrize("route", ROUTES[1:])
async def test_several_prompts_are_answered_in_their_order(route):
    async with serving() as server:
        prompts = {"prompt": ["<<a>>", encode_ids("<<b>>"), ["<<", *encode_ids("c>>")]]}
        _, body = await server.post(route, prompts)
        events = await server.stream(route, prompts)
    answers = [p["content"] for p in body] if route == "/completion" else [c["text"] for c in body["choices"]]
    assert answers == [events.text(i) for i in range(3)] == ["a", "b", "c"]
    if route == "/v1/completions":
        assert body["usage"]["prompt_tokens"] == 15 and body["usage"]["completion_tokens"] == 6


async def test_more_generations_than_the_server_holds_are_refused_and_none_is_left():
    async with serving(bounds={"num_slots": 2, "max_queue": 3}) as server:
        status, body = await server.post("/completion", asking("/completion", "babble", n=6))
        assert (status, body["error"]["param"]) == (400, "n")
        assert server.state() == (0, 0)


# --- token ids


@pytest.mark.parametrize("ids", [[320], [5, 10**6], [-1]])
@pytest.mark.parametrize("route", ROUTES[1:])
async def test_ids_outside_the_vocabulary_never_reach_the_engine(route, ids):
    async with serving() as server:
        status, body = await server.post(route, {"prompt": ids})
        assert (status, body["error"]["param"]) == (400, "prompt")
        assert not server.engine.plans


async def test_a_bias_reaches_the_engine_by_id_or_text_and_only_inside_the_vocabulary():
    async with serving() as server:
        bias = [[5, 1.5], ["a", False], [320, 9], [-1, 9], [2**40, 9]]
        _, body = await server.post("/completion", asking("/completion", "<<x>>", logit_bias=bias))
        shown = body["generation_settings"]["logit_bias"]
        assert shown == [{"token": 5, "bias": 1.5}, {"token": encode_ids("a")[0], "bias": None}]


# --- log-probabilities, timings, progress


@pytest.mark.parametrize("stream", [True, False])
async def test_chat_logprobs_have_one_entry_for_each_delivered_token(stream):
    async with serving() as server:
        ask = asking("/v1/chat/completions", "<<ab🙂>>", logprobs=True, top_logprobs=2)
        if stream:
            events = await server.stream("/v1/chat/completions", ask)
            parts = [event["choices"][0].get("logprobs") for event in events.data]
            entries = [entry for part in parts if part for entry in part["content"]]
        else:
            _, body = await server.post("/v1/chat/completions", ask)
            entries = body["choices"][0]["logprobs"]["content"]
    assert len(entries) == 6
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)
    assert [entry["token"] for entry in entries][:2] == ["a", "b"]


async def test_tokens_are_returned_where_asked_and_always_in_native_chunks():
    async with serving() as server:
        ask = asking("/completion", "<<ab>>")
        assert (await server.post("/completion", ask))[1]["tokens"] == []
        assert (await server.post("/completion", ask | {"return_tokens": True}))[1]["tokens"] == encode_ids("ab")
        chunks = (await server.stream("/completion", ask)).data
        assert [token for chunk in chunks for token in chunk["tokens"]] == encode_ids("ab")


@every_route
async def test_progress_and_timings_come_with_the_stream_where_asked(route):
    async with serving() as server:
        ask = asking(route, LONG * 3 + "<<ab>>", return_progress=True, timings_per_token=True)
        events = await server.stream(route, ask)
        progress = [event["prompt_progress"] for event in events.data if "prompt_progress" in event]
        assert len(progress) > 2
        assert [p["processed"] for p in progress] == sorted(p["processed"] for p in progress)
        assert all(p["cache"] == 0 and p["time_ms"] >= 0 and p["total"] > len(LONG * 3) for p in progress)
        timed = [event["timings"]["predicted_n"] for event in events.data if "timings" in event]
        assert timed == [1, 2, 3]
        again = await server.stream(route, ask)
        first = next(event["prompt_progress"] for event in again.data if "prompt_progress" in event)
        assert first["cache"] > len(LONG)


# --- chat templates


async def test_a_refusal_of_the_template_is_400_before_any_stream_and_on_one_line(caplog):
    template = "{{ raise_exception('no\n' ~ messages[0].content) }}"
    async with serving(template=template) as server:
        for stream in (True, False):
            ask = asking("/v1/chat/completions", "x\n\x1b[31m", stream=stream)
            status, body = await server.post("/v1/chat/completions", ask)
            assert status == 400
            assert body["error"]["message"].startswith("chat template:") and body["error"]["message"].isprintable()
        assert server.scheduler.totals.submitted == 0
    assert all(record.getMessage().isprintable() for record in caplog.records)


async def test_a_model_without_a_template_has_completions_only():
    async with serving(template=None) as server:
        status, body = await server.post("/v1/chat/completions", asking("/v1/chat/completions", "x"))
        assert status == 400 and "--chat-template" in body["error"]["message"]
        assert (await server.post("/completion", asking("/completion", "<<x>>")))[0] == 200


async def test_tools_reach_a_template_that_knows_them_and_change_nothing_in_another():
    tools = [{"type": "function", "function": {"name": "add"}}]
    knows = "{{ messages[-1].content }}{% if tools %}<<{{ tools[0].function.name }}>>{% endif %}"
    for template, text in ((knows, "add"), ("{{ messages[-1].content }}", "plain")):
        async with serving(template=template) as server:
            ask = asking("/v1/chat/completions", "<<plain>>", tools=tools, tool_choice="auto")
            assert said((await server.post("/v1/chat/completions", ask))[1]) == text


async def test_a_trailing_assistant_message_is_continued_and_not_repeated():
    async with serving() as server:
        messages = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "<<on>> "}]
        _, shown = await server.post("/apply-template", {"messages": messages})
        assert shown["prompt"].endswith("<|im_start|>assistant\n<<on>> ")
        assert said((await server.post("/v1/chat/completions", {"messages": messages}))[1]) == "on"


async def test_lone_surrogates_in_replayed_tool_calls_do_not_reach_the_tokenizer():
    template = "{% for m in messages %}{{ m.content }}{{ m.tool_calls[0].function.arguments.a }}{% endfor %}"
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": "\\ud83d"}'}}
    async with serving(template=template) as server:
        messages = [{"role": "assistant", "tool_calls": [call]}]
        status, body = await server.post("/apply-template", {"messages": messages})
        assert (status, body["prompt"]) == (200, "?")
