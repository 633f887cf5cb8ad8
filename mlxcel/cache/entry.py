"""An entry: the mark that a donated sequence ends at this node of the trie.

It holds no KV of its own: the segments on the way from the root to its node are its KV, and other entries may
run through them. Its tokens are read off the same way.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlxcel.cache.key import CacheContext
from mlxcel.cache.radix import Node


@dataclass(slots=True, eq=False)
class Entry:
    """`chain` is the concatenated 32-byte block hashes (empty with APC off); times are the caller's seconds."""

    context: CacheContext
    node: Node
    digest: bytes
    chain: bytes
    created_at: float
    last_used: float
    pinned: bool = False

    @property
    def num_tokens(self) -> int:
        return self.node.depth

    @property
    def num_blocks(self) -> int:
        return len(self.chain) // 32

    @property
    def nbytes(self) -> int:
        """Bytes of all segments on its path, shared ones included."""
        return sum(node.segment.nbytes for node in self.node.ancestry() if node.segment)

    @property
    def lru_order(self) -> tuple[float, bytes]:
        """A total order, so that equal times still evict deterministically."""
        return self.last_used, self.digest
