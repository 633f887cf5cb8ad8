"""The real scheduler, store and engine around a model, without HTTP."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from mlxcel.cache.key import CacheContext
from mlxcel.cache.limits import Limits
from mlxcel.cache.store import Store
from mlxcel.engine.bounds import Bounds
from mlxcel.engine.plan import StepEngine
from mlxcel.engine.reuse import KVReuse, Reuse, Trace
from mlxcel.engine.scheduler import Scheduler
from mlxcel.engine.sequence import Delta, Failed, Finished, Generation, Progress, Sampling, TokenLogprob
from mlxcel.engine.tokenizer import Tokenizer
from mlxcel.engine.warmup import Warmups

GREEDY = Sampling(temperature=0.0)
CONTEXT = CacheContext(model_id="m", template_sig="0" * 64)
BOUNDS = Bounds(num_slots=8, n_ctx=4096, max_queue=64, chunk=64, latency=0.1)


@dataclass
class Result:
    text: str = ""
    tokens: array = field(default_factory=lambda: array("i"))
    logprobs: list[TokenLogprob] = field(default_factory=list)
    progress: list[Progress] = field(default_factory=list)
    end: Finished | Failed | None = None

    @property
    def cached(self) -> int:
        assert isinstance(self.end, Finished), self.end
        return self.end.cached_tokens


@asynccontextmanager
async def scheduling(
    engine: StepEngine,
    tokenizer: Tokenizer,
    *,
    bounds: Bounds = BOUNDS,
    reuse: Reuse | None = None,
    limits: Limits = Limits(),  # noqa: B008
    bytes_per_token: int = 0,
    warmups: Warmups | None = None,
    executor: ThreadPoolExecutor | None = None,
    clock: Callable[[], float] | None = None,
) -> AsyncIterator[Scheduler]:
    """A running scheduler; at the end it is drained and must have let go of everything."""
    pool = executor or ThreadPoolExecutor(1)
    extra = {"clock": clock} if clock else {}
    reuse = reuse or KVReuse(Store(limits), bytes_per_token, bounds.rope_regime, Trace(loud=False))
    scheduler = Scheduler(engine, pool, reuse, tokenizer, bounds, warmups=warmups, **extra)
    loop = asyncio.create_task(scheduler.run())
    try:
        yield scheduler
        await scheduler.drain(30)
        await loop
        assert scheduler.num_active == scheduler.num_waiting == 0
    finally:
        loop.cancel()
        if executor is None:
            pool.shutdown()


async def collect(scheduler: Scheduler, generation: Generation) -> Result:
    result = Result()
    async for event in scheduler.submit(generation).events():
        match event:
            case Delta():
                result.text += event.text
                result.tokens.extend(event.tokens)
                result.logprobs += event.logprobs
            case Progress():
                result.progress.append(event)
            case Finished() | Failed():
                result.end = event
    return result
