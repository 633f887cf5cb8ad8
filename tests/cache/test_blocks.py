"""The block chain: its layout by vectors, and that equal hashes mean equal prefixes."""

from __future__ import annotations

import hashlib
import hmac
from array import array

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from mlxcel.cache.blocks import block_chain, leading_equal, parse_hash_name
from mlxcel.cache.key import EMPTY_MM, mm_digest, salt_key
from mlxcel.errors import ConfigError

TOKENS = array("i", range(35))
ALGORITHMS = ["sha256", "blake3"]
VECTORS = {
    "sha256": [
        "d1b6f0504b78d959d5fb8a6942d31ac2d0b81b4f0dd9ce01a6b1e1a56c2a3be7",
        "823726647ce3a92abcd7e375c831d3a3b537e651dec4c380d8f14785c1811c04",
        "3e0c95eb36b8e481994f97f7af3d80ad12c4ae1164b61928be8a05cd43798c67",
    ],
    "blake3": [
        "b5a0623911d213a47667fa3732c075110f6b4edb243853d57b13cc53812c657f",
        "a46917846d65ca2a4d7fe94f6427f72d4a3c65ec93dca63d58a0bf3f239d7683",
    ],
}

token_lists = st.lists(st.integers(0, 3), max_size=40).map(lambda ids: array("i", ids))


def hashes(chain: bytes) -> list[bytes]:
    return [chain[at : at + 32] for at in range(0, len(chain), 32)]


def layout_of_block_0(tokens: array, mm: bytes = EMPTY_MM) -> bytes:
    return b"mlxcel:apc:block:v1" + bytes(32) + bytes([len(tokens)]) + bytes(7) + tokens.tobytes() + mm


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_chain_has_the_layout_of_the_vectors(algorithm):
    expected = VECTORS[algorithm]
    assert [block.hex() for block in hashes(block_chain(TOKENS, 16, algorithm))[: len(expected)]] == expected


def test_sha256_is_the_default_and_a_trailing_partial_block_is_hashed_too():
    assert [block.hex() for block in hashes(block_chain(TOKENS, 16))] == VECTORS["sha256"]


def test_no_tokens_make_an_empty_chain():
    assert block_chain(array("i"), 16) == b""


def test_forty_tokens_make_three_blocks_of_which_the_full_ones_are_those_of_the_first_32():
    tokens = array("i", range(40))
    chain = block_chain(tokens, 16)
    assert len(hashes(chain)) == 3
    assert chain[:64] == block_chain(tokens[:32], 16)


def test_a_changed_token_changes_its_block_and_all_behind_it():
    tokens = array("i", range(48))
    changed = tokens[:]
    changed[20] += 1
    ours, theirs = hashes(block_chain(tokens, 16)), hashes(block_chain(changed, 16))
    assert [a == b for a, b in zip(ours, theirs, strict=True)] == [True, False, False]


def test_other_media_change_every_block():
    ours, theirs = block_chain(TOKENS, 16), block_chain(TOKENS, 16, mm_digest=mm_digest([b"image"], []))
    assert not set(hashes(ours)) & set(hashes(theirs))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_salts_separate_chains_from_each_other_and_from_the_unsalted_one(algorithm):
    chains = [block_chain(TOKENS, 16, algorithm, salt=salt) for salt in (None, "", "a", "b")]
    assert len({block for chain in chains for block in hashes(chain)}) == 12


def test_a_salt_keys_the_same_bytes():
    tokens, key = TOKENS[:16], salt_key("tenant")
    layout = layout_of_block_0(tokens)
    assert block_chain(tokens, 16, "sha256", salt="tenant") == hmac.digest(key, layout, hashlib.sha256)
    assert block_chain(tokens, 16, "blake3", salt="tenant") == blake3(layout, key=key).digest()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@given(ours=token_lists, theirs=token_lists, block_size=st.integers(1, 9), salt=st.none() | st.text(max_size=2))
def test_chains_agree_in_as_many_blocks_as_their_tokens_do(algorithm, ours, theirs, block_size, salt):
    def blocks(tokens: array) -> list[array]:
        return [tokens[at : at + block_size] for at in range(0, len(tokens), block_size)]

    expected = 0
    for a, b in zip(blocks(ours), blocks(theirs), strict=False):
        if a != b:
            break
        expected += 1
    chains = [block_chain(tokens, block_size, algorithm, salt=salt) for tokens in (ours, theirs)]
    assert leading_equal(*chains) == expected


def test_a_chain_equals_itself_wholly_and_an_empty_one_shares_nothing():
    chain = block_chain(TOKENS, 16)
    assert (leading_equal(chain, chain), leading_equal(chain, b"")) == (3, 0)


def test_a_hash_that_differs_in_its_last_byte_differs():
    assert leading_equal(bytes(64), bytes(31) + b"x" + bytes(32)) == 0


@pytest.mark.parametrize("name", ["sha256", "SHA-256", " sha256 ", "Blake3", "blake-3"])
def test_hash_names_are_read_whatever_their_case_and_blanks(name):
    assert parse_hash_name(name) == name.strip().lower().replace("-", "")


@pytest.mark.parametrize("name", ["", "md5", "sha-512", "sha 256"])
def test_an_unknown_hash_name_is_refused_and_both_known_ones_are_said(name):
    with pytest.raises(ConfigError) as error:
        parse_hash_name(name)
    assert repr(name) in str(error.value) and "sha256" in str(error.value) and "blake3" in str(error.value)
