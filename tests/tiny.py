"""Tiny random models of each kind, built in memory on real mlx-lm code: four layers, hidden 64, vocabulary 320.

Random weights make a wrong KV row, position or mask move the log-probabilities by far more than rounding does.
"""

from __future__ import annotations

import functools
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mlxcel.engine.model import LoadedModel, examined
from mlxcel.engine.tokenizer import Tokenizer
from tests.models.families import VOCAB, config

EOS = 258

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


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


def random_weights(net: Any) -> list[tuple[str, mx.array]]:
    """Default initialisation, louder, with noise in what starts constant and decays that remember tens of tokens."""
    bounded = {path for path, module in net.named_modules() if getattr(module, "lower_bound", None) is not None}
    out = []
    for name, weight in tree_flatten(net.parameters()):
        is_bounded = name.rpartition(".")[0] in bounded
        if not mx.issubdtype(weight.dtype, mx.floating):
            out.append((name, weight))
        elif name.endswith("A_log"):
            low, high = (0.8, 1.2) if is_bounded else (0.02, 0.3)
            out.append((name, mx.log(mx.random.uniform(low, high, weight.shape))))
        elif (start := _start(name, is_bounded)) is not None:
            out.append((name, start + 0.3 * mx.random.normal(weight.shape)))
        elif weight.size > 1 and (mx.max(weight) - mx.min(weight)).item() == 0:
            out.append((name, weight.astype(mx.float32) + _noise(weight) * mx.random.normal(weight.shape)))
        elif weight.ndim >= 2 and "embed" not in name:
            out.append((name, weight.astype(mx.float32) * 2.0))
        else:
            out.append((name, weight.astype(mx.float32)))
    return out


def _start(name: str, is_bounded: bool) -> float | None:
    """Where a decay has to start to remember tens of tokens, and the norm of what RWKV reads from its state.

    A bounded decay is exp(lower_bound * sigmoid(...)): it remembers where the sigmoid is nearly closed.
    """
    if name.endswith(("dt_bias", "dt_proj.bias")):
        return -5.5 if is_bounded else -2.5
    if name.endswith("recurrent_param"):
        return -5.0
    if name.endswith("attn.g_norm.weight"):
        return 1.0
    return -4.0 if "w_lora" in name and name.endswith("bias") else None


def _noise(weight: mx.array) -> float:
    """Zeros become as loud as other weights, ones stay near one."""
    if abs(weight.reshape(-1)[0].item()) > 1e-9:
        return 0.1
    return 0.3 if weight.ndim == 1 else float(weight.shape[-1]) ** -0.5


@functools.cache
def network(family: str, seed: int = 0, **changes: Any) -> Any:
    from mlx_lm.utils import _get_classes

    changed = config(family, **changes)
    model_class, args_class = _get_classes(changed)
    mx.random.seed(seed)  # before the default initialisation, or weights depend on what was built earlier
    net = model_class(args_class.from_dict(changed))
    net.load_weights(random_weights(net))
    # Private constants too, which are no parameters: what is left lazy can only be computed in this thread.
    mx.eval([value for module in net.modules() for value in module.values() if isinstance(value, mx.array)])
    mx.eval(net.parameters())
    return net


@functools.cache
def tiny_model(family: str, **changes: Any) -> LoadedModel:
    net = network(family, **changes)
    model = LoadedModel(
        id=f"tiny-{family}",
        path=f"tiny-{family}",
        net=net,
        config=config(family, **changes),
        tokenizer=byte_tokenizer(),
        dtype="float32",
        n_ctx_train=4096,
        num_params=sum(a.size for _, a in tree_flatten(net.parameters())),
        nbytes=sum(a.nbytes for _, a in tree_flatten(net.parameters())),
    )
    return examined(model)
