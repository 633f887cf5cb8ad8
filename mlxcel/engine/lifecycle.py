"""What happens to the loaded model beside serving: a first run at the start, sleep when idle, and waking.

A `Sleeper` is the engine that the scheduler sees. On `sleep` it drops the model and everything of MLX; the next step,
or whatever else needs the model, has it loaded again and takes as much longer. So nobody else knows of it: a request
waits in the scheduler's queue as it does for any step. Invariant: the network is held by the engine in here alone,
else dropping it would give nothing back, and a model that was changed on disk meanwhile is never mixed with the old
one's tokenizer.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import replace
from typing import TypeVar

import mlx.core as mx

from mlxcel.engine.batch import Engine
from mlxcel.engine.health import probe
from mlxcel.engine.model import LoadedModel
from mlxcel.engine.plan import Outcome, Plan, StepEngine
from mlxcel.engine.scheduler import Scheduler
from mlxcel.errors import ModelError

T = TypeVar("T")

log = logging.getLogger(__name__)


def run_once(engine: StepEngine) -> None:
    """What is compiled or allocated at first use is so now."""
    if (error := probe(engine)) is not None:
        log.warning("the model failed on its first run: %s", error)


class Sleeper:
    """`load` gives the model anew. All but the properties is called on the MLX thread."""

    def __init__(
        self, model: LoadedModel, load: Callable[[], LoadedModel], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._engine: Engine | None = Engine(model)
        self._model = replace(model, net=None)
        self._load = load
        self._clock = clock
        self._used_at = clock()

    @property
    def is_asleep(self) -> bool:
        return self._engine is None

    @property
    def seconds_idle(self) -> float:
        return self._clock() - self._used_at

    def step(self, plan: Plan) -> Outcome:
        return self._using(lambda engine: engine.step(plan))

    def lend(self, work: Callable[[LoadedModel], T]) -> T:
        return self._using(lambda engine: engine.lend(work))

    def sleep(self, seconds: float) -> bool:
        """Drop the model, unless it was used in the last `seconds` or is gone already. Nothing may be in flight."""
        if self._engine is None or self.seconds_idle < seconds:
            return False
        before = mx.get_active_memory()
        self._engine = None
        gc.collect()
        self.release()
        log.info("asleep after %g idle seconds: %.0f MB given back", seconds, (before - mx.get_active_memory()) / 1e6)
        return True

    def release(self) -> None:
        mx.clear_cache()
        if self._engine is None and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
            libc.malloc_trim(0)  # glibc would keep most of what was freed: 610 MB of 780, not 160

    def close(self) -> None:
        (self._engine or Engine(self._model)).close()
        self._engine = None

    def _using(self, work: Callable[[Engine], T]) -> T:
        if self._engine is None:
            self._engine = self._woken()
        try:
            return work(self._engine)
        finally:
            self._used_at = self._clock()

    def _woken(self) -> Engine:
        began = self._clock()
        fresh = self._load()
        if fresh.config != self._model.config or fresh.num_params != self._model.num_params:
            raise ModelError(f"{fresh.path}: the model has been changed since it was loaded, start the server anew")
        log.info("awake again, the model was loaded in %.1f s", self._clock() - began)
        return Engine(replace(self._model, net=fresh.net))


async def sleep_when_idle(
    engine: Sleeper, scheduler: Scheduler, executor: Executor, seconds: float, forget: Callable[[], None]
) -> None:
    """For ever: put the engine to sleep whenever nobody has used it for `seconds`, and then call `forget` to drop what
    was stored."""
    loop = asyncio.get_running_loop()
    while True:
        left = seconds - engine.seconds_idle
        if left > 0 or engine.is_asleep or not scheduler.is_idle:
            await asyncio.sleep(left if left > 0 else seconds)
        elif await loop.run_in_executor(executor, engine.sleep, seconds):
            forget()
            await loop.run_in_executor(executor, engine.release)
