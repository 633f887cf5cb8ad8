"""The store against a naive model of it, and the rules of lookup one by one."""

from array import array

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mlxcel.cache.key import CacheContext
from mlxcel.cache.limits import Limits
from mlxcel.cache.lookup import Hit, Miss, MissReason
from mlxcel.cache.radix import common_prefix
from mlxcel.cache.store import Store
from tests.segments import BYTES_PER_TOKEN, TokenSegment, joined

SIG = "0" * 64
SEQUENCES = st.lists(st.integers(0, 1), min_size=1, max_size=20).map(lambda ids: array("i", ids))


def context(session: str | None = "s", salt: str | None = None, **changes) -> CacheContext:
    return CacheContext(**{"model_id": "m", "template_sig": SIG, "session_key": session, "salt": salt} | changes)


def store(**limits) -> Store:
    return Store(Limits(**{"capacity_bytes": 1 << 20, "min_prefix": 4, "block_size": 4} | limits))


def donate(store: Store, context: CacheContext, sequence: array, now: float = 0.0):
    start = store.held(context, sequence)
    rest = TokenSegment(sequence[start:]) if start < len(sequence) else None
    return store.insert(context, sequence, start, rest, now)


def run(n: int, first: int = 0) -> array:
    return array("i", range(first, first + n))


class NaiveEntry:
    def __init__(self, context, tokens, digest, now):
        self.context, self.tokens, self.digest, self.last_used = context, tokens, digest, now


class StoreMachine(RuleBasedStateMachine):
    """Entries as a flat list, every rule by brute force."""

    contexts = st.builds(
        lambda session, salt, model: context(session, salt, model_id=model),
        st.sampled_from(["a", "b", None]),
        st.sampled_from([None, "x", "y"]),
        st.sampled_from(["m", "n"]),
    )

    def __init__(self):
        super().__init__()
        self.now = 0.0
        self.naive: list[NaiveEntry] = []
        self.setup(store(capacity_bytes=60 * BYTES_PER_TOKEN, max_entries=5, ttl=10))

    def setup(self, store):
        self.store = store
        self.limits = store.limits

    @rule(seconds=st.sampled_from([0.0, 1.0, 6.0]))
    def clock(self, seconds):
        self.now += seconds

    @rule(context=contexts, tokens=SEQUENCES)
    def insert(self, context, tokens):
        entry = donate(self.store, context, tokens, self.now)
        if len(tokens) < 4:
            assert entry is None
            return
        found = [e for e in self.naive if e.context == context and e.tokens == tokens]
        if found:
            found[0].last_used = self.now
        else:
            from mlxcel.cache.key import key_digest

            self.naive.append(NaiveEntry(context, tokens, key_digest(context, tokens), self.now))
        while len(self.naive) > self.limits.max_entries or self.bytes() > self.limits.capacity_bytes:
            self.naive.remove(min(self.naive, key=lambda e: (e.last_used, e.digest)))

    @rule(context=contexts, tokens=SEQUENCES)
    def lookup(self, context, tokens):
        found = self.store.lookup(context, tokens, self.now)
        self.naive = [e for e in self.naive if self.now - e.last_used < self.limits.ttl]
        bucket = [e for e in self.naive if e.context.bucket == context.bucket]
        lent = {id(e): self.lent(e, tokens) for e in bucket}
        best = max(lent.values(), default=0)
        if best < 4:
            assert isinstance(found, Miss)
            return
        assert isinstance(found, Hit) and found.length == best
        assert joined(found.segments) == tokens[:best]
        own = [e for e in bucket if e.context == context and lent[id(e)] == best]
        assert found.match.same_session == bool(own)
        touched = [e for e in bucket if e.digest == found.match.entry.digest and e.context == found.match.entry.context]
        touched[0].last_used = self.now

    def lent(self, entry, tokens):
        shared = common_prefix(entry.tokens, tokens)
        if self.limits.block_size:
            shared -= shared % self.limits.block_size
        elif shared < len(entry.tokens):
            return 0
        return min(shared, len(tokens) - 1)

    @rule()
    def reset(self):
        assert self.store.reset() == (self.bytes(), len(self.naive))
        self.naive = []

    def bytes(self):
        positions = {(e.context.bucket, tuple(e.tokens[: i + 1])) for e in self.naive for i in range(len(e.tokens))}
        return len(positions) * BYTES_PER_TOKEN

    @invariant()
    def agrees(self):
        assert self.store.num_entries == len(self.naive)
        assert self.store.nbytes == self.bytes()
        totals = self.store.totals
        assert totals.lookups == totals.hits + sum(totals.misses.values())


class WholeEntryMachine(StoreMachine):
    """The same with APC off: only whole entries match."""

    def setup(self, _):
        super().setup(store(capacity_bytes=60 * BYTES_PER_TOKEN, max_entries=5, ttl=10, block_size=None))


StoreMachine.TestCase.settings = WholeEntryMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None
)
TestStore = StoreMachine.TestCase
TestWholeEntries = WholeEntryMachine.TestCase


# --- lookup, rule by rule


def test_a_match_is_floored_to_whole_blocks():
    s = store()
    donate(s, context(), run(11))
    assert s.lookup(context(), run(11) + array("i", [99]), 0).length == 8


@pytest.mark.parametrize(("stored", "asked", "lent"), [(70, 70, 64), (80, 64, 63), (63, 64, 48), (64, 65, 64)])
def test_a_resent_prompt_leaves_its_last_token_to_prefill(stored, asked, lent):
    s = store(min_prefix=32, block_size=16)
    donate(s, context(), run(stored))
    assert s.lookup(context(), run(asked), 0).length == lent


def test_a_hit_does_not_consume():
    s = store()
    donate(s, context(), run(8))
    before = s.nbytes
    assert [s.lookup(context(), run(9), 0).length for _ in range(10)] == [8] * 10
    assert s.nbytes == before and s.num_entries == 1


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_id": "other"}, MissReason.MODEL),
        ({"lora_id": "lora:1.000000"}, MissReason.LORA),
        ({"template_sig": "1" * 64}, MissReason.TEMPLATE),
        ({"rope_regime": 1}, MissReason.ROPE),
        ({"mm_digest": b"\1" * 32}, MissReason.MEDIA),
        ({"salt": "tenant"}, MissReason.EMPTY),
    ],
)
def test_no_dimension_of_the_key_is_crossed_and_the_miss_says_which(change, reason):
    s = store()
    donate(s, context(), run(8))
    miss = s.lookup(context(**change), run(9), 0)
    assert isinstance(miss, Miss) and miss.reason is reason
    donate(s, context(**change), run(8))
    assert isinstance(s.lookup(context(**change), run(9), 0), Hit), "the twin that must hit"


def test_a_salt_shares_with_itself_only_and_no_salt_is_its_own_class():
    s = store()
    for salt in ("x", "y", None):
        assert isinstance(s.lookup(context(salt=salt), run(9), 0), Miss)
        donate(s, context(salt=salt), run(8))
        assert isinstance(s.lookup(context(salt=salt), run(9), 0), Hit)


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (run(4), MissReason.PROMPT_TOO_SHORT),
        (run(3) + run(9, 50), MissReason.DIVERGED),
        (run(9, 50), MissReason.DIVERGED),
        (run(7) + run(9, 50), MissReason.BLOCK_FLOOR),
    ],
)
def test_a_miss_inside_the_bucket_is_named(asked, reason):
    s = store(min_prefix=5, block_size=8)
    donate(s, context(), run(16))
    assert s.lookup(context(), asked, 0).reason is reason


def test_without_apc_only_whole_entries_match():
    s = store(block_size=None)
    donate(s, context(), run(8))
    assert s.lookup(context(), run(7) + run(4, 50), 0).reason is MissReason.PARTIAL_ENTRY
    assert s.lookup(context(), run(8) + run(4, 50), 0).length == 8


def test_own_session_wins_unless_another_lends_strictly_more():
    s = store()
    own = donate(s, context("own"), run(8))
    other = donate(s, context("other"), run(8))
    assert s.lookup(context("own"), run(12), 0).match.entry is own
    longer = donate(s, context("other"), run(12))
    assert s.lookup(context("own"), run(13), 0).match.entry is longer
    assert s.lookup(context("other"), run(9), 0).match.entry in (other, longer)


def test_the_ttl_counts_from_the_last_hit_and_a_peek_does_not_refresh_it():
    s = store(ttl=2)
    donate(s, context(), run(8), now=0)
    assert isinstance(s.lookup(context(), run(9), 1.5), Hit)
    assert isinstance(s.lookup(context(), run(9), 3.0), Hit)
    assert s.peek(context(), run(9)) == 8
    miss = s.lookup(context(), run(9), 5.0)
    assert miss.reason is MissReason.EXPIRED and s.totals.evictions["ttl"] == 1


def test_the_least_recently_used_entry_goes_first():
    s = store(max_entries=3)
    for first in (0, 100, 200):
        donate(s, context(), run(8, first), now=first)
    assert isinstance(s.lookup(context(), run(9, 0), 300), Hit)
    donate(s, context(), run(8, 300), now=301)
    assert isinstance(s.lookup(context(), run(9, 0), 302), Hit)
    assert isinstance(s.lookup(context(), run(9, 100), 302), Miss)
    assert s.totals.evictions["lru"] == 1


def test_an_entry_that_can_never_fit_is_refused_with_nothing_evicted_and_one_warning(caplog):
    s = store(capacity_bytes=10 * BYTES_PER_TOKEN)
    donate(s, context(), run(8))
    for _ in range(2):
        assert donate(s, context(), run(11, 50)) is None
    assert s.num_entries == 1 and s.totals.rejections_oversized == 2 and not s.totals.evictions
    assert caplog.text.count("--prompt-cache-capacity-bytes") == 1


def test_a_growing_prompt_replaces_its_own_shorter_entry():
    s = store()
    first = donate(s, context(), run(8))
    assert s.insert(context(), run(16), 8, TokenSegment(run(8, 8)), 1.0, replaces=first) is not None
    assert s.num_entries == 1 and s.nbytes == 16 * BYTES_PER_TOKEN and not s.totals.evictions


def test_fifty_conversations_hold_their_shared_prompt_once():
    s = store()
    for n in range(50):
        donate(s, context(f"s{n}"), run(1000) + run(20, 10_000 + 100 * n))
    assert s.nbytes == (1000 + 50 * 20) * BYTES_PER_TOKEN


def test_the_number_of_hashed_blocks_is_bounded():
    s = store(num_blocks=4)
    donate(s, context(), run(8), now=0)
    donate(s, context(), run(12, 100), now=1)
    assert s.stats()["total_blocks_stored"] == 3 and s.num_entries == 1


def test_block_statistics_count_shared_blocks_once():
    s = store()
    donate(s, context("a"), run(8) + run(5, 50))
    donate(s, context("b"), run(8) + run(6, 90))
    stats = s.stats()
    assert (stats["total_blocks_stored"], stats["unique_block_hashes"], stats["apc_active_entries"]) == (8, 6, 2)


def test_reset_frees_everything_keeps_the_totals_and_is_idempotent():
    s = store()
    donate(s, context(), run(8))
    s.lookup(context(), run(9), 0)
    assert s.reset() == (8 * BYTES_PER_TOKEN, 1)
    assert s.reset() == (0, 0)
    assert s.totals.hits == 1 and s.nbytes == 0


@pytest.mark.parametrize("limits", [{"enabled": False}, {"capacity_bytes": 0}, {"max_entries": 0}])
def test_a_disabled_store_counts_and_keeps_nothing(limits):
    s = store(**limits)
    assert donate(s, context(), run(8)) is None
    assert s.lookup(context(), run(9), 0).reason is MissReason.DISABLED
    assert s.stats()["lookups"] == 0 and s.num_entries == 0
