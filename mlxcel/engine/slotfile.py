"""Saved slots: the state of one sequence in a file that only the same model takes back.

Layout: the magic line, a JSON header on the second line, the arrays' bytes one after the other, and a BLAKE2b digest
(32 bytes) of all that goes before it. The header names the model's fingerprint, the tokens, the cache context (a salt
only as a digest keyed by itself) and each array's shape and dtype. Everything is checked before an array is made, so
that a damaged, truncated or foreign file is refused with its reason. Knows files and numpy arrays; not MLX.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from typing_extensions import Buffer

MAGIC = b"mlxcel slot 1\n"
MAX_HEADER = 64 << 20
DTYPES = ("float32", "float16", "uint16", "int32", "uint32", "int64", "bool")


class BadFile(ValueError):
    """Why a file cannot be restored, on one line."""


@dataclass(frozen=True, slots=True)
class Header:
    """`kind` tells KV from a snapshot; `leaves` is the snapshot's own description; `dtypes` are MLX's names, since
    bfloat16 lies in the file as uint16."""

    fingerprint: str
    kind: str
    tokens: list[int]
    context: dict[str, str | int | None]
    dtypes: list[str]
    leaves: list[dict[str, object]]


def write(path: Path, header: Header, arrays: Sequence[NDArray[np.generic]]) -> int:
    """Write all of it or nothing; an existing file is replaced at the end. Returns the bytes. Raises OSError."""
    described = asdict(header) | {"arrays": [{"shape": a.shape, "dtype": a.dtype.name} for a in arrays]}
    hasher, temporary = hashlib.blake2b(digest_size=32), path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with temporary.open("xb") as file:
            line = json.dumps(described, separators=(",", ":")).encode() + b"\n"
            pieces: list[Buffer] = [MAGIC, line, *map(_bytes, arrays)]
            for piece in pieces:
                hasher.update(piece)
                file.write(piece)
            file.write(hasher.digest())
            nbytes = file.tell()
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return nbytes


def _bytes(array: NDArray[np.generic]) -> Buffer:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def read(path: Path, fingerprint: str) -> tuple[Header, list[NDArray[np.generic]], int]:
    """The header, the arrays and the bytes read. Raises BadFile, also for a file that cannot be opened."""
    try:
        with path.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise BadFile("it is not a saved slot of this server")
            line = file.readline(MAX_HEADER)
            rest = file.read()
    except OSError as error:
        raise BadFile(error.strerror or str(error)) from None
    if len(rest) < 32 or _digest(MAGIC, line, memoryview(rest)[:-32]) != rest[-32:]:
        raise BadFile("the file is damaged or cut short")
    try:
        described = json.loads(line)
        shapes = [
            (tuple(a["shape"]), np.dtype(a["dtype"]) if a["dtype"] in DTYPES else None) for a in described.pop("arrays")
        ]
        header = Header(**described)
        _check(header)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise BadFile(f"its header cannot be read: {error}") from None
    if header.fingerprint != fingerprint:
        raise BadFile("it was saved with another model")
    return header, _arrays(rest[:-32], shapes), len(MAGIC) + len(line) + len(rest)


def _check(header: Header) -> None:
    """Raises ValueError: a header that is well formed JSON may still hold anything."""
    context, regime = header.context, header.context.get("rope_regime")
    texts = (header.fingerprint, header.kind, *header.dtypes)
    optional = (context.get(name) for name in ("session_key", "lora_id", "salt"))
    if not all(isinstance(text, str) for text in texts) or header.kind not in ("kv", "snapshot"):
        raise ValueError("a text is missing")
    if not all(text is None or isinstance(text, str) for text in optional):
        raise ValueError("its context is not one")
    if not (regime is None or (type(regime) is int and 0 <= regime < 256)):
        raise ValueError("its context is not one")
    if header.tokens and (len(str(context["mm_digest"])) != 64 or not isinstance(context["template_sig"], str)):
        raise ValueError("its context is not one")
    bytes.fromhex(str(context.get("mm_digest", "")))
    if not isinstance(header.tokens, list) or not all(isinstance(leaf, dict) for leaf in header.leaves):
        raise ValueError("its tokens or layers are not lists")


def _digest(*pieces: Buffer) -> bytes:
    hasher = hashlib.blake2b(digest_size=32)
    for piece in pieces:
        hasher.update(piece)
    return hasher.digest()


def _arrays(
    data: bytes, shapes: list[tuple[tuple[int, ...], np.dtype[np.generic] | None]]
) -> list[NDArray[np.generic]]:
    arrays, at = [], 0
    for shape, dtype in shapes:
        if dtype is None or any(type(n) is not int or not 0 <= n < 1 << 40 for n in shape):
            raise BadFile("its header describes no arrays")
        nbytes = math.prod(shape) * dtype.itemsize
        if at + nbytes > len(data):
            raise BadFile("its header and its arrays disagree")
        arrays.append(np.frombuffer(data, dtype, math.prod(shape), at).reshape(shape))
        at += nbytes
    if at != len(data):
        raise BadFile("its header and its arrays disagree")
    return arrays
