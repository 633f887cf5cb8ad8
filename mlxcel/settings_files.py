"""llama.cpp's configuration files: which ones there are, and the options that they hold.

It owns their places and their form: `key = value` lines, of which those before any section and those of `[*]` and
`[default]` count; a comment begins with # or ; anywhere. A key is a flag without its dashes, or a variable. It knows
no option. Invariant: a line that is neither a section, nor a comment, nor `key = value` is a ConfigError with the
file and the line's number.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from mlxcel.errors import ConfigError

SYSTEM = Path("/etc/llama.cpp/config.ini")
SECTIONS = ("*", "default")  # in the order in which they are applied


def config_files(environ: Mapping[str, str], system: Path = SYSTEM) -> list[Path]:
    """Those that exist: the machine's, then the user's, which wins."""
    xdg, home = environ.get("XDG_CONFIG_HOME"), environ.get("HOME")
    folder = Path(xdg) if xdg else Path(home) / ".config" if home else None
    return [path for path in (system, folder and folder / "llama.cpp" / "config.ini") if path and path.is_file()]


def read_options(path: Path) -> Iterator[tuple[str, str]]:
    """Keys and values in the order in which they apply. Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"cannot read {path}: {reason}") from None
    found: dict[str, list[tuple[str, str]]] = {section: [] for section in SECTIONS}
    section = "default"
    for number, line in enumerate(text.splitlines(), 1):
        line = re.split("[#;]", line, maxsplit=1)[0].strip()
        key, equals, value = line.partition("=")
        if heading := re.fullmatch(r"\[(.*)\]", line):
            section = heading[1].strip()
        elif equals and key.strip():
            found.setdefault(section, []).append((key.strip(), value.strip()))
        elif line:
            raise ConfigError(f"{path}: line {number} is not `key = value`")
    for section in SECTIONS:
        yield from found[section]
