"""Every endpoint of llama-server as one call: what is sent and what must come back, by status and members."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

MESSAGES = [{"role": "user", "content": "<<ok>>"}]
TIMINGS = {
    "cache_n", "prompt_n", "prompt_ms", "prompt_per_token_ms", "prompt_per_second", "predicted_n", "predicted_ms",
    "predicted_per_token_ms", "predicted_per_second",
}  # fmt: skip
NATIVE = {
    "index", "content", "tokens", "id_slot", "stop", "model", "tokens_predicted", "tokens_evaluated",
    "generation_settings", "prompt", "has_new_line", "truncated", "stop_type", "stopping_word", "tokens_cached",
    "timings",
}  # fmt: skip
OPENAI = {"id", "object", "created", "model", "system_fingerprint", "choices", "usage", "timings"}
PROPS = {
    "default_generation_settings", "total_slots", "model_alias", "model_ftype", "model_path", "modalities",
    "media_marker", "endpoint_slots", "endpoint_props", "endpoint_metrics", "ui", "ui_settings", "chat_template",
    "chat_template_caps", "bos_token", "eos_token", "build_info", "is_sleeping", "cors_proxy_enabled",
}  # fmt: skip


@dataclass(frozen=True)
class Call:
    """`members` must be in the answer (in its first item, if it is an array); `changes` are settings of the server."""

    method: str
    path: str
    status: int = 200
    members: set[str] = field(default_factory=set)
    body: Any = None
    changes: dict[str, Any] = field(default_factory=dict)
    note: str = ""

    @property
    def id(self) -> str:
        flags = "".join(f" {name}={value}" for name, value in self.changes.items())
        return f"{self.method} {self.path}{flags} {self.status}"


def _each(paths: str, method: str, *args: Any, **more: Any) -> list[Call]:
    return [Call(method, path, *args, **more) for path in paths.split()]


CALLS: list[Call] = [
    *_each("/health /v1/health", "GET", 200, {"status"}, note="public, never waits"),
    *_each("/models /v1/models", "GET", 200, {"object", "data", "models"}),
    Call("GET", "/props", 200, PROPS),
    Call("POST", "/props", 200, {"success"}, {}, {"props": True}, note="with --props; nothing can be set"),
    Call("POST", "/props", 501, {"error"}, {}, note="without --props"),
    Call("GET", "/metrics", 501, {"error"}, changes={"metrics": False}, note="without --metrics"),
    Call("GET", "/slots", 200, {"id", "n_ctx", "speculative", "is_processing"}),
    Call("GET", "/slots", 501, {"error"}, changes={"slots": False}, note="with --no-slots"),
    Call("POST", "/slots/0?action=save", 501, {"error"}, {"filename": "x"}, note="without --slot-save-path"),
    Call("POST", "/slots/0?action=restore", 501, {"error"}, {"filename": "x"}, note="without --slot-save-path"),
    Call("POST", "/slots/0?action=erase", 501, {"error"}, {}, note="without --slot-save-path"),
    *_each("/completion /completions", "POST", 200, NATIVE, {"prompt": "<<ok>>"}),
    Call("POST", "/v1/completions", 200, OPENAI, {"prompt": "<<ok>>"}),
    *_each("/chat/completions /v1/chat/completions", "POST", 200, OPENAI, {"messages": MESSAGES}),
    Call("POST", "/v1/chat/completions", 200, {*OPENAI, "__verbose"}, {"messages": MESSAGES, "verbose": True}),
    *_each("/chat/completions/input_tokens /v1/chat/completions/input_tokens", "POST", 200,
           {"object", "input_tokens"}, {"messages": MESSAGES}),
    Call("POST", "/infill", 501, {"error"}, {"input_prefix": "a", "input_suffix": "b"},
         note="a model without fill-in-the-middle tokens; with them as `/completion`"),
    Call("GET", "/lora-adapters", note="an empty array"),
    Call("POST", "/lora-adapters", 200, {"success"}, []),
    Call("POST", "/lora-adapters", 400, {"error"}, {"id": 0}, note="not an array"),
    Call("POST", "/lora-adapters", 400, {"error"}, [{"id": 0, "scale": 1}], note="an unknown id"),
    *_each("/rerank /reranking /v1/rerank /v1/reranking", "POST", 501, {"error"}, {}),
    *_each("/audio/transcriptions /v1/audio/transcriptions /v1/systemone", "POST", 501, {"error"}, {}),
    *_each("/tools /cors-proxy", "GET", 403, {"error"}, note="`feature_disabled`"),
    *_each("/tools /cors-proxy", "POST", 403, {"error"}, {}, note="`feature_disabled`"),
    Call("GET", "/v1/stream", 400, {"error"}, note="no `conv_id`"),
    Call("GET", "/v1/stream?conv_id=x", 404, {"error"}, note="unknown or expired; else the stream"),
    Call("DELETE", "/v1/stream?conv_id=x", 204),
    Call("POST", "/v1/streams/lookup", 200, set(), {"conversation_ids": ["x"]}, note="an array of the known ones"),
    Call("POST", "/tokenize", 200, {"tokens"}, {"content": "ab"}),
    Call("POST", "/detokenize", 200, {"content"}, {"tokens": [65, 66]}),
    Call("POST", "/apply-template", 200, {"prompt"}, {"messages": MESSAGES}),
    *_each("/embedding /embeddings /v1/embeddings", "POST", 501, {"error"}, {"input": "a"}, note="no --embeddings"),
    Call("GET", "/nowhere", 404, {"error"}),
    Call("POST", "/health", 404, {"error"}, {}, note="a wrong method is an unknown route"),
]  # fmt: skip
