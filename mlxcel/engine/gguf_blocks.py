"""ggml's quantised blocks as MLX affine quantisation, without changing any value.

A ggml block of 32 weights is w = d*q + m with unsigned q; MLX affine with group_size 32 is w = scale*q + bias
(layouts: ggml-common.h and ggml-quants.c of ggml). A K block is eight such groups whose d and m are products of
a float16 and a 6 bit number. float16 scales hold d and m of the *_0 and *_1 types exactly, and round those of
the *_K types. Pure numpy; knows no file and no model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Kind

GROUP_SIZE = 32
FOUR = np.uint8(4)  # a shift by a plain int would not keep the type for mypy

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Affine:
    """w = scales*q + biases per group of 32. q (rows, cols) uint8; scales, biases (rows, cols/32) float32."""

    q: Bytes
    scales: Floats
    biases: Floats
    bits: int

    def dense(self) -> Floats:
        """(rows, cols), equal to gguf.quants.dequantize and several times faster."""
        groups = self.q.reshape(*self.scales.shape, GROUP_SIZE) * self.scales[..., None]
        groups += self.biases[..., None]
        return groups.reshape(self.q.shape)


def unpack(kind: Kind, data: Bytes) -> Affine | None:
    """`data` (rows, bytes of a row) as affine groups, or None for a type that has no exact affine form."""
    if kind not in UNPACKERS:
        return None
    bits, unpacker = UNPACKERS[kind]
    rows = data.shape[0]
    q, scales, biases = unpacker(data.reshape(rows, -1, GGML_QUANT_SIZES[kind][1]))
    return Affine(q.reshape(rows, -1), scales.reshape(rows, -1), biases.reshape(rows, -1), bits)


def pack_bits(q: Bytes, bits: int) -> npt.NDArray[np.uint32]:
    """(rows, n) numbers below 2**bits to (rows, n*bits/32) words, in MLX's order: a little-endian bit stream."""
    rows = q.shape[0]
    if bits == 8:
        stream = np.ascontiguousarray(q)
    elif bits == 4:
        stream = q[:, 0::2] | (q[:, 1::2] << FOUR)
    else:
        each = np.unpackbits(q[..., None], axis=-1, count=bits, bitorder="little")
        stream = np.packbits(each.reshape(rows, -1), axis=-1, bitorder="little")
    return stream.view("<u4")


def _f16(data: Bytes) -> Floats:
    """(..., 2) bytes to (..., 1)."""
    return data.view("<f2").astype(np.float32)


def _nibbles(qs: Bytes) -> Bytes:
    """(..., 16) bytes to (..., 32): the low nibbles, then the high ones."""
    return np.concatenate([qs & 15, qs >> 4], axis=-1)


def _fifth_bits(qh: Bytes) -> Bytes:
    """(..., 4) bytes to (..., 32), each 0 or 16."""
    return np.unpackbits(qh, axis=-1, bitorder="little") << FOUR


def _q4_0(b: Bytes) -> tuple[Bytes, Floats, Floats]:
    d = _f16(b[..., :2])
    return _nibbles(b[..., 2:]), d, -8 * d


def _q4_1(b: Bytes) -> tuple[Bytes, Floats, Floats]:
    return _nibbles(b[..., 4:]), _f16(b[..., :2]), _f16(b[..., 2:4])


def _q5_0(b: Bytes) -> tuple[Bytes, Floats, Floats]:
    d = _f16(b[..., :2])
    return _nibbles(b[..., 6:]) | _fifth_bits(b[..., 2:6]), d, -16 * d


def _q5_1(b: Bytes) -> tuple[Bytes, Floats, Floats]:
    return _nibbles(b[..., 8:]) | _fifth_bits(b[..., 4:8]), _f16(b[..., :2]), _f16(b[..., 2:4])


def _q8_0(b: Bytes) -> tuple[Bytes, Floats, Floats]:
    d = _f16(b[..., :2])
    return b[..., 2:] ^ np.uint8(0x80), d, -128 * d  # int8 q + 128 is its byte with the sign bit flipped


def _k_groups(b: Bytes) -> tuple[Floats, Floats]:
    """The 16 leading bytes of a K block to 8 scales and 8 biases: d, dmin, then 6 bit numbers in 12 bytes."""
    s = b[..., 4:16].reshape(*b.shape[:-1], 3, 4)
    low, low_min, high = s[..., 0, :], s[..., 1, :], s[..., 2, :]
    scale = np.concatenate([low & 0x3F, (high & 0x0F) | ((low >> 2) & 0x30)], axis=-1)
    minimum = np.concatenate([low_min & 0x3F, (high >> 4) | ((low_min >> 2) & 0x30)], axis=-1)
    return _f16(b[..., :2]) * scale.astype(np.float32), -_f16(b[..., 2:4]) * minimum.astype(np.float32)


def _k_nibbles(qs: Bytes) -> Bytes:
    """(rows, blocks, 128) bytes to (rows, blocks, 8, 32): each run of 32 bytes holds two groups."""
    runs = qs.reshape(*qs.shape[:-1], 4, 32)
    return np.stack([runs & 15, runs >> 4], axis=-2).reshape(*qs.shape[:-1], 8, 32)


def _q4_k(b: Bytes) -> tuple[Bytes, Floats, Floats]:
    return _k_nibbles(b[..., 16:]), *_k_groups(b)


def _q5_k(b: Bytes) -> tuple[Bytes, Floats, Floats]:
    shifts = np.arange(8, dtype=np.uint8)[:, None]
    fifth = (b[..., None, 16:48] >> shifts) & np.uint8(1)  # bit g of byte j belongs to weight j of group g
    return _k_nibbles(b[..., 48:]) | (fifth << FOUR), *_k_groups(b)


UNPACKERS: dict[Kind, tuple[int, Callable[[Bytes], tuple[Bytes, Floats, Floats]]]] = {
    Kind.Q4_0: (4, _q4_0),
    Kind.Q4_1: (4, _q4_1),
    Kind.Q5_0: (5, _q5_0),
    Kind.Q5_1: (5, _q5_1),
    Kind.Q8_0: (8, _q8_0),
    Kind.Q4_K: (4, _q4_k),
    Kind.Q5_K: (5, _q5_k),
}
