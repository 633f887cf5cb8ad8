"""Embeddings of real tiny models: what a vector is made of, in how many pieces, and which models have none."""

import json
import math
from array import array
from dataclasses import replace

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxcel.engine.embedding import Embedding, embed, normalised, pooling_of, trunk_of
from mlxcel.engine.model import make_cache
from mlxcel.errors import NotSupported
from tests.tiny import tiny_model

PROMPT = array("i", [5, 9, 200, 31, 77, 8, 8, 120, 3, 64, 11])
FAMILIES = ("llama", "qwen3", "gemma3_text", "mamba2", "nemotron_h", "llama4", "deepseek_v3")


def close(ours, theirs):
    return all(
        math.isclose(a, b, rel_tol=1e-3, abs_tol=1e-3)
        for row, other in zip(ours, theirs, strict=True)
        for a, b in zip(row, other, strict=True)
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_the_states_are_those_that_the_models_own_head_makes_its_logits_of(family):
    net = tiny_model(family).net
    body = getattr(net, "language_model", net)
    states = mx.array(embed(tiny_model(family), PROMPT, "none"))
    head = getattr(body, "lm_head", None)
    logits = head(states) if head else trunk_of(net).embed_tokens.as_linear(states)
    wanted = net(mx.array(PROMPT)[None], cache=make_cache(net))[0]
    assert mx.argmax(logits, axis=-1).tolist() == mx.argmax(wanted, axis=-1).tolist()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("pooling", ["mean", "cls", "last", "none"])
def test_a_vector_does_not_depend_on_the_pieces_it_was_computed_in(family, pooling):
    model = tiny_model(family)
    assert close(embed(model, PROMPT, pooling, chunk=4), embed(model, PROMPT, pooling, chunk=100))


def test_pooling_takes_the_mean_the_first_or_the_last_of_the_states_of_all_tokens():
    model = tiny_model("llama")
    states = embed(model, PROMPT, "none")
    assert len(states) == len(PROMPT)
    mean = [sum(column) / len(states) for column in zip(*states, strict=True)]
    assert close(embed(model, PROMPT, "mean"), [mean])
    assert close(embed(model, PROMPT, "cls"), states[:1])
    assert close(embed(model, PROMPT, "last"), states[-1:])


def test_a_step_computes_one_chunk():
    embedding = Embedding(PROMPT, "mean", chunk=4)
    assert [embedding.step(tiny_model("llama")) for _ in range(3)] == [False, False, True]


def test_a_model_whose_body_gives_logits_or_is_not_found_has_no_embeddings():
    with pytest.raises(NotSupported, match="embeddings"):
        embed(tiny_model("gemma3n"), PROMPT, "mean")
    assert trunk_of(tiny_model("llama").net.model.layers[0]) is None


def test_the_models_own_files_say_its_pooling(tmp_path):
    model = tiny_model("llama")
    assert pooling_of(model) == "mean"
    assert pooling_of(replace(model, config={"pooling_type": 3})) == "last"
    assert pooling_of(replace(model, config={"pooling_type": 4})) == "mean", "rank is for rerankers"
    folder = tmp_path / "1_Pooling"
    folder.mkdir()
    modes = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True}
    (folder / "config.json").write_text(json.dumps(modes))
    assert pooling_of(replace(model, path=str(tmp_path))) == "last"


VECTORS = st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=8)


@given(vector=VECTORS, kind=st.integers(1, 6))
def test_a_normalised_vector_has_length_1_and_its_old_direction(vector, kind):
    out = normalised(vector, kind)
    if any(vector):
        assert math.isclose(sum(abs(x) ** kind for x in out), 1, rel_tol=1e-4)
        assert all(math.copysign(1, a) == math.copysign(1, b) for a, b in zip(vector, out, strict=True))
    else:
        assert out == vector


@given(vector=VECTORS)
def test_normalisation_0_scales_to_16_bits_and_minus_1_not_at_all(vector):
    assert normalised(vector, -1) == vector
    if any(vector):
        assert math.isclose(max(map(abs, normalised(vector, 0))), 32760, rel_tol=1e-6)
