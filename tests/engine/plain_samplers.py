"""llama.cpp's samplers once more, the way they are described: over a list of (token, logit), in Python's numbers."""

from __future__ import annotations

import math
from collections import Counter

from mlxcel.engine.sequence import Sampling

Left = list[tuple[int, float]]


def candidates(logits) -> Left:
    return [(token, float(logit)) for token, logit in enumerate(logits) if logit > -math.inf]


def softmax(left: Left) -> list[float]:
    largest = max(logit for _, logit in left)
    powers = [math.exp(logit - largest) for _, logit in left]
    return [power / sum(powers) for power in powers]


def ranked(left: Left) -> Left:
    return sorted(left, key=lambda pair: -pair[1])


def entropy(left: Left) -> float:
    return -sum(p * math.log(p) for p in softmax(left) if p > 0)


def penalties(left: Left, s: Sampling, recent, chance) -> Left:
    times = Counter(list(recent)[-s.repeat_last_n :])

    def less(token, logit):
        if not times[token]:
            return logit
        scaled = logit * s.repeat_penalty if logit <= 0 else logit / s.repeat_penalty
        return scaled - times[token] * s.frequency_penalty - s.presence_penalty

    return [(token, less(token, logit)) for token, logit in left]


def dry(left: Left, s: Sampling, recent, chance) -> Left:
    lost = dry_losses(list(recent), s.dry)
    return [(token, logit - lost.get(token, 0.0)) for token, logit in left]


def dry_losses(recent, dry) -> dict[int, float]:
    """For every place, compare the tokens before it with the last ones, back to a breaker at the most."""
    window = recent[-dry.last_n :]
    if len(window) <= dry.allowed_length:
        return {}
    limit = len(window)
    for start in reversed(range(len(window))):
        tails = dry.breakers.get(window[start], ())
        ends = [start + 1 + len(tail) for tail in tails if tuple(window[start + 1 : start + 1 + len(tail)]) == tail]
        if ends:
            limit = len(window) - max(ends)
            break
    lost = {}
    for place in range(1, len(window)):
        length = 0
        while length < min(limit, place) and window[place - 1 - length] == window[len(window) - 1 - length]:
            length += 1
        alone = () in dry.breakers.get(window[place], ())
        if limit >= dry.allowed_length <= length and not alone:
            loss = dry.multiplier * dry.base ** (length - dry.allowed_length)
            lost[window[place]] = max(loss, lost.get(window[place], loss))
    return lost


def top_n_sigma(left: Left, s: Sampling, recent, chance) -> Left:
    logits = [logit for _, logit in left]
    mean = sum(logits) / len(logits)
    sigma = math.sqrt(sum((logit - mean) ** 2 for logit in logits) / len(logits))
    return [(token, logit) for token, logit in left if logit >= max(logits) - s.top_n_sigma * sigma]


def top_k(left: Left, s: Sampling, recent, chance) -> Left:
    return ranked(left)[: s.top_k]


def top_p(left: Left, s: Sampling, recent, chance) -> Left:
    left, total = ranked(left), 0.0
    for i, p in enumerate(softmax(left)):
        total += p
        if total >= s.top_p and i + 1 >= s.min_keep:
            return left[: i + 1]
    return left


def min_p(left: Left, s: Sampling, recent, chance) -> Left:
    left = ranked(left)
    least = left[0][1] + math.log(s.min_p)
    return [pair for i, pair in enumerate(left) if i < s.min_keep or pair[1] >= least]


def typ_p(left: Left, s: Sampling, recent, chance) -> Left:
    expected, probs = entropy(left), softmax(left)
    order = sorted(range(len(left)), key=lambda i: abs(-math.log(probs[i]) - expected))
    total = 0.0
    for n, i in enumerate(order, 1):
        total += probs[i]
        if total > s.typical_p and n >= s.min_keep:
            return [left[i] for i in order[:n]]
    return left


def xtc(left: Left, s: Sampling, recent, chance) -> Left:
    left = ranked(left)
    num_above = sum(p >= s.xtc.threshold for p in softmax(left))
    few = len(left) - (num_above - 1) < s.min_keep
    return left if chance > s.xtc.probability or num_above < 2 or few else left[num_above - 1 :]


def temperature(left: Left, s: Sampling, recent, chance) -> Left:
    degrees = s.temperature
    if s.dynatemp_range > 0:
        if len(left) < 2:
            return left
        low, high = max(0.0, degrees - s.dynatemp_range), degrees + s.dynatemp_range
        degrees = low + (high - low) * (entropy(left) / math.log(len(left))) ** s.dynatemp_exponent
    if degrees < 1e-5:
        return ranked(left)[:1]
    return [(token, logit / degrees) for token, logit in left]


PLAIN = {
    "penalties": penalties, "dry": dry, "top_n_sigma": top_n_sigma, "top_k": top_k, "typ_p": typ_p, "top_p": top_p,
    "min_p": min_p, "xtc": xtc, "temperature": temperature,
}  # fmt: skip
