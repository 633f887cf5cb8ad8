"""Loading a model: from a directory (mlx-lm) or a GGUF file to weights in the wanted dtype, ready to serve.

It owns what is known of the loaded model: its identity, context length, the end tokens, and by its own cache
objects whether its state is plain KV (`dense`) or something that cannot be cut at a token. It runs on the MLX
thread. It does not know requests or the store.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
from mlx.utils import tree_flatten

from mlxcel.engine.cpu import is_cpu
from mlxcel.engine.dry import BreakerIndex
from mlxcel.engine.grammar import Grammars
from mlxcel.engine.kv import Layout, layout_of
from mlxcel.engine.snapshot import StateShape, shape_of
from mlxcel.engine.tokenizer import Tokenizer
from mlxcel.errors import ModelError

Reuse = Literal["kv", "snapshots", "none"]
Dtype = Literal["auto", "float32", "float16", "bfloat16", "keep"]


@dataclass(frozen=True, slots=True)
class Proven:
    """What the self-test found to give the model's own results: sequences decoded in one batch, a prompt computed in
    pieces, stored state put back, and stored state put back only in part."""

    batches: bool = True
    splits: bool = True
    restores: bool = True
    cuts: bool = True


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """`nbytes` and `num_params` of the weights in memory; `layout` None means that its state is not plain KV, `shape`
    None that it keeps something unknown and can only be served cold."""

    id: str
    path: str
    net: Any
    config: dict[str, Any]
    tokenizer: Tokenizer
    dtype: str
    n_ctx_train: int
    num_params: int
    nbytes: int
    layout: Layout | None = None
    shape: StateShape | None = None
    proven: Proven = Proven()
    grammars: Grammars = field(init=False, compare=False, repr=False)
    breakers: BreakerIndex = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "grammars", Grammars(self.tokenizer))
        object.__setattr__(self, "breakers", BreakerIndex(self.tokenizer))

    @property
    def kind(self) -> str:
        """dense, windowed, recurrent or mixed, by what its layers keep; unknown otherwise."""
        return self.shape.kind if self.shape else "unknown"

    @property
    def reuse(self) -> Reuse:
        """How its state is stored and lent: any prefix of plain KV, whole snapshots, or not at all."""
        if not self.proven.restores:
            return "none"
        return "kv" if self.layout and self.proven.cuts else "snapshots" if self.shape else "none"

    @property
    def rope_boundary(self) -> int | None:
        """Longest sequence of the short RoPE table of a LongRoPE model (Phi-3, Phi-4); None for all others.

        KV of the two sides of it is kept apart by the key's rope_regime. mlx-lm 0.32 applies the long table to both,
        so with it this costs hits across the boundary and changes no answer.
        """
        scaling = self.config.get("rope_scaling") or {}
        if (scaling.get("rope_type") or scaling.get("type")) not in ("longrope", "su"):
            return None
        boundary = self.config.get("original_max_position_embeddings")
        return int(boundary) if boundary else None

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.vocab_size


def load_model(path: Path, *, dtype: Dtype, model_id: str, self_test: bool = True) -> LoadedModel:
    """Load and evaluate all weights. Raises ModelError with one line that names the path."""
    load = _load_gguf if path.is_file() else _load_directory
    net, config, backend, eos_ids, template = load(path, dtype)
    mx.eval(net)  # the private arrays too (RoPE tables): a lazy one would be bound to this thread
    text_config = {**config, **config.get("text_config", {})}
    weights = [array for _, array in tree_flatten(net.parameters())]
    vocab_size = probe(net)
    tokenizer = Tokenizer(backend, eos_ids=eos_ids, vocab_size=vocab_size, chat_template=template)
    model = LoadedModel(
        id=model_id,
        path=str(path),
        net=net,
        config=config,
        tokenizer=tokenizer,
        dtype=str(next(a.dtype for a in weights if mx.issubdtype(a.dtype, mx.floating))).removeprefix("mlx.core."),
        n_ctx_train=int(text_config.get("max_position_embeddings") or text_config.get("max_seq_len") or 1 << 20),
        num_params=_num_params(net),
        nbytes=sum(array.nbytes for array in weights),
    )
    return examined(model, self_test=self_test)


def examined(model: LoadedModel, *, self_test: bool = True) -> LoadedModel:
    """The same with what its layers keep and, unless the test is off, what was proven of them. Needs the MLX thread."""
    from mlxcel.engine.selftest import Subject, probe_length, prove

    layout, shape = layout_of(model.net, make_cache(model.net)), shape_of(model.net, make_cache(model.net))
    length = probe_length(shape.window if shape else 0, model.num_params, is_cpu())
    subject = Subject(model.net, model.vocab_size, layout, shape, length, model.dtype == "float32")
    return replace(model, layout=layout, shape=shape, proven=prove(subject) if self_test else Proven())


def make_cache(net: Any) -> list[Any]:
    """A fresh mlx-lm cache list for one sequence."""
    from mlx_lm.models.cache import make_prompt_cache

    return list(make_prompt_cache(net))


def probe(net: Any) -> int:
    """The width of the logits: the vocabulary as the model has it (config.json may say otherwise)."""
    logits = net(mx.array([[0]]), cache=make_cache(net))
    mx.eval(logits)
    return int(logits.shape[-1])


def _num_params(net: Any) -> int:
    from mlx_lm.utils import get_total_parameters

    return int(get_total_parameters(net))


def _wanted(dtype: Dtype) -> mx.Dtype | None:
    """None keeps what the checkpoint has. On the CPU float32 is 2 to 7 times faster than anything else."""
    if dtype == "auto":
        return mx.float32 if is_cpu() else None
    if dtype == "keep":
        return None
    return {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}[dtype]


def _load_gguf(path: Path, dtype: Dtype) -> tuple[Any, dict[str, Any], Any, Iterable[int], str | None]:
    from mlxcel.engine.gguf import load_gguf

    # 4-bit matmul on the CPU ignores the BLAS and is 20 times slower than float32 at prefill.
    keep_quantized = dtype == "keep" or (dtype != "float32" and not is_cpu())
    loaded = load_gguf(path, _wanted(dtype), keep_quantized)
    return loaded.model, loaded.config, loaded.tokenizer, loaded.eos_ids, loaded.chat_template


def _load_directory(path: Path, dtype: Dtype) -> tuple[Any, dict[str, Any], Any, Iterable[int], str | None]:
    from mlx_lm.utils import dequantize_model, load_tokenizer
    from mlx_lm.utils import load_model as load_mlx

    try:
        net, config = load_mlx(path, lazy=True)
        tokenizer = load_tokenizer(path)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError, RuntimeError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ModelError(f"{path}: cannot load the model: {reason[:300]}") from error
    wanted = _wanted(dtype)
    if wanted is not None:
        if is_cpu() and "quantization" in config:
            net = dequantize_model(net)
        net.set_dtype(wanted)
    backend = tokenizer._tokenizer
    eos_ids = _eos_ids(path, config, tokenizer)
    template = backend.chat_template if isinstance(backend.chat_template, str) else None
    return net, config, backend, eos_ids, template


def _eos_ids(path: Path, config: dict[str, Any], tokenizer: Any) -> set[int]:
    """Everything that any of the three places calls an end token: a set that replaces another one runs on."""
    ids: set[int] = set(tokenizer.eos_token_ids)
    places = [config, config.get("text_config", {})]
    generation = path / "generation_config.json"
    if generation.exists():
        places.append(json.loads(generation.read_text()))
    for place in places:
        value = place.get("eos_token_id")
        ids.update(value if isinstance(value, list) else [] if value is None else [value])
    return ids
