"""Routes of llama-server that a text server cannot serve: they say so, in the way its clients understand.

501 is for what another model would make possible, 403 for what llama-server itself leaves off unless it is asked.
No body is read. Invariant: nothing here depends on settings or on the model.
"""

from __future__ import annotations

from typing import NoReturn

from aiohttp import web

from mlxcel.errors import FeatureDisabled, NotSupported


async def transcribe(request: web.Request) -> NoReturn:
    raise NotSupported("This server does not support audio: its model takes text only")


async def rerank(request: web.Request) -> NoReturn:
    raise NotSupported("This server does not support reranking: its model has no rank pooling")


async def decide(request: web.Request) -> NoReturn:
    raise NotSupported("This server does not support decisions: its model is not a decision model")


async def disabled(request: web.Request) -> NoReturn:
    raise FeatureDisabled("This feature is disabled: the server runs no tools and forwards no requests")
