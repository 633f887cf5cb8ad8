"""Text to ids and back, special tokens, and the bytes of single tokens."""

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from mlxcel.engine.tokenizer import Tokenizer
from tests.tiny import byte_tokenizer

TEXT = "a 한🙂é\n<|im_end|>"


def sentencepiece_like() -> Tokenizer:
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{b:02X}>": 3 + b for b in range(256)} | {"▁the": 259, "a": 260}
    backend = Backend(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens(["<s>", "</s>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    return Tokenizer(fast, eos_ids=[2, 9999], vocab_size=261, chat_template=None)


def test_the_pieces_of_a_text_join_to_it_even_where_a_token_is_part_of_a_character():
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode(TEXT, add_special=False)
    assert b"".join(map(tokenizer.piece, ids)).decode() == TEXT
    assert tokenizer.decode_special(ids) == TEXT and tokenizer.decode(ids) == TEXT.removesuffix("<|im_end|>")


@pytest.mark.parametrize(
    ("token", "piece"), [(1, b"<s>"), (259, b" the"), (3 + 0xC3, b"\xc3"), (260, b"a"), (9999, b"")]
)
def test_pieces_of_a_vocabulary_with_byte_fallback(token, piece):
    assert sentencepiece_like().piece(token) == piece


def test_an_end_id_beyond_the_vocabulary_is_dropped():
    assert sentencepiece_like().eos_ids == {2}


def test_a_text_that_begins_with_bos_gets_no_second_one():
    assert sentencepiece_like().encode("<s>a", add_special=True).tolist() == [1, 260]
