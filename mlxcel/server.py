"""The life of the process: listen, load, serve, drain, stop.

It wires the parts together and owns nothing else. The order matters: the sockets open first, so that a port in use
is found before a minute of loading and health checks get their 503 meanwhile; everything of MLX, from loading to the
last release, happens on one thread, and at the end that thread's streams are cleared, without which the process
aborts at exit.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiohttp import web

from mlxcel import __version__
from mlxcel.api.app import build_app, start_site
from mlxcel.api.listen import urls
from mlxcel.api.promptlog import make_folder
from mlxcel.api.services import Live, Services
from mlxcel.cache.limits import Limits, SnapshotLimits, choose_limits, choose_snapshot_limits
from mlxcel.cache.snapshots import SnapshotStore
from mlxcel.cache.store import Store
from mlxcel.errors import ConfigError
from mlxcel.metrics import Metrics
from mlxcel.prompt.template import ChatTemplate
from mlxcel.settings import Settings
from mlxcel.sources import check_named, find_model

if TYPE_CHECKING:
    from mlxcel.engine.lifecycle import Sleeper
    from mlxcel.engine.model import LoadedModel
    from mlxcel.engine.reuse import Reuse
    from mlxcel.engine.scheduler import Bounds, Scheduler
    from mlxcel.engine.sequence import Finished, Sequence
    from mlxcel.engine.warmup import Warmups

log = logging.getLogger(__name__)

AUTOMATIC_SLOTS = 8


def serve(settings: Settings) -> int:
    """Serve until a signal. Returns the exit status; raises StartError or ConfigError when it cannot start."""
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    try:
        import uvloop

        loop_factory = uvloop.new_event_loop
    except ImportError:
        pass
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(_serve(settings))


async def _serve(settings: Settings) -> int:
    log.info("mlxcel %s, Python %s", __version__, sys.version.split()[0])
    for line in settings.non_defaults():
        log.info("setting %s", line)
    if idle := settings.without_effect():
        log.info("accepted without effect here: %s", ", ".join(idle))
    if settings.sleep_idle_seconds == 0:
        raise ConfigError("--sleep-idle-seconds: 0 would never be awake; -1 never sleeps")
    make_folder(settings)
    check_named(path=settings.model, hf_repo=settings.hf_repo, demo=settings.demo)
    stop = _catch_signals()
    enabled = settings.prompt_cache_enabled
    services = Services(
        settings, Store(Limits(enabled=enabled)), SnapshotStore(SnapshotLimits(enabled=enabled)), Metrics()
    )
    runner = await _listen(services)
    pool = ThreadPoolExecutor(1, thread_name_prefix="mlx")
    try:
        parts = await _unless(stop, asyncio.ensure_future(_load(services, pool)))
        if parts is None:
            log.info("stopped while loading")
            os._exit(0)  # the loading thread cannot be interrupted
        return await _run(services, runner, parts, stop, pool)
    finally:
        await runner.cleanup()
        pool.shutdown(wait=False)


def _catch_signals() -> asyncio.Event:
    """The first SIGINT or SIGTERM sets the event, the second ends the process."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()

    def caught(name: str) -> None:
        if stop.is_set():
            log.warning("second signal: exit at once")
            os._exit(1)
        log.info("%s: finishing what runs (again to exit at once)", name)
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, caught, number.name)
    return stop


async def _listen(services: Services) -> web.AppRunner:
    runner = await start_site(build_app(services), services.settings)
    for url in urls(runner, services.settings):
        log.info("listening on %s, loading the model", url)
    return runner


async def _unless(stop: asyncio.Event, work: asyncio.Future[Any]) -> Any:
    """The result of `work`, or None when `stop` comes first."""
    stopped = asyncio.ensure_future(stop.wait())
    await asyncio.wait({stopped, work}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    return work.result() if work.done() else None


# --- loading


@dataclass(frozen=True, slots=True)
class Parts:
    engine: Sleeper
    scheduler: Scheduler


async def _load(services: Services, pool: ThreadPoolExecutor) -> Parts:
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
    from mlxcel.engine.cpu import is_cpu
    from mlxcel.engine.scheduler import Bounds

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


# --- serving and stopping


async def _sleep_when_idle(services: Services, parts: Parts, pool: ThreadPoolExecutor) -> None:
    from mlxcel.engine.lifecycle import sleep_when_idle

    def forget() -> None:
        services.store.reset()
        services.snapshots.reset()
        parts.scheduler.slots.forget()

    if (seconds := services.settings.sleep_idle_seconds) > 0:
        await sleep_when_idle(parts.engine, parts.scheduler, pool, seconds, forget)


async def _run(
    services: Services, runner: web.AppRunner, parts: Parts, stop: asyncio.Event, pool: ThreadPoolExecutor
) -> int:
    running = asyncio.ensure_future(parts.scheduler.run())
    tiring = asyncio.ensure_future(_sleep_when_idle(services, parts, pool))
    await asyncio.wait({running, asyncio.ensure_future(stop.wait())}, return_when=asyncio.FIRST_COMPLETED)
    services.draining = True
    tiring.cancel()
    for site in list(runner.sites):
        await site.stop()
    if not running.done():
        await parts.scheduler.drain(services.settings.shutdown_timeout)
    await asyncio.wait({running})
    await runner.cleanup()
    await asyncio.get_running_loop().run_in_executor(pool, parts.engine.close)
    if (failure := running.exception()) is not None:
        log.critical("the engine failed: %s", failure, exc_info=failure)
        return 1
    log.info("stopped")
    return 0
