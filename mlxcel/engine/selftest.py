"""Proof, on the loaded weights, of everything that reuse and batching rely on.

mlx-lm does not say which families compute a batch of unequal lengths wrongly (masks of the wrong rank, positions
taken from the padded length), whose result depends on how a prompt was split, or whose state cannot be put back. So
each is tried on a short made-up prompt against the plain run of it; what differs is not used: such a family decodes
each sequence alone, prefills in one piece, or is served cold. Slower, never wrong. Costs about ten prefills of
`probe_length` tokens. Knows nothing of family names.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlxcel.engine.kv import Layout
from mlxcel.engine.model import Proven, make_cache
from mlxcel.engine.snapshot import Refused, StateShape, capture, restore, row_of

log = logging.getLogger(__name__)

SHORTEST = 24
LONG = 200  # tokens, where it is affordable: block-sparse attention takes all blocks of a shorter prompt
STEPS = 2
FAILURES = (ValueError, TypeError, AttributeError, IndexError, RuntimeError, Refused)
# Of the log-probability of likely tokens, by whether weights are float32: rounding moves it by 1e-4 there and by up to
# 0.25 in half precision; a row too few in a window moves it by 0.005 or more, a wrong mask or position by 0.3.
TOLERANCE = {True: 0.003, False: 0.5}


@dataclass(frozen=True, slots=True)
class Subject:
    """The model under test; `length` is that of the longest prompt that is tried."""

    net: Any
    vocab_size: int
    layout: Layout | None
    shape: StateShape | None
    length: int
    exact: bool

    def prompt(self, length: int, seed: int = 0) -> list[int]:
        return [(7 * i * i + 3 * i + 31 * seed) % min(self.vocab_size, 250) for i in range(length)]


def probe_length(window: int, num_params: int, on_cpu: bool) -> int:
    """Tokens to try: past the window if that takes no more than about a second a run, else as many as do."""
    affordable = int((5e9 if on_cpu else 2e13) / max(num_params, 1))
    return max(SHORTEST, min(max(window + SHORTEST, LONG), affordable))


def prove(subject: Subject) -> Proven:
    """Try each ability and log what fails. Needs the MLX thread."""
    if subject.shape is not None and subject.length <= subject.shape.window:
        log.info("self-test: the window of %d tokens is too long to be tried out here", subject.shape.window)
    splits = _holds(subject, splits_rightly, "a prompt split in two gives another result: prompts are computed whole")
    return Proven(
        batches=batches_rightly(subject),
        splits=splits,
        restores=splits
        and _holds(subject, restores_rightly, "stored state gives another result: every request is cold"),
        cuts=splits
        and _holds(subject, cuts_rightly, "shortened state gives another result: it is restored whole only"),
    )


def _holds(subject: Subject, test: Callable[[Subject], float], otherwise: str) -> bool:
    """Whether the difference that `test` finds is rounding; if not, `otherwise` is logged with it."""
    try:
        worst = test(subject)
    except FAILURES as error:
        log.info("self-test: %s (%s)", otherwise, error)
        return False
    if not worst <= TOLERANCE[subject.exact]:
        log.info("self-test: %s (by %.2f)", otherwise, worst)
        return False
    return True


def splits_rightly(subject: Subject) -> float:
    prompt = subject.prompt(subject.length)
    early, late = len(prompt) // 3, len(prompt) - SHORTEST // 2
    whole, split = _fed(subject.net, prompt), _fed(subject.net, prompt[:early])
    for piece in (prompt[early:late], prompt[late:]):
        _feed(subject.net, split, piece)
    return _drift(subject.net, whole, split)


def restores_rightly(subject: Subject) -> float:
    """State copied out after a prefill, and again after some decoding, against the run that it was copied from."""
    prompt = subject.prompt(subject.length)
    half = len(prompt) // 2
    live = _fed(subject.net, prompt[:half])
    prefilled = _copied(subject, live, half)
    for cache in (live, prefilled):
        _feed(subject.net, cache, prompt[half:])
    worst = _drift(subject.net, live, prefilled)
    decoded = _copied(subject, live, len(prompt) + STEPS)
    return max(worst, _drift(subject.net, live, decoded))


def cuts_rightly(subject: Subject) -> float:
    """The beginning of a stored state, continued otherwise, against a plain run of the same tokens."""
    if subject.layout is None and (subject.shape is None or subject.shape.kind not in ("dense", "windowed")):
        return 0.0  # recurrent state is never cut
    stored = subject.prompt(SHORTEST)
    keep = SHORTEST // 2 - 1
    mine = stored[:keep] + subject.prompt(SHORTEST, seed=1)
    cut = _copied(subject, _fed(subject.net, stored), SHORTEST, keep)
    _feed(subject.net, cut, mine[keep:])
    return _drift(subject.net, _fed(subject.net, mine), cut)


def batches_rightly(subject: Subject) -> bool:
    """Whether decode of unequal lengths in one batch agrees with single decode, and a row taken out of it too."""
    if not all(hasattr(layer, "merge") for layer in make_cache(subject.net)):
        log.info("self-test: this model has no batched cache: each sequence decodes on its own")
        return False
    return _holds(subject, batch_drift, "batched decode gives another result: each sequence decodes on its own")


def batch_drift(subject: Subject) -> float:
    lengths = (5, subject.length, max(13, subject.length // 2))
    prompts = [subject.prompt(length, seed) for seed, length in enumerate(lengths)]
    alone = [_fed(subject.net, prompt) for prompt in prompts]
    together = [layer[0].merge(list(layer)) for layer in zip(*(_fed(subject.net, p) for p in prompts), strict=True)]
    worst = 0.0
    for step in range(STEPS):
        tokens = [(11 * step + row) % min(subject.vocab_size, 250) for row in range(len(prompts))]
        batched = _next(subject.net, together, tokens)
        for row, (cache, token) in enumerate(zip(alone, tokens, strict=True)):
            worst = max(worst, _difference(_next(subject.net, cache, [token])[0], batched[row]))
    for row, cache in enumerate(alone):
        taken = _copied(subject, together, lengths[row] + STEPS, row=row)
        worst = max(worst, _drift(subject.net, cache, taken))
    return worst


# --- running the model


def _fed(net: Any, tokens: Sequence[int]) -> list[Any]:
    cache = make_cache(net)
    _feed(net, cache, tokens)
    return cache


def _feed(net: Any, cache: list[Any], tokens: Sequence[int]) -> None:
    net(mx.array([list(tokens)]), cache=cache)
    mx.eval([layer.state for layer in cache])


def _copied(
    subject: Subject, live: list[Any], length: int, keep: int | None = None, row: int | None = None
) -> list[Any]:
    """The way of stored state: `length` tokens out of `live` (or a row of it) and `keep` of them into a new cache."""
    fresh, keep = make_cache(subject.net), length if keep is None else keep
    if subject.layout is not None:
        subject.layout.attach([(subject.layout.detach(live, 0, length, row), keep)], fresh)
        return fresh
    if subject.shape is None:
        raise Refused("layer_kinds")
    restore(capture(live if row is None else row_of(live, row), length), keep, subject.shape, fresh)
    return fresh


def _next(net: Any, cache: list[Any], tokens: Sequence[int]) -> mx.array:
    """Log-probabilities (rows, vocabulary) after one more token in each row."""
    logits = net(mx.array(tokens)[:, None], cache=cache)[:, -1, :].astype(mx.float32)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def _drift(net: Any, ours: list[Any], theirs: list[Any]) -> float:
    """Largest difference between two runs that should be the same; both go on by STEPS tokens."""
    worst = 0.0
    for step in range(STEPS):
        token = [17 + 5 * step]
        worst = max(worst, _difference(_next(net, ours, token)[0], _next(net, theirs, token)[0]))
    return worst


def _difference(wanted: mx.array, got: mx.array) -> float:
    """Over the five likeliest tokens; a NaN counts as infinite."""
    likely = mx.argpartition(-wanted, kth=4)[:5]
    worst = float(mx.max(mx.abs(wanted[likely] - got[likely])).item())
    return worst if worst == worst else float("inf")
