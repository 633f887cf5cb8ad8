"""Every block type that is kept quantised gives exactly the weights that ggml's own arithmetic gives."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize

from mlxcel.engine.gguf_blocks import UNPACKERS, pack_bits, unpack

K_TYPES = {Kind.Q4_K, Kind.Q5_K}
HAS_MINIMUM = {Kind.Q4_1, Kind.Q5_1} | K_TYPES


def random_blocks(kind: Kind, rows: int = 6, blocks: int = 4) -> np.ndarray:
    """Any bits, under finite float16 scales of both signs."""
    rng = np.random.default_rng(int(kind))
    data = rng.integers(0, 256, (rows, blocks, GGML_QUANT_SIZES[kind][1]), np.uint8)
    num_scales = 2 if kind in HAS_MINIMUM else 1
    scales = rng.standard_normal((rows, blocks, num_scales)).astype("<f2")
    data[..., : 2 * num_scales] = scales.view(np.uint8)
    return data.reshape(rows, -1)


@pytest.mark.parametrize("kind", UNPACKERS)
def test_mlx_dequantises_repacked_blocks_to_exactly_the_weights_of_ggml(kind):
    data = random_blocks(kind)
    affine = unpack(kind, data)
    weights = mx.dequantize(
        mx.array(pack_bits(affine.q, affine.bits)),
        mx.array(affine.scales),
        mx.array(affine.biases),
        group_size=32,
        bits=affine.bits,
    )
    assert np.array_equal(np.array(weights), dequantize(data, kind))


@pytest.mark.parametrize("kind", UNPACKERS)
def test_dense_weights_are_exactly_those_of_ggml(kind):
    data = random_blocks(kind)
    assert np.array_equal(unpack(kind, data).dense(), dequantize(data, kind))


@pytest.mark.parametrize("kind", UNPACKERS.keys() - K_TYPES)
def test_float16_holds_the_scales_and_biases_of_all_but_the_k_types(kind):
    affine = unpack(kind, random_blocks(kind))
    for values in (affine.scales, affine.biases):
        assert np.array_equal(values.astype(np.float16).astype(np.float32), values)


@pytest.mark.parametrize("bits", [4, 5, 8])
def test_packing_is_that_of_mlx(bits):
    weights = mx.random.normal((3, 64), key=mx.random.key(0))
    packed, scales, biases = mx.quantize(weights, group_size=32, bits=bits)
    groups = np.array(mx.dequantize(packed, scales, biases, group_size=32, bits=bits)).reshape(3, 2, 32)
    q = np.rint((groups - np.array(biases)[..., None]) / np.array(scales)[..., None]).astype(np.uint8)
    assert np.array_equal(pack_bits(q.reshape(3, 64), bits), np.array(packed))


@pytest.mark.parametrize("kind", [Kind.F32, Kind.Q6_K, Kind.Q2_K])
def test_types_without_an_exact_form_are_left_to_ggml(kind):
    assert unpack(kind, np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8)) is None
