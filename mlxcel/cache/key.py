"""The cache key: what must be equal for KV to be shared, and the digest that names one key.

It owns the dimensions (`CacheContext`), the bucket they span, and the byte layouts of the key digest (v3) and of
`mm_digest`. It does not know where a dimension comes from, nor what is stored under a key. Invariant: two contexts
have one bucket exactly if their KV may be shared, and no two different keys feed the hash the same bytes: every
variable part is framed by its length, except the last one.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from blake3 import blake3

ANONYMOUS = "__mlxcel_anon__"

_KEY_DOMAIN = b"mlxcel:prompt-cache:v3"
_MM_DOMAIN = b"mlxcel:prompt-cache:multimodal:v1"
_SALT_CONTEXT = "mlxcel prompt-cache cache_salt v1"


def u64(number: int) -> bytes:
    """8 bytes, little-endian."""
    return struct.pack("<Q", number)


def framed(data: str | bytes) -> bytes:
    """The length of `data` in bytes as u64, then the bytes; text as UTF-8.

    A model directory whose name is not UTF-8 carries lone surrogates; they are hashed, not refused.
    """
    if isinstance(data, str):
        data = data.encode("utf-8", "surrogatepass")
    return u64(len(data)) + data


def token_bytes(tokens: array[int]) -> bytes:
    """Each token as a signed 32-bit little-endian integer."""
    if sys.byteorder == "big":
        tokens = tokens[:]
        tokens.byteswap()
    return tokens.tobytes()


def salt_key(salt: str) -> bytes:
    """The 32-byte hashing key of a cache_salt: BLAKE3 in key-derivation mode over its UTF-8, under our own context."""
    return blake3(salt.encode("utf-8", "surrogatepass"), derive_key_context=_SALT_CONTEXT).digest()


def mm_digest(images: Sequence[bytes], audio: Sequence[bytes]) -> bytes:
    """32 bytes over the media in message order, all images before all audio; with neither it is `EMPTY_MM`."""
    hasher = blake3(_MM_DOMAIN)
    for clips in (images, audio):
        hasher.update(u64(len(clips)))
        for clip in clips:
            hasher.update(framed(clip))
    return hasher.digest()


EMPTY_MM = mm_digest((), ())


@dataclass(frozen=True, slots=True)
class SignatureParts:
    """Short digests of what a template_sig is made of, so that a miss can say which part differs."""

    template: str
    kwargs: str
    tool_choice: str
    tools: str
    prefill: str


@dataclass(frozen=True, slots=True)
class CacheContext:
    """All dimensions of a key but the tokens.

    `template_sig` is 64 hex characters (or the fixed text of the raw-prompt routes), `rope_regime` 0..255 for the
    few models whose KV depends on the length encoded, `mm_digest` 32 bytes. `salt` separates tenants and is secret:
    it shows in no repr. `parts` only explains a miss and takes no part in equality.
    """

    model_id: str
    template_sig: str
    session_key: str | None = ANONYMOUS
    lora_id: str | None = None
    rope_regime: int | None = None
    mm_digest: bytes = EMPTY_MM
    salt: str | None = field(default=None, repr=False)
    parts: SignatureParts | None = field(default=None, compare=False, repr=False)

    @property
    def bucket(self) -> tuple[object, ...]:
        """KV is shared inside a bucket only. It spans sessions; no lora is the same as lora "", no salt is its own."""
        return self.model_id, self.lora_id or "", self.template_sig, self.mm_digest, self.rope_regime, self.salt


def key_digest(context: CacheContext, tokens: array[int], prefix_len: int | None = None) -> bytes:
    """BLAKE3 (32 bytes) of `context` and the first `prefix_len` tokens (all if None or beyond the end), layout v3.

    Layout: domain, F(model_id), F(lora_id), F(template_sig), F(session_key), two bytes of rope_regime (00 00, or 01
    and the regime), the 32 bytes of mm_digest, u64 of the number of tokens, the tokens as i32 LE. F frames by a u64
    LE length; an absent text is the empty one. With a salt the same bytes are hashed in BLAKE3's keyed mode under
    `salt_key(salt)`, so nobody can compute a salted digest without the salt; without one the mode is the plain hash.
    """
    prefix = tokens if prefix_len is None else tokens[:prefix_len]
    regime = context.rope_regime
    hasher = blake3(key=salt_key(context.salt)) if context.salt is not None else blake3()
    hasher.update(_KEY_DOMAIN)
    for text in (context.model_id, context.lora_id, context.template_sig, context.session_key):
        hasher.update(framed(text or ""))
    hasher.update(b"\0\0" if regime is None else bytes((1, regime)))
    hasher.update(context.mm_digest)
    hasher.update(u64(len(prefix)))
    hasher.update(token_bytes(prefix))
    return hasher.digest()
