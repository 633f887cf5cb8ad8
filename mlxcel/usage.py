"""What `--help`, `--version` and `--completion-bash` print, made from the settings table."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable, Sequence

from mlxcel import __version__
from mlxcel.settings_table import GROUPS, TABLE, Setting

INTRO = """\
usage: mlxcel-server (-m PATH | -hf OWNER/NAME | --demo) [options]

A language-model server for MLX with a prompt-prefix KV cache. An option with a
variable beside it can be set there too; the command line wins.

  mlxcel-server --demo                    fetch a small model and serve it
  mlxcel-server -m model.gguf --metrics   serve a GGUF file or a model directory
  curl localhost:8080/v1/cache/stats      see what the prompt cache does
"""


def help_text(width: int | None = None) -> str:
    """All options by group, wrapped to `width` columns (default: the terminal's, at most 100)."""
    columns = width or min(shutil.get_terminal_size().columns, 100)
    parts = [INTRO]
    for group, rows in GROUPS.items():
        working = [row for row in rows if row.effect == "works"]
        if working:
            parts.append(f"{group}:\n" + "\n".join(_option(row, columns) for row in working) + "\n")
    parts.append(_listing("Accepted for llama-server's sake, without effect here", "accepted", columns))
    parts.append(_listing("Refused, because ignoring them would change the answers", "refused", columns))
    return "\n".join(parts)


def version_text() -> str:
    return f"mlxcel-server {__version__}"


COMPLETION = """\
_mlxcel_server() {{
    local word=${{COMP_WORDS[COMP_CWORD]}}
    case ${{COMP_WORDS[COMP_CWORD-1]}} in
        {paths}) COMPREPLY=($(compgen -f -- "$word")) ;;
        *) COMPREPLY=($(compgen -W "{flags}" -- "$word")) ;;
    esac
}}
complete -o filenames -F _mlxcel_server mlxcel-server"""


def completion_text() -> str:
    """A script for bash: the options, and file names after those that take one."""
    rows = [row for row in TABLE if row.effect in ("works", "accepted")]
    paths = [flag for row in rows if row.metavar in ("PATH", "FILE", "DIR") for flag in row.flags]
    flags = [flag for row in rows for flag in (*row.flags, *row.negative)]
    return COMPLETION.format(paths="|".join(paths), flags=" ".join(flags))


def asked_for(words: Sequence[str]) -> str | None:
    """The name of the first option that asks for a text instead of a server. Bad settings do not stand in its way."""
    flags = {flag: row.name for row in TABLE if row.kind == "action" for flag in row.flags}
    return next((flags[word] for word in words if word in flags), None)


def spelled(row: Setting) -> str:
    """Its flags as a person types them."""
    return ", ".join((*row.flags, *row.negative)) + (f" {row.metavar}" if row.takes_value else "")


def shown_default(row: Setting) -> str:
    """The default as a person reads it; empty when there is none worth saying."""
    if row.default_text:
        return row.default_text
    if row.kind in ("switch", "action", "exact") or row.default in (None, (), "", {}):
        return ""
    if isinstance(row.default, bool):
        return "on" if row.default else "off"
    return f"{row.default:g}" if isinstance(row.default, float) else str(row.default)


def _option(row: Setting, columns: int) -> str:
    notes = [f"default: {d}"] if (d := shown_default(row)) else []
    notes += [" or ".join(row.env)] if row.env and row.flags else []
    text = row.help + (f" [{'; '.join(notes)}]" if notes else "")
    body = textwrap.wrap(text, columns - 6, break_on_hyphens=False, break_long_words=False)
    return "\n".join([f"  {spelled(row) if row.flags else row.env[0]}", *(f"      {line}" for line in body)])


def _listing(title: str, effect: str, columns: int) -> str:
    names: Iterable[str] = ((row.flags or row.env)[-1] for row in TABLE if row.effect == effect)
    lines = textwrap.wrap(" ".join(names), columns - 2, break_on_hyphens=False)
    return f"{title}:\n" + "".join(f"  {line}\n" for line in lines)
