"""Token ids to text: the joined pieces are the decoded whole up to the first stop string, however the text is cut."""

from __future__ import annotations

import itertools

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
    return [data[a:b] for a, b in itertools.pairwise(edges)]


unicode = st.text(max_size=60) | st.text(alphabet="ab한🏳\ufe0f\u200d🌈e\u0301 \n\ufffd", max_size=60)
cuts = st.sets(st.integers(0, 200))
few = st.text(alphabet="ab", min_size=1, max_size=4)
some_bytes = st.sampled_from(
    [b"", b"\xe2", b"\x82", b"\xac", b"\xf0\x9f", b"\x98\x80", b"\xff", b"a", b" b", b"\xc3\xa9\xe2"]
)


@given(unicode, cuts)
def test_valid_text_arrives_whole_however_it_is_cut(text, cuts):
    tokenizer = ByteLevel(split(text.encode(), cuts))
    assert said(tokenizer.decode, tokenizer.ids) == text


@given(st.lists(some_bytes | st.binary(max_size=5), max_size=80))
@example([b"\xe2"] + [b""] * 40 + [b"\x82", b"\xac"])
@example([b"\xff"] * 80)
@example([b"\xf0", b"\x9f", b"\x98"] * 30)
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
@example("aabaaabaaac", set(), ["aabaaac"])
def test_stop_strings_that_overlap_themselves_and_each_other_are_found(text, cuts, stops):
    tokenizer = ByteLevel(split(text.encode(), cuts))
    stream = TextStream(tokenizer.decode, tuple(stops))
    assert ("".join(pieces_of(stream, tokenizer.ids)), stream.stopped_by) == cut(text, stops)


@given(st.text(alphabet="abc", max_size=40), st.lists(few, min_size=1, max_size=4))
def test_exactly_what_may_become_a_stop_string_is_held(text, stops):
    stream = TextStream(lambda ids: "".join(map(chr, ids)), tuple(stops))
    out = ""
    for n, char in enumerate(cut(text, stops)[0], 1):
        out += stream.push(ord(char))
        ends = [text[at:n] for at in range(n) if any(stop.startswith(text[at:n]) for stop in stops)]
        assert text[:n] == out + max(ends, key=len, default="")


def test_the_beginning_of_a_stop_string_is_held_until_it_is_known_to_be_none():
    tokenizer = ByteLevel([b"a ST", b"O", b"Re"])
    assert pieces_of(TextStream(tokenizer.decode, ("STOP",)), tokenizer.ids) == ["a ", "", "STORe", ""]


def test_a_stop_string_over_several_tokens_ends_the_text():
    tokenizer = ByteLevel([b"the quick br", b"own", b" fo", b"x", b"y"])
    stream = TextStream(tokenizer.decode, ("own fo",))
    assert pieces_of(stream, tokenizer.ids) == ["the quick br", "", "", "", "", ""]
    assert stream.stopped_by == "own fo"


def test_a_stop_string_at_the_very_start_leaves_no_text():
    tokenizer = ByteLevel([b"STOP and more"])
    assert said(tokenizer.decode, tokenizer.ids, ["STOP"]) == ""


def test_the_stop_string_that_is_complete_first_wins():
    tokenizer = ByteLevel([b"xabcd"])
    stream = TextStream(tokenizer.decode, ("abcd", "bc"))
    assert (stream.push(0), stream.stopped_by) == ("xa", "bc")


def test_of_stop_strings_complete_at_once_the_longest_wins():
    tokenizer = ByteLevel([b"xabc"])
    stream = TextStream(tokenizer.decode, ("bc", "abc", "c"))
    assert (stream.push(0), stream.stopped_by) == ("x", "abc")


def test_held_text_is_said_at_the_end():
    tokenizer = ByteLevel([b"a S", b"TO"])
    assert pieces_of(TextStream(tokenizer.decode, ("STOP",)), tokenizer.ids) == ["a ", "", "STO"]


def test_the_flushed_rest_may_complete_a_stop_string():
    tokenizer = ByteLevel([b"ab\xe2\x82"])
    stream = TextStream(tokenizer.decode, ("b\ufffd",))
    assert pieces_of(stream, tokenizer.ids) == ["a", ""]
    assert stream.stopped_by == "b\ufffd"


def test_a_character_cut_short_is_one_replacement_character_at_the_end():
    tokenizer = ByteLevel([b"a", b"\xf0\x9f", b"\x98"])
    assert pieces_of(TextStream(tokenizer.decode, ()), tokenizer.ids) == ["a", "", "", "\ufffd"]


def test_whole_characters_before_an_unfinished_one_are_not_held():
    tokenizer = ByteLevel(["한글\u20ac".encode()[:-1], b"\xac"])
    assert pieces_of(TextStream(tokenizer.decode, ()), tokenizer.ids) == ["한글", "€", ""]


@pytest.mark.parametrize("text", ["e\u0301", "🏳\ufe0f\u200d🌈", "👍🏽", "❤\ufe0f"])
def test_a_combining_character_arrives_alone_and_nothing_is_repeated(text):
    tokenizer = ByteLevel([char.encode() for char in text])
    assert pieces_of(TextStream(tokenizer.decode, ()), tokenizer.ids) == [*text, ""]


def test_the_cost_of_a_token_does_not_grow_with_the_reply():
    tokenizer = ByteLevel([b"word "] * 100)
    stream = TextStream(tokenizer.decode, ("stop",))
    for _ in range(20):
        for i in tokenizer.ids:
            stream.push(i)
    assert max(tokenizer.calls) <= MAX_WINDOW + 1
    assert len(tokenizer.calls) < 2000 * 1.2


@pytest.mark.parametrize("piece", [b"", b"\xff", b"\x80", b" ", b"\xf0\x9f"])
def test_neither_does_it_where_nothing_is_certain(piece):
    tokenizer = ByteLevel([b"a", piece])
    stream = TextStream(tokenizer.decode, ())
    for i in [0] + [1] * 500:
        stream.push(i)
    assert max(tokenizer.calls) <= MAX_WINDOW + 1
    assert len(tokenizer.calls) < 501 * 2.2


def test_a_decoder_that_changes_its_mind_loses_no_text_and_does_not_raise():
    def decode(ids):
        return "".join(map(chr, ids)).replace("a\ufffdb", "X")

    assert said(decode, map(ord, "ca\ufffdbd")) == "ca\ufffdbd"


# --- real tokenizers

TEXTS = [
    "hello world",
    " leading and  double  spaces ",
    "한글 테스트 ďábel 🙂👍",
    "e\u0301 🏳\ufe0f\u200d🌈 👍🏽 x",
    "line\nline\n\n\tindented",
    "🙂🙂🙂🙂🙂🙂🙂🙂🙂🙂 and 漢字漢字漢字漢字",
]
SPECIAL = "<|end|>"


def byte_level_bpe() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w"), ("Ġ", "Ġ"), ("í", "ķ")]
    vocab = {piece: i for i, piece in enumerate([*alphabet, *(a + b for a, b in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(SPECIAL, special=True)])
    return tokenizer


def byte_fallback_bpe() -> Tokenizer:
    letters = sorted(set("helo wrdlinagtbu\n") - {" "})
    merges = [("▁", "w"), ("l", "l"), ("▁", "▁")]
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *letters, *(a + b for a, b in merges)]
    model = models.BPE(
        vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges, unk_token="<unk>", byte_fallback=True
    )
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(SPECIAL, special=True)])
    return tokenizer


REAL = {"byte-level": byte_level_bpe(), "byte-fallback": byte_fallback_bpe()}
real = pytest.mark.parametrize("tokenizer", REAL.values(), ids=REAL.keys())


@real
@pytest.mark.parametrize("text", TEXTS)
def test_a_real_tokenizers_text_arrives_whole_and_unbroken(tokenizer, text):
    ids = tokenizer.encode(text).ids
    pieces = pieces_of(TextStream(tokenizer.decode, ()), ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    assert not any("\ufffd" in piece for piece in pieces)


@real
@given(text=st.text(max_size=60) | st.text(alphabet=" hel🙂한", max_size=80))
def test_so_does_any_text(tokenizer, text):
    ids = tokenizer.encode(text).ids
    assert said(tokenizer.decode, ids) == tokenizer.decode(ids)


@real
@given(text=st.text(alphabet=" helo🙂한", max_size=80), stops=st.lists(st.text(" helo🙂한", min_size=1, max_size=4)))
def test_and_any_text_up_to_a_stop_string(tokenizer, text, stops):
    ids = tokenizer.encode(text).ids
    assert said(tokenizer.decode, ids, stops) == cut(tokenizer.decode(ids), stops)[0]


@real
@given(parts=st.lists(st.sampled_from(["hello", " world", "🙂", SPECIAL]), max_size=60))
@example(parts=["hello", *[SPECIAL] * 40, " world"])
def test_special_tokens_say_nothing_and_do_not_disturb_what_is_around_them(tokenizer, parts):
    ids = [id for part in parts for id in tokenizer.encode(part).ids]
    assert said(tokenizer.decode, ids) == tokenizer.decode(ids)


def test_a_space_at_the_start_waits_for_what_it_belongs_to():
    tokenizer = REAL["byte-fallback"]
    ids = [tokenizer.token_to_id(piece) for piece in ("▁", "▁w", "h")]
    assert pieces_of(TextStream(tokenizer.decode, ()), ids) == ["", " w", "h", ""]


def test_each_character_of_a_byte_fallback_run_arrives_when_it_is_whole():
    tokenizer = REAL["byte-fallback"]
    ids = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in "🙂€한".encode()]
    pieces = pieces_of(TextStream(tokenizer.decode, ()), ids)
    assert pieces == ["", "", "", "🙂", "", "", "€", "", "", "한", ""]


def test_what_a_byte_fallback_run_said_stands_when_the_run_ends_invalid():
    tokenizer = REAL["byte-fallback"]
    ids = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in "€".encode() + b"\xff"]
    assert said(tokenizer.decode, ids) == "€\ufffd"
    assert said(tokenizer.decode, ids + tokenizer.encode("hello").ids) == "€\ufffd hello"


@given(st.binary(max_size=60))
def test_invalid_byte_runs_neither_raise_nor_lose_the_text_behind_them(data):
    tokenizer = REAL["byte-fallback"]
    ids = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in data]
    assert said(tokenizer.decode, ids + tokenizer.encode("hello").ids).endswith("hello")


# --- lines


def outdented(text: str, least: int) -> tuple[str, bool]:
    """The text before the first line but the first that has fewer than `least` blanks or tabs in front."""
    first, *others = text.split("\n")
    out = first
    for i, line in enumerate(others):
        body = line.lstrip(" \t")
        indent = line[: len(line) - len(body)]
        ends_here = i == len(others) - 1 and not body  # nothing has come yet that is indented too little
        if len(indent) < least and not ends_here:
            return out + "\n" + indent, True
        out += "\n" + line
    return out, False


@given(st.text(alphabet="a\n \t", max_size=40), cuts, st.integers(0, 3))
def test_text_ends_at_the_first_line_that_is_indented_too_little_however_it_is_cut(text, cuts, least):
    tokenizer = ByteLevel(split(text.encode(), cuts))
    stream = TextStream(tokenizer.decode, (), least)
    shown, is_outdented = outdented(text, least) if least else (text, False)
    assert ("".join(pieces_of(stream, tokenizer.ids)), stream.is_outdented) == (shown, is_outdented)
    assert stream.has_new_line == ("\n" in text)


def test_a_stop_string_before_the_line_that_is_indented_too_little_wins():
    tokenizer = ByteLevel([b"a\n  b STOP\nc"])
    stream = TextStream(tokenizer.decode, ("STOP",), 2)
    assert ("".join(pieces_of(stream, tokenizer.ids)), stream.stopped_by) == ("a\n  b ", "STOP")
    assert not stream.is_outdented
