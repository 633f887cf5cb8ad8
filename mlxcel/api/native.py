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
    "dynatemp_range": 0.0,
    "dynatemp_exponent": 1.0,
    "top_n_sigma": -1.0,
    "xtc_probability": 0.0,
    "xtc_threshold": 0.1,
    "typical_p": 1.0,
    "dry_multiplier": 0.0,
    "dry_base": 1.75,
    "dry_allowed_length": 2,
    "dry_penalty_last_n": 64,
    "dry_sequence_breakers": ["\n", ":", '"', "*"],
    "mirostat": 0,
    "mirostat_tau": 5.0,
    "mirostat_eta": 0.1,
    "adaptive_target": -1.0,
    "adaptive_decay": 0.9,
    "n_keep": 0,
    "n_discard": 0,
    "min_keep": 0,
    "grammar": "",
    "grammar_lazy": False,
    "grammar_triggers": [],
    "preserved_tokens": [],
    "chat_format": "Content-only",
    "reasoning_format": "none",
    "reasoning_in_content": False,
    "generation_prompt": "",
    "samplers": ["penalties", "top_k", "top_p", "min_p", "temperature"],
    "speculative.types": "none",
    "post_sampling_probs": False,
    "backend_sampling": False,
    "lora": [],
}


class Native:
    """`generations` and `prompts` (with special tokens written out) are those of the choices, in their order."""

    def __init__(self, reply: Reply, generations: Sequence[Generation], prompts: Sequence[str]) -> None:
        self._reply = reply
        self._generations = generations
        self._prompts = prompts

    def chunks(self, choice: Choice, event: Progress | Delta | Finished, timings: Timings | None) -> list[Object]:
        if isinstance(event, Finished):
            return [self._final(choice, "", [])]
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

    def _final(self, choice: Choice, text: str, tokens: list[int]) -> Object:
        end = choice.end
        return {
            "index": choice.index,
            "content": text,
            "tokens": tokens,
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

    def tail(self, choices: Sequence[Choice]) -> bytes:
        """The native stream has no [DONE]."""
        return b""

    def body(self, choices: Sequence[Choice]) -> object:
        options = self._reply.options
        whole = []
        for choice in choices:
            final = self._final(choice, choice.text, choice.tokens if options.return_tokens else [])
            if options.top_logprobs is not None:
                final["completion_probabilities"] = self._reply.entries(choice.logprobs)
            whole.append(final)
        return whole[0] if len(whole) == 1 else whole


def effective_settings(generation: Generation, options: Options) -> Object:
    """`generation_settings`: what was asked, completed by defaults and clamped, beside what is not supported."""
    sampling = generation.sampling
    limit = -1 if generation.max_tokens is None else generation.max_tokens
    return (
        NEUTRAL_SETTINGS
        | sampling_settings(sampling)
        | {
            "grammar": generation.grammar.text if generation.grammar else "",
            "stop": list(generation.stop),
            "max_tokens": limit,
            "n_predict": limit,
            "ignore_eos": generation.ignore_eos,
            "stream": options.stream,
            "logit_bias": [{"token": t, "bias": None if math.isinf(b) else b} for t, b in sampling.logit_bias],
            "n_probs": options.top_logprobs or 0,
            "timings_per_token": options.timings_per_token,
        }
    )


def sampling_settings(sampling: Sampling) -> Object:
    return {
        "seed": sampling.seed,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repeat_last_n": sampling.repeat_last_n,
        "repeat_penalty": sampling.repeat_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
    }
