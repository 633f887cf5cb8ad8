"""Who may ask, and what a browser may be told: API keys and CORS, with llama-server's rules.

It knows headers and settings only. Invariant: keys are compared in constant time and never logged.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Mapping
from urllib.parse import urlsplit

from mlxcel.settings import Settings

LOCAL_HOSTS = frozenset({"localhost", "127.0.0.1", "::1"})


def is_authorised(headers: Mapping[str, str], keys: Iterable[str]) -> bool:
    """`Authorization` counts if it is there, else `X-Api-Key`; a literal `Bearer ` is removed from either."""
    given = headers.get("Authorization") or headers.get("X-Api-Key") or ""
    key = given.removeprefix("Bearer ").encode(errors="replace")
    return sum(hmac.compare_digest(key, known.encode()) for known in keys) > 0  # looks at all, unlike any()


def cors_headers(settings: Settings, origin: str) -> dict[str, str]:
    """For every reply. An origin that is not ASCII is no origin, and could not be sent back in a header."""
    allowed, origin = settings.cors_origins, origin if origin.isascii() else ""
    if allowed == "localhost":
        return {"Access-Control-Allow-Origin": origin} if _is_local(origin) else {}
    echoed = allowed == "*" and settings.cors_credentials
    return {"Access-Control-Allow-Origin": origin if echoed else allowed}


def preflight_headers(settings: Settings) -> dict[str, str]:
    """For OPTIONS, beside those of every reply."""
    return {
        "Access-Control-Allow-Credentials": "true" if settings.cors_credentials else "false",
        "Access-Control-Allow-Methods": settings.cors_methods,
        "Access-Control-Allow-Headers": settings.cors_headers,
    }


def _is_local(origin: str) -> bool:
    try:
        return urlsplit(origin).hostname in LOCAL_HOSTS
    except ValueError:
        return False
