"""The block chain: one hash per block of tokens, each over its parent, so that equal hashes mean equal prefixes.

It owns the byte layout and the algorithms. It does not know the bucket: model, template and session are not in the
chain. A chain is its 32-byte hashes concatenated. Invariant: two chains of one algorithm, block size, mm_digest and
salt agree in as many leading hashes as their tokens agree in leading blocks (a trailing partial block counts).
"""

from __future__ import annotations

import hashlib
import hmac
from array import array
from collections.abc import Callable
from typing import Literal, Protocol

from blake3 import blake3

from mlxcel.cache.key import EMPTY_MM, salt_key, token_bytes, u64
from mlxcel.errors import ConfigError

Algorithm = Literal["sha256", "blake3"]

HASH_NBYTES = 32
_DOMAIN = b"mlxcel:apc:block:v1"
_NAMES: dict[str, Algorithm] = {"sha256": "sha256", "sha-256": "sha256", "blake3": "blake3", "blake-3": "blake3"}


class _Hasher(Protocol):
    def update(self, data: bytes, /) -> object: ...

    def digest(self) -> bytes: ...


def block_chain(
    tokens: array[int],
    block_size: int,
    algorithm: Algorithm = "sha256",
    mm_digest: bytes = EMPTY_MM,
    salt: str | None = None,
) -> bytes:
    """ceil(len(tokens) / block_size) hashes of 32 bytes, concatenated; the last may be of a partial block.

    A block hashes: domain, the parent's 32 bytes (zeros for the first), u64 LE of its number of tokens, the tokens
    as i32 LE, the 32 bytes of mm_digest. With a salt the same bytes go through HMAC-SHA256 (`sha256`) or BLAKE3's
    keyed mode (`blake3`) under `salt_key(salt)`; without one through the plain hash. `block_size` is positive.
    """
    hasher = _hasher(algorithm, None if salt is None else salt_key(salt))
    data, stride = token_bytes(tokens), 4 * block_size
    parent = bytes(HASH_NBYTES)
    chain = []
    for at in range(0, len(data), stride):
        block = data[at : at + stride]
        state = hasher()
        state.update(_DOMAIN + parent + u64(len(block) // 4) + block + mm_digest)
        parent = state.digest()
        chain.append(parent)
    return b"".join(chain)


def _hasher(algorithm: Algorithm, key: bytes | None) -> Callable[[], _Hasher]:
    if algorithm == "sha256":
        return hashlib.sha256 if key is None else lambda: hmac.new(key, digestmod=hashlib.sha256)
    return blake3 if key is None else lambda: blake3(key=key)


def leading_equal(chain: bytes, other: bytes) -> int:
    """How many leading hashes two chains share."""
    blocks = min(len(chain), len(other)) // HASH_NBYTES
    for i in range(blocks):
        at = i * HASH_NBYTES
        if chain[at : at + HASH_NBYTES] != other[at : at + HASH_NBYTES]:
            return i
    return blocks


def parse_hash_name(text: str) -> Algorithm:
    """The algorithm that a setting names, whatever its case and the blanks around it. Raises ConfigError."""
    algorithm = _NAMES.get(text.strip().lower())
    if algorithm is None:
        raise ConfigError(f"unknown hash algorithm {text!r}: use sha256 or blake3")
    return algorithm
