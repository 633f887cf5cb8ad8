"""The snapshot store: what is lent, what supersedes what, what is evicted, and why nothing is lent."""

from array import array
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mlxcel.cache.key import ANONYMOUS, CacheContext
from mlxcel.cache.limits import SnapshotLimits
from mlxcel.cache.lookup import Miss, MissReason
from mlxcel.cache.snapshots import Lent, SnapshotStore

CONTEXT = CacheContext(model_id="m", template_sig="0" * 64, session_key="s")
LIMITS = SnapshotLimits(capacity_bytes=10_000, max_entries=100, ttl=100.0, min_prefix=4)


@dataclass(frozen=True)
class FakeState:
    """Refuses to be cut below `floor`, for `reason`; `nbytes` less the tokens' ids."""

    nbytes: int = 100
    floor: int = 1 << 30
    reason: MissReason = MissReason.CANNOT_TRUNCATE

    def refusal(self, length):
        return self.reason if length < self.floor else None


WHOLE_ONLY = FakeState()
CUTTABLE = FakeState(floor=0)
WRAPPED = FakeState(reason=MissReason.WRAPPED_WINDOW)


def tokens(text: str) -> array:
    return array("i", list(text.encode()))


def filled(*texts: str, state=WHOLE_ONLY, context=CONTEXT, origin="boundary", limits=LIMITS, now=0.0) -> SnapshotStore:
    store = SnapshotStore(limits)
    for text in texts:
        store.insert(context, tokens(text), state, origin, now)
    return store


def length_of(verdict) -> int:
    assert isinstance(verdict, Lent), verdict
    return verdict.length


# --- lookup


def test_the_longest_whole_snapshot_is_lent():
    store = filled("abcdef", "abcdefgh", context=replace(CONTEXT, session_key=ANONYMOUS))
    found = store.lookup(replace(CONTEXT, session_key=ANONYMOUS), tokens("abcdefghij"), 1.0)
    assert length_of(found) == 8 and found.snapshot.last_used == 1.0
    assert (store.totals.lookups, store.totals.hits, store.totals.tokens_reused) == (1, 1, 8)


def test_the_last_token_of_a_prompt_is_never_lent():
    assert isinstance(filled("abcdefgh").lookup(CONTEXT, tokens("abcdefgh"), 1.0), Miss)
    assert length_of(filled("abcdefgh", state=CUTTABLE).lookup(CONTEXT, tokens("abcdefgh"), 1.0)) == 7
    both = filled("abcdef", context=CONTEXT)
    both.insert(CONTEXT, tokens("abcdefgh"), WHOLE_ONLY, "completion", 0.0)
    assert length_of(both.lookup(CONTEXT, tokens("abcdefgh"), 1.0)) == 6, "an earlier snapshot serves instead"


@pytest.mark.parametrize(("prompt", "lent"), [("abcdXYZ", 4), ("abcdefgXYZ", 7), ("abcXYZ", 0)])
def test_a_state_that_can_be_cut_lends_the_common_part(prompt, lent):
    verdict = filled("abcdefgh", state=CUTTABLE).lookup(CONTEXT, tokens(prompt), 1.0)
    assert (length_of(verdict) == lent) if lent else verdict == Miss(MissReason.DIVERGED, 3)


@pytest.mark.parametrize(
    ("prompt", "context", "reason", "common"),
    [
        ("abcd", CONTEXT, MissReason.PROMPT_TOO_SHORT, 0),
        ("abcdeXYZ", CONTEXT, MissReason.CANNOT_TRUNCATE, 5),
        ("XYZXYZXYZ", CONTEXT, MissReason.DIVERGED, 0),
        ("abcdefghij", replace(CONTEXT, session_key="t"), MissReason.OTHER_SESSION, 8),
        ("abcdefghij", replace(CONTEXT, salt="x"), MissReason.EMPTY, 0),
        ("abcdefghij", replace(CONTEXT, model_id="n"), MissReason.MODEL, 0),
        ("abcdefghij", replace(CONTEXT, template_sig="1" * 64), MissReason.TEMPLATE, 0),
        ("abcdefghij", replace(CONTEXT, lora_id="l"), MissReason.LORA, 0),
        ("abcdefghij", replace(CONTEXT, mm_digest=b"1" * 32), MissReason.MEDIA, 0),
    ],
)
def test_every_miss_has_one_reason(prompt, context, reason, common):
    store = filled("abcdefgh")
    assert store.lookup(context, tokens(prompt), 1.0) == Miss(reason, common)
    assert store.totals.misses == {reason: 1}


def test_the_reason_of_the_nearest_refused_snapshot_is_told():
    store = filled("abcdefgh", state=WRAPPED)
    store.insert(CONTEXT, tokens("abcdeQQQ"), WHOLE_ONLY, "completion", 0.0)
    assert store.lookup(CONTEXT, tokens("abcdefXYZ"), 1.0) == Miss(MissReason.WRAPPED_WINDOW, 6)


def test_what_has_outlived_its_ttl_is_told_as_expired():
    store = filled("abcdefgh")
    assert length_of(store.lookup(CONTEXT, tokens("abcdefghij"), 99.0)) == 8
    assert length_of(store.lookup(CONTEXT, tokens("abcdefghij"), 198.0)) == 8, "a hit starts the time anew"
    assert store.lookup(CONTEXT, tokens("abcdefghij"), 298.0) == Miss(MissReason.EXPIRED)
    assert store.totals.evictions == {"ttl": 1} and store.nbytes == store.num_entries == 0


def test_a_restore_that_failed_counts_as_a_miss():
    store = filled("abcdefgh")
    store.lookup(CONTEXT, tokens("abcdefghij"), 1.0)
    store.take_back(8)
    assert (store.totals.hits, store.totals.tokens_reused) == (0, 0)
    assert store.totals.misses == {MissReason.UNRESTORABLE: 1}


# --- chains


def test_a_longer_snapshot_supersedes_its_ancestors_of_the_same_origin():
    store = filled("abcd", "abcdef", "abcdefgh")
    assert [s.num_tokens for s in store] == [8] and store.totals.supersedes == 2
    store.insert(CONTEXT, tokens("abcdefghij"), WHOLE_ONLY, "completion", 0.0)
    assert sorted(s.num_tokens for s in store) == [8, 10]


def test_a_completion_that_the_conversation_did_not_go_on_from_goes_with_its_boundary():
    store = filled("abcd")
    store.insert(CONTEXT, tokens("abcdXYZ"), WHOLE_ONLY, "completion", 0.0)
    store.insert(CONTEXT, tokens("abcdefgh"), WHOLE_ONLY, "boundary", 0.0)
    assert [s.num_tokens for s in store] == [8] and store.totals.supersedes == 2


def test_a_completion_that_it_did_go_on_from_stays_until_the_next_one():
    store = filled("abcd")
    store.insert(CONTEXT, tokens("abcdef"), WHOLE_ONLY, "completion", 0.0)
    store.insert(CONTEXT, tokens("abcdefgh"), WHOLE_ONLY, "boundary", 0.0)
    assert sorted(s.num_tokens for s in store) == [6, 8]


def test_boundaries_a_step_apart_are_kept_for_turns_that_are_edited():
    texts = ["abcd", "abcdefgh", "abcdefghij", "abcdefghijkl"]
    lent = {None: None, 0: 8, 4: 8, 8: 8, 9: None}
    for step, length in lent.items():
        store = filled(*texts, limits=replace(LIMITS, min_step=step))
        found = store.lookup(CONTEXT, tokens("abcdefghXYZ"), 1.0)
        assert (found.length if isinstance(found, Lent) else None) == length, step
        assert length_of(store.lookup(CONTEXT, tokens("abcdefghijklm"), 1.0)) == 12
    kept = {s.num_tokens for s in filled(*texts, limits=replace(LIMITS, min_step=4))}
    assert kept == {4, 8, 12}


def test_completions_are_replaced_whatever_the_step():
    store = filled("abcd", "abcdefgh", origin="completion", limits=replace(LIMITS, min_step=0))
    assert [s.num_tokens for s in store] == [8]


def test_a_named_session_holds_so_many_and_drops_what_it_used_least():
    limits = replace(LIMITS, per_session=2)
    store = filled("abcd1", "abcd2", limits=limits)
    store.lookup(CONTEXT, tokens("abcd1x"), 1.0)
    store.insert(CONTEXT, tokens("abcd3"), WHOLE_ONLY, "boundary", 2.0)
    assert sorted(bytes(s.tokens)[::4] for s in store) == [b"abcd1", b"abcd3"] and store.totals.supersedes == 1
    others = filled("abcd1", "abcd2", "abcd3", context=replace(CONTEXT, session_key=ANONYMOUS), limits=limits)
    assert others.num_entries == 3, "callers without a name are not one session"


def test_forks_other_sessions_and_other_salts_supersede_nothing():
    store = filled("abcdef", "abcdXY")
    for context in (replace(CONTEXT, session_key="t"), replace(CONTEXT, salt="x")):
        store.insert(context, tokens("abcdefgh"), WHOLE_ONLY, "boundary", 0.0)
    assert store.num_entries == 4 and store.totals.supersedes == 0


def test_anonymous_callers_share_a_session_and_supersede_nothing():
    store = filled("abcd", "abcdef", context=replace(CONTEXT, session_key=ANONYMOUS))
    assert store.num_entries == 2


def test_an_outdated_warm_up_is_not_stored():
    store = filled("abcdefgh")
    assert store.insert(CONTEXT, tokens("abcdef"), WHOLE_ONLY, "boundary", 0.0) is None
    assert [s.num_tokens for s in store] == [8]


def test_the_same_tokens_again_replace_their_snapshot_and_keep_its_pin():
    store = filled("abcdefgh")
    (first,) = store
    assert store.pin(first)
    second = store.insert(CONTEXT, tokens("abcdefgh"), CUTTABLE, "completion", 1.0)
    assert list(store) == [second] and second.pinned and store.nbytes == second.nbytes


# --- bounds


def test_the_least_recently_used_is_evicted():
    store = SnapshotStore(replace(LIMITS, capacity_bytes=3 * 120))
    for i, session in enumerate("abcd"):
        store.insert(replace(CONTEXT, session_key=session), tokens("abcde"), FakeState(100), "boundary", float(i))
        if session == "c":
            store.lookup(replace(CONTEXT, session_key="a"), tokens("abcdefg"), 2.5)
    assert sorted(s.context.session_key for s in store) == ["a", "c", "d"]
    assert store.totals.evictions == {"lru": 1} and store.totals.self_evictions == 0


def test_a_snapshot_that_can_never_fit_is_refused_once_loudly(caplog):
    store = filled("abcdefgh")
    for _ in range(2):
        assert store.insert(CONTEXT, tokens("abcdefghi"), FakeState(20_000), "boundary", 1.0) is None
    assert store.num_entries == 1 and store.totals.rejections_oversized == 2
    (line,) = [r.getMessage() for r in caplog.records]
    assert "MLXCEL_PROMPT_CACHE_SNAPSHOT_CAPACITY_BYTES" in line and "10000" in line


def test_a_store_too_small_for_one_session_says_so_once(caplog):
    store = SnapshotStore(replace(LIMITS, capacity_bytes=150))
    for i in range(4):
        store.insert(CONTEXT, tokens("abcd" + "x" * i), FakeState(90), "boundary" if i % 2 else "completion", float(i))
    assert store.totals.self_evictions >= 2
    assert len([r for r in caplog.records if "evicts a conversation's own snapshot" in r.getMessage()]) == 1


def test_a_pin_holds_against_lru_ttl_and_successors_but_not_for_more_than_half_the_store():
    store = SnapshotStore(replace(LIMITS, capacity_bytes=400))
    pinned = store.insert(CONTEXT, tokens("abcd"), FakeState(100), "boundary", 0.0)
    assert store.pin(pinned)
    other = store.insert(replace(CONTEXT, session_key="t"), tokens("abcd"), FakeState(100), "boundary", 0.0)
    assert not store.pin(other)
    for i in range(5):
        store.insert(CONTEXT, tokens("abcd" + "x" * (i + 1)), FakeState(100), "boundary", float(i))
    assert pinned in set(store) and store.sweep(1e9) and list(store) == [pinned]
    store.unpin(pinned)
    assert store.sweep(1e9) == [pinned]


@pytest.mark.parametrize("limits", [{"enabled": False}, {"capacity_bytes": 0}, {"max_entries": 0}, {"per_session": 0}])
def test_a_store_that_is_off_keeps_and_counts_nothing(limits):
    store = filled("abcdefgh", limits=replace(LIMITS, **limits))
    assert store.lookup(CONTEXT, tokens("abcdefghij"), 1.0) == Miss(MissReason.DISABLED)
    assert store.num_entries == store.totals.lookups == store.totals.rejections_oversized == 0


def test_a_reset_frees_everything_and_keeps_the_totals():
    store = filled("abcdefgh")
    nbytes = store.nbytes
    assert store.reset() == (nbytes, 1) and store.reset() == (0, 0)
    assert store.lookup(CONTEXT, tokens("abcdefghij"), 1.0) == Miss(MissReason.EMPTY)
    assert store.totals.inserts == 1


def test_no_salt_is_shown():
    store = filled("abcdefgh", context=replace(CONTEXT, salt="secret-salt"))
    assert "secret-salt" not in repr(list(store)) + repr(store.stats())


# --- against a naive model

TEXTS = st.text("ab", min_size=1, max_size=9)
CONTEXTS = st.builds(
    lambda session, salt, sig: CacheContext("m", sig * 64, session, salt=salt),
    st.sampled_from([ANONYMOUS, "s", "t"]),
    st.sampled_from([None, "x"]),
    st.sampled_from(["0", "1"]),
)
STATES = st.builds(FakeState, st.integers(1, 400), st.sampled_from([0, 5, 1 << 30]))


class Naive(RuleBasedStateMachine):
    """Lookups are right by definition: the longest allowed prefix of what a plain list holds."""

    def __init__(self) -> None:
        super().__init__()
        self.store = SnapshotStore(replace(LIMITS, capacity_bytes=1000, max_entries=6, ttl=50.0, min_prefix=2))
        self.now = 0.0

    def allowed(self, context, prompt):
        for s in self.store:
            if (s.context.bucket, s.context.session_key) != (context.bucket, context.session_key):
                continue
            common = 0
            while common < min(len(prompt) - 1, s.num_tokens) and prompt[common] == s.tokens[common]:
                common += 1
            if common >= 2 and (common == s.num_tokens or s.payload.refusal(common) is None):
                yield common

    @rule(context=CONTEXTS, text=TEXTS, state=STATES, origin=st.sampled_from(["boundary", "completion"]))
    def insert(self, context, text, state, origin):
        kept = self.store.insert(context, tokens(text), state, origin, self.now)
        assert kept is None or kept.tokens == tokens(text)

    @rule(context=CONTEXTS, text=TEXTS)
    def lookup(self, context, text):
        self.store.sweep(self.now)
        best = max(self.allowed(context, tokens(text)), default=0)
        before = self.store.totals.hits, sum(self.store.totals.misses.values())
        found = self.store.lookup(context, tokens(text), self.now)
        assert (found.length if isinstance(found, Lent) else 0) == best
        after = self.store.totals.hits, sum(self.store.totals.misses.values())
        assert (after[0] - before[0], after[1] - before[1]) == ((1, 0) if best else (0, 1))

    @rule(seconds=st.floats(0, 30))
    def wait(self, seconds):
        self.now += seconds

    @rule(data=st.data())
    def pin(self, data):
        if self.store.num_entries:
            snapshot = data.draw(st.sampled_from(sorted(self.store, key=lambda s: s.digest)))
            self.store.unpin(snapshot) if snapshot.pinned else self.store.pin(snapshot)

    @rule()
    def reset(self):
        self.store.reset()

    @rule(capacity=st.integers(1, 1500), entries=st.integers(1, 8))
    def resize(self, capacity, entries):
        self.store.reset()
        self.store.limits = replace(self.store.limits, capacity_bytes=capacity, max_entries=entries)

    @invariant()
    def bytes_and_bounds_hold(self):
        held, limits = list(self.store), self.store.limits
        assert self.store.nbytes == sum(s.nbytes for s in held) <= limits.capacity_bytes
        assert len(held) <= limits.max_entries
        keys = [(s.context.bucket, s.context.session_key, bytes(s.tokens)) for s in held]
        assert len(set(keys)) == len(keys)

    @invariant()
    def a_named_session_holds_no_ancestor_of_the_same_origin(self):
        for s in self.store:
            for t in self.store:
                same = (s.context.bucket, s.context.session_key, s.origin) == (
                    t.context.bucket,
                    t.context.session_key,
                    t.origin,
                )
                if s is not t and same and s.context.session_key != ANONYMOUS and not (s.pinned or t.pinned):
                    assert s.tokens[: t.num_tokens] != t.tokens


TestAgainstANaiveModel = Naive.TestCase
TestAgainstANaiveModel.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


@given(st.lists(st.tuples(TEXTS, STATES), max_size=8), TEXTS)
def test_explaining_says_what_a_lookup_does(inserts, text):
    from mlxcel.cache.explain import explain_snapshots

    store = SnapshotStore(replace(LIMITS, min_prefix=2))
    for i, (stored, state) in enumerate(inserts):
        store.insert(CONTEXT, tokens(stored), state, "completion", float(i))
    told = explain_snapshots(store, CONTEXT, tokens(text), 10.0)
    found = store.lookup(CONTEXT, tokens(text), 10.0)
    assert told.matched == (found.length if isinstance(found, Lent) else 0)
    assert told.reason == (found.reason if isinstance(found, Miss) else None)
