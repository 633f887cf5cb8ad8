"""Bytes of a generating request to a frozen, checked value, one parser per dialect.

It owns what differs between the dialects: where prompts come from and how log-probabilities are asked for. Token
ids below zero are refused here, ids beyond the vocabulary in api/prepare.py, which knows it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from mlxcel.api.constraint import refuse_two
from mlxcel.api.conversation import Conversation, read_conversation
from mlxcel.api.fields import Fields, invalid, parse_object
from mlxcel.api.options import Options, read_options
from mlxcel.settings import Settings

Prompt = tuple["str | array[int]", ...]
"""One raw prompt in order: runs of text and runs of token ids."""

MAX_CHAT_LOGPROBS = 20
MAX_LOGPROBS = 1000
MAX_PROMPTS = 128
EXTRA_BODY_FIELDS = ("cache_prompt", "prompt_cache_key", "user", "cache_salt", "chat_template_kwargs")


@dataclass(frozen=True, slots=True)
class ChatRequest:
    options: Options
    conversation: Conversation


@dataclass(frozen=True, slots=True)
class PromptRequest:
    options: Options
    prompts: tuple[Prompt, ...]


def parse_chat(body: bytes, settings: Settings) -> ChatRequest:
    """POST /v1/chat/completions. Raises InvalidRequest."""
    fields = _fields(body)
    refuse_two(fields)
    return ChatRequest(read_options(fields, settings, _chat_logprobs(fields)), read_conversation(fields, settings))


def parse_conversation(body: bytes, settings: Settings) -> Conversation:
    """POST /apply-template: the chat body, of which only the template's part is read. Raises InvalidRequest."""
    return read_conversation(_fields(body), settings)


def parse_completion(body: bytes, settings: Settings) -> PromptRequest:
    """POST /v1/completions. `logprobs` 0 asks for the chosen token's alone, as OpenAI has it. Raises InvalidRequest."""
    fields = _fields(body)
    logprobs = fields.integer("n_probs", "logprobs", default=None, low=0, high=MAX_LOGPROBS)
    for name in ("echo", "suffix"):
        if fields.raw(name):
            raise invalid(name, "not supported")
    if fields.integer("best_of", default=1) > fields.integer("n", default=1):
        raise invalid("best_of", "more than n is not supported")
    return _prompt_request(fields, settings, logprobs)


def parse_native(body: bytes, settings: Settings) -> PromptRequest:
    """POST /completion. `n_probs` 0 asks for no log-probabilities, as llama-server has it. Raises InvalidRequest."""
    fields = _fields(body)
    n_probs = fields.integer("n_probs", "logprobs", default=0, low=0, high=MAX_LOGPROBS)
    return _prompt_request(fields, settings, n_probs or None)


def _fields(body: bytes) -> Fields:
    """Clients that build the JSON themselves send `extra_body` as it is written for an SDK; the top level wins."""
    members = parse_object(body)
    extra = Fields(members).mapping("extra_body", {})
    return Fields(members | {k: extra[k] for k in EXTRA_BODY_FIELDS if k in extra and members.get(k) is None})


def _prompt_request(fields: Fields, settings: Settings, top_logprobs: int | None) -> PromptRequest:
    prompts = parse_prompts(fields.raw("prompt"), "prompt", MAX_PROMPTS)
    return PromptRequest(read_options(fields, settings, top_logprobs), prompts)


def parse_prompts(value: Any, name: str, most: int) -> tuple[Prompt, ...]:
    """An array without a bare token id is an array of prompts, as in llama-server. Raises InvalidRequest."""
    several = isinstance(value, list) and not any(type(part) is int for part in value)
    if several and not 0 < len(value) <= most:
        raise invalid(name, f"expected 1 to {most} prompts, got {len(value)}")
    return tuple(parse_prompt(part, name) for part in (value if several else [value]))


def parse_prompt(value: object, name: str) -> Prompt:
    """One prompt: text, token ids, both mixed, or {"prompt_string": text}. Raises InvalidRequest naming `name`."""
    if isinstance(value, dict):
        if value.get("multimodal_data"):
            raise invalid(name, "multimodal_data is not supported")
        value = value.get("prompt_string")
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and value and all(type(part) in (int, str) for part in value):
        return tuple(_run(kind, run, name) for kind, run in groupby(value, type))
    if value is None:
        raise invalid(name, "is required")
    raise invalid(name, "expected a string or a non-empty array of token ids and strings")


def _run(kind: type, run: Iterable[Any], name: str) -> str | array[int]:
    """Ids are signed 32-bit everywhere, as in the cache key."""
    if kind is str:
        return "".join(run)
    ids = list(run)
    if min(ids) < 0 or max(ids) >= 1 << 31:
        raise invalid(name, "a token id is out of the vocabulary")
    return array("i", ids)


def _chat_logprobs(fields: Fields) -> int | None:
    top = fields.integer("top_logprobs", default=None, low=0, high=MAX_CHAT_LOGPROBS)
    if fields.boolean("logprobs", False):
        return MAX_CHAT_LOGPROBS if top is None else top
    if top:
        raise invalid("top_logprobs", "needs logprobs to be true")
    return None
