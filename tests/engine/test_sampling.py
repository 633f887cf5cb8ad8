"""Samplers: each against the plain one, in any order, and what a chain of them draws."""

import asyncio
import math
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mlxcel.engine.candidates import STEPS, Candidates, Moment
from mlxcel.engine.dry import MAX_LOSS, BreakerIndex, losses
from mlxcel.engine.sampling import greedy, make_bias, make_sampler
from mlxcel.engine.sequence import ORDER, Adaptive, Dry, Mirostat, Sampling, Xtc
from mlxcel.engine.tokenizer import Tokenizer
from tests.engine.plain_samplers import PLAIN, candidates, dry_losses, softmax
from tests.engine.test_reuse import generation, prompt, serving
from tests.harness import GREEDY, collect
from tests.tiny import byte_tokenizer, tiny_model

VOCAB = 50
NEUTRAL = Sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
NOBODY = np.empty(0, np.int32)

# Values at which a sampler does something.
CHOICES = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.3, 0.8, 2.0]),
    dynatemp_range=st.sampled_from([0.0, 0.3, 3.0]),
    dynatemp_exponent=st.sampled_from([0.5, 1.0, 2.0]),
    top_k=st.integers(1, VOCAB + 5),
    top_p=st.sampled_from([0.0, 0.2, 0.7, 0.95]),
    min_p=st.sampled_from([0.01, 0.05, 0.3, 1.0]),
    typical_p=st.sampled_from([0.0, 0.2, 0.7, 0.95]),
    top_n_sigma=st.sampled_from([0.3, 1.1, 1.9]),
    min_keep=st.integers(0, 6),
    xtc=st.builds(Xtc, st.sampled_from([0.5, 1.0]), st.sampled_from([0.0, 0.03, 0.1, 0.4])),
    dry=st.builds(
        Dry,
        st.sampled_from([0.5, 2.0]),
        st.sampled_from([1.0, 1.75]),
        st.integers(0, 3),
        st.sampled_from([5, 20, 64]),
        st.sampled_from([{}, {3: ((),)}, {3: ((4,), (4, 5)), 2: ((),)}]),
    ),
    repeat_penalty=st.sampled_from([1.0, 1.5, 0.7]),
    repeat_last_n=st.sampled_from([3, 64]),
    presence_penalty=st.sampled_from([0.0, 0.6]),
    frequency_penalty=st.sampled_from([0.2, -0.4]),
)
SEEDS = st.integers(0, 10_000)
EXACT = settings(derandomize=True, deadline=None)  # float32 and Python's numbers part where a limit is hit by a hair


def random_logits(seed, num_banned=0):
    """As a model might give them; some may be forbidden, as by a grammar."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 2.5, VOCAB).astype(np.float32)
    logits[rng.permutation(VOCAB)[:num_banned]] = -np.inf
    return logits


def random_tokens(seed, count=40):
    """Of few kinds, so that they repeat themselves."""
    return np.random.default_rng(seed).integers(0, 6, count).astype(np.int32)


def left(candidates):
    """{token: logit} of those that are left."""
    logits = candidates.logits[0].tolist()
    pairs = enumerate(logits) if candidates.ids is None else zip(candidates.ids[0].tolist(), logits, strict=True)
    return {token: logit for token, logit in pairs if logit > -math.inf}


def run(names, sampling, logits, recent, chance=0.4):
    now = Candidates(mx.array(logits)[None])
    for name in names:
        if (step := STEPS[name](sampling)) is not None:
            now = step(now, Moment(recent, VOCAB, mx.array(chance)))
    return now


def run_plainly(names, sampling, logits, recent, chance=0.4):
    now = candidates(logits)
    for name in names:
        if STEPS[name](sampling) is not None:
            now = PLAIN[name](now, sampling, recent, chance)
    return dict(now)


def draws(sampling, logits, count):
    """What one sequence draws from the same logits again and again."""
    sampler = make_sampler(sampling)
    return [int(sampler(mx.array(logits)[None], NOBODY)[0].item()) for _ in range(count)]


# --- each sampler


@pytest.mark.parametrize("name", PLAIN)
@settings(EXACT, max_examples=60)
@given(sampling=CHOICES, seed=SEEDS, num_banned=st.sampled_from([0, 5, 40, 48, 49]))
def test_a_sampler_does_what_the_plain_one_does(name, sampling, seed, num_banned):
    logits, recent = random_logits(seed, num_banned), random_tokens(seed)
    assert left(run([name], sampling, logits, recent)) == pytest.approx(
        run_plainly([name], sampling, logits, recent), rel=1e-4, abs=1e-4
    )


@settings(EXACT, max_examples=200)
@given(sampling=CHOICES, seed=SEEDS, order=st.lists(st.sampled_from(ORDER), unique=True))
def test_samplers_in_any_order_do_what_the_plain_ones_do_in_that_order(sampling, seed, order):
    logits, recent = random_logits(seed, 5), random_tokens(seed)
    ours = left(run(order, sampling, logits, recent))
    assert ours == pytest.approx(run_plainly(order, sampling, logits, recent), rel=1e-3, abs=1e-3)


@pytest.mark.parametrize("name", PLAIN)
def test_a_neutral_value_leaves_the_sampler_out(name):
    neutral = replace(NEUTRAL, dry=Dry(), xtc=Xtc(probability=0.0), typical_p=1.0, top_n_sigma=-1.0)
    assert STEPS[name](neutral) is None
    assert STEPS[name](replace(neutral, repeat_penalty=2.0, repeat_last_n=0, dry=Dry(1.0, last_n=0))) is None


def test_the_order_decides():
    logits = np.log(np.array([0.5, 0.3, 0.2], np.float32))
    hot = replace(NEUTRAL, temperature=5.0, min_p=0.5)
    assert set(left(run(["min_p", "temperature"], hot, logits, NOBODY))) == {0, 1}
    assert set(left(run(["temperature", "min_p"], hot, logits, NOBODY))) == {0, 1, 2}


@settings(max_examples=100, deadline=None)
@given(sampling=CHOICES, seed=SEEDS, num_banned=st.sampled_from([0, 30, 47]))
def test_min_keep_is_kept_by_every_filter_but_top_k_and_top_n_sigma(sampling, seed, num_banned):
    logits, least = random_logits(seed, num_banned), min(max(sampling.min_keep, 1), VOCAB - num_banned)
    for name in ("top_p", "min_p", "typ_p", "xtc"):
        assert len(left(run([name], sampling, logits, NOBODY, chance=0.0))) >= least


# --- DRY


def spelled(text):
    return np.array([ord(char) for char in text], np.int32)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("abccbcyabc", {"c": 3, "b": 1, "y": 2}),  # llama.cpp's own example
        ("abcdefg", {}),
        ("aaaa", {"a": 3}),
        ("abab", {"a": 2}),
        ("a", {}),
        ("", {}),
    ],
)
def test_dry_counts_how_long_a_repetition_already_is(text, wanted):
    found = losses(spelled(text), Dry(multiplier=1.0, base=2.0, allowed_length=1))
    assert found == {ord(char): 2.0 ** (length - 1) for char, length in wanted.items()}


@settings(max_examples=300, deadline=None)
@given(dry=CHOICES.map(lambda s: s.dry), seed=SEEDS, count=st.integers(0, 70))
def test_dry_is_the_plain_one(dry, seed, count):
    recent = random_tokens(seed, count)
    assert losses(recent, dry) == pytest.approx(dry_losses(recent.tolist(), dry))


def test_dry_does_not_look_behind_a_breaker_nor_take_it_away():
    dry = Dry(multiplier=1.0, base=2.0, allowed_length=2)
    assert set(losses(spelled("abcd:abc"), dry)) == {ord("d")}
    comma = replace(dry, breakers={ord(","): ((),)})
    assert losses(spelled("abcd:a,c"), comma) == {}, "what has followed the breaker is too short"
    assert losses(spelled("ab,xab"), comma) == {}, "the next token would be the breaker"
    pair = replace(dry, breakers={ord("a"): ((ord("b"),),)})
    assert losses(spelled("xabcdz.abcd"), pair) == {ord("z"): 1.0}, "c and d alone count"


def test_a_long_repetition_never_costs_infinitely_much():
    same = np.ones(5000, np.int32)
    for base in (1.0, 1.0000001, 1.75, 1e6):
        found = losses(same, Dry(multiplier=1e3, base=base, last_n=2**31 - 1))
        assert set(found) == {1} and 0 < found[1] <= MAX_LOSS


def merging_tokenizer():
    """Bytes, and the tokens ab, b: and a:."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {text: i for i, text in enumerate([*alphabet, "ab", "b:", "a:"])}
    backend = Backend(models.BPE(vocab=vocab, merges=[("a", "b"), ("b", ":"), ("a", ":")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(
        PreTrainedTokenizerFast(tokenizer_object=backend), eos_ids=[], vocab_size=len(vocab), chat_template=None
    ), vocab


def test_breakers_are_found_in_whatever_tokens_hold_them_or_begin_them():
    tokenizer, vocab = merging_tokenizer()
    find = BreakerIndex(tokenizer).find
    assert find((":",)) == {vocab[":"]: ((),), vocab["b:"]: ((),), vocab["a:"]: ((),)}
    assert find(("b:",)) == {vocab["b:"]: ((),), vocab["b"]: ((vocab[":"],),), vocab["ab"]: ((vocab[":"],),)}
    assert find(("b:", ":"))[vocab["b"]] == ((vocab[":"],),)
    assert find(("",)) == find(()) == {}


def test_a_breaker_may_be_split_within_a_character():
    tokenizer = byte_tokenizer()
    first, second, dot = (tokenizer.encode(text, add_special=False)[i] for text, i in (("é", 0), ("é", 1), (".", 0)))
    assert BreakerIndex(tokenizer).find(("é.",)) == {first: ((second, dot),)}


def test_breakers_that_are_long_are_cut():
    tokenizer = byte_tokenizer()
    found = BreakerIndex(tokenizer).find(("x" * 300,))
    assert max(len(tail) for tails in found.values() for tail in tails) == 20


# --- chains


@pytest.mark.parametrize(
    "sampling",
    [
        GREEDY,
        Sampling(temperature=0.0, top_k=5, top_n_sigma=1.0, min_keep=3),
        Sampling(temperature=0.0, mirostat=Mirostat(2), xtc=Xtc(1.0)),
        Sampling(temperature=0.0, order=("temperature", "xtc", "penalties"), xtc=Xtc(1.0), repeat_penalty=2.0),
        Sampling(temperature=0.0, order=(*ORDER, "adaptive_p"), adaptive=Adaptive(0.5)),
        Sampling(temperature=0.0, logit_bias=((1, 2.0),)),
    ],
    ids=str,
)
def test_what_can_only_be_the_likeliest_shares_one_sampler(sampling):
    assert make_sampler(sampling) is greedy


def test_at_temperature_zero_what_comes_before_still_has_its_say():
    logits = np.array([2.0, 1.9, 0.0], np.float32)
    seen = np.array([0], np.int32)
    penalised = make_sampler(Sampling(temperature=0.0, presence_penalty=1.0))
    assert penalised(mx.array(logits)[None], seen)[0].item() == 1
    assert set(draws(Sampling(temperature=0.0, xtc=Xtc(1.0, 0.1)), logits, 5)) == {1}


def test_a_temperature_that_the_order_does_not_name_has_no_effect():
    logits = np.zeros(3, np.float32)
    assert set(draws(Sampling(temperature=0.0, order=("top_p",)), logits, 50)) == {0, 1, 2}


def test_mirostat_leaves_no_other_sampler_but_the_temperature():
    only = Sampling(mirostat=Mirostat(2), repeat_penalty=2.0, dry=Dry(1.0))
    assert make_sampler(only).looks_back == 0


def test_a_sampler_looks_back_as_far_as_its_penalties_do():
    assert make_sampler(Sampling()).looks_back == 0
    assert make_sampler(Sampling(repeat_penalty=1.1, repeat_last_n=7)).looks_back == 7
    assert make_sampler(Sampling(repeat_penalty=1.1, repeat_last_n=7, dry=Dry(1.0, last_n=9))).looks_back == 9


@settings(EXACT, max_examples=5)
@given(sampling=CHOICES.filter(lambda s: s.temperature), seed=SEEDS)
def test_tokens_are_drawn_as_often_as_they_are_likely(sampling, seed):
    sampling = replace(sampling, dynatemp_range=0.0, xtc=Xtc(), min_keep=4, order=ORDER, seed=seed)
    logits, count = random_logits(seed), 800
    kept = run_plainly(ORDER, sampling, logits, NOBODY)
    expected = dict(zip(kept, softmax(list(kept.items())), strict=True))
    found = Counter(draws(sampling, logits, count))
    assert found.keys() <= expected.keys()
    for token, p in expected.items():
        assert abs(found[token] / count - p) < 5 * math.sqrt(p * (1 - p) / count) + 1 / count


def test_xtc_happens_as_often_as_it_was_asked_to():
    logits = np.log(np.array([0.6, 0.4, 1e-9], np.float32))
    found = Counter(draws(replace(NEUTRAL, xtc=Xtc(0.5, 0.1), seed=3), logits, 1000))
    assert abs(found[0] - 300) < 75, "half of the time the second is the only one left"


def test_a_seed_is_a_sequence_of_its_own():
    logits = random_logits(1)
    one, again, other = (draws(replace(NEUTRAL, temperature=2.0, seed=seed), logits, 30) for seed in (1, 1, 2))
    assert one == again != other


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("tau", [1.5, 3.0, 5.0])
def test_mirostat_brings_the_mean_surprise_to_its_target(version, tau):
    """Over a distribution with a long tail, whose surprise uncut is well above."""
    ranks = np.arange(1, 3001)
    logits = np.random.default_rng(1).permutation(-1.05 * np.log(ranks)).astype(np.float32)
    sampler = make_sampler(replace(NEUTRAL, mirostat=Mirostat(version, tau, 0.1), seed=5))
    bits = []
    for _ in range(600):
        token, drawn_from = sampler(mx.array(logits)[None], NOBODY)
        bits.append(-float(drawn_from.logprobs(len(logits))[token.item()].item()) / math.log(2))
    assert abs(sum(bits[100:]) / 500 - tau) < 0.25


def test_mirostat_courses_are_their_sequences_own():
    logits, sampling = random_logits(3), replace(NEUTRAL, mirostat=Mirostat(2, 2.0, 0.5), seed=1)
    alone = draws(sampling, logits, 20)
    one, other = make_sampler(sampling), make_sampler(replace(sampling, seed=2))
    beside = []
    for _ in range(20):
        other(mx.array(logits)[None], NOBODY)
        beside.append(int(one(mx.array(logits)[None], NOBODY)[0].item()))
    assert beside == alone


@pytest.mark.parametrize("target", [0.2, 0.4])
def test_adaptive_p_chooses_tokens_of_about_its_target(target):
    logits = np.log(np.array([0.5, 0.25, 0.15, 0.06, 0.04], np.float32))
    sampling = replace(NEUTRAL, order=(*ORDER, "adaptive_p"), adaptive=Adaptive(target, 0.9))
    probs = np.exp(logits)[draws(sampling, logits, 500)]
    assert abs(probs.mean() - target) < 0.06
    assert draws(replace(sampling, order=ORDER), logits, 20) == draws(replace(NEUTRAL), logits, 20)


def test_what_a_token_was_drawn_from_is_told():
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    _, drawn_from = make_sampler(replace(NEUTRAL, top_k=2, temperature=1.0))(mx.array(logits)[None], NOBODY)
    assert np.exp(drawn_from.logprobs(4)).tolist() == pytest.approx([0.625, 0.375, 0, 0], abs=1e-6)
    _, whole = make_sampler(NEUTRAL)(mx.array(logits)[None], NOBODY)
    assert np.exp(whole.logprobs(4)).tolist() == pytest.approx([0.5, 0.3, 0.15, 0.05], abs=1e-6)


def test_a_bias_is_added_before_all_else():
    (add,) = make_bias(Sampling(logit_bias=((2, 5.0), (0, -math.inf))))
    assert add(mx.zeros((1, 3))).tolist() == [[-math.inf, 0.0, 5.0]]
    assert make_bias(Sampling()) == []


EXTREMES = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 1e-5, 1.0, 1e3]),
    dynatemp_range=st.sampled_from([0.0, 1e3]),
    dynatemp_exponent=st.sampled_from([-100.0, 0.0, 100.0]),
    top_k=st.sampled_from([0, 1, 2**31 - 1]),
    top_p=st.sampled_from([0.0, 1.0]),
    min_p=st.sampled_from([0.0, 1e-38, 1.0]),
    typical_p=st.sampled_from([0.0, 1.0]),
    top_n_sigma=st.sampled_from([-1.0, 1e-9, 1e3]),
    min_keep=st.sampled_from([0, 2**31 - 1]),
    xtc=st.builds(Xtc, st.sampled_from([0.0, 1.0]), st.sampled_from([0.0, 0.5])),
    dry=st.builds(Dry, st.sampled_from([-1e3, 1e3]), st.sampled_from([1.0, 1e6]), st.sampled_from([0, 2**31 - 1])),
    mirostat=st.builds(Mirostat, st.integers(0, 2), st.sampled_from([0.0, 1e3]), st.sampled_from([-1e3, 1e3])),
    adaptive=st.builds(Adaptive, st.sampled_from([0.0, 1.0]), st.sampled_from([0.0, 0.99])),
    order=st.permutations([*ORDER, "adaptive_p"]).map(tuple),
    repeat_penalty=st.sampled_from([1e-3, 1e3]),
    presence_penalty=st.sampled_from([-1e3, 1e3]),
)


@settings(max_examples=150, deadline=None)
@given(sampling=EXTREMES, kind=st.sampled_from(["usual", "equal", "floored", "all banned", "not numbers", "huge"]))
def test_whatever_is_asked_of_whatever_logits_some_token_comes_out(sampling, kind):
    logits = {
        "usual": random_logits(1),
        "equal": np.zeros(VOCAB),
        "floored": np.where(np.arange(VOCAB) == 7, -1e30, -np.inf),
        "all banned": np.full(VOCAB, -np.inf),
        "not numbers": np.full(VOCAB, np.nan),
        "huge": random_logits(2) * 1e4,
    }[kind]
    sampler = make_sampler(sampling)
    for _ in range(3):
        token, _ = sampler(mx.array(logits.astype(np.float32))[None], random_tokens(1)[-sampler.looks_back :])
        assert token.shape == (1,) and 0 <= token.item() < VOCAB
        if kind == "floored":
            assert token.item() == 7, "what a grammar leaves is taken"


# --- in the decode batch


@pytest.fixture(scope="module")
def mlx_thread():
    with ThreadPoolExecutor(1) as pool:
        yield pool
        pool.submit(mx.clear_streams).result()


@pytest.fixture(scope="module")
def model(mlx_thread):
    return mlx_thread.submit(tiny_model, "llama").result()


SEEDED = [
    Sampling(temperature=1.0, seed=1),
    Sampling(temperature=1.2, seed=2, repeat_penalty=1.3, frequency_penalty=0.5, repeat_last_n=20),
    Sampling(temperature=1.5, seed=3, dry=Dry(2.0, allowed_length=1), xtc=Xtc(0.5, 0.05)),
    Sampling(seed=4, mirostat=Mirostat(1, 3.0)),
    Sampling(seed=5, mirostat=Mirostat(2, 3.0)),
    Sampling(seed=6, typical_p=0.8, top_n_sigma=2.0, dynatemp_range=0.5, min_keep=2),
    Sampling(seed=7, order=("temperature", "top_k", "penalties", "adaptive_p"), adaptive=Adaptive(0.3)),
    Sampling(temperature=0.0, presence_penalty=1.0, logit_bias=((5, 1.0),)),
]


async def test_every_sampler_gives_the_same_text_alone_and_in_a_batch(model, mlx_thread):
    async with serving(model, mlx_thread) as scheduler:
        asked = [generation(prompt(i, 20 + i), False, 12, s) for i, s in enumerate(SEEDED)]
        alone = [await collect(scheduler, g) for g in asked]
        beside = await asyncio.gather(*(collect(scheduler, g) for g in asked))
    assert [list(r.tokens) for r in alone] == [list(r.tokens) for r in beside]


async def test_penalties_see_the_prompts_last_tokens_and_every_token_since(model, mlx_thread):
    last, asked = 30, prompt(2, 40)
    shy = Sampling(temperature=0.0, presence_penalty=1e3, repeat_last_n=last)
    async with serving(model, mlx_thread) as scheduler:
        result = await collect(scheduler, generation(asked, False, 25, shy))
    said = [*asked.tolist(), *result.tokens]
    for end in range(len(asked), len(said)):
        assert said[end] not in said[end - last : end]


async def test_dry_ends_what_would_be_repeated_for_ever(model, mlx_thread):
    async with serving(model, mlx_thread) as scheduler:
        two_words = replace(GREEDY, logit_bias=((65, 100.0), (66, 100.0)))
        dried = replace(two_words, dry=Dry(1e3, last_n=200))
        usual, dried = [await collect(scheduler, generation(prompt(1, 40), False, 60, s)) for s in (two_words, dried)]
    triples = [Counter(zip(r.tokens, r.tokens[1:], r.tokens[2:], strict=False)) for r in (usual, dried)]
    assert max(triples[0].values()) > 1 and max(triples[1].values()) == 1


async def test_the_chances_of_the_draw_are_told_to_who_asks_for_them(model, mlx_thread):
    drawn = [replace(generation(prompt(1), False, 5, s), of_draw=True) for s in (GREEDY, Sampling(top_k=2, seed=1))]
    async with serving(model, mlx_thread) as scheduler:
        sure, of_two, raw = await asyncio.gather(
            *(collect(scheduler, g) for g in [*drawn, generation(prompt(1), False, 5)])
        )
    for entry in sure.logprobs:
        assert entry.logprob == 0.0 and [p for _, p in entry.top] == [0.0, -math.inf, -math.inf]
    for entry in of_two.logprobs:
        assert sum(math.exp(p) for _, p in entry.top) == pytest.approx(1.0, abs=1e-5) and entry.top[2][1] == -math.inf
    assert all(math.isfinite(p) for entry in raw.logprobs for _, p in entry.top)
