"""llama-server's own request fields, and what its answers say of them."""

import pytest

from tests.http.serving import ROUTES, asking, encode, said, serving

LONG = "a long enough beginning that several blocks of it are worth keeping in the prompt cache "
GENERATION_SETTINGS = set(
    """
    seed temperature dynatemp_range dynatemp_exponent top_k top_p min_p top_n_sigma xtc_probability xtc_threshold
    typical_p repeat_last_n repeat_penalty presence_penalty frequency_penalty dry_multiplier dry_base dry_allowed_length
    dry_penalty_last_n dry_sequence_breakers mirostat mirostat_tau mirostat_eta adaptive_target adaptive_decay stop
    max_tokens n_predict n_keep n_discard ignore_eos stream logit_bias n_probs min_keep grammar grammar_lazy
    grammar_triggers preserved_tokens chat_format reasoning_format reasoning_in_content generation_prompt samplers
    speculative.types timings_per_token post_sampling_probs backend_sampling lora
""".split()
)
LONG_SETTINGS = set(
    "dry_sequence_breakers stop logit_bias grammar grammar_lazy grammar_triggers preserved_tokens".split()
)
FINAL = set(
    """
    index id_slot content tokens stop model tokens_predicted tokens_evaluated generation_settings prompt has_new_line
    truncated stop_type stopping_word tokens_cached timings
""".split()
)
TIMINGS = set(
    """
    cache_n prompt_n prompt_ms prompt_per_token_ms prompt_per_second predicted_n predicted_ms predicted_per_token_ms
    predicted_per_second
""".split()
)


async def ask(server, text="<<hello>>", **members):
    status, body = await server.post("/completion", asking("/completion", text, **members))
    assert status == 200, body
    return body


# --- the answer


async def test_the_native_answer_has_all_its_members_and_no_other():
    async with serving() as server:
        body = await ask(server)
        chunks = (await server.stream("/completion", asking("/completion", "<<hello>>"))).data
    assert body.keys() == chunks[-1].keys() == FINAL
    assert body["timings"].keys() == TIMINGS
    assert body["generation_settings"].keys() == GENERATION_SETTINGS
    assert body["id_slot"] in range(4)
    partial = {"index", "content", "tokens", "stop", "id_slot", "tokens_predicted", "tokens_evaluated"}
    assert all(chunk.keys() == partial and chunk["id_slot"] == -1 for chunk in chunks[:-1])


async def test_the_settings_say_what_was_asked():
    asked = {"n_keep": 5, "n_discard": 3, "timings_per_token": True, "n_probs": 2, "ignore_eos": True, "n_predict": 4}
    async with serving() as server:
        told = (await ask(server, **asked, stop="x"))["generation_settings"]
    assert {key: told[key] for key in asked} == asked
    assert (told["max_tokens"], told["stop"], told["stream"]) == (4, ["x"], False)


async def test_slots_and_props_say_the_short_ones():
    async with serving() as server:
        await ask(server, n_predict=3)
        _, slots = await server.get("/slots")
        _, props = await server.get("/props")
    shown = next(slot["params"] for slot in slots if "params" in slot)
    assert shown["n_predict"] == 3
    assert shown.keys() == GENERATION_SETTINGS - LONG_SETTINGS - {"stream", "timings_per_token"}
    assert props["default_generation_settings"]["params"].keys() == GENERATION_SETTINGS - LONG_SETTINGS


# --- response_fields


async def test_response_fields_choose_members_and_lift_nested_ones_under_their_path():
    fields = ["content", "generation_settings/n_predict", "timings/prompt_n", "nothing", "content/x", ""]
    async with serving() as server:
        body = await ask(server, n_predict=5, response_fields=fields)
        assert body == {"content": "hello", "generation_settings/n_predict": 5, "timings/prompt_n": 9}
        chunks = (await server.stream("/completion", asking("/completion", "<<hello>>", response_fields=fields))).data
        assert chunks[-1].keys() == {"content", "generation_settings/n_predict", "timings/prompt_n"}
        assert "stop" in chunks[0], "only the last chunk is chosen from"


async def test_no_response_fields_are_all_and_each_of_several_answers_is_chosen_from():
    async with serving() as server:
        assert (await ask(server, response_fields=[])).keys() == FINAL
        assert await ask(server, n=2, response_fields=["index"]) == [{"index": 0}, {"index": 1}]
        _, chat = await server.post(ROUTES[0], asking(ROUTES[0], "<<x>>", response_fields=["content"]))
        assert said(chat) == "x", "the other dialects know no such thing"


# --- where it ends


@pytest.mark.parametrize("route", ROUTES)
async def test_n_indent_ends_the_text_at_a_line_that_is_indented_less(route):
    async with serving() as server:
        body = asking(route, "<<def f():\n    x\n\ny~>>", n_indent=4, max_tokens=50)
        assert said((await server.post(route, body))[1]) == "def f():\n    x\n"
        assert (await server.stream(route, body)).text() == "def f():\n    x\n"
        native = await ask(server, "<<a\nb~>>", n_indent=1)
    assert (native["stop_type"], native["truncated"], native["has_new_line"]) == ("limit", False, True)


async def test_a_time_limit_waits_for_a_new_line():
    async with serving() as server:
        assert (await ask(server, "<<one line>>", t_max_predict_ms=1))["stop_type"] == "eos"
        many = "a\n" * 5000
        body = await ask(server, f"<<{many}>>", t_max_predict_ms=1)
    assert body["stop_type"] == "limit" and body["content"].endswith("\n") and len(body["content"]) < len(many)


async def test_a_limit_of_nothing_only_fills_the_cache():
    async with serving() as server:
        body = await ask(server, LONG + "<<x>>", n_predict=0)
        assert (body["content"], body["tokens_predicted"], body["stop_type"]) == ("", 0, "limit")
        assert (await ask(server, LONG + "<<x>>"))["timings"]["cache_n"] > 0


# --- accepted, and without effect


async def test_what_steers_a_context_shift_is_taken_and_changes_nothing():
    async with serving() as server:
        members = {"n_keep": -1, "n_discard": 5, "n_cache_reuse": 256, "id_slot": "first", "model": "gpt-4", "lora": []}
        assert (await ask(server, **members))["content"] == "hello"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n_keep", -2),
        ("n_discard", -1),
        ("n_indent", -1),
        ("n_cache_reuse", -1),
        ("t_max_predict_ms", -2),
        ("n_cmpl", 0),
    ],
)
@pytest.mark.parametrize("route", ROUTES)
async def test_a_number_outside_its_range_is_400_that_names_the_field(route, field, value):
    async with serving() as server:
        status, body = await server.post(route, asking(route, "<<x>>", **{field: value}))
    assert status == 400
    assert body["error"]["type"] == "invalid_request_error"
    assert body["error"]["message"].startswith(f"Field '{field}':")


# --- prompts


PROMPTS = [
    ("<<a>>", ["a"]),
    ({"prompt_string": "<<a>>"}, ["a"]),
    (encode("<<a>>").tolist(), ["a"]),
    (["<<", *encode("a>>")], ["a"]),
    (["<<a>>"], ["a"]),
    (["<<a>>", "<<b>>"], ["a", "b"]),
    ([encode("<<a>>").tolist(), "<<b>>", {"prompt_string": "<<c>>"}], ["a", "b", "c"]),
]


@pytest.mark.parametrize(("prompt", "texts"), PROMPTS, ids=[str(i) for i in range(len(PROMPTS))])
async def test_a_prompt_in_all_its_spellings(prompt, texts):
    async with serving() as server:
        _, native = await server.post("/completion", {"prompt": prompt})
        _, openai = await server.post("/v1/completions", {"prompt": prompt})
    assert [part["content"] for part in (native if len(texts) > 1 else [native])] == texts
    assert [choice["text"] for choice in openai["choices"]] == texts


@pytest.mark.parametrize("prompt", [None, [], 5, {}, [None], {"prompt_string": 5}, [[]], [1.5]], ids=str)
async def test_what_is_no_prompt_is_400(prompt):
    async with serving() as server:
        for route in ROUTES[1:]:
            status, body = await server.post(route, {"prompt": prompt})
            assert (status, body["error"]["param"]) == (400, "prompt")


# --- __verbose


@pytest.mark.parametrize("route", ROUTES[:2])
@pytest.mark.parametrize("how", ["flag", "field"])
async def test_a_verbose_answer_carries_the_native_one(route, how):
    async with serving(verbose=how == "flag") as server:
        body = asking(route, "<<hello>>", **({} if how == "flag" else {"verbose": True}))
        verbose = (await server.post(route, body))[1]["__verbose"]
        assert verbose.keys() == FINAL
        assert verbose["content"] == "hello" and "<<hello>>" in verbose["prompt"]
        chunks = (await server.stream(route, body)).data
        assert [chunk["__verbose"]["content"] for chunk in chunks if "__verbose" in chunk] == [""]
        quiet = (await server.post(route, body | {"verbose": False}))[1]
        assert "__verbose" not in quiet


# --- progress


async def test_progress_begins_with_the_cached_tokens_and_ends_with_all():
    async with serving() as server:
        for is_warm in (False, True):
            body = asking("/completion", LONG * 3 + "<<ab>>", return_progress=True)
            chunks = (await server.stream("/completion", body)).data
            progress = [chunk["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk]
            assert all(p.keys() == {"total", "cache", "processed", "time_ms"} for p in progress)
            assert progress[0]["processed"] == progress[0]["cache"]
            assert progress[-1]["processed"] == progress[-1]["total"] == len(LONG) * 3 + 6
            assert (progress[0]["cache"] > 0) is is_warm
            assert "prompt_progress" not in chunks[len(progress)], "they all come before the text"
        _, plain = await server.post("/completion", body)
        assert plain["content"] == "ab" and "prompt_progress" not in plain
