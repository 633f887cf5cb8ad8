"""Bodies in, checked requests out: every field absent, null, of a wrong type, out of range."""

import math
from array import array
from contextlib import suppress
from dataclasses import replace
from operator import attrgetter

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxcel.api.fields import MAX_DEPTH
from mlxcel.api.options import MAX_KEY_LENGTH, MAX_STOP_LENGTH, MAX_STOPS
from mlxcel.api.requests import parse_chat, parse_completion, parse_native
from mlxcel.cache.key import ANONYMOUS
from mlxcel.engine.sequence import ORDER, Adaptive, Dry, Mirostat, Sampling, Xtc
from mlxcel.errors import InvalidRequest
from tests.defaults import settings

SETTINGS = settings()
MESSAGES = [{"role": "user", "content": "hi"}]
PARSERS = {"chat": parse_chat, "completion": parse_completion, "native": parse_native}
BARE = {"chat": {"messages": MESSAGES}, "completion": {"prompt": "hi"}, "native": {"prompt": "hi"}}


def parse(dialect, changed=SETTINGS, **members):
    return PARSERS[dialect](orjson.dumps(BARE[dialect] | members), changed)


def options(dialect="native", changed=SETTINGS, **members):
    return parse(dialect, changed, **members).options


def refusal(dialect="native", changed=SETTINGS, **members):
    with pytest.raises(InvalidRequest) as refused:
        parse(dialect, changed, **members)
    return refused.value


every_dialect = pytest.mark.parametrize("dialect", PARSERS)

# --- the body as a whole


@every_dialect
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"x"',
        b"null",
        b"5",
        b'{"prompt": NaN}',
        b'{"temperature": Infinity, "prompt": "x"}',
        b'{"temperature": 1e999, "prompt": "x"}',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        '{"prompt": "x"}'.encode("utf-16"),
        b'{"prompt": "x"} trailing',
        b"[" * 100_000,
        b'{"a":' * 900 + b"1" + b"}" * 900,
    ],
    ids=lambda body: body[:24].decode("latin-1"),
)
def test_a_body_that_is_not_one_plain_json_object_is_refused(dialect, body):
    with pytest.raises(InvalidRequest, match="request body"):
        PARSERS[dialect](body, SETTINGS)


def test_nesting_is_bounded_where_recursion_would_not_be():
    def nested(depth):
        return b'{"prompt": "x", "x": ' + b"[" * depth + b"]" * depth + b"}"

    parse_native(nested(MAX_DEPTH - 1), SETTINGS)
    with pytest.raises(InvalidRequest, match="nested"):
        parse_native(nested(MAX_DEPTH), SETTINGS)


def test_unknown_members_are_ignored_and_of_equal_names_the_last_counts():
    body = b'{"prompt": "a", "prompt": "b", "model": 5, "store": true, "reasoning": {"effort": []}}'
    assert parse_native(body, SETTINGS).prompts == (("b",),)


# --- null, types, ranges

FIELDS = {
    "stream": (True, "x"),
    "stream_options": ({"include_usage": True}, []),
    "n_predict": (3, "5"),
    "max_tokens": (3, True),
    "max_completion_tokens": (3, 1.5),
    "n": (2, "2"),
    "temperature": (0.5, "hot"),
    "top_k": (3, 2.5),
    "top_p": (0.5, []),
    "min_p": (0.5, {}),
    "repeat_penalty": (1.1, "x"),
    "repeat_last_n": (5, 1.0),
    "presence_penalty": (0.5, False),
    "frequency_penalty": (0.5, "0.5"),
    "dynatemp_range": (0.5, "x"),
    "dynatemp_exponent": (1.5, []),
    "typical_p": (0.5, "x"),
    "top_n_sigma": (1, {}),
    "min_keep": (2, 2.0),
    "xtc_probability": (0.5, True),
    "xtc_threshold": (0.2, "x"),
    "dry_multiplier": (0.8, "x"),
    "dry_base": (2, "x"),
    "dry_allowed_length": (3, 3.0),
    "dry_penalty_last_n": (100, "x"),
    "dry_sequence_breakers": (["x"], "x"),
    "mirostat": (2, 2.0),
    "mirostat_tau": (4, "x"),
    "mirostat_eta": (0.2, "x"),
    "adaptive_target": (0.3, "x"),
    "adaptive_decay": (0.5, "x"),
    "samplers": (["top_k"], 5),
    "post_sampling_probs": (True, 1),
    "seed": (7, 7.5),
    "stop": (["x"], 5),
    "logit_bias": ({"5": 1.0}, 5),
    "ignore_eos": (True, 1),
    "timings_per_token": (True, 0),
    "return_progress": (True, "true"),
    "return_tokens": (True, []),
    "sse_ping_interval": (5, 0.5),
    "cache_prompt": (False, "no"),
    "prompt_cache_key": ("k", 5),
    "user": ("u", ["u"]),
    "cache_salt": ("s", 5),
    "response_format": ({"type": "text"}, "text"),
    "extra_body": ({"user": "x"}, "x"),
    "n_indent": (2, "2"),
    "n_keep": (-1, 0.5),
    "n_discard": (2, True),
    "n_cache_reuse": (256, "256"),
    "n_cmpl": (2, [2]),
    "t_max_predict_ms": (50, 0.5),
    "response_fields": (["content"], "content"),
    "verbose": (True, 1),
}
CHAT_FIELDS = {
    "logprobs": (True, 1),
    "tools": ([{"type": "function", "function": {"name": "f"}}], {}),
    "tool_choice": ("auto", 5),
    "chat_template_kwargs": ({"a": 1}, []),
    "add_generation_prompt": (True, "x"),
    "continue_final_message": (False, 0),
}
TEXT_FIELDS = {"logprobs": (2, "2"), "n_probs": (2, "2")}


@every_dialect
def test_a_request_of_nulls_is_a_request_of_defaults(dialect):
    nulls = dict.fromkeys([*FIELDS, *CHAT_FIELDS, *TEXT_FIELDS, "model", "top_logprobs", "echo", "suffix"])
    changed = settings(seed=5)
    assert parse(dialect, changed, **nulls) == parse(dialect, changed)


@every_dialect
def test_every_field_takes_its_type_and_names_itself_when_it_gets_another(dialect):
    for name, (right, wrong) in {**FIELDS, **(CHAT_FIELDS if dialect == "chat" else TEXT_FIELDS)}.items():
        parse(dialect, **{name: right})
        error = refusal(dialect, **{name: wrong})
        assert error.param == name and f"'{name}'" in error.message


@every_dialect
@given(body=st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from([*FIELDS, *CHAT_FIELDS, *TEXT_FIELDS, "prompt", "messages", "role"]), inner),
    max_leaves=12,
))  # fmt: skip
def test_whatever_json_comes_it_is_parsed_or_refused(dialect, body):
    with suppress(InvalidRequest):
        PARSERS[dialect](orjson.dumps(body), SETTINGS)


NAMES = {"dry.last_n": "dry_penalty_last_n", "mirostat.version": "mirostat"}


@pytest.mark.parametrize(
    ("field", "value", "clamped"),
    [
        ("temperature", -1, 0.0),
        ("temperature", 1e-9, 0.0),
        ("temperature", 1e300, 1000.0),
        ("top_p", 1.5, 1.0),
        ("top_p", -0.5, 0.0),
        ("min_p", 7, 1.0),
        ("top_k", -1, 0),
        ("top_k", 2**40, 2**31 - 1),
        ("repeat_penalty", 0, 1e-3),
        ("presence_penalty", -1e300, -1e3),
        ("repeat_last_n", 2**40, 2**31 - 1),
        ("repeat_last_n", -1, 2**31 - 1),
        ("dynatemp_range", -1, 0.0),
        ("dynatemp_exponent", 1e300, 100.0),
        ("typical_p", 2, 1.0),
        ("top_n_sigma", -1e300, -1e3),
        ("min_keep", 2**40, 2**31 - 1),
        ("xtc.probability", 1.5, 1.0),
        ("xtc.threshold", -1, 0.0),
        ("dry.multiplier", 1e300, 1e3),
        ("dry.base", 0.5, 1.75),
        ("dry.base", -5, 1.75),
        ("dry.base", 1e300, 1e6),
        ("dry.last_n", -1, 2**31 - 1),
        ("mirostat.version", 7, 2),
        ("mirostat.version", -1, 0),
        ("mirostat.tau", -1, 0.0),
        ("mirostat.eta", 1e300, 1e3),
        ("adaptive.target", 2, 1.0),
        ("adaptive.target", -5, -1.0),
    ],
)
def test_soft_ranges_clamp(field, value, clamped):
    name = NAMES.get(field, field.replace(".", "_"))
    assert attrgetter(field)(options(**{name: value}).sampling) == clamped


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("n", 129),
        ("n_predict", -2),
        ("max_tokens", -2),
        ("repeat_last_n", -2),
        ("min_keep", -1),
        ("dry_allowed_length", -1),
        ("dry_penalty_last_n", -2),
        ("dry_sequence_breakers", []),
        ("dry_sequence_breakers", ["x", 5]),
        ("dry_sequence_breakers", ["x"] * 33),
        ("adaptive_decay", -0.1),
        ("adaptive_decay", 1.0),
        ("samplers", ["top_k", None]),
        ("samplers", {}),
        ("samplers", ["temperature"] * 33),
        ("samplers", "t" * 33),
        ("n_probs", -1),
        ("n_probs", 1001),
        ("sse_ping_interval", -2),
        ("n_cmpl", 0),
        ("n_indent", -1),
        ("n_keep", -2),
        ("n_discard", -1),
        ("n_cache_reuse", -1),
        ("t_max_predict_ms", -2),
    ],
)
def test_hard_ranges_refuse(field, value):
    assert refusal(**{field: value}).param == field


def test_the_servers_settings_are_the_defaults_of_a_request():
    assert options(changed=settings(verbose=True)).verbose and not options().verbose
    changed = settings(temperature=0.1, top_k=7, n_predict=12, reverse_prompt=("END",), cache_prompt=False, seed=3)
    read = options(changed=changed)
    assert (read.sampling.temperature, read.sampling.top_k, read.sampling.seed) == (0.1, 7, 3)
    assert (read.max_tokens, read.stop, read.cache_prompt) == (12, ("END",), False)


def test_the_servers_samplers_are_the_defaults_of_a_request():
    changed = settings(
        dynatemp_range=0.2, dynatemp_exp=1.5, typical_p=0.9, top_n_sigma=1.5, xtc_probability=0.4, xtc_threshold=0.2,
        dry_multiplier=0.8, dry_base=2.0, dry_allowed_length=3, dry_penalty_last_n=-1, dry_sequence_breaker=("x",),
        mirostat=1, mirostat_ent=3.0, mirostat_lr=0.2, adaptive_target=0.5, adaptive_decay=0.8, repeat_last_n=7,
    )  # fmt: skip
    read = options(changed=changed)
    assert (read.sampling.dynatemp_range, read.sampling.dynatemp_exponent, read.sampling.typical_p) == (0.2, 1.5, 0.9)
    assert (read.sampling.top_n_sigma, read.sampling.xtc, read.sampling.repeat_last_n) == (1.5, Xtc(0.4, 0.2), 7)
    assert (read.sampling.dry, read.dry_breakers) == (Dry(0.8, 2.0, 3, 2**31 - 1), ("x",))
    assert (read.sampling.mirostat, read.sampling.adaptive) == (Mirostat(1, 3.0, 0.2), Adaptive(0.5, 0.8))
    assert replace(options().sampling, seed=0) == Sampling(), "the engine's defaults are the table's"


# --- single fields


def test_response_fields_are_texts():
    assert options(response_fields=["content", "timings/prompt_n"]).response_fields == ("content", "timings/prompt_n")
    assert refusal(response_fields=["content", 5]).param == "response_fields"


@pytest.mark.parametrize(
    ("members", "max_tokens"),
    [
        ({}, None),
        ({"max_tokens": -1}, None),
        ({"max_tokens": 0}, 0),
        ({"max_tokens": 2**63}, 2**63),
        ({"max_tokens": 5, "max_completion_tokens": 6}, 6),
        ({"max_tokens": 5, "max_completion_tokens": 6, "n_predict": 7}, 7),
        ({"max_tokens": 5, "n_predict": None}, 5),
    ],
)
def test_of_the_names_for_the_length_the_first_present_counts(members, max_tokens):
    assert options(**members).max_tokens == max_tokens


def test_a_seed_is_kept_and_no_seed_is_a_different_one_each_time():
    assert options(seed=7).sampling.seed == 7
    assert options(seed=2**32 + 7).sampling.seed == 7
    for random in ({}, {"seed": -1}, {"seed": 2**32 - 1}):
        seeds = {options(**random).sampling.seed for _ in range(5)}
        assert len(seeds) == 5 and 2**32 - 1 not in seeds


@pytest.mark.parametrize(
    ("samplers", "order"),
    [
        (["top_k", "temperature"], ("top_k", "temperature")),
        (["temp", "typical", "top-p", "nucleus"], ("temperature", "typ_p", "top_p", "top_p")),
        (["infill", "TOP_K", "", "min_p"], ("min_p",)),
        ([], ()),
        ("tkpa", ("temperature", "top_k", "top_p", "adaptive_p")),
        ("t?t", ("temperature", "temperature")),
        ("", ()),
        ("edskypmxt", ORDER),
    ],
)
def test_samplers_are_names_or_letters_and_unknown_ones_are_left_out(samplers, order):
    assert options(samplers=samplers).sampling.order == order


@pytest.mark.parametrize(
    ("server", "order"),
    [
        ({}, ORDER),
        ({"samplers": "temperature;top-k;nonsense"}, ("temperature", "top_k")),
        ({"sampler_seq": "kt"}, ("top_k", "temperature")),
        ({"samplers": "min_p", "sampler_seq": "kt"}, ("min_p",)),
    ],
)
def test_the_server_has_an_order_of_its_own(server, order):
    assert options(changed=settings(**server)).sampling.order == order
    assert options(changed=settings(**server), samplers=["xtc"]).sampling.order == ("xtc",)


def test_breakers_are_the_requests_else_the_servers_else_four():
    assert options().dry_breakers == ("\n", ":", '"', "*")
    assert options(dry_sequence_breakers=["a", ""]).dry_breakers == ("a", "")
    assert options(changed=settings(dry_sequence_breaker=("none",))).dry_breakers == ()


@pytest.mark.parametrize(
    ("stop", "read"),
    [("x", ("x",)), ("", ()), ([], ()), (["", "x"], ("x",)), ([""], ()), (["a", "b", "c", "d", "e"], tuple("abcde"))],
)
def test_stop_is_a_string_or_a_list_and_empty_ones_are_dropped(stop, read):
    assert options(changed=settings(reverse_prompt=("END",)), stop=stop).stop == read


@pytest.mark.parametrize("stop", [[None], [5], {}, ["x", ["y"]], ["x"] * (MAX_STOPS + 1), "x" * (MAX_STOP_LENGTH + 1)])
def test_an_odd_stop_is_refused(stop):
    assert refusal(stop=stop).param == "stop"


@pytest.mark.parametrize(
    ("bias", "read"),
    [
        ([[5, 1.5], [6, False]], ((5, 1.5), (6, -math.inf))),
        ({"5": 1, "hello": -2}, ((5, 1.0), ("hello", -2.0))),
        ([["hello", 1], ["5", 2]], (("hello", 1.0), ("5", 2.0))),
        ([[5, True], [5], [5, 1, 2], 5, None, [5.0, 1], [[], 1], [5, "1"]], ()),
        ({"-1": 1}, (("-1", 1.0),)),
        ([[5, 1e300]], ((5, 10_000.0),)),
        ([[2**63, 1]], ((2**63, 1.0),)),
    ],
)
def test_logit_bias_in_all_its_spellings_skips_what_makes_no_sense(bias, read):
    assert options(logit_bias=bias).logit_bias == read


@pytest.mark.parametrize(
    ("dialect", "members", "top"),
    [
        ("chat", {}, None),
        ("chat", {"logprobs": False, "top_logprobs": 0}, None),
        ("chat", {"logprobs": True}, 20),
        ("chat", {"logprobs": True, "top_logprobs": 0}, 0),
        ("completion", {}, None),
        ("completion", {"logprobs": 0}, 0),
        ("completion", {"logprobs": 5}, 5),
        ("native", {"n_probs": 0}, None),
        ("native", {"n_probs": 5}, 5),
    ],
)
def test_logprobs_as_each_dialect_asks_for_them(dialect, members, top):
    assert options(dialect, **members).top_logprobs == top


@pytest.mark.parametrize("members", [{"logprobs": True, "top_logprobs": 21}, {"top_logprobs": 5}])
def test_chat_refuses_more_than_20_and_top_without_logprobs(members):
    assert refusal("chat", **members).param == "top_logprobs"


# --- the prompt cache


def test_the_session_is_the_cache_key_else_the_user_else_anonymous():
    assert options().session_key == ANONYMOUS
    assert options(user="", prompt_cache_key="").session_key == ANONYMOUS
    assert options(user="u").session_key == "u"
    assert options(user="u", prompt_cache_key="k").session_key == "k"


@every_dialect
def test_extra_body_is_read_where_the_top_level_says_nothing(dialect):
    nested = {"cache_prompt": False, "cache_salt": "s", "user": "u", "temperature": 0.1}
    read = options(dialect, extra_body=nested)
    assert (read.cache_prompt, read.salt, read.session_key) == (False, "s", "u")
    assert read.sampling.temperature == 0.8, "only the fields that SDKs have no name for are looked up there"
    assert options(dialect, extra_body=nested, cache_prompt=True, cache_salt="t").salt == "t"
    assert options(dialect, extra_body=nested, cache_prompt=None).cache_prompt is False
    assert refusal(dialect, extra_body={"cache_prompt": "no"}).param == "cache_prompt"


@every_dialect
@pytest.mark.parametrize("salt", ["", " ", "\t\n", 5, [], {}, False, "tenant-secret" * 100])
def test_an_odd_salt_is_refused_by_name_and_never_repeated(dialect, salt):
    for members in ({"cache_salt": salt}, {"extra_body": {"cache_salt": salt}}):
        error = refusal(dialect, **members)
        assert error.param == "cache_salt" and "cache_salt" in error.message
        assert "tenant-secret" not in str(error.body())


def test_a_salt_shows_in_no_repr():
    request = parse("chat", cache_salt="tenant-secret")
    assert request.options.salt == "tenant-secret"
    assert "tenant-secret" not in repr(request)


def test_a_salt_may_be_as_long_as_any_key_and_not_longer():
    assert options(cache_salt="x" * MAX_KEY_LENGTH).salt
    for name in ("cache_salt", "user", "prompt_cache_key"):
        assert refusal(**{name: "x" * (MAX_KEY_LENGTH + 1)}).param == name


@every_dialect
def test_a_server_that_requires_salts_refuses_a_request_without_one(dialect):
    strict = settings(require_cache_salt=True)
    assert refusal(dialect, strict).param == "cache_salt"
    assert refusal(dialect, strict, cache_salt=None).param == "cache_salt"
    assert options(dialect, strict, cache_salt="s").salt == "s"


# --- prompts


@pytest.mark.parametrize(
    ("prompt", "read"),
    [
        ("hi", (("hi",),)),
        ("", (("",),)),
        ([1, 2], ((array("i", [1, 2]),),)),
        (["a", 1, 2, "b"], (("a", array("i", [1, 2]), "b"),)),
        (["a", "b"], (("a",), ("b",))),
        ([[1, 2], "b", ["c", 3]], ((array("i", [1, 2]),), ("b",), ("c", array("i", [3])))),
        ({"prompt_string": "x"}, (("x",),)),
        ([{"prompt_string": "x", "multimodal_data": []}], (("x",),)),
    ],
)
@pytest.mark.parametrize("dialect", ["completion", "native"])
def test_prompts_in_all_their_spellings(dialect, prompt, read):
    assert parse(dialect, prompt=prompt).prompts == read


@pytest.mark.parametrize(
    "prompt",
    [
        None,
        [],
        [[]],
        5,
        True,
        [None],
        [1, None],
        [1, 2.0],
        [1, True],
        [-1],
        [2**31],
        [2**63],
        ["x"] * 129,
        [[["x"]]],
        {"prompt_string": 5},
        {},
        {"prompt_string": "x", "multimodal_data": ["..."]},
    ],
)
@pytest.mark.parametrize("dialect", ["completion", "native"])
def test_an_odd_prompt_is_refused(dialect, prompt):
    assert refusal(dialect, prompt=prompt).param == "prompt"


# --- the form of the output

OBJECT = {"type": "object"}


@every_dialect
@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"grammar": 'root ::= "x"'}, "grammar", 'root ::= "x"'),
        ({"json_schema": OBJECT}, "json_schema", '{"type":"object"}'),
        ({"json_schema": {}}, "json_schema", "{}"),
        ({"response_format": {"type": "json_object"}}, "json_schema", '{"type":"object"}'),
        ({"response_format": {"type": "json_object", "schema": {"type": "array"}}}, "json_schema", '{"type":"array"}'),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": OBJECT}}},
            "json_schema",
            '{"type":"object"}',
        ),
    ],
)
def test_what_the_output_must_follow(dialect, fields, kind, text):
    constraint = options(dialect, **fields).constraint
    assert (constraint.kind, constraint.text) == (kind, text)


@every_dialect
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "banana"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_object", "schema": 5}}, "response_format.schema"),
        ({"response_format": {"type": "json_object"}, "grammar": 'root ::= "x"'}, "response_format"),
        ({"json_schema": "{}"}, "json_schema"),
        ({"grammar": 5}, "grammar"),
    ],
)
def test_a_form_that_cannot_be_meant_is_refused_by_name(dialect, fields, param):
    assert refusal(dialect, **fields).param == param


@pytest.mark.parametrize("dialect", [d for d in PARSERS if d != "chat"])
def test_of_a_grammar_and_a_schema_the_grammar_counts(dialect):
    assert options(dialect, grammar='root ::= "x"', json_schema=OBJECT).constraint.kind == "grammar"


def test_a_chat_brings_one_of_them():
    assert refusal("chat", grammar='root ::= "x"', json_schema=OBJECT).param == "json_schema"


@every_dialect
def test_the_servers_own_form_holds_unless_a_request_lifts_it(dialect):
    server = settings(grammar='root ::= "x"')
    assert options(dialect, server, stop=None).constraint.text == 'root ::= "x"'
    assert options(dialect, server, json_schema=OBJECT).constraint.kind == "json_schema"
    assert options(dialect, server, grammar="").constraint is None


@pytest.mark.parametrize(("field", "value"), [("echo", True), ("suffix", "x"), ("best_of", 2)])
def test_completions_refuses_what_it_would_silently_not_do(field, value):
    assert refusal("completion", **{field: value}).param == field


# --- conversations


def conversation(**members):
    return parse("chat", **members).conversation


@pytest.mark.parametrize("messages", [None, [], {}, "hi", [None], ["hi"], [{}], [{"role": 5}], [{"content": "x"}]])
def test_messages_are_checked(messages):
    assert refusal("chat", messages=messages).param.startswith("messages")


USER = {"role": "user", "content": "u"}
ASSISTANT = {"role": "assistant", "content": "a"}
CALLING = {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f"}}]}


@pytest.mark.parametrize(
    ("last", "members", "continued"),
    [
        (USER, {}, False),
        (ASSISTANT, {}, True),
        (ASSISTANT, {"continue_final_message": False}, False),
        (ASSISTANT, {"add_generation_prompt": False}, False),
        (ASSISTANT, {"add_generation_prompt": True}, True),
        (ASSISTANT, {"add_generation_prompt": False, "continue_final_message": True}, True),
        (CALLING, {}, False),
    ],
)
def test_a_trailing_assistant_text_is_continued_unless_told_otherwise(last, members, continued):
    assert conversation(messages=[USER, last], **members).continue_final is continued


def test_without_prefill_assistant_only_an_explicit_wish_continues():
    messages, off = [USER, ASSISTANT], settings(prefill_assistant=False)
    assert not parse("chat", off, messages=messages).conversation.continue_final
    assert parse("chat", off, messages=messages, continue_final_message=True).conversation.continue_final


@pytest.mark.parametrize(
    ("messages", "members"),
    [
        ([USER], {"continue_final_message": True}),
        ([USER, CALLING], {"continue_final_message": True}),
        ([USER, ASSISTANT, ASSISTANT], {}),
        ([USER, ASSISTANT], {"continue_final_message": True, "add_generation_prompt": True}),
    ],
)
def test_what_cannot_be_continued_is_refused(messages, members):
    refusal("chat", messages=messages, **members)


def test_template_kwargs_fill_up_the_servers_and_win():
    changed = settings(chat_template_kwargs={"enable_thinking": True, "b": 1})
    read = parse("chat", changed, chat_template_kwargs={"enable_thinking": False, "c": None}).conversation
    assert read.template_kwargs == {"enable_thinking": False, "b": 1, "c": None}


@pytest.mark.parametrize(
    "kwargs", [{"messages": []}, {"self": 1}, {"tools": None}, {"add_generation_prompt": 1}, {"enable_thinking": "yes"}]
)
def test_template_kwargs_cannot_replace_what_the_server_renders(kwargs):
    assert refusal("chat", chat_template_kwargs=kwargs).param == "chat_template_kwargs"


@pytest.mark.parametrize(
    ("server", "members", "kwargs"),
    [
        ({}, {}, {}),
        ({"reasoning": "off"}, {}, {"enable_thinking": False}),
        ({"reasoning": "off"}, {"chat_template_kwargs": {"enable_thinking": True}}, {"enable_thinking": True}),
        ({"reasoning_effort": "low"}, {}, {"reasoning_effort": "low"}),
        ({"reasoning_effort": "low"}, {"reasoning_effort": "high"}, {"reasoning_effort": "high"}),
        ({"reasoning": "on"}, {"reasoning_effort": "none"}, {"enable_thinking": False}),
        ({"reasoning_preserve": True}, {}, {"preserve_reasoning": True}),
    ],
)
def test_reasoning_is_steered_by_template_kwargs(server, members, kwargs):
    assert parse("chat", settings(**server), **members).conversation.template_kwargs == kwargs


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def test_tools_are_kept_in_order_and_dropped_for_tool_choice_none():
    other = {"type": "function", "function": {"name": "g"}}
    assert conversation(tools=[other, TOOL]).tools == (other, TOOL)
    assert conversation(tools=[TOOL], tool_choice="none").tools == ()
    named = {"type": "function", "function": {"name": "f"}}
    assert conversation(tools=[TOOL], tool_choice=named).tool_choice == named


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        (None, "tools[0]"),
        ({}, "tools[0].function"),
        ({"type": "web_search"}, "tools[0].type"),
        ({"function": {}}, "tools[0].function.name"),
        ({"function": {"name": "f", "parameters": "x"}}, "tools[0].function.parameters"),
        ({"function": {"name": "f", "description": 5}}, "tools[0].function.description"),
    ],
)
def test_a_malformed_tool_is_refused_by_its_place(tool, param):
    assert refusal("chat", tools=[tool]).param == param


@pytest.mark.parametrize("choice", ["any", "", {}, {"function": {}}, {"function": {"name": 5}}, []])
def test_an_odd_tool_choice_is_refused(choice):
    assert refusal("chat", tool_choice=choice).param.startswith("tool_choice")
