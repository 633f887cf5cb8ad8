"""Attention and activations without MLX's slow scalar `exp`, for float32 on the Linux CPU backend.

Owns what `install` puts in the place of `mx.fast.scaled_dot_product_attention`, `nn.silu` and `nn.gelu_approx`.
Invariant: each answers as the stock function does, within float32 rounding, or hands the call to it.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

# MLX's exp, softmax, sigmoid and tanh are scalar code on Linux: 16 to 25 ns an element. mx.power takes 8, NumPy's exp
# 2, which is vectorised and closer to the exact value (2e-7 against 2e-6). So prefill evaluates the scores, lets NumPy
# work on MLX's own memory (a documented use of the buffer protocol) and goes on: a graph cut of 0.1 ms a layer, GIL
# released. A decode step stays lazy, with mx.power: a cut there would undo the overlap of mx.async_eval and hold each
# token back by one step. What helps both: the heads of a group share one product, so K and V are read once.
#
# SmolLM2-135M, float32, 1,500 tokens, OpenBLAS with one thread, two CPUs of which one was busy, medians of three
# interleaved runs, tokens per second, stock against this: chunks of 128 105 / 165, of 256 101 / 181, of 512 92 / 194.

stock_attention = mx.fast.scaled_dot_product_attention
stock_silu = nn.silu
stock_gelu_approx = nn.gelu_approx

_BLOCK = 64  # query rows at a time: the scores stay in the CPU's cache, and keys that causality hides are skipped
_HIDDEN = float(np.finfo(np.float32).min)  # what the stock function gives a score that a boolean mask hides


def install() -> None:
    """mlx-lm's model modules import their attention and swiglu by name, but those look these up at every call."""
    mx.fast.scaled_dot_product_attention = attention
    nn.silu = silu
    nn.SiLU.__call__ = lambda _, x: silu(x)
    nn.gelu_approx = gelu_approx


def attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    *,
    scale: float,
    mask: str | mx.array | None = None,
    **others: Any,
) -> mx.array:
    """softmax(queries @ keys.T * scale + mask) @ values, as `mx.fast.scaled_dot_product_attention`.

    queries (B, heads, L, D), keys (B, groups, K, D), values (B, groups, K, V), all float32, to (B, heads, L, V).
    Anything else goes to the stock function.
    """
    if not _can_attend(queries, keys, values, mask) or any(other is not None for other in others.values()):
        return stock_attention(queries, keys, values, scale=scale, mask=mask, **others)
    batch, heads, length, width = queries.shape
    groups = keys.shape[1]
    grouped = (queries * scale).reshape(batch, groups, heads // groups, length, width)
    if isinstance(mask, mx.array):
        mask = _grouped_mask(mask, groups, heads)
    attend = _attend_one if length == 1 else _attend_many
    return attend(grouped, keys, values, mask).reshape(batch, heads, length, -1)


def _can_attend(queries: mx.array, keys: mx.array, values: mx.array, mask: str | mx.array | None) -> bool:
    if any(array.dtype != mx.float32 or array.ndim != 4 for array in (queries, keys, values)):
        return False
    heads, groups = queries.shape[1], keys.shape[1]
    if heads % groups:
        return False
    if isinstance(mask, mx.array):
        return mask.dtype in (mx.bool_, mx.float32) and (mask.ndim < 3 or mask.shape[-3] in (1, heads))
    return mask is None or (mask == "causal" and queries.shape[2] <= keys.shape[2])


def _grouped_mask(mask: mx.array, groups: int, heads: int) -> mx.array:
    """A mask that broadcasts over (B, heads, L, K), as one over (B, groups, heads of a group, L, K)."""
    batch, num_heads, length, num_keys = (1,) * (4 - mask.ndim) + mask.shape
    split = (groups, heads // groups) if num_heads == heads else (1, 1)
    return mask.reshape(batch, *split, length, num_keys)


def _attend_one(grouped: mx.array, keys: mx.array, values: mx.array, mask: str | mx.array | None) -> mx.array:
    """One query a head, the whole of K: causality hides nothing. Lazy."""
    scores = grouped.squeeze(3) @ keys.swapaxes(-1, -2)
    if isinstance(mask, mx.array):
        hidden = mask.squeeze(3)
        scores = scores + (mx.logical_not(hidden) * _HIDDEN if hidden.dtype == mx.bool_ else hidden)
    weights = mx.power(math.e, scores - mx.max(scores, axis=-1, keepdims=True))
    return (weights @ values) / mx.sum(weights, axis=-1, keepdims=True)


def _attend_many(grouped: mx.array, keys: mx.array, values: mx.array, mask: str | mx.array | None) -> mx.array:
    batch, groups, shared, length, width = grouped.shape
    num_keys = keys.shape[2]
    transposed = keys.swapaxes(-1, -2)
    array = np.asarray(mask) if isinstance(mask, mx.array) else None
    blocks: list[mx.array] = []
    for start in range(0, length, _BLOCK):
        stop = min(start + _BLOCK, length)
        seen = num_keys - length + stop if mask == "causal" else num_keys
        scores = grouped[..., start:stop, :].reshape(batch, groups, -1, width) @ transposed[..., :seen]
        mx.eval(scores, blocks)
        weights = np.asarray(scores).reshape(batch, groups, shared, stop - start, seen)
        if array is not None:
            _hide(weights, array[..., start:stop, :] if array.shape[-2] == length else array)
        elif mask is not None:
            weights[..., seen - stop + start :] += _future(stop - start)
        total = _exponentiate(weights)
        mixed = (scores @ values[..., :seen, :]).reshape(*weights.shape[:-1], values.shape[-1])
        blocks.append(mixed / mx.array(total))
    return mx.concatenate(blocks, axis=3)


def _hide(scores: np.ndarray, mask: np.ndarray) -> None:
    if mask.dtype == np.bool_:
        np.copyto(scores, np.float32(_HIDDEN), where=~mask)
    else:
        scores += mask


def _exponentiate(scores: np.ndarray) -> np.ndarray:
    """Turn scores into exp(score - the row's greatest), in place; the sums of the rows."""
    with np.errstate(all="ignore"):  # a row of -inf becomes NaN without a word, as in MLX
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
    return np.asarray(scores.sum(axis=-1, keepdims=True))


@cache
def _future(length: int) -> np.ndarray:
    """(length, length): -inf above the diagonal, else 0."""
    return np.triu(np.full((length, length), -np.inf, dtype=np.float32), k=1)


def silu(x: mx.array) -> mx.array:
    """x * sigmoid(x), any shape."""
    if x.dtype != mx.float32 or x.ndim < 2:
        return stock_silu(x)
    return _gated(x, -x)


def gelu_approx(x: mx.array) -> mx.array:
    """x * (1 + tanh(u)) / 2 = x * sigmoid(2 u) with u = sqrt(2 / pi) * (x + 0.044715 * x^3), as `nn.gelu_approx`."""
    if x.dtype != mx.float32 or x.ndim < 2:
        return stock_gelu_approx(x)
    return _gated(x, x * (1 + 0.044715 * x * x) * -math.sqrt(8 / math.pi))


def _gated(x: mx.array, exponent: mx.array) -> mx.array:
    """x / (1 + exp(exponent)) for x (..., L, width). The caller gives `exponent` away: NumPy overwrites it."""
    if x.shape[-2] == 1:
        return x / (1 + mx.power(math.e, exponent))
    mx.eval(exponent)
    with np.errstate(over="ignore"):  # then the quotient is 0, and rightly so
        array = np.asarray(exponent)
        np.exp(array, out=array)
    return x / (1 + exponent)
