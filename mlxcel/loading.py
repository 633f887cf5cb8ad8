"""From settings to the parts that serve: the model, both stores sized for it, the scheduler over it.

Here alone it is decided which part a setting goes to. What is loaded once stays as it is: nothing here runs while
requests are served. Invariant: everything of MLX is done on the one thread of `pool`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mlxcel.api.services import Live, Services
from mlxcel.cache.limits import choose_limits, choose_snapshot_limits
from mlxcel.errors import ConfigError
from mlxcel.prompt.template import ChatTemplate
from mlxcel.settings import Settings
from mlxcel.sources import find_model

if TYPE_CHECKING:
    from mlxcel.engine.bounds import Bounds
    from mlxcel.engine.lifecycle import Sleeper
    from mlxcel.engine.model import LoadedModel
    from mlxcel.engine.reuse import Reuse
    from mlxcel.engine.scheduler import Scheduler
    from mlxcel.engine.sequence import Finished, Sequence
    from mlxcel.engine.warmup import Warmups

log = logging.getLogger(__name__)

AUTOMATIC_SLOTS = 8


@dataclass(frozen=True, slots=True)
class Parts:
    engine: Sleeper
    scheduler: Scheduler


async def load(services: Services, pool: ThreadPoolExecutor) -> Parts:
    settings, loop = services.settings, asyncio.get_running_loop()
    path = await asyncio.to_thread(_find, settings)
    await loop.run_in_executor(pool, _prepare, settings)
    loaded = await loop.run_in_executor(pool, _load_model, settings, path, settings.self_test)
    from mlxcel.engine.lifecycle import Sleeper, run_once
    from mlxcel.engine.memory import bytes_left
    from mlxcel.engine.scheduler import Scheduler
    from mlxcel.engine.telemetry import declare

    model = replace(loaded, net=None)
    await asyncio.to_thread(_check_default_grammar, settings, model)
    bounds = choose_bounds(settings, model)
    _size_stores(services, model, bounds, bytes_left())
    engine = Sleeper(loaded, partial(_load_model, settings, path, False))
    if settings.warmup:
        await loop.run_in_executor(pool, run_once, engine)
    scheduler = Scheduler(
        engine,
        pool,
        choose_reuse(services, model, bounds),
        model.tokenizer,
        bounds,
        warmups=choose_warmups(services, model),
        on_finished=on_finished(services),
    )
    declare(services.metrics, scheduler, services.store, services.snapshots)
    services.loaded = Live(model, scheduler, _template(settings, model), lambda: engine.is_asleep)
    _announce(services, model, bounds)
    return Parts(engine, scheduler)


def _find(settings: Settings) -> Path:
    return find_model(
        path=settings.model,
        hf_repo=settings.hf_repo,
        demo=settings.demo,
        offline=settings.offline,
        hf_token=settings.hf_token,
        hf_file=settings.hf_file,
    )


def _prepare(settings: Settings) -> None:
    """On the MLX thread: the libraries take seconds to import."""
    from mlxcel.engine import cpu

    blas = cpu.prepare()
    log.info("%s", blas)
    if blas.warning:
        log.warning("%s", blas.warning)
    if cpu.is_cpu() and settings.dtype not in ("auto", "float32"):
        log.warning("--dtype %s is slow on a CPU: float32 (auto) is 2 to 20 times as fast", settings.dtype)


def _load_model(settings: Settings, path: Path, self_test: bool) -> LoadedModel:
    from mlxcel.engine.model import load_model

    own = path.stem if path.is_file() else path.resolve().name
    name = sorted(settings.alias)[0] if settings.alias else own.encode("utf-8", "replace").decode()  # answers are UTF-8
    return load_model(path, dtype=settings.dtype, model_id=name, self_test=self_test)


def _check_default_grammar(settings: Settings, model: LoadedModel) -> None:
    """What no request could be answered with must not wait for the first request."""
    for name, kind in (("--grammar", "grammar"), ("--json-schema", "json_schema")):
        if text := getattr(settings, kind):
            try:
                model.grammars.compile(kind, text)
            except ValueError as error:
                raise ConfigError(f"{name}: failed to compile: {error}") from None


def choose_bounds(settings: Settings, model: LoadedModel) -> Bounds:
    """Slots and context as llama-server shares them: the context is the total, split evenly unless unified."""
    from mlxcel.engine.bounds import Bounds
    from mlxcel.engine.cpu import is_cpu

    automatic = settings.parallel < 1
    slots = AUTOMATIC_SLOTS if automatic else settings.parallel
    unified = automatic if settings.kv_unified is None else settings.kv_unified
    total = settings.ctx_size
    n_ctx = model.n_ctx_train if not total else total if unified else total // slots
    n_ctx = min(n_ctx, settings.kv_unified_per_slot or n_ctx)
    if n_ctx < 2:
        raise ConfigError(f"--ctx-size {total} leaves {n_ctx} tokens for each of {slots} slots (--parallel)")
    if n_ctx > model.n_ctx_train:
        log.warning("the context of %d tokens is more than the %d the model was trained for", n_ctx, model.n_ctx_train)
    chunk = settings.ubatch_size or (256 if is_cpu() else 2048)
    return Bounds(
        num_slots=slots,
        n_ctx=n_ctx,
        max_queue=settings.max_queue,
        chunk=chunk if model.proven.splits else n_ctx,
        latency=settings.prefill_latency_ms / 1000,
        rope_boundary=model.rope_boundary,
        continuous=settings.cont_batching,
        similarity=settings.slot_prompt_similarity,
    )


def _size_stores(services: Services, model: LoadedModel, bounds: Bounds, left: int | None) -> None:
    """The model fills one of the two stores; the other one stays empty, whatever its limits."""
    settings, shape = services.settings, model.shape
    per_token = model.layout.bytes_per_token if model.layout and model.reuse == "kv" else 0
    services.store.limits = choose_limits(settings, model.config, per_token, left, bounds.n_ctx)
    if shape is not None and model.reuse == "snapshots":
        services.snapshots.limits = choose_snapshot_limits(
            settings, shape.bytes_per_token, shape.constant_bytes, left, bounds.n_ctx
        )


def choose_reuse(services: Services, model: LoadedModel, bounds: Bounds) -> Reuse:
    from mlxcel.engine.reuse import KVReuse, SnapshotReuse, Trace

    settings, trace = services.settings, Trace(services.settings.apc_trace)
    if model.reuse == "snapshots":
        return SnapshotReuse(services.snapshots, not settings.disable_boundary_snapshot, trace)
    per_token = model.layout.bytes_per_token if model.layout and model.reuse == "kv" else 0
    return KVReuse(services.store, per_token, bounds.rope_regime, trace)


def choose_warmups(services: Services, model: LoadedModel) -> Warmups | None:
    from mlxcel.engine.warmup import Warmups

    if model.reuse != "snapshots" or not services.snapshots.enabled or services.settings.disable_cache_warmup:
        return None
    return Warmups(services.snapshots)


def on_finished(services: Services) -> Callable[[Sequence, Finished], None]:
    """Who is told of each healthy end."""
    from mlxcel.engine.telemetry import Latencies

    latencies = Latencies(services.metrics)

    def tell(sequence: Sequence, end: Finished) -> None:
        latencies.observe(sequence, end)
        services.recent.observe(sequence, end)

    return tell


def _template(settings: Settings, model: LoadedModel) -> ChatTemplate | None:
    source = settings.chat_template or model.tokenizer.chat_template
    return ChatTemplate(source, model.tokenizer.special_tokens) if source else None


def _announce(services: Services, model: LoadedModel, bounds: Bounds) -> None:
    log.info(
        "model %s: %.0fM parameters, %.0f MB as %s, %s state, %d slots of up to %d tokens",
        model.id,
        model.num_params / 1e6,
        model.nbytes / 1e6,
        model.dtype,
        model.kind,
        bounds.num_slots,
        bounds.n_ctx,
    )
    if not services.store.enabled:
        log.info("prompt cache: off")
    elif model.reuse == "kv" and model.layout is not None:
        capacity = services.store.limits.capacity_bytes
        held = capacity // model.layout.bytes_per_token
        log.info("prompt cache: %.0f MiB, room for %d tokens", capacity / (1 << 20), held)
    elif model.reuse == "snapshots":
        capacity = services.snapshots.limits.capacity_bytes
        log.info("prompt cache: snapshots of sessions in %.0f MiB", capacity / (1 << 20))
    else:
        log.info("prompt cache: this model's state cannot be stored, every request is cold")
    log.info("ready")
