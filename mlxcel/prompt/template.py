"""Chat templates: checked messages in, one text out.

It owns the jinja2 environment, set up as transformers does so that a model's template renders as its authors saw
it, and the shape in which templates get the OpenAI `messages`. It does not know tokens, models or which kwargs a
server adds. Invariant: whatever a template or a client does, the outcome is a text or InvalidRequest with one
printable line; a template reaches nothing outside its arguments and the date.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mlxcel.errors import ConfigError, InvalidRequest

MEDIA = {"image_url": "image", "input_image": "image", "input_audio": "audio", "input_video": "video"}
MAX_MESSAGE = 300  # characters of a failure that are repeated to the client and in the log
_FAILURES = (
    TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RuntimeError,
    TypeError,
    ValueError,
)


class _GenerationTag(Extension):
    """{% generation %} marks assistant text for training; here its body is rendered as if the tag were absent."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares a plain attribute)

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=lineno)


def _raise_exception(message: object) -> NoReturn:
    raise TemplateError(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike jinja2's own filter it escapes no HTML and keeps the order of keys."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return environment


def _one_line(text: str, limit: int = MAX_MESSAGE) -> str:
    """`text` without control characters and line ends, cut to `limit` characters."""
    printable = "".join(char if char.isprintable() else " " for char in text[: 4 * limit])
    line = " ".join(printable.split())
    return line if len(line) <= limit else line[: limit - 3] + "..."


def _explained(error: Exception) -> str:
    where = f"line {error.lineno}: " if isinstance(error, TemplateSyntaxError) else ""
    kind = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
    return _one_line(f"chat template: {where}{kind}{error}")


class ChatTemplate:
    """A compiled template. `variables` are the names it takes from outside: messages, tools, enable_thinking...

    Raises ConfigError for a source that does not compile.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens)
        environment = _environment()
        try:
            self.variables = frozenset(meta.find_undeclared_variables(environment.parse(source)))
            self._template = environment.from_string(source)
        except (*_FAILURES, SyntaxError) as error:
            raise ConfigError(_explained(error)) from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """The text of normalised `messages`; `kwargs` win over the special tokens. Raises InvalidRequest.

        No tools and no documents are none rather than undefined, as templates are used to.
        """
        variables = {"documents": None, **self._special_tokens, **kwargs}
        variables |= {"messages": messages, "tools": tools or None, "add_generation_prompt": add_generation_prompt}
        try:
            return self._template.render(variables)
        except _FAILURES as error:
            raise InvalidRequest(_explained(error)) from None


# --- messages


def normalise_messages(messages: object) -> list[dict[str, Any]]:
    """The OpenAI `messages` as templates want them; the argument is left as it is.

    Content becomes one string (text parts joined, null and absent are ""), role developer becomes system (an unknown
    role is the template's to judge), null members and an empty tool_calls are dropped, arguments of tool calls become
    objects; every other member stays. Raises InvalidRequest naming the member at fault.
    """
    if not isinstance(messages, list) or not messages:
        raise _invalid("messages", "expected a non-empty array")
    return [_message(f"messages[{i}]", message) for i, message in enumerate(messages)]


def _invalid(name: str, problem: str) -> InvalidRequest:
    return InvalidRequest(f"Field '{name}': {problem}", param=name)


def _message(name: str, message: object) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise _invalid(name, "expected an object")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise _invalid(f"{name}.role", "expected a non-empty string")
    out = {key: value for key, value in message.items() if value is not None}
    out["role"] = "system" if role == "developer" else role
    out["content"] = _content(f"{name}.content", message.get("content"))
    for key in ("name", "tool_call_id", "reasoning_content"):
        if not isinstance(out.get(key, ""), str):
            raise _invalid(f"{name}.{key}", "expected a string")
    calls = out.pop("tool_calls", [])
    if not isinstance(calls, list):
        raise _invalid(f"{name}.tool_calls", "expected an array")
    if calls:
        out["tool_calls"] = [_tool_call(f"{name}.tool_calls[{i}]", call) for i, call in enumerate(calls)]
    return out


def _content(name: str, content: object) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _invalid(name, "expected a string or an array of text parts")
    return "".join(_part_text(f"{name}[{i}]", part) for i, part in enumerate(content))


def _part_text(name: str, part: object) -> str:
    if not isinstance(part, dict):
        raise _invalid(name, "expected an object")
    kind = part.get("type")
    if not isinstance(kind, str):
        raise _invalid(f"{name}.type", "expected a string")
    if kind in MEDIA:
        raise _invalid(f"{name}.type", f"{MEDIA[kind]} input is not supported: this model takes text only")
    if kind != "text":
        raise _invalid(f"{name}.type", f"{_one_line(kind, 40)!r} is not supported, only 'text' is")
    text = part.get("text")
    if not isinstance(text, str):
        raise _invalid(f"{name}.text", "expected a string")
    return text


def _tool_call(name: str, call: object) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        raise _invalid(f"{name}.function", "expected an object")
    if not isinstance(function.get("name"), str):
        raise _invalid(f"{name}.function.name", "expected a string")
    arguments = _arguments(f"{name}.function.arguments", function.get("arguments"))
    return call | {"function": function | {"arguments": arguments}}


def _arguments(name: str, arguments: object) -> dict[str, Any] | str:
    """The object that templates iterate over; "", null and absent are {}.

    A string that holds no JSON object (a model wrote it so) stays a string: the same history renders the same each
    time, and a template that cannot take it refuses it. Order of keys and integers of any size are kept.
    """
    if isinstance(arguments, dict):
        return arguments
    if not isinstance(arguments, str | None):
        raise _invalid(name, "expected a string or an object")
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else str(arguments)
