"""The application: routes, and what every request passes before it reaches one.

Order as in llama-server: CORS header, OPTIONS, 503 while loading or draining, API key, routing. Every failure leaves
here as JSON of one form; a stack trace goes to the log and never to a client. Invariant: the runner is made in
`start_site` and nowhere else, because aiohttp cancels handlers of clients that left only when asked to there.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from aiohttp import web

from mlxcel.api import (
    admin,
    cache,
    cache_stats,
    embeddings,
    infill,
    llama,
    lora,
    models,
    openai,
    props,
    resume,
    slots,
    unsupported,
)
from mlxcel.api.auth import cors_headers, is_authorised, preflight_headers
from mlxcel.api.connection import SERVER, Runner
from mlxcel.api.generate import json_response
from mlxcel.api.listen import sites
from mlxcel.api.page import PATHS as PAGE_PATHS
from mlxcel.api.page import add_page
from mlxcel.api.services import SERVICES, Services
from mlxcel.api.sse import STREAM
from mlxcel.errors import BodyTooLarge, InvalidRequest, NotFound, ServerError, StartError, Unauthorized, Unavailable
from mlxcel.settings import Settings

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

MAX_BODY = 64 << 20
CLOSE_TIMEOUT = 2.0  # seconds for handlers to say their last word after the drain
PUBLIC_PATHS = ("/health", "/v1/health", *PAGE_PATHS)

ROUTES: tuple[tuple[str, tuple[str, ...], Handler], ...] = (
    ("GET", ("/health", "/v1/health"), admin.health),
    ("GET", ("/models", "/v1/models"), models.models),
    ("GET", ("/metrics",), admin.metrics),
    ("GET", ("/v1/cache/stats",), cache_stats.stats),
    ("GET", ("/v1/cache/recent",), cache_stats.recent),
    ("POST", ("/v1/cache/reset",), cache.reset),
    ("POST", ("/v1/cache/explain",), cache.explain_miss),
    ("POST", ("/v1/cache/warm",), cache.warm),
    ("POST", ("/chat/completions", "/v1/chat/completions"), openai.chat),
    ("POST", ("/chat/completions/input_tokens", "/v1/chat/completions/input_tokens"), openai.count),
    ("POST", ("/v1/completions",), openai.completions),
    ("POST", ("/completion", "/completions"), llama.completion),
    ("POST", ("/infill",), infill.infill),
    ("POST", ("/embedding", "/embeddings"), embeddings.native),
    ("POST", ("/v1/embeddings",), embeddings.openai),
    ("GET", ("/v1/stream",), resume.resume),
    ("DELETE", ("/v1/stream",), resume.stop),
    ("POST", ("/v1/streams/lookup",), resume.lookup),
    ("POST", ("/tokenize",), llama.tokenize),
    ("POST", ("/detokenize",), llama.detokenize),
    ("POST", ("/apply-template",), llama.apply_template),
    ("GET", ("/props",), props.show),
    ("POST", ("/props",), props.change),
    ("GET", ("/lora-adapters",), lora.list_adapters),
    ("POST", ("/lora-adapters",), lora.scale),
    ("GET", ("/slots",), slots.list_slots),
    ("POST", ("/slots/{id}",), slots.act),
    ("POST", ("/rerank", "/reranking", "/v1/rerank", "/v1/reranking"), unsupported.rerank),
    ("POST", ("/audio/transcriptions", "/v1/audio/transcriptions"), unsupported.transcribe),
    ("POST", ("/v1/systemone",), unsupported.decide),
    ("GET", ("/tools", "/cors-proxy"), unsupported.disabled),
    ("POST", ("/tools", "/cors-proxy"), unsupported.disabled),
)


def build_app(services: Services) -> web.Application:
    app = web.Application(client_max_size=MAX_BODY, middlewares=[_render_errors, _admit])
    app[SERVICES] = services
    refused = "Generating requests that were refused before they reached the queue."
    services.metrics.counter("mlxcel_requests_refused_total", refused, lambda: services.num_refused)
    app.on_response_prepare.append(_add_headers)
    for method, paths, handler in ROUTES:
        for path in paths:
            app.router.add_route(method, services.settings.api_prefix + path, handler)
            if method == "GET":
                app.router.add_route("HEAD", services.settings.api_prefix + path, handler)
    add_page(app, services.settings)
    return app


async def start_site(app: web.Application, settings: Settings) -> web.AppRunner:
    """Listen on all addresses of the settings. Raises StartError when one of them cannot be had."""
    runner = Runner(app, handler_cancellation=True, access_log=None, shutdown_timeout=CLOSE_TIMEOUT)
    await runner.setup()
    try:
        for site in sites(runner, settings):
            await site.start()
    except StartError:
        await runner.cleanup()
        raise
    return runner


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    services = request.app[SERVICES]
    response.headers["Server"] = SERVER
    response.headers.update(cors_headers(services.settings, request.headers.get("Origin", "")))


@web.middleware
async def _render_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """One of the three broad handlers: a bug in one request is that request's 500."""
    began = time.monotonic()
    try:
        response = await handler(request)
    except ServerError as error:
        response = await _say(request, error)
    except web.HTTPException as error:
        response = await _say(request, _translated(error))
    except web.RequestPayloadError:
        response = await _say(request, InvalidRequest("request body cannot be read"))
    except ConnectionError:
        stream = request.get(STREAM)
        if stream is None or not stream.started:
            raise
        response = stream.response  # the client is gone, which is no error; aiohttp closes what is left
    except Exception:
        log.exception("unexpected failure of %s %s", request.method, request.rel_url.raw_path)
        response = await _say(request, ServerError("internal error; see the server's log"))
    took = (time.monotonic() - began) * 1000
    log.debug("%s %s %d %.0fms", request.method, request.rel_url.raw_path, response.status, took)
    return response


async def _say(request: web.Request, error: ServerError) -> web.StreamResponse:
    """As a reply of its own while that is possible, else as the last event of the stream."""
    stream = request.get(STREAM)
    if stream is not None and stream.started:
        await stream.fail(error)
        return stream.response
    headers = {}
    if isinstance(error, Unavailable) and error.retry_after is not None:
        headers["Retry-After"] = str(error.retry_after)
    return json_response(error.body(), status=error.status, headers=headers)


def _translated(error: web.HTTPException) -> ServerError:
    """aiohttp's own refusals. llama-server knows no 405."""
    if error.status in (404, 405):
        return NotFound("File Not Found")
    if error.status == 413:
        return BodyTooLarge(f"request body is larger than {MAX_BODY >> 20} MiB")
    translated = InvalidRequest(error.reason) if error.status < 500 else ServerError(error.reason)
    translated.status = error.status
    return translated


@web.middleware
async def _admit(request: web.Request, handler: Handler) -> web.StreamResponse:
    services = request.app[SERVICES]
    settings = services.settings
    if request.method == "OPTIONS":
        return web.Response(content_type="text/html", headers=preflight_headers(settings))
    if services.draining:
        response = await _say(request, Unavailable("the server is shutting down", retry_after=5))
        response.force_close()
        return response
    path = request.path.removeprefix(settings.api_prefix)
    if services.loaded is None:
        if settings.ui and path in PAGE_PATHS and isinstance(response := await handler(request), web.Response):
            response.set_status(503)  # a probe's answer, and a browser's page that will say when the model is there
            return response
        raise Unavailable("Loading model")
    if settings.api_key and path not in PUBLIC_PATHS and not is_authorised(request.headers, settings.api_key):
        raise Unauthorized("Invalid API Key")
    if request.body_exists and request.match_info.http_exception is None:
        await _receive(request, settings.timeout)
    return await handler(request)


async def _receive(request: web.Request, timeout: float) -> None:
    """Read the body, which the request then keeps: a handler's own read() waits for nothing."""
    try:
        async with asyncio.timeout(timeout):
            await request.read()
    except TimeoutError:
        raise web.HTTPRequestTimeout from None
