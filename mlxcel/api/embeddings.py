"""POST /embedding(s) and /v1/embeddings: vectors of texts and token ids, in llama-server's form and in OpenAI's.

It owns both forms, which fields they read and what is refused. A body that brings `content` instead of `input` is
answered in the native form on every path. It does not know how a vector is computed; an input is one work of the
MLX thread after the other, so that running replies go on in between.
"""

from __future__ import annotations

import asyncio
import base64
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aiohttp import web

from mlxcel.api.fields import Fields, invalid, parse_object
from mlxcel.api.generate import json_response
from mlxcel.api.prepare import off_loop, tokenise
from mlxcel.api.requests import parse_prompts
from mlxcel.api.services import SERVICES, Services
from mlxcel.errors import NotSupported, ServerError

if TYPE_CHECKING:
    from mlxcel.engine.embedding import Pooling

MAX_INPUTS = 2048
MAX_NORM = 100


@dataclass(frozen=True, slots=True)
class Inputs:
    prompts: Sequence[array[int]]
    is_native: bool
    is_base64: bool
    normalise: int
    model: str


async def native(request: web.Request) -> web.Response:
    return await _answer(request, is_native=True)


async def openai(request: web.Request) -> web.Response:
    return await _answer(request, is_native=False)


async def _answer(request: web.Request, *, is_native: bool) -> web.Response:
    services = request.app[SERVICES]
    if not services.settings.embeddings:
        raise NotSupported("This server does not support embeddings. Start it with `--embeddings`")
    inputs = await off_loop(_read, services, await request.read())
    pooling = await asyncio.to_thread(_pooling, services)
    is_native = is_native or inputs.is_native
    if pooling == "none" and not is_native:
        raise invalid("input", "Pooling type 'none' is not OAI compatible. Please use a different pooling type")
    vectors = [await _embed(services, tokens, pooling, inputs.normalise) for tokens in inputs.prompts]
    if is_native:
        return json_response([{"index": i, "embedding": rows} for i, rows in enumerate(vectors)])
    total = sum(map(len, inputs.prompts))
    return json_response(
        {
            "object": "list",
            "model": inputs.model,
            "usage": {"prompt_tokens": total, "total_tokens": total},
            "data": [_entry(i, rows[0], inputs.is_base64) for i, rows in enumerate(vectors)],
        }
    )


def _read(services: Services, body: bytes) -> Inputs:
    fields = Fields(parse_object(body))
    field = "content" if fields.raw("input") is None and fields.raw("content") is not None else "input"
    wanted = fields.text("encoding_format", "float")
    if wanted not in ("float", "base64"):
        raise invalid("encoding_format", "must be float or base64")
    model = services.live.model
    prompts = parse_prompts(fields.raw(field), field, MAX_INPUTS)
    return Inputs(
        prompts=[_checked(services, tokenise(model.tokenizer, p, add_special=True), field) for p in prompts],
        is_native=field == "content",
        is_base64=wanted == "base64",
        normalise=fields.integer("embd_normalize", default=services.settings.embd_normalize, low=-1, high=MAX_NORM),
        model=fields.text("model", model.id),
    )


def _checked(services: Services, tokens: array[int], field: str) -> array[int]:
    """An input too large is llama-server's 500 and not a 400: clients look for its words."""
    if not tokens:
        raise invalid(field, "Input content cannot be empty")
    if max(tokens) >= services.live.model.vocab_size:
        raise invalid(field, "a token id is out of the vocabulary")
    n_ctx = services.live.scheduler.n_ctx
    if len(tokens) > n_ctx:
        raise ServerError(
            f"input ({len(tokens)} tokens) is too large to process, the context is {n_ctx} tokens: "
            "try a larger --ctx-size"
        )
    return tokens


def _pooling(services: Services) -> Pooling:
    from mlxcel.engine.embedding import pooling_of

    return services.settings.pooling or pooling_of(services.live.model)


async def _embed(services: Services, tokens: array[int], pooling: Pooling, kind: int) -> list[list[float]]:
    """The vectors of one input; those of single tokens are not normalised, as in llama-server."""
    from mlxcel.engine.embedding import Embedding, normalised

    scheduler = services.live.scheduler
    embedding = Embedding(tokens, pooling, scheduler.bounds.chunk)
    while not await scheduler.on_model(embedding.step):
        pass
    return embedding.vectors if pooling == "none" else [normalised(v, kind) for v in embedding.vectors]


def _entry(index: int, vector: list[float], is_base64: bool) -> dict[str, object]:
    if not is_base64:
        return {"object": "embedding", "index": index, "embedding": vector}
    packed = base64.b64encode(array("f", vector).tobytes()).decode()
    return {"object": "embedding", "index": index, "embedding": packed, "encoding_format": "base64"}
