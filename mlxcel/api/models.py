"""GET /models and /v1/models: the one model that is served, in OpenAI's form and in Ollama's.

It owns the two shapes, which are llama-server's; `format` and `ftype` say what the weights here really are.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from aiohttp import web

from mlxcel.api.generate import json_response
from mlxcel.api.services import SERVICES, Services

if TYPE_CHECKING:
    from mlxcel.engine.model import LoadedModel

VOCAB_TYPES = {"none": 0, "sentencepiece": 1, "bytes": 2, "wordpiece": 3}
"""llama.cpp's numbers."""
WIDTHS = ("hidden_size", "n_embd", "d_model", "dim")


async def models(request: web.Request) -> web.Response:
    services = request.app[SERVICES]
    return json_response({"object": "list", "data": [_openai(services)], "models": [_ollama(services.live.model)]})


def _openai(services: Services) -> dict[str, object]:
    model, settings = services.live.model, services.settings
    return {
        "id": model.id,
        "aliases": sorted(set(settings.alias)),
        "tags": sorted(set(settings.tags)),
        "object": "model",
        "created": int(time.time()),
        "owned_by": "llamacpp",  # clients look for it to know what the server can do
        "architecture": {"input_modalities": ["text"], "output_modalities": ["text"]},
        "meta": {
            "vocab_type": VOCAB_TYPES[model.tokenizer.kind],
            "n_vocab": model.vocab_size,
            "n_ctx": services.live.scheduler.n_ctx,
            "n_ctx_train": model.n_ctx_train,
            "n_embd": _width(model.config),
            "n_params": model.num_params,
            "size": model.nbytes,
            "ftype": model.dtype,
        },
    }


def _width(config: dict[str, Any]) -> int:
    """Of the hidden states; 0 when the configuration does not say."""
    merged = {**config, **config.get("text_config", {})}
    return next((int(merged[name]) for name in WIDTHS if merged.get(name)), 0)


def _ollama(model: LoadedModel) -> dict[str, object]:
    family = str(model.config.get("model_type", ""))
    return {
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
            "format": "gguf" if model.path.endswith(".gguf") else "mlx",
            "family": family,
            "families": [family],
            "parameter_size": "",
            "quantization_level": "",
        },
    }
