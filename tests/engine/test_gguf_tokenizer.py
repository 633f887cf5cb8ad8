"""A GGUF vocabulary tokenizes as llama.cpp does, and decodes back to the text."""

from __future__ import annotations

import unicodedata

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mlxcel.engine.gguf_file import GGUFError, GGUFFile, Tensor, Value
from mlxcel.engine.gguf_tokenizer import build_tokenizer
from tests.engine.tiny_gguf import MERGES, SPECIAL, byte_vocabulary

TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\u2581"))


def vocabulary_file(num_rows: int = 512, **keys: Value) -> GGUFFile:
    """A file with these tokenizer.ggml keys; None leaves one out."""
    embedding = Tensor("token_embd.weight", Kind.F32, (num_rows, 1), np.zeros((num_rows, 4), np.uint8))
    metadata = {f"tokenizer.ggml.{key}": value for key, value in keys.items() if value is not None}
    return GGUFFile(metadata, {"token_embd.weight": embedding})


def byte_level(pre: str | None = "gpt-2", **keys: Value):
    tokens, types = byte_vocabulary()
    defaults = {"model": "gpt2", "pre": pre, "tokens": tokens, "token_type": types, "merges": MERGES}
    return build_tokenizer(vocabulary_file(**(defaults | {"bos_token_id": 1, "eos_token_id": 2} | keys)))


PIECES = {
    "\u2581": -9.0,
    "h": -9.0,
    "e": -9.0,
    "l": -9.0,
    "o": -9.0,
    "he": -1.0,
    "el": -2.0,
    "ll": -3.0,
    "\u2581he": -4.0,
}


def sentencepiece(scores: dict[str, float] = PIECES, user_defined: tuple[str, ...] = ("  ",), **keys: Value):
    control = ["<unk>", "<s>", "</s>", "<end_of_turn>"]
    numbers = [f"<0x{byte:02X}>" for byte in range(256)]
    defaults = {
        "model": "llama",
        "tokens": control + numbers + list(scores) + list(user_defined),
        "token_type": [2, 3, 3, 3] + [6] * 256 + [1] * len(scores) + [4] * len(user_defined),
        "scores": [0.0] * 260 + list(scores.values()) + [0.0] * len(user_defined),
    }
    return build_tokenizer(vocabulary_file(**(defaults | keys)))


def pieces(tokenizer, text: str) -> list[str]:
    return tokenizer.convert_ids_to_tokens(tokenizer.encode(text))


@given(TEXTS)
@settings(deadline=None, max_examples=60)
@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "tekken"])
def test_byte_level_text_comes_back_as_it_was(pre, text):
    tokenizer, _ = byte_level(pre)
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


@given(TEXTS)
@example("e\u0301")
@settings(deadline=None, max_examples=60)
def test_qwen_text_comes_back_normalised_to_nfc(text):
    tokenizer, _ = byte_level("qwen2")
    assert tokenizer.decode(tokenizer.encode(text)) == unicodedata.normalize("NFC", text)


@given(TEXTS)
@settings(deadline=None, max_examples=60)
@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_text_comes_back_as_it_was(prefix, text):
    tokenizer, _ = sentencepiece(user_defined=(), add_space_prefix=prefix)
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["123", "4"]),
        ("smollm", ["1", "2", "3", "4"]),
        ("llama-bpe", ["<|im_start|>", "123", "4"]),
        ("qwen2", ["1", "2", "3", "4"]),
        ("tekken", ["<|im_start|>", "1", "2", "3", "4"]),
    ],
)
def test_each_pre_tokenizer_splits_digits_and_starts_a_text_its_own_way(pre, expected):
    assert pieces(byte_level(pre)[0], "1234") == expected


def test_only_some_take_a_word_of_the_vocabulary_whatever_the_merges():
    merges = [merge for merge in MERGES if merge != "hel lo"]
    assert pieces(byte_level("gpt-2", merges=merges)[0], "hello") == ["hel", "lo"]
    assert pieces(byte_level("llama-bpe", merges=merges)[0], "hello") == ["<|im_start|>", "hello"]


def test_special_tokens_in_a_text_are_read_as_such_and_left_out_of_decoded_text():
    tokenizer, _ = byte_level()
    ids = tokenizer.encode("<|im_start|>hello<|im_end|>")
    assert ids == [1, tokenizer.convert_tokens_to_ids("hello"), 2]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "hello"
    assert tokenizer.decode(ids) == "<|im_start|>hello<|im_end|>"
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")


@pytest.mark.parametrize(
    ("keys", "start", "end"),
    [
        ({}, False, False),
        ({"add_bos_token": True}, True, False),
        ({"add_bos_token": True, "add_eos_token": True}, True, True),
        ({"pre": "llama-bpe"}, True, False),
        ({"pre": "llama-bpe", "add_bos_token": False}, False, False),
    ],
)
def test_bos_and_eos_are_added_as_the_file_or_its_kind_says(keys, start, end):
    tokenizer, _ = byte_level(**keys)
    assert pieces(tokenizer, "hello") == ["<|im_start|>"] * start + ["hello"] + ["<|im_end|>"] * end
    assert tokenizer.decode(tokenizer.encode("hello", add_special_tokens=False)) == "hello"


def test_sentencepiece_joins_the_pair_with_the_best_score_first():
    assert pieces(sentencepiece()[0], "hell") == ["<s>", "\u2581he", "ll"]
    swapped = PIECES | {"he": -2.0, "el": -1.0}
    assert pieces(sentencepiece(swapped)[0], "hell") == ["<s>", "\u2581", "h", "el", "l"]


def test_sentencepiece_spells_what_it_does_not_know_in_bytes():
    assert pieces(sentencepiece(add_space_prefix=False)[0], "é") == ["<s>", "<0xC3>", "<0xA9>"]


def test_sentencepiece_matches_user_defined_tokens_in_the_raw_text():
    tokenizer, _ = sentencepiece(add_space_prefix=False)
    assert pieces(tokenizer, "he  he") == ["<s>", "he", "  ", "he"]
    assert tokenizer.decode(tokenizer.encode("he  he"), skip_special_tokens=True) == "he  he"


def test_empty_tokens_are_neither_twins_nor_found_in_a_text():
    tokens, types = byte_vocabulary()
    tokenizer, _ = byte_level(tokens=[*tokens, "", ""], token_type=[*types, 3, 4])
    assert pieces(tokenizer, "hello") == ["hello"]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, [2, 0]),  # <|im_end|> by its id, <|endoftext|> by its text
        ({"eos_token_id": 0}, [0, 2]),
        ({"eos_token_id": 0, "eot_token_id": 2, "eom_token_id": 5}, [0, 2, 5]),
        ({"eos_token_id": None}, [0, 2]),
    ],
)
def test_a_generation_ends_at_the_ids_the_file_names_and_at_well_known_ends_of_turn(keys, expected):
    assert byte_level(**keys)[1] == expected


def test_sentencepiece_has_ids_1_and_2_for_bos_and_eos_unless_told():
    tokenizer, end_ids = sentencepiece()
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token) == ("<s>", "</s>", "<unk>")
    assert end_ids == [2, 3]


def test_an_end_of_turn_that_the_file_does_not_mark_is_special_all_the_same():
    tokenizer, end_ids = byte_level(token_type=[1] * len(byte_vocabulary()[1]))
    assert end_ids == [2, 0]
    assert tokenizer.encode("<|endoftext|><|im_end|>") == [0, 2]


def test_padding_and_unknown_outside_the_vocabulary_are_ignored():
    tokenizer, _ = byte_level(padding_token_id=0xFFFFFFFF, unknown_token_id=-1)
    assert tokenizer.pad_token is None and tokenizer.unk_token is None


@pytest.mark.parametrize(
    ("keys", "cause"),
    [
        ({"model": None}, "tokenizer.ggml.model is missing"),
        ({"model": "bert"}, "tokenizer model 'bert' is not supported"),
        ({"pre": None}, "tokenizer.ggml.pre is missing"),
        ({"pre": "default"}, "pre-tokenizer 'default' is not supported"),
        ({"tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"tokens": []}, "the vocabulary is empty"),
        ({"tokens": SPECIAL * 2}, "names a token twice"),
        ({"tokens": [1, 2, 3]}, "tokenizer.ggml.tokens is not an array of str"),
        ({"token_type": [1]}, "differ in length"),
        ({"merges": None}, "tokenizer.ggml.merges is missing"),
        ({"merges": ["h q"]}, "merge 'h q' is not in the vocabulary"),
        ({"eos_token_id": 9999}, "eos_token_id is not a token of the vocabulary"),
        ({"eos_token_id": "2"}, "eos_token_id is not a token of the vocabulary"),
        ({"bos_token_id": None, "add_bos_token": True}, "bos_token_id is missing"),
        ({"add_bos_token": 1}, "add_bos_token is not of type bool"),
    ],
)
def test_a_vocabulary_that_cannot_be_right_is_refused(keys, cause):
    with pytest.raises(GGUFError, match=cause):
        byte_level(**keys)


def test_more_tokens_than_embeddings_are_refused():
    tokens, types = byte_vocabulary()
    file = vocabulary_file(num_rows=100, model="gpt2", pre="gpt-2", tokens=tokens, token_type=types, merges=MERGES)
    with pytest.raises(GGUFError, match=r"token_embd\.weight has fewer rows"):
        build_tokenizer(file)


def test_sentencepiece_without_scores_is_refused():
    with pytest.raises(GGUFError, match=r"tokenizer\.ggml\.scores is missing"):
        build_tokenizer(vocabulary_file(model="llama", tokens=["<unk>", "<s>", "</s>"]))
