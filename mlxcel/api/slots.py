"""GET /slots, and POST /slots/{id}?action=save|restore|erase.

It owns llama-server's JSON of a slot. What a slot leaves behind is in the prompt cache: saving copies it from there
into a file, restoring puts it back there, under the context it was computed in, so that the next request with the
same beginning adopts it. A salted slot's file is taken back only by who brings the salt.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from array import array
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiohttp import web

from mlxcel.api.fields import Fields, invalid, parse_object
from mlxcel.api.generate import json_response
from mlxcel.api.native import reduced_settings
from mlxcel.api.services import SERVICES, Live, Services
from mlxcel.cache.key import CacheContext, salt_key
from mlxcel.errors import InvalidRequest, NotSupported, Unavailable

if TYPE_CHECKING:
    from mlxcel.engine.slotfile import Header
    from mlxcel.engine.slots import Slot

FILENAME = re.compile(r"[A-Za-z0-9_\-][A-Za-z0-9_.\-]{0,199}")


async def list_slots(request: web.Request) -> web.Response:
    services = request.app[SERVICES]
    if not services.settings.slots:
        raise NotSupported("This server does not support slots endpoint. Start it without `--no-slots`")
    slots = services.live.scheduler.slots.all
    if request.query.get("fail_on_no_slot") and all(slot.busy for slot in slots):
        raise Unavailable("no slot available")
    return json_response([_shown(services.live, slot) for slot in slots])


def _shown(live: Live, slot: Slot) -> dict[str, object]:
    shown: dict[str, object] = {
        "id": slot.id,
        "n_ctx": live.scheduler.n_ctx,
        "speculative": False,
        "is_processing": slot.busy,
    }
    sequence = slot.sequence
    if sequence is None:
        return shown
    decoded = len(sequence.tokens)
    return shown | {
        "id_task": sequence.id,
        "n_prompt_tokens": sequence.num_prompt,
        "n_prompt_tokens_processed": max(sequence.num_prefilled - sequence.num_cached, 0) + bool(decoded),
        "n_prompt_tokens_cache": sequence.num_cached,
        "params": reduced_settings(sequence.generation),
        "next_token": [
            {
                "has_next_token": slot.busy,
                "has_new_line": sequence.text.has_new_line,
                "n_remain": max(sequence.max_tokens - decoded, 0) if slot.busy else -1,
                "n_decoded": decoded,
            }
        ],
    }


async def act(request: web.Request) -> web.Response:
    services = request.app[SERVICES]
    if not services.settings.slot_save_path:
        raise NotSupported("This server does not support slots action. Start it with `--slot-save-path`")
    if not re.fullmatch(r"-?\d{1,9}", request.match_info["id"]):
        raise InvalidRequest("Invalid slot ID")
    do = ACTIONS.get(request.query.get("action", ""))
    if do is None:
        raise InvalidRequest("Invalid action")
    body = await request.read()
    fields = Fields(parse_object(body) if body.strip() else {})
    slot = services.live.scheduler.slots[int(request.match_info["id"])]
    await slot.when_free()
    return json_response({"id_slot": slot.id} | await do(services, slot, fields))


def _path(services: Services, fields: Fields) -> Path:
    name = fields.text("filename", "")
    if not FILENAME.fullmatch(name) or ".." in name:
        raise InvalidRequest("Invalid filename", param="filename")
    return Path(services.settings.slot_save_path) / name


# --- save


async def _save(services: Services, slot: Slot, fields: Fields) -> dict[str, object]:
    from mlxcel.engine import slotfile

    path, began = _path(services, fields), time.monotonic()
    context, tokens = slot.content
    _check_salt(context.salt if context else None, fields)
    header, arrays = await _exported(services, context, tokens)
    try:
        nbytes = await asyncio.to_thread(slotfile.write, path, header, arrays)
    except OSError as error:
        raise InvalidRequest(f"Unable to save slot: {error.strerror or error}", param="filename") from None
    return {
        "filename": path.name,
        "n_saved": len(header.tokens),
        "n_written": nbytes,
        "timings": {"save_ms": (time.monotonic() - began) * 1000},
    }


async def _exported(services: Services, context: CacheContext | None, tokens: array[int]) -> tuple[Header, list[Any]]:
    """What of `tokens` is stored now; nothing at all is a file too, as llama-server writes it."""
    from mlxcel.engine import slotstate
    from mlxcel.engine.slotfile import Header

    live = services.live
    kind, length = "kv", 0
    arrays: list[Any] = []
    dtypes: list[str] = []
    leaves: list[dict[str, object]] = []
    if context is not None and live.model.reuse == "snapshots":
        snapshot = services.snapshots.find(context, tokens)
        if snapshot is not None:
            kind, length = "snapshot", snapshot.num_tokens
            arrays, dtypes, leaves = await live.scheduler.on_engine(partial(slotstate.pack_state, snapshot.payload))  # type: ignore[arg-type]
    elif context is not None:
        length, segments = services.store.export(context, tokens)
        arrays, dtypes = await live.scheduler.on_engine(partial(slotstate.pack_kv, live.model, segments))
    mark = await live.scheduler.on_model(slotstate.fingerprint)
    return Header(mark, kind, tokens[:length].tolist(), _told(context), dtypes, leaves), arrays


def _told(context: CacheContext | None) -> dict[str, str | int | None]:
    if context is None:
        return {}
    return {
        "template_sig": context.template_sig,
        "session_key": context.session_key,
        "lora_id": context.lora_id,
        "rope_regime": context.rope_regime,
        "mm_digest": context.mm_digest.hex(),
        "salt": _salt_mark(context.salt),
    }


def _salt_mark(salt: str | None) -> str | None:
    return None if salt is None else hashlib.blake2b(b"slot", key=salt_key(salt), digest_size=16).hexdigest()


def _check_salt(salt: str | None, fields: Fields) -> None:
    if salt != fields.text("cache_salt", None):
        raise invalid("cache_salt", "is not that of the slot")


# --- restore


async def _restore(services: Services, slot: Slot, fields: Fields) -> dict[str, object]:
    """Whatever goes wrong, the slot ends empty."""
    from mlxcel.engine import slotfile, slotstate

    path, began, live = _path(services, fields), time.monotonic(), services.live
    slot.clear()
    mark = await live.scheduler.on_model(slotstate.fingerprint)
    try:
        header, arrays, nbytes = await asyncio.to_thread(slotfile.read, path, mark)
        if not all(type(t) is int and 0 <= t < live.model.vocab_size for t in header.tokens):
            raise slotfile.BadFile("its tokens are not those of this model")
        context = _context(live, header, fields)
        if header.tokens:
            await _put_back(services, context, header, arrays)
    except slotfile.BadFile as error:
        raise InvalidRequest(f"Unable to restore slot: {error}", param="filename") from None
    slot.restored = context, array("i", header.tokens)
    return {
        "filename": path.name,
        "n_restored": len(header.tokens),
        "n_read": nbytes,
        "timings": {"restore_ms": (time.monotonic() - began) * 1000},
    }


def _context(live: Live, header: Header, fields: Fields) -> CacheContext:
    salt, told = fields.text("cache_salt", None), header.context
    if told.get("salt") != _salt_mark(salt):
        raise invalid("cache_salt", "is not that of the saved slot")
    return CacheContext(
        model_id=live.model.id,
        template_sig=str(told.get("template_sig", "")),
        session_key=told.get("session_key"),  # type: ignore[arg-type]
        lora_id=told.get("lora_id"),  # type: ignore[arg-type]
        rope_regime=told.get("rope_regime"),  # type: ignore[arg-type]
        mm_digest=bytes.fromhex(str(told.get("mm_digest", ""))),
        salt=salt,
    )


async def _put_back(services: Services, context: CacheContext, header: Header, arrays: list[Any]) -> None:
    from mlxcel.engine import slotstate
    from mlxcel.engine.slotfile import BadFile

    live, tokens, now = services.live, array("i", header.tokens), time.monotonic()
    kept: object
    if header.kind == "snapshot":
        work = partial(slotstate.unpack_state, live.model, arrays, header.dtypes, header.leaves, len(tokens))
        state = await live.scheduler.on_engine(work)
        kept = services.snapshots.insert(context, tokens, state, "completion", now)
    else:
        segment = await live.scheduler.on_engine(
            partial(slotstate.unpack_kv, live.model, arrays, header.dtypes, len(tokens))
        )
        kept = services.store.insert(context, tokens, 0, segment, now)
    if kept is None:
        raise BadFile("the prompt cache is off, too small for it, or does not store so few tokens")


async def _erase(services: Services, slot: Slot, fields: Fields) -> dict[str, object]:
    context, tokens = slot.content
    if context is not None:
        _check_salt(context.salt, fields)
        services.store.discard(context, tokens)
        services.snapshots.discard(context, tokens)
    slot.clear()
    return {"n_erased": len(tokens)}


ACTIONS: dict[str, Callable[[Services, Slot, Fields], Awaitable[dict[str, object]]]] = {
    "save": _save,
    "restore": _restore,
    "erase": _erase,
}
