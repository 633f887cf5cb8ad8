"""GET and POST /props: what is known of the server and its model.

It owns llama-server's shape of it. Nothing is settable: POST, which a flag has to allow, only says that it was heard.
"""

from __future__ import annotations

from array import array
from dataclasses import replace

from aiohttp import web

from mlxcel import __version__
from mlxcel.api.fields import Fields, parse_object
from mlxcel.api.generate import json_response
from mlxcel.api.native import reduced_settings
from mlxcel.api.responses import Object
from mlxcel.api.sampling import RANDOM_SEED, read_sampling
from mlxcel.api.services import SERVICES
from mlxcel.engine.sequence import Generation
from mlxcel.errors import NotSupported
from mlxcel.prompt.capabilities import capabilities
from mlxcel.settings import Settings

MEDIA_MARKER = "<__media__>"


async def show(request: web.Request) -> web.Response:
    services = request.app[SERVICES]
    settings, live = services.settings, services.live
    tokenizer = live.model.tokenizer
    return json_response(
        {
            "default_generation_settings": {"params": default_settings(settings), "n_ctx": live.scheduler.n_ctx},
            "total_slots": live.scheduler.bounds.num_slots,
            "model_alias": live.model.id,
            "model_ftype": live.model.dtype,
            "model_path": live.model.path,
            "modalities": {"vision": False, "video": False, "audio": False},
            "media_marker": MEDIA_MARKER,
            "endpoint_slots": settings.slots,
            "endpoint_props": settings.props,
            "endpoint_metrics": settings.metrics,
            "ui": settings.ui,
            "ui_settings": settings.ui_config,
            "chat_template": live.template.source if live.template else "",
            "chat_template_caps": capabilities(live.template) if live.template else {},
            "bos_token": tokenizer.bos_text or "",
            "eos_token": tokenizer.eos_text or "",
            "build_info": f"mlxcel-{__version__}",
            "is_sleeping": live.is_asleep(),
            "cors_proxy_enabled": False,
        }
    )


def default_settings(settings: Settings) -> Object:
    """What holds for a request that says nothing; no seed shows as llama-server's -1 in 32 bits."""
    generation = Generation(
        array("i", [0]),
        replace(read_sampling(Fields({}), settings), seed=settings.seed & RANDOM_SEED),
        max_tokens=None if settings.n_predict < 0 else settings.n_predict,
        ignore_eos=settings.ignore_eos,
    )
    return reduced_settings(generation) | {"stream": False, "timings_per_token": False}


async def change(request: web.Request) -> web.Response:
    if not request.app[SERVICES].settings.props:
        raise NotSupported("This server does not support changing global properties. Start it with `--props`")
    body = await request.read()
    if body.strip():
        parse_object(body)
    return json_response({"success": True})
