"""The CPU's own attention and activations answer as MLX's do, and the BLAS that is put in multiplies rightly."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlxcel.engine import cpu, elf, fastmath

pytestmark = pytest.mark.skipif(not cpu.is_cpu(), reason="nothing of this is touched where MLX has a GPU")


def normal(seed: int, *shape: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def causal(length: int, num_keys: int) -> mx.array:
    return mx.arange(num_keys - length, num_keys)[:, None] >= mx.arange(num_keys)[None]


def masks(batch: int, heads: int, length: int, num_keys: int) -> dict[str, object]:
    seen = causal(length, num_keys)
    padded = mx.logical_and(seen, mx.arange(num_keys) >= mx.array([0, 3])[:batch, None, None, None])
    return {
        "none": None,
        "causal": "causal",
        "bool": seen,
        "padded": padded,
        "additive": mx.where(seen, 0.0, -mx.inf),
        "by head": mx.where(seen, 0.0, -1e9) + normal(9, 1, heads, 1, num_keys),
    }


@pytest.mark.parametrize("mask", ["none", "causal", "bool", "padded", "additive", "by head"])
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (6, 2), (8, 1)])
@pytest.mark.parametrize(("length", "num_keys"), [(1, 1), (1, 70), (5, 5), (64, 64), (65, 65), (130, 300)])
def test_attention_equals_the_stock_function(mask, heads, groups, length, num_keys):
    for batch in (1, 2):
        q, k, v = (
            normal(i, batch, h, n, 32) for i, h, n in ((1, heads, length), (2, groups, num_keys), (3, groups, num_keys))
        )
        given = masks(batch, heads, length, num_keys)[mask]
        expected = fastmath.stock_attention(q, k, v, scale=0.17, mask=given)
        assert mx.allclose(fastmath.attention(q, k, v, scale=0.17, mask=given), expected, rtol=1e-4, atol=1e-5)


def test_values_may_be_narrower_than_keys():
    q, k, v = normal(1, 1, 4, 40, 48), normal(2, 1, 2, 90, 48), normal(3, 1, 2, 90, 16)
    expected = fastmath.stock_attention(q, k, v, scale=0.1, mask="causal")
    assert mx.allclose(fastmath.attention(q, k, v, scale=0.1, mask="causal"), expected, rtol=1e-4, atol=1e-5)


def test_large_scores_do_not_overflow():
    q, k, v = 300 * normal(1, 1, 2, 9, 32), 300 * normal(2, 1, 2, 9, 32), normal(3, 1, 2, 9, 32)
    out = fastmath.attention(q, k, v, scale=1.0, mask="causal")
    assert mx.allclose(out, fastmath.stock_attention(q, k, v, scale=1.0, mask="causal"), rtol=1e-4, atol=1e-4)


def test_what_is_not_float32_or_has_sinks_goes_to_the_stock_function():
    q, k, v = (normal(i, 1, 2, 9, 32, dtype=mx.float16) for i in range(3))
    assert mx.array_equal(fastmath.attention(q, k, v, scale=0.2), fastmath.stock_attention(q, k, v, scale=0.2))
    q, k, v = (normal(i, 1, 2, 9, 32) for i in range(3))
    sinks = mx.array([0.5, 1.0])
    assert mx.array_equal(
        fastmath.attention(q, k, v, scale=0.2, sinks=sinks), fastmath.stock_attention(q, k, v, scale=0.2, sinks=sinks)
    )


def test_inputs_are_left_as_they_were():
    q, k, v = (normal(i, 1, 4, 70, 32) for i in range(3))
    mask = mx.where(causal(70, 70), 0.0, -1e9)
    before = [np.array(a) for a in (q, k, v, mask)]
    mx.eval(fastmath.attention(q, k, v, scale=0.2, mask=mask))
    assert all(np.array_equal(np.array(a), b) for a, b in zip((q, k, v, mask), before, strict=True))


@pytest.mark.parametrize("shape", [(1, 1, 64), (1, 33, 64), (2, 7, 64), (64,)])
@pytest.mark.parametrize(
    ("ours", "stock"), [(fastmath.silu, fastmath.stock_silu), (fastmath.gelu_approx, fastmath.stock_gelu_approx)]
)
def test_activations_equal_the_stock_functions_and_leave_their_input(ours, stock, shape):
    x = 20 * normal(1, *shape)
    before = np.array(x)
    assert mx.allclose(ours(x), stock(x), rtol=1e-5, atol=1e-6)
    assert np.array_equal(np.array(x), before)
    assert mx.array_equal(ours(x.astype(mx.float16)), stock(x.astype(mx.float16)))


def test_a_model_gives_the_same_logits_with_and_without(monkeypatch):
    from mlxcel.engine.model import make_cache
    from tests.tiny import network

    net, tokens = network("llama"), mx.arange(200)[None] % 250

    def logits():
        cache = make_cache(net)
        parts = [
            net(tokens[:, :150], cache=cache),
            net(tokens[:, 150:199], cache=cache),
            net(tokens[:, 199:], cache=cache),
        ]
        return mx.concatenate(parts, axis=1)

    cpu.prepare()
    fast = logits()
    mx.eval(fast)
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", fastmath.stock_attention)
    monkeypatch.setattr(nn, "silu", fastmath.stock_silu)
    assert mx.max(mx.abs(fast - logits())).item() < 1e-4


def test_preparing_twice_finds_the_same_blas_and_it_multiplies_rightly():
    first, second = cpu.prepare(), cpu.prepare()
    assert first == second and str(first).startswith("BLAS: ")
    assert cpu._products_are_right()


@pytest.mark.parametrize("transposed", [(False, False), (True, False), (False, True), (True, True)])
def test_products_of_any_layout_are_right(transposed):
    cpu.prepare()
    a, b = normal(1, 37, 65), normal(2, 65, 29)
    left = mx.array(np.array(a).T.copy()).T if transposed[0] else a
    right = mx.array(np.array(b).T.copy()).T if transposed[1] else b
    assert np.allclose(np.array(left @ right), np.array(a) @ np.array(b), atol=1e-4)


def test_a_library_that_multiplies_wrongly_is_taken_out_again(monkeypatch):
    slots = elf.import_slots("libmlx.so", cpu._GEMMS)
    if not slots:
        pytest.skip("this build of MLX imports no BLAS")
    before = [elf.read(slot) for _, slot in slots]
    monkeypatch.setattr(cpu, "_products_are_right", lambda: False)
    assert not cpu._redirect(slots, {name: address for (name, _), address in zip(slots, before, strict=True)})
    assert [elf.read(slot) for _, slot in slots] == before


def test_only_the_reference_blas_comes_with_advice():
    assert cpu.Blas("OpenBLAS", is_reference=False).warning is None
    assert "pip install scipy-openblas32" in (cpu.Blas("reference", is_reference=True).warning or "")


@pytest.mark.parametrize(
    ("flags", "core"),
    [("avx512f avx512bw avx512cd avx512dq avx512vl", "SkylakeX"), ("avx2 fma", "Haswell"), ("sse2", None)],
)
def test_the_kernels_follow_the_flags_of_the_cpu(flags, core):
    assert next(iter(cpu._fitting_cores(frozenset(flags.split()))), None) == core
