"""What watches and steers the server rather than generating: health, models, metrics."""

from __future__ import annotations

import time

from aiohttp import web

from mlxcel.api.generate import json_response
from mlxcel.api.services import SERVICES
from mlxcel.errors import NotSupported

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


async def health(request: web.Request) -> web.Response:
    """Load never changes it; while the model loads the middleware has answered 503 already."""
    return json_response({"status": "ok"})


async def models(request: web.Request) -> web.Response:
    services = request.app[SERVICES]
    model, settings = services.live.model, services.settings
    meta = {
        "n_vocab": model.vocab_size,
        "n_ctx": services.live.scheduler.n_ctx,
        "n_ctx_train": model.n_ctx_train,
        "n_params": model.num_params,
        "size": model.nbytes,
        "ftype": model.dtype,
    }
    entry = {
        "id": model.id,
        "aliases": list(settings.alias),
        "tags": [],
        "object": "model",
        "created": int(time.time()),
        "owned_by": "mlxcel",
        "architecture": {"input_modalities": ["text"], "output_modalities": ["text"]},
        "meta": meta,
    }
    family = str(model.config.get("model_type", ""))
    ollama = {
        "name": model.id,
        "model": model.id,
        "modified_at": "",
        "size": "",
        "digest": "",
        "type": "model",
        "description": "",
        "tags": [""],
        "capabilities": ["completion"],
        "parameters": "",
        "details": {
            "parent_model": "",
            "format": "mlx",
            "family": family,
            "families": [family],
            "parameter_size": "",
            "quantization_level": "",
        },
    }
    return json_response({"object": "list", "data": [entry], "models": [ollama]})


async def metrics(request: web.Request) -> web.Response:
    """Prometheus text; 501 names the flag as long as it is off."""
    services = request.app[SERVICES]
    if not services.settings.metrics:
        raise NotSupported("This server does not support metrics endpoint. Start it with `--metrics`")
    headers = {"Content-Type": METRICS_TYPE, "Process-Start-Time-Unix": str(int(services.metrics.started_at))}
    return web.Response(body=services.metrics.render().encode(), headers=headers)
