"""The server's settings as a test wants them: defaults, and what it changes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


def settings(**changes: Any) -> Any:
    return SimpleNamespace(
        **dict(
            n_predict=-1,
            ignore_eos=False,
            sse_ping_interval=30,
            cache_prompt=True,
            require_cache_salt=False,
            repeat_last_n=64,
            temperature=0.8,
            top_k=40,
            top_p=0.95,
            min_p=0.05,
            repeat_penalty=1.0,
            presence_penalty=0.0,
            frequency_penalty=0.0,
            seed=-1,
            reverse_prompt=(),
            logit_bias=(),
            prefill_assistant=True,
            chat_template_kwargs={},
            timeout=3600,
            api_prefix="",
            api_key=(),
            cors_origins="*",
            cors_credentials=True,
            cors_methods="GET, POST, DELETE, OPTIONS",
            cors_headers="*",
            host="127.0.0.1",
            port=0,
            reuse_port=False,
            ssl_cert_file=None,
            ssl_key_file=None,
            metrics=True,
            alias=(),
        )
        | changes
    )
