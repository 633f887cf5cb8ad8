"""The chat template's part of a request: messages, tools and what else steers the rendering.

It checks shapes and decides whether the last assistant message is continued. It does not render. Invariant: a
`Conversation` can be handed to any chat template; whatever then fails is the template's own refusal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mlxcel.api.fields import Fields, invalid, kind_of
from mlxcel.prompt.template import normalise_messages
from mlxcel.settings import Settings

RESERVED_KWARGS = frozenset({"self", "messages", "tools", "add_generation_prompt"})


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a chat template is rendered with. `continue_final` takes up the last (assistant) message's text."""

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...]
    tool_choice: str | dict[str, Any] | None
    template_kwargs: dict[str, Any]
    add_generation_prompt: bool
    continue_final: bool


def read_conversation(fields: Fields, settings: Settings) -> Conversation:
    messages = tuple(normalise_messages(fields.raw("messages")))
    add_generation_prompt = fields.boolean("add_generation_prompt", None)
    continue_final = fields.boolean("continue_final_message", None)
    if add_generation_prompt and continue_final:
        raise invalid("continue_final_message", "cannot be combined with add_generation_prompt")
    if continue_final is None:
        continue_final = settings.prefill_assistant and add_generation_prompt is not False and _is_text(messages[-1])
    if continue_final:
        _check_continued(messages)
    choice = _tool_choice(fields.raw("tool_choice"))
    return Conversation(
        messages=messages,
        tools=() if choice == "none" else _tools(fields.array("tools", [])),
        tool_choice=choice,
        template_kwargs=_template_kwargs(fields, settings),
        add_generation_prompt=add_generation_prompt is not False,
        continue_final=continue_final,
    )


def _is_text(message: dict[str, Any]) -> bool:
    return message["role"] == "assistant" and not message.get("tool_calls")


def _check_continued(messages: tuple[dict[str, Any], ...]) -> None:
    if not _is_text(messages[-1]):
        raise invalid("continue_final_message", "the last message is not an assistant's text")
    if len(messages) > 1 and messages[-2]["role"] == "assistant":
        raise invalid("messages", "two assistant messages at the end cannot be continued")


def _template_kwargs(fields: Fields, settings: Settings) -> dict[str, Any]:
    """The effective variables: chat_template_kwargs of the request, else its effort, else the server's."""
    kwargs = _server_kwargs(settings)
    effort = fields.text("reasoning_effort", None)
    if effort is not None:
        kwargs |= {"enable_thinking": False} if effort == "none" else {"reasoning_effort": effort}
    kwargs |= fields.mapping("chat_template_kwargs", {})
    for name in RESERVED_KWARGS & kwargs.keys():
        raise invalid("chat_template_kwargs", f"must not set {name}")
    if type(kwargs.get("enable_thinking", True)) is not bool:
        raise invalid("chat_template_kwargs", "enable_thinking must be a boolean")
    return kwargs


def _server_kwargs(settings: Settings) -> dict[str, Any]:
    kwargs: dict[str, Any] = {}
    if settings.reasoning != "auto":
        kwargs["enable_thinking"] = settings.reasoning == "on"
    if settings.reasoning_effort != "default":
        kwargs["reasoning_effort"] = settings.reasoning_effort
    if settings.reasoning_preserve is not None:
        kwargs["preserve_reasoning"] = settings.reasoning_preserve
    return kwargs | settings.chat_template_kwargs


def _tools(tools: list[Any]) -> tuple[dict[str, Any], ...]:
    for i, tool in enumerate(tools):
        name = f"tools[{i}]"
        if isinstance(tool, dict) and tool.get("type", "function") != "function":
            raise invalid(f"{name}.type", "only function tools are supported")
        function = _member(tool, name, "function", dict)
        _member(function, f"{name}.function", "name", str)
        for key, kind in (("description", str), ("parameters", dict)):
            if function.get(key) is not None:
                _member(function, f"{name}.function", key, kind)
    return tuple(tools)


def _member(owner: Any, owner_name: str, key: str, kind: type) -> Any:
    if not isinstance(owner, dict):
        raise invalid(owner_name, f"expected an object, got {kind_of(owner)}")
    value = owner.get(key)
    if not isinstance(value, kind):
        raise invalid(f"{owner_name}.{key}", f"expected {kind_of(kind())}, got {kind_of(value)}")
    return value


def _tool_choice(value: Any) -> str | dict[str, Any] | None:
    if value is None or value in ("auto", "none", "required"):
        return value  # type: ignore[no-any-return]
    if isinstance(value, dict):
        _member(_member(value, "tool_choice", "function", dict), "tool_choice.function", "name", str)
        return value
    raise invalid("tool_choice", "expected auto, none, required or a function")
