"""The prompt cache over HTTP: what it holds, why a request would miss, and how to fill it ahead of time.

It owns the JSON of /v1/cache/*. Bodies are those of the chat and completion routes, told apart by `messages`. An
explanation shows a few words of a stored prompt of the same salt; of another salt it shows nothing at all.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from aiohttp import web

from mlxcel.api.fields import invalid, parse_object
from mlxcel.api.generate import json_response, run_to_end
from mlxcel.api.prepare import off_loop, prepare_chat, prepare_prompts
from mlxcel.api.requests import parse_chat, parse_completion
from mlxcel.api.services import SERVICES, Services
from mlxcel.cache.entry import Entry
from mlxcel.cache.explain import Explanation, explain, explain_snapshots
from mlxcel.cache.key import CacheContext
from mlxcel.cache.lookup import MissReason
from mlxcel.cache.snapshots import Snapshot

if TYPE_CHECKING:
    from mlxcel.engine.sequence import Generation
    from mlxcel.engine.tokenizer import Tokenizer

EXCERPT = 12  # tokens of text shown on each side of the first difference

HINTS: dict[str, str] = {
    MissReason.DISABLED: "The prompt cache is off; start the server with --prompt-cache-enabled.",
    "opted_out": "The request says cache_prompt: false, or the server runs with --no-cache-prompt.",
    "family": "This model keeps something that cannot be stored, or the self-test found its stored state wrong.",
    MissReason.PROMPT_TOO_SHORT: (
        "The prompt has no more tokens than --prompt-cache-min-prefix, and its last one is always computed."
    ),
    MissReason.EMPTY: "Nothing is stored yet that this request could share: the first request is always cold.",
    MissReason.MODEL: "What is stored was computed by another model.",
    MissReason.LORA: "What is stored was computed with other LoRA adapters or scales.",
    MissReason.TEMPLATE: "What is stored was rendered by another chat template, or as a raw prompt.",
    MissReason.TOOLS: "The tools or tool_choice differ from those of what is stored; order and every word count.",
    MissReason.KWARGS: "chat_template_kwargs (or what is mapped onto them) differ from those of what is stored.",
    MissReason.ROPE: "What is stored was computed with another RoPE table (another length class).",
    MissReason.MEDIA: "The images or audio differ from those of what is stored.",
    MissReason.EXPIRED: "What this request could have shared has outlived --prompt-cache-ttl.",
    MissReason.DIVERGED: "The prompts part before --prompt-cache-min-prefix; see first_difference for where.",
    MissReason.BLOCK_FLOOR: "The common part holds no whole block; a smaller --apc-block-size would reuse it.",
    MissReason.PARTIAL_ENTRY: "Only a part of a stored entry matches, and with APC off only whole entries do.",
    MissReason.OTHER_SESSION: (
        "Snapshots belong to one session: send the same prompt_cache_key (or user) in every turn of a conversation."
    ),
    MissReason.WRAPPED_WINDOW: (
        "The history was changed, and the stored state has dropped what its sliding window no longer sees."
    ),
    MissReason.CANNOT_TRUNCATE: "The history was changed, and recurrent state cannot go back to before the change.",
    MissReason.UNRESTORABLE: "The stored state does not fit the loaded model.",
}


@dataclass(frozen=True, slots=True)
class Ask:
    generation: Generation
    pin: bool | None


def _read(services: Services, body: bytes) -> Ask:
    """The first generation that the body asks for. Raises InvalidRequest."""
    members = parse_object(body)
    pin = members.get("pin")
    if pin is not None and not isinstance(pin, bool):
        raise invalid("pin", "expected a boolean")
    if "messages" in members:
        return Ask(prepare_chat(services, parse_chat(body, services.settings))[0], pin)
    if "prompt" in members:
        return Ask(prepare_prompts(services, parse_completion(body, services.settings))[0], pin)
    raise invalid("messages", "expected the body of a chat (messages) or of a completion (prompt)")


async def reset(request: web.Request) -> web.Response:
    """Forget all stored KV. Sequences in flight keep what they adopted."""
    services = request.app[SERVICES]
    freed = [services.store.reset(), services.snapshots.reset()]
    if services.loaded is not None:
        services.loaded.scheduler.drop_warmups()
    nbytes, entries = (sum(numbers) for numbers in zip(*freed, strict=True))
    return json_response({"cleared": True, "freed_bytes": nbytes, "freed_entries": entries})


async def explain_miss(request: web.Request) -> web.Response:
    """POST /v1/cache/explain: what a lookup of this body would say now. Generates and counts nothing."""
    services = request.app[SERVICES]
    ask = await off_loop(_read, services, await request.read())
    return json_response(_explained(services, ask.generation, time.monotonic()))


def _explained(services: Services, generation: Generation, now: float) -> dict[str, object]:
    live, limits = services.live, services.store.limits
    context = generation.cache
    told: Explanation | None = None
    reason = _never(services, context)
    if reason is None:
        assert context is not None
        if live.model.reuse == "snapshots":
            told = explain_snapshots(services.snapshots, context, generation.prompt, now)
        else:
            told = explain(services.store, context, generation.prompt, now)
        reason = told.reason
    return {
        "outcome": "miss" if reason else "hit",
        "reason": reason,
        "hint": HINTS[reason] if reason else None,
        "prompt_tokens": len(generation.prompt),
        "matched_tokens": told.matched if told else 0,
        "common_tokens": told.common if told else 0,
        "floored_tokens": told.blocks_floored if told else 0,
        "min_prefix": limits.min_prefix,
        "block_size": limits.block_size or 0,
        "best": _best(told, now) if told else None,
        "first_difference": _difference(told, generation, live.model.tokenizer) if told else None,
        "key_differences": list(told.key_differences) if told else [],
        "template_sig": context.template_sig if context else None,
    }


def _never(services: Services, context: CacheContext | None) -> str | None:
    """Why no lookup takes place at all."""
    if not services.store.enabled:
        return MissReason.DISABLED
    if context is None:
        return "opted_out"
    return "family" if services.live.model.reuse == "none" else None


def _best(told: Explanation, now: float) -> dict[str, object] | None:
    entry = told.best
    if entry is None:
        return None
    return {
        "digest": entry.digest.hex()[:16],
        "tokens": entry.num_tokens,
        "same_session": told.same_session,
        "age_seconds": round(now - entry.created_at, 1),
        "idle_seconds": round(now - entry.last_used, 1),
        "pinned": entry.pinned,
    }


def _difference(told: Explanation, generation: Generation, tokenizer: Tokenizer) -> dict[str, object] | None:
    at, theirs = told.first_difference, told.best_tokens
    if at is None or theirs is None:
        return None
    ours = generation.prompt
    return {
        "index": at,
        "before": tokenizer.decode_special(ours[max(at - EXCERPT, 0) : at]),
        "prompt": tokenizer.decode_special(ours[at : at + EXCERPT]),
        "entry": tokenizer.decode_special(theirs[at : at + EXCERPT]),
    }


async def warm(request: web.Request) -> web.Response:
    """POST /v1/cache/warm: prefill and store a prompt without generating. `pin` keeps it, `pin: false` lets go."""
    services = request.app[SERVICES]
    ask = await off_loop(_read, services, await request.read())
    generation = replace(ask.generation, max_tokens=0, top_logprobs=None)
    reason = _never(services, generation.cache)
    if reason is not None:
        raise invalid("cache_prompt", f"nothing can be stored: {HINTS[reason]}")
    end = await run_to_end(services, generation)
    entry = _stored(services, generation)
    if entry is not None and ask.pin is not None:
        _pin(services, entry, ask.pin)
    return json_response(
        {
            "prompt_tokens": end.prompt_tokens,
            "cached_tokens": end.cached_tokens,
            "prefilled_tokens": end.prompt_tokens - end.cached_tokens,
            "stored": entry is not None,
            "bytes": entry.nbytes if entry else 0,
            "digest": entry.digest.hex()[:16] if entry else None,
            "pinned": entry.pinned if entry else False,
        }
    )


def _stored(services: Services, generation: Generation) -> Entry | Snapshot | None:
    context, tokens = generation.cache, generation.prompt[:-1]
    assert context is not None
    if services.live.model.reuse == "snapshots":
        return services.snapshots.find(context, tokens)
    return services.store.find(context, tokens)


def _pin(services: Services, entry: Entry | Snapshot, pin: bool) -> None:
    if isinstance(entry, Snapshot):
        services.snapshots.pin(entry) if pin else services.snapshots.unpin(entry)
    else:
        services.store.pin(entry) if pin else services.store.unpin(entry)
