"""The tokens a row may still become, and what each sampler does with them.

It owns how candidates are held (the whole vocabulary, or the few that are left and their ids) and puts them in order
only where a sampler needs it: a sort of the whole vocabulary costs 4 ms a row on a CPU. It does not know which
samplers run, nor who draws. Invariant: a step that is neutral is None, so that it costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import mlx.core as mx
import numpy as np
from numpy.typing import ArrayLike, NDArray

from mlxcel.engine import samplers
from mlxcel.engine.dry import losses
from mlxcel.engine.sequence import SamplerName, Sampling

Tokens = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Candidates:
    """`logits` of shape (1, n), -inf where a sampler said no. `ids` of the same shape are theirs, None for the whole
    vocabulary in its order. `ranked`: those that are left stand first, best first."""

    logits: mx.array
    ids: mx.array | None = None
    ranked: bool = False

    def best_first(self, k: int) -> Candidates:
        """At most k, ranked. A draw then goes by rank, which a neighbour's rounding hardly moves."""
        if self.ranked:
            return Candidates(self.logits[..., :k], None if self.ids is None else self.ids[..., :k], True)
        places = samplers.best_first(self.logits, k)
        ids = places if self.ids is None else mx.take_along_axis(self.ids, places, axis=-1)
        return Candidates(mx.take_along_axis(self.logits, places, axis=-1), ids, True)

    def all_ranked(self) -> Candidates:
        return self if self.ranked else self.best_first(self.logits.shape[-1])

    def token(self, place: mx.array) -> mx.array:
        """Ids of shape (1,) for places of shape (1,)."""
        return place if self.ids is None else mx.take_along_axis(self.ids, place[..., None], axis=-1)[..., 0]

    def values(self, by_id: mx.array) -> mx.array:
        """Those of the candidates, of values for the whole vocabulary."""
        return by_id if self.ids is None else mx.take_along_axis(by_id, self.ids, axis=-1)

    def logprobs(self, vocab_size: int) -> mx.array:
        """Of shape (vocab,): the chances of all tokens in a draw from these."""
        own = self.logits - mx.logsumexp(self.logits, axis=-1, keepdims=True)
        if self.ids is None:
            return own[0]
        return mx.put_along_axis(mx.full((1, vocab_size), samplers.NOTHING), self.ids, own, axis=-1)[0]


@dataclass(frozen=True, slots=True)
class Moment:
    """What a step may look at beside its candidates. `chance` is random, from 0 to 1."""

    recent: Tokens
    vocab_size: int
    chance: mx.array

    def by_id(self, tokens: ArrayLike, values: ArrayLike) -> mx.array:
        """`values` of some tokens, 0 of the others; (1, vocab)."""
        dense = np.zeros((1, self.vocab_size), dtype=np.float32)
        dense[0, np.asarray(tokens)] = values
        return mx.array(dense)


Step = Callable[[Candidates, Moment], Candidates]


def _in_place(change: Callable[[mx.array], mx.array]) -> Step:
    """A sampler that lets those it leaves stand in their order, and drops the worst first if any."""
    return lambda candidates, _: replace(candidates, logits=change(candidates.logits))


def _ranked(change: Callable[[mx.array], mx.array]) -> Step:
    """The same for one that needs ranks."""

    def step(candidates: Candidates, _: Moment) -> Candidates:
        ranked = candidates.all_ranked()
        return replace(ranked, logits=change(ranked.logits))

    return step


def _penalties(s: Sampling) -> Step | None:
    weights = (s.repeat_penalty, s.frequency_penalty, s.presence_penalty)
    if s.repeat_last_n <= 0 or weights == (1.0, 0.0, 0.0):
        return None

    def step(candidates: Candidates, moment: Moment) -> Candidates:
        seen, times = np.unique(moment.recent[-s.repeat_last_n :], return_counts=True)
        counts = candidates.values(moment.by_id(seen, times))
        return Candidates(samplers.penalties(candidates.logits, counts, *weights), candidates.ids)

    return step


def _dry(s: Sampling) -> Step | None:
    if not s.dry.is_on:
        return None

    def step(candidates: Candidates, moment: Moment) -> Candidates:
        lost = losses(moment.recent, s.dry)
        if not lost:
            return candidates
        lost_by_id = moment.by_id(list(lost), list(lost.values()))
        return Candidates(candidates.logits - candidates.values(lost_by_id), candidates.ids)

    return step


def _top_k(s: Sampling) -> Step | None:
    if s.top_k <= 0:
        return None
    return lambda candidates, _: candidates.best_first(s.top_k) if s.top_k < candidates.logits.size else candidates


def _top_p(s: Sampling) -> Step | None:
    return _ranked(partial(samplers.top_p, p=s.top_p, min_keep=s.min_keep)) if s.top_p < 1.0 else None


def _min_p(s: Sampling) -> Step | None:
    if s.min_p <= 0.0:
        return None
    change = partial(samplers.min_p, p=s.min_p, min_keep=s.min_keep)
    return _ranked(change) if s.min_keep > 1 else _in_place(change)


def _top_n_sigma(s: Sampling) -> Step | None:
    return _in_place(partial(samplers.top_n_sigma, n=s.top_n_sigma)) if s.top_n_sigma > 0.0 else None


def _typ_p(s: Sampling) -> Step | None:
    """The likeliest may go, so ranks do not hold after it."""
    if s.typical_p >= 1.0:
        return None
    change = partial(samplers.typical_p, p=s.typical_p, min_keep=s.min_keep)
    return lambda candidates, _: Candidates(change(candidates.logits), candidates.ids)


def _xtc(s: Sampling) -> Step | None:
    """The likeliest may go, so ranks do not hold after it."""
    if s.xtc.probability <= 0.0 or s.xtc.threshold > 0.5:
        return None

    def step(candidates: Candidates, moment: Moment) -> Candidates:
        ranked = candidates.all_ranked()
        fewer = samplers.xtc(ranked.logits, s.xtc.threshold, s.min_keep)
        return Candidates(mx.where(moment.chance <= s.xtc.probability, fewer, ranked.logits), ranked.ids)

    return step


def _temperature(s: Sampling) -> Step | None:
    if s.dynatemp_range <= 0.0:
        return _in_place(partial(samplers.temperature, degrees=s.temperature)) if s.temperature != 1.0 else None

    def change(logits: mx.array) -> mx.array:
        degrees = samplers.dynamic_degrees(logits, s.temperature, s.dynatemp_range, s.dynatemp_exponent)
        return samplers.temperature(logits, degrees)

    return _in_place(change)


STEPS: Mapping[SamplerName, Callable[[Sampling], Step | None]] = {
    "penalties": _penalties,
    "dry": _dry,
    "top_n_sigma": _top_n_sigma,
    "top_k": _top_k,
    "typ_p": _typ_p,
    "top_p": _top_p,
    "min_p": _min_p,
    "xtc": _xtc,
    "temperature": _temperature,
}
