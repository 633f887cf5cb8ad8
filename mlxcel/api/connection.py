"""One client's connection, and what is said on it when what came is not HTTP.

It puts the server's form of an error in the place of aiohttp's plain text and keeps what strangers send out of the log,
where a traceback would quote it. It knows no route. Invariant: a connection on which something was malformed is closed.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import Any

import orjson
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError, InvalidURLError, LineTooLong

from mlxcel import __version__
from mlxcel.errors import InvalidRequest, ServerError

log = logging.getLogger(__name__)

SERVER = f"mlxcel/{__version__}"


class Connection(web.RequestHandler):
    __slots__ = ()

    def data_received(self, data: bytes) -> None:
        """A body that turns out to be malformed also fails the request that waits for the rest of it."""
        super().data_received(data)
        malformed = self._messages and getattr(self._messages[-1][0], "exc", None)
        if malformed and self._current_request is not None:
            self._current_request.content.set_exception(web.RequestPayloadError(_reason(malformed)))

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        super().handle_error(request, status, exc, message)  # which logs it, and raises if an answer has begun
        error = ServerError("internal error; see the server's log")
        if isinstance(exc, HttpProcessingError):
            error = InvalidRequest(f"request is not valid HTTP: {_reason(exc)}")
        response = web.Response(
            body=orjson.dumps(error.body()),
            status=error.status,
            headers={"Server": SERVER},
            content_type="application/json",
            charset="utf-8",
        )
        response.force_close()
        return response

    def log_exception(self, *args: Any, **more: Any) -> None:
        error = more.get("exc_info")
        if isinstance(error, HttpProcessingError | web.RequestPayloadError):
            log.debug("a client sent malformed HTTP: %s", _reason(error))
        else:
            super().log_exception(*args, **more)


class Runner(web.AppRunner):
    @property
    def server(self) -> Any:
        """What makes the connections."""
        server = super().server
        loop = asyncio.get_running_loop()
        return server and partial(Connection, server, loop=loop, access_log=None)  # type: ignore[arg-type]


def _reason(error: BaseException) -> str:
    """Without what the client sent: the parser quotes it, most often after words of its own."""
    if isinstance(error, LineTooLong):
        return "its first line or a header is too long"
    if isinstance(error, InvalidURLError):
        return "its URL cannot be read"
    words, place, _ = str(getattr(error, "message", error)).partition(":\n\n")
    return " ".join(words.split()) if place or (words and "'" not in words) else "it cannot be read"
