"""POST /v1/chat/completions and /v1/completions: what their bodies ask for, and how many tokens a chat is."""

from __future__ import annotations

import time
from collections.abc import Sequence

from aiohttp import web

from mlxcel.api.generate import Asked, answer, json_response
from mlxcel.api.native import Native
from mlxcel.api.options import Options
from mlxcel.api.prepare import off_loop, prepare_chat, prepare_prompts, render_chat, tokenise
from mlxcel.api.requests import parse_chat, parse_completion, parse_conversation
from mlxcel.api.responses import Chat, Completion, Reply
from mlxcel.api.services import SERVICES, Services
from mlxcel.engine.sequence import Generation


async def chat(request: web.Request) -> web.StreamResponse:
    return await answer(request, _chat)


def _chat(services: Services, body: bytes) -> Asked:
    parsed = parse_chat(body, services.settings)
    generations = prepare_chat(services, parsed)
    reply = new_reply(services, parsed.options)
    shape = Chat(reply, _verbose(services, reply, generations))
    return Asked(parsed.options, generations, shape, parsed.conversation)


async def count(request: web.Request) -> web.Response:
    return json_response(await off_loop(_count, request.app[SERVICES], await request.read()))


def _count(services: Services, body: bytes) -> dict[str, object]:
    """Of the prompt that the same body would be answered to."""
    text = render_chat(services, parse_conversation(body, services.settings))
    tokens = tokenise(services.live.model.tokenizer, (text,), add_special=False)
    return {"object": "response.input_tokens", "input_tokens": len(tokens)}


async def completions(request: web.Request) -> web.StreamResponse:
    return await answer(request, _completion)


def _completion(services: Services, body: bytes) -> Asked:
    parsed = parse_completion(body, services.settings)
    generations = prepare_prompts(services, parsed)
    reply = new_reply(services, parsed.options)
    shape = Completion(reply, len(generations), _verbose(services, reply, generations))
    return Asked(parsed.options, generations, shape)


def _verbose(services: Services, reply: Reply, generations: Sequence[Generation]) -> Native | None:
    return new_native(services, reply, generations) if reply.options.verbose else None


def new_native(services: Services, reply: Reply, generations: Sequence[Generation]) -> Native:
    decode = services.live.model.tokenizer.decode_special
    return Native(reply, generations, [decode(generation.prompt) for generation in generations])


def new_reply(services: Services, options: Options) -> Reply:
    model = services.live.model
    return Reply(options, model.id, int(time.time()), model.tokenizer.piece)
