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
from typing import Any, NoReturn

from aiohttp import web

from mlxcel import __version__
from mlxcel.api.app import build_app, start_site
from mlxcel.api.listen import urls
from mlxcel.api.promptlog import make_folder
from mlxcel.api.services import Services
from mlxcel.cache.limits import Limits, SnapshotLimits
from mlxcel.cache.snapshots import SnapshotStore
from mlxcel.cache.store import Store
from mlxcel.errors import ConfigError
from mlxcel.loading import Parts, load
from mlxcel.metrics import Metrics
from mlxcel.settings import Settings
from mlxcel.sources import check_named

log = logging.getLogger(__name__)


def serve(settings: Settings) -> NoReturn:
    """Serve until a signal, then end the process. Raises StartError or ConfigError when it cannot start."""
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    try:
        import uvloop

        loop_factory = uvloop.new_event_loop
    except ImportError:
        pass
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        status = runner.run(_serve(settings))
        logging.shutdown()
        os._exit(status)  # a thread may still compute, for many seconds, what nobody waits for any more


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
        parts = await _unless(stop, asyncio.ensure_future(load(services, pool)))
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
