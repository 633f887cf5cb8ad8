"""Text to token ids and back, over a transformers tokenizer that was loaded with the model.

It owns which ids end a generation (the union of config.json, generation_config.json and the tokenizer, and the tokens
that end a filled gap) and how special tokens are treated. It does not know chat templates beyond handing out the
source.
"""

from __future__ import annotations

import copy
from array import array
from collections.abc import Iterable, Sequence
from functools import cache, cached_property
from typing import Any, Literal

from mlxcel.engine.fim import find_fim


class Tokenizer:
    """`backend` is a transformers PreTrainedTokenizer(Fast); ids are vocabulary indices below `vocab_size`."""

    def __init__(self, backend: Any, *, eos_ids: Iterable[int], vocab_size: int, chat_template: str | None) -> None:
        self._backend = backend
        self.fim = find_fim({text: i for text, i in backend.get_added_vocab().items() if i < vocab_size})
        ends = {*eos_ids} | (self.fim.ends if self.fim else frozenset())
        self.eos_ids = frozenset(i for i in ends if 0 <= i < vocab_size)
        self.vocab_size = vocab_size
        self.chat_template = chat_template
        self.bos_text: str | None = backend.bos_token
        self.eos_text: str | None = backend.eos_token
        self.special_tokens = {
            name: str(text) for name, text in backend.special_tokens_map.items() if isinstance(text, str)
        }

    def encode(self, text: str, *, add_special: bool, parse_special: bool = True) -> array[int]:
        """Ids of `text`; special-token texts inside it become their ids if `parse_special`. `add_special` adds what the
        model wants around a raw prompt (BOS), unless the text begins with the BOS text already."""
        if not parse_special:
            return self._encode_plain(text, add_special)
        if add_special and self.bos_text and text.startswith(self.bos_text):
            add_special = False
        return array("i", self._backend.encode(text, add_special_tokens=add_special))

    def _encode_plain(self, text: str, add_special: bool) -> array[int]:
        if self._plain is None:
            ids = self._backend.encode(text, add_special_tokens=add_special, split_special_tokens=True)
        else:
            ids = self._plain.encode(text, add_special_tokens=add_special).ids
        return array("i", ids)

    @cached_property
    def _plain(self) -> Any:
        """A copy that knows no special tokens; None when it is another kind. On the backend itself this would be a
        switch, thrown for all threads at once."""
        rust = copy.deepcopy(getattr(self._backend, "backend_tokenizer", None))
        if rust is not None:
            rust.encode_special_tokens = True
        return rust

    @cached_property
    def longest(self) -> int:
        """UTF-8 bytes that one token stands for at the most."""
        return max((len(self.piece(token)) for token in range(min(self.num_known, self.vocab_size))), default=1) or 1

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids` without special tokens; incomplete UTF-8 becomes U+FFFD."""
        return str(self._backend.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def decode_special(self, ids: Sequence[int]) -> str:
        """Text of `ids`, special tokens written out."""
        return str(self._backend.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def piece(self, token: int) -> bytes:
        """The bytes of one token as the vocabulary has them: a part of a character stays that part."""
        text = self._backend.convert_ids_to_tokens(token)
        if text is None or token in self._backend.added_tokens_decoder:
            return (text or "").encode()
        if self._is_byte_level():
            return bytes(_byte_of()[c] for c in text)
        if len(text) == 6 and text.startswith("<0x"):
            return bytes([int(text[3:5], 16)])
        return str(text).replace("\u2581", " ").encode()

    def serialised(self) -> str | None:
        """The tokenizer as the tokenizers library writes it (tokenizer.json); None when it is another kind."""
        rust = getattr(self._backend, "backend_tokenizer", None)
        return None if rust is None else str(rust.to_str())

    @property
    def num_known(self) -> int:
        """Ids that the tokenizer knows, added ones included; the model's logits may be wider or narrower."""
        return len(self._backend)

    @property
    def kind(self) -> Literal["bytes", "sentencepiece", "wordpiece", "none"]:
        """How its pieces are made: of bytes, of SentencePiece's text with "▁" for a blank, or as BERT's words."""
        rust = getattr(self._backend, "backend_tokenizer", None)
        if rust is None:
            return "sentencepiece" if hasattr(self._backend, "sp_model") else "none"
        if type(rust.model).__name__ == "WordPiece":
            return "wordpiece"
        return "bytes" if self._is_byte_level() else "sentencepiece"

    def _is_byte_level(self) -> bool:
        rust = getattr(self._backend, "backend_tokenizer", None)
        return rust is not None and b'"ByteLevel"' in rust.decoder.__getstate__()


@cache
def _byte_of() -> dict[str, int]:
    """The byte of each character of a byte-level vocabulary (GPT-2's table): bytes that print stand for themselves,
    the others for U+0100 and up, in order."""
    printing = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printing]
    return {chr(byte): byte for byte in printing} | {chr(256 + i): byte for i, byte in enumerate(others)}
