"""llama-server's samplers, one function each, over the logits of one row's candidates.

The algorithms, and what is done at their edges, are those of llama.cpp (src/llama-sampler.cpp). It owns arithmetic
alone: no order, no randomness, no state. Every function takes float32 logits of shape (1, n), of which -inf is no
candidate any more, and returns as many; the ones said to need ranks want the candidates that are left to stand first,
best first. Invariant: a filter leaves at least one candidate, and `min_keep` of them where there are as many.
"""

from __future__ import annotations

import math

import mlx.core as mx

NOTHING = -math.inf
COLDEST = 1e-5  # below it only the likeliest is left: a logit divided by less may overflow
HOTTEST = 1e3
MIROSTAT_SAMPLE = 100  # tokens of which Mirostat 1 guesses the shape of the distribution

# Of adaptive-p: the width of its peak, its height, and how steeply its slopes fall.
ADAPTIVE_WIDTH = 0.3
ADAPTIVE_PEAK = 5.0
ADAPTIVE_SHARPNESS = 10.0


def best_first(logits: mx.array, k: int) -> mx.array:
    """Places of the k largest, best first."""
    if k >= logits.shape[-1]:
        return mx.argsort(-logits, axis=-1)
    places = mx.argpartition(-logits, kth=k - 1, axis=-1)[..., :k]
    order = mx.argsort(-mx.take_along_axis(logits, places, axis=-1), axis=-1)
    return mx.take_along_axis(places, order, axis=-1)


def penalties(logits: mx.array, counts: mx.array, repeat: float, frequency: float, presence: float) -> mx.array:
    """A candidate that was seen `counts` times is divided by `repeat` (multiplied where it is negative), and loses
    `frequency` for each time and `presence` once."""
    less = mx.where(logits > 0, logits / repeat, logits * repeat) - counts * frequency - presence
    return mx.where(counts > 0, less, logits)


def top_p(logits: mx.array, p: float, min_keep: int) -> mx.array:
    """The likeliest whose probabilities reach p together, the one that reaches it included. Needs ranks."""
    before = mx.cumsum(mx.softmax(logits, axis=-1), axis=-1, inclusive=False)
    return _kept((before < p) | _among_first(logits, min_keep), logits)


def min_p(logits: mx.array, p: float, min_keep: int) -> mx.array:
    """Those at least p times as likely as the likeliest. Needs ranks if `min_keep` is more than 1."""
    keep = logits >= mx.max(logits, axis=-1, keepdims=True) + math.log(p)
    return _kept(keep | _among_first(logits, min_keep) if min_keep > 1 else keep, logits)


def typical_p(logits: mx.array, p: float, min_keep: int) -> mx.array:
    """Those whose surprise is nearest to the expected one, until their probabilities are more than p together."""
    probs, logprobs = mx.softmax(logits, axis=-1), _log_softmax(logits)
    entropy = _entropy(probs, logprobs)
    typical_first = mx.argsort(mx.abs(-logprobs - entropy), axis=-1)
    before = mx.cumsum(mx.take_along_axis(probs, typical_first, axis=-1), axis=-1, inclusive=False)
    keep = (before <= p) | _among_first(logits, min_keep)
    return _kept(mx.put_along_axis(keep, typical_first, keep, axis=-1), logits)


def top_n_sigma(logits: mx.array, n: float) -> mx.array:
    """Those within n standard deviations of the largest logit."""
    left = logits > NOTHING
    num_left = mx.sum(left, axis=-1, keepdims=True)
    mean = mx.sum(mx.where(left, logits, 0.0), axis=-1, keepdims=True) / num_left
    variance = mx.sum(mx.where(left, mx.square(logits - mean), 0.0), axis=-1, keepdims=True) / num_left
    return _kept(logits >= mx.max(logits, axis=-1, keepdims=True) - n * mx.sqrt(variance), logits)


def xtc(logits: mx.array, threshold: float, min_keep: int) -> mx.array:
    """Without all but the last of those that are as likely as `threshold`, unless too few were left. Needs ranks."""
    left = logits > NOTHING
    num_dropped = mx.sum(left & (mx.softmax(logits, axis=-1) >= threshold), axis=-1, keepdims=True) - 1
    too_few = mx.sum(left, axis=-1, keepdims=True) - num_dropped < min_keep
    return _kept((mx.arange(logits.shape[-1]) >= num_dropped) | too_few, logits)


def temperature(logits: mx.array, degrees: float | mx.array) -> mx.array:
    """Divided by `degrees`; at 0 the largest alone, the first of equals."""
    if isinstance(degrees, mx.array):
        warm = logits / mx.clip(degrees, COLDEST, HOTTEST)
        return mx.where(degrees < COLDEST, _largest(logits), warm)
    return logits / degrees if degrees >= COLDEST else _largest(logits)


def dynamic_degrees(logits: mx.array, degrees: float, spread: float, exponent: float) -> mx.array:
    """A temperature `spread` around `degrees`, the higher the less certain the choice is; for `temperature`."""
    num_left = mx.sum(logits > NOTHING, axis=-1, keepdims=True)
    entropy = _entropy(mx.softmax(logits, axis=-1), _log_softmax(logits))
    share = mx.clip(entropy / mx.log(mx.maximum(num_left, 2)), 0.0, 1.0)
    low, high = max(0.0, degrees - spread), degrees + spread
    return mx.where(num_left > 1, mx.minimum(low + (high - low) * share**exponent, HOTTEST), 1.0)


def mirostat_1(logits: mx.array, mu: mx.array, vocab_size: int) -> mx.array:
    """The k likeliest, k such that their surprise would be mu if the distribution were Zipf's. Needs ranks."""
    logprobs = _log_softmax(logits)[..., :MIROSTAT_SAMPLE]
    ranks = mx.arange(1.0, logprobs.shape[-1] + 1.0)
    steps = mx.log(ranks[1:] / ranks[:-1])
    is_pair = logprobs[..., 1:] > NOTHING
    falls = mx.where(is_pair, logprobs[..., :-1] - logprobs[..., 1:], 0.0)
    squares = mx.where(is_pair, steps * steps, 0.0)
    slope = mx.sum(steps * falls, axis=-1, keepdims=True) / mx.sum(squares, axis=-1, keepdims=True)
    excess = slope - 1.0
    k = mx.power(excess * mx.power(2.0, mu) / (1.0 - mx.power(float(vocab_size), -excess)), 1.0 / slope)
    return _kept(mx.arange(logits.shape[-1]) < mx.maximum(mx.floor(mx.where(mx.isnan(k), 1.0, k)), 1.0), logits)


def mirostat_2(logits: mx.array, mu: mx.array) -> mx.array:
    """Those whose surprise is at most mu bits, and the largest."""
    return mx.where(surprise(logits) <= mu, logits, _largest(logits))


def surprise(logits: mx.array) -> mx.array:
    """In bits."""
    return -_log_softmax(logits) / math.log(2.0)


def adaptive_p(logits: mx.array, target: mx.array) -> mx.array:
    """Logits that fall off with the distance of a candidate's probability from `target`."""
    distance = mx.abs(mx.softmax(logits, axis=-1) - target) / ADAPTIVE_WIDTH
    return _kept(logits > NOTHING, ADAPTIVE_PEAK - ADAPTIVE_SHARPNESS * mx.square(distance) / (1.0 + distance))


def _kept(keep: mx.array, logits: mx.array) -> mx.array:
    return mx.where(keep, logits, NOTHING)


def _among_first(logits: mx.array, min_keep: int) -> mx.array:
    return mx.arange(logits.shape[-1]) < max(min_keep, 1)


def _largest(logits: mx.array) -> mx.array:
    return _kept(mx.arange(logits.shape[-1]) == mx.argmax(logits, axis=-1, keepdims=True), logits)


def _log_softmax(logits: mx.array) -> mx.array:
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def _entropy(probs: mx.array, logprobs: mx.array) -> mx.array:
    """In nats; what is impossible adds nothing."""
    return -mx.sum(mx.where(probs > 0, probs * logprobs, 0.0), axis=-1, keepdims=True)
