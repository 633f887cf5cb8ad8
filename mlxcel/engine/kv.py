"""KV of a dense model as the store keeps it, and the way from a live cache to it and back.

A `Block` holds up to 64 tokens of all layers in one array per distinct shape (usually one): a join then costs as
much as a plain copy, where an array per layer and block costs twice that, and thousands of Python objects less.
A `KVSegment` is a run of whole or partly used blocks. Splitting and joining segments moves references only; a
block that a split cuts through is shared by both halves, each counting the rows it uses. Arrays in a block are
evaluated copies that nothing writes to again: a slice would keep the whole live cache alive.

Knows mlx-lm's KVCache, CacheList and BatchKVCache; not the trie, not sequences. Detach and attach run on the MLX
thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

BLOCK = 64


@dataclass(frozen=True, slots=True)
class Block:
    """One array per group of the layout, each (parts, heads, tokens, dim)."""

    arrays: tuple[mx.array, ...]
    num_tokens: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class KVSegment:
    """`pieces` are (block, first row, end row); implements cache.radix.Segment."""

    pieces: tuple[tuple[Block, int, int], ...]

    def __len__(self) -> int:
        return sum(stop - start for _, start, stop in self.pieces)

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes // block.num_tokens * (stop - start) for block, start, stop in self.pieces)

    def __add__(self, other: KVSegment) -> KVSegment:
        return KVSegment(self.pieces + other.pieces)

    def split(self, n: int) -> tuple[KVSegment, KVSegment]:
        """The first `n` tokens and the rest, 0 < n < len."""
        head: list[tuple[Block, int, int]] = []
        tail: list[tuple[Block, int, int]] = []
        left = n
        for block, start, stop in self.pieces:
            take = min(left, stop - start)
            if take:
                head.append((block, start, start + take))
            if start + take < stop:
                tail.append((block, start + take, stop))
            left -= take
        return KVSegment(tuple(head)), KVSegment(tuple(tail))


@dataclass(frozen=True, slots=True)
class Layout:
    """Where each key and value array of a cache goes: `groups` lists the (leaf, 0 for keys or 1 for values) pairs
    that share heads, dim and dtype; `shapes` are these three of each group."""

    groups: tuple[tuple[tuple[int, int], ...], ...]
    bytes_per_token: int
    shapes: tuple[tuple[int, int, mx.Dtype], ...] = ()

    def detach(self, cache: Iterable[Any], start: int, stop: int, row: int | None = None) -> KVSegment:
        """Copy tokens [start, stop) out of a live cache; `row` picks a sequence of a batched one. Evaluated."""
        views = [_view(leaf, row) for leaf in leaves(cache)]
        blocks = [self._block(views, at, min(at + BLOCK, stop)) for at in range(start, stop, BLOCK)]
        mx.eval([block.arrays for block in blocks])
        return KVSegment(tuple((block, 0, block.num_tokens) for block in blocks))

    def _block(self, views: list[tuple[mx.array, mx.array, int]], start: int, stop: int) -> Block:
        arrays = []
        for group in self.groups:
            parts = [_rows(views[leaf], part, start, stop) for leaf, part in group]
            # concatenate() of one array returns the array itself, which would pin the live cache.
            arrays.append(mx.contiguous(mx.concatenate(parts, axis=0)))
        return Block(tuple(arrays), stop - start, sum(array.nbytes for array in arrays))

    def attach(self, segments: Iterable[tuple[KVSegment, int]], cache: list[Any]) -> int:
        """Fill an empty cache with the first n tokens of each (segment, n), in order. Returns the token count."""
        pieces = [piece for segment, n in segments for piece in _cut(segment, n)]
        length = sum(stop - start for _, start, stop in pieces)
        targets = list(leaves(cache))
        for g, group in enumerate(self.groups):
            rows = mx.concatenate([block.arrays[g][..., start:stop, :] for block, start, stop in pieces], axis=2)
            for at, (leaf, part) in enumerate(group):
                setattr(targets[leaf], ("keys", "values")[part], mx.contiguous(rows[at : at + 1]))
        for leaf in targets:
            leaf.offset = length
        mx.eval([(leaf.keys, leaf.values) for leaf in targets])
        return length

    def pack(self, segments: Iterable[tuple[KVSegment, int]]) -> list[mx.array]:
        """One array (parts, heads, tokens, dim) a group: what `unpack` takes. Lazy."""
        pieces = [piece for segment, n in segments for piece in _cut(segment, n)]
        return [
            mx.concatenate([block.arrays[g][..., start:stop, :] for block, start, stop in pieces], axis=2)
            for g in range(len(self.groups))
        ]

    def unpack(self, arrays: list[mx.array]) -> KVSegment:
        """Cut packed arrays into blocks again. Evaluated. The caller has checked that they fit this layout."""
        length, blocks = arrays[0].shape[2], []
        for at in range(0, length, BLOCK):
            parts = tuple(mx.contiguous(array[..., at : min(at + BLOCK, length), :]) for array in arrays)
            blocks.append(Block(parts, min(BLOCK, length - at), sum(part.nbytes for part in parts)))
        mx.eval([block.arrays for block in blocks])
        return KVSegment(tuple((block, 0, block.num_tokens) for block in blocks))

    def fits(self, arrays: list[mx.array], length: int) -> bool:
        """Whether packed arrays are of `length` tokens of this layout."""
        wanted = [
            ((len(group), heads, length, dim), dtype)
            for group, (heads, dim, dtype) in zip(self.groups, self.shapes, strict=True)
        ]
        return [(array.shape, array.dtype) for array in arrays] == wanted


def _cut(segment: KVSegment, n: int) -> tuple[tuple[Block, int, int], ...]:
    return segment.pieces if n == len(segment) else segment.split(n)[0].pieces


def _rows(view: tuple[mx.array, mx.array, int], part: int, start: int, stop: int) -> mx.array:
    keys, values, first = view
    return (keys, values)[part][..., first + start : first + stop, :]


def _view(leaf: Any, row: int | None) -> tuple[mx.array, mx.array, int]:
    """Keys and values of one sequence, and the index of its first token in them (left padding in a batch)."""
    if row is None:
        return leaf.keys, leaf.values, 0
    return leaf.keys[row : row + 1], leaf.values[row : row + 1], int(leaf.left_padding[row].item())


def leaves(cache: Iterable[Any]) -> Iterator[Any]:
    """The cache objects that hold arrays, CacheLists opened, in a fixed order."""
    for item in cache:
        inner = getattr(item, "caches", None)
        if inner is None:
            yield item
        else:
            yield from leaves(inner)


def layout_of(net: Any, cache: list[Any]) -> Layout | None:
    """The layout of a model whose state is plain KV throughout, read off a probe of two tokens; else None."""
    from mlx_lm.models.cache import KVCache

    if not all(type(leaf) is KVCache for leaf in leaves(cache)):
        return None
    mx.eval(net(mx.array([[0, 0]]), cache=cache))
    groups: dict[tuple[Any, ...], list[tuple[int, int]]] = {}
    nbytes = 0
    for i, leaf in enumerate(leaves(cache)):
        if leaf.keys is None or leaf.offset != 2:
            return None  # a layer that keeps its KV elsewhere cannot be stored
        for part, array in enumerate((leaf.keys, leaf.values)):
            _, heads, _, dim = array.shape
            groups.setdefault((heads, dim, array.dtype), []).append((i, part))
            nbytes += heads * dim * array.dtype.size
    return Layout(tuple(tuple(group) for group in groups.values()), nbytes, tuple(groups))  # type: ignore[arg-type]
