"""A radix trie whose edges carry runs of tokens and the KV segment of exactly those tokens.

It owns the shape: splitting an edge where two sequences part, pruning what no entry needs, joining a chain that
no longer forks. It does not know keys, clocks, capacity or what a segment is made of. Invariants: a segment is
as long as its edge; a node without entries has at least two children; `nbytes` is the sum over the edges.
Nothing recurses, so a prompt of any length is safe.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, Self

if TYPE_CHECKING:
    from mlxcel.cache.entry import Entry

Tokens = array  # array("i"): four bytes a token, compared by slices at memcmp speed


class Segment(Protocol):
    """The KV of a run of tokens, opaque to the store. Splitting and joining must not touch the device."""

    @property
    def nbytes(self) -> int: ...

    def __len__(self) -> int: ...

    def split(self, n: int) -> tuple[Self, Self]: ...

    def __add__(self, other: Self) -> Self: ...


@dataclass(slots=True, eq=False)
class Node:
    """An edge and its end. `depth` is the number of tokens from the root to that end."""

    tokens: Tokens[int]
    segment: Segment | None
    parent: Node | None
    depth: int
    children: dict[int, Node] = field(default_factory=dict)
    entries: dict[str | None, Entry] = field(default_factory=dict)

    @property
    def start(self) -> int:
        return self.depth - len(self.tokens)

    def ancestry(self) -> Iterator[Node]:
        """This node, its parent, and so on, without the root."""
        node: Node | None = self
        while node is not None and node.parent is not None:
            yield node
            node = node.parent

    def subtree(self) -> Iterator[Node]:
        stack = [self]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())


def common_prefix(a: Tokens[int], b: Tokens[int], a_at: int = 0, b_at: int = 0) -> int:
    """How many tokens `a[a_at:]` and `b[b_at:]` share at their start, by bisection over slice comparisons."""
    n = min(len(a) - a_at, len(b) - b_at)
    if a[a_at : a_at + n] == b[b_at : b_at + n]:
        return n
    low, high = 0, n
    while high - low > 1:
        middle = (low + high) // 2
        if a[a_at + low : a_at + middle] == b[b_at + low : b_at + middle]:
            low = middle
        else:
            high = middle
    return low


class Trie:
    """See the module. All entries of one bucket live in one trie."""

    def __init__(self) -> None:
        self.root = Node(array("i"), None, None, 0)
        self.nbytes = 0

    def walk(self, tokens: Tokens[int]) -> tuple[Node, int]:
        """The node in whose edge (or at whose end) the match of `tokens` ends, and the matched length."""
        node, depth = self.root, 0
        while depth < len(tokens):
            child = node.children.get(tokens[depth])
            if child is None:
                break
            shared = common_prefix(child.tokens, tokens, 0, depth)
            node, depth = child, depth + shared
            if shared < len(child.tokens):
                break
        return node, depth

    def segments(self, node: Node, length: int) -> list[tuple[Segment, int]]:
        """The segments that hold the first `length` tokens on the way to `node`, each with how much of it to use."""
        parts = [(n.segment, min(length, n.depth) - n.start) for n in node.ancestry() if n.start < length and n.segment]
        return parts[::-1]

    def tokens(self, node: Node) -> Tokens[int]:
        out: Tokens[int] = array("i")
        for part in reversed(list(node.ancestry())):
            out.extend(part.tokens)
        return out

    def extend(self, tokens: Tokens[int], start: int, segment: Segment | None) -> Node | None:
        """Make a node end at len(tokens), given the KV of tokens[start:].

        Returns None, with nothing changed, when the trie no longer holds tokens[:start] (evicted meanwhile).
        """
        node, depth = self.walk(tokens)
        if depth < start:
            return None
        if depth < node.depth:
            node = self._split(node, depth)
        if depth == len(tokens):
            return node
        assert segment is not None
        if depth > start:
            segment = segment.split(depth - start)[1]
        leaf = Node(tokens[depth:], segment, node, len(tokens))
        node.children[leaf.tokens[0]] = leaf
        self.nbytes += segment.nbytes
        return leaf

    def prune(self, node: Node) -> None:
        """Drop what no entry needs from `node` upwards, and join a chain that no longer forks."""
        while node.parent is not None and not node.entries and not node.children:
            parent = node.parent
            del parent.children[node.tokens[0]]
            self.nbytes -= node.segment.nbytes if node.segment else 0
            node.parent = None
            node = parent
        if node.parent is not None and not node.entries and len(node.children) == 1:
            self._join(node)

    def _split(self, node: Node, depth: int) -> Node:
        """Cut the edge into `node` at `depth`; returns the new upper node."""
        assert node.segment is not None and node.parent is not None
        at = depth - node.start
        before = node.segment.nbytes
        head, tail = node.segment.split(at)
        upper = Node(node.tokens[:at], head, node.parent, depth)
        node.parent.children[upper.tokens[0]] = upper
        node.tokens, node.segment, node.parent = node.tokens[at:], tail, upper
        upper.children[node.tokens[0]] = node
        self.nbytes += head.nbytes + tail.nbytes - before
        return upper

    def _join(self, node: Node) -> None:
        """Let the only child of `node` take its edge over."""
        (child,) = node.children.values()
        assert node.segment is not None and child.segment is not None and node.parent is not None
        before = node.segment.nbytes + child.segment.nbytes
        child.tokens = node.tokens + child.tokens
        child.segment = node.segment + child.segment
        child.parent = node.parent
        node.parent.children[child.tokens[0]] = child
        node.parent = None
        self.nbytes += child.segment.nbytes - before
