"""Settings: the table's rows read from the command line and the environment.

It owns the parsing rules (llama-server's, of which its unit and environment files make use): underscores in long
flags are dashes, the last of a repeated flag wins, the command line beats the environment, LLAMA_ARG_NO_X switches
a pair off by its mere presence, API keys add up, and so do the texts of flags that take one each. Below the
environment come llama.cpp's configuration files. It does not know what any setting does. Invariant: a value that leaves
here has its row's type and range; anything else is a ConfigError that names the flag or the variable.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlxcel.errors import ConfigError
from mlxcel.settings_files import read_options
from mlxcel.settings_table import TABLE, Setting
from mlxcel.settings_values import FALSE, SAMPLER_LETTERS, TRUE, read_object, read_value, sampler_name, unescaped

PREFIXES = ("LLAMA_ARG_", "MLXCEL_")
NOTHING = object()

_BY_FLAG: dict[str, tuple[Setting, bool]] = {
    flag: (row, positive)
    for row in TABLE
    for flags, positive in ((row.flags, True), (row.negative, False))
    for flag in flags
}
_BY_VARIABLE: dict[str, Setting] = {name: row for row in TABLE for name in row.env}


class Settings:
    """One attribute a row, none of which changes. `origin(name)` says where a value came from (default, command line
    or environment NAME, or FILE: KEY), `explicit(name)` whether anybody set it.

    `notes` are what an operator should know about how the values came to be.
    """

    _values: Mapping[str, Any]
    _origins: Mapping[str, str]
    notes: tuple[str, ...]

    def __init__(self, values: Mapping[str, Any], origins: Mapping[str, str], notes: Sequence[str] = ()) -> None:
        self.__dict__.update(_values=dict(values), _origins=dict(origins), notes=tuple(notes))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"setting {name!r} cannot be changed")

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_values"][name]
        except KeyError:
            raise AttributeError(f"no setting {name!r}") from None

    def origin(self, name: str) -> str:
        return self._origins.get(name, "default")

    def explicit(self, name: str) -> bool:
        return name in self._origins

    def source(self, name: str) -> str:
        """What an error about the value should name: the variable that it came from, or the flag."""
        return _source(name, self._origins)

    def non_defaults(self) -> list[str]:
        """`name=value (origin)` of everything somebody set that has an effect; secrets are not shown."""
        rows = [row for row in TABLE if row.effect == "works" and row.name in self._origins]
        return [f"{row.name}={self._shown(row)} ({self._origins[row.name]})" for row in rows]

    def _shown(self, row: Setting) -> str:
        value = self._values[row.name]
        return "[redacted]" if row.is_secret else ",".join(map(str, value)) if isinstance(value, tuple) else str(value)

    def without_effect(self) -> list[str]:
        """Flags and variables that ask for something else than the default, and do nothing here."""
        set_rows = [row for row in TABLE if row.effect == "accepted" and row.name in self._origins]
        return [self._spelled(row) for row in set_rows if self._values[row.name] != row.default]

    def _spelled(self, row: Setting) -> str:
        origin = self._origins[row.name]
        if origin != "command line":
            return origin.removeprefix("environment ")
        return row.negative[-1] if row.negative and not self._values[row.name] else row.flags[-1]


def parse(argv: Sequence[str], environ: Mapping[str, str], files: Sequence[Path] = ()) -> Settings:
    """The settings that these arguments, variables and configuration files make. Raises ConfigError."""
    values: dict[str, Any] = {row.name: row.default for row in TABLE}
    origins: dict[str, str] = {}
    notes: list[str] = []
    for path in files:
        _from_file(path, values, origins, notes)
    for row in TABLE:
        _from_environment(row, environ, values, origins, notes)
    notes += _strangers(environ)
    _from_command_line(list(argv), values, origins, notes)
    _follow_cache_reuse(values, origins)
    _read_files(values, origins)
    _check_together(values, origins)
    values["api_prefix"] = _prefix(values["api_prefix"], _source("api_prefix", origins))
    values["apc_hash"] = values["apc_hash"].replace("-", "")
    if values["escape"]:
        for name in ("reverse_prompt", "dry_sequence_breaker"):
            values[name] = tuple(map(unescaped, values[name]))
    notes += _unknown_samplers(values)
    return Settings(values, origins, notes)


def _follow_cache_reuse(values: dict[str, Any], origins: dict[str, str]) -> None:
    """llama-server's alias decides only where our own flag and variable are silent.

    On its command line and in its files 0 is the default of an option about something else, and switches nothing off.
    """
    if "prompt_cache_enabled" in origins or "cache_reuse" not in origins:
        return
    if values["cache_reuse"] or origins["cache_reuse"].startswith("environment"):
        values["prompt_cache_enabled"] = values["cache_reuse"] > 0
        origins["prompt_cache_enabled"] = origins["cache_reuse"]


def _unknown_samplers(values: Mapping[str, Any]) -> list[str]:
    """A note for each that llama-server would leave out too."""
    names = [name for name in values["samplers"].split(";") if name and not sampler_name(name)]
    letters = [letter for letter in values["sampler_seq"] if letter not in SAMPLER_LETTERS]
    return [f"--samplers: {name!r} is no sampler, and left out" for name in names] + [
        f"--sampler-seq: {letter!r} is no sampler, and left out" for letter in letters
    ]


# --- configuration files and the environment


def _from_file(path: Path, values: dict[str, Any], origins: dict[str, str], notes: list[str]) -> None:
    """llama.cpp's programs share a file, so that one ignores what it does not know, which is said."""
    for key, text in read_options(path):
        row, positive = _option(key)
        source = f"{path}: {key}"
        if row is None:
            notes.append(f"{source} is no option of this server")
            continue
        value = _worded(row, text, source, notes)
        if value is not NOTHING:
            _keep(row, value if positive else not value, source, values, origins)


def _option(key: str) -> tuple[Setting | None, bool]:
    """The row of a key: a variable, or a flag without its dashes, of which one may stand for switching off."""
    if key in _BY_VARIABLE:
        return _BY_VARIABLE[key], True
    row, positive = _BY_FLAG.get("--" + key.replace("_", "-")) or _BY_FLAG.get("-" + key) or (None, True)
    return (None, True) if row is not None and row.kind == "action" else (row, positive)


def _from_environment(
    row: Setting, environ: Mapping[str, str], values: dict[str, Any], origins: dict[str, str], notes: list[str]
) -> None:
    for name in row.env:
        if row.kind == "pair" and _twin(name) != name and _twin(name) in environ:
            values[row.name], origins[row.name] = False, f"environment {_twin(name)}"
            return
        if name not in environ:
            continue
        value = _worded(row, environ[name], name, notes)
        if value is not NOTHING:
            _keep(row, value, f"environment {name}", values, origins)
        return


def _worded(row: Setting, text: str, source: str, notes: list[str]) -> Any:
    """What the text of a variable or of a file says, or NOTHING. Raises ConfigError."""
    if (row.kind == "switch" and text not in TRUE) or (row.kind == "exact" and text != "1"):
        if text not in ("", *FALSE):  # as good as none for llama-server too, but hardly meant so
            words = "1" if row.kind == "exact" else ", ".join(TRUE)
            notes.append(f"{source} has no effect: it knows only {words}")
        return NOTHING
    if text == "" and row.kind in ("str", "list", "json", "texts"):
        if row.is_secret:
            notes.append(f"{source} is empty, as if it were not set")
        return NOTHING
    _allow(row, source)
    return read_value(row, text, source)


def _keep(row: Setting, value: Any, origin: str, values: dict[str, Any], origins: dict[str, str]) -> None:
    """Keys of all sources count, of everything else only the last one's."""
    values[row.name] = (*values[row.name], *value) if row.is_secret and row.is_additive else value
    origins[row.name] = origin


def _strangers(environ: Mapping[str, str]) -> list[str]:
    """A note for each variable that looks like one of ours or of llama-server's and is none: misspelt, perhaps."""
    known = {name for row in TABLE for own in row.env for name in (own, _twin(own) if row.kind == "pair" else own)}
    return [
        f"{name} is no variable of this server" for name in environ if name.startswith(PREFIXES) and name not in known
    ]


def _twin(name: str) -> str:
    """The variable whose mere presence switches a pair off; `name` itself where there is none."""
    return name.replace("LLAMA_ARG_", "LLAMA_ARG_NO_", 1)


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
        raise ConfigError(f"invalid argument: {word}{_hint(flag)}; see --help")
    row, positive = _BY_FLAG[flag]
    _allow(row, flag)
    return row, positive


def _hint(flag: str) -> str:
    if not flag.startswith("-"):
        return " (a value without its flag?)"
    import difflib  # only for whoever mistyped

    working = [name for name, (row, _) in _BY_FLAG.items() if row.effect == "works"]
    near = difflib.get_close_matches(flag, working, n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def _flag_value(row: Setting, positive: bool, flag: str, attached: str | None, argv: list[str]) -> Any:
    """The value of a flag: attached with =, or the next word for those that take one."""
    if not row.takes_value:
        if attached is None:
            return positive
        if row.kind != "bool" or not positive:
            raise ConfigError(f"{flag} takes no value")
        return read_value(row, attached, flag)
    if attached is None:
        if not argv or (argv[0].startswith("--") and argv[0] in _BY_FLAG):  # --api-key --metrics: no key is meant
            raise ConfigError(f"{flag} needs a value: {row.metavar}")
        attached = argv.pop(0)
    return read_value(row, attached, flag)


# --- what follows from several


def _source(name: str, origins: Mapping[str, str]) -> str:
    """What an error about a row's value should name: the variable, or the flag."""
    origin = origins.get(name, "command line")
    return "--" + name.replace("_", "-") if origin == "command line" else origin.removeprefix("environment ")


def _read_files(values: dict[str, Any], origins: Mapping[str, str]) -> None:
    """Keys, templates and the page's settings in files. Raises ConfigError when one cannot be read or holds nothing."""
    if values["api_key_file"]:
        lines = [line.strip() for line in _read("api_key_file", values, origins).splitlines()]
        keys = tuple(line for line in lines if line and not line.startswith("#"))
        if not keys:
            raise ConfigError(f"{_source('api_key_file', origins)}: {values['api_key_file']} holds no key")
        values["api_key"] = (*values["api_key"], *keys)
    for name in ("ssl_key_file", "ssl_cert_file"):
        if values[name]:
            _read(name, values, origins)
    _read_constraint(values, origins)
    if _file_counts("ui_config", values, origins):
        text = _read("ui_config_file", values, origins)
        values["ui_config"] = read_object(text, _source("ui_config_file", origins))
    if _file_counts("chat_template", values, origins):
        values["chat_template"] = _read("chat_template_file", values, origins)
    elif values["chat_template"] and "{" not in values["chat_template"]:
        source = _source("chat_template", origins)
        raise ConfigError(f"{source}: built-in templates are not known by name here, give the Jinja text")


def _file_counts(name: str, values: Mapping[str, Any], origins: Mapping[str, str]) -> bool:
    """Whether the file named for a text stands in for it: not where the text was typed and the file was not."""
    typed, from_file = (origins.get(each) == "command line" for each in (name, name + "_file"))
    return bool(values[name + "_file"]) and (from_file or not typed)


def _read_constraint(values: dict[str, Any], origins: Mapping[str, str]) -> None:
    """The grammar or schema that all replies follow, from its file if it is in one; a schema must be JSON."""
    for name in ("grammar", "json_schema"):
        if values[name + "_file"]:
            if values[name]:
                raise ConfigError(f"--{_flag(name)} and --{_flag(name)}-file cannot be combined")
            values[name] = _read(name + "_file", values, origins)
    if values["grammar"] and values["json_schema"]:
        raise ConfigError("--grammar and --json-schema cannot be combined")
    if values["json_schema"]:
        try:
            values["json_schema"] = json.dumps(json.loads(values["json_schema"]), ensure_ascii=False)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"--json-schema: not JSON: {error}") from None


def _flag(name: str) -> str:
    return name.replace("_", "-")


def _read(name: str, values: Mapping[str, Any], origins: Mapping[str, str]) -> str:
    try:
        return Path(values[name]).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a null character in the path
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"{_source(name, origins)}: cannot read {values[name]}: {reason}") from None


def _prefix(prefix: str, source: str) -> str:
    if prefix and not prefix.startswith("/"):
        raise ConfigError(f"{source} must begin with a slash")
    return prefix.rstrip("/")


def _check_together(values: Mapping[str, Any], origins: Mapping[str, str]) -> None:
    """What settings must not be said together, or not without each other."""
    if bool(values["ssl_key_file"]) != bool(values["ssl_cert_file"]):
        missing = "--ssl-cert-file" if values["ssl_key_file"] else "--ssl-key-file"
        raise ConfigError(f"{missing} is missing: HTTPS needs both the key and the certificate")
    hosts = [host.strip() for host in values["host"].split(",")]
    if not all(hosts):
        raise ConfigError(f"{_source('host', origins)}: an address is empty")
    if values["slot_save_path"] and not Path(values["slot_save_path"]).is_dir():
        raise ConfigError(f"{_source('slot_save_path', origins)}: {values['slot_save_path']} is not a folder")
    if values["port"] == 0 and sum(not host.endswith(".sock") for host in hosts) > 1:
        raise ConfigError(f"{_source('port', origins)}: 0 cannot be had on several addresses at once")
