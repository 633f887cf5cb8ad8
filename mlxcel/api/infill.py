"""POST /infill: the text that belongs between a prefix and a suffix, for models that were trained to fill gaps.

It owns llama-server's fields of it and how the context is shared out among prefix, suffix and other files. The prompt
is then completed as any other one of token ids. Invariant: text of a request never becomes a special token here, but
for what its own `prompt` spells out.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from aiohttp import web

from mlxcel.api.fields import Fields, invalid, kind_of
from mlxcel.api.generate import Asked, answer
from mlxcel.api.openai import new_native, new_reply
from mlxcel.api.options import Options
from mlxcel.api.prepare import prepare_prompts, tokenise
from mlxcel.api.requests import Prompt, PromptRequest, parse_prompt, read_native
from mlxcel.api.services import Services
from mlxcel.engine.fim import Fim, Gap, Room, fim_prompt
from mlxcel.engine.tokenizer import Tokenizer
from mlxcel.errors import NotSupported

REPOSITORY = "myproject\n"
THIS_FILE = "filename\n"
OTHER_FILE = "tmp"


@dataclass(frozen=True, slots=True)
class InfillRequest:
    """`extra` are other files: their names and texts."""

    options: Options
    prefix: Prompt
    suffix: Prompt
    prompt: Prompt
    extra: tuple[tuple[str, str], ...]


async def infill(request: web.Request) -> web.StreamResponse:
    return await answer(request, _infill)


def _infill(services: Services, body: bytes) -> Asked:
    fim = services.live.model.tokenizer.fim
    if fim is None:
        raise NotSupported("Infill is not supported by this model: it has no tokens for prefix, suffix and middle")
    fields, options = read_native(body, services.settings)
    tokens = _tokens(services, fim, _read(fields, options))
    generations = prepare_prompts(services, PromptRequest(options, ((tokens,),)))
    return Asked(options, generations, new_native(services, new_reply(services, options), generations))


def _read(fields: Fields, options: Options) -> InfillRequest:
    prompt = fields.raw("prompt")
    return InfillRequest(
        options,
        prefix=_text(fields, "input_prefix"),
        suffix=_text(fields, "input_suffix"),
        prompt=() if prompt is None or prompt == [] else parse_prompt(prompt, "prompt"),
        extra=tuple(_extra(i, chunk) for i, chunk in enumerate(fields.array("input_extra", []))),
    )


def _text(fields: Fields, name: str) -> Prompt:
    value = fields.raw(name)
    return () if value == [] else parse_prompt(value, name)


def _extra(index: int, chunk: object) -> tuple[str, str]:
    name = f"input_extra[{index}]"
    if not isinstance(chunk, dict):
        raise invalid(name, f"expected an object, got {kind_of(chunk)}")
    members = {"filename": OTHER_FILE, **{k: v for k, v in chunk.items() if v is not None}}
    for key in ("text", "filename"):
        if not isinstance(members.get(key), str):
            raise invalid(f"{name}.{key}", f"expected a string, got {kind_of(members.get(key))}")
    return members["filename"], members["text"]


def _tokens(services: Services, fim: Fim, asked: InfillRequest) -> array[int]:
    tokenizer, n_ctx = services.live.model.tokenizer, services.live.scheduler.n_ctx
    gap = Gap(
        prefix=tokenise(tokenizer, asked.prefix, add_special=False, parse_special=False),
        suffix=tokenise(tokenizer, asked.suffix, add_special=False, parse_special=False),
        begun=tokenise(tokenizer, asked.prompt, add_special=False),
        others=_others(tokenizer, fim, asked.extra),
    )
    around = min(services.settings.batch_size, n_ctx * 3 // 4)
    answer = 2 * (asked.options.max_tokens or n_ctx // 8)
    room = Room(around, max(n_ctx - around - answer, 0))
    bos = tokenizer.encode("", add_special=True)
    return fim_prompt(fim, gap, room, bos, suffix_first=services.settings.spm_infill)


def _others(tokenizer: Tokenizer, fim: Fim, extra: tuple[tuple[str, str], ...]) -> array[int]:
    """Repository and files in the form of models that know both; else the files one after the other."""

    def plain(text: str) -> array[int]:
        return tokenise(tokenizer, (text,), add_special=False, parse_special=False)

    tokens: array[int] = array("i")
    if fim.repository is not None:
        tokens += array("i", [fim.repository]) + plain(REPOSITORY)
    for filename, text in extra:
        if fim.separator is None:
            tokens += plain(f"\n\n--- {filename} ---\n\n{text}")
        else:
            tokens += array("i", [fim.separator]) + plain(f"{filename}\n") + plain(text)
    if fim.separator is not None:
        tokens += array("i", [fim.separator]) + plain(THIS_FILE)
    return tokens
