"""A GGUF file as an mlx-lm model in memory: weights, config and tokenizer, without a converted copy on disk.

`load_gguf` is the one place where all that can be wrong with a file becomes a `ModelError` of one line. Tensors
are converted one at a time, the largest first, so the peak is little above the result. Knows ggml's tensor names and
the two ways in which its weights differ from mlx-lm's (the row order of Llama's q and k, Gemma's norms); what
blocks hold is in gguf_blocks, what metadata means in gguf_config and gguf_tokenizer.
"""

from __future__ import annotations

import importlib
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from gguf.quants import dequantize
from mlx.nn.layers.base import Module
from mlx.nn.layers.quantized import quantize

from mlxcel.engine.gguf_blocks import GROUP_SIZE, Affine, pack_bits, unpack
from mlxcel.engine.gguf_config import build_config
from mlxcel.engine.gguf_file import MAGIC, GGUFError, GGUFFile, Tensor, read_gguf
from mlxcel.engine.gguf_tokenizer import build_tokenizer
from mlxcel.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MODULES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
}
GEMMA3_LAYER_MODULES = LAYER_MODULES | {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
ROPE_FACTORS = "rope_freqs.weight"  # read by gguf_config
MAX_MESSAGE = 500

Scalar = TypeVar("Scalar", bound=np.generic)
Weights = dict[str, mx.array]


@dataclass(frozen=True, slots=True)
class GGUFModel:
    """`config` as in an mlx-lm config.json; `eos_ids` end a generation, EOS first."""

    model: Module
    config: dict[str, Any]
    tokenizer: PreTrainedTokenizerFast
    eos_ids: list[int]
    chat_template: str | None


def is_gguf(path: str | Path) -> bool:
    """Whether `path` is to be loaded as GGUF: a file with its magic, or anything else named .gguf but a directory."""
    if os.path.isdir(path):
        return False
    if str(path).lower().endswith(".gguf"):
        return True
    try:
        with open(path, "rb") as stream:
            return stream.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def load_gguf(path: str | Path, dtype: mx.Dtype | None, keep_quantized: bool) -> GGUFModel:
    """Load a GGUF model; parameters are evaluated. None for `dtype` is float16. Raises ModelError.

    `keep_quantized` repacks Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K and Q5_K matrices into MLX affine quantisation
    (group_size 32, scales in `dtype`); without it, and for all other tensors, weights are dequantised to `dtype`.
    """
    try:
        return _load(read_gguf(path), dtype or mx.float16, keep_quantized)
    except OSError as error:
        raise ModelError(_one_line(f"cannot load {path}: {error.strerror or error}")) from error
    except (ValueError, ArithmeticError) as error:  # GGUFError, and what mlx-lm says of weights or config
        raise ModelError(_one_line(f"cannot load {path}: {error}")) from error


def _load(file: GGUFFile, dtype: mx.Dtype, keep_quantized: bool) -> GGUFModel:
    """In the order of cost, so that what cannot be served is refused early."""
    config = build_config(file)
    places = _places(file, config)
    tokenizer, eos_ids = build_tokenizer(file)
    template = file.text("tokenizer.chat_template", "")
    weights, bits = _convert(file, config, places, dtype, keep_quantized)
    model = _build_model(config, weights, bits)
    return GGUFModel(model, config, tokenizer, eos_ids, template or None)


def _places(file: GGUFFile, config: dict[str, Any]) -> dict[str, str]:
    """Tensor name to parameter path; a tensor without a place means arithmetic that mlx-lm would leave out."""
    table = GEMMA3_LAYER_MODULES if config["model_type"] == "gemma3_text" else LAYER_MODULES
    modules = MODULES | {
        f"blk.{layer}.{ours}": f"model.layers.{layer}.{theirs}"
        for layer in range(config["num_hidden_layers"])
        for ours, theirs in table.items()
    }
    places = {}
    for name in file.tensors.keys() - {ROPE_FACTORS}:
        stem, _, leaf = name.rpartition(".")
        if stem not in modules or leaf not in ("weight", "bias"):
            raise GGUFError(f"tensor {name} is not supported in a model of type {config['model_type']}")
        places[name] = f"{modules[stem]}.{leaf}"
    return places


def _convert(
    file: GGUFFile, config: dict[str, Any], places: dict[str, str], dtype: mx.Dtype, keep_quantized: bool
) -> tuple[Weights, dict[str, int]]:
    """All parameters, evaluated, and the bits of each module that stays quantised, by its path."""
    weights: Weights = {}
    bits: dict[str, int] = {}
    # The largest first, while little else is held: an embedding can be half of a small model.
    for name in sorted(places, key=lambda name: math.prod(file.tensors[name].shape), reverse=True):
        tensor, place = file.tensors[name], places[name]
        module = place.rpartition(".")[0]
        heads = _interleaved_heads(name, config)
        with np.errstate(all="ignore"):  # a damaged file may hold any number; numpy would warn
            affine = unpack(tensor.kind, tensor.data) if tensor.data.ndim == 2 else None
            if affine is not None and keep_quantized:
                bits[module] = affine.bits
                converted = {f"{module}.{part}": array for part, array in _quantized(affine, heads, dtype).items()}
            else:
                array = _deinterleave(_dequantize(tensor) if affine is None else affine.dense(), heads)
                if _is_gemma_norm(name, config):
                    array = array - np.float32(1)  # GGUF holds 1 + weight, mlx-lm adds the 1 itself
                converted = {place: mx.array(array).astype(dtype)}
        mx.eval(converted)
        weights |= converted
    return weights, bits


def _interleaved_heads(name: str, config: dict[str, Any]) -> int | None:
    """The heads whose rows are in ggml's order for RoPE on neighbours, which only Llama's q and k are."""
    if config["model_type"] != "llama":
        return None
    sizes = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    return sizes.get(name.split(".")[-2])


def _is_gemma_norm(name: str, config: dict[str, Any]) -> bool:
    return config["model_type"] == "gemma3_text" and name.endswith("norm.weight")


def _quantized(affine: Affine, heads: int | None, dtype: mx.Dtype) -> Weights:
    return {
        "weight": mx.array(pack_bits(_deinterleave(affine.q, heads), affine.bits)),
        "scales": mx.array(_deinterleave(affine.scales, heads)).astype(dtype),
        "biases": mx.array(_deinterleave(affine.biases, heads)).astype(dtype),
    }


def _dequantize(tensor: Tensor) -> npt.NDArray[np.float32]:
    try:
        return np.asarray(dequantize(tensor.data, tensor.kind), np.float32)
    except NotImplementedError:
        raise GGUFError(f"tensor {tensor.name} is of type {tensor.kind.name}, which is not supported") from None


def _deinterleave(rows: npt.NDArray[Scalar], heads: int | None) -> npt.NDArray[Scalar]:
    """Each head's rows from ggml's order (pairs side by side) to mlx-lm's (first halves, then second halves)."""
    if heads is None:
        return rows
    if len(rows) % (2 * heads):
        raise GGUFError(f"a matrix of {len(rows)} rows cannot be split into {heads} heads")
    paired = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return paired.swapaxes(1, 2).reshape(rows.shape)


def _build_model(config: dict[str, Any], weights: Weights, bits: dict[str, int]) -> Module:
    family = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model: Module = family.Model(family.ModelArgs.from_dict(config))
    if hasattr(model, "sanitize"):
        weights = model.sanitize(weights)

    def quantization(path: str, _: Module) -> dict[str, int] | bool:
        return {"group_size": GROUP_SIZE, "bits": bits[path]} if path in bits else False

    if bits:
        quantize(model, class_predicate=quantization)
    model.load_weights(list(weights.items()), strict=True)
    model.eval()
    mx.eval(model)  # all its arrays, the RoPE frequencies that are no parameters too
    mx.clear_cache()  # the float32 copies
    return model


def _one_line(text: str) -> str:
    """What a damaged file holds can be long and unprintable."""
    text = "".join(c if c.isprintable() else " " for c in text)
    text = " ".join(text.split())
    return text if len(text) <= MAX_MESSAGE else f"{text[:MAX_MESSAGE]}..."
