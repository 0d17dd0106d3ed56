"""ObjectKeys of SGLang's page hashes."""

from __future__ import annotations

import random
import string

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from tutti.errors import KeySizeError
from tutti.integration.sglang.page_keys import page_keys
from tutti.medium.keys import object_keys

FINGERPRINT = bytes(range(16))
NO_UPDATE = b""


@given(nbytes=st.integers(1, 120), n=st.integers(1, 5), seed=st.randoms())
def test_digits_stand_for_the_bytes_of_the_hash(nbytes: int, n: int, seed: random.Random) -> None:
    hashes = [seed.randbytes(nbytes) for _ in range(n)]
    keys = page_keys(FINGERPRINT, NO_UPDATE, [page.hex() for page in hashes])
    assert (keys == object_keys(FINGERPRINT, hashes)).all()


@given(nbytes=st.integers(1, 40), where=st.integers(0, 79), digit=st.characters(codec="utf-8"))
def test_each_digit_is_looked_at(nbytes: int, where: int, digit: str) -> None:
    name = "a" * 2 * nbytes
    other = name[: where % len(name)] + digit + name[where % len(name) + 1 :]
    keys = page_keys(FINGERPRINT, NO_UPDATE, [name, other])
    raw = bytes.fromhex(other) if digit in string.hexdigits else other.encode()
    assert (keys == object_keys(FINGERPRINT, [bytes.fromhex(name), raw])).all()


def test_names_that_are_not_hexadecimal_count_as_their_bytes() -> None:
    long = "0123456789abcdef" * 2
    for names in (
        *(["xy", "ab"], ["abc", "abd"], ["é", "a"], ["ab cd", "ab-cd"], ["aa", "a", "aaa"]),
        *([long, long[:-1] + "g"], [long + "ab", long + "\n0"], ["ab\n", "a"]),
    ):
        keys = page_keys(FINGERPRINT, NO_UPDATE, names)
        for row, name in zip(keys, names, strict=True):
            assert row.tobytes() == page_keys(FINGERPRINT, NO_UPDATE, [name])[0].tobytes()
    key = page_keys(FINGERPRINT, NO_UPDATE, ["xy"])[0]
    assert key.tobytes() == object_keys(FINGERPRINT, [b"xy"])[0].tobytes()
    assert page_keys(FINGERPRINT, NO_UPDATE, []).shape == (0, 16)


def test_other_weights_have_other_keys() -> None:
    salted = xxhash.xxh3_128_digest(FINGERPRINT + b"w")
    assert (page_keys(FINGERPRINT, b"w", ["aa"]) == object_keys(salted, [b"\xaa"])).all()
    assert (page_keys(FINGERPRINT, b"w", ["aa"]) != page_keys(FINGERPRINT, b"", ["aa"])).any()


def test_what_cannot_be_a_key_is_refused() -> None:
    with pytest.raises(KeySizeError, match="fingerprint has 15 bytes"):
        page_keys(bytes(15), NO_UPDATE, ["aa"])
    with pytest.raises(KeySizeError, match="page hash 1 is empty"):
        page_keys(FINGERPRINT, NO_UPDATE, ["aa", ""])
