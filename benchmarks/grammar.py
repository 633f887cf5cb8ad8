"""What a grammar costs per token: masks as a share of a decode step, and whether real answers validate.

    python benchmarks/grammar.py -m PATH [--batch 4] [--tokens 64] [--repeats 3] [--schemas 0]

Decode steps of the server's engine are timed with free rows and with rows that follow a grammar, interleaved, so that
a busy machine slows both; the table shows medians. "added" is what a constrained step takes longer, "mask" what the
masks of all rows take by themselves: most of it is hidden behind the model's forward pass. `--schemas N` also asks
the model for answers to N random schemas of growing depth and validates them (it needs the tests' requirements).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from array import array
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx

sys.path.insert(0, str(Path(__file__).parent.parent))  # of a checkout that is not installed

from mlxcel.cache.limits import Limits
from mlxcel.cache.store import Store
from mlxcel.engine import cpu
from mlxcel.engine.batch import Engine
from mlxcel.engine.bounds import Bounds
from mlxcel.engine.grammar import Grammar
from mlxcel.engine.model import LoadedModel, load_model
from mlxcel.engine.reuse import KVReuse, Trace
from mlxcel.engine.scheduler import Scheduler
from mlxcel.engine.sequence import Delta, Finished, Generation, Sampling
from mlxcel.sources import find_model

CUT = 400  # tokens of an answer to a random schema

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "kind": {"enum": ["friend", "colleague", "stranger"]},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "city": {"type": "string"}},
            "required": ["street", "city"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "kind", "address"],
    "additionalProperties": False,
}
GBNF_JSON = r"""
root ::= value
value ::= "{" ws (string ":" ws value ("," ws string ":" ws value)*)? "}" ws
  | "[" ws (value ("," ws value)*)? "]" ws | string | number | ("true" | "false" | "null") ws
string ::= "\"" ([^"\\\x00-\x1f] | "\\" ["\\bfnrt])* "\"" ws
number ::= "-"? [0-9]{1,9} ("." [0-9]{1,9})? ws
ws ::= [ \n]{0,4}
"""
GRAMMARS = {
    "schema of people": ("json_schema", json.dumps({"type": "array", "items": PERSON, "minItems": 50})),
    "any JSON array": ("json_schema", '{"type":"array","minItems":100}'),
    "GBNF of JSON": ("grammar", GBNF_JSON),
    "GBNF of prose": ("grammar", "root ::= [A-Za-z ,.]+"),
}


def prompt(model: LoadedModel, row: int) -> array[int]:
    return model.tokenizer.encode(f"List {row + 3} people, with their ages and addresses.\n", add_special=True)


async def step_seconds(
    scheduler: Scheduler, model: LoadedModel, batch: int, tokens: int, grammar: Grammar | None
) -> tuple[float, list[list[int]]]:
    """Seconds a decode step, from the last row's first token to the first row's last; and each row's tokens."""

    async def one(row: int) -> tuple[float, float, list[int]]:
        greedy = Sampling(temperature=0.0)
        sequence = scheduler.submit(Generation(prompt(model, row), greedy, tokens, (), True, grammar=grammar))
        async for event in sequence.events():
            if isinstance(event, Finished):
                end = sequence.first_token_at + event.predicted_ms / 1000
                return sequence.first_token_at, end, sequence.tokens.tolist()
        raise AssertionError("a sequence ended without Finished")

    rows = await asyncio.gather(*(one(row) for row in range(batch)))
    steps = min(len(said) for _, _, said in rows) - 1
    return (min(end for _, end, _ in rows) - max(first for first, _, _ in rows)) / steps, [said for _, _, said in rows]


def mask_seconds(model: LoadedModel, grammar: Grammar, rows: list[list[int]]) -> float:
    """Seconds a step that the masks of all rows take by themselves."""
    total = 0.0
    for said in rows:
        constraint = model.grammars.constrain(grammar)
        began = time.perf_counter()
        for token in [0, *said[:-1]]:
            constraint.allowed_after(token)
        total += (time.perf_counter() - began) / len(said)
    return total


async def costs(scheduler: Scheduler, model: LoadedModel, batch: int, tokens: int, repeats: int) -> None:
    print(f"| batch {batch} | free ms/step | constrained ms/step | added | mask ms/step | mask / step |")
    print("|---|---|---|---|---|---|")
    for name, (kind, text) in GRAMMARS.items():
        grammar = model.grammars.compile(kind, text)  # type: ignore[arg-type]
        free: list[float] = []
        bound: list[float] = []
        rows: list[Any] = []
        for _ in range(repeats + 1):
            free.append((await step_seconds(scheduler, model, batch, tokens, None))[0])
            seconds, rows = await step_seconds(scheduler, model, batch, tokens, grammar)
            bound.append(seconds)
        without, within = statistics.median(free[1:]), statistics.median(bound[1:])
        mask = mask_seconds(model, grammar, rows)
        print(
            f"| {name} | {without * 1e3:.2f} | {within * 1e3:.2f} | {within / without - 1:+.1%} "
            f"| {mask * 1e3:.3f} | {mask / without:.1%} |"
        )


async def validate(scheduler: Scheduler, model: LoadedModel, num: int) -> None:
    import jsonschema  # type: ignore[import-untyped]

    from tests.schemas import schema

    rng = random.Random(7)
    schemas = [schema(rng, i * 6 // num) for i in range(num)]
    cut = 0

    async def one(i: int, wanted: dict[str, Any]) -> None:
        nonlocal cut
        tokens = model.tokenizer.encode(f"Answer with JSON: {json.dumps(wanted)}\n", add_special=True)
        grammar = model.grammars.compile("json_schema", json.dumps(wanted))
        text = ""
        async for event in scheduler.submit(Generation(tokens, Sampling(seed=i), CUT, grammar=grammar)).events():
            if isinstance(event, Delta):
                text += event.text
            elif isinstance(event, Finished) and event.stop_type == "limit":
                cut += 1
                return
        jsonschema.validate(json.loads(text), wanted)

    for at in range(0, num, 8):
        await asyncio.gather(*(one(at + i, wanted) for i, wanted in enumerate(schemas[at : at + 8])))
        print(f"  {min(at + 8, num)} of {num} schemas, {cut} cut", file=sys.stderr)
    print(f"{num - cut} of {num} answers to random schemas validate, {cut} were cut at {CUT} tokens")


async def measure(model: LoadedModel, pool: ThreadPoolExecutor, args: argparse.Namespace) -> None:
    bounds = Bounds(8, model.n_ctx_train, 64, 256 if cpu.is_cpu() else 2048, 0.1)
    reuse = KVReuse(Store(Limits()), 0, bounds.rope_regime, Trace(loud=False))
    scheduler = Scheduler(Engine(model), pool, reuse, model.tokenizer, bounds)
    running = asyncio.create_task(scheduler.run())
    await costs(scheduler, model, args.batch, args.tokens, args.repeats)
    if args.schemas:
        await validate(scheduler, model, args.schemas)
    await scheduler.drain(10)
    await running


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("-m", "--model", help="model directory or GGUF file (default: the demo model)")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--schemas", type=int, default=0, help="random schemas whose answers are validated")
    args = parser.parse_args()
    path = find_model(path=args.model, hf_repo=None, demo=args.model is None, offline=False, hf_token=None)
    print(cpu.prepare(), file=sys.stderr)
    with ThreadPoolExecutor(1) as pool:
        model = pool.submit(load_model, path, dtype="auto", model_id="benchmark").result()
        asyncio.run(measure(model, pool, args))
        pool.submit(mx.clear_streams).result()
    return 0


if __name__ == "__main__":
    sys.exit(main())
