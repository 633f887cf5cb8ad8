"""Tiny models of the four architectures, written as GGUF and as the safetensors folder that mlx-lm reads."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np
from gguf import GGMLQuantizationType as Kind
from gguf.quants import quantize
from mlx.utils import tree_flatten
from tokenizers import pre_tokenizers

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, LAYERS, VOCAB = 64, 4, 2, 16, 96, 2, 320
CHAT_TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"

GGML_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
GEMMA3_NAMES = GGML_NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
TOP_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["1 2", "12 3", "h e", "he l", "l o", "hel lo", "Ġ hello"]


def byte_vocabulary() -> tuple[list[str], list[int]]:
    """Token texts and types: three special tokens, the 256 bytes, then what the merges make."""
    tokens = SPECIAL + sorted(pre_tokenizers.ByteLevel.alphabet()) + [m.replace(" ", "") for m in MERGES]
    return tokens, [3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL))


def config(arch: str, tied: bool) -> dict[str, Any]:
    common = {
        "model_type": "gemma3_text" if arch == "gemma3" else arch,
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": tied,
    }
    if arch == "gemma3":
        common |= {"sliding_window": 8, "sliding_window_pattern": 2, "query_pre_attn_scalar": HEAD_DIM}
    return common


def random_weights(arch: str, tied: bool, seed: int = 0) -> dict[str, np.ndarray]:
    """mlx-lm's parameter names to float32 arrays; norms are multiples of 1/64, so that Gemma's 1 + w is exact."""
    family = importlib.import_module(f"mlx_lm.models.{config(arch, tied)['model_type']}")
    model = family.Model(family.ModelArgs.from_dict(config(arch, tied)))
    rng, weights = np.random.default_rng(seed), {}
    for name, array in tree_flatten(model.parameters()):
        if "norm" in name:
            weights[name] = rng.integers(-16, 17, array.shape).astype(np.float32) / 64 + (arch != "gemma3")
        elif not (tied and name.startswith("lm_head")):
            weights[name] = rng.standard_normal(array.shape, np.float32) / 4
    return weights


def write_safetensors(folder: Path, arch: str, tied: bool, weights: dict[str, np.ndarray], **extra: Any) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config(arch, tied) | extra))
    mx.save_safetensors(str(folder / "model.safetensors"), {k: mx.array(v) for k, v in weights.items()})


def ggml_tensors(arch: str, weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same weights under ggml's names and in its order, as llama.cpp's converter writes them."""
    tensors, names = {}, GEMMA3_NAMES if arch == "gemma3" else GGML_NAMES
    for name, array in weights.items():
        module, _, leaf = name.rpartition(".")
        if arch == "llama" and module.endswith(("q_proj", "k_proj")):
            heads = HEADS if module.endswith("q_proj") else KV_HEADS
            array = array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
        if arch == "gemma3" and "norm" in name:
            array = array + 1
        if module in TOP_NAMES:
            tensors[f"{TOP_NAMES[module]}.{leaf}"] = array
        else:
            _, _, layer, part = module.split(".", 3)
            tensors[f"blk.{layer}.{names[part]}.{leaf}"] = array
    return tensors


def write_gguf(
    path: Path,
    arch: str = "llama",
    weights: dict[str, np.ndarray] | None = None,
    *,
    kinds: dict[str, Kind] | None = None,
    pre: str = "gpt-2",
    drop: tuple[str, ...] = (),
    extra: dict[str, np.ndarray] | None = None,
) -> Path:
    """`kinds` quantises tensors by ggml name; `drop` leaves out metadata keys (without prefix) and tensors."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in _hyperparameters(arch).items():
        if key not in drop:
            writer.add_key_value(f"{arch}.{key}", value, gguf.GGUFValueType.get_type(value))
    tokens, types = byte_vocabulary()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(CHAT_TEMPLATE)
    tensors = ggml_tensors(arch, weights or random_weights(arch, tied=True)) | (extra or {})
    for name, array in tensors.items():
        if name not in drop:
            kind = (kinds or {}).get(name, Kind.F32)
            writer.add_tensor(name, quantize(np.ascontiguousarray(array), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _hyperparameters(arch: str) -> dict[str, int | float]:
    values: dict[str, int | float] = {
        "context_length": 512,
        "embedding_length": HIDDEN,
        "block_count": LAYERS,
        "feed_forward_length": FFN,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": HEAD_DIM,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
    }
    if arch == "gemma3":
        values |= {"attention.sliding_window": 8, "attention.sliding_window_pattern": 2}
    return values
