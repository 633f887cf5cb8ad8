"""What a request asks of the engine, and what it is told back.

A `Generation` is checked and complete before it gets here: the engine trusts every number in it. A `Sequence`
is one generation in flight; the scheduler alone changes it. Its reader sees `Progress*`, `Delta*`, then exactly
one of `Finished` or `Failed`. Nothing here knows MLX or HTTP.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Literal

from mlxcel.cache.key import CacheContext
from mlxcel.errors import ServerError
from mlxcel.text import TextStream

if TYPE_CHECKING:
    from mlxcel.engine.grammar import Grammar


StopType = Literal["eos", "limit", "word"]

SamplerName = Literal[
    "penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature", "adaptive_p"
]
ORDER: tuple[SamplerName, ...] = (
    "penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature",
)  # fmt: skip

Breakers = Mapping[int, tuple[tuple[int, ...], ...]]
"""What ends a repetition: a token, and the tokens that must follow it to do so (any one tuple, () for none)."""


@dataclass(frozen=True, slots=True)
class Xtc:
    """With this probability, all but the last of the tokens that are as likely as `threshold` are left out."""

    probability: float = 0.0
    threshold: float = 0.1


@dataclass(frozen=True, slots=True)
class Dry:
    """A token that continues a repetition of n tokens, n at least `allowed_length`, loses multiplier * base ** (n -
    allowed_length). It looks at the `last_n` tokens, and back to a breaker only."""

    multiplier: float = 0.0
    base: float = 1.75
    allowed_length: int = 2
    last_n: int = 64
    breakers: Breakers = field(default_factory=dict)

    @property
    def is_on(self) -> bool:
        return self.multiplier != 0.0 and self.last_n > 0


@dataclass(frozen=True, slots=True)
class Mirostat:
    """Keeps the surprise of tokens at `tau` bits, correcting by the share `eta`. Version 0 is off; 1 and 2 leave no
    other sampler but the temperature."""

    version: int = 0
    tau: float = 5.0
    eta: float = 0.1


@dataclass(frozen=True, slots=True)
class Adaptive:
    """Prefers tokens of about this probability, by what was chosen so far (`decay` says how far back); under 0 is off.
    Only where `order` names it."""

    target: float = -1.0
    decay: float = 0.9


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a token is chosen. Temperature 0 is greedy; 0, 1.0 and -1 switch the filters off as in llama-server.

    `order` is that of the samplers; one that it does not name has no effect, the temperature included. Filters that go
    by probability leave at least `min_keep` tokens.
    """

    temperature: float = 0.8
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    typical_p: float = 1.0
    top_n_sigma: float = -1.0
    min_keep: int = 0
    xtc: Xtc = Xtc()
    dry: Dry = Dry()
    mirostat: Mirostat = Mirostat()
    adaptive: Adaptive = Adaptive()
    order: tuple[SamplerName, ...] = ORDER
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Generation:
    """One generation, checked: `prompt` is never empty, `max_tokens` None means up to the context's end.

    `top_logprobs` None asks for no log-probabilities, 0 for the chosen token's alone; they are the model's own, or
    with `of_draw` what the samplers made of them. `cache` None means that the prompt cache is neither read nor written.
    `boundary` is how many prompt tokens are history that the next turn will begin with; only models that are stored as
    snapshots need it. With a `grammar` and `ignore_eos` it ends where the grammar is complete and nothing else may
    follow. It also ends before a line that is indented by less than `least_indent`, and with the first line that is
    complete `max_ms` (0: never) after the first token. `special` writes special tokens out in its text, the one that
    ends it too.
    """

    prompt: array[int]
    sampling: Sampling = Sampling()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    top_logprobs: int | None = None
    of_draw: bool = False
    cache: CacheContext | None = None
    boundary: int | None = None
    grammar: Grammar | None = None
    slot: int | None = None
    least_indent: int = 0
    max_ms: int = 0
    special: bool = False

    def banning(self, tokens: Iterable[int]) -> Generation:
        """The same, where none of these tokens is ever chosen."""
        banned = tuple((token, float("-inf")) for token in tokens)
        return replace(self, sampling=replace(self.sampling, logit_bias=self.sampling.logit_bias + banned))


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The chosen token, its natural-log probability, and the `top` (id, logprob) pairs: -inf is impossible."""

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

    stop_type: StopType
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

    def end(self, stop_type: StopType, now: float) -> Finished:
        """Say the rest of the text, which may hold a stop string after all. `Finished` is for later to publish."""
        if stop_type != "word":
            self.say_rest(self.text.flush())
        if self.text.stopped_by is not None:
            stop_type = "word"
        self.state = State.FINISHED
        wanted, is_full = self.generation.max_tokens, len(self.tokens) >= self.max_tokens
        return Finished(
            stop_type=stop_type,
            stopping_word=self.text.stopped_by or "",
            prompt_tokens=self.num_prompt,
            completion_tokens=len(self.tokens),
            cached_tokens=self.num_cached,
            truncated=stop_type == "limit" and is_full and (wanted is None or wanted > self.max_tokens),
            prompt_ms=(self.first_token_at - self.started_at) * 1000,
            predicted_ms=(now - self.first_token_at) * 1000,
            slot=-1 if self.slot is None else self.slot,
        )

    async def events(self) -> AsyncIterator[Event]:
        """Yields events until `Finished` or `Failed`, which is the last one."""
        while True:
            event = await self._queue.get()
            yield event
            if isinstance(event, (Finished, Failed)):
                return
