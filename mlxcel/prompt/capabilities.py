"""What a chat template can do, found out by rendering short conversations with it and looking for their parts.

It knows the names that llama-server gives these abilities and nothing of who asks. Invariant: a template that
refuses a conversation, or drops the part looked for, cannot do it; nothing is concluded from the template's source.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from mlxcel.errors import InvalidRequest
from mlxcel.prompt.template import ChatTemplate

_MARK, _OTHER, _ARGUMENT = "zebra", "giraffe", "ostrich"
_USER: dict[str, Any] = {"role": "user", "content": "Hello."}
_KEEP = {"preserve_thinking": True, "preserve_reasoning": True}


@lru_cache(maxsize=4)
def capabilities(template: ChatTemplate) -> dict[str, bool]:
    """Under llama-server's names (`chat_template_caps`)."""
    marked, typed = _USER | {"content": _MARK}, _USER | {"content": [{"type": "text", "text": _MARK}]}
    thoughtful = {"role": "assistant", "content": "Yes.", "reasoning_content": _MARK}
    called = _rendered(template, [_USER, _calling(_MARK)])
    called_twice = _rendered(template, [_USER, _calling(_MARK, _OTHER)])
    tool = {"type": "function", "function": {"name": _MARK, "description": "", "parameters": {"type": "object"}}}
    as_parts = _rendered(template, [typed])
    return {
        "supports_string_content": _MARK in _rendered(template, [marked]),
        "supports_typed_content": _MARK in as_parts and "'type'" not in as_parts and '"type"' not in as_parts,
        "supports_system_role": _MARK in _rendered(template, [{"role": "system", "content": _MARK}, _USER]),
        "supports_tools": _MARK in _rendered(template, [_USER], tools=[tool]),
        "supports_tool_calls": _MARK in called,
        "supports_parallel_tool_calls": _MARK in called_twice and _OTHER in called_twice,
        "supports_object_arguments": _ARGUMENT in called,
        "supports_preserve_reasoning": _MARK in _rendered(template, [_USER, thoughtful, _USER], **_KEEP),
    }


def _calling(*names: str) -> dict[str, Any]:
    calls = [{"id": n, "type": "function", "function": {"name": n, "arguments": {_ARGUMENT: 1}}} for n in names]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _rendered(template: ChatTemplate, messages: list[dict[str, Any]], **more: Any) -> str:
    try:
        return template.render(messages, **more)
    except InvalidRequest:
        return ""
