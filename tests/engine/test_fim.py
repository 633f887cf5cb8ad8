"""Prompts for filling a gap: every family's tokens, the layout, and what is cut when there is too much."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxcel.engine.fim import FAMILIES, Fim, Gap, Room, fim_prompt, find_fim

PRE, SUF, MID, BOS = 1001, 1002, 1003, 1000
FIM = Fim(PRE, SUF, MID, None, None, frozenset())


def ids(*tokens) -> array:
    return array("i", tokens)


def prompt(prefix=(), suffix=(), begun=(), others=(), around=1000, room=1000, bos=(), suffix_first=False):
    gap = Gap(*(ids(*tokens) for tokens in (prefix, suffix, begun, others)))
    return fim_prompt(FIM, gap, Room(around, room), ids(*bos), suffix_first=suffix_first).tolist()


@pytest.mark.parametrize("names", FAMILIES, ids=lambda names: names[0])
def test_every_family_is_known_by_its_own_three_tokens(names):
    found = find_fim(dict(zip(names, (7, 8, 9), strict=True)) | {"<s>": 1})
    assert (found.prefix, found.suffix, found.middle, found.ends) == (7, 8, 9, frozenset())
    for missing in names:
        assert find_fim({name: 1 for name in names if name != missing}) is None


def test_what_else_is_known_of_a_repository_ends_a_generation():
    names = dict(zip(FAMILIES[0], (7, 8, 9), strict=True))
    found = find_fim(names | {"<|repo_name|>": 10, "<|file_sep|>": 11, "<|fim_pad|>": 12, "<|im_end|>": 13})
    assert (found.repository, found.separator, found.ends) == (10, 11, {10, 11, 12})


def test_three_tokens_of_different_families_are_none():
    assert find_fim({"<|fim_prefix|>": 1, "<fim_suffix>": 2, "<MID>": 3}) is None


def test_the_layout():
    known = {"prefix": (1, 2), "suffix": (3, 4), "begun": (5,), "others": (6,), "bos": (BOS,)}
    assert prompt(**known) == [BOS, 6, PRE, 1, 2, 5, SUF, 3, 4, MID]
    assert prompt(**known, suffix_first=True) == [BOS, 6, SUF, 3, 4, PRE, 1, 2, 5, MID]
    assert prompt() == [PRE, SUF, MID]


def test_the_end_of_the_prefix_and_the_beginning_of_the_suffix_are_kept():
    cut = prompt(range(100), range(200, 300), others=range(300, 400), around=40, room=16)
    at = cut.index(PRE), cut.index(SUF)
    others, before, after = cut[: at[0]], cut[at[0] + 1 : at[1]], cut[at[1] + 1 : -1]
    assert others[-1] == 399 and 14 <= len(others) <= 16
    assert before[-1] == 99 and 27 <= len(before) <= 30
    assert after == list(range(200, 208))


def test_whoever_types_begins_with_the_same_tokens_most_of_the_time():
    beginnings = [prompt(range(n), around=400)[1] for n in range(1000, 1300)]
    assert len(set(beginnings)) <= 300 // 37 + 2


@given(st.tuples(*[st.integers(0, 60)] * 4), st.integers(0, 80), st.integers(0, 40), st.booleans())
def test_a_prompt_is_never_longer_than_its_room(lengths, around, room, suffix_first):
    prefix, suffix, begun, others = (range(n) for n in lengths)
    made = prompt(prefix, suffix, begun, others, around, room, suffix_first=suffix_first)
    assert made[-1] == MID and made.count(PRE) == made.count(SUF) == 1
    assert len(made) <= max(around, 3 * (around // 4) + len(begun)) + room + 3
    if lengths[0] <= 3 * (around // 4) and lengths[3] <= room:
        assert sum(token < 1000 for token in made) >= lengths[0] + lengths[2] + lengths[3], "nothing is cut that fits"
