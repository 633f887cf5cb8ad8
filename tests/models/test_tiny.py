"""The tiny models are worth testing with: they build, and what they kept of a history shows in what they say next.

A layer that forgets, or whose state is drowned by the others, would let a wrong restored state pass for a right one.
"""

import copy
import random

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from tests.models.families import FAMILIES, RUNNABLE, VOCAB, config
from tests.tiny import network

TOKENS = tuple(random.Random(1).choices(range(VOCAB), k=70))
LOUD = 0.01
"""Ten times what two computations of the same log-probability may differ by."""

MIDDLE = range(20, 40)
END = range(60, 70)
KEEPS_ONLY_THE_END = {"lfm2", "lfm2_moe", "gear", "longcat_flash_ngram", "llama4"}
"""Short convolutions and n-grams look back a few tokens; llama4 began a new chunk at token 64."""


def changed(*positions):
    return tuple((token + 7) % VOCAB if i in positions else token for i, token in enumerate(TOKENS))


def logprobs(net, tokens, cache):
    logits = net(mx.array(tokens)[None], cache=cache)[0, -1].astype(mx.float32)
    assert mx.all(mx.isfinite(logits)).item()
    return logits - mx.logsumexp(logits)


def after(net, tokens):
    cache = make_prompt_cache(net)
    return logprobs(net, tokens, cache), cache


def distance(a, b):
    return mx.max(mx.abs(a - b)).item()


@pytest.mark.parametrize("family", RUNNABLE)
def test_logits_are_finite_and_an_early_token_shows(family):
    net = network(family)
    assert distance(after(net, TOKENS)[0], after(net, changed(5))[0]) > LOUD


@pytest.mark.parametrize("family", RUNNABLE)
def test_the_state_of_every_layer_shows(family):
    net = network(family)
    where = END if family in KEEPS_ONLY_THE_END else MIDDLE
    (_, right), (_, wrong) = after(net, TOKENS), after(net, changed(*where))
    said = logprobs(net, TOKENS[:1], copy.deepcopy(right))
    for layer in range(len(right)):
        mixed = copy.deepcopy(right)
        mixed[layer] = copy.deepcopy(wrong[layer])
        assert distance(said, logprobs(net, TOKENS[:1], mixed)) > LOUD, f"layer {layer}"


@pytest.mark.parametrize(
    ("family", "member", "limit"),
    [
        ("llama_swa", "sliding_window", "max_size"),
        ("gemma3", "sliding_window", "max_size"),
        ("mimo_v2_flash", "sliding_window_size", "max_size"),
        ("llama4", "attention_chunk_size", "chunk_size"),
    ],
)
def test_a_smaller_window_reaches_the_caches(family, member, limit):
    caches = make_prompt_cache(network(family, **{member: 16}))
    assert {getattr(cache, limit) for cache in caches if hasattr(cache, limit)} == {16}
    assert config(family) == FAMILIES[family]


def test_weights_do_not_depend_on_what_was_built_before():
    def weights(family):
        return dict(tree_flatten(network.__wrapped__(family).parameters()))

    mx.random.seed(5)
    first, _, again = weights("qwen3_next"), weights("llama"), weights("qwen3_next")
    assert all(mx.array_equal(first[name], again[name]).item() for name in first)
