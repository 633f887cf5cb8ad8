"""llama-server's own routes: /completion, /tokenize, /detokenize, /apply-template."""

from __future__ import annotations

from array import array

from aiohttp import web

from mlxcel.api.fields import Fields, invalid, parse_object
from mlxcel.api.generate import Asked, answer, json_response
from mlxcel.api.openai import new_native, new_reply
from mlxcel.api.prepare import chat_template, off_loop, prepare_prompts, render, tokenise
from mlxcel.api.requests import parse_conversation, parse_native, parse_prompt
from mlxcel.api.services import SERVICES, Services


async def completion(request: web.Request) -> web.StreamResponse:
    return await answer(request, _completion)


def _completion(services: Services, body: bytes) -> Asked:
    parsed = parse_native(body, services.settings)
    generations = prepare_prompts(services, parsed)
    return Asked(parsed.options, generations, new_native(services, new_reply(services, parsed.options), generations))


async def tokenize(request: web.Request) -> web.Response:
    return json_response(await off_loop(_tokenize, request.app[SERVICES], await request.read()))


def _tokenize(services: Services, body: bytes) -> dict[str, object]:
    fields, tokenizer = Fields(parse_object(body)), services.live.model.tokenizer
    content = fields.raw("content")
    if content is None or content == "" or content == []:
        return {"tokens": []}
    tokens = tokenise(tokenizer, parse_prompt(content, "content"), add_special=fields.boolean("add_special", False))
    if not fields.boolean("with_pieces", False):
        return {"tokens": tokens.tolist()}
    return {"tokens": [{"id": token, "piece": _piece(tokenizer.piece(token))} for token in tokens]}


def _piece(piece: bytes) -> str | list[int]:
    """A part of a character has no text of its own: its bytes then."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)


async def detokenize(request: web.Request) -> web.Response:
    return json_response(await off_loop(_detokenize, request.app[SERVICES], await request.read()))


def _detokenize(services: Services, body: bytes) -> dict[str, object]:
    tokenizer = services.live.model.tokenizer
    tokens = Fields(parse_object(body)).array("tokens", [])
    if not all(type(token) is int and 0 <= token < tokenizer.vocab_size for token in tokens):
        raise invalid("tokens", "expected an array of token ids of the vocabulary")
    return {"content": tokenizer.decode_special(array("i", tokens))}


async def apply_template(request: web.Request) -> web.Response:
    return json_response(await off_loop(_apply_template, request.app[SERVICES], await request.read()))


def _apply_template(services: Services, body: bytes) -> dict[str, object]:
    conversation = parse_conversation(body, services.settings)
    return {"prompt": render(chat_template(services), conversation, keep_thinking=services.store.enabled)}
