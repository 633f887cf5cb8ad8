"""A GGUF file is the same model as its safetensors, and a bad file is one clear line."""

from __future__ import annotations

import random
from contextlib import suppress
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

from mlxcel.engine.gguf import is_gguf, load_gguf
from mlxcel.errors import ModelError
from tests.engine import tiny_gguf
from tests.engine.tiny_gguf import random_weights, write_gguf, write_safetensors

ARCHS = ["llama", "qwen2", "qwen3", "gemma3"]
PROMPT = mx.array([[5, 9, 2, 77, 41, 8, 300, 11, 12, 13, 14, 200]])  # longer than Gemma's window of 8


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("tied", [True, False])
def test_logits_equal_those_of_the_same_weights_in_safetensors(tmp_path, arch, tied):
    weights = random_weights(arch, tied)
    write_safetensors(tmp_path / "folder", arch, tied, weights)
    expected, _ = load_model(tmp_path / "folder")
    loaded = load_gguf(write_gguf(tmp_path / "m.gguf", arch, weights), mx.float32, keep_quantized=False)
    assert mx.array_equal(loaded.model(PROMPT), expected(PROMPT))
    assert loaded.config["tie_word_embeddings"] is tied


def test_llama_biases_are_loaded_in_the_order_of_their_rows(tmp_path):
    weights = random_weights("llama", tied=True)
    for layer in range(tiny_gguf.LAYERS):
        for part, rows in (("q", 64), ("k", 32), ("v", 32), ("o", 64)):
            name = f"model.layers.{layer}.self_attn.{part}_proj.bias"
            weights[name] = np.arange(rows, dtype=np.float32) / 16
    write_safetensors(tmp_path / "folder", "llama", True, weights, attention_bias=True)
    expected, _ = load_model(tmp_path / "folder")
    loaded = load_gguf(write_gguf(tmp_path / "m.gguf", "llama", weights), mx.float32, keep_quantized=False)
    assert mx.array_equal(loaded.model(PROMPT), expected(PROMPT))


def test_llama3_rope_factors_are_the_scaling_that_made_them(tmp_path):
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    weights = random_weights("llama", tied=True)
    write_safetensors(tmp_path / "folder", "llama", True, weights, rope_scaling=scaling)
    expected, _ = load_model(tmp_path / "folder")
    rope = expected.layers[0].self_attn.rope
    plain = 10000.0 ** (np.arange(0, 16, 2, dtype=np.float32) / 16)
    factors = {"rope_freqs.weight": np.array(rope._freqs, np.float32) / plain}
    loaded = load_gguf(write_gguf(tmp_path / "m.gguf", "llama", weights, extra=factors), mx.float32, False)
    assert loaded.config["rope_scaling"] == scaling
    assert mx.array_equal(loaded.model(PROMPT), expected(PROMPT))


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0])
def test_kept_quantised_modules_hold_exactly_the_weights_of_the_blocks(tmp_path, arch, kind):
    weights = random_weights(arch, tied=True)
    names = [name for name, array in tiny_gguf.ggml_tensors(arch, weights).items() if array.ndim == 2]
    path = write_gguf(tmp_path / "m.gguf", arch, weights, kinds=dict.fromkeys(names, kind))
    kept, dense = (load_gguf(path, mx.float32, keep).model for keep in (True, False))
    expected = dict(tree_flatten(dense.parameters()))
    for name, module in kept.named_modules():
        if isinstance(module, (nn.QuantizedLinear, nn.QuantizedEmbedding)):
            got = mx.dequantize(module.weight, module.scales, module.biases, module.group_size, module.bits)
            assert mx.array_equal(got, expected.pop(f"{name}.weight")), name
    assert all("norm" in name for name in expected), "every matrix was kept quantised"
    assert mx.allclose(kept(PROMPT), dense(PROMPT), rtol=1e-4, atol=1e-4)


def test_dequantised_weights_are_those_of_ggml(tmp_path):
    weights = random_weights("qwen2", tied=True)
    path = write_gguf(tmp_path / "m.gguf", "qwen2", weights, kinds={"blk.0.ffn_up.weight": Kind.Q4_1})
    module = load_gguf(path, mx.float32, keep_quantized=False).model.layers[0].mlp.up_proj
    source = weights["model.layers.0.mlp.up_proj.weight"]
    assert np.array_equal(np.array(module.weight), dequantize(quantize(source, Kind.Q4_1), Kind.Q4_1))


def test_one_file_may_mix_block_types_and_keeps_what_it_can(tmp_path):
    kinds = {
        "token_embd.weight": Kind.Q8_0,
        "blk.0.attn_q.weight": Kind.Q4_0,
        "blk.0.ffn_up.weight": Kind.Q5_1,
        "blk.0.ffn_gate.weight": Kind.F16,
        "blk.1.ffn_up.weight": Kind.BF16,
    }
    model = load_gguf(write_gguf(tmp_path / "m.gguf", kinds=kinds), mx.float32, keep_quantized=True).model
    first = model.layers[0]
    assert [m.bits for m in (model.model.embed_tokens, first.self_attn.q_proj, first.mlp.up_proj)] == [8, 4, 5]
    assert type(first.mlp.gate_proj) is type(model.layers[1].mlp.up_proj) is nn.Linear


@pytest.mark.parametrize(("dtype", "expected"), [(None, mx.float16), (mx.bfloat16, mx.bfloat16)])
@pytest.mark.parametrize("keep_quantized", [True, False])
def test_dense_weights_and_scales_have_the_dtype_asked_for_or_float16(tmp_path, dtype, expected, keep_quantized):
    path = write_gguf(tmp_path / "m.gguf", kinds={"blk.0.attn_q.weight": Kind.Q4_0})
    model = load_gguf(path, dtype, keep_quantized).model
    assert {array.dtype for _, array in tree_flatten(model.parameters())} - {mx.uint32} == {expected}


def test_float16_scales_dequantise_to_the_weights_rounded_once(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", kinds={"blk.0.attn_v.weight": Kind.Q8_0})
    kept, dense = (load_gguf(path, dtype, True).model.layers[0].self_attn.v_proj for dtype in (None, mx.float32))
    assert mx.array_equal(kept.scales.astype(mx.float32), dense.scales)
    assert mx.array_equal(kept.biases.astype(mx.float32), dense.biases)


def test_tokenizer_end_ids_and_chat_template_come_with_the_model(tmp_path):
    loaded = load_gguf(write_gguf(tmp_path / "m.gguf"), mx.float32, keep_quantized=False)
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("hello 123")) == "hello 123"
    assert loaded.eos_ids == [2, 0]
    assert loaded.chat_template == tiny_gguf.CHAT_TEMPLATE


def test_gguf_is_known_by_magic_or_by_name(tmp_path):
    named, magic, other = tmp_path / "text.GGUF", tmp_path / "blob", tmp_path / "config.json"
    named.write_text("hello")
    magic.write_bytes(b"GGUF\3\0\0\0")
    other.write_text("{}")
    assert is_gguf(named) and is_gguf(magic) and is_gguf(tmp_path / "missing.gguf")
    assert not is_gguf(other) and not is_gguf(tmp_path) and not is_gguf(tmp_path / "missing")


def refused(path: Path) -> str:
    """The cause that a ModelError gives after the file's name, having checked the form of the line."""
    with pytest.raises(ModelError) as caught:
        load_gguf(path, mx.float32, keep_quantized=False)
    message = str(caught.value)
    assert message.startswith(f"cannot load {path}: ")
    assert message.isprintable() and len(message) < 1000
    return message.removeprefix(f"cannot load {path}: ")


@pytest.mark.parametrize("content", [b"", b"GG", b"hello, this is text\n" * 100])
def test_a_file_of_something_else_is_refused(tmp_path, content):
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    assert refused(path) == "not a GGUF file"


def test_a_missing_path_and_a_directory_are_refused(tmp_path):
    assert refused(tmp_path / "missing.gguf") == "No such file or directory"
    assert refused(tmp_path) == "Is a directory"


def test_a_truncated_copy_is_refused(tmp_path):
    path = write_gguf(tmp_path / "m.gguf")
    whole = path.read_bytes()
    for nbytes, cause in (
        (len(whole) - 1, "(truncated)"),
        (len(whole) // 2, "(truncated)"),
        (100, "inside its header"),
    ):
        path.write_bytes(whole[:nbytes])
        assert cause in refused(path)


def test_an_unsupported_architecture_is_named(tmp_path):
    path = write_gguf(tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes().replace(b"llama", b"mamba"))
    assert refused(path) == "architecture 'mamba' is not supported (llama, qwen2, qwen3, gemma3 are)"


def test_an_unsupported_pre_tokenizer_is_named(tmp_path):
    assert "pre-tokenizer 'viking' is not supported" in refused(write_gguf(tmp_path / "m.gguf", pre="viking"))


@pytest.mark.parametrize("key", ["block_count", "attention.head_count", "attention.layer_norm_rms_epsilon"])
def test_a_missing_metadata_key_is_named(tmp_path, key):
    assert refused(write_gguf(tmp_path / "m.gguf", drop=(key,))) == f"metadata key llama.{key} is missing"


@pytest.mark.parametrize("name", ["token_embd.weight", "blk.1.attn_q.weight"])
def test_a_missing_tensor_is_named(tmp_path, name):
    assert refused(write_gguf(tmp_path / "m.gguf", drop=(name,))) == f"tensor {name} is missing"


def test_what_mlx_lm_misses_is_said(tmp_path):
    assert "model.layers.1.mlp.down_proj.weight" in refused(
        write_gguf(tmp_path / "m.gguf", drop=("blk.1.ffn_down.weight",))
    )


def test_a_tensor_that_would_be_left_out_is_refused(tmp_path):
    experts = {"blk.0.ffn_up_exps.weight": np.zeros((4, 96, 64), np.float32)}
    assert refused(write_gguf(tmp_path / "m.gguf", extra=experts)).startswith("tensor blk.0.ffn_up_exps.weight is not")


def test_a_long_or_unprintable_name_does_not_break_the_line(tmp_path):
    noise = {"odd\n\x1bname" * 200: np.zeros((1, 1), np.float32)}
    assert refused(write_gguf(tmp_path / "m.gguf", extra=noise)).startswith("tensor odd nameodd name")


def test_metadata_that_disagrees_with_the_tensors_is_refused(tmp_path):
    wide = {"blk.0.attn_q.weight": np.zeros((128, 64), np.float32)}
    cause = refused(write_gguf(tmp_path / "m.gguf", extra=wide))
    assert cause == "tensor blk.0.attn_q.weight has the shape (128, 64), the metadata says (64, 64)"


def test_a_copy_cut_anywhere_is_refused(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", "gemma3")
    whole = path.read_bytes()
    for nbytes in random.Random(0).sample(range(len(whole)), 50):
        path.write_bytes(whole[:nbytes])
        assert refused(path)


def test_a_copy_with_a_damaged_byte_loads_or_is_refused(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", kinds={"blk.0.attn_q.weight": Kind.Q4_0})
    whole, rng, num_loaded = path.read_bytes(), random.Random(0), 0
    header_nbytes = whole.index(b"blk.1.ffn_norm.weight")
    for i in range(50):
        at = rng.randrange(len(whole) if i % 5 == 0 else header_nbytes)
        path.write_bytes(whole[:at] + bytes([whole[at] ^ rng.randrange(1, 256)]) + whole[at + 1 :])
        with suppress(ModelError):
            load_gguf(path, mx.float32, keep_quantized=True)
            num_loaded += 1
    assert 0 < num_loaded < 50
