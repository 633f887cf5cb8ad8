"""docs/models.md, made from what tiny models of each family do. Run as a module it writes the page."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mlx.core as mx

from mlxcel.engine.model import LoadedModel
from tests.models.chats import Outcome, three_turns
from tests.models.families import RUNNABLE, WINDOW

DOC = Path(__file__).parents[2] / "docs" / "models.md"
HEAD = f"""# Model families

What mlxcel does with each family of models that mlx-lm can load. Nothing here is decided by the model's name: what a
layer keeps is read off its cache objects, and a self-test at start tries on the loaded weights whether a prompt may be
split, state stored and cut, and sequences decoded in one batch (`--no-self-test` takes all of it for granted).

* **dense**: plain KV. Any stored prefix is reused, by any session.
* **windowed**: some layers see a sliding window or chunk. Whole states are stored per session (snapshots) and lent in
  part only while no window has wrapped.
* **recurrent**, **mixed**: recurrent or convolution state, alone or beside KV. Snapshots, never cut.

The table is made by `make models` with tiny random models on the CPU (window {WINDOW} tokens), whose every answer was
held against that of the same request without the cache. Shares are of the history's tokens in the second and third
turn of a chat that were not computed again (a random model's replies do not tokenise as they were generated, so that
without *ahead* they count as missed); *ahead* is with the next turn computed while the server is idle, which dense
models do without.

| family | kind | decode | reuse | turn 2 | turn 3 | turn 2 ahead | turn 3 ahead |
|---|---|---|---|---|---|---|---|
"""
TAIL = """
muse_spark runs on Metal only and was not tried here.
"""


def facts(model: LoadedModel) -> tuple[str, str, str]:
    """The columns that do not depend on the chat: kind, decode, reuse or why there is none."""
    decode = "batched" if model.proven.batches else "each alone"
    reuse = {"kv": "any prefix", "snapshots": "snapshots"}.get(model.reuse)
    if reuse is None:
        reuse = "cold: keeps unknown state" if model.shape is None else "cold: a split prompt computes otherwise"
    return model.kind, decode, reuse


def row(family: str, model: LoadedModel, outcome: Outcome) -> str:
    ahead = outcome.warmed if model.reuse == "snapshots" else []
    shares = [f"{turn.share:.2f}" for turn in outcome.plain[1:]] + [f"{turn.share:.2f}" for turn in ahead[1:]]
    shares += ["–"] * (4 - len(shares))
    return "| " + " | ".join((family, *facts(model), *shares)) + " |\n"


def parse(page: str) -> dict[str, tuple[str, str, str]]:
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.count(" | ") == 7]
    return {cells[0]: (cells[1], cells[2], cells[3]) for cells in rows[1:]}


def main() -> None:
    from tests.tiny import tiny_model

    pool, rows = ThreadPoolExecutor(1), []
    for family in RUNNABLE:
        model = pool.submit(tiny_model, family).result()
        rows.append(row(family, model, asyncio.run(three_turns(model, pool))))
        print(rows[-1], end="", flush=True)
    DOC.write_text(HEAD + "".join(rows) + TAIL)
    pool.submit(mx.clear_streams).result()
    pool.shutdown()


if __name__ == "__main__":
    main()
