"""An explanation agrees with the lookup it explains, and names what would have to change."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxcel.cache.explain import explain
from mlxcel.cache.lookup import Hit, MissReason
from tests.cache.test_store import SEQUENCES, context, donate, run, store

ABC = {"a": context("a"), "b": context("b"), "other": context("a", model_id="n"), "salted": context("a", salt="x")}


@given(
    stored=st.lists(st.tuples(st.sampled_from(sorted(ABC)), SEQUENCES), max_size=8),
    asked=SEQUENCES,
    who=st.sampled_from(sorted(ABC)),
    block=st.sampled_from([None, 1, 4]),
)
def test_an_explanation_says_what_the_lookup_then_does(stored, asked, who, block):
    s = store(block_size=block)
    for name, sequence in stored:
        donate(s, ABC[name], sequence)
    before = s.stats()
    told = explain(s, ABC[who], asked, 0)
    assert s.stats() == before
    found = s.lookup(ABC[who], asked, 0)
    if isinstance(found, Hit):
        assert told.reason is None and told.matched == found.length and told.best is found.match.entry
        assert told.same_session == found.match.same_session
    else:
        assert told.reason is found.reason and told.matched == 0
    if told.best is not None:
        assert told.best.context.salt == ABC[who].salt
        assert told.best_tokens[: told.common] == asked[: told.common]


def test_the_first_difference_is_where_the_prompts_part():
    s = store()
    donate(s, context(), run(20))
    told = explain(s, context(), run(13) + run(10, 90), 0)
    assert (told.first_difference, told.matched, told.blocks_floored) == (13, 12, 1)


@pytest.mark.parametrize(
    ("change", "differences"),
    [
        ({"model_id": "n"}, (MissReason.MODEL,)),
        ({"model_id": "n", "rope_regime": 1}, (MissReason.MODEL, MissReason.ROPE)),
    ],
)
def test_a_miss_across_keys_names_every_dimension_that_differs(change, differences):
    s = store()
    donate(s, context(), run(20))
    told = explain(s, context(**change), run(20), 0)
    assert told.key_differences == differences and told.common == 20 and told.reason is differences[0]


def test_a_differing_salt_is_not_revealed():
    s = store()
    donate(s, context(salt="tenant a"), run(20))
    told = explain(s, context(salt="tenant b"), run(20), 0)
    assert told.reason is MissReason.EMPTY and told.best is None and told.key_differences == ()


def test_pins_keep_entries_from_lru_and_ttl_until_unpinned_or_reset():
    s = store(max_entries=2, ttl=10)
    pinned = donate(s, context(), run(8))
    assert s.pin(pinned)
    for first in (100, 200, 300):
        donate(s, context(), run(8, first), now=first)
    assert s.find(context(), run(8)) is pinned
    assert isinstance(s.lookup(context(), run(9), 1000), Hit)
    s.unpin(pinned)
    s.sweep(2000)
    assert s.num_entries == 0
    assert s.pin(donate(s, context(), run(8)))
    assert s.reset()[1] == 1


def test_pins_hold_at_most_half_of_the_capacity():
    s = store(capacity_bytes=8 * 20)
    assert s.pin(donate(s, context(), run(6)))
    assert not s.pin(donate(s, context(), run(6, 100)))
    assert not donate(s, context(), run(6, 100)).pinned


def test_a_pinned_prompt_outlives_the_longer_entry_of_the_sequence_that_made_it():
    s = store()
    pinned = donate(s, context(), run(8))
    s.pin(pinned)
    from tests.segments import TokenSegment

    s.insert(context(), run(12), 8, TokenSegment(array("i", range(8, 12))), 1, replaces=pinned)
    assert s.num_entries == 2
