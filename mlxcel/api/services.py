"""What the handlers share: the settings, the store, and the model once it has been loaded.

One object per process, created before the sockets open and completed when the model is there. It decides nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from aiohttp import web

from mlxcel.api.streams import Streams
from mlxcel.cache.snapshots import SnapshotStore
from mlxcel.cache.store import Store
from mlxcel.engine.recent import Recent
from mlxcel.errors import Unavailable
from mlxcel.metrics import Metrics
from mlxcel.prompt.template import ChatTemplate
from mlxcel.settings import Settings

if TYPE_CHECKING:  # importing MLX takes seconds, and the sockets open before it
    from mlxcel.engine.model import LoadedModel
    from mlxcel.engine.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class Live:
    """What exists once the model is loaded. `model` is what is known of it; the network may be away for a while."""

    model: LoadedModel
    scheduler: Scheduler
    template: ChatTemplate | None
    is_asleep: Callable[[], bool] = lambda: False


@dataclass(slots=True)
class Services:
    """`num_refused` generating requests never reached the scheduler's queue. The model fills one of the two stores."""

    settings: Settings
    store: Store
    snapshots: SnapshotStore
    metrics: Metrics
    recent: Recent = field(default_factory=Recent)
    draining: bool = False
    num_refused: int = 0
    num_compiling: int = 0
    loaded: Live | None = None
    streams: Streams = field(default_factory=Streams)
    background: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def live(self) -> Live:
        if self.loaded is None:
            raise Unavailable("Loading model")
        return self.loaded


SERVICES = web.AppKey("services", Services)
