"""Chat templates: what they render in the shapes that models ship, and that every failure is one printable line."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxcel.errors import ConfigError, InvalidRequest
from mlxcel.prompt.template import ChatTemplate, normalise_messages
from tests.prompt.templates import CHATML, KEEPS_THINKING, LLAMA, STRIPS_THINKING

TOKENS = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "b": "<&>", "a": "é"}}}
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"b": 2, "a": {"x": [1.5, "é"]}}'}}


def render(source: str, messages, **kwargs) -> str:
    return ChatTemplate(source, TOKENS).render(normalise_messages(messages), **kwargs)


def user(content):
    return {"role": "user", "content": content}


def assistant(content, **members):
    return {"role": "assistant", "content": content} | members


# --- rendering


def test_chatml_renders_its_turns_and_the_generation_prompt():
    text = render(CHATML, [{"role": "developer", "content": "Be brief."}, user("Hi")])
    assert text == ("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_without_a_generation_prompt_the_text_ends_with_the_last_turn():
    assert render(CHATML, [user("Hi")], add_generation_prompt=False) == "<|im_start|>user\nHi<|im_end|>\n"


def test_each_history_is_the_beginning_of_the_next_turns_text():
    history = [user("a"), assistant("b"), user("c"), assistant("d")]
    texts = [render(CHATML, history[:n], add_generation_prompt=False) for n in (1, 2, 3, 4)]
    assert all(longer.startswith(text) for text, longer in itertools.pairwise(texts))


def test_llama_gets_its_bos_date_tools_and_mapped_arguments():
    result = {"role": "tool", "tool_call_id": "1", "content": "5"}
    messages = [user("2+3?"), assistant(None, tool_calls=[CALL]), result]
    text = render(LLAMA, messages, tools=[TOOL], date_string="26 Jul 2024")
    assert text.startswith(
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nToday: 26 Jul 2024\n\n{\n    "
    )
    assert '{"name": "add", "parameters": {"b": 2, "a": {"x": [1.5, "é"]}}}<|eot_id|>' in text
    assert "<|start_header_id|>ipython<|end_header_id|>\n\n5<|eot_id|>" in text


def test_a_template_may_ask_for_the_date():
    assert len(render("{{ strftime_now('%Y-%m-%d') }}", [user("x")])) == len("2024-07-26")


def test_tojson_keeps_the_order_of_keys_and_escapes_no_html():
    assert '"b": "<&>", "a": "é"' in render(STRIPS_THINKING, [user("x")], tools=[TOOL])


def test_no_tools_are_none_rather_than_undefined():
    source = "{{ tools is none }} {{ documents is none }}"
    assert render(source, [user("x")]) == render(source, [user("x")], tools=[]) == "True True"


def test_kwargs_win_over_special_tokens():
    assert render("{{ bos_token }}{{ eos_token }}", [user("x")], bos_token="B") == "B<|eot_id|>"


THOUGHT = [user("a"), assistant("b", reasoning_content="why"), user("c")]
IN_TEXT = [user("a"), assistant("<think>\nwhy\n</think>\n\nb"), user("c")]


@pytest.mark.parametrize("messages", [THOUGHT, IN_TEXT])
def test_a_template_may_strip_the_thinking_of_old_turns(messages):
    assert "why" not in render(STRIPS_THINKING, messages)
    assert "<think>\nwhy\n</think>\n\nb" in render(STRIPS_THINKING, messages[:2])


@pytest.mark.parametrize("messages", [THOUGHT, IN_TEXT])
def test_preserve_thinking_keeps_it_so_that_the_history_does_not_change(messages):
    before = render(KEEPS_THINKING, messages[:2], add_generation_prompt=False, preserve_thinking=True)
    assert "<think>\nwhy\n</think>\n\nb" in before
    assert render(KEEPS_THINKING, messages, preserve_thinking=True).startswith(before)
    assert "why" not in render(KEEPS_THINKING, messages, preserve_thinking=False)


def test_enable_thinking_reaches_the_template():
    assert render(STRIPS_THINKING, [user("a")], enable_thinking=False).endswith("<think>\n\n</think>\n\n")
    assert render(STRIPS_THINKING, [user("a")]).endswith("assistant\n")


def test_arguments_can_be_iterated_over():
    text = render(STRIPS_THINKING, [user("a"), assistant("", tool_calls=[CALL])])
    assert '<function=add>\n<b>2\n<a>{"x": [1.5, "é"]}<|im_end|>' in text


def test_lines_that_hold_only_a_block_leave_no_blank():
    assert render("a\n  {% if true %}\nb\n  {% endif %}\nc", [user("x")]) == "a\nb\nc"


def test_the_generation_tag_and_loop_controls_are_understood():
    source = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}"
    assert render(source, [user("a"), user("b")]) == "a"


@pytest.mark.parametrize(
    ("source", "names"),
    [
        (CHATML, set()),
        (LLAMA, {"tools"}),
        (STRIPS_THINKING, {"tools", "enable_thinking"}),
        (KEEPS_THINKING, {"tools", "enable_thinking", "preserve_thinking"}),
        ("{# tools #}{{ 'enable_thinking' }}{{ message.preserve_thinking }}", set()),
        ("{%- if not tools is defined %}{%- set tools = none %}{%- endif %}", {"tools"}),
    ],
)
def test_variables_tell_what_a_template_takes_from_outside(source, names):
    known = {"tools", "enable_thinking", "preserve_thinking"}
    assert ChatTemplate(source, {}).variables & known == names


# --- failures


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ (''|attr('__class__')).__mro__ }}",
        "{{ raise_exception.__globals__['os'] }}",
        "{{ '{0.__class__}'.format('') | length }}{{ messages.__class__.x }}",
        "{{ messages.append(1) }}",
        "{{ range(1000000000) | length }}",
        "{{ messages[0].content.nothing.at_all }}",
        "{{ messages[9].role }}",
        "{{ 1 / 0 }}",
        "{{ 'a' * 10**18 }}",
        "{{ '{a}'.format() }}",
        "{{ 'a' | dictsort }}",
        "{{ 'a'.index('b') }}",
        "{{ 'a' + 1 }}",
        "{{ nothing() }}",
        "{% for a in 'a' | items %}{% endfor %}",
        "{{ messages | tojson(indent=messages) }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ {}['a'].b }}",
        "{{ raise_exception('roles must alternate') }}",
    ],
)
def test_whatever_a_template_does_wrong_is_an_invalid_request(source):
    with pytest.raises(InvalidRequest, match=r"^chat template: .") as error:
        render(source, [user("a")])
    assert error.value.status == 400


def test_a_templates_own_refusal_is_told():
    with pytest.raises(InvalidRequest, match=r"^chat template: Unexpected role: critic$"):
        render(LLAMA, [user("a"), {"role": "critic", "content": "b"}])


@given(st.text())
def test_a_failure_is_one_printable_line_of_bounded_length(text):
    with pytest.raises(InvalidRequest) as error:
        render("{{ raise_exception(messages[0].content) }}", [user("x\n\x1b[31m\u2028" + text * 100)])
    assert error.value.message.isprintable() and len(error.value.message) <= 300


@pytest.mark.parametrize("source", ["{% if %}", "{{ 'a }}", "{% endfor %}", "{{ x | no_such_filter }}", "\n{% for %}"])
def test_a_source_that_does_not_compile_is_a_configuration_error(source):
    with pytest.raises(ConfigError, match=r"^chat template: line \d+: .") as error:
        ChatTemplate(source, {})
    assert str(error.value).isprintable()


@pytest.mark.parametrize(
    "source", ["{% for a in b %}" * 30 + "{% endfor %}" * 30, "{{ " + "(" * 9999 + ")" * 9999 + " }}"]
)
def test_so_is_one_that_is_nested_too_deeply(source):
    with pytest.raises(ConfigError, match=r"^chat template: .") as error:
        ChatTemplate(source, {})
    assert str(error.value).isprintable()


# --- messages


def test_the_argument_is_left_as_it_is():
    call = {"id": "1", "function": {"name": "f", "arguments": "{}"}}
    messages = [{"role": "developer", "content": [{"type": "text", "text": "a"}], "tool_calls": [call], "name": None}]
    copy = [dict(message) for message in messages]
    normalise_messages(messages)
    assert messages == copy and call["function"]["arguments"] == "{}"


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool", "critic"])
def test_text_parts_are_joined_in_every_role(role):
    parts = [{"type": "text", "text": "A "}, {"type": "text", "text": "B"}]
    assert normalise_messages([{"role": role, "content": parts}])[0]["content"] == "A B"


def test_content_may_be_null_absent_or_empty_alike():
    calls = {"tool_calls": [CALL]}
    forms = [assistant(None, **calls), {"role": "assistant"} | calls, assistant("", **calls), assistant([], **calls)]
    assert all(normalise_messages([form]) == normalise_messages(forms[:1]) for form in forms)


def test_other_members_stay_and_null_ones_go():
    message = assistant("a", name="n", reasoning_content="r", custom=[1], refusal=None, tool_calls=None)
    expected = {"role": "assistant", "content": "a", "name": "n", "reasoning_content": "r", "custom": [1]}
    assert normalise_messages([message]) == [expected]


def test_an_empty_list_of_tool_calls_is_none():
    assert "tool_calls" not in normalise_messages([assistant("a", tool_calls=[])])[0]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"b": 1, "a": 12345678901234567890123}', {"b": 1, "a": 12345678901234567890123}),
        ({"a": 1}, {"a": 1}),
        ("{}", {}),
        ("", {}),
        (None, {}),
        ("{", "{"),
        ("5", "5"),
        ("[1]", "[1]"),
        ("null", "null"),
        ("[" * 100_000, "[" * 100_000),
        ("9" * 5000, "9" * 5000),
    ],
)
def test_arguments_become_an_object_and_stay_text_where_they_are_none(arguments, expected):
    call = {"function": {"name": "f", "arguments": arguments}}
    message = normalise_messages([assistant("", tool_calls=[call])])[0]
    result = message["tool_calls"][0]["function"]["arguments"]
    assert result == expected and list(result) == list(expected)


@pytest.mark.parametrize("arguments", ["{", "5", "[1]"])
def test_malformed_arguments_render_alike_each_time(arguments):
    messages = [user("a"), assistant("", tool_calls=[{"function": {"name": "f", "arguments": arguments}}])]
    assert render(LLAMA, messages, date_string="") == render(LLAMA, messages, date_string="")
    with pytest.raises(InvalidRequest, match=r"^chat template: "):
        render(STRIPS_THINKING, messages)


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ([], "messages"),
        ("hi", "messages"),
        (["hi"], "messages[0]"),
        ([user("a"), {"content": "x"}], "messages[1].role"),
        ([{"role": "", "content": "x"}], "messages[0].role"),
        ([{"role": 1, "content": "x"}], "messages[0].role"),
        ([user(5)], "messages[0].content"),
        ([user({"type": "text"})], "messages[0].content"),
        ([user(["a"])], "messages[0].content[0]"),
        ([user([{"type": "text", "text": "a"}, {"text": "b"}])], "messages[0].content[1].type"),
        ([user([{"type": "image_url", "image_url": {"url": "x"}}])], "messages[0].content[0].type"),
        ([user([{"type": "text"}])], "messages[0].content[0].text"),
        ([user("a") | {"name": 1}], "messages[0].name"),
        ([assistant("a", reasoning_content=[])], "messages[0].reasoning_content"),
        ([{"role": "tool", "content": "a", "tool_call_id": 7}], "messages[0].tool_call_id"),
        ([assistant("", tool_calls={})], "messages[0].tool_calls"),
        ([assistant("", tool_calls=["x"])], "messages[0].tool_calls[0].function"),
        ([assistant("", tool_calls=[CALL, {"id": "1"}])], "messages[0].tool_calls[1].function"),
        ([assistant("", tool_calls=[{"function": {}}])], "messages[0].tool_calls[0].function.name"),
        (
            [assistant("", tool_calls=[{"function": {"name": "f", "arguments": 5}}])],
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
)
def test_what_is_no_message_is_refused_naming_the_member(messages, param):
    with pytest.raises(InvalidRequest) as error:
        normalise_messages(messages)
    assert error.value.param == param and f"'{param}'" in error.value.message


def test_an_unsupported_part_is_named_in_one_printable_line():
    with pytest.raises(InvalidRequest, match="image input is not supported"):
        normalise_messages([user([{"type": "image_url"}])])
    with pytest.raises(InvalidRequest) as error:
        normalise_messages([user([{"type": "x\n\x1b[31m" + "y" * 1000}])])
    assert error.value.message.isprintable() and len(error.value.message) < 200
