"""Metadata becomes the config of the same model, or is refused: nothing that changes the arithmetic is ignored."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from mlxcel.engine.gguf_config import build_config
from mlxcel.engine.gguf_file import GGUFError, GGUFFile, Tensor, Value


def tiny_file(
    arch: str = "llama", layers: int = 2, tensors: dict[str, np.ndarray] | None = None, **keys: Value
) -> GGUFFile:
    """Keys are given without the architecture's prefix, "__" for "."."""
    values: dict[str, Value] = {
        "context_length": 512,
        "embedding_length": 64,
        "block_count": layers,
        "feed_forward_length": 96,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": float(np.float32(1e-5)),
        "attention.sliding_window": 8,
    }
    values |= {key.replace("__", "."): value for key, value in keys.items()}
    shapes = {"token_embd": (320, 64), "blk.0.attn_k": (32, 64), "blk.0.ffn_up": (96, 64)}
    shapes |= {f"blk.{i}.attn_q": (64, 64) for i in range(layers)}
    arrays = {f"{name}.weight": np.zeros(shape, np.float32) for name, shape in shapes.items()} | (tensors or {})
    metadata: dict[str, Value] = {"general.architecture": arch}
    return GGUFFile(
        metadata | {f"{arch}.{key}": value for key, value in values.items()},
        {name: Tensor(name, Kind.F32, a.shape, a.view(np.uint8)) for name, a in arrays.items()},
    )


def test_sizes_come_from_metadata_and_defaults_from_their_definition():
    config = build_config(tiny_file())
    assert config["head_dim"] == 16 and config["rope_theta"] == 10000.0 and config["rope_scaling"] is None
    assert config["rms_norm_eps"] == 1e-5, "not float32's 9.999999747378752e-06"


def test_a_value_per_layer_is_taken_when_all_are_equal():
    assert build_config(tiny_file(attention__head_count_kv=[2, 2]))["num_key_value_heads"] == 2
    with pytest.raises(GGUFError, match=r"head_count_kv is not a whole number"):
        build_config(tiny_file(attention__head_count_kv=[2, 4]))


@pytest.mark.parametrize(
    ("keys", "scaling"),
    [
        ({"rope__scaling__type": "none"}, None),
        ({"rope__scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        (
            {"rope__scaling__type": "linear", "rope__scaling__factor": 8.0},
            {"rope_type": "linear", "factor": 8.0},
        ),
        (
            {
                "rope__scaling__type": "yarn",
                "rope__scaling__factor": 4.0,
                "rope__scaling__original_context_length": 128,
            },
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 128,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
            },
        ),
    ],
)
def test_rope_scaling_is_named_as_mlx_lm_names_it(keys, scaling):
    assert build_config(tiny_file(**keys))["rope_scaling"] == scaling


@pytest.mark.parametrize(
    ("keys", "cause"),
    [
        ({"rope__scaling__type": "longrope"}, "RoPE scaling 'longrope' is not supported"),
        ({"rope__scaling__type": "yarn", "rope__scaling__attn_factor": 2.0}, "attn_factor other than 1"),
        ({"rope__dimension_count": 8}, "differs from the head size 16"),
        ({"attention__value_length": 8}, "differs from the head size 16"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is not supported"),
        ({"attention__head_count_kv": 0}, "head_count_kv is zero"),
        ({"attention__head_count": 8}, "tensor blk.0.attn_k.weight has the shape"),
        ({"attention__layer_norm_rms_epsilon": float("nan")}, "is not a number above zero"),
        ({"block_count": 0}, "block_count is zero"),
        ({"block_count": 1 << 31}, "tensor blk.2.attn_q.weight is missing"),
        ({"block_count": "2"}, "block_count is not a whole number"),
    ],
)
def test_what_cannot_be_followed_is_refused(keys, cause):
    with pytest.raises(GGUFError, match=cause):
        build_config(tiny_file(**keys))


def test_unknown_rope_factors_are_refused():
    factors = {"rope_freqs.weight": np.linspace(1, 3, 8, dtype=np.float32)}
    with pytest.raises(GGUFError, match=r"not a known Llama 3 RoPE scaling"):
        build_config(tiny_file(tensors=factors))


@pytest.mark.parametrize(("given", "pattern"), [({}, 6), ({"attention__sliding_window_pattern": 3}, 3)])
def test_gemma3_attends_globally_in_each_sixth_layer_unless_told(given, pattern):
    assert build_config(tiny_file("gemma3", layers=6, **given))["sliding_window_pattern"] == pattern


def test_gemma3_takes_the_pattern_as_a_flag_per_layer_too():
    flags = [True, True, False, True, True, False]
    assert build_config(tiny_file("gemma3", 6, attention__sliding_window_pattern=flags))["sliding_window_pattern"] == 3
    with pytest.raises(GGUFError, match="not a repeating pattern"):
        build_config(tiny_file("gemma3", 6, attention__sliding_window_pattern=[True, False, False, True, True, False]))


def test_gemma3_of_62_layers_is_the_27b_with_its_own_attention_scale():
    assert build_config(tiny_file("gemma3", 6, attention__key_length=16))["query_pre_attn_scalar"] == 16
    q = {f"blk.{i}.attn_q.weight": np.zeros((32, 64), np.float32) for i in range(62)}
    k = {"blk.0.attn_k.weight": np.zeros((16, 64), np.float32)}
    config = build_config(tiny_file("gemma3", 62, q | k, attention__key_length=8))
    assert (config["head_dim"], config["query_pre_attn_scalar"]) == (8, 16)
