"""The trie: shape, bytes and content under random growth and pruning."""

from array import array

from hypothesis import given
from hypothesis import strategies as st

from mlxcel.cache.radix import Trie, common_prefix
from tests.segments import BYTES_PER_TOKEN, TokenSegment, joined, tokens

SEQUENCES = st.lists(st.integers(0, 2), min_size=1, max_size=12).map(lambda ids: array("i", ids))


def insert(trie: Trie, sequence: array) -> None:
    start = trie.walk(sequence)[1]
    rest = TokenSegment(sequence[start:]) if start < len(sequence) else None
    node = trie.extend(sequence, start, rest)
    node.entries[None] = object()


def remove(trie: Trie, sequence: array) -> None:
    node, depth = trie.walk(sequence)
    assert depth == len(sequence) == node.depth
    node.entries.clear()
    trie.prune(node)


def check(trie: Trie, stored: set[tuple[int, ...]]) -> None:
    prefixes = {s[: i + 1] for s in stored for i in range(len(s))}
    assert trie.nbytes == len(prefixes) * BYTES_PER_TOKEN
    for node in trie.root.subtree():
        if node is trie.root:
            continue
        assert node.segment.tokens == node.tokens
        assert node.depth == node.start + len(node.tokens) > node.start
        assert node.parent.children[node.tokens[0]] is node
        assert node.entries or len(node.children) >= 2, "a chain that does not fork must be joined"


@given(a=SEQUENCES, b=SEQUENCES, at=st.integers(0, 3))
def test_common_prefix_equals_counting(a, b, at):
    expected = 0
    while at + expected < len(a) and expected < len(b) and a[at + expected] == b[expected]:
        expected += 1
    assert common_prefix(a, b, min(at, len(a)), 0) == expected


@given(stored=st.lists(SEQUENCES, max_size=12), gone=st.lists(st.integers(0, 11), max_size=12), asked=SEQUENCES)
def test_every_prefix_is_held_once_and_found(stored, gone, asked):
    trie, present = Trie(), set()
    for sequence in stored:
        insert(trie, sequence)
        present.add(tuple(sequence))
        check(trie, present)
    for index in gone:
        if index < len(stored) and tuple(stored[index]) in present:
            remove(trie, stored[index])
            present.discard(tuple(stored[index]))
            check(trie, present)
    node, depth = trie.walk(asked)
    assert depth == max((common_prefix(asked, array("i", s)) for s in present), default=0)
    if depth:
        assert joined(trie.segments(node, depth)) == asked[:depth]


def test_a_donation_whose_beginning_was_evicted_is_refused_and_changes_nothing():
    trie = Trie()
    assert trie.extend(tokens(1, 2, 3, 4), 2, TokenSegment(tokens(3, 4))) is None
    assert trie.nbytes == 0 and not trie.root.children


def test_a_donation_that_somebody_else_made_meanwhile_is_cut():
    trie = Trie()
    insert(trie, tokens(1, 2, 3))
    node = trie.extend(tokens(1, 2, 3, 4), 0, TokenSegment(tokens(1, 2, 3, 4)))
    assert node.tokens == tokens(4) and node.segment.tokens == tokens(4)


def test_a_very_long_chain_of_nodes_does_not_recurse():
    trie = Trie()
    sequence = array("i", range(1500))
    for n in range(1, 1501):
        insert(trie, sequence[:n])
    remove(trie, sequence)
    assert trie.walk(sequence)[1] == 1499
