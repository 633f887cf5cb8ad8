"""Random JSON schemas of growing depth, of what constrained output supports."""

from __future__ import annotations

import random
from typing import Any

WORDS = ("name", "age", "city", "tags", "size", "kind", "note", "unit")


def schema(rng: random.Random, depth: int) -> dict[str, Any]:
    """Closed objects, arrays, enums, numbers, short strings, alternatives; small enough to be finished."""
    leaves = (_string, _integer, _number, _enum, _const, _boolean, _null)
    nodes = (_object, _array, _any_of)
    return rng.choice(nodes if depth > 0 else leaves)(rng, depth - 1)


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(WORDS, rng.randint(1, 3))
    return {
        "type": "object",
        "properties": {name: schema(rng, rng.randint(0, max(depth, 0))) for name in names},
        "required": names[: rng.randint(1, len(names))],
        "additionalProperties": False,
    }


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "array", "items": schema(rng, max(depth, 0)), "minItems": rng.randint(0, 1), "maxItems": 2}


def _any_of(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [schema(rng, 0), schema(rng, max(depth, 0))]}


def _string(rng: random.Random, depth: int) -> dict[str, Any]:
    return rng.choice(({"type": "string", "maxLength": 8}, {"type": "string", "pattern": "^[a-z]{1,5}$"}))


def _integer(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(-50, 50)
    return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 1000)}


def _number(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "number", "minimum": 0, "maximum": rng.randint(1, 9)}


def _enum(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"enum": rng.sample(["red", "green", "blau", 7, None, True], 3)}


def _const(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"const": rng.choice(["x", 5, "two words"])}


def _boolean(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "boolean"}


def _null(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "null"}
