"""What all generating requests ask alike: sampling, length, stops, form of the answer, cache.

It owns the names, defaults and ranges of these fields (llama-server's table; null is absent everywhere). It does not
know the vocabulary, the context length or the cache. Invariant: an `Options` needs no further type or range check,
and its cache_salt shows in no repr and no message.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from mlxcel.api.constraint import Constrain, read_constraint
from mlxcel.api.fields import Fields, invalid, kind_of
from mlxcel.api.sampling import read_breakers, read_sampling
from mlxcel.cache.key import ANONYMOUS
from mlxcel.engine.sequence import Sampling
from mlxcel.settings import Settings

MAX_STOPS = 32
MAX_STOP_LENGTH = 1024
MAX_KEY_LENGTH = 1024  # characters of cache_salt, prompt_cache_key and user: they live as long as their entries
MAX_CHOICES = 128
MAX_BIAS = 10_000.0  # beyond it a float32 logit may become infinite, and infinity minus infinity is NaN


@dataclass(frozen=True, slots=True)
class Options:
    """What all dialects ask alike. Bias and breakers in `sampling` are still empty: `logit_bias` and `dry_breakers` may
    name tokens by their text.

    `max_tokens` None is unlimited, `top_logprobs` None asks for none, `ping_interval` (seconds) and `t_max_predict_ms`
    0 or less are off. `n_keep` and `n_discard` are said back and nothing else: no context is ever shifted.
    """

    sampling: Sampling
    logit_bias: tuple[tuple[int | str, float], ...]
    dry_breakers: tuple[str, ...]
    max_tokens: int | None
    stop: tuple[str, ...]
    ignore_eos: bool
    num_choices: int
    top_logprobs: int | None
    post_sampling_probs: bool
    stream: bool
    include_usage: bool
    timings_per_token: bool
    return_progress: bool
    return_tokens: bool
    ping_interval: int
    cache_prompt: bool
    session_key: str
    salt: str | None = field(repr=False)
    constraint: Constrain | None
    slot: int | None
    n_indent: int
    n_keep: int
    n_discard: int
    t_max_predict_ms: int
    response_fields: tuple[str, ...]
    verbose: bool


def read_options(fields: Fields, settings: Settings, top_logprobs: int | None) -> Options:
    default_max = settings.n_predict
    max_tokens = fields.integer("n_predict", "max_completion_tokens", "max_tokens", default=default_max, low=-1)
    stream_options = Fields(fields.mapping("stream_options", {}))
    fields.integer("n_cache_reuse", default=0, low=0)  # stored prefixes are reused whatever it says
    return Options(
        sampling=read_sampling(fields, settings),
        logit_bias=_logit_bias(fields.raw("logit_bias"), settings),
        dry_breakers=read_breakers(fields, settings),
        max_tokens=None if max_tokens < 0 else max_tokens,
        stop=_stop(fields.raw("stop"), settings),
        ignore_eos=fields.boolean("ignore_eos", settings.ignore_eos),
        num_choices=fields.integer("n_cmpl", "n", default=1, low=1, high=MAX_CHOICES),
        top_logprobs=top_logprobs,
        post_sampling_probs=fields.boolean("post_sampling_probs", False),
        stream=fields.boolean("stream", False),
        include_usage=stream_options.boolean("include_usage", False),
        timings_per_token=fields.boolean("timings_per_token", False),
        return_progress=fields.boolean("return_progress", False),
        return_tokens=fields.boolean("return_tokens", False),
        ping_interval=fields.integer("sse_ping_interval", default=settings.sse_ping_interval, low=-1),
        cache_prompt=fields.boolean("cache_prompt", settings.cache_prompt),
        session_key=_key(fields, "prompt_cache_key") or _key(fields, "user") or ANONYMOUS,
        salt=_salt(fields, settings),
        constraint=read_constraint(fields, settings),
        slot=_slot(fields.raw("id_slot")),
        n_indent=fields.integer("n_indent", default=0, low=0),
        n_keep=fields.integer("n_keep", default=0, low=-1),
        n_discard=fields.integer("n_discard", default=0, low=0),
        t_max_predict_ms=fields.integer("t_max_predict_ms", default=-1, low=-1),
        response_fields=_response_fields(fields.array("response_fields", [])),
        verbose=fields.boolean("verbose", settings.verbose),
    )


def _slot(value: Any) -> int | None:
    """Read leniently, as llama-server does: anything but a number of a slot lets the server choose."""
    return value if type(value) is int and value >= 0 else None


def _response_fields(paths: list[Any]) -> tuple[str, ...]:
    if not all(isinstance(path, str) for path in paths):
        raise invalid("response_fields", "expected an array of strings")
    return tuple(paths)


def _logit_bias(value: Any, settings: Settings) -> tuple[tuple[int | str, float], ...]:
    """[[id or text, number or false], ...] or {"id or text": the same}. false bans; odd entries are skipped."""
    if value is None:
        return tuple(settings.logit_bias)
    if not isinstance(value, (list, dict)):
        raise invalid("logit_bias", f"expected an object or an array of pairs, got {kind_of(value)}")
    pairs: Iterable[Any] = value if isinstance(value, list) else ([_bias_key(k), v] for k, v in value.items())
    return tuple(
        (pair[0], -math.inf if pair[1] is False else min(max(float(pair[1]), -MAX_BIAS), MAX_BIAS))
        for pair in pairs
        if isinstance(pair, list) and len(pair) == 2 and type(pair[0]) in (int, str)
        if pair[1] is False or type(pair[1]) in (int, float)
    )


def _bias_key(key: str) -> int | str:
    return int(key) if key.isascii() and key.isdigit() and len(key) < 12 else key


def _stop(value: Any, settings: Settings) -> tuple[str, ...]:
    if value is None:
        return tuple(settings.reverse_prompt)
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise invalid("stop", "expected a string or an array of strings")
    if len(stops) > MAX_STOPS:
        raise invalid("stop", f"at most {MAX_STOPS} stop strings are supported")
    if any(len(stop) > MAX_STOP_LENGTH for stop in stops):
        raise invalid("stop", f"a stop string is longer than {MAX_STOP_LENGTH} characters")
    return tuple(stop for stop in stops if stop)


def _key(fields: Fields, name: str) -> str:
    key = fields.text(name, "")
    if len(key) > MAX_KEY_LENGTH:
        raise invalid(name, f"longer than {MAX_KEY_LENGTH} characters")
    return key


def _salt(fields: Fields, settings: Settings) -> str | None:
    salt = fields.text("cache_salt", None)
    if salt is None:
        if settings.require_cache_salt:
            raise invalid("cache_salt", "is required by this server")
        return None
    if not salt.strip():
        raise invalid("cache_salt", "must not be empty")
    if len(salt) > MAX_KEY_LENGTH:
        raise invalid("cache_salt", f"longer than {MAX_KEY_LENGTH} characters")
    return salt
