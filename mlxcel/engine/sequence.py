"""What a request asks of the engine, and what it is told back.

A `Generation` is checked and complete before it gets here: the engine trusts every number in it. A `Sequence`
is one generation in flight; the scheduler alone changes it. Its reader sees `Progress*`, `Delta*`, then exactly
one of `Finished` or `Failed`. Nothing here knows MLX or HTTP.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Literal

from mlxcel.cache.key import CacheContext
from mlxcel.errors import ServerError
from mlxcel.text import TextStream

if TYPE_CHECKING:
    from mlxcel.engine.grammar import Grammar


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a token is chosen. Temperature 0 is greedy; 0, 1.0 and -1 switch the filters off as in llama-server."""

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Generation:
    """One generation, checked: `prompt` is never empty, `max_tokens` None means up to the context's end.

    `top_logprobs` None asks for no log-probabilities, 0 for the chosen token's alone. `cache` None means that
    the prompt cache is neither read nor written. `boundary` is how many prompt tokens are history that the next turn
    will begin with; only models that are stored as snapshots need it. With a `grammar` and `ignore_eos` it
    ends where the grammar is complete and nothing else may follow.
    """

    prompt: array[int]
    sampling: Sampling = Sampling()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    top_logprobs: int | None = None
    cache: CacheContext | None = None
    boundary: int | None = None
    grammar: Grammar | None = None
    slot: int | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The chosen token, its natural-log probability before temperature, and the `top` (id, logprob) pairs."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Progress:
    """`processed` of `total` prompt tokens are in the KV, `cached` of them adopted."""

    processed: int
    total: int
    cached: int


@dataclass(frozen=True, slots=True)
class Delta:
    """New text, and the tokens and log-probabilities whose text it completes."""

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """The healthy end. Times in milliseconds: until the first token, and from there to the last."""

    stop_type: Literal["eos", "limit", "word"]
    stopping_word: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    truncated: bool
    prompt_ms: float
    predicted_ms: float
    slot: int = -1

    @property
    def reason(self) -> Literal["stop", "length"]:
        return "length" if self.stop_type == "limit" else "stop"


@dataclass(frozen=True, slots=True)
class Failed:
    error: ServerError


Event = Progress | Delta | Finished | Failed


class State(StrEnum):
    WAITING = "waiting"
    PREFILLING = "prefilling"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """One generation in flight. Only the scheduler writes it; `events()` is for its one reader."""

    id: int
    generation: Generation
    text: TextStream
    max_tokens: int
    submitted_at: float
    state: State = State.WAITING
    num_prefilled: int = 0
    num_cached: int = 0
    num_stored: int = 0
    storable: bool = False
    miss_reason: str | None = None
    slot: int | None = None
    tokens: array[int] = field(default_factory=lambda: array("i"))
    cancelled: bool = False
    unsaid: list[tuple[int, TokenLogprob | None]] = field(default_factory=list)
    started_at: float = 0.0
    first_token_at: float = 0.0
    _queue: asyncio.Queue[Event] = field(default_factory=asyncio.Queue)

    @property
    def prompt(self) -> array[int]:
        return self.generation.prompt

    @property
    def num_prompt(self) -> int:
        return len(self.generation.prompt)

    def publish(self, event: Event) -> None:
        """Never blocks: a reader that stalls holds its own text (at most max_tokens pieces), nobody else's."""
        self._queue.put_nowait(event)

    def say(self, text: str, token: int, logprob: TokenLogprob | None) -> None:
        """Publish `text`, if any is certain yet, with all tokens since the last text."""
        self.unsaid.append((token, logprob))
        if text:
            self.say_rest(text)

    def say_rest(self, text: str) -> None:
        """Publish `text` with the tokens whose text was held."""
        if text or self.unsaid:
            tokens = tuple(token for token, _ in self.unsaid)
            self.publish(Delta(text, tokens, tuple(logprob for _, logprob in self.unsaid if logprob)))
            self.unsaid.clear()

    async def events(self) -> AsyncIterator[Event]:
        """Yields events until `Finished` or `Failed`, which is the last one."""
        while True:
            event = await self._queue.get()
            yield event
            if isinstance(event, (Finished, Failed)):
                return
