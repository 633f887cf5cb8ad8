"""llama-server's own routes: /completion, /tokenize, /detokenize, /apply-template."""

from __future__ import annotations

from array import array

from aiohttp import web

from mlxcel.api.fields import Fields, invalid, parse_object
from mlxcel.api.generate import Asked, answer, json_response
from mlxcel.api.openai import new_native, new_reply
from mlxcel.api.prepare import off_loop, prepare_prompts, render_chat, tokenise
from mlxcel.api.requests import parse_conversation, parse_native, parse_prompt
from mlxcel.api.services import SERVICES, Services

MAX_TOKENS = 1 << 21  # of one call to /detokenize: some four seconds


async def completion(request: web.Request) -> web.StreamResponse:
    return await answer(request, _completion)


def _completion(services: Services, body: bytes) -> Asked:
    parsed = parse_native(body, services.settings)
    generations = prepare_prompts(services, parsed)
    return Asked(parsed.options, generations, new_native(services, new_reply(services, parsed.options), generations))


async def tokenize(request: web.Request) -> web.Response:
    return json_response(await off_loop(_tokenize, request.app[SERVICES], await request.read()))


def _tokenize(services: Services, body: bytes) -> dict[str, object]:
    """Anything but a boolean leaves a switch as it is by default, as in llama-server."""
    fields, tokenizer = Fields(parse_object(body)), services.live.model.tokenizer
    content = fields.raw("content")
    if content is None or content == "" or content == []:
        return {"tokens": []}
    add_special, parse_special = fields.raw("add_special") is True, fields.raw("parse_special") is not False
    prompt = parse_prompt(content, "content")
    tokens = tokenise(tokenizer, prompt, add_special=add_special, parse_special=parse_special)
    if fields.raw("with_pieces") is not True:
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
    if len(tokens) > MAX_TOKENS:
        raise invalid("tokens", f"{len(tokens)} are too many: {MAX_TOKENS} at most")
    if not all(type(token) is int and 0 <= token < tokenizer.vocab_size for token in tokens):
        raise invalid("tokens", "expected an array of token ids of the vocabulary")
    return {"content": tokenizer.decode_special(array("i", tokens))}


async def apply_template(request: web.Request) -> web.Response:
    return json_response(await off_loop(_apply_template, request.app[SERVICES], await request.read()))


def _apply_template(services: Services, body: bytes) -> dict[str, object]:
    return {"prompt": render_chat(services, parse_conversation(body, services.settings))}
