"""Tiny random models of each kind, built in memory on real mlx-lm code: four layers, hidden 64, vocabulary 320.

Random weights make a wrong KV row, position or mask move the log-probabilities by far more than rounding does.
"""

from __future__ import annotations

import functools
import json
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mlxcel.engine.model import LoadedModel, examined
from mlxcel.engine.tokenizer import Tokenizer

VOCAB = 320
EOS = 258
WINDOW = 64

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def base(model_type: str, **changes: Any) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "vocab_size": VOCAB,
        "head_dim": 32,
        "rope_theta": 10000.0,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    } | changes


MLA = {
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "qk_nope_head_dim": 32,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
    "n_group": 1,
    "topk_group": 1,
}
LINEAR = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": base("llama"),
    "qwen3": base("qwen3"),
    "deepseek_v3": base("deepseek_v3", **MLA),
    "deepseek_v32": base("deepseek_v32", **MLA, index_head_dim=32, index_n_heads=2, index_topk=32),
    "gemma2": base("gemma2", query_pre_attn_scalar=32),
    "gemma3_text": base(
        "gemma3_text",
        sliding_window=WINDOW,
        sliding_window_pattern=4,
        query_pre_attn_scalar=32,
        rope_local_base_freq=10000.0,
    ),
    "llama4": {
        "model_type": "llama4",
        "text_config": base(
            "llama4_text",
            attention_bias=False,
            attention_chunk_size=WINDOW,
            interleave_moe_layer_step=1,
            intermediate_size_mlp=128,
            num_experts_per_tok=1,
            num_local_experts=4,
            rope_scaling=None,
            use_qk_norm=True,
        ),
    },
    "mamba2": {
        "model_type": "mamba2",
        "num_heads": 4,
        "head_dim": 32,
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 128,
        "state_size": 16,
        "num_hidden_layers": 4,
        "layer_norm_epsilon": 1e-5,
        "conv_kernel": 4,
        "n_groups": 1,
        "use_bias": False,
        "use_conv_bias": True,
        "tie_word_embeddings": False,
        "time_step_limit": [0.0, 1e9],
        "time_step_rank": 4,
    },
    "qwen3_next": base(
        "qwen3_next",
        **LINEAR,
        num_experts=4,
        num_experts_per_tok=2,
        decoder_sparse_step=1,
        shared_expert_intermediate_size=32,
        mlp_only_layers=[],
        moe_intermediate_size=32,
        partial_rotary_factor=0.25,
    ),
    "lfm2": {
        "model_type": "lfm2",
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 64,
        "block_multiple_of": 16,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "block_ff_dim": 128,
        "full_attn_idxs": [1, 3],
    },
}
DENSE = ("llama", "qwen3", "deepseek_v3", "deepseek_v32", "gemma2")
COLD = ("gemma3_text", "llama4", "mamba2", "qwen3_next", "lfm2")


def byte_backend() -> Backend:
    """A byte-level tokenizer without merges: one token a byte, and three special ones."""
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    return backend


def byte_tokenizer(vocab_size: int = VOCAB) -> Tokenizer:
    fast = PreTrainedTokenizerFast(
        tokenizer_object=byte_backend(), eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHATML
    )
    return Tokenizer(fast, eos_ids=[EOS], vocab_size=vocab_size, chat_template=CHATML)


def random_weights(net: Any, seed: int) -> list[tuple[str, mx.array]]:
    """Default initialisation, louder, with noise in what starts constant and decays that remember tens of tokens."""
    mx.random.seed(seed)
    out = []
    for name, weight in tree_flatten(net.parameters()):
        if not mx.issubdtype(weight.dtype, mx.floating):
            out.append((name, weight))
        elif name.endswith("A_log"):
            out.append((name, mx.log(mx.random.uniform(0.02, 0.3, weight.shape))))
        elif name.endswith(("dt_bias", "dt_proj.bias")):
            out.append((name, -2.5 + 0.3 * mx.random.normal(weight.shape)))
        elif weight.size > 1 and (mx.max(weight) - mx.min(weight)).item() == 0:
            out.append((name, weight.astype(mx.float32) + 0.1 * mx.random.normal(weight.shape)))
        elif weight.ndim >= 2 and "embed" not in name:
            out.append((name, weight.astype(mx.float32) * 2.0))
        else:
            out.append((name, weight.astype(mx.float32)))
    return out


@functools.cache
def network(family: str, seed: int = 0) -> Any:
    from mlx_lm.utils import _get_classes

    config = json.loads(json.dumps(FAMILIES[family]))
    model_class, args_class = _get_classes(config)
    net = model_class(args_class.from_dict(config))
    net.load_weights(random_weights(net, seed))
    mx.eval(net.parameters())
    return net


@functools.cache
def tiny_model(family: str) -> LoadedModel:
    net = network(family)
    model = LoadedModel(
        id=f"tiny-{family}",
        path=f"tiny-{family}",
        net=net,
        config=FAMILIES[family],
        tokenizer=byte_tokenizer(),
        dtype="float32",
        n_ctx_train=4096,
        num_params=sum(a.size for _, a in tree_flatten(net.parameters())),
        nbytes=sum(a.nbytes for _, a in tree_flatten(net.parameters())),
    )
    return examined(model)
