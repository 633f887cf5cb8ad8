"""GET /v1/cache/stats: the numbers of both stores in one flat object, under the names that mlxcel's dashboards use;
GET /v1/cache/recent: the last requests.

Reasons are counted by the stores; here they are only summed up under the older, coarser `reject_*` names too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web

from mlxcel.api.generate import json_response
from mlxcel.api.services import SERVICES, Services
from mlxcel.cache.lookup import MissReason

if TYPE_CHECKING:
    from mlxcel.engine.reuse import Reject

LAYOUT = (MissReason.CANNOT_TRUNCATE, MissReason.WRAPPED_WINDOW, MissReason.UNRESTORABLE)


async def stats(request: web.Request) -> web.Response:
    """The store's numbers, then the snapshot store's; `entries` and `bytes` are of both."""
    services = request.app[SERVICES]
    live = services.loaded
    return json_response(
        services.store.stats()
        | {
            "entries": services.store.num_entries + services.snapshots.num_entries,
            "bytes": services.store.nbytes + services.snapshots.nbytes,
            "kv_cache_mode_effective": live.model.dtype if live else None,
            "reuse": live.model.reuse if live else None,
        }
        | services.snapshots.stats()
        | _rejects(services)
        | _last_reject(live.scheduler.reuse.trace.last_reject if live else None)
    )


async def recent(request: web.Request) -> web.Response:
    """The last requests, and beside them what is in flight now."""
    services = request.app[SERVICES]
    scheduler = services.live.scheduler
    return json_response(
        {
            "requests": services.recent.requests(),
            "running": scheduler.num_active,
            "waiting": scheduler.num_waiting,
            "slots": scheduler.bounds.num_slots,
        }
    )


def _rejects(services: Services) -> dict[str, int]:
    kv, snapshots = services.store.totals, services.snapshots.totals
    refused = snapshots.refusals
    return {
        "reject_oversized": kv.rejections_oversized + snapshots.rejections_oversized,
        "reject_prefix_too_short": sum(t.misses[MissReason.PROMPT_TOO_SHORT] for t in (kv, snapshots)),
        "reject_empty_set": sum(t.misses[MissReason.EMPTY] for t in (kv, snapshots)),
        "reject_block_boundary_floor": kv.misses[MissReason.BLOCK_FLOOR],
        "reject_snapshot_diverged": snapshots.misses[MissReason.DIVERGED],
        "reject_layout_constraints": sum(snapshots.misses[reason] for reason in LAYOUT),
        "reject_kv_mode_mismatch": refused["kv_mode"],
        "reject_model_owned_state": refused["layer_kinds"] + refused["shapes"] + refused["offset_mismatch"],
    }


def _last_reject(last: Reject | None) -> dict[str, object]:
    return {
        "last_reject_reason": last.reason if last else None,
        "last_reject_seq_id": last.seq_id if last else None,
        "last_reject_context_len": last.context_len if last else None,
        "last_reject_common_len": last.common if last else None,
        "last_reject_at_unix_ms": last.at_unix_ms if last else None,
    }
