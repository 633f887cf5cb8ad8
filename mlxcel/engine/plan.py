"""What scheduler and engine say to each other: the plan of one step, and its outcome.

Values only, of plain numbers and evaluated state, so that they may go from one thread to the other. A sequence is
known by its id here. Invariant: an outcome says of every sequence in its plan what became of it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeVar

from mlxcel.engine.sequence import Generation, Sampling, TokenLogprob

if TYPE_CHECKING:
    from mlxcel.engine.grammar import Grammar
    from mlxcel.engine.kv import KVSegment
    from mlxcel.engine.model import LoadedModel
    from mlxcel.engine.snapshot import State

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Prefill:
    """Prefill `tokens`, after taking up stored state if this is the first chunk: KV `segments`, or the first n tokens
    of `state`. Then copy out KV [donate_from, now), or the whole state, whose length must be `capture`."""

    id: int
    tokens: array[int]
    segments: tuple[tuple[KVSegment, int], ...] = ()
    state: tuple[State, int] | None = None
    donate_from: int | None = None
    capture: int | None = None


@dataclass(frozen=True, slots=True)
class Start:
    """Let a prefilled sequence join the decode batch with its last prompt token."""

    id: int
    prompt: array[int]
    sampling: Sampling
    top_logprobs: int | None
    grammar: Grammar | None = None
    of_draw: bool = False

    @classmethod
    def of(cls, id: int, generation: Generation) -> Start:
        asked = generation
        return cls(id, asked.prompt, asked.sampling, asked.top_logprobs, asked.grammar, asked.of_draw)


@dataclass(frozen=True, slots=True)
class Retire:
    """Forget a sequence of `length` tokens; first copy out KV [donate_from, length), or the whole state, when asked."""

    id: int
    donate_from: int | None = None
    length: int = 0
    capture: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    retire: tuple[Retire, ...] = ()
    prefills: tuple[Prefill, ...] = ()
    start: tuple[Start, ...] = ()
    decode: bool = False

    @property
    def ids(self) -> set[int]:
        """Of all sequences that something else than decode is done with."""
        return {order.id for orders in (self.retire, self.prefills, self.start) for order in orders}

    def __bool__(self) -> bool:
        return bool(self.retire or self.prefills or self.start or self.decode)


@dataclass(slots=True)
class Outcome:
    """`tokens` are (id, token, log-probabilities) of this decode step; `segments` and `states` what Prefill and Retire
    copied, `refused` why it copied none; `unrestored` why a state was not put back, and nothing prefilled either."""

    tokens: list[tuple[int, int, TokenLogprob | None]] = field(default_factory=list)
    segments: dict[int, KVSegment] = field(default_factory=dict)
    states: dict[int, State] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)
    unrestored: dict[int, str] = field(default_factory=dict)
    failed: dict[int, Exception] = field(default_factory=dict)
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0

    def num_prefilled(self, plan: Plan) -> int:
        """Prompt tokens that were computed."""
        undone = self.failed.keys() | self.unrestored.keys()
        return sum(len(p.tokens) for p in plan.prefills if p.id not in undone)


class StepEngine(Protocol):
    """What the scheduler needs of an engine."""

    def step(self, plan: Plan) -> Outcome: ...

    def lend(self, work: Callable[[LoadedModel], T]) -> T: ...

    def release(self) -> None: ...
