"""From a row of logits to a token, per sequence: its filters, its penalties, its own random key.

A row never sees another row's random state, so that a seed gives the same text whatever shares the batch. The
filters are mlx-lm's; what is ours is that they run on the top_k candidates alone where top_k is set (a sort of
the whole vocabulary costs 4 ms a row on a CPU) and in llama-server's order: top_k, top_p, min_p, temperature.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
from mlx_lm.sample_utils import apply_min_p, apply_top_p, make_logits_processors

from mlxcel.engine.sequence import Sampling, TokenLogprob

Sampler = Callable[[mx.array], mx.array]
Processor = Callable[[mx.array, mx.array], mx.array]


def greedy(logits: mx.array) -> mx.array:
    """One shared object: a batch of greedy rows is then sampled in one call."""
    return mx.argmax(logits, axis=-1)


def make_sampler(sampling: Sampling, vocab_size: int) -> Sampler:
    """A function from (1, vocab) logits to (1,) token ids; each call uses the next random key."""
    if sampling.temperature <= 0:
        return greedy
    key = mx.random.key(sampling.seed & 0xFFFFFFFF)
    scale = 1.0 / sampling.temperature
    top_k = sampling.top_k if 0 < sampling.top_k < vocab_size else 0

    def sample(logits: mx.array) -> mx.array:
        nonlocal key
        key, draw = mx.random.split(key)
        logits, candidates = logits.astype(mx.float32), None
        if top_k:
            candidates = _largest(logits, top_k)
            logits = mx.take_along_axis(logits, candidates, axis=-1)
        logits = logits - mx.max(logits, axis=-1, keepdims=True)  # top_p takes exponentials
        if sampling.top_p < 1.0:
            logits = apply_top_p(logits, sampling.top_p)
        if sampling.min_p > 0.0:
            logits = apply_min_p(logits, sampling.min_p)
        chosen = mx.random.categorical(logits * scale, key=draw)
        if candidates is None:
            return chosen
        return mx.take_along_axis(candidates, chosen[..., None], axis=-1)[..., 0]

    return sample


def _largest(logits: mx.array, k: int) -> mx.array:
    """Ids of the k largest, best first: the random draw goes by rank, which a neighbour's rounding hardly moves."""
    ids = mx.argpartition(-logits, kth=k - 1, axis=-1)[..., :k]
    order = mx.argsort(-mx.take_along_axis(logits, ids, axis=-1), axis=-1)
    return mx.take_along_axis(ids, order, axis=-1)


def make_processors(sampling: Sampling) -> list[Processor]:
    """Logit bias and penalties; the penalties look at the last `repeat_last_n` tokens, the prompt's included."""
    n = sampling.repeat_last_n
    return list(
        make_logits_processors(
            logit_bias=dict(sampling.logit_bias) or None,
            repetition_penalty=sampling.repeat_penalty if n and sampling.repeat_penalty != 1.0 else None,
            repetition_context_size=n,
            presence_penalty=sampling.presence_penalty if n else None,
            presence_context_size=n,
            frequency_penalty=sampling.frequency_penalty if n else None,
            frequency_context_size=n,
        )
    )


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
