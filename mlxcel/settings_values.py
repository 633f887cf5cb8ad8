"""A setting's text as its value: numbers, truth values, lists, JSON, biases.

It owns the words and number forms that are understood, and the bounds where a row has none of its own. It does not
know where a text came from: `source` is what an error names. Invariant: `read_value` returns a value of the row's
type and range or raises ConfigError in one sentence.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Sequence
from typing import Any

from mlxcel.errors import ConfigError
from mlxcel.settings_table import Setting

# llama-server's words, in lower case only; ours, in any case.
TRUE = ("on", "enabled", "true", "1")
FALSE = ("off", "disabled", "false", "0")
AUTO = ("auto", "-1")
OWN_TRUE = ("true", "1", "yes", "on")
OWN_FALSE = ("false", "0", "no", "off")

MAX_INT = (1 << 31) - 1
MAX_BYTES = (1 << 62) - 1
MAX_FLOAT = 3e38  # of float32
MAX_BIAS = 10_000.0  # beyond it a float32 logit may become infinite, and infinity minus infinity is NaN
UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}

# llama.cpp's samplers by their letters, and what else their names are written like.
SAMPLER_LETTERS = {
    "e": "penalties", "d": "dry", "s": "top_n_sigma", "k": "top_k", "y": "typ_p", "p": "top_p", "m": "min_p",
    "x": "xtc", "t": "temperature", "a": "adaptive_p",
}  # fmt: skip
SAMPLER_SPELLINGS = {
    "nucleus": "top_p",
    "typ": "typ_p",
    "typical": "typ_p",
    "typical_p": "typ_p",
    "temp": "temperature",
}
ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "'": "'", '"': '"', "\\": "\\"}


def read_value(row: Setting, text: str, source: str) -> Any:
    """`text` as the row's type. Raises ConfigError naming `source`."""
    match row.kind:
        case "int" | "float" | "bytes":
            return _in_range(row, _number(row.kind, text, source), text, source)
        case "switch" | "pair" | "exact":
            return _boolean(text, TRUE, FALSE, source)
        case "bool":
            return _boolean(text.strip().lower(), OWN_TRUE, OWN_FALSE, source)
        case "reuse":
            word = text.strip().lower()
            if source not in row.flags and word in {*TRUE, *FALSE, *OWN_TRUE, *OWN_FALSE}:
                return int(word in {*TRUE, *OWN_TRUE})
            return _in_range(row, _number("int", text, source), text, source)
        case "choice":
            return _choice(text, row.choices, source)
        case "tristate":
            return _tristate(text, source)
        case "list":
            return _list(row, text, source)
        case "texts":
            return (text,)
        case "json":
            return read_object(text, source)
        case "bias":
            return (_bias(text, source),)
    return text


def _number(kind: str, text: str, source: str) -> int | float:
    if kind == "bytes":
        found = re.fullmatch(r"\s*(\d{1,19})\s*([kmgt]?)(?:i?b)?\s*", text.lower(), re.ASCII)
        if found is None:
            raise ConfigError(f"{source}: {text!r} is not a number of bytes, such as 2147483648 or 2GiB")
        return int(found[1]) * UNITS[found[2]]
    try:
        number: int | float = int(text) if kind == "int" else float(text)
    except ValueError:
        number = math.nan
    if math.isnan(number) or "_" in text or not text.isascii():  # Python reads 1_0 and digits of other scripts too
        raise ConfigError(f"{source}: {text!r} is not a {'whole ' if kind == 'int' else ''}number")
    return number


def _in_range(row: Setting, number: int | float, text: str, source: str) -> int | float:
    """Without a bound of the row's own, numbers are those that C and MLX can hold."""
    unbounded = {"bytes": MAX_BYTES, "float": MAX_FLOAT}.get(row.kind, MAX_INT)
    low = -unbounded if row.low is None else row.low
    high = unbounded if row.high is None else row.high
    if number < low:
        raise ConfigError(f"{source}: {text.strip()} is less than {low}")
    if number > high:
        raise ConfigError(f"{source}: {text.strip()} is more than {high}")
    return number


def _boolean(word: str, true: Sequence[str], false: Sequence[str], source: str) -> bool:
    if word not in (*true, *false):
        raise ConfigError(f"{source}: invalid boolean value {word!r}, expected one of {', '.join((*true, *false))}")
    return word in true


def _tristate(text: str, source: str) -> str:
    for value, words in (("on", TRUE), ("off", FALSE), ("auto", AUTO)):
        if text in words:
            return value
    raise ConfigError(f"{source}: {text!r} is not one of on, off, auto")


def _choice(text: str, choices: tuple[str, ...], source: str) -> str:
    word = text.strip().lower()
    if word not in choices:
        raise ConfigError(f"{source}: {text!r} is not one of {', '.join(choices)}")
    return word


def _list(row: Setting, text: str, source: str) -> tuple[str, ...]:
    """The fields of one CSV row, without blanks around them and without empty ones."""
    try:
        parts = tuple(part.strip() for part in next(csv.reader([text]), []) if part.strip())
    except csv.Error as error:
        raise ConfigError(f"{source}: not a comma-separated list: {error}") from None
    if row.is_secret and not parts:  # whoever sets a key means the server to be closed
        raise ConfigError(f"{source}: there is no key in it")
    return parts


def read_object(text: str, source: str) -> dict[str, Any]:
    """`text` as a JSON object. Raises ConfigError naming `source`."""
    try:
        value = json.loads(text, parse_constant=_no_number)
    except RecursionError:
        raise ConfigError(f"{source}: nested too deeply") from None
    except ValueError as error:
        raise ConfigError(f"{source}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{source}: expected a JSON object")
    return value


def _no_number(constant: str) -> None:
    raise ValueError(f"{constant} is not a number of JSON")


def _bias(text: str, source: str) -> tuple[int, float]:
    found = re.fullmatch(r"\s*(\d{1,9})([+-](?:\d+(?:\.\d*)?|\.\d+)|-inf)\s*", text, re.ASCII)
    if found is None:
        raise ConfigError(f"{source}: {text!r} is not TOKEN_ID(+/-)BIAS, such as 15043+1 or 15043-inf")
    bias = float(found[2])
    if MAX_BIAS < abs(bias) < math.inf:
        raise ConfigError(f"{source}: {text} is more than {MAX_BIAS:g} away from 0")
    return int(found[1]), bias


def unescaped(text: str) -> str:
    r"""`text` with \n, \r, \t, \', \", \\ and \xHH (a byte of UTF-8) as what they stand for, others as they are."""
    data = re.sub(rb"\\(?:x([0-9A-Fa-f]{1,2})|([nrt'\"\\]))", _character, text.encode("utf-8", "surrogateescape"))
    return data.decode("utf-8", "replace")


def _character(found: re.Match[bytes]) -> bytes:
    return bytes([int(found[1], 16)]) if found[1] else ESCAPES[found[2].decode()].encode()


def sampler_name(word: str) -> str | None:
    """The sampler that `word` names, if any."""
    name = word.replace("-", "_")
    name = SAMPLER_SPELLINGS.get(name, name)
    return name if name in SAMPLER_LETTERS.values() else None
