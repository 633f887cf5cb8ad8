"""DRY: a token that would go on repeating what was said before loses the more, the longer the repetition already is.

The algorithm is llama.cpp's (src/llama-sampler.cpp, after koboldcpp's). It owns how text that breaks a repetition is
found in tokens, and how much each token loses. It works on plain numbers: the window is short, and the tokens are on
the host anyway. It does not know logits. Invariant: a token that breaks repetitions by itself loses nothing.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable
from functools import cached_property, lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from mlxcel.engine.sequence import Breakers, Dry
from mlxcel.engine.tokenizer import Tokenizer

MAX_BREAKER = 40  # bytes; what is longer is cut
MAX_TAIL = 20  # tokens
MAX_LOSS = 1e30  # further arithmetic must not make it infinite
LOG_OF_MAX = 88.7228391  # of float32


class BreakerIndex:
    """Finds breakers in a tokenizer's vocabulary. Safe in any thread; the first search reads the whole vocabulary."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.find = lru_cache(16)(self._find)
        self._find_one = lru_cache(32)(self._sequences)

    def _find(self, texts: tuple[str, ...]) -> Breakers:
        """For each token that breaks a repetition at one of the `texts`, what must follow it to do so: nothing where
        it holds the whole text, else the tokens of the rest of the text."""
        tails: dict[int, set[tuple[int, ...]]] = {}
        for text in filter(None, texts):
            for token, tail in self._find_one(text):
                tails.setdefault(token, set()).add(tail)
        return {token: tuple(sorted(found)) for token, found in tails.items()}

    def _sequences(self, text: str) -> frozenset[tuple[int, tuple[int, ...]]]:
        wanted = text.encode(errors="replace")[:MAX_BREAKER]
        found: set[tuple[int, tuple[int, ...]]] = {(token, ()) for token in self._holding(wanted)}
        whole = {token for token, _ in found}
        for split in range(1, len(wanted)):
            tail = self._tail(wanted[split:])
            found |= {(token, tail) for token in self._ending_with(wanted[:split]) if token not in whole}
        return frozenset(found)

    def _tail(self, rest: bytes) -> tuple[int, ...]:
        """Its tokens. What is left of a character that the head began is no text: those bytes are tokens each."""
        text = rest.lstrip(bytes(range(0x80, 0xC0)))
        begun = [self._byte_tokens.get(bytes([byte]), -1) for byte in rest[: len(rest) - len(text)]]
        return (*begun, *self._tokenizer.encode(text.decode(errors="ignore"), add_special=False))[:MAX_TAIL]

    @cached_property
    def _byte_tokens(self) -> dict[bytes, int]:
        joined, starts = self._pieces
        bounds = enumerate(pairwise(starts))
        return {joined[begin:end]: token for token, (begin, end) in bounds if end - begin == 1}

    @cached_property
    def _pieces(self) -> tuple[bytes, list[int]]:
        """The bytes of all tokens one after the other, and where each begins."""
        size = min(self._tokenizer.vocab_size, self._tokenizer.num_known)
        pieces = [self._tokenizer.piece(token) for token in range(size)]
        return b"".join(pieces), np.cumsum([0, *map(len, pieces)]).tolist()

    def _holding(self, text: bytes) -> Iterable[int]:
        """Tokens in which the whole text is."""
        for token, begin, end in self._occurrences(text):
            if begin + len(text) <= end:
                yield token

    def _ending_with(self, text: bytes) -> Iterable[int]:
        for token, begin, end in self._occurrences(text):
            if begin + len(text) == end:
                yield token

    def _occurrences(self, text: bytes) -> Iterable[tuple[int, int, int]]:
        """(token, where the text begins, where the token ends) in the joined bytes."""
        joined, starts = self._pieces
        begin = joined.find(text)
        while begin >= 0:
            token = bisect_right(starts, begin) - 1
            yield token, begin, starts[token + 1]
            begin = joined.find(text, begin + 1)


def losses(recent: NDArray[np.int32], dry: Dry) -> dict[int, float]:
    """What each token loses that would continue a repetition of the end of `recent`."""
    window = recent[-dry.last_n :]
    steepest = int(LOG_OF_MAX / math.log(dry.base)) if dry.base > 1.000001 else 0
    longest = min(len(window), dry.allowed_length + max(steepest, 1))
    if len(window) <= dry.allowed_length:
        return {}
    limit = _since_breaker(window[-(longest + MAX_TAIL + 1) :].tolist(), dry.breakers, longest)
    if limit < dry.allowed_length:
        return {}
    lengths = _repeats(window, limit)
    ends = np.flatnonzero(lengths >= dry.allowed_length)
    repeated: dict[int, int] = {}
    for token, length in zip(window[ends + 1].tolist(), lengths[ends].tolist(), strict=True):
        repeated[token] = max(length, repeated.get(token, 0))
    return {
        token: _loss(dry, min(length - dry.allowed_length, steepest))
        for token, length in repeated.items()
        if () not in dry.breakers.get(token, ())
    }


def _loss(dry: Dry, exponent: int) -> float:
    return min(max(dry.multiplier * dry.base**exponent, -MAX_LOSS), MAX_LOSS)


def _since_breaker(window: list[int], breakers: Breakers, longest: int) -> int:
    """How many tokens have followed the last breaker; `longest` stands for all that is longer."""
    last = len(window) - 1
    for back in range(len(window)):
        tails = breakers.get(window[last - back], ())
        matches = [len(tail) for tail in tails if tuple(window[last - back + 1 :][: len(tail)]) == tail]
        if matches:
            return min(back - max(matches), longest)
    return longest


def _repeats(window: NDArray[np.int32], limit: int) -> NDArray[np.int64]:
    """For each place but the last: how many tokens up to it are also the window's last ones, counted up to `limit`."""
    last = len(window) - 1
    lengths = np.zeros(last, dtype=np.int64)
    equal = np.ones(last, dtype=np.bool_)
    for back in range(limit):
        equal[:back] = False
        equal[back:] &= window[: last - back] == window[last - back]
        if not equal.any():
            break
        lengths += equal
    return lengths
