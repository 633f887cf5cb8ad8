"""docs/llama-server.md: what is the same as in llama-server, flag by flag and route by route. Run it to write it."""

from __future__ import annotations

from pathlib import Path

from mlxcel.settings_table import GROUPS, Setting
from tests.contract.calls import CALLS

DOC = Path(__file__).parents[2] / "docs" / "llama-server.md"
HEAD = """# Instead of llama-server

Change the binary and nothing else: the unit, the environment file, the proxy, curl scripts, SDK programs and dashboards
of a `llama-server` go on working. Where older and newer versions of llama-server differ, both forms are understood and
the newer one is sent. This page says what differs, and why; its tables are made by `make contract` from the settings
table and from the calls that the tests make.

## What differs

| here | llama-server | why |
|---|---|---|
| the port is 8080 | 8080, 9931 in the newest | scripts and proxies name 8080 |
| a bad flag or value ends with status 2 | 1 | 2 tells a wrong command line from a failed start |
| `--flag=value` is understood | the value must be the next word | one more form hurts nobody |
| numbers must be numbers | `12abc` is 12 | a typing mistake should not pass |
| at most `--max-queue-depth` requests wait, then 503 and `Retry-After` | no limit | a queue that only grows answers nobody |
| the prompt cache holds what all slots computed, shared by prefix | one prompt a slot, and copies in RAM | see [prompt-cache.md](prompt-cache.md) |
| `--cache-reuse N` switches that cache on; runs in the middle of a prompt are not shifted into place | KV shifting | shifted KV is not what the model would compute |
| `--context-shift` has no effect: a full context ends the answer with `length` | drops old tokens | as above |
| saved slots are in a format of this server | GGML's state | the state is MLX's |
| a slot that is saved holds what of it is in the prompt cache | the slot's KV | there is no other copy |
| GGUF, MLX and safetensors models; no router, agents, MCP | GGUF only | |
| JSON output of a schema is on one line, one space after `,` and `:` | free whitespace | a small model writes whitespace for ever |
| `n` up to 128, more than slots | up to the slots | the rest wait |
| the server names itself `mlxcel` in `owned_by` | `llamacpp` | |
| model tools, audio, images and reranking | yes | text only |
| resumable streams (`/v1/stream`) | yes | not here |

"""


def _effect(row: Setting) -> str:
    return {"works": "works", "accepted": "no effect", "refused": "refused", "removed": "removed"}[row.effect]


def _flags() -> str:
    out = ["## Flags and variables\n\n", "*No effect* means: accepted, and named once in the log at start.\n"]
    for group, rows in GROUPS.items():
        out.append(f"\n### {group}\n\n| flag | variable | here |\n|---|---|---|\n")
        for row in rows:
            flags = " ".join(f"`{flag}`" for flag in (*row.flags, *row.negative)) or "–"  # noqa: RUF001
            variables = " ".join(f"`{name}`" for name in row.env) or "–"  # noqa: RUF001
            out.append(f"| {flags} | {variables} | {_effect(row)} |\n")
    return "".join(out)


def _routes() -> str:
    out = ["\n## Routes\n\n| call | status | members of the answer | |\n|---|---|---|---|\n"]
    for call in CALLS:
        members = ", ".join(f"`{name}`" for name in sorted(call.members))
        out.append(f"| `{call.method} {call.path}` | {call.status} | {members} | {call.note} |\n")
    return "".join(out)


def page() -> str:
    return HEAD + _flags() + _routes()


if __name__ == "__main__":
    DOC.write_text(page())
