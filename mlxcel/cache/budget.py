"""How large the store may grow when nobody said so: a ceiling read off the loaded model, not a preallocation."""

from __future__ import annotations

KV_STORE_MINIMUM = 2 << 30
SNAPSHOT_MINIMUM = 512 << 20
REPRESENTATIVE_TOKENS = 8192
ENTRIES_WANTED = 6


def representative_length(ctx_size: int) -> int:
    """Tokens of the entry that the default is sized for; `ctx_size` 0 means the model's own context."""
    return min(max(ctx_size, 32), REPRESENTATIVE_TOKENS) if ctx_size else REPRESENTATIVE_TOKENS


def default_capacity(entry: int, left: int | None, minimum: int) -> int:
    """Bytes: six representative entries, within a quarter of the memory `left` beside the model, but one entry if
    that takes no more than half of it, and never below `minimum`.

    `left` None means unknown (no ceiling); 0 means that nothing is left. Rule of mlxcel's operation guide,
    "model-based capacity defaults".
    """
    ceiling = ENTRIES_WANTED * entry if left is None else min(ENTRIES_WANTED * entry, left // 4)
    floor = entry if left is None or entry <= left // 2 else 0
    return max(ceiling, floor, minimum)
