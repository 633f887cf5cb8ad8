"""Which stored entry a prompt may adopt, and how much of it; or why none.

Pure choice over one trie: nothing is touched, counted or logged here. Rules (design: store, lookup): own session
first, another session wins only if strictly longer; with APC the match is floored to whole blocks, without it
only whole entries match; at most len(prompt) - 1 tokens, for the last one is always prefilled.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from mlxcel.cache.entry import Entry
from mlxcel.cache.key import CacheContext
from mlxcel.cache.radix import Node, Segment, Tokens, Trie


class MissReason(StrEnum):
    """Every lookup ends in a hit or in exactly one of these."""

    DISABLED = "disabled"
    PROMPT_TOO_SHORT = "prompt_too_short"
    EMPTY = "empty"
    MODEL = "model"
    LORA = "lora"
    TEMPLATE = "template"
    TOOLS = "tools"
    KWARGS = "kwargs"
    ROPE = "rope"
    MEDIA = "media"
    EXPIRED = "expired"
    DIVERGED = "diverged"
    BLOCK_FLOOR = "block_floor"
    PARTIAL_ENTRY = "partial_entry"
    OTHER_SESSION = "other_session"
    WRAPPED_WINDOW = "wrapped_window"
    CANNOT_TRUNCATE = "cannot_truncate"
    UNRESTORABLE = "unrestorable"


@dataclass(frozen=True, slots=True)
class Match:
    """`entry` can lend its first `length` tokens."""

    entry: Entry
    length: int
    same_session: bool


@dataclass(frozen=True, slots=True)
class Hit:
    """`segments` hold the adopted tokens in order, each with how many of its tokens to use."""

    match: Match
    segments: tuple[tuple[Segment, int], ...]

    @property
    def length(self) -> int:
        return self.match.length


@dataclass(frozen=True, slots=True)
class Miss:
    """`common` is how many leading tokens the best candidate shares, too few or not usable."""

    reason: MissReason
    common: int = 0


def usable(matched: int, prompt_len: int, block_size: int | None) -> int:
    """How much of `matched` leading tokens may be adopted: whole blocks (if any), and never the whole prompt."""
    if block_size:
        matched -= matched % block_size
    return min(matched, prompt_len - 1)


def choose(trie: Trie, tokens: Tokens[int], session_key: str | None, block_size: int | None) -> Match | None:
    """The best candidate, whatever its length: own session unless another one lends strictly more."""
    node, matched = trie.walk(tokens)
    candidates = _sharing if block_size else _whole
    own = candidates(node, matched, session_key, True)
    other = candidates(node, matched, session_key, False)

    def lends(candidate: tuple[Entry, int] | None) -> int:
        return usable(candidate[1], len(tokens), block_size) if candidate else -1

    if own is None and other is None:
        return None
    if lends(own) >= lends(other):
        assert own is not None
        return Match(own[0], lends(own), True)
    assert other is not None
    return Match(other[0], lends(other), False)


def _sharing(node: Node, matched: int, session_key: str | None, own: bool) -> tuple[Entry, int] | None:
    """The newest entry that shares the most tokens: below the end of the match, else below the nearest ancestor."""
    at: Node | None = node
    seen: Node | None = None
    while at is not None:
        best: Entry | None = None
        stack = [at]
        while stack:
            below = stack.pop()
            for key, entry in below.entries.items():
                if (key == session_key) is own and (best is None or entry.lru_order > best.lru_order):
                    best = entry
            stack.extend(child for child in below.children.values() if child is not seen)
        if best is not None:
            return best, min(matched, at.depth)
        seen, at = at, at.parent
    return None


def _whole(node: Node, matched: int, session_key: str | None, own: bool) -> tuple[Entry, int] | None:
    """The longest entry that lies wholly inside the match; among several at one node the newest."""
    for at in node.ancestry():
        if at.depth > matched:
            continue
        found = [entry for key, entry in at.entries.items() if (key == session_key) is own]
        if found:
            return max(found, key=lambda entry: entry.lru_order), at.depth
    return None


def differing(context: CacheContext, other: CacheContext) -> list[MissReason]:
    """The dimensions of the bucket in which two contexts of the same salt differ, most telling first."""
    reasons = []
    if context.model_id != other.model_id:
        reasons.append(MissReason.MODEL)
    if (context.lora_id or "") != (other.lora_id or ""):
        reasons.append(MissReason.LORA)
    if context.template_sig != other.template_sig:
        reasons += _template_parts(context, other) or [MissReason.TEMPLATE]
    if context.rope_regime != other.rope_regime:
        reasons.append(MissReason.ROPE)
    if context.mm_digest != other.mm_digest:
        reasons.append(MissReason.MEDIA)
    return reasons


def _template_parts(context: CacheContext, other: CacheContext) -> list[MissReason]:
    ours, theirs = context.parts, other.parts
    if ours is None or theirs is None:
        return []
    reasons = []
    if ours.template != theirs.template or ours.prefill != theirs.prefill:
        reasons.append(MissReason.TEMPLATE)
    if ours.tools != theirs.tools or ours.tool_choice != theirs.tool_choice:
        reasons.append(MissReason.TOOLS)
    if ours.kwargs != theirs.kwargs:
        reasons.append(MissReason.KWARGS)
    return reasons
