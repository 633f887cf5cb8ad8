"""Streamed replies that outlive their connection, kept for whoever comes back for them.

It owns which replies are kept, how much of each and for how long, and the reading of one from any byte on. It does not
know what the bytes say nor how a reply is generated. Invariant: a conversation has one reply at most; of each the last
MAX_BYTES are kept, of the finished ones MAX_FINISHED that together hold MAX_FINISHED_BYTES, none for longer than
`lifetime` seconds.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from aiohttp import web

from mlxcel.api.sse import STREAM, EventStream, Send, error_event
from mlxcel.errors import InvalidRequest, ServerError

log = logging.getLogger(__name__)

LIFETIME = 300.0
MAX_BYTES = 4 << 20
MAX_FINISHED = 256
MAX_FINISHED_BYTES = 64 << 20
PIECE = 64 << 10  # is copied to be written


class Recording:
    """One reply: `num_bytes` were said so far, of which the first `num_dropped` are gone. Times are Unix seconds, and
    `failure` is that of a reply that never began."""

    def __init__(self, conversation_id: str) -> None:
        self.conversation_id = conversation_id
        self.started_at = int(time.time())
        self.completed_at = 0
        self.num_dropped = 0
        self.failure: ServerError | None = None
        self.kept = bytearray()
        self._changed = asyncio.Event()

    @property
    def num_bytes(self) -> int:
        return self.num_dropped + len(self.kept)

    @property
    def is_done(self) -> bool:
        return self.completed_at > 0

    async def send(self, data: bytes) -> None:
        """Waits for nobody: readers come when they can."""
        self.say(data)

    def say(self, data: bytes) -> None:
        self.kept += data
        surplus = max(len(self.kept) - MAX_BYTES, 0)
        del self.kept[:surplus]
        self.num_dropped += surplus
        self._tell()

    def fail(self, error: BaseException) -> None:
        """Say that it ends here and not well: in the stream, or where nothing was said yet to each of its readers."""
        if not isinstance(error, ServerError):
            log.error("unexpected failure of a resumable stream", exc_info=error)
            error = ServerError("internal error; see the server's log")
        if self.num_bytes:
            self.say(error_event(error))
        else:
            self.failure = error

    def finish(self) -> None:
        self.completed_at = self.completed_at or int(time.time())
        self._tell()

    async def read(self, offset: int) -> bytes | None:
        """What was said from `offset` on, as soon as there is something; nothing after the end, None if it is gone."""
        while offset >= self.num_bytes and not self.is_done:
            await self._changed.wait()
        start = offset - self.num_dropped
        return None if start < 0 else bytes(self.kept[start : start + PIECE])

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class Streams:
    """The replies by conversation: those whose task runs, and those that are to expire."""

    def __init__(self, lifetime: float = LIFETIME) -> None:
        self.lifetime = lifetime
        self._kept: dict[str, Recording] = {}
        self._tasks: dict[Recording, asyncio.Task[object]] = {}
        self._expiries: dict[Recording, asyncio.TimerHandle] = {}

    def begin(
        self,
        conversation_id: str,
        generate: Callable[[Send], Coroutine[Any, Any, object]],
        let_go: Callable[[], None],
    ) -> Recording:
        """Generate a reply in the background in place of the conversation's last one; whatever happens to it, and even
        if it never gets to run, `let_go` is called at its end."""
        self.stop(conversation_id)
        recording = self._kept[conversation_id] = Recording(conversation_id)
        task = self._tasks[recording] = asyncio.create_task(generate(recording.send))
        task.add_done_callback(partial(self._ended, recording, let_go))
        return recording

    def stop(self, conversation_id: str) -> None:
        """End the reply where it is and forget it; nothing happens when there is none."""
        recording = self._kept.get(conversation_id)
        if recording is None:
            return
        if task := self._tasks.get(recording):
            task.cancel()
        recording.finish()
        self._forget(recording)

    def find(self, conversation_id: str) -> Recording | None:
        return self._kept.get(conversation_id)

    def named(self) -> dict[str, list[Recording]]:
        """All of them, by conversation; `id::model` is one of conversation `id` too."""
        found: dict[str, list[Recording]] = {}
        for name, recording in self._kept.items():
            for conversation in {name, name.partition("::")[0]}:
                found.setdefault(conversation, []).append(recording)
        return found

    def _ended(self, recording: Recording, let_go: Callable[[], None], task: asyncio.Task[object]) -> None:
        let_go()
        del self._tasks[recording]
        if not task.cancelled() and (error := task.exception()):
            recording.fail(error)
        recording.finish()
        if self._kept.get(recording.conversation_id) is not recording:
            return
        expire = partial(self._forget, recording)
        self._expiries[recording] = asyncio.get_running_loop().call_later(self.lifetime, expire)
        if recording.failure:
            self._forget(recording)
        self._trim()

    def _trim(self) -> None:
        finished = list(self._expiries)
        num_bytes = sum(len(recording.kept) for recording in finished)
        while len(finished) > MAX_FINISHED or num_bytes > MAX_FINISHED_BYTES:
            oldest = finished.pop(0)
            num_bytes -= len(oldest.kept)
            self._forget(oldest)

    def _forget(self, recording: Recording) -> None:
        del self._kept[recording.conversation_id]
        if expiry := self._expiries.pop(recording, None):
            expiry.cancel()  # which lets go of the bytes


async def follow(request: web.Request, recording: Recording, timeout: float, offset: int = 0) -> web.StreamResponse:
    """Tell the request's client the reply from `offset` on until its end. Raises the error of one that never began."""
    stream = request[STREAM] = EventStream(request, timeout)
    while piece := await recording.read(offset):
        await stream.send(piece)
        offset += len(piece)
    if piece is None:
        stream.abort("the client reads too slowly to be told the rest")
    if recording.failure is not None:
        raise recording.failure
    await stream.close()
    return stream.response


def conversation_id(request: web.Request) -> str:
    """Whose reply a request asks for, or nothing when it is to end with its connection."""
    name: str = request.headers.get("X-Conversation-Id", "")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise InvalidRequest("Header X-Conversation-Id is not UTF-8") from None
    return name
