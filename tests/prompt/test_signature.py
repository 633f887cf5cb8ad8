"""The template signature: layouts by vectors, canonical JSON as serde_json writes it, what changes it and what not."""

from __future__ import annotations

import json
import struct
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxcel.prompt.signature import RAW_PROMPT_SIG, canonical_json, template_sig, tools_digest

F = {"type": "function", "function": {"name": "f"}}
G = {"type": "function", "function": {"name": "g", "description": "d", "parameters": {"type": "object", "a": [1]}}}
NO_TOOLS = "573c70378dd56e5e1158003ac380a5c76d8278ff298fb5bb03ef0b421b34bd53"

numbers = st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)
leaves = st.none() | st.booleans() | numbers | st.text(max_size=5)
values = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
)


def reordered(value):
    if isinstance(value, dict):
        return {key: reordered(value[key]) for key in reversed(value)}
    return [reordered(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, "452fdcfc9e8eedddc8d1c1a380a2b3a4f4d6c3c341414971a951c8f9fc453af7"),
        ({"prefill": True}, "2234ee34d613991afd59a33d3fb5f7dcc7fbe367e0eaf45e41195669b7ef17dc"),
        (
            {"kwargs": {"enable_thinking": False}, "tool_choice": "auto"},
            "64244cd7c0933b5381522a2968c9921096fe96e220f8c659b0c612fc6ad9a98f",
        ),
    ],
)
def test_template_sig_has_its_layout(arguments, expected):
    assert template_sig("T", **{"kwargs": {}} | arguments).hex == expected


@pytest.mark.parametrize(
    ("tools", "expected"),
    [
        ([], NO_TOOLS),
        (None, NO_TOOLS),
        ([F], "a117755a989f7c5840692b231fdc5e9a3765de1554dbf52bbc2740f33395c4a3"),
    ],
)
def test_tools_digest_has_its_layout(tools, expected):
    assert tools_digest(tools) == expected


def test_the_order_of_tools_matters():
    assert tools_digest([F, G]) != tools_digest([G, F])


@given(values)
def test_the_order_of_keys_in_parameters_and_kwargs_does_not(value):
    def tool(parameters):
        return {"type": "function", "function": {"name": "f", "parameters": parameters}}

    other = reordered(value)
    assert tools_digest([tool(value)]) == tools_digest([tool(other)])
    assert template_sig("T", {"k": value}) == template_sig("T", {"k": other})


def test_what_a_tool_says_is_framed():
    one = {"type": "function", "function": {"name": "ab", "description": "c"}}
    other = {"type": "function", "function": {"name": "a", "description": "bc"}}
    assert tools_digest([one]) != tools_digest([other])


CHANGES = {
    "template": {"source": "U"},
    "kwargs": {"kwargs": {"a": 1}},
    "tool_choice": {"tool_choice": "auto"},
    "tools": {"tools": [F]},
    "prefill": {"prefill": True},
}


@pytest.mark.parametrize("part", CHANGES)
def test_every_input_changes_the_signature_and_just_its_own_part(part):
    one = template_sig("T", {})
    other = template_sig(**{"source": "T", "kwargs": {}} | CHANGES[part])
    assert one.hex != other.hex
    ours, theirs = asdict(one.parts), asdict(other.parts)
    assert [name for name in ours if ours[name] != theirs[name]] == [part]


def test_a_tool_choice_by_name_is_neither_a_mode_nor_absent():
    choices = [None, "auto", "f", {"type": "function", "function": {"name": "f"}}, {"function": {"name": "g"}}]
    assert len({template_sig("T", {}, choice).hex for choice in choices}) == len(choices)


def test_prompts_without_a_template_have_a_fixed_signature_that_no_chat_can_have():
    assert RAW_PROMPT_SIG == "mlxcel:prompt-cache:raw-prompt:v1"
    assert len(RAW_PROMPT_SIG) != len(template_sig("", {}).hex) == 64


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (0, "0"),
        (-7, "-7"),
        (18446744073709551615, "18446744073709551615"),
        (0.0, "0.0"),
        (-0.0, "-0.0"),
        (1.0, "1.0"),
        (0.1, "0.1"),
        (1e15, "1000000000000000.0"),
        (1e16, "1e16"),
        (-1.5e300, "-1.5e300"),
        (123456789012345678.0, "1.2345678901234568e17"),
        (0.0001, "0.0001"),
        (1e-5, "0.00001"),
        (-1.25e-5, "-0.0000125"),
        (9.999e-5, "0.00009999"),
        (1e-6, "1e-6"),
        (5e-324, "5e-324"),
        (float("nan"), "null"),
        (float("-inf"), "null"),
    ],
)
def test_numbers_are_written_as_serde_json_writes_them(number, expected):
    assert canonical_json(number) == expected.encode()


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_number_reads_back_as_itself(number):
    assert struct.pack("d", float(json.loads(canonical_json(number)))) == struct.pack("d", number)


@given(values)
def test_any_value_reads_back_as_itself(value):
    assert json.loads(canonical_json(value)) == value


def test_keys_are_sorted_at_every_level_and_nothing_is_blank():
    assert canonical_json({"b": [{"z": None, "a": True}], "a": {}, "B": False}) == (
        b'{"B":false,"a":{},"b":[{"a":true,"z":null}]}'
    )


def test_keys_are_sorted_by_code_point_as_their_utf8_is():
    keys = ["\uffff", "\U00010000", "é", "z"]
    assert list(json.loads(canonical_json(dict.fromkeys(keys)))) == sorted(keys, key=str.encode)


def test_only_quotes_backslashes_and_control_characters_are_escaped():
    assert canonical_json('"\\/\n\r\t\b\f\x00\x1f\x7f한🙂') == (
        '"\\"\\\\/\\n\\r\\t\\b\\f\\u0000\\u001f\x7f한🙂"'.encode()
    )


def test_what_is_no_json_value_is_refused():
    with pytest.raises(TypeError, match="bytes"):
        canonical_json({"a": [b"x"]})
