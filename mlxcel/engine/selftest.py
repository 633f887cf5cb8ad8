"""Proof, on the loaded weights, that sequences may share a decode batch.

Some families compute a batch of unequal lengths wrongly or not at all (masks of the wrong rank, positions taken
from the padded length), and mlx-lm does not say which. Three short sequences are decoded alone and together; a
family whose batch differs decodes each sequence on its own: slower, never wrong. Costs six prefills of at most 24
tokens. Knows nothing of family names.
"""

from __future__ import annotations

import logging
from typing import Any

import mlx.core as mx

from mlxcel.engine.model import make_cache

log = logging.getLogger(__name__)

LENGTHS = (5, 24, 13)
STEPS = 2
# Log-probability of the likely tokens: half precision moves it by up to 0.25, a wrong mask or position by 1 or more.
TOLERANCE = 0.5


def batches_rightly(net: Any, vocab_size: int) -> bool:
    """Whether batched decode of unequal lengths agrees with single decode. Needs the MLX thread."""
    prompts = [[(7 * i + 3 * length) % min(vocab_size, 250) for i in range(length)] for length in LENGTHS]
    fed = [[(11 * step + row) % min(vocab_size, 250) for row in range(len(LENGTHS))] for step in range(STEPS)]
    alone = [_prefilled(net, prompt) for prompt in prompts]
    if not all(hasattr(layer, "merge") for layer in alone[0]):
        log.info("self-test: this model has no batched cache, each sequence decodes on its own")
        return False
    try:
        together = [layer[0].merge(list(layer)) for layer in zip(*(_prefilled(net, p) for p in prompts), strict=True)]
        worst = max(_difference(net, alone, together, tokens) for tokens in fed)
    except (ValueError, TypeError, AttributeError, IndexError, RuntimeError) as error:
        log.info("self-test: batched decode fails on this model (%s), each sequence decodes on its own", error)
        return False
    if not worst <= TOLERANCE:
        log.info("self-test: batched decode is wrong on this model (by %.2f), each sequence decodes on its own", worst)
        return False
    return True


def _prefilled(net: Any, prompt: list[int]) -> list[Any]:
    cache = make_cache(net)
    net(mx.array([prompt]), cache=cache)
    mx.eval([layer.state for layer in cache])
    return cache


def _difference(net: Any, alone: list[list[Any]], together: list[Any], tokens: list[int]) -> float:
    """Largest difference of log-probability over each row's five likeliest tokens."""
    batched = _logprobs(net(mx.array(tokens)[:, None], cache=together))
    worst = mx.array(0.0)
    for row, (cache, token) in enumerate(zip(alone, tokens, strict=True)):
        single = _logprobs(net(mx.array([[token]]), cache=cache))[0]
        likely = mx.argpartition(-single, kth=4)[:5]
        worst = mx.maximum(worst, mx.max(mx.abs(single[likely] - batched[row][likely])))
    return float(worst.item())


def _logprobs(logits: mx.array) -> mx.array:
    logits = logits[:, -1, :].astype(mx.float32)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)
