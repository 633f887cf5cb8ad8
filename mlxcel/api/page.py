"""The web page at `/`: one file without any external resource, or a folder of one's own files in its place.

It owns the routes of what a browser loads; the page itself is an ordinary client of the other routes and knows no
secret, so that it needs no key. Invariant: the page's script is the only one that its Content-Security-Policy lets
run, and it may talk to this server alone.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
from collections.abc import Awaitable, Callable
from importlib.resources import files
from pathlib import Path

from aiohttp import web

from mlxcel.errors import ConfigError
from mlxcel.settings import Settings

PATHS = ("/", "/index.html")


def add_page(app: web.Application, settings: Settings) -> None:
    """After all other routes, which win over files of the same name. Raises ConfigError."""
    if not settings.ui:
        return
    folder = Path(settings.static_path).resolve() if settings.static_path else None
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"--path {settings.static_path}: no such directory")
    for path in PATHS:
        app.router.add_get(settings.api_prefix + path, _file(folder / "index.html") if folder else _built_in())
    if folder is not None:
        app.router.add_static(settings.api_prefix + "/", folder)


def _built_in() -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    text = files("mlxcel").joinpath("web", "index.html").read_text(encoding="utf-8")
    headers = {"Content-Security-Policy": _policy(text), "Cache-Control": "no-cache", "Referrer-Policy": "no-referrer"}

    async def index(request: web.Request) -> web.StreamResponse:
        return web.Response(text=text, content_type="text/html", headers=headers)

    return index


def _policy(page: str) -> str:
    scripts = [hashlib.sha256(script.encode()).digest() for script in re.findall(r"<script>(.*?)</script>", page, re.S)]
    allowed = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in scripts)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
    )


def _file(path: Path) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def index(request: web.Request) -> web.StreamResponse:
        if not path.is_file():
            raise web.HTTPNotFound
        return web.Response(body=await asyncio.to_thread(path.read_bytes), content_type="text/html")

    return index
