"""The server's engine against the bare mlx-lm loop on one model: prefill, and decode at batch 1, 4 and 8.

    python benchmarks/engine.py [--model PATH] [--repeats 3] [--json FILE]

Everything runs in one process on one MLX thread, interleaved, so that a busy machine slows all of it; the table
shows medians and their ratios. "bare" is the least Python that can drive the model (argmax, no log-probabilities),
"mlx-lm" is its BatchGenerator, "engine" is the scheduler with the store on. `--model` defaults to the demo model.
A decode is timed from the moment every row has its first token to the last token of the last row.
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
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mlx.core as mx

from mlxcel.cache.key import CacheContext
from mlxcel.cache.limits import Limits
from mlxcel.cache.store import Store
from mlxcel.engine import cpu
from mlxcel.engine.batch import Engine
from mlxcel.engine.bounds import Bounds
from mlxcel.engine.model import LoadedModel, load_model, make_cache
from mlxcel.engine.reuse import KVReuse, Trace
from mlxcel.engine.scheduler import Scheduler
from mlxcel.engine.sequence import Finished, Generation, Sampling
from mlxcel.sources import find_model

PREFILL_TOKENS = 1500
DECODE_PROMPT = 24  # eight of them fit one prefill budget, so that all rows start together
DECODE_TOKENS = 32
BATCHES = (1, 4, 8)

Timings = dict[str, list[float]]  # tokens per second, one a repeat


def prompt(model: LoadedModel, n: int, seed: int) -> array[int]:
    rng = random.Random(seed)
    return array("i", [rng.randrange(100, min(model.vocab_size, 30_000)) for _ in range(n)])


# --- the bare loop: what the model alone costs


def bare_prefill(model: LoadedModel, tokens: array[int], chunk: int) -> float:
    """Tokens per second."""
    began, cache = time.perf_counter(), make_cache(model.net)
    for at in range(0, len(tokens) - 1, chunk):
        model.net(mx.array(tokens[at : min(at + chunk, len(tokens) - 1)])[None], cache=cache)
        mx.eval([c.state for c in cache])
    return (len(tokens) - 1) / (time.perf_counter() - began)


def bare_decode(model: LoadedModel, batch: int) -> float:
    """Tokens per second; each step is scheduled before the one before is read."""
    caches = [make_cache(model.net) for _ in range(batch)]
    for row, cache in enumerate(caches):
        model.net(mx.array(prompt(model, DECODE_PROMPT - 1, row))[None], cache=cache)
        mx.eval([c.state for c in cache])
    together = caches[0] if batch == 1 else [c[0].merge(list(c)) for c in zip(*caches, strict=True)]

    def following(tokens: mx.array) -> mx.array:
        out = mx.argmax(model.net(tokens[:, None], cache=together)[:, -1], axis=-1)
        mx.async_eval(out)
        return out

    ahead, began = following(mx.ones((batch,), mx.int32)), 0.0
    for _ in range(DECODE_TOKENS):
        current, ahead = ahead, following(ahead)
        current.tolist()
        began = began or time.perf_counter()
    return batch * (DECODE_TOKENS - 1) / (time.perf_counter() - began)


def library_decode(model: LoadedModel, batch: int) -> float:
    """Tokens per second of mlx-lm's BatchGenerator."""
    from mlx_lm.generate import BatchGenerator

    generator = BatchGenerator(model.net, max_tokens=DECODE_TOKENS, completion_batch_size=batch)
    generator.insert([prompt(model, DECODE_PROMPT, row).tolist() for row in range(batch)])
    left, began = batch, 0.0
    while left:
        responses = generator.next_generated()
        left -= sum(r.finish_reason is not None for r in responses)
        if not began and len(responses) == batch:
            began = time.perf_counter()
    elapsed = time.perf_counter() - began
    generator.close()
    return batch * (DECODE_TOKENS - 1) / elapsed


# --- the server's engine


async def engine_prefill(scheduler: Scheduler, tokens: array[int], chunk: int) -> float:
    began = time.perf_counter()
    context = CacheContext(model_id="benchmark", template_sig="0" * 64)
    async for _ in scheduler.submit(Generation(tokens, max_tokens=0, cache=context)).events():
        pass
    return (len(tokens) - 1) / (time.perf_counter() - began)


async def engine_decode(scheduler: Scheduler, model: LoadedModel, batch: int) -> float:
    async def one(row: int) -> tuple[float, float]:
        generation = Generation(prompt(model, DECODE_PROMPT, row), Sampling(temperature=0.0), DECODE_TOKENS, (), True)
        sequence = scheduler.submit(generation)
        async for event in sequence.events():
            if isinstance(event, Finished):
                return sequence.first_token_at, sequence.first_token_at + event.predicted_ms / 1000
        raise AssertionError("a sequence ended without Finished")

    times = await asyncio.gather(*(one(row) for row in range(batch)))
    return batch * (DECODE_TOKENS - 1) / (max(end for _, end in times) - max(first for first, _ in times))


async def measure(model: LoadedModel, pool: ThreadPoolExecutor, repeats: int, chunk: int) -> dict[str, Timings]:
    assert model.layout is not None, "this benchmark needs a model with a plain KV cache"
    bounds = Bounds(8, model.n_ctx_train, 64, chunk, 0.1)
    store = Store(Limits(min_prefix=64))
    reuse = KVReuse(store, model.layout.bytes_per_token, bounds.rope_regime, Trace(loud=False))
    scheduler = Scheduler(Engine(model), pool, reuse, model.tokenizer, bounds)
    running, loop = asyncio.create_task(scheduler.run()), asyncio.get_running_loop()
    results: dict[str, Timings] = {}

    async def time_it(row: str, column: str, run: Callable[[], float] | Awaitable[float]) -> None:
        speed = await loop.run_in_executor(pool, run) if callable(run) else await run
        results.setdefault(row, {}).setdefault(column, []).append(speed)
        print(f"  {row:14} {column:7} {speed:8.1f} tokens/s", file=sys.stderr)

    for repeat in range(repeats):
        tokens = prompt(model, PREFILL_TOKENS, 1000 + repeat)
        await time_it("prefill", "bare", lambda t=tokens: bare_prefill(model, t, chunk))  # type: ignore[misc]
        await time_it("prefill", "engine", engine_prefill(scheduler, tokens, chunk))
        for batch in BATCHES:
            await time_it(f"decode b{batch}", "bare", lambda b=batch: bare_decode(model, b))  # type: ignore[misc]
            await time_it(f"decode b{batch}", "mlx-lm", lambda b=batch: library_decode(model, b))  # type: ignore[misc]
            await time_it(f"decode b{batch}", "engine", engine_decode(scheduler, model, batch))
    await scheduler.drain(10)
    await running
    return results


def table(results: dict[str, Timings]) -> str:
    lines = [
        "| | bare tok/s | mlx-lm tok/s | engine tok/s | engine / bare | engine / mlx-lm |",
        "|---|---|---|---|---|---|",
    ]
    for row, columns in results.items():
        bare, library, engine = (statistics.median(columns.get(c, [0.0])) for c in ("bare", "mlx-lm", "engine"))
        against = f"{library:.1f} | {engine:.1f} | {engine / bare:.2f} | {engine / library:.2f}" if library else ""
        lines.append(f"| {row} | {bare:.1f} | {against or f'- | {engine:.1f} | {engine / bare:.2f} | -'} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--model", help="model directory or GGUF file (default: the demo model)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the raw figures there")
    args = parser.parse_args()
    path = find_model(path=args.model, hf_repo=None, demo=args.model is None, offline=False, hf_token=None)
    print(cpu.prepare(), file=sys.stderr)
    with ThreadPoolExecutor(1) as pool:
        model = pool.submit(load_model, path, dtype="auto", model_id="benchmark").result()
        chunk = 256 if cpu.is_cpu() else 2048
        results = asyncio.run(measure(model, pool, args.repeats, chunk))
        pool.submit(mx.clear_streams).result()
    print(table(results))
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
