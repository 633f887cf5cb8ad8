"""A stored KV segment for tests without a model: its "KV" is the tokens themselves, so content can be checked."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

BYTES_PER_TOKEN = 8


@dataclass(frozen=True)
class TokenSegment:
    tokens: array

    @property
    def nbytes(self) -> int:
        return len(self.tokens) * BYTES_PER_TOKEN

    def __len__(self) -> int:
        return len(self.tokens)

    def split(self, n: int) -> tuple[TokenSegment, TokenSegment]:
        assert 0 < n < len(self.tokens)
        return TokenSegment(self.tokens[:n]), TokenSegment(self.tokens[n:])

    def __add__(self, other: TokenSegment) -> TokenSegment:
        return TokenSegment(self.tokens + other.tokens)


def tokens(*ids: int) -> array:
    return array("i", ids)


def joined(segments) -> array:
    """The tokens that (segment, n) pairs stand for."""
    out = array("i")
    for segment, n in segments:
        out.extend(segment.tokens[:n])
    return out
