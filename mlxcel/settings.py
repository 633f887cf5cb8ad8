"""Settings: the table's rows read from the command line and the environment.

It owns the parsing rules (llama-server's, of which its unit and environment files make use): underscores in long
flags are dashes, the last of a repeated flag wins, the command line beats the environment, LLAMA_ARG_NO_X switches
a pair off by its mere presence, API keys add up. It does not know what any setting does. Invariant: a value that
leaves here has its row's type and range; anything else is a ConfigError that names the flag or the variable.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlxcel.errors import ConfigError
from mlxcel.settings_table import TABLE, Setting

TRUE = ("on", "enabled", "true", "1", "yes")
FALSE = ("off", "disabled", "false", "0", "no")
AUTO = ("auto", "-1")
UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}

_BY_FLAG: dict[str, tuple[Setting, bool]] = {
    flag: (row, positive)
    for row in TABLE
    for flags, positive in ((row.flags, True), (row.negative, False))
    for flag in flags
}


class Settings:
    """One attribute a row. `origin(name)` says where a value came from, `explicit(name)` whether anybody set it.

    `notes` are what an operator should know about how the values came to be.
    """

    def __init__(self, values: Mapping[str, Any], origins: Mapping[str, str], notes: Sequence[str] = ()) -> None:
        self._values = dict(values)
        self._origins = dict(origins)
        self.notes = tuple(notes)

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_values"][name]
        except KeyError:
            raise AttributeError(f"no setting {name!r}") from None

    def origin(self, name: str) -> str:
        return self._origins.get(name, "default")

    def explicit(self, name: str) -> bool:
        return name in self._origins

    def non_defaults(self) -> list[str]:
        """`name=value (origin)` of everything somebody set that has an effect; secrets are not shown."""
        rows = [row for row in TABLE if row.effect == "works" and row.name in self._origins]
        return [f"{row.name}={self._shown(row)} ({self._origins[row.name]})" for row in rows]

    def _shown(self, row: Setting) -> str:
        value = self._values[row.name]
        return "[redacted]" if row.is_secret else ",".join(map(str, value)) if isinstance(value, tuple) else str(value)

    def without_effect(self) -> list[str]:
        """Flags and variables that were set and do nothing here."""
        rows = [row for row in TABLE if row.effect == "accepted" and row.name in self._origins]
        origins = [(row, self._origins[row.name]) for row in rows]
        return [row.flags[-1] if at == "command line" else at.removeprefix("environment ") for row, at in origins]


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> Settings:
    """The settings that these arguments and variables make. Raises ConfigError."""
    values: dict[str, Any] = {row.name: row.default for row in TABLE}
    origins: dict[str, str] = {}
    notes: list[str] = []
    for row in TABLE:
        _from_environment(row, environ, values, origins)
    _from_command_line(list(argv), values, origins, notes)
    _follow_cache_reuse(values, origins)
    _read_files(values)
    values["api_prefix"] = _prefix(values["api_prefix"])
    return Settings(values, origins, notes)


def _follow_cache_reuse(values: dict[str, Any], origins: dict[str, str]) -> None:
    """llama-server's alias decides only where our own flag and variable are silent.

    On its command line 0 is the default of an option about something else, so there it switches nothing off.
    """
    if "prompt_cache_enabled" in origins or "cache_reuse" not in origins:
        return
    if values["cache_reuse"] or origins["cache_reuse"] != "command line":
        values["prompt_cache_enabled"] = values["cache_reuse"] > 0
        origins["prompt_cache_enabled"] = origins["cache_reuse"]


# --- the environment


def _from_environment(
    row: Setting, environ: Mapping[str, str], values: dict[str, Any], origins: dict[str, str]
) -> None:
    for name in row.env:
        negative = name.replace("LLAMA_ARG_", "LLAMA_ARG_NO_", 1)
        if row.kind == "pair" and name != negative and negative in environ:
            values[row.name], origins[row.name] = False, f"environment {negative}"
            return
        if name not in environ:
            continue
        text = environ[name]
        if (row.kind == "switch" and text.strip().lower() not in TRUE) or (row.kind == "exact" and text != "1"):
            return  # such a variable can only switch on
        if text == "" and row.kind in ("str", "list", "json", "texts"):
            return
        _allow(row, name)
        values[row.name], origins[row.name] = _value(row, text, name), f"environment {name}"
        return


def _allow(row: Setting, source: str) -> None:
    if row.effect == "refused":
        raise ConfigError(f"{source} is not supported ({row.help})")
    if row.effect == "removed":
        raise ConfigError(f"{source}: the argument has been removed, use {row.help}")


# --- the command line


def _from_command_line(argv: list[str], values: dict[str, Any], origins: dict[str, str], notes: list[str]) -> None:
    seen: set[str] = set()
    while argv:
        word = argv.pop(0)
        flag, equals, attached = word.partition("=") if word.startswith("--") else (word, "", "")
        flag = flag.replace("_", "-") if flag.startswith("--") else flag
        row, positive = _row(flag, word)
        value = _flag_value(row, positive, flag, attached if equals else None, argv)
        if row.is_additive and (row.name in seen or row.is_secret):
            value = (*values[row.name], *value)
        elif origins.get(row.name, "").startswith("environment"):
            notes.append(f"{flag} overrides {origins[row.name].removeprefix('environment ')}")
        elif row.name in seen:
            notes.append(f"{flag} was given more than once; the last one counts")
        seen.add(row.name)
        values[row.name], origins[row.name] = value, "command line"


def _row(flag: str, word: str) -> tuple[Setting, bool]:
    if flag not in _BY_FLAG:
        hint = "" if word.startswith("-") else " (a value without its flag?)"
        raise ConfigError(f"invalid argument: {word}{hint}; see --help")
    row, positive = _BY_FLAG[flag]
    _allow(row, flag)
    return row, positive


def _flag_value(row: Setting, positive: bool, flag: str, attached: str | None, argv: list[str]) -> Any:
    """The value of a flag: attached with =, or the next word for those that take one."""
    if not row.takes_value:
        if attached is None:
            return positive
        if row.kind != "bool" or not positive:
            raise ConfigError(f"{flag} takes no value")
        return _value(row, attached, flag)
    if attached is None:
        if not argv:
            raise ConfigError(f"{flag} needs a value: {row.metavar}")
        attached = argv.pop(0)
    return _value(row, attached, flag)


# --- values


def _value(row: Setting, text: str, source: str) -> Any:
    """`text` as the row's type. Raises ConfigError naming `source`."""
    match row.kind:
        case "int" | "float" | "bytes":
            return _in_range(row, _number(row.kind, text, source), text, source)
        case "switch" | "pair" | "bool" | "exact":
            return _boolean(text, source)
        case "reuse":
            word = text.strip().lower()
            number = int(word in TRUE) if word in TRUE + FALSE else _number("int", text, source)
            return _in_range(row, number, text, source)
        case "choice":
            return _choice(text, row.choices, source)
        case "tristate":
            return _tristate(text, source)
        case "list":
            return tuple(part for part in next(csv.reader([text]), []) if part)
        case "texts":
            return (text,)
        case "json":
            return _object(text, source)
        case "bias":
            return (_bias(text, source),)
    return text


def _number(kind: str, text: str, source: str) -> int | float:
    if kind == "bytes":
        found = re.fullmatch(r"\s*(\d+)\s*([kmgt]?)(?:i?b)?\s*", text.lower())
        if found is None:
            raise ConfigError(f"{source}: {text!r} is not a number of bytes, such as 2147483648 or 2GiB")
        return int(found[1]) * UNITS[found[2]]
    try:
        number: int | float = int(text) if kind == "int" else float(text)
    except ValueError:
        raise ConfigError(f"{source}: {text!r} is not a {'whole ' if kind == 'int' else ''}number") from None
    if not math.isfinite(number):
        raise ConfigError(f"{source}: {text!r} is not a finite number")
    return number


def _in_range(row: Setting, number: int | float, text: str, source: str) -> int | float:
    if row.low is not None and number < row.low:
        raise ConfigError(f"{source}: {text} is less than {row.low:g}")
    if row.high is not None and number > row.high:
        raise ConfigError(f"{source}: {text} is more than {row.high:g}")
    return number


def _boolean(text: str, source: str) -> bool:
    word = text.strip().lower()
    if word in TRUE:
        return True
    if word in FALSE:
        return False
    raise ConfigError(f"{source}: invalid boolean value {text!r}: use true or false")


def _tristate(text: str, source: str) -> str:
    word = text.strip().lower()
    for value, words in (("on", TRUE), ("off", FALSE), ("auto", AUTO)):
        if word in words:
            return value
    raise ConfigError(f"{source}: {text!r} is not one of on, off, auto")


def _choice(text: str, choices: tuple[str, ...], source: str) -> str:
    word = text.strip().lower()
    if word not in choices:
        raise ConfigError(f"{source}: {text!r} is not one of {', '.join(choices)}")
    return word


def _object(text: str, source: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{source}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{source}: expected a JSON object")
    return value


def _bias(text: str, source: str) -> tuple[int, float]:
    found = re.fullmatch(r"\s*(\d+)([+-](?:\d+(?:\.\d*)?|inf))\s*", text)
    if found is None:
        raise ConfigError(f"{source}: {text!r} is not TOKEN_ID(+/-)BIAS, such as 15043+1")
    return int(found[1]), float(found[2])


def _prefix(prefix: str) -> str:
    if prefix and not prefix.startswith("/"):
        raise ConfigError("--api-prefix must begin with a slash")
    return prefix.rstrip("/")


def _read_files(values: dict[str, Any]) -> None:
    """Keys and templates that live in files. Raises ConfigError when one cannot be read or holds nothing."""
    if path := values["api_key_file"]:
        lines = _read(path, "--api-key-file").splitlines()
        keys = tuple(line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#"))
        if not keys:
            raise ConfigError(f"--api-key-file: {path} holds no key")
        values["api_key"] = (*values["api_key"], *keys)
    if path := values["chat_template_file"]:
        values["chat_template"] = _read(path, "--chat-template-file")


def _read(path: str, source: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"{source}: cannot read {path}: {reason}") from None
