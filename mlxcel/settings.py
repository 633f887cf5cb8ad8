"""Settings: the table's rows read from the command line and the environment.

It owns the parsing rules (llama-server's, of which its unit and environment files make use): underscores in long
flags are dashes, the last of a repeated flag wins, the command line beats the environment, LLAMA_ARG_NO_X switches
a pair off by its mere presence, API keys add up. It does not know what any setting does. Invariant: a value that
leaves here has its row's type and range; anything else is a ConfigError that names the flag or the variable.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlxcel.errors import ConfigError
from mlxcel.settings_table import TABLE, UNSUPPORTED, Setting

TRUE = ("on", "enabled", "true", "1", "yes")
FALSE = ("off", "disabled", "false", "0", "no")

_BY_FLAG: dict[str, tuple[Setting, bool]] = {
    flag: (row, positive)
    for row in TABLE
    for flags, positive in ((row.flags, True), (row.no_flags, False))
    for flag in flags
}


class Settings:
    """One attribute a row. `origin(name)` says where a value came from, `explicit(name)` whether anybody set it."""

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
        rows = [row for row in TABLE if row.effect and row.name in self._origins]
        return [f"{r.name}={self._shown(r)} ({self._origins[r.name]})" for r in rows]

    def _shown(self, row: Setting) -> str:
        value = self._values[row.name]
        return "[redacted]" if row.secret else ",".join(map(str, value)) if isinstance(value, tuple) else str(value)

    def without_effect(self) -> list[str]:
        """Flags and variables that were set and do nothing here."""
        rows = [row for row in TABLE if not row.effect and row.name in self._origins]
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
    _read_files(values)
    values["api_prefix"] = _prefix(values["api_prefix"])
    return Settings(values, origins, notes)


# --- the environment


def _from_environment(
    row: Setting, environ: Mapping[str, str], values: dict[str, Any], origins: dict[str, str]
) -> None:
    for name in row.env:
        if row.kind == "pair" and name.startswith("LLAMA_ARG_"):
            negative = name.replace("LLAMA_ARG_", "LLAMA_ARG_NO_", 1)
            if negative in environ:
                values[row.name], origins[row.name] = False, f"environment {negative}"
                return
        if name not in environ:
            continue
        text = environ[name]
        if row.kind == "switch" and text.strip().lower() not in TRUE:
            return  # as llama-server: a switch's variable can only switch it on
        if text == "" and row.kind in ("str", "list", "json"):
            return
        values[row.name] = _value(row, text, name)
        origins[row.name] = f"environment {name}"
        return


# --- the command line


def _from_command_line(argv: list[str], values: dict[str, Any], origins: dict[str, str], notes: list[str]) -> None:
    seen: set[str] = set()
    while argv:
        word = argv.pop(0)
        flag, equals, attached = word.partition("=") if word.startswith("--") else (word, "", "")
        flag = flag.replace("_", "-") if flag.startswith("--") else flag
        row, positive = _row(flag, word)
        if row.kind == "switch" or (row.kind == "pair" and not positive):
            if equals:
                raise ConfigError(f"{flag} takes no value")
            value: Any = positive
        elif row.kind in ("pair", "cache-reuse"):
            value = _value(row, attached, flag) if equals else positive
        else:
            if not equals and not argv:
                raise ConfigError(f"{flag} needs a value: {row.metavar or row.kind}")
            value = _value(row, attached if equals else argv.pop(0), flag)
        if row.name == "api_key" or (row.kind == "bias" and row.name in seen):
            value = (*values[row.name], *value)
        elif origins.get(row.name, "").startswith("environment"):
            notes.append(f"{flag} overrides {origins[row.name].removeprefix('environment ')}")
        elif row.name in seen:
            notes.append(f"{flag} was given more than once; the last one counts")
        seen.add(row.name)
        values[row.name], origins[row.name] = value, "command line"


def _row(flag: str, word: str) -> tuple[Setting, bool]:
    if flag in UNSUPPORTED:
        raise ConfigError(f"{flag} is not supported: {UNSUPPORTED[flag]}")
    if flag not in _BY_FLAG:
        hint = "; see --help" if word.startswith("-") else " (a value without its flag?); see --help"
        raise ConfigError(f"invalid argument: {word}{hint}")
    return _BY_FLAG[flag]


# --- values


def _value(row: Setting, text: str, source: str) -> Any:
    """`text` as the row's type. Raises ConfigError naming `source`."""
    match row.kind:
        case "int" | "float":
            return _number(row, text, source)
        case "switch" | "pair":
            return _boolean(text, source)
        case "cache-reuse":
            return int(text) > 0 if re.fullmatch(r"\s*\d+\s*", text) else _boolean(text, source)
        case "choice":
            if text.strip().lower() not in row.choices:
                raise ConfigError(f"{source}: {text!r} is not one of {', '.join(row.choices)}")
            return text.strip().lower()
        case "list":
            return tuple(part for part in text.split(",") if part)
        case "json":
            return _object(text, source)
        case "bias":
            return (_bias(text, source),)
    return text


def _number(row: Setting, text: str, source: str) -> int | float:
    try:
        number: int | float = int(text) if row.kind == "int" else float(text)
    except ValueError:
        kind = "a whole number" if row.kind == "int" else "a number"
        raise ConfigError(f"{source}: {text!r} is not {kind}") from None
    if not math.isfinite(number):
        raise ConfigError(f"{source}: {text!r} is not a finite number")
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


def _object(text: str, source: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{source}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{source}: expected a JSON object")
    return value


def _bias(text: str, source: str) -> tuple[int, float]:
    found = re.fullmatch(r"\s*(\d+)([+-]\d+(?:\.\d*)?)\s*", text)
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
