"""Embeddings of a causal model: the hidden states below its head, pooled to one vector or kept for each token.

Runs on the MLX thread, a chunk at a time between other sequences' steps, on a cache of its own that is dropped at
the end: the prompt cache is neither read nor written. It knows no family by name; the body of the model (its trunk)
is found by the few names that mlx-lm gives it, and what it returns is checked. It does not know HTTP or the store.
"""

from __future__ import annotations

import json
import math
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx

from mlxcel.engine.model import LoadedModel, make_cache
from mlxcel.errors import NotSupported

Pooling = Literal["mean", "cls", "last", "none"]

TRUNKS = ("model", "backbone", "transformer")
GGUF_POOLINGS: tuple[Pooling, ...] = ("none", "mean", "cls", "last")  # by number
FOLDER_POOLINGS: dict[str, Pooling] = {
    "pooling_mode_lasttoken": "last",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
}
LARGEST_INT16 = 32760.0  # what llama-server scales to, a little below the type's end


@dataclass(slots=True)
class Embedding:
    """One prompt's way through the trunk. `step` until it is done, then `vectors` are there: one, or with pooling
    none one for each token."""

    tokens: array[int]
    pooling: Pooling
    chunk: int
    vectors: list[list[float]] = field(default_factory=list)
    _done: int = 0
    _cache: list[Any] = field(default_factory=list)
    _sum: mx.array | None = None

    def step(self, model: LoadedModel) -> bool:
        """One chunk further; whether it was the last. Raises NotSupported for a model whose trunk is not found."""
        if not self._cache:
            self._cache = make_cache(model.net)
        piece = self.tokens[self._done : self._done + self.chunk]
        states = hidden_states(model, piece, self._cache)
        is_first, self._done = not self._done, self._done + len(piece)
        is_last = self._done == len(self.tokens)
        if self.pooling == "none":
            self.vectors += _rows(states)
        elif self.pooling == "mean":
            self._sum = states.sum(axis=0) + (0 if self._sum is None else self._sum)
            mx.eval(self._sum)
            if is_last:
                self.vectors = _rows((self._sum / len(self.tokens))[None])
        elif is_first if self.pooling == "cls" else is_last:
            self.vectors = _rows(states[:1] if self.pooling == "cls" else states[-1:])
        if is_last:
            self._cache.clear()
        return is_last


def embed(model: LoadedModel, tokens: array[int], pooling: Pooling, chunk: int = 512) -> list[list[float]]:
    """All chunks of one prompt at once."""
    embedding = Embedding(tokens, pooling, chunk)
    while not embedding.step(model):
        pass
    return embedding.vectors


def hidden_states(model: LoadedModel, tokens: array[int], cache: list[Any]) -> mx.array:
    """Float32 states (tokens, hidden), evaluated as the cache is. Raises NotSupported."""
    trunk = trunk_of(model.net)
    if trunk is None:
        raise NotSupported("this model has no part that is known to give embeddings")
    states = trunk(mx.array(tokens)[None], cache=cache)
    if not isinstance(states, mx.array) or states.shape[:2] != (1, len(tokens)) or states.shape[2] == model.vocab_size:
        raise NotSupported("the body of this model gives no hidden states, so there are no embeddings of it")
    states = states[0].astype(mx.float32)
    mx.eval(states, [layer.state for layer in cache])
    return states


def trunk_of(net: Any) -> Any:
    """What the model is without its head; None when it has none by a known name."""
    inner = getattr(net, "language_model", None)
    if inner is not None:
        return trunk_of(inner)
    return next((part for name in TRUNKS if callable(part := getattr(net, name, None))), None)


def pooling_of(model: LoadedModel) -> Pooling:
    """What the model's own files say, a GGUF's metadata or Sentence Transformers' 1_Pooling; mean where they do not."""
    number = model.config.get("pooling_type")
    if isinstance(number, int) and 0 <= number < len(GGUF_POOLINGS):
        return GGUF_POOLINGS[number]
    try:
        modes = json.loads((Path(model.path) / "1_Pooling" / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return "mean"
    return next((pooling for name, pooling in FOLDER_POOLINGS.items() if modes.get(name) is True), "mean")


def normalised(vector: list[float], kind: int) -> list[float]:
    """-1 as it is, 0 the largest number becomes 32760, 1 taxicab length 1, 2 Euclidean, p above 2 the p-norm."""
    if kind < 0:
        return vector
    length = _length(vector, kind)
    return [x / length for x in vector] if length > 0 else vector


def _length(vector: list[float], kind: int) -> float:
    largest = max(map(abs, vector))
    if kind == 0:
        return largest / LARGEST_INT16
    if kind == 2:
        return math.hypot(*vector)
    return largest * sum((abs(x) / largest) ** kind for x in vector) ** (1 / kind) if largest else 0.0


def _rows(states: mx.array) -> list[list[float]]:
    rows: Any = states.tolist()
    return list(rows)
