"""What watches and steers the server rather than generating: health, metrics."""

from __future__ import annotations

from aiohttp import web

from mlxcel.api.generate import json_response
from mlxcel.api.services import SERVICES
from mlxcel.errors import NotSupported

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


async def health(request: web.Request) -> web.Response:
    """Load never changes it; while the model loads the middleware has answered 503 already."""
    return json_response({"status": "ok"})


async def metrics(request: web.Request) -> web.Response:
    """Prometheus text; 501 names the flag as long as it is off."""
    services = request.app[SERVICES]
    if not services.settings.metrics:
        raise NotSupported("This server does not support metrics endpoint. Start it with `--metrics`")
    headers = {"Content-Type": METRICS_TYPE, "Process-Start-Time-Unix": str(int(services.metrics.started_at))}
    return web.Response(body=services.metrics.render().encode(), headers=headers)
