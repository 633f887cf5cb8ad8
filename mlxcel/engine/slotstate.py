"""Stored state of one sequence as numpy arrays and back, for slot files. Runs on the MLX thread.

It knows both forms of stored state, and what of the model must be equal for it to be taken back. It does not know
files, stores or requests.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from numpy.typing import NDArray

from mlxcel.engine.kv import KVSegment
from mlxcel.engine.model import LoadedModel
from mlxcel.engine.slotfile import BadFile
from mlxcel.engine.snapshot import Leaf, LeafShape, State, mismatch, sizes_of

SAMPLE = 64  # elements of each weight: a fine-tuned model differs in nearly all of them


def fingerprint(model: LoadedModel) -> str:
    """Hexadecimal BLAKE2b over the name, shape, dtype and first elements of every weight."""
    hasher = hashlib.blake2b(model.id.encode("utf-8", "surrogatepass"), digest_size=16)
    for name, weight in tree_flatten(model.net.parameters()):
        hasher.update(f"{name} {weight.shape} {weight.dtype}".encode())
        hasher.update(_to_numpy(weight.reshape(-1)[:SAMPLE]).tobytes())
    return str(hasher.hexdigest())


def pack_kv(model: LoadedModel, segments: Sequence[tuple[Any, int]]) -> tuple[list[NDArray[Any]], list[str]]:
    """The arrays and their MLX dtypes."""
    assert model.layout is not None
    return _packed(model.layout.pack(segments) if segments else [])


def unpack_kv(model: LoadedModel, arrays: list[NDArray[Any]], dtypes: list[str], length: int) -> KVSegment:
    """Raises BadFile when the arrays are not those of this model."""
    layout = model.layout
    back = _unpacked(arrays, dtypes)
    if layout is None or not layout.fits(back, length):
        raise BadFile("its arrays are not those of this model")
    return layout.unpack(back)


def pack_state(state: State) -> tuple[list[NDArray[Any]], list[str], list[dict[str, object]]]:
    """The arrays, their dtypes and a description of each leaf."""
    leaves: list[dict[str, object]] = []
    held: list[mx.array] = []
    for leaf in state.leaves:
        places = [None if a is None else len(held) + i for i, a in enumerate(leaf.arrays)]
        held += [a for a in leaf.arrays if a is not None]
        leaves.append({"kind": leaf.shape.kind, "limit": leaf.shape.limit, "offset": leaf.offset, "start": leaf.start})
        leaves[-1]["arrays"] = [
            n if n is None else sum(p is not None for p in places[:i]) for i, n in enumerate(places)
        ]
    return (*_packed(held), leaves)


def unpack_state(
    model: LoadedModel, arrays: list[NDArray[Any]], dtypes: list[str], leaves: list[dict[str, Any]], length: int
) -> State:
    """Raises BadFile when the leaves are not those of this model; restoring checks them once more."""
    shape, left = model.shape, iter(_unpacked(arrays, dtypes))
    if shape is None or [(leaf.get("kind"), leaf.get("limit")) for leaf in leaves] != [
        (leaf.kind, leaf.limit) for leaf in shape.leaves
    ]:
        raise BadFile("its layers are not those of this model")
    back = []
    try:
        for described, wanted in zip(leaves, shape.leaves, strict=True):
            held = tuple(None if place is None else next(left) for place in described["arrays"])
            sizes = LeafShape(wanted.kind, wanted.limit, sizes_of(wanted.kind, held))
            back.append(Leaf(sizes, held, int(described["offset"]), int(described["start"])))
    except (StopIteration, KeyError, TypeError, ValueError) as error:
        raise BadFile("its layers are not those of this model") from error
    fitting = mismatch(tuple(leaf.shape for leaf in back), shape.leaves) is None
    if not fitting or not all(_is_whole(leaf, wanted, length) for leaf, wanted in zip(back, shape.leaves, strict=True)):
        raise BadFile("its layers are not those of this model")
    every = [a for leaf in back for a in leaf.arrays if a is not None]
    mx.eval(every)
    return State(tuple(back), length, sum(a.nbytes for a in every), model.proven.cuts)


def _is_whole(leaf: Leaf, wanted: LeafShape, length: int) -> bool:
    """Whether all arrays that the model keeps are there, and KV holds what a state of `length` tokens holds of it."""
    if [a is None for a in leaf.arrays] != [a is None for a in wanted.arrays]:
        return False
    if wanted.kind == "arrays" or leaf.arrays[0] is None:
        return True
    held = min(length, wanted.limit or length)
    rows = {a.shape[-2] for a in leaf.arrays if a is not None}
    return (leaf.offset, leaf.start, rows) == (length, length - held, {held})


def _packed(arrays: list[mx.array]) -> tuple[list[NDArray[Any]], list[str]]:
    return [_to_numpy(array) for array in arrays], [str(array.dtype).removeprefix("mlx.core.") for array in arrays]


def _to_numpy(array: mx.array) -> NDArray[Any]:
    """numpy has no bfloat16: its bits as uint16."""
    return np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)


def _unpacked(arrays: list[NDArray[Any]], dtypes: list[str]) -> list[mx.array]:
    if len(arrays) != len(dtypes):
        raise BadFile("its header and its arrays disagree")
    return [
        mx.array(array).view(mx.bfloat16) if name == "bfloat16" else mx.array(array)
        for array, name in zip(arrays, dtypes, strict=True)
    ]
