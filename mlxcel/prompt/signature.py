"""The template signature: everything besides the messages that decides how a chat renders, as one digest.

It owns the byte layouts of template_sig (v1) and tools_digest and the canonical JSON that they hash. It does not
know how the kwargs were merged, nor whether the tools are well formed. Invariant: what renders alike by these
inputs has one signature, whatever the order of keys inside objects; prompts that never see a template have a
signature of their own, so they share no bucket with a chat.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from blake3 import blake3

from mlxcel.cache.key import SignatureParts, framed, u64

RAW_PROMPT_SIG = "mlxcel:prompt-cache:raw-prompt:v1"

_SIG_DOMAIN = b"mlxcel:prompt-cache:template-sig:v1"
_TOOLS_DOMAIN = b"mlxcel:prompt-cache:tools-digest:v1"

_quoted = json.JSONEncoder(ensure_ascii=False).encode


@dataclass(frozen=True, slots=True)
class Signature:
    """`hex` is the template_sig (64 lowercase hex characters); `parts` says what it is made of."""

    hex: str
    parts: SignatureParts


def canonical_json(value: object) -> bytes:
    """A JSON value in one form, byte for byte as mlxcel's serde_json writes it: keys sorted, no blanks, UTF-8.

    Raises TypeError for what is no JSON value. Recurses once per level of nesting.
    """
    return _canonical(value).encode("utf-8", "surrogatepass")


def _canonical(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case int():
            return str(value)
        case float():
            return _number(value)
        case str():
            return _quoted(value)
        case Mapping():
            return "{" + ",".join(f"{_quoted(key)}:{_canonical(value[key])}" for key in sorted(value)) + "}"
        case list() | tuple():
            return "[" + ",".join(map(_canonical, value)) + "]"
    raise TypeError(f"{type(value).__name__} is not a JSON value")


def _number(value: float) -> str:
    """As Rust's ryu writes a double: Python's digits, exponents as e-7 and e16 (not e-07, e+16) and only below 1e-5."""
    if not math.isfinite(value):
        return "null"
    mantissa, exponent_mark, exponent = repr(value).partition("e")
    if not exponent_mark:
        return mantissa
    if exponent == "-05":
        sign, digits = mantissa[: value < 0], mantissa.lstrip("-").replace(".", "")
        return f"{sign}0.0000{digits}"
    return f"{mantissa}e{int(exponent)}"


def tools_digest(tools: Sequence[Mapping[str, Any]] | None) -> str:
    """64 hex characters over type, name, description and parameters of the tools, in order; none is as []."""
    tools = tools or ()
    return blake3(_TOOLS_DOMAIN + u64(len(tools)) + b"".join(map(_tool_bytes, tools))).hexdigest()


def _tool_bytes(tool: Mapping[str, Any]) -> bytes:
    function = tool.get("function") or {}
    texts = (tool.get("type"), function.get("name"), function.get("description"))
    parts = [str(text or "") for text in texts] + [canonical_json(function.get("parameters"))]
    return b"".join(map(framed, parts))


def _tool_choice_tag(tool_choice: str | Mapping[str, Any] | None) -> str:
    if tool_choice is None:
        return "__absent__"
    if isinstance(tool_choice, str):
        return f"mode:{tool_choice}"
    return f"specific:{tool_choice['function']['name']}"


def template_sig(
    source: str,
    kwargs: Mapping[str, Any],
    tool_choice: str | Mapping[str, Any] | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    prefill: bool = False,
) -> Signature:
    """The signature of a chat template's source and all that is rendered besides the messages.

    `kwargs` is the merged map without the implicit preserve_thinking; `tool_choice` is absent, a mode or
    {"function": {"name": ...}}; `prefill` says that the last assistant message is continued. Layout: domain, then
    framed by u64 LE lengths "prefill:on" or "prefill:off", source, canonical JSON of kwargs, tool_choice tag,
    tools_digest as hex text.
    """
    fields = {
        "prefill": f"prefill:{'on' if prefill else 'off'}".encode(),
        "template": source.encode("utf-8", "surrogatepass"),
        "kwargs": canonical_json(kwargs),
        "tool_choice": _tool_choice_tag(tool_choice).encode("utf-8", "surrogatepass"),
        "tools": tools_digest(tools).encode(),
    }
    parts = {name: blake3(data).hexdigest(length=8) for name, data in fields.items()}
    return Signature(_digest(fields.values()), SignatureParts(**parts))


def _digest(fields: Iterable[bytes]) -> str:
    return blake3(_SIG_DOMAIN + b"".join(map(framed, fields))).hexdigest()
