"""What bounds the store: read off the settings, and where these are silent, off the loaded model.

It owns the rule that an explicit value is never changed, the families for which APC is off, and the log lines that
tell an operator which default was applied. It does not measure memory: that is an argument.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mlxcel.cache.budget import KV_STORE_MINIMUM, SNAPSHOT_MINIMUM, default_capacity, representative_length
from mlxcel.settings import Settings

log = logging.getLogger(__name__)

UNLIMITED = 1 << 62

# Models with recurrent layers: KV alone does not restore them, so hashing its blocks would promise too much.
RECURRENT = frozenset(
    "jamba mamba mamba2 nemotron_h gated_delta kimi_linear kimi_k3 qwen3_next falcon_mamba longcat_flash "
    "longcat_flash_ngram rwkv7 recurrent_gemma baichuan_m1".split()
)


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the store. Sizes in bytes and tokens, `ttl` in seconds since the last hit (0: never expires).

    `block_size` None switches APC off; `num_blocks` None leaves the number of hashed blocks unbounded.
    """

    enabled: bool = True
    capacity_bytes: int = KV_STORE_MINIMUM
    max_entries: int = 1024
    ttl: float = 3600.0
    min_prefix: int = 32
    block_size: int | None = 16
    num_blocks: int | None = None
    hash: Literal["sha256", "blake3"] = "sha256"


@dataclass(frozen=True, slots=True)
class SnapshotLimits:
    """Bounds of the snapshot store; units as in `Limits`. A named session holds `per_session` at most; `min_step`
    tokens on, a boundary is kept beside the one before it (None: the newest replaces all it extends)."""

    enabled: bool = True
    capacity_bytes: int = SNAPSHOT_MINIMUM
    max_entries: int = 4096
    ttl: float = 7200.0
    min_prefix: int = 32
    per_session: int = 32
    min_step: int | None = None

    @property
    def room(self) -> int:
        """0 where nothing may be stored."""
        return min(self.capacity_bytes, self.max_entries, self.per_session)


def is_recurrent(config: Mapping[str, Any]) -> bool:
    """Whether config.json names a family of `RECURRENT`: model_type, text_config.model_type, or an architecture."""
    text = config.get("text_config")
    types = {config.get("model_type"), text.get("model_type") if isinstance(text, Mapping) else None}
    if types & RECURRENT:
        return True
    plain = {re.sub(r"[^a-z0-9]", "", family) for family in RECURRENT}
    names = [re.sub(r"[^a-z0-9]", "", str(name).lower()) for name in config.get("architectures") or ()]
    return any(family in name for name in names for family in plain)


def choose_limits(
    settings: Settings, config: Mapping[str, Any], bytes_per_token: int, left: int | None, n_ctx: int
) -> Limits:
    """The limits for a loaded model whose KV takes `bytes_per_token`, with `left` bytes of memory beside it.

    `bytes_per_token` 0: the model's KV cannot be stored, and no default is derived from it.
    """
    apc = settings.apc_enabled and not is_recurrent(config)
    if settings.apc_enabled and not apc:
        log.info("APC is off: %s has recurrent layers, whose state KV blocks do not restore", config.get("model_type"))
    return Limits(
        enabled=settings.prompt_cache_enabled,
        capacity_bytes=_capacity(settings, bytes_per_token, left, n_ctx),
        max_entries=settings.prompt_cache_max_entries,
        ttl=settings.prompt_cache_ttl,
        min_prefix=settings.prompt_cache_min_prefix,
        block_size=settings.apc_block_size if apc else None,
        num_blocks=settings.apc_num_blocks,
        hash=settings.apc_hash,
    )


def choose_snapshot_limits(
    settings: Settings, bytes_per_token: int, constant_bytes: int, left: int | None, n_ctx: int
) -> SnapshotLimits:
    """The same for snapshots of a model whose state takes `constant_bytes` and `bytes_per_token` for each token.

    Sliding layers count in full: a boundary snapshot is often taken before they wrap.
    """
    capacity = settings.prompt_cache_snapshot_capacity_bytes
    if capacity is None:
        entry = constant_bytes + bytes_per_token * representative_length(settings.ctx_size and n_ctx)
        capacity = default_capacity(entry, left, SNAPSHOT_MINIMUM)
        log.info(
            "Applied model-aware prompt-cache snapshot capacity default: old=%d recommended=%d entry=%d ceiling=%s",
            SNAPSHOT_MINIMUM,
            capacity,
            entry,
            "unknown" if left is None else left // 4,
        )
    return SnapshotLimits(
        enabled=settings.prompt_cache_enabled,
        capacity_bytes=capacity,
        max_entries=settings.prompt_cache_snapshot_max_entries,
        ttl=settings.prompt_cache_snapshot_ttl,
        min_prefix=settings.prompt_cache_min_prefix,
        per_session=settings.ctx_checkpoints,
        min_step=settings.checkpoint_min_step,
    )


def _capacity(settings: Settings, bytes_per_token: int, left: int | None, n_ctx: int) -> int:
    """Explicit bytes, else llama-server's MiB, else the default for this model."""
    if settings.prompt_cache_capacity_bytes is not None:
        return int(settings.prompt_cache_capacity_bytes)
    if settings.cache_ram is not None:
        return UNLIMITED if settings.cache_ram < 0 else settings.cache_ram * (1 << 20)
    if not bytes_per_token:
        return KV_STORE_MINIMUM
    entry = bytes_per_token * representative_length(settings.ctx_size and n_ctx)
    chosen = default_capacity(entry, left, KV_STORE_MINIMUM)
    log.info(
        "Applied model-aware prompt-cache KV store capacity default: old=%d recommended=%d entry=%d ceiling=%s",
        KV_STORE_MINIMUM,
        chosen,
        entry,
        "unknown" if left is None else left // 4,
    )
    return chosen
