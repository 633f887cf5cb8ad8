"""What a reply is made of: content, reasoning and tool calls, as parts that come one after the other.

A parser takes the text of one generation as it comes and says which part each piece belongs to. It owns the
vocabulary of parts and the parser that finds content only; those that know the marks of a model's template are in
modules of their own. Invariant: parts are the same however the text was cut into pieces, except for where they are cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the reader; never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model wrote for itself; never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A tool call: `index` counts those of the reply from 0, `id` is unique among all replies."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of the arguments of call `index`, which has begun; all its pieces together are a JSON object."""

    index: int
    text: str


Part = Content | Reasoning | CallBegun | CallArguments


class ReplyParser(Protocol):
    """Of one generation."""

    def push(self, text: str) -> list[Part]:
        """The parts that are certain now."""

    def flush(self) -> list[Part]:
        """The rest, when the generation has ended."""


class Plain:
    """All is content."""

    def push(self, text: str) -> list[Part]:
        return [Content(text)] if text else []

    def flush(self) -> list[Part]:
        return []
