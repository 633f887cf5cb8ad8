"""GET and DELETE /v1/stream, POST /v1/streams/lookup: coming back to a streamed reply, stopping it, finding it.

It reads what these requests ask for; the replies are those of `streams`. Invariant: nobody is told of a conversation
whose id they did not name.
"""

from __future__ import annotations

import re

from aiohttp import web

from mlxcel.api.fields import Fields, parse_object
from mlxcel.api.generate import json_response
from mlxcel.api.prepare import off_loop
from mlxcel.api.services import SERVICES, Services
from mlxcel.api.streams import Recording, follow
from mlxcel.errors import InvalidRequest, NotFound

OFFSET = re.compile("[0-9]{1,18}")


async def resume(request: web.Request) -> web.StreamResponse:
    services = request.app[SERVICES]
    recording = services.streams.find(_conversation(request))
    if recording is None:
        raise NotFound("there is no stream of this conversation, or not any more")
    offset = request.query.get("from") or "0"
    if not OFFSET.fullmatch(offset):
        raise InvalidRequest("Query parameter 'from': expected the number of bytes to leave out", param="from")
    if int(offset) < recording.num_dropped:
        lost = f"the first {recording.num_dropped} bytes of this stream are kept no longer"
        raise InvalidRequest(f"Query parameter 'from': {lost}", param="from")
    return await follow(request, recording, services.settings.timeout, int(offset))


async def stop(request: web.Request) -> web.Response:
    request.app[SERVICES].streams.stop(_conversation(request))
    return web.Response(status=204)


async def lookup(request: web.Request) -> web.Response:
    services = request.app[SERVICES]
    wanted = await off_loop(_conversations, services, await request.read())
    found = services.streams.named()
    return json_response([_told(recording) for name in wanted for recording in found.get(name, [])])


def _conversation(request: web.Request) -> str:
    name: str = request.query.get("conv_id", "")
    if not name:
        raise InvalidRequest("Query parameter 'conv_id' is missing", param="conv_id")
    return name


def _conversations(services: Services, body: bytes) -> list[str]:
    names = Fields(parse_object(body)).array("conversation_ids", [])
    return list(dict.fromkeys(name for name in names if isinstance(name, str)))


def _told(recording: Recording) -> dict[str, object]:
    return {
        "conversation_id": recording.conversation_id,
        "is_done": recording.is_done,
        "total_bytes": recording.num_bytes,
        "started_at": recording.started_at,
        "completed_at": recording.completed_at,
    }
