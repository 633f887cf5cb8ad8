"""From a row of logits to a token, per sequence: a chain of samplers in the order that was asked for, then a draw.

It owns the order, randomness and state: a row has its own random key, so that a seed gives the same text whatever
shares the batch, and Mirostat its own course. It does not know the batch. Invariant: greedy rows share one object, so
that a batch of them is sampled in one call, and nothing raises here, whatever the logits are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import mlx.core as mx

from mlxcel.engine import samplers
from mlxcel.engine.candidates import STEPS, Candidates, Moment, Step, Tokens
from mlxcel.engine.sequence import Adaptive, Mirostat, SamplerName, Sampling, TokenLogprob

Bias = Callable[[mx.array], mx.array]
Drawn = tuple[mx.array, Candidates | None]
"""Token ids of shape (1,) and what they were drawn from; None where there was nothing to draw: it is the likeliest."""

Draw = Callable[[Candidates, mx.array], Drawn]  # with a random key


class Sampler(Protocol):
    """Chooses the tokens of one sequence. `looks_back` is how many of its last tokens it wants to be shown."""

    @property
    def looks_back(self) -> int: ...

    def __call__(self, logits: mx.array, recent: Tokens) -> Drawn:
        """For logits of shape (1, vocab) and `looks_back` tokens, fewer if there are not as many."""


class Greedy:
    """The likeliest token. Takes any number of rows at once."""

    looks_back = 0

    def __call__(self, logits: mx.array, recent: Tokens | None = None) -> Drawn:
        return mx.argmax(logits, axis=-1), None


greedy = Greedy()


class Chain:
    """`steps` in their order, then `draw`. Each call uses the sequence's next random keys."""

    def __init__(self, steps: list[Step], draw: Draw, seed: int, looks_back: int) -> None:
        self.looks_back = looks_back
        self._steps = steps
        self._draw = draw
        self._key = mx.random.key(seed & 0xFFFFFFFF)

    def __call__(self, logits: mx.array, recent: Tokens) -> Drawn:
        self._key, key, other = mx.random.split(self._key, 3)
        moment = Moment(recent, logits.shape[-1], mx.random.uniform(key=other))
        candidates = Candidates(logits.astype(mx.float32))
        for step in self._steps:
            candidates = step(candidates, moment)
        return self._draw(candidates, key)


def make_sampler(sampling: Sampling) -> Sampler:
    """The chain of what is switched on, as llama.cpp builds it (common/sampling.cpp): Mirostat leaves only the
    temperature, adaptive-p is last wherever it is named, and what is not named has no effect."""
    order = sampling.order
    draw: Draw = _draw
    if sampling.mirostat.version:
        order, sampling = ("temperature",), replace(sampling, dynatemp_range=0.0)
        draw = MirostatDraw(sampling.mirostat)
    elif "adaptive_p" in order and sampling.adaptive.target >= 0.0:
        draw = AdaptiveDraw(sampling.adaptive)
    steps = [(name, step) for name in order if name in STEPS and (step := STEPS[name](sampling)) is not None]
    if "temperature" in order and sampling.temperature == 0.0 and sampling.dynatemp_range <= 0.0:
        steps, draw = _before_greedy(steps), _best
    if not steps and draw is _best:
        return greedy
    names = [name for name, _ in steps]
    looks_back = max(sampling.repeat_last_n * ("penalties" in names), sampling.dry.last_n * ("dry" in names))
    return Chain([step for _, step in steps], draw, sampling.seed, looks_back)


def make_bias(sampling: Sampling) -> list[Bias]:
    """What is added to the logits before all else, if anything."""
    if not sampling.logit_bias:
        return []
    ids, values = (mx.array(column) for column in zip(*sampling.logit_bias, strict=True))
    return [lambda logits: logits.at[:, ids].add(values)]


def _before_greedy(steps: list[tuple[SamplerName, Step]]) -> list[tuple[SamplerName, Step]]:
    """What has a say in which candidate is the likeliest, when the temperature leaves but that one."""
    before = steps[: [name for name, _ in steps].index("temperature")]
    while before and before[-1][0] in ("top_n_sigma", "top_k", "top_p", "min_p"):
        before.pop()
    return before


# --- draws


def _draw(candidates: Candidates, key: mx.array) -> Drawn:
    return candidates.token(mx.random.categorical(candidates.logits, key=key)), candidates


def _best(candidates: Candidates, _: mx.array) -> Drawn:
    return candidates.token(mx.argmax(candidates.logits, axis=-1)), None


class MirostatDraw:
    """Cuts off so that the surprise of what is drawn stays at tau bits on the average: `_mu` is the present cut."""

    def __init__(self, mirostat: Mirostat) -> None:
        self._mirostat = mirostat
        self._mu = mx.array([[2.0 * mirostat.tau]])

    def __call__(self, candidates: Candidates, key: mx.array) -> Drawn:
        if self._mirostat.version == 1:
            candidates = candidates.all_ranked()
            logits = samplers.mirostat_1(candidates.logits, self._mu, candidates.logits.shape[-1])
        else:
            logits = samplers.mirostat_2(candidates.logits, self._mu)
        place = mx.random.categorical(logits, key=key)
        bits = mx.take_along_axis(samplers.surprise(logits), place[..., None], axis=-1)
        self._mu = self._mu - self._mirostat.eta * (bits - self._mirostat.tau)
        return candidates.token(place), replace(candidates, logits=logits)


class AdaptiveDraw:
    """Aims beside the target by as much as the probabilities of what was drawn before have missed it."""

    def __init__(self, adaptive: Adaptive) -> None:
        self._target = min(adaptive.target, 1.0)
        self._decay = adaptive.decay
        self._weight = 1.0 / (1.0 - adaptive.decay)
        self._sum = mx.array([[self._target * self._weight]])

    def __call__(self, candidates: Candidates, key: mx.array) -> Drawn:
        aim = mx.clip(2.0 * self._target - self._sum / self._weight, 0.0, 1.0)
        logits = samplers.adaptive_p(candidates.logits, aim)
        place = mx.random.categorical(logits, key=key)
        chosen = mx.take_along_axis(mx.softmax(candidates.logits, axis=-1), place[..., None], axis=-1)
        self._sum = chosen + self._decay * self._sum
        self._weight = 1.0 + self._decay * self._weight
        return candidates.token(place), replace(candidates, logits=logits)


def token_logprobs(rows: list[tuple[mx.array, int, int]]) -> list[TokenLogprob]:
    """For each (log-probabilities of shape (vocab,), token, k): the token's and the k largest, as plain numbers."""
    lazy = []
    for logprobs, token, k in rows:
        top = mx.argpartition(-logprobs, kth=k - 1)[:k] if k else None
        lazy.append((logprobs[token], top, None if top is None else logprobs[top]))
    mx.eval(lazy)
    out = []
    for (_, token, _), (chosen, top, values) in zip(rows, lazy, strict=True):
        pairs = [] if top is None or values is None else list(zip(top.tolist(), values.tolist(), strict=True))
        pairs.sort(key=lambda pair: (-pair[1], pair[0]))
        out.append(TokenLogprob(token, float(chosen.item()), tuple(pairs)))
    return out
