"""Slots, as llama-server numbers them: which sequence runs in which, and which one ran there last.

A slot holds no KV here: what a sequence leaves behind is in the store, where any slot finds it. So a slot only gives
a running sequence its number, and remembers the last one so that its state can be saved, restored or erased by that
number. A conversation stays in its slot while that is free. It does not know the queue. Invariant: which slot is chosen
tells nobody anything of a prompt of another bucket.
"""

from __future__ import annotations

import asyncio
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mlxcel.cache.radix import common_prefix

if TYPE_CHECKING:
    from mlxcel.cache.key import CacheContext
    from mlxcel.engine.sequence import Generation, Sequence


@dataclass(slots=True)
class Slot:
    """`sequence` is the one that runs here or, when not `busy`, the last one that did."""

    id: int
    sequence: Sequence | None = None
    busy: bool = False
    released: int = 0
    restored: tuple[CacheContext, array[int]] | None = None
    freed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def content(self) -> tuple[CacheContext | None, array[int]]:
        """The cache context (None: it was to leave no trace) and all tokens of what ran or was restored here."""
        if self.restored is not None:
            return self.restored
        if self.sequence is None:
            return None, array("i")
        return self.sequence.generation.cache, self.sequence.prompt + self.sequence.tokens

    async def when_free(self) -> None:
        while self.busy:
            await self.freed.wait()

    def clear(self) -> None:
        self.sequence = self.restored = None


class Slots:
    """`similarity` is the share of a prompt that a slot must begin with to be chosen for that; 0 never chooses so."""

    def __init__(self, num: int, similarity: float = 0.1) -> None:
        self.all = [Slot(i) for i in range(num)]
        self._similarity = similarity
        self._releases = 0

    def __getitem__(self, id: int) -> Slot:
        """Ids wrap modulo the number of slots, as in llama-server."""
        return self.all[id % len(self.all)]

    def forget(self) -> None:
        """What ran last is not remembered any more: what it left behind is gone."""
        for slot in self.all:
            if not slot.busy:
                slot.clear()

    def choose(self, generation: Generation) -> Slot | None:
        """The wanted slot if it is free. Else of those that are free the one whose content the prompt goes on from, or
        the one that has been idle longest; None when there is none."""
        if generation.slot is not None:
            return None if self[generation.slot].busy else self[generation.slot]
        idle = (slot for slot in self.all if not slot.busy)
        return max(idle, key=lambda slot: (self._likeness(slot, generation), -slot.released), default=None)

    def _likeness(self, slot: Slot, generation: Generation) -> float:
        """The share of the prompt that the slot begins with; 0 if it is too small, or of another bucket."""
        if not self._similarity or generation.cache is None:
            return 0.0
        context, tokens = slot.content
        if context is None or context.bucket != generation.cache.bucket:
            return 0.0
        share = common_prefix(tokens, generation.prompt) / len(generation.prompt)
        return share if share > self._similarity else 0.0

    def take(self, slot: Slot, sequence: Sequence) -> None:
        slot.sequence, slot.busy, slot.restored = sequence, True, None
        slot.freed.clear()
        sequence.slot = slot.id

    def release(self, sequence: Sequence) -> None:
        """Nothing happens when the sequence never had a slot."""
        slot = self.all[sequence.slot] if sequence.slot is not None else None
        if slot is not None and slot.sequence is sequence:
            self._releases += 1
            slot.busy, slot.released = False, self._releases
            slot.freed.set()
