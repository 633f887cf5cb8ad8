"""The whole server in this process: real HTTP, scheduler and store over loopback, on a scripted engine.

What a request is answered is written in its prompt: `<<hello>>` is answered by hello and the end token, `<<hello~>>`
by hello and no end; anything else by x for ever. One token is one byte.
"""

from __future__ import annotations

import asyncio
import io
import re
from array import array
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson

from mlxcel.api.app import build_app, start_site
from mlxcel.api.services import Live, Services
from mlxcel.cache.limits import Limits, SnapshotLimits
from mlxcel.cache.snapshots import SnapshotStore
from mlxcel.cache.store import Store
from mlxcel.engine.batch import Engine
from mlxcel.engine.bounds import Bounds
from mlxcel.engine.kv import Layout
from mlxcel.engine.model import LoadedModel
from mlxcel.engine.scheduler import Scheduler
from mlxcel.engine.telemetry import declare
from mlxcel.loading import choose_reuse, choose_warmups, on_finished
from mlxcel.metrics import Metrics
from mlxcel.prompt.template import ChatTemplate
from tests.defaults import settings
from tests.scripted import ScriptedEngine
from tests.segments import BYTES_PER_TOKEN
from tests.tiny import CHATML, EOS, byte_tokenizer

TOKENIZER = byte_tokenizer()
ROUTES = ("/v1/chat/completions", "/v1/completions", "/completion")
BOUNDS: dict[str, Any] = {
    "num_slots": 4, "n_ctx": 100_000, "max_queue": 16, "chunk": 64, "latency": 0.1
}  # fmt: skip


def encode(text: str) -> array:
    return TOKENIZER.encode(text, add_special=False)


def script(prompt: array) -> list[int]:
    found = re.findall(r"<<(.*?)(~?)>>", TOKENIZER.decode_special(prompt), re.DOTALL)
    if not found:
        return []
    text, endless = found[-1]
    return [*encode(text), *([] if endless else [EOS])]


MODEL = LoadedModel(
    id="tiny", path="/models/tiny", net=None, config={"model_type": "tiny", "hidden_size": 64}, tokenizer=TOKENIZER,
    dtype="float32", n_ctx_train=4096, num_params=1000, nbytes=4000,
    layout=Layout((), BYTES_PER_TOKEN),
)  # fmt: skip


def asking(route: str, text: str, **members: Any) -> dict[str, Any]:
    """A body for the route whose prompt holds `text`."""
    if route.endswith("chat/completions"):
        return {"messages": [{"role": "user", "content": text}], **members}
    return {"prompt": text, **members}


@dataclass
class Events:
    """A stream as a client reads it: `data` holds the JSON events."""

    data: list[dict[str, Any]] = field(default_factory=list)
    num_pings: int = 0
    done: bool = False

    @classmethod
    def of(cls, raw: bytes) -> Events:
        events = cls()
        blocks = raw.split(b"\n\n")
        assert blocks.pop() == b"", "a stream ends with a whole event"
        for block in blocks:
            assert not events.done, "nothing follows [DONE]"
            if block == b":":
                events.num_pings += 1
            elif block == b"data: [DONE]":
                events.done = True
            else:
                assert block.startswith(b"data: ") and b"\n" not in block
                events.data.append(orjson.loads(block.removeprefix(b"data: ")))
        return events

    def text(self, index: int = 0) -> str:
        out = ""
        for event in self.data:
            if "content" in event:
                out += event["content"] if event["index"] == index else ""
            for choice in event.get("choices", []):
                if choice["index"] == index:
                    out += choice.get("text") or choice.get("delta", {}).get("content") or ""
        return out

    @property
    def reasons(self) -> list[str]:
        found = [choice["finish_reason"] for event in self.data for choice in event.get("choices", [])]
        return [reason for reason in found if reason] + [e["stop_type"] for e in self.data if e.get("stop")]


def said(body: dict[str, Any]) -> str:
    if "content" in body:
        return body["content"]
    choice = body["choices"][0]
    return choice["text"] if "text" in choice else choice["message"]["content"]


@dataclass
class Served:
    services: Services
    engine: Any
    scheduler: Scheduler
    session: aiohttp.ClientSession
    port: int

    async def post(self, path: str, body: Any, **more: Any) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else orjson.dumps(body)
        async with self.session.post(path, data=io.BytesIO(data), **more) as response:
            return response.status, await response.json()

    async def get(self, path: str, **more: Any) -> tuple[int, Any]:
        async with self.session.get(path, **more) as response:
            return response.status, await response.json()

    async def stream(self, path: str, body: dict[str, Any]) -> Events:
        async with self.session.post(path, json={**body, "stream": True}) as response:
            assert response.status == 200, await response.text()
            return Events.of(await response.read())

    async def open(self, path: str, body: dict[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection of one's own, to be treated badly, with the request sent on it."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 10)
        data = orjson.dumps(body)
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data)
        await writer.drain()
        return reader, writer

    async def until(self, condition: Any) -> None:
        """Wait for what must come soon, without guessing how soon."""
        async with asyncio.timeout(10):
            while not condition():
                await asyncio.sleep(0.002)

    async def idle(self) -> None:
        await self.until(lambda: not self.scheduler.num_active and not self.scheduler.num_waiting)

    def state(self) -> tuple[int, int]:
        return self.scheduler.num_active, self.scheduler.num_waiting


@dataclass
class Wired:
    services: Services
    engine: Any
    scheduler: Scheduler
    pool: ThreadPoolExecutor

    def release(self) -> None:
        if isinstance(self.engine, ScriptedEngine):
            self.engine.gate.set()


def wire(
    *,
    template: str | None = CHATML,
    limits: Limits | None = None,
    bounds: dict[str, Any] | None = None,
    loaded: bool = True,
    model: LoadedModel = MODEL,
    pool: ThreadPoolExecutor | None = None,
    **changes: Any,
) -> Wired:
    """All parts but the HTTP. `bounds` are the scheduler's, `changes` the settings'. A `model` that has a network is
    run for real, on the one thread of `pool`."""
    engine = ScriptedEngine(script, filler=encode("x")[0]) if model.net is None else Engine(model)
    pool = pool or ThreadPoolExecutor(1)
    store, snapshots = Store(limits or Limits()), SnapshotStore(SnapshotLimits())
    services = Services(settings(**{"metrics": True, "port": 0} | changes), store, snapshots, Metrics())
    wanted = Bounds(**BOUNDS | (bounds or {}))
    warmups = choose_warmups(services, model)
    reuse = choose_reuse(services, model, wanted)
    told = on_finished(services)
    scheduler = Scheduler(engine, pool, reuse, model.tokenizer, wanted, warmups=warmups, on_finished=told)
    declare(services.metrics, scheduler, store, snapshots)
    if loaded:
        services.loaded = Live(model, scheduler, ChatTemplate(template, {}) if template else None)
    return Wired(services, engine, scheduler, pool)


@asynccontextmanager
async def serving(**choices: Any) -> AsyncIterator[Served]:
    """A running server; `choices` are those of `wire`. At the end nothing may be left in flight."""
    wired = wire(**choices)
    loop = asyncio.create_task(wired.scheduler.run())
    runner = await start_site(build_app(wired.services), wired.services.settings)
    port = runner.addresses[0][1]
    try:
        timeout = aiohttp.ClientTimeout(total=30)
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}", timeout=timeout) as session:
            served = Served(wired.services, wired.engine, wired.scheduler, session, port)
            yield served
            wired.release()
            await served.idle()
        await wired.scheduler.drain(10)
        await loop
    finally:
        wired.release()
        loop.cancel()
        await runner.cleanup()
        if choices.get("pool") is None:
            wired.pool.shutdown()
