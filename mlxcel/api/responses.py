"""What a client reads: the JSON of the two OpenAI dialects, and what they share with llama-server's own.

Everything is a fold of the same events. A `Choice` takes in what one sequence says; a shape turns each event into
the chunks of a stream, and the choices into one body. Pure: no clock, no I/O, no vocabulary beyond `piece`.
Invariant: the concatenated chunks say what the body says, and no number in them is NaN or infinite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from uuid import uuid4

import orjson

from mlxcel import __version__
from mlxcel.api.options import Options
from mlxcel.engine.sequence import Delta, Finished, Progress, TokenLogprob
from mlxcel.prompt.reply import CallArguments, CallBegun, Content, Part, Plain, Reasoning, ReplyParser

Object = dict[str, Any]

FINGERPRINT = f"b0-mlxcel-{__version__}"  # clients of llama-server expect a build name, "b" and a number
MIN_LOGPROB = -9999.0  # OpenAI's stand-in for "impossible"; JSON has no infinity
DONE = b"data: [DONE]\n\n"


@dataclass(slots=True)
class Call:
    """A tool call of a reply, as far as it was said. `arguments` is JSON text."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class Choice:
    """What one sequence has said so far. `prompt` is the index of its prompt: several choices may share one.

    `text` is all of it as it was generated; `parser` tells its parts: `content`, `reasoning` and `calls` add up those
    of the whole, `fresh` are those of the newest event.
    """

    index: int
    prompt: int
    num_prompt: int
    parser: ReplyParser = field(default_factory=Plain)
    text: str = ""
    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)
    fresh: list[Part] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finished: Finished | None = None
    opened: bool = False

    def add(self, event: Progress | Delta | Finished) -> None:
        self.fresh = []
        if isinstance(event, Delta):
            self.text += event.text
            self.tokens += event.tokens
            self.logprobs += event.logprobs
            self.fresh = self.parser.push(event.text)
        elif isinstance(event, Finished):
            self.finished = event
            self.fresh = self.parser.flush()
        for part in self.fresh:
            self._take(part)

    def _take(self, part: Part) -> None:
        match part:
            case Content(text):
                self.content += text
            case Reasoning(text):
                self.reasoning += text
            case CallBegun(_, id_, name):
                self.calls.append(Call(id_, name))
            case CallArguments(index, text):
                self.calls[index].arguments += text

    @property
    def end(self) -> Finished:
        if self.finished is None:
            raise RuntimeError("asked for the end of a sequence that has not finished")
        return self.finished

    @property
    def chat_reason(self) -> str:
        """Why a chat's reply ended: a reply that stopped by itself after tool calls waits for their results."""
        return "tool_calls" if self.calls and self.end.reason == "stop" else self.end.reason


@dataclass(frozen=True, slots=True)
class Timings:
    """Tokens and milliseconds of one sequence, until now or in all."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    predicted_n: int
    predicted_ms: float

    @classmethod
    def of(cls, end: Finished) -> Timings:
        computed = end.prompt_tokens - end.cached_tokens
        return cls(end.cached_tokens, computed, end.prompt_ms, end.completion_tokens, end.predicted_ms)

    def json(self) -> Object:
        return {
            "cache_n": self.cache_n,
            "prompt_n": self.prompt_n,
            "prompt_ms": self.prompt_ms,
            "prompt_per_token_ms": _ratio(self.prompt_ms, self.prompt_n),
            "prompt_per_second": _ratio(1000.0 * self.prompt_n, self.prompt_ms),
            "predicted_n": self.predicted_n,
            "predicted_ms": self.predicted_ms,
            "predicted_per_token_ms": _ratio(self.predicted_ms, self.predicted_n),
            "predicted_per_second": _ratio(1000.0 * self.predicted_n, self.predicted_ms),
        }


def _ratio(a: float, b: float) -> float:
    return a / b if b else 0.0


@dataclass(frozen=True, slots=True)
class Reply:
    """What all chunks of one reply have in common. `piece` gives the bytes that a token stands for."""

    options: Options
    model: str
    created: int
    piece: Callable[[int], bytes]
    id: str = field(default_factory=lambda: uuid4().hex)

    def envelope(self, prefix: str, kind: str, choices: list[Object]) -> Object:
        return {
            "id": f"{prefix}-{self.id}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": FINGERPRINT,
            "choices": choices,
        }

    def entries(self, logprobs: Sequence[TokenLogprob]) -> list[Object]:
        """llama-server's token entries, a superset of those of OpenAI's chat dialect. Of the draw they are
        probabilities, without those that are 0."""
        if not self.options.post_sampling_probs:
            return [
                self._entry(item.token, "logprob", finite(item.logprob))
                | {"top_logprobs": [self._entry(token, "logprob", finite(value)) for token, value in item.top]}
                for item in logprobs
            ]
        return [
            self._entry(item.token, "prob", _prob(item.logprob))
            | {"top_probs": [self._entry(token, "prob", p) for token, value in item.top if (p := _prob(value))]}
            for item in logprobs
        ]

    def _entry(self, token: int, name: str, value: float) -> Object:
        piece = self.piece(token)
        return {"id": token, "token": piece.decode(errors="replace"), "bytes": list(piece), name: value}


def _prob(logprob: float) -> float:
    return math.exp(min(logprob, 0.0)) if logprob > MIN_LOGPROB else 0.0


def finite(logprob: float) -> float:
    """The comparison is false for NaN too."""
    return logprob if logprob > MIN_LOGPROB else MIN_LOGPROB


def prompt_progress(event: Progress, timings: Timings) -> Object:
    return {
        "total": event.total,
        "cache": event.cached,
        "processed": event.processed,
        "time_ms": timings.prompt_ms,
    }


def usage(choices: Sequence[Choice]) -> Object:
    """Each prompt counts once, as its first choice met it; completions count all."""
    first = {choice.prompt: choice.end for choice in reversed(choices)}
    prompt_tokens = sum(end.prompt_tokens for end in first.values())
    completion_tokens = sum(choice.end.completion_tokens for choice in choices)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(end.cached_tokens for end in first.values())},
    }


def sse(value: object) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"


class Shape(Protocol):
    """One dialect. `timings` is None where the request did not ask for it; all choices have finished in `tail`
    and `body`."""

    def chunks(self, choice: Choice, event: Progress | Delta | Finished, timings: Timings | None) -> list[Object]:
        """What the stream says of an event that the choice has just taken in."""

    def tail(self, choices: Sequence[Choice]) -> bytes:
        """The end of the stream."""

    def body(self, choices: Sequence[Choice]) -> object:
        """All of it at once."""


class Verbose(Protocol):
    """llama-server's own object of a finished choice: without what was streamed, and with it."""

    def final(self, choice: Choice) -> Object: ...

    def whole(self, choice: Choice) -> Object: ...


def _delta(part: Part) -> Object:
    match part:
        case Content(text):
            return {"content": text}
        case Reasoning(text):
            return {"reasoning_content": text}
        case CallBegun(index, id_, name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": id_, "type": "function", "function": function}]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def message(choice: Choice) -> Object:
    """The assistant's message, as a client sends it back with the next turn."""
    said: Object = {"role": "assistant", "content": choice.content}
    if choice.reasoning:
        said["reasoning_content"] = choice.reasoning
    if choice.calls:
        said["tool_calls"] = [
            {"type": "function", "id": call.id, "function": {"name": call.name, "arguments": call.arguments}}
            for call in choice.calls
        ]
    return said


class Chat:
    """POST /v1/chat/completions. With `verbose` the answer also carries what /completion would have said."""

    def __init__(self, reply: Reply, verbose: Verbose | None = None) -> None:
        self._reply = reply
        self._verbose = verbose

    def chunks(self, choice: Choice, event: Progress | Delta | Finished, timings: Timings | None) -> list[Object]:
        opening = {"role": "assistant", "content": None}
        if isinstance(event, Progress):
            if timings is None:
                return []
            return [self._chunk(choice, opening) | {"prompt_progress": prompt_progress(event, timings)}]
        chunks = [] if choice.opened else [self._chunk(choice, opening)]
        choice.opened = True
        said = [self._chunk(choice, _delta(part)) for part in choice.fresh]
        if isinstance(event, Finished):
            last = self._chunk(choice, {}, choice.chat_reason)
            if self._verbose is not None:
                last["__verbose"] = self._verbose.final(choice)
            if not self._reply.options.include_usage:
                last["timings"] = Timings.of(event).json()
            return [*chunks, *said, last]
        if event.logprobs and not said:
            said = [self._chunk(choice, {"content": ""})]
        if event.logprobs:
            said[-1]["choices"][0]["logprobs"] = {"content": self._reply.entries(event.logprobs)}
        if said and timings is not None:
            said[-1]["timings"] = timings.json()
        return [*chunks, *said]

    def _chunk(self, choice: Choice, delta: Object, reason: str | None = None) -> Object:
        member = {"index": choice.index, "delta": delta, "finish_reason": reason}
        return self._reply.envelope("chatcmpl", "chat.completion.chunk", [member])

    def tail(self, choices: Sequence[Choice]) -> bytes:
        if not self._reply.options.include_usage:
            return DONE
        last = self._reply.envelope("chatcmpl", "chat.completion.chunk", [])
        return sse(last | {"usage": usage(choices), "timings": Timings.of(choices[0].end).json()}) + DONE

    def body(self, choices: Sequence[Choice]) -> Object:
        members = [self._member(choice) for choice in choices]
        whole = self._reply.envelope("chatcmpl", "chat.completion", members)
        if self._verbose is not None:
            whole["__verbose"] = self._verbose.whole(choices[0])
        return whole | {"usage": usage(choices), "timings": Timings.of(choices[0].end).json()}

    def _member(self, choice: Choice) -> Object:
        member: Object = {"index": choice.index, "message": message(choice), "finish_reason": choice.chat_reason}
        if self._reply.options.top_logprobs is not None:
            member["logprobs"] = {"content": self._reply.entries(choice.logprobs)}
        return member


class Completion:
    """POST /v1/completions. Without `include_usage` the last chunk carries the usage, as in llama-server."""

    def __init__(self, reply: Reply, num_choices: int, verbose: Verbose | None = None) -> None:
        self._reply = reply
        self._verbose = verbose
        self._unfinished = num_choices
        self._ends: list[Choice] = []

    def chunks(self, choice: Choice, event: Progress | Delta | Finished, timings: Timings | None) -> list[Object]:
        if isinstance(event, Progress):
            if timings is None:
                return []
            return [self._chunk(choice, "") | {"prompt_progress": prompt_progress(event, timings)}]
        if isinstance(event, Finished):
            return [self._last(choice, event)]
        if not event.text and not event.logprobs:
            return []
        said = self._chunk(choice, event.text, logprobs=event.logprobs)
        if timings is not None:
            said["timings"] = timings.json()
        return [said]

    def _last(self, choice: Choice, event: Finished) -> Object:
        self._ends.append(choice)
        last = self._chunk(choice, "", event.reason)
        if self._verbose is not None:
            last["__verbose"] = self._verbose.final(choice)
        if not self._reply.options.include_usage:
            last["timings"] = Timings.of(event).json()
            if len(self._ends) == self._unfinished:
                last["usage"] = usage(sorted(self._ends, key=lambda c: c.index))
        return last

    def _chunk(
        self, choice: Choice, text: str, reason: str | None = None, logprobs: Sequence[TokenLogprob] = ()
    ) -> Object:
        offset = len(choice.text) - len(text)
        member = {
            "index": choice.index,
            "text": text,
            "logprobs": self._logprobs(logprobs, offset) if logprobs else None,
            "finish_reason": reason,
        }
        return self._reply.envelope("cmpl", "text_completion", [member])

    def _logprobs(self, logprobs: Sequence[TokenLogprob], offset: int) -> Object:
        """llama-server's `content` beside OpenAI's four parallel lists, so that clients of both can read it. The lists
        are of log-probabilities only."""
        entries = self._reply.entries(logprobs)
        if self._reply.options.post_sampling_probs:
            return {"content": entries}
        offsets = []
        for entry in entries:
            offsets.append(offset)
            offset += len(entry["token"])
        return {
            "content": entries,
            "tokens": [entry["token"] for entry in entries],
            "token_logprobs": [entry["logprob"] for entry in entries],
            "top_logprobs": [{top["token"]: top["logprob"] for top in e["top_logprobs"]} for e in entries],
            "text_offset": offsets,
        }

    def tail(self, choices: Sequence[Choice]) -> bytes:
        if not self._reply.options.include_usage:
            return DONE
        last = self._reply.envelope("cmpl", "text_completion", [])
        return sse(last | {"usage": usage(choices), "timings": Timings.of(choices[0].end).json()}) + DONE

    def body(self, choices: Sequence[Choice]) -> Object:
        asked = self._reply.options.top_logprobs is not None
        members = [
            {
                "index": choice.index,
                "text": choice.text,
                "logprobs": self._logprobs(choice.logprobs, 0) if asked else None,
                "finish_reason": choice.end.reason,
            }
            for choice in choices
        ]
        whole = self._reply.envelope("cmpl", "text_completion", members)
        if self._verbose is not None:
            whole["__verbose"] = self._verbose.whole(choices[0])
        return whole | {"usage": usage(choices), "timings": Timings.of(choices[0].end).json()}
