"""docs/llama-server.md: what is the same as in llama-server, flag by flag and route by route. Run it to write it."""

from __future__ import annotations

from pathlib import Path

from mlxcel.settings_table import GROUPS, Setting
from tests.contract.calls import CALLS

DOC = Path(__file__).parents[2] / "docs" / "llama-server.md"
MARK = "## Flags and variables\n"


def _effect(row: Setting) -> str:
    return {"works": "works", "accepted": "no effect", "refused": "refused", "removed": "removed"}[row.effect]


def _flags() -> str:
    out = [MARK, "\n*No effect* means: accepted, and named once in the log at start.\n"]
    for group, rows in GROUPS.items():
        out.append(f"\n### {group}\n\n| flag | variable | here |\n|---|---|---|\n")
        for row in rows:
            flags = " ".join(f"`{flag}`" for flag in (*row.flags, *row.negative)) or "–"
            variables = " ".join(f"`{name}`" for name in row.env) or "–"
            out.append(f"| {flags} | {variables} | {_effect(row)} |\n")
    return "".join(out)


def _routes() -> str:
    out = ["\n## Routes\n\n| call | status | members of the answer | |\n|---|---|---|---|\n"]
    for call in CALLS:
        members = ", ".join(f"`{name}`" for name in sorted(call.members))
        out.append(f"| `{call.method} {call.path}` | {call.status} | {members} | {call.note} |\n")
    return "".join(out)


def page() -> str:
    """What is written by hand, up to the mark, and the tables."""
    return DOC.read_text().split(MARK)[0] + _flags() + _routes()


if __name__ == "__main__":
    DOC.write_text(page())
