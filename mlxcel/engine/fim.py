"""Filling a gap in a text: the tokens that models were trained to do it with, and the prompt made of them.

Families name the tokens differently and lay them out alike: [repository] [separator file text]... prefix SUFFIX MIDDLE,
where the model goes on. It knows token ids only and cuts what does not fit. Invariant: a prompt ends with the middle
token, and without one of the three tokens there is no `Fim`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

FAMILIES = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # the first StarCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
    ("<PRE>", "<SUF>", "<MID>"),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    ("<|prefix|>", "<|suffix|>", "<|middle|>"),  # Falcon
)
REPOSITORY = ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<repo_name>", "<reponame>", "<REPO>")
SEPARATOR = ("<|file_sep|>", "<file_sep>")
END = ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<EOT>", "▁<EOT>", "<|file_separator|>")


@dataclass(frozen=True, slots=True)
class Fim:
    """`ends` are the tokens by which a model says that the gap is filled, beside its end-of-sequence tokens."""

    prefix: int
    suffix: int
    middle: int
    repository: int | None
    separator: int | None
    ends: frozenset[int]


def find_fim(tokens: Mapping[str, int]) -> Fim | None:
    """Of the added tokens of a vocabulary; None when it was not made for this."""
    family = next((names for names in FAMILIES if tokens.keys() >= {*names}), None)
    if family is None:
        return None
    prefix, suffix, middle = (tokens[name] for name in family)
    repository, separator = _first(tokens, REPOSITORY), _first(tokens, SEPARATOR)
    padding = {tokens[name] for name in END if name in tokens}
    ends = padding | {token for token in (repository, separator) if token is not None}
    return Fim(prefix, suffix, middle, repository, separator, frozenset(ends))


def _first(tokens: Mapping[str, int], names: Iterable[str]) -> int | None:
    return next((tokens[name] for name in names if name in tokens), None)


@dataclass(frozen=True, slots=True)
class Gap:
    """What is known around a gap, as tokens: the other files' text, and what the gap already begins with."""

    prefix: array[int]
    suffix: array[int]
    begun: array[int]
    others: array[int]


@dataclass(frozen=True, slots=True)
class Room:
    """Tokens for the text around the gap, prefix and suffix together, and for the other files."""

    around: int
    others: int


def fim_prompt(fim: Fim, gap: Gap, room: Room, bos: array[int], *, suffix_first: bool) -> array[int]:
    """Three quarters of the room are for the end of the prefix, the rest for the beginning of the suffix."""
    quarter = room.around // 4
    before = array("i", [fim.prefix]) + _last(gap.prefix, 3 * quarter) + gap.begun
    after = array("i", [fim.suffix]) + gap.suffix[: max(quarter - len(gap.begun) - 2, 0)]
    others = _last(gap.others, room.others)
    text = after + before if suffix_first else before + after
    return bos + others + text + array("i", [fim.middle])


def _last(tokens: array[int], most: int) -> array[int]:
    """At most so many. Where the cut is moves in steps, so that most prompts of somebody who types begin alike."""
    excess, step = len(tokens) - most, max(most // 8, 1)
    return tokens if excess <= 0 else tokens[-(-excess // step) * step :]
