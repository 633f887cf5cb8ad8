"""llama-server's own dialect: POST /completion, streamed and not.

It owns the final object and its echo of the effective settings. Two numbers that are easily mixed up:
`tokens_cached` is what the slot holds at the end (prompt and generated), `timings.cache_n` is what was reused.
Invariant: the last chunk of a stream is the body without the text and tokens that were streamed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from mlxcel.api.options import Options
from mlxcel.api.responses import Choice, Object, Reply, Timings, prompt_progress
from mlxcel.engine.sequence import Delta, Finished, Generation, Progress, Sampling

# What llama-server also reports, at the values that mean "off": clients read some of them without asking.
NEUTRAL_SETTINGS: Object = {
    "n_keep": 0,
    "n_discard": 0,
    "chat_format": "Content-only",
    "reasoning_format": "none",
    "reasoning_in_content": False,
    "generation_prompt": "",
    "speculative.types": "none",
    "backend_sampling": False,
    "lora": [],
}


LONG_SETTINGS = frozenset(
    "dry_sequence_breakers stop logit_bias grammar grammar_lazy grammar_triggers preserved_tokens".split()
)
MISSING = object()


class Native:
    """`generations` and `prompts` (with special tokens written out) are those of the choices, in their order."""

    def __init__(self, reply: Reply, generations: Sequence[Generation], prompts: Sequence[str]) -> None:
        self._reply = reply
        self._generations = generations
        self._prompts = prompts

    def chunks(self, choice: Choice, event: Progress | Delta | Finished, timings: Timings | None) -> list[Object]:
        if isinstance(event, Finished):
            return [self._selected(self.final(choice))]
        if isinstance(event, Progress):
            if timings is None:
                return []
            return [self._partial(choice, "", ()) | {"prompt_progress": prompt_progress(event, timings)}]
        said = self._partial(choice, event.text, event.tokens)
        if event.logprobs:
            said["completion_probabilities"] = self._reply.entries(event.logprobs)
        if timings is not None:
            said["timings"] = timings.json()
        return [said]

    def _partial(self, choice: Choice, text: str, tokens: Sequence[int]) -> Object:
        return {
            "index": choice.index,
            "content": text,
            "tokens": list(tokens),
            "stop": False,
            "id_slot": -1,
            "tokens_predicted": len(choice.tokens),
            "tokens_evaluated": choice.num_prompt,
        }

    def final(self, choice: Choice) -> Object:
        """All that is known of a finished choice, without what was streamed."""
        end = choice.end
        return {
            "index": choice.index,
            "content": "",
            "tokens": [],
            "id_slot": end.slot,
            "stop": True,
            "model": self._reply.model,
            "tokens_predicted": end.completion_tokens,
            "tokens_evaluated": end.prompt_tokens,
            "generation_settings": effective_settings(self._generations[choice.index], self._reply.options),
            "prompt": self._prompts[choice.index],
            "has_new_line": "\n" in choice.text,
            "truncated": end.truncated,
            "stop_type": end.stop_type,
            "stopping_word": end.stopping_word,
            "tokens_cached": max(end.prompt_tokens + end.completion_tokens - 1, 0),
            "timings": Timings.of(end).json(),
        }

    def whole(self, choice: Choice) -> Object:
        """The same with its text and, where asked for, its tokens and their probabilities."""
        options = self._reply.options
        whole = self.final(choice) | {"content": choice.text, "tokens": choice.tokens if options.return_tokens else []}
        if options.top_logprobs is not None:
            whole["completion_probabilities"] = self._reply.entries(choice.logprobs)
        return whole

    def _selected(self, final: Object) -> Object:
        paths = self._reply.options.response_fields
        return selected(final, paths) if paths else final

    def tail(self, choices: Sequence[Choice]) -> bytes:
        """The native stream has no [DONE]."""
        return b""

    def body(self, choices: Sequence[Choice]) -> object:
        parts = [self._selected(self.whole(choice)) for choice in choices]
        return parts[0] if len(parts) == 1 else parts


def selected(whole: Object, paths: Sequence[str]) -> Object:
    """The members that `paths` (a/b is member b of a) lead to, each under its path; what is not there is left out."""
    out: Object = {}
    for path in paths:
        value: object = whole
        for name in path.split("/"):
            value = value.get(name, MISSING) if isinstance(value, dict) else MISSING
        if value is not MISSING:
            out[path] = value
    return out


def effective_settings(generation: Generation, options: Options) -> Object:
    """`generation_settings`: what was asked, completed by defaults and clamped, beside what is not supported."""
    return asked_settings(generation) | {
        "stop": list(generation.stop),
        "stream": options.stream,
        "n_keep": options.n_keep,
        "n_discard": options.n_discard,
        "timings_per_token": options.timings_per_token,
        "dry_sequence_breakers": list(options.dry_breakers),
        "grammar_lazy": False,
        "grammar_triggers": [],
        "preserved_tokens": [],
    }


def reduced_settings(generation: Generation) -> Object:
    """What /slots and /props say: nothing long, and nothing of how a client wants to be answered."""
    return {key: value for key, value in asked_settings(generation).items() if key not in LONG_SETTINGS}


def asked_settings(generation: Generation) -> Object:
    sampling = generation.sampling
    limit = -1 if generation.max_tokens is None else generation.max_tokens
    return (
        NEUTRAL_SETTINGS
        | sampling_settings(sampling)
        | {
            "grammar": generation.grammar.text if generation.grammar else "",
            "max_tokens": limit,
            "n_predict": limit,
            "ignore_eos": generation.ignore_eos,
            "logit_bias": [{"token": t, "bias": None if math.isinf(b) else b} for t, b in sampling.logit_bias],
            "n_probs": generation.top_logprobs or 0,
            "post_sampling_probs": generation.of_draw,
        }
    )


def sampling_settings(sampling: Sampling) -> Object:
    """What /props and /slots show too."""
    return {
        "seed": sampling.seed,
        "temperature": sampling.temperature,
        "dynatemp_range": sampling.dynatemp_range,
        "dynatemp_exponent": sampling.dynatemp_exponent,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "top_n_sigma": sampling.top_n_sigma,
        "typical_p": sampling.typical_p,
        "min_keep": sampling.min_keep,
        "xtc_probability": sampling.xtc.probability,
        "xtc_threshold": sampling.xtc.threshold,
        "repeat_last_n": sampling.repeat_last_n,
        "repeat_penalty": sampling.repeat_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "dry_multiplier": sampling.dry.multiplier,
        "dry_base": sampling.dry.base,
        "dry_allowed_length": sampling.dry.allowed_length,
        "dry_penalty_last_n": sampling.dry.last_n,
        "mirostat": sampling.mirostat.version,
        "mirostat_tau": sampling.mirostat.tau,
        "mirostat_eta": sampling.mirostat.eta,
        "adaptive_target": sampling.adaptive.target,
        "adaptive_decay": sampling.adaptive.decay,
        "samplers": list(sampling.order),
    }
