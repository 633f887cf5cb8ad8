"""What `--help` prints, made from the settings table."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator
from itertools import groupby

from mlxcel import __version__
from mlxcel.settings_table import ACCEPTED, UNSUPPORTED, WORKING, Setting

INTRO = """\
usage: mlxcel-server -m PATH [options]

A language-model server for MLX with a prompt-prefix KV cache. Every option also has the
environment variable named beside it; the command line wins.

  mlxcel-server --demo                      fetch a small model and serve it
  mlxcel-server -m model.gguf --metrics     serve a GGUF file or a model directory
  curl localhost:8080/v1/cache/stats        see what the prompt cache does
"""


def help_text(width: int | None = None) -> str:
    """All options by group, wrapped to `width` columns (default: the terminal's, at most 100)."""
    columns = width or min(shutil.get_terminal_size().columns, 100)
    parts = [INTRO]
    for group, rows in groupby(WORKING, key=lambda row: row.group):
        parts.append(f"{group}:\n" + "\n".join(_option(row, columns) for row in rows) + "\n")
    parts.append("Other:\n  -h, --help\n      print this and exit\n  --version\n      print the version and exit\n")
    parts.append(_lists(columns))
    return "\n".join(parts)


def version_text() -> str:
    return f"mlxcel-server {__version__}"


def spelled(row: Setting) -> str:
    """Its flags as a person types them."""
    value = " " + (row.metavar or default_metavar(row)) if row.kind not in ("switch", "pair", "cache-reuse") else ""
    return ", ".join((*row.flags, *row.no_flags)) + value


def default_metavar(row: Setting) -> str:
    return {"int": "N", "float": "X", "choice": "|".join(row.choices)}.get(row.kind, "VALUE")


def shown_default(row: Setting) -> str:
    """The default as a person reads it; empty when the help says it or there is none."""
    if row.default in (None, (), "", {}) or row.kind == "switch":
        return ""
    return {True: "on", False: "off"}[row.default] if isinstance(row.default, bool) else str(row.default)


def _option(row: Setting, columns: int) -> str:
    notes = [f"default {d}"] if (d := shown_default(row)) else []
    notes += [f"env {' or '.join(row.env)}"] if row.env else []
    text = row.help + (f" [{'; '.join(notes)}]" if notes else "")
    body = textwrap.wrap(text, columns, initial_indent="      ", subsequent_indent="      ", break_on_hyphens=False)
    return f"  {spelled(row)}\n" + "\n".join(body)


def _lists(columns: int) -> str:
    def wrapped(title: str, flags: Iterator[str]) -> str:
        body = textwrap.fill(
            " ".join(flags), columns, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False
        )
        return f"{title}:\n{body}\n"

    return wrapped("Accepted for llama-server's sake, without effect here", (r.flags[-1] for r in ACCEPTED)) + wrapped(
        "\nllama-server options that are refused, because ignoring them would change the answers", iter(UNSUPPORTED)
    )
