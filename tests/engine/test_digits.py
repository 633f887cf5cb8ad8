"""How many digits constrained JSON may go on with, wherever its text stands."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxcel.engine.digits import (
    EXPONENT_DIGITS,
    FRACTION_DIGITS,
    INTEGER_DIGITS,
    UNLIMITED,
    DigitRoom,
    leading_digits,
)


def room_after(text):
    digits = DigitRoom()
    digits.push(text.encode())
    return digits.room


@pytest.mark.parametrize(
    ("text", "room"),
    [
        ("", INTEGER_DIGITS),
        ("-12", INTEGER_DIGITS - 2),
        ("0.", FRACTION_DIGITS),
        ("0.123", FRACTION_DIGITS - 3),
        ("1.5e-2", EXPONENT_DIGITS - 1),
        ("9" * 30, 0),
        ('{"a": 12, "b": ', INTEGER_DIGITS),
        ("[12, ", INTEGER_DIGITS),
        ("[true, ", INTEGER_DIGITS),
        ('"12', UNLIMITED),
        (r'"a \" 12', UNLIMITED),
        (r'"a \\"', INTEGER_DIGITS),
    ],
)
def test_room_where_the_text_stands(text, room):
    assert room_after(text) == room


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(), lambda v: st.lists(v) | st.dictionaries(st.text(), v)
    )
)
def test_strings_of_any_kind_end_where_they_end(value):
    assert room_after(json.dumps([value], ensure_ascii=False)[:-1] + ", ") == INTEGER_DIGITS


@given(st.text(), st.integers(0, 50))
def test_pieces_do_not_matter(text, at):
    data = json.dumps({text: text}).encode()
    whole, pieces = DigitRoom(), DigitRoom()
    whole.push(data)
    pieces.push(data[:at])
    pieces.push(data[at:])
    assert pieces.room == whole.room


def test_digits_at_the_front_of_a_token():
    assert [leading_digits(piece) for piece in (b"", b"a1", b"1", b"12,", b"007", b" 1")] == [0, 0, 1, 2, 3, 0]
