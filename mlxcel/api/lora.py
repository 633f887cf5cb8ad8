"""GET and POST /lora-adapters. No adapter can be loaded yet, so the list is empty and every id is unknown."""

from __future__ import annotations

from aiohttp import web

from mlxcel.api.fields import parse_array
from mlxcel.api.generate import json_response
from mlxcel.api.options import check_scales


async def list_adapters(request: web.Request) -> web.Response:
    return json_response([])


async def scale(request: web.Request) -> web.Response:
    """An empty array sets all scales to 0, which they are."""
    check_scales(parse_array(await request.read()), "id")
    return json_response({"success": True})
