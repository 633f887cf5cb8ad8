"""A GGUF file's metadata as the config that mlx-lm's model classes take.

Knows the architectures llama, qwen2, qwen3 and gemma3 and nothing of weights beyond their shapes. Invariant: what
the config says agrees with the tensors that are there, so a model built from it is no larger than the file says,
and metadata that would change the arithmetic in a way mlx-lm cannot follow is refused, not ignored.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mlxcel.engine.gguf_file import GGUFError, GGUFFile

MODEL_TYPES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3_text"}
GEMMA3_27B_LAYERS = 62  # the one size whose attention is scaled by hidden_size/heads instead of head_dim


def build_config(file: GGUFFile) -> dict[str, Any]:
    """The config of `mlx_lm.models.<model_type>`; raises GGUFError when it cannot be told or is not supported."""
    arch = file.text("general.architecture")
    if arch not in MODEL_TYPES:
        raise GGUFError(f"architecture {arch!r} is not supported ({', '.join(MODEL_TYPES)} are)")
    heads = file.count(f"{arch}.attention.head_count")
    hidden = file.count(f"{arch}.embedding_length")
    theta = file.number(f"{arch}.rope.freq_base", 10000.0)
    config: dict[str, Any] = {
        "model_type": MODEL_TYPES[arch],
        "vocab_size": file.tensor("token_embd.weight").shape[0],
        "hidden_size": hidden,
        "intermediate_size": file.count(f"{arch}.feed_forward_length"),
        "num_hidden_layers": file.count(f"{arch}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": file.count(f"{arch}.attention.head_count_kv", heads),
        "head_dim": file.count(f"{arch}.attention.key_length", hidden // heads),
        "max_position_embeddings": file.count(f"{arch}.context_length"),
        # float32 metadata: 1e-05, not 9.999999747378752e-06
        "rms_norm_eps": float(f"{file.number(f'{arch}.attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": theta,
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }
    _check_shapes(file, config)
    _check_attention(file, arch, config)
    config["rope_scaling"] = _rope_scaling(file, arch, config["head_dim"], theta)
    if f"{arch}.pooling_type" in file.metadata:  # an embedding model
        config["pooling_type"] = file.integer(f"{arch}.pooling_type")
    if arch == "gemma3":
        config |= _gemma3(file, config)
    if arch == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
        config["mlp_bias"] = "blk.0.ffn_up.bias" in file.tensors
    return config


def _check_shapes(file: GGUFFile, config: dict[str, Any]) -> None:
    """Ties every size of the config to a tensor; load_weights(strict=True) compares the rest with it."""
    layers, hidden, head_dim = config["num_hidden_layers"], config["hidden_size"], config["head_dim"]
    expected = {
        "token_embd.weight": (config["vocab_size"], hidden),
        "blk.0.attn_q.weight": (config["num_attention_heads"] * head_dim, hidden),
        "blk.0.attn_k.weight": (config["num_key_value_heads"] * head_dim, hidden),
        "blk.0.ffn_up.weight": (config["intermediate_size"], hidden),
    }
    for name, shape in expected.items():
        if file.tensor(name).shape != shape:
            raise GGUFError(f"tensor {name} has the shape {file.tensor(name).shape}, the metadata says {shape}")
    for layer in range(layers):
        file.tensor(f"blk.{layer}.attn_q.weight")


def _check_attention(file: GGUFFile, arch: str, config: dict[str, Any]) -> None:
    head_dim = config["head_dim"]
    if config["num_attention_heads"] % config["num_key_value_heads"]:
        raise GGUFError("the number of attention heads is not a multiple of the number of key/value heads")
    for key in (f"{arch}.rope.dimension_count", f"{arch}.attention.value_length"):
        if file.count(key, head_dim) != head_dim:
            raise GGUFError(f"{key} differs from the head size {head_dim}, which is not supported")
    for key in (f"{arch}.attn_logit_softcapping", f"{arch}.final_logit_softcapping", f"{arch}.attention.scale"):
        if key in file.metadata:
            raise GGUFError(f"metadata key {key} is not supported")


def _rope_scaling(file: GGUFFile, arch: str, head_dim: int, theta: float) -> dict[str, Any] | None:
    kind = file.text(f"{arch}.rope.scaling.type", "none")
    if "rope_freqs.weight" in file.tensors:
        return _llama3_scaling(file, head_dim, theta)
    if kind == "none" and f"{arch}.rope.scale_linear" in file.metadata:  # how linear scaling was written at first
        return {"rope_type": "linear", "factor": file.number(f"{arch}.rope.scale_linear")}
    if kind == "none":
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": file.number(f"{arch}.rope.scaling.factor")}
    if kind == "yarn":
        return _yarn_scaling(file, arch)
    raise GGUFError(f"RoPE scaling {kind!r} is not supported")


def _yarn_scaling(file: GGUFFile, arch: str) -> dict[str, Any]:
    for name in ("attn_factor", "yarn_ext_factor", "yarn_attn_factor"):
        if file.number(f"{arch}.rope.scaling.{name}", 1.0) != 1.0:
            raise GGUFError(f"metadata key {arch}.rope.scaling.{name} other than 1 is not supported")
    return {
        "rope_type": "yarn",
        "factor": file.number(f"{arch}.rope.scaling.factor"),
        "original_max_position_embeddings": file.count(f"{arch}.rope.scaling.original_context_length"),
        "beta_fast": file.number(f"{arch}.rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": file.number(f"{arch}.rope.scaling.yarn_beta_slow", 1.0),
    }


def _llama3_scaling(file: GGUFFile, head_dim: int, theta: float) -> dict[str, Any]:
    """Names the Llama 3 scaling whose per-frequency divisors rope_freqs.weight holds.

    The converter bakes low_freq_factor 1, high_freq_factor 4 and the original context into those divisors;
    the formula is that of transformers' _compute_llama3_parameters.
    """
    tensor = file.tensor("rope_freqs.weight")
    if tensor.kind.name != "F32" or tensor.shape != (head_dim // 2,):
        raise GGUFError("tensor rope_freqs.weight is not a float32 for each pair of the head")
    divisors = tensor.data.view("<f4").astype(np.float64)
    factor = float(divisors.max())
    with np.errstate(all="ignore"):  # a damaged file may hold any number
        wavelen = 2 * np.pi * theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
        for original in (8192, 4096, 16384, 32768):
            smooth = (original / wavelen - 1.0) / 3.0
            between = 1 / ((1 - smooth) / factor + smooth)
            expected = np.where(wavelen > original, factor, np.where(wavelen < original / 4, 1.0, between))
            if np.allclose(expected, divisors, rtol=1e-3):
                return {
                    "rope_type": "llama3",
                    "factor": factor,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": original,
                }
    raise GGUFError("tensor rope_freqs.weight is not a known Llama 3 RoPE scaling")


def _gemma3(file: GGUFFile, config: dict[str, Any]) -> dict[str, Any]:
    layers = config["num_hidden_layers"]
    pattern = _sliding_window_pattern(file)
    if pattern > layers:
        raise GGUFError(f"every {pattern}th layer attends globally, but there are {layers} layers")
    scale_by = config["hidden_size"] / config["num_attention_heads"]
    return {
        "sliding_window": file.count("gemma3.attention.sliding_window"),
        "sliding_window_pattern": pattern,
        "rope_local_base_freq": file.number("gemma3.rope.freq_base_swa", 10000.0),
        "query_pre_attn_scalar": scale_by if layers == GEMMA3_27B_LAYERS else config["head_dim"],
    }


def _sliding_window_pattern(file: GGUFFile) -> int:
    """Each how many-th layer attends globally. A file says nothing (6), the number, or a flag per layer."""
    key = "gemma3.attention.sliding_window_pattern"
    if not isinstance(file.metadata.get(key), list):
        return file.count(key, 6)
    sliding = file.items(key, bool)
    pattern = sliding.index(False) + 1 if False in sliding else 0
    if not pattern or any(flag != bool((i + 1) % pattern) for i, flag in enumerate(sliding)):
        raise GGUFError(f"metadata key {key} is not a repeating pattern")
    return pattern
