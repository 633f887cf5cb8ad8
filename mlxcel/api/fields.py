"""Typed readers over the members of one JSON object.

The rules of every field are here, once: null is absent, a wrong type is a 400 that names the field and both types,
a number outside a hard range is a 400 and outside a soft one is clamped, unknown members are ignored. It does not
know what any field means. No message repeats a value that the client sent: some values are secrets.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import orjson

from mlxcel.errors import InvalidRequest

T = TypeVar("T")
D = TypeVar("D")

MAX_DEPTH = 100  # canonical JSON, jinja's tojson and templates recurse over what a request brings


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object in `body` (UTF-8, no NaN or Infinity, nested at most MAX_DEPTH deep) or InvalidRequest."""
    value = _parse(body)
    if not isinstance(value, dict):
        raise InvalidRequest(f"request body must be a JSON object, got {kind_of(value)}")
    _check_depth(value)
    return value


def parse_array(body: bytes) -> list[Any]:
    """The same of an array."""
    value = _parse(body)
    if not isinstance(value, list):
        raise InvalidRequest(f"request body must be an array, got {kind_of(value)}")
    _check_depth(value)
    return value


def _parse(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"request body is not valid JSON: {error}") from None


def _check_depth(value: list[Any] | dict[str, Any]) -> None:
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        inner = (v.values() if isinstance(v, dict) else v for v in level)
        level = [v for values in inner for v in values if isinstance(v, (dict, list))]
        if not level:
            return
    raise InvalidRequest(f"request body is nested more than {MAX_DEPTH} levels deep")


def kind_of(value: object) -> str:
    """What a JSON value is called in messages."""
    kinds = {bool: "a boolean", int: "an integer", float: "a number", str: "a string", list: "an array"}
    return "null" if value is None else kinds.get(type(value), "an object")


def invalid(name: str, problem: str) -> InvalidRequest:
    return InvalidRequest(f"Field '{name}': {problem}", param=name)


class Fields:
    """The members of one object. Where several names are given, the first that is present and not null counts."""

    def __init__(self, members: Mapping[str, Any]) -> None:
        self._members = members

    def raw(self, name: str) -> Any:
        """The value as it came, or None."""
        return self._members.get(name)

    def _read(self, names: tuple[str, ...], wanted: str, fits: Callable[[object], bool]) -> tuple[str, Any] | None:
        for name in names:
            value = self._members.get(name)
            if value is not None:
                if not fits(value):
                    raise invalid(name, f"expected {wanted}, got {kind_of(value)}")
                return name, value
        return None

    def boolean(self, name: str, default: D) -> bool | D:
        found = self._read((name,), "a boolean", lambda v: isinstance(v, bool))
        return default if found is None else found[1]

    def text(self, name: str, default: D) -> str | D:
        found = self._read((name,), "a string", lambda v: isinstance(v, str))
        return default if found is None else found[1]

    def mapping(self, name: str, default: D) -> dict[str, Any] | D:
        found = self._read((name,), "an object", lambda v: isinstance(v, dict))
        return default if found is None else found[1]

    def array(self, name: str, default: D) -> list[Any] | D:
        found = self._read((name,), "an array", lambda v: isinstance(v, list))
        return default if found is None else found[1]

    def integer(self, *names: str, default: D, low: int | None = None, high: int | None = None) -> int | D:
        """A value outside low..high is refused. Integral floats are wrong: 1.0 is a number, not an integer."""
        found = self._read(names, "an integer", lambda v: type(v) is int)
        if found is None:
            return default
        name, value = found
        if low is not None and value < low:
            raise invalid(name, f"must be at least {low}")
        if high is not None and value > high:
            raise invalid(name, f"must be at most {high}")
        return int(value)

    def clamped(self, name: str, default: int, low: int, high: int) -> int:
        """An integer silently limited to low..high."""
        return min(max(self.integer(name, default=default), low), high)

    def number(self, name: str, default: float, low: float, high: float) -> float:
        """A finite float silently limited to low..high."""
        found = self._read((name,), "a number", lambda v: type(v) in (int, float))
        return default if found is None else min(max(float(found[1]), low), high)

    def limited(self, name: str, default: float, low: float, high: float) -> float:
        """A finite float. One outside low..high is refused."""
        value = self.number(name, default, -math.inf, math.inf)
        if not low <= value <= high:
            raise invalid(name, f"must be from {low:g} to {high:g}")
        return value
