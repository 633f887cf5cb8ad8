"""What a request says of the form of its output: grammar, json_schema, response_format, else the server's default.

It decides which one counts and checks shapes; whether a grammar compiles is engine.grammar's to say.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

from mlxcel.api.fields import Fields, invalid, kind_of
from mlxcel.settings import Settings

MAX_LENGTH = 1 << 20


@dataclass(frozen=True, slots=True)
class Constrain:
    """Text of a GBNF grammar or of a JSON schema, and the field that it came in."""

    kind: Literal["grammar", "json_schema"]
    text: str
    field: str


def refuse_two(fields: Fields) -> None:
    """A chat that brings a grammar and a schema is a mistake in llama-server; elsewhere the grammar counts."""
    if fields.raw("grammar") and fields.raw("json_schema") is not None:
        raise invalid("json_schema", "cannot be combined with grammar")


def read_constraint(fields: Fields, settings: Settings) -> Constrain | None:
    """`grammar` beats `json_schema` as in llama-server; response_format beside one of them is a mistake."""
    wanted = _response_format(fields)
    grammar, schema = fields.text("grammar", None), fields.raw("json_schema")
    if wanted is not None and (grammar or schema is not None):
        raise invalid("response_format", "cannot be combined with grammar or json_schema")
    if grammar:
        if len(grammar) > MAX_LENGTH:
            raise invalid("grammar", f"longer than {MAX_LENGTH} characters")
        return Constrain("grammar", grammar, "grammar")
    if schema is not None:
        return _schema(schema, "json_schema")
    return wanted or _default(fields, settings)


def _schema(schema: Any, field: str) -> Constrain:
    if not isinstance(schema, (dict, bool)):
        raise invalid(field, f"expected a JSON schema (an object), got {kind_of(schema)}")
    text = json.dumps(schema, ensure_ascii=False, separators=(",", ":"))  # the order of keys is that of the output
    if len(text) > MAX_LENGTH:
        raise invalid(field, f"longer than {MAX_LENGTH} characters")
    return Constrain("json_schema", text, field)


def _response_format(fields: Fields) -> Constrain | None:
    form = Fields(fields.mapping("response_format", {}))
    kind = form.text("type", "text")
    if kind == "text":
        return None
    if kind == "json_object":
        schema = form.raw("schema")
        return _schema({"type": "object"} if schema is None else schema, "response_format.schema")
    if kind == "json_schema":
        inner = form.mapping("json_schema", {})
        if inner.get("schema") is None:
            raise invalid("response_format.json_schema.schema", "is required")
        return _schema(inner["schema"], "response_format.json_schema.schema")
    raise invalid("response_format", "type must be text, json_object or json_schema")


def _default(fields: Fields, settings: Settings) -> Constrain | None:
    """--grammar and --json-schema hold for requests that say nothing; an empty grammar in a request lifts them."""
    if fields.raw("grammar") == "":
        return None
    if settings.grammar:
        return Constrain("grammar", settings.grammar, "--grammar")
    return Constrain("json_schema", settings.json_schema, "--json-schema") if settings.json_schema else None
