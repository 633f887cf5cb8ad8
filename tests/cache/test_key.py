"""The cache key: byte layouts held by vectors, dimensions and framing held by properties."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from mlxcel.cache.key import ANONYMOUS, EMPTY_MM, CacheContext, SignatureParts, key_digest, mm_digest, salt_key

SIG = "452fdcfc9e8eedddc8d1c1a380a2b3a4f4d6c3c341414971a951c8f9fc453af7"
CONTEXT = CacheContext("m", SIG)
TOKENS = array("i", range(32))

DIGESTS = {
    "plain": (CONTEXT, None, "89d504e71c42627f66253b6e298116b96d3869b701f315d49275723cd54c1e3b"),
    "prefix of 16": (CONTEXT, 16, "f5247575c5e2e3108c1edda64011d80d6b97272bb437a8278b296d36280d65bc"),
    "rope 0": (
        replace(CONTEXT, rope_regime=0),
        None,
        "6f342143b51a2a47ee599e4d8ff34d2df40dce5ab2b115eab694e9e6cd0912ed",
    ),
    "rope 1": (
        replace(CONTEXT, rope_regime=1),
        None,
        "6f66ff1bffe56302205a251fdbdb2850e80f52616247b438f97af597146b378c",
    ),
    "lora": (
        replace(CONTEXT, lora_id="lora:1.000000"),
        None,
        "91b8dba91c4f1e83c3a9d409a324f48dbecd6dbe9b51d329064438532d1da27b",
    ),
}

MM_DIGESTS = [
    ((), (), "ef7a54571ae5a2a85fff7d834976109cec3359eaf80864632ea0830345495ef5"),
    ((b"abc",), (), "3b98161eeff910eac0a2e0635b4918f8ca54ef6db0836bb4e5b9c0d526950a6f"),
    ((), (b"abc",), "e0156b11436835cfbc5c501c2b2fa662000334104a7005f27f8bc40e5f120e0b"),
    ((b"abc", b"def"), (), "f14da93194f272d6c98d0d09280239de3457b4477fffdb5182fab84a0069a497"),
    ((b"abc",), (b"xyz",), "951c51f177de20a5cb8963c93205d52782a31f44364742fd047f4f998f0c3db7"),
]

token_lists = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=40).map(lambda ids: array("i", ids))
texts = st.text(max_size=4)
contexts = st.builds(
    CacheContext,
    model_id=texts,
    template_sig=texts,
    session_key=texts,
    lora_id=texts,
    rope_regime=st.none() | st.integers(0, 255),
    mm_digest=st.sampled_from([EMPTY_MM, mm_digest([b"a"], [])]),
    salt=st.none() | texts,
)


@pytest.mark.parametrize(("context", "prefix_len", "expected"), DIGESTS.values(), ids=DIGESTS.keys())
def test_the_digest_has_the_v3_layout(context, prefix_len, expected):
    assert key_digest(context, TOKENS, prefix_len).hex() == expected


@pytest.mark.parametrize(("images", "audio", "expected"), MM_DIGESTS)
def test_mm_digest_has_its_layout(images, audio, expected):
    assert mm_digest(images, audio).hex() == expected


def test_text_only_has_the_digest_of_no_media():
    assert mm_digest([], []) == EMPTY_MM


def test_images_and_audio_do_not_change_places():
    assert len({mm_digest([b"a", b"b"], []), mm_digest([b"b", b"a"], []), mm_digest([b"a"], [b"b"])}) == 3


def test_media_are_framed():
    assert mm_digest([b"ab", b"c"], []) != mm_digest([b"a", b"bc"], [])


def test_the_layout_byte_by_byte():
    context = CacheContext("é", "sig", "s", None, 7, b"\xaa" * 32)
    expected = (
        b"mlxcel:prompt-cache:v3"
        + b"\x02\0\0\0\0\0\0\0\xc3\xa9"
        + b"\0\0\0\0\0\0\0\0"
        + b"\x03\0\0\0\0\0\0\0sig"
        + b"\x01\0\0\0\0\0\0\0s"
        + b"\x01\x07"
        + b"\xaa" * 32
        + b"\x02\0\0\0\0\0\0\0"
        + b"\xff\xff\xff\xff\x00\x01\0\0"
    )
    assert key_digest(context, array("i", [-1, 256])) == blake3(expected).digest()


@given(token_lists, st.integers(0, 50))
def test_the_digest_of_a_prefix_is_that_of_its_tokens_alone(tokens, prefix_len):
    assert key_digest(CONTEXT, tokens, prefix_len) == key_digest(CONTEXT, tokens[:prefix_len])


@given(contexts, contexts, token_lists, token_lists)
def test_two_keys_have_one_digest_only_if_they_are_equal(one, other, tokens, others):
    same = one == other and tokens == others
    assert (key_digest(one, tokens) == key_digest(other, others)) is same


@pytest.mark.parametrize(
    "change",
    [
        {"model_id": "n"},
        {"lora_id": "l"},
        {"template_sig": SIG[::-1]},
        {"session_key": "s"},
        {"rope_regime": 0},
        {"mm_digest": mm_digest([b"x"], [])},
        {"salt": ""},
        {"salt": "s"},
    ],
)
def test_every_dimension_changes_the_digest(change):
    assert key_digest(replace(CONTEXT, **change), TOKENS) != key_digest(CONTEXT, TOKENS)


def test_texts_are_framed():
    assert key_digest(CacheContext("ab", "c"), TOKENS) != key_digest(CacheContext("a", "bc"), TOKENS)


def test_the_order_of_tokens_matters():
    assert key_digest(CONTEXT, TOKENS) != key_digest(CONTEXT, TOKENS[::-1])


def test_absent_texts_hash_as_empty_ones():
    absent = CacheContext("m", SIG, session_key=None, lora_id=None)
    assert key_digest(absent, TOKENS) == key_digest(replace(absent, session_key="", lora_id=""), TOKENS)


def test_a_request_without_a_session_belongs_to_the_anonymous_one():
    assert CONTEXT.session_key == ANONYMOUS == "__mlxcel_anon__"


def test_a_salt_keys_the_same_bytes():
    salted = replace(CONTEXT, salt="tenant")
    layout = b"".join(
        [
            b"mlxcel:prompt-cache:v3",
            b"\x01" + bytes(7) + b"m",
            bytes(8),
            b"\x40" + bytes(7) + SIG.encode(),
            b"\x0f" + bytes(7) + ANONYMOUS.encode(),
            bytes(2),
            EMPTY_MM,
            b"\x20" + bytes(7) + TOKENS.tobytes(),
        ]
    )
    assert key_digest(salted, TOKENS) == blake3(layout, key=salt_key("tenant")).digest()


def test_a_salts_key_is_derived_from_it():
    key = blake3(b"tenant", derive_key_context="mlxcel prompt-cache cache_salt v1").digest()
    assert salt_key("tenant") == key != salt_key("tenant ")


def test_a_salt_shows_in_no_repr():
    assert "secret" not in repr(replace(CONTEXT, salt="secret"))


def test_a_name_that_is_not_utf8_is_hashed_rather_than_refused():
    names = [b"caf\xe9", b"caf\xea"]
    assert len({key_digest(CacheContext(n.decode("utf-8", "surrogateescape"), SIG), TOKENS) for n in names}) == 2


def test_a_bucket_spans_sessions():
    assert CONTEXT.bucket == replace(CONTEXT, session_key="s").bucket == replace(CONTEXT, lora_id="").bucket


@pytest.mark.parametrize(
    "change",
    [
        {"model_id": "n"},
        {"lora_id": "l"},
        {"template_sig": "t"},
        {"rope_regime": 0},
        {"mm_digest": mm_digest([b"x"], [])},
        {"salt": ""},
    ],
)
def test_every_other_dimension_makes_a_bucket_of_its_own(change):
    assert replace(CONTEXT, **change).bucket != CONTEXT.bucket


def test_what_a_signature_is_made_of_takes_no_part_in_equality():
    explained = replace(CONTEXT, parts=SignatureParts("a", "b", "c", "d", "e"))
    assert explained == CONTEXT and explained.bucket == CONTEXT.bucket
