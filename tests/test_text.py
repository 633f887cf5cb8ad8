"""Token ids to text: the joined pieces are the decoded whole up to the first stop string, however the text is cut."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from mlxcel.text import MAX_WINDOW, TextStream


class ByteLevel:
    """A byte-level decoder: token i is `pieces[i]`, whatever characters it begins or ends in the middle of."""

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = pieces
        self.ids = range(len(pieces))
        self.calls: list[int] = []

    def decode(self, ids) -> str:
        self.calls.append(len(ids))
        return b"".join(self.pieces[i] for i in ids).decode("utf-8", "replace")


def pieces_of(stream: TextStream, ids) -> list[str]:
    return [stream.push(i) for i in ids] + [stream.flush()]


def said(decode, ids, stop=()) -> str:
    return "".join(pieces_of(TextStream(decode, tuple(stop)), ids))


def cut(text: str, stops) -> tuple[str, str | None]:
    """`text` up to the stop string that is complete first (the longest of those), and that stop string."""
    for end in range(len(text) + 1):
        completed = [stop for stop in stops if text[:end].endswith(stop)]
        if completed:
            longest = max(completed, key=len)
            return text[: end - len(longest)], longest
    return text, None


def split(data: bytes, cuts: set[int]) -> list[bytes]:
    edges = sorted({0, len(data)} | {at for at in cuts if at < len(data)})
    return [data[a:b] for a, b in zip(edges, edges[1:], strict=False)]


unicode = st.text(max_size=60) | st.text(alphabet="ab한🏳\ufe0f\u200d🌈e\u0301 \n\ufffd", max_size=60)
cuts = st.sets(st.integers(0, 200))
few = st.text(alphabet="ab", min_size=1, max_size=4)
some_bytes = st.sampled_from([b"", b"\xe2", b"\x82", b"\xac", b"\xf0\x9f", b"\x98\x80", b"\xff", b"a", b" b", b"\xc3\xa9\xe2"])


@given(unicode, cuts)
def test_valid_text_arrives_whole_however_it_is_cut(text, cuts):
    tokenizer = ByteLevel(split(text.encode(), cuts))
    assert said(tokenizer.decode, tokenizer.ids) == text


@given(st.lists(some_bytes | st.binary(max_size=5), max_size=80))
@example([b"\xe2"] + [b""] * 40 + [b"\x82", b"\xac"])
@example([b"\xff"] * 80)
def test_any_bytes_arrive_as_they_decode_as_a_whole(pieces):
    tokenizer = ByteLevel(pieces)
    assert said(tokenizer.decode, tokenizer.ids) == tokenizer.decode(tokenizer.ids)


@given(unicode, cuts)
def test_no_piece_holds_a_broken_character(text, cuts):
    text = text.replace("\ufffd", "")
    tokenizer = ByteLevel(split(text.encode(), cuts))
    assert not any("\ufffd" in piece for piece in pieces_of(TextStream(tokenizer.decode, ()), tokenizer.ids))


@given(st.data(), unicode, cuts, st.lists(few, max_size=3))
def test_text_ends_before_the_first_stop_string_however_it_is_cut(data, text, cuts, stops):
    if text:
        start = data.draw(st.integers(0, len(text) - 1))
        stops = [*stops, text[start : start + data.draw(st.integers(1, 8))]]
    tokenizer = ByteLevel(split(text.encode(), cuts))
    stream = TextStream(tokenizer.decode, tuple(stops))
    assert ("".join(pieces_of(stream, tokenizer.ids)), stream.stopped_by) == cut(text, stops)


@given(st.text(alphabet="ab", max_size=40), cuts, st.lists(few, min_size=1, max_size=4))
def test_stop_strings_that_overlap_themselves_and_each_other_are_found(text, cuts, stops):
    tokenizer = ByteLevel(split(text.encode(), cuts))
    stream = TextStream(tokenizer.decode, tuple(stops))
    assert ("".join(pieces_of(stream, tokenizer.ids)), stream.stopped_by) == cut(text, stops)


@given(st.text(alphabet="abc", max_size=40), st.lists(few, min_size=1, max_size=4))
def test_no_more_text_is_held_than_may_become_a_stop_string(text, stops):
    stream = TextStream(lambda ids: "".join(map(chr, ids)), tuple(stops))
    out = ""
    for char in text:
        out += stream.push(ord(char))
        if stream.stopped_by is not None:
            return
        seen = text[: len(out) + len(_held(text, out, stops))]
        assert seen.startswith(out)
        assert text.startswith(out)


def _held(text: str, out: str, stops) -> str:
    rest = text[len(out) :]
    return next((rest[:n] for n in range(len(rest), 0, -1) if any(stop.startswith(rest[:n]) for stop in stops)), "")
