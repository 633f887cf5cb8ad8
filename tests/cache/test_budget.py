"""Model-based capacity defaults: the worked examples of the operation guide."""

import pytest

from mlxcel.cache.budget import KV_STORE_MINIMUM, default_capacity, representative_length

GIB = 1 << 30
MIB = 1 << 20


@pytest.mark.parametrize(
    ("bytes_per_token", "fixed", "left", "expected"),
    [
        pytest.param(65_536, 78_446_592, 64 * GIB, 3_691_905_024, id="Qwen3.8-27B shape, plenty left"),
        pytest.param(65_536, 78_446_592, 8 * GIB, 2 * GIB, id="Qwen3.8-27B shape, a quarter of 8 GiB"),
        pytest.param(901_120, 0, 100 * GIB, 25 * GIB, id="Gemma 4 31B, a quarter of 100 GiB"),
        pytest.param(901_120, 0, 24 * GIB, 7_381_975_040, id="Gemma 4 31B, one entry"),
        pytest.param(901_120, 0, 12 * GIB, 3 * GIB, id="Gemma 4 31B, not even one entry"),
        pytest.param(901_120, 0, 0, 512 * MIB, id="Gemma 4 31B, nothing left"),
        pytest.param(139_264, 0, None, 6_845_104_128, id="Gemma 3 4B"),
        pytest.param(344_064, 0, None, 16_911_433_728, id="Gemma 4 12B unified"),
        pytest.param(196_608, 0, None, 9_663_676_416, id="Llama 4 Scout"),
        pytest.param(53_248, 0, None, 2_617_245_696, id="Muse Glimmer"),
        pytest.param(65_536, 0, None, 3_221_225_472, id="AFMoE"),
    ],
)
def test_snapshot_shapes_of_the_guide(bytes_per_token, fixed, left, expected):
    assert default_capacity(bytes_per_token * 8192 + fixed, left, 512 * MIB) == expected


def test_llama_3_1_8b_gets_six_gibibytes_for_its_kv_store():
    assert default_capacity(131_072 * 8192, None, KV_STORE_MINIMUM) == 6 * GIB


def test_a_small_model_keeps_the_minimum():
    assert default_capacity(46_080 * 1024, 20 * GIB, KV_STORE_MINIMUM) == 2 * GIB


@pytest.mark.parametrize(("ctx_size", "expected"), [(0, 8192), (1, 32), (4096, 4096), (8192, 8192), (131_072, 8192)])
def test_the_representative_length_follows_the_context_up_to_8192(ctx_size, expected):
    assert representative_length(ctx_size) == expected
