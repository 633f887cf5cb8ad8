"""The state of a model that is not plain KV: what its layers keep, copied out of a live cache and put back.

Every cache object of the model is one of four kinds: plain KV, a sliding window (a ring once it has wrapped), a chunk
of attention that drops its front, or recurrent arrays. The kinds are read off the objects that the model makes, never
off its name; a cache class that is none of them is refused. A `State` holds evaluated copies of exactly what a later
token can still see: KV to its offset, the last `window` rows of a ring in order of time. It is cut shorter only while
nothing has been dropped from it, and recurrent arrays are never cut.

Knows mlx-lm's cache classes; not sessions, not sequences. Capture and restore run on the MLX thread.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, ChunkedKVCache, KVCache, RotatingKVCache

from mlxcel.cache.lookup import MissReason
from mlxcel.engine.kv import leaves

LeafKind = Literal["kv", "window", "chunk", "arrays"]
StateKind = Literal["dense", "windowed", "recurrent", "mixed"]

_KINDS: dict[type, LeafKind] = {
    KVCache: "kv",
    RotatingKVCache: "window",
    ChunkedKVCache: "chunk",
    ArraysCache: "arrays",
}


class Refused(Exception):
    """A state that cannot be captured or restored; `reason` is counted and shown under this name."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class LeafShape:
    """`limit` is the window or chunk in tokens (0: none); `arrays` are (axes that never change, dtype), or None."""

    kind: LeafKind
    limit: int
    arrays: tuple[tuple[tuple[int, ...], str] | None, ...]


@dataclass(frozen=True, slots=True)
class StateShape:
    """What a model's layers keep. Bytes are of one sequence; windows count as if they held every token."""

    leaves: tuple[LeafShape, ...]
    bytes_per_token: int
    constant_bytes: int

    @property
    def kind(self) -> StateKind:
        kinds = {leaf.kind for leaf in self.leaves}
        if kinds == {"kv"}:
            return "dense"
        if "arrays" not in kinds:
            return "windowed"
        return "recurrent" if kinds == {"arrays"} else "mixed"

    @property
    def window(self) -> int:
        """Tokens of the widest window or chunk; 0 without one."""
        return max((leaf.limit for leaf in self.leaves), default=0)


@dataclass(frozen=True, slots=True)
class Leaf:
    """`offset` tokens went through; for KV kinds `arrays` are keys and values of tokens [start, offset)."""

    shape: LeafShape
    arrays: tuple[mx.array | None, ...]
    offset: int
    start: int

    def refusal(self, length: int) -> MissReason | None:
        if self.shape.kind == "arrays":
            return MissReason.CANNOT_TRUNCATE
        if self.arrays[0] is None or self.shape.kind == "kv":
            return None
        return MissReason.WRAPPED_WINDOW if self.offset > self.shape.limit else None


@dataclass(frozen=True, slots=True)
class State:
    """The whole state after `length` tokens; implements cache.snapshots.Payload. `cuttable` as the self-test found."""

    leaves: tuple[Leaf, ...]
    length: int
    nbytes: int
    cuttable: bool = True

    def refusal(self, length: int) -> MissReason | None:
        """Why it cannot stand for its first `length` tokens. One layer that cannot decides for all."""
        if length == self.length:
            return None
        if not self.cuttable:
            return MissReason.CANNOT_TRUNCATE
        return next((reason for leaf in self.leaves if (reason := leaf.refusal(length))), None)


def shape_of(net: Any, cache: list[Any]) -> StateShape | None:
    """Read off a probe of two tokens through an empty `cache`; None when a layer keeps something unknown."""
    if not all(type(leaf) in _KINDS and not getattr(leaf, "keep", False) for leaf in leaves(cache)):
        return None
    mx.eval(net(mx.array([[0, 0]]), cache=cache))
    shapes, per_token, constant = [], 0, 0
    for leaf in leaves(cache):
        shape = _leaf_shape(leaf)
        held = [array for array in _arrays(leaf) if array is not None]
        if shape.kind == "arrays":
            constant += sum(array.nbytes for array in held)
        else:
            per_token += sum(array.nbytes // array.shape[-2] for array in held)
        shapes.append(shape)
    return StateShape(tuple(shapes), per_token, constant)


def capture(cache: Iterable[Any], length: int, *, cuttable: bool = True) -> State:
    """Copy the state of one sequence, evaluated. Raises Refused when a layer is not at `length` or is unknown."""
    copied = tuple(_capture(leaf, length) for leaf in leaves(cache))
    arrays = [array for leaf in copied for array in leaf.arrays if array is not None]
    mx.eval(arrays)
    return State(copied, length, sum(array.nbytes for array in arrays), cuttable)


def restore(state: State, length: int, shape: StateShape, cache: Iterable[Any]) -> None:
    """Fill an empty `cache` with the first `length` tokens of `state`. Raises Refused, with the cache unusable.

    The live cache gets handles of its own: a write through a shared handle would change the stored state.
    """
    if differing := mismatch(tuple(leaf.shape for leaf in state.leaves), shape.leaves):
        raise Refused(differing)
    if reason := state.refusal(length):
        raise Refused(reason)
    targets = list(leaves(cache))
    for leaf, target in zip(state.leaves, targets, strict=True):
        _restore(leaf, length if length < state.length else leaf.offset, target)
    mx.eval([array for target in targets for array in _arrays(target) if array is not None])


def row_of(cache: Iterable[Any], row: int) -> list[Any]:
    """One sequence of a batched cache as single caches; its arrays may still share the batch's buffers."""
    return [layer.extract(row) for layer in cache]


def _arrays(leaf: Any) -> list[Any]:
    return list(leaf.cache) if isinstance(leaf, ArraysCache) else [leaf.keys, leaf.values]


def _leaf_shape(leaf: Any) -> LeafShape:
    kind = _KINDS.get(type(leaf))
    if kind is None or (kind == "window" and leaf.keep):
        raise Refused("layer_kinds")
    limit = leaf.max_size if kind == "window" else leaf.chunk_size if kind == "chunk" else 0
    return LeafShape(kind, limit, sizes_of(kind, _arrays(leaf)))


def sizes_of(kind: LeafKind, arrays: Iterable[mx.array | None]) -> tuple[tuple[tuple[int, ...], str] | None, ...]:
    """The number of axes, the heads of KV, the last axis, and the dtype of each array that is there."""

    def axes(array: mx.array) -> tuple[int, ...]:
        heads = () if kind == "arrays" or array.ndim < 3 else (array.shape[-3],)
        return (array.ndim, *heads, array.shape[-1])

    return tuple(None if a is None else (axes(a), str(a.dtype)) for a in arrays)


def mismatch(stored: tuple[LeafShape, ...], wanted: tuple[LeafShape, ...]) -> str | None:
    """The name of what differs between a stored state and the model: kinds of layers, then sizes, then dtypes."""
    if [(leaf.kind, leaf.limit) for leaf in stored] != [(leaf.kind, leaf.limit) for leaf in wanted]:
        return "layer_kinds"
    for ours, theirs in zip(stored, wanted, strict=True):
        if len(ours.arrays) != len(theirs.arrays):
            return "layer_kinds"
        for a, b in zip(ours.arrays, theirs.arrays, strict=True):
            if a is None or b is None:
                continue
            if a[0] != b[0]:
                return "shapes"
            if a[1] != b[1]:
                return "kv_mode"
    return None


def _capture(leaf: Any, length: int) -> Leaf:
    shape, arrays = _leaf_shape(leaf), _arrays(leaf)
    if shape.kind == "arrays":
        return Leaf(shape, tuple(None if a is None else mx.contiguous(a) for a in arrays), length, 0)
    if arrays[0] is None:
        return Leaf(shape, tuple(arrays), 0, 0)
    if leaf.offset != length:
        raise Refused("offset_mismatch")
    if shape.kind == "window":
        arrays = [leaf._temporal_order(a) for a in arrays]
    end = arrays[0].shape[-2] if shape.kind == "window" else length - _start(leaf)
    held = min(length, shape.limit or length)
    if held > end:
        raise Refused("offset_mismatch")
    copies = tuple(mx.contiguous(a[..., end - held : end, :]) for a in arrays if a is not None)
    return Leaf(shape, copies, length, length - held)


def _start(leaf: Any) -> int:
    """The first token that a chunked cache still holds; plain KV holds them all."""
    return int(leaf.start_position) if isinstance(leaf, ChunkedKVCache) else 0


def _restore(leaf: Leaf, length: int, target: Any) -> None:
    if leaf.shape.kind == "arrays":
        target.cache = [None if a is None else mx.contiguous(a[...]) for a in leaf.arrays]
        return
    if leaf.arrays[0] is None:
        return
    held = length - leaf.start
    target.keys, target.values = (mx.contiguous(a[..., :held, :]) for a in leaf.arrays if a is not None)
    target.offset = length
    if leaf.shape.kind == "window":
        target._idx = held
    elif leaf.shape.kind == "chunk":
        target.start_position = leaf.start
