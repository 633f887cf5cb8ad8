"""POST /v1/chat/completions and /v1/completions: what their bodies ask for."""

from __future__ import annotations

import time

from aiohttp import web

from mlxcel.api.generate import Asked, answer
from mlxcel.api.options import Options
from mlxcel.api.prepare import prepare_chat, prepare_prompts
from mlxcel.api.requests import parse_chat, parse_completion
from mlxcel.api.responses import Chat, Completion, Reply
from mlxcel.api.services import Services


async def chat(request: web.Request) -> web.StreamResponse:
    return await answer(request, _chat)


def _chat(services: Services, body: bytes) -> Asked:
    parsed = parse_chat(body, services.settings)
    return Asked(
        parsed.options, prepare_chat(services, parsed), Chat(new_reply(services, parsed.options)), parsed.conversation
    )


async def completions(request: web.Request) -> web.StreamResponse:
    return await answer(request, _completion)


def _completion(services: Services, body: bytes) -> Asked:
    parsed = parse_completion(body, services.settings)
    generations = prepare_prompts(services, parsed)
    return Asked(parsed.options, generations, Completion(new_reply(services, parsed.options), len(generations)))


def new_reply(services: Services, options: Options) -> Reply:
    model = services.live.model
    return Reply(options, model.id, int(time.time()), model.tokenizer.piece)
