"""One server-sent event stream to one client.

The status line goes out with the first bytes, so that whatever fails before them still gets its own HTTP status.
A write that a client does not take for `timeout` seconds aborts the connection; only this request's task waits for
it. It does not know what the events mean. Invariant: bytes go out in the order in which they came.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import NoReturn

import orjson
from aiohttp import web

from mlxcel.errors import ServerError

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would hold the whole answer back
}
PING = b":\n\n"

Send = Callable[[bytes], Awaitable[None]]
"""Where the bytes of a stream go."""


def error_event(error: ServerError) -> bytes:
    return b"data: " + orjson.dumps(error.body()) + b"\n\n"


class EventStream:
    """`timeout` in seconds, for each write. Raises ConnectionResetError when the client is gone or has stalled."""

    def __init__(self, request: web.Request, timeout: float) -> None:
        self._request = request
        self._timeout = timeout
        self.response = web.StreamResponse(headers=HEADERS)

    @property
    def started(self) -> bool:
        return self.response.prepared

    async def send(self, data: bytes) -> None:
        await self._within(self._write(data))

    async def fail(self, error: ServerError) -> None:
        """Say that the stream ends here and not well: there is no [DONE] after it."""
        await self.send(error_event(error))
        await self.close()

    async def close(self) -> None:
        await self.send(b"")
        await self._within(self.response.write_eof())

    async def _write(self, data: bytes) -> None:
        await self.response.prepare(self._request)
        if data:
            await self.response.write(data)

    async def _within(self, write: Awaitable[None]) -> None:
        try:
            async with asyncio.timeout(self._timeout):
                await write
        except TimeoutError:
            self.abort("the client stopped reading")

    def abort(self, why: str) -> NoReturn:
        """End it so that nobody takes it for whole."""
        if self._request.transport is not None:
            self._request.transport.abort()
        raise ConnectionResetError(why) from None


STREAM = web.RequestKey("stream", EventStream)
"""The request's stream, for the middleware: an error after its first byte can only be said in it."""
