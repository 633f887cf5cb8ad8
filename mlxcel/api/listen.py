"""Where the server listens: a site for every address of --host, TCP or UNIX socket, and TLS.

The TCP sockets are opened here and not by the event loop, which could neither let `::` take IPv4 too nor give all
addresses of a name the same free port. It knows no route. Invariant: what cannot be had is a StartError that names
the address or the flag, and a socket file is removed by whoever made it and by nobody else.
"""

from __future__ import annotations

import errno
import os
import socket
import ssl
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from aiohttp import web

from mlxcel.errors import StartError
from mlxcel.settings import Settings

BACKLOG = 128


def sites(runner: web.AppRunner, settings: Settings) -> Iterator[web.BaseSite]:
    """One after the other, to be started at once. Raises StartError."""
    tls = tls_context(settings)
    hosts = [host.strip() for host in settings.host.split(",")]
    several = sum(not host.endswith(".sock") for host in hosts) > 1
    for host in hosts:
        if host.endswith(".sock"):
            yield _UnixSite(runner, host, tls)
            continue
        for sock in _tcp_sockets(host, settings.port, settings.reuse_port, both_families=not several):
            yield web.SockSite(runner, sock, ssl_context=tls, backlog=BACKLOG)


def urls(runner: web.AppRunner, settings: Settings) -> list[str]:
    """Where the server can be reached; of a UNIX socket its path."""
    scheme = "https" if settings.ssl_cert_file else "http"
    return [a if isinstance(a, str) else f"{scheme}://{_bracketed(a[0])}:{a[1]}" for a in runner.addresses]


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


# --- TCP


def _tcp_sockets(host: str, port: int, reuse_port: bool, *, both_families: bool) -> list[socket.socket]:
    """One for each address of a name, all on one port; `::` takes IPv4 as well unless it is to share with others."""
    where = f"cannot listen on {_bracketed(host)}:{port}"
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise StartError(f"{where}: {error.strerror or error}") from None
    sockets: list[socket.socket] = []
    missing: OSError | None = None
    for family, address in dict.fromkeys((family, address[0]) for family, *_, address in found):
        port = sockets[0].getsockname()[1] if sockets else port
        dual = both_families and address == "::" and socket.has_dualstack_ipv6()
        try:
            sockets.append(
                socket.create_server(
                    (str(address), port), family=family, backlog=BACKLOG, reuse_port=reuse_port, dualstack_ipv6=dual
                )
            )
        except OSError as error:
            missing = error
            if error.errno != errno.EADDRNOTAVAIL:  # a machine without IPv6 still has a localhost
                break
    if missing and (not sockets or missing.errno != errno.EADDRNOTAVAIL):
        for sock in sockets:
            sock.close()
        raise StartError(f"{where}: {os.strerror(missing.errno) if missing.errno else missing}")
    return sockets


# --- UNIX sockets


class _UnixSite(web.UnixSite):
    """A socket file that takes the place of a dead one only, and goes when the site stops."""

    def __init__(self, runner: web.AppRunner, path: str, tls: ssl.SSLContext | None) -> None:
        super().__init__(runner, path, ssl_context=tls, backlog=BACKLOG)
        self._file = Path(path)
        self._made: tuple[int, int] | None = None

    async def start(self) -> None:
        try:
            if _is_served(self._file):
                raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
            await super().start()
            self._made = self._identity()
        except OSError as error:
            raise StartError(f"cannot listen on {self._file}: {error.strerror or error}") from None

    async def stop(self) -> None:
        await super().stop()
        with suppress(OSError):
            if self._made is not None and self._identity() == self._made:
                self._file.unlink()

    def _identity(self) -> tuple[int, int]:
        status = self._file.stat()
        return status.st_dev, status.st_ino


def _is_served(path: Path) -> bool:
    """Whether somebody accepts connections there. Raises OSError when it is something else than a socket."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return False
    if not stat.S_ISSOCK(mode):
        raise OSError(errno.EEXIST, "there is a file of that name that is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1)
        return probe.connect_ex(str(path)) != errno.ECONNREFUSED


# --- TLS


def tls_context(settings: Settings) -> ssl.SSLContext | None:
    """None without the two files. Raises StartError naming the flag whose file cannot be used."""
    if not (settings.ssl_cert_file and settings.ssl_key_file):
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        ssl.create_default_context(cafile=settings.ssl_cert_file)
    except OSError as error:
        raise StartError(f"{settings.source('ssl_cert_file')}: {_reason(settings.ssl_cert_file, error)}") from None
    try:
        context.load_cert_chain(settings.ssl_cert_file, settings.ssl_key_file, password=_no_password)
    except (OSError, ValueError) as error:
        raise StartError(f"{settings.source('ssl_key_file')}: {_reason(settings.ssl_key_file, error)}") from None
    return context


def _no_password() -> str:
    raise ValueError("it is encrypted, and a password cannot be given")


def _reason(path: str, error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        mismatch = "KEY_VALUES_MISMATCH" in str(error.reason)
        return f"{path} does not belong to the certificate" if mismatch else f"{path} holds nothing usable in PEM form"
    return f"{path}: {error}"
