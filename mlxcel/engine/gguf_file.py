"""The GGUF container: bytes to metadata and tensors.

Reads versions 2 and 3, little endian, in one file (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).
Knows no architecture, no tokenizer and no MLX. Invariant: every size is checked against the bytes that are left
before it is used, so a damaged file ends in `GGUFError`, never in a hang or a large allocation. That is why
gguf.GGUFReader is not used: it follows damaged array lengths without end, and makes several numpy arrays out of
each token of a vocabulary (seconds at 50 thousand tokens).
"""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

MAGIC = b"GGUF"
MAX_DIMS = 4  # GGML_MAX_DIMS
DEFAULT_ALIGNMENT = 32

SCALARS: dict[int, str] = {
    GGUFValueType.UINT8: "<u1",
    GGUFValueType.INT8: "<i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.BOOL: "<u1",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT64: "<f8",
}

Value = str | int | float | bool | list[str] | list[int] | list[float] | list[bool]
T = TypeVar("T")


class GGUFError(ValueError):
    """What is wrong with the file, as a clause that follows its name."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """`shape` counts weights, rows first. `data` is uint8, read-only, `shape` with the last axis in bytes."""

    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    data: npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """The typed reads raise GGUFError on a missing key (unless there is a default) and on another type."""

    metadata: dict[str, Value]
    tensors: dict[str, Tensor]

    def text(self, key: str, default: str | None = None) -> str:
        return self._typed(key, str, default)

    def flag(self, key: str, default: bool | None = None) -> bool:
        return self._typed(key, bool, default)

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number above zero."""
        value = self.integer(key, default)
        if value == 0:
            raise GGUFError(f"metadata key {key} is zero")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number, not negative. Where a file has one value per layer, they must be equal."""
        value = self._value(key, default)
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            value = value[0]
        if type(value) is not int or value < 0:
            raise GGUFError(f"metadata key {key} is not a whole number")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above zero: all that models are configured with are."""
        value = self._value(key, default)
        if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:  # type: ignore[arg-type,operator]
            raise GGUFError(f"metadata key {key} is not a number above zero")
        return float(value)  # type: ignore[arg-type]

    def items(self, key: str, kind: type[T]) -> list[T]:
        value = self._typed(key, list, None)
        if not all(type(item) is kind for item in value):
            raise GGUFError(f"metadata key {key} is not an array of {kind.__name__}")
        return value

    def tensor(self, name: str) -> Tensor:
        try:
            return self.tensors[name]
        except KeyError:
            raise GGUFError(f"tensor {name} is missing") from None

    def _value(self, key: str, default: Value | None) -> Value:
        value = self.metadata.get(key, default)
        if value is None:
            raise GGUFError(f"metadata key {key} is missing")
        return value

    def _typed(self, key: str, kind: type[T], default: T | None) -> T:
        value = self._value(key, default)  # type: ignore[arg-type]
        if type(value) is not kind:
            raise GGUFError(f"metadata key {key} is not of type {kind.__name__}")
        return value


class _Cursor:
    """Reads forward; every read is checked against what is left."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = memoryview(data)
        self.at = 0

    def take(self, nbytes: int) -> memoryview:
        if nbytes > len(self.data) - self.at:
            raise GGUFError("the file ends inside its header (truncated or damaged)")
        start, self.at = self.at, self.at + nbytes
        return self.data[start : self.at]

    def u32(self) -> int:
        return int.from_bytes(self.take(4), "little")

    def u64(self) -> int:
        return int.from_bytes(self.take(8), "little")

    def string(self) -> str:
        try:
            return str(self.take(self.u64()), "utf-8")
        except UnicodeDecodeError:
            raise GGUFError("a string in the header is not UTF-8 (damaged)") from None

    def value(self) -> Value:
        kind = self.u32()
        if kind == GGUFValueType.STRING:
            return self.string()
        if kind == GGUFValueType.ARRAY:
            return self.array()
        return self.scalars(kind, 1)[0]

    def array(self) -> list[str] | list[int] | list[float] | list[bool]:
        kind, count = self.u32(), self.u64()
        if kind == GGUFValueType.STRING:
            return [self.string() for _ in range(count)]
        return self.scalars(kind, count)

    def scalars(self, kind: int, count: int) -> list[int] | list[float] | list[bool]:
        if kind not in SCALARS:
            raise GGUFError(f"a metadata value is of type {kind}, which is not known (damaged)")
        dtype = np.dtype(SCALARS[kind])
        values = np.frombuffer(self.take(count * dtype.itemsize), dtype)
        numbers: list[int] | list[float] = values.tolist()
        return [number != 0 for number in numbers] if kind == GGUFValueType.BOOL else numbers


def read_gguf(path: str | Path) -> GGUFFile:
    """Map the file and read its header; tensors are views that keep the mapping alive. Raises GGUFError, OSError."""
    with open(path, "rb") as stream:
        if stream.read(len(MAGIC)) != MAGIC:
            raise GGUFError("not a GGUF file")
        cursor = _Cursor(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ))
    cursor.take(len(MAGIC))
    _check_version(cursor.u32())
    num_tensors, num_keys = cursor.u64(), cursor.u64()
    metadata: dict[str, Value] = {}
    for _ in range(num_keys):
        key = cursor.string()
        if key in metadata:
            raise GGUFError(f"metadata key {key} is there twice")
        metadata[key] = cursor.value()
    if metadata.get("split.count", 1) != 1:
        raise GGUFError("one part of a split model, which is not supported: join the parts first")
    return GGUFFile(metadata, _read_tensors(cursor, num_tensors, metadata.get("general.alignment", DEFAULT_ALIGNMENT)))


def _check_version(version: int) -> None:
    if version & 0xFFFF == 0:
        raise GGUFError("a big-endian GGUF file, which is not supported")
    if version not in (2, 3):
        raise GGUFError(f"GGUF version {version} is not supported (2 and 3 are)")


def _read_tensors(cursor: _Cursor, num_tensors: int, alignment: Value) -> dict[str, Tensor]:
    if type(alignment) is not int or alignment <= 0:
        raise GGUFError("metadata key general.alignment is not a whole number above zero")
    infos = [_read_tensor_info(cursor) for _ in range(num_tensors)]
    start = -(-cursor.at // alignment) * alignment
    tensors = {info[0]: _view(cursor.data, start, *info) for info in infos}
    if len(tensors) != num_tensors:
        raise GGUFError("two tensors have the same name")
    return tensors


def _read_tensor_info(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """(name, shape with rows first, type, offset in the data section)."""
    name, num_dims = cursor.string(), cursor.u32()
    if not 1 <= num_dims <= MAX_DIMS:
        raise GGUFError(f"tensor {name} has {num_dims} dimensions (damaged)")
    dims = [cursor.u64() for _ in range(num_dims)]
    return name, tuple(reversed(dims)), cursor.u32(), cursor.u64()


def _view(data: memoryview, start: int, name: str, shape: tuple[int, ...], kind: int, offset: int) -> Tensor:
    try:
        block_len, block_nbytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    except (ValueError, KeyError):
        raise GGUFError(f"tensor {name} is of type {kind}, which is not known") from None
    if 0 in shape or shape[-1] % block_len:
        raise GGUFError(f"tensor {name} has the shape {shape}, which is not possible (damaged)")
    byte_shape = (*shape[:-1], shape[-1] // block_len * block_nbytes)
    nbytes, first = math.prod(byte_shape), start + offset
    if first + nbytes > len(data):
        raise GGUFError(f"tensor {name} ends at byte {first + nbytes}, the file at {len(data)} (truncated)")
    array = np.frombuffer(data, np.uint8, nbytes, first).reshape(byte_shape)
    return Tensor(name, GGMLQuantizationType(kind), shape, array)
