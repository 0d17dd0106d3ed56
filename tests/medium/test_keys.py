"""ObjectKeys: definition, chaining, refusals."""

from __future__ import annotations

import random

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from tutti.errors import ConfigError, KeySizeError
from tutti.medium.keys import as_keys, chain_keys, object_keys

FINGERPRINT = bytes(range(16))
OTHER = bytes(16)


def test_a_key_is_the_digest_of_fingerprint_and_hash() -> None:
    page = b"\xaa" * 32
    key = object_keys(FINGERPRINT, [page])[0].tobytes()
    assert key == xxhash.xxh3_128_digest(FINGERPRINT + page)
    # Pinned: a change makes every pool miss, and needs a new format version.
    assert key.hex() == "bd433d50c3efc53e1007524ff231d35f"
    assert key != object_keys(OTHER, [page])[0].tobytes()


def test_a_batch_gives_the_same_keys() -> None:
    hashes = [bytes([i]) * 32 for i in range(5)]
    keys = object_keys(FINGERPRINT, hashes)
    assert keys.shape == (5, 16)
    assert keys.dtype == np.uint8
    for row, page in zip(keys, hashes, strict=True):
        assert row.tobytes() == object_keys(FINGERPRINT, [page])[0].tobytes()
    assert object_keys(FINGERPRINT, []).shape == (0, 16)


@given(nbytes=st.integers(1, 120), n=st.integers(1, 5), seed=st.randoms())
def test_keys_of_any_size_of_hash_are_as_defined(nbytes: int, n: int, seed: random.Random) -> None:
    hashes = [seed.randbytes(nbytes) for _ in range(n)]
    expected = [xxhash.xxh3_128_digest(FINGERPRINT + page) for page in hashes]
    assert [row.tobytes() for row in object_keys(FINGERPRINT, hashes)] == expected


def test_an_empty_hash_is_refused_by_its_index() -> None:
    with pytest.raises(KeySizeError, match="page hash 1 is empty"):
        object_keys(FINGERPRINT, [b"x", b""])


def test_a_short_fingerprint_is_refused() -> None:
    for call in (
        lambda: object_keys(b"short", [b"x"]),
        lambda: chain_keys(b"short", [1], 1),
    ):
        with pytest.raises(KeySizeError, match="fingerprint has 5 bytes"):
            call()


@given(
    tokens=st.lists(st.integers(0, 2**32 - 1), max_size=40),
    page_size=st.integers(1, 7),
    salt=st.binary(max_size=8),
)
def test_the_chain_is_as_defined(tokens: list[int], page_size: int, salt: bytes) -> None:
    chained = xxhash.xxh3_128_digest(FINGERPRINT + salt)
    expected = []
    for begin in range(0, len(tokens) - page_size + 1, page_size):
        page = b"".join(t.to_bytes(4, "little") for t in tokens[begin : begin + page_size])
        chained = xxhash.xxh3_128_digest(chained + page)
        expected.append(chained)
    keys = chain_keys(FINGERPRINT, tokens, page_size, salt=salt)
    assert keys.shape == (len(tokens) // page_size, 16)
    assert [row.tobytes() for row in keys] == expected


def test_the_chain_is_pinned() -> None:
    keys = chain_keys(FINGERPRINT, range(8), 4, salt=b"lora")
    assert keys[1].tobytes().hex() == "482518c63d180806c558a89e858c3189"


def test_a_key_depends_on_all_tokens_before() -> None:
    a = chain_keys(FINGERPRINT, [1, 2, 3, 4, 5, 6], 2)
    b = chain_keys(FINGERPRINT, [1, 9, 3, 4, 5, 6], 2)
    c = chain_keys(FINGERPRINT, [1, 2, 3, 4, 5, 9], 2)
    assert not (a == b).all(axis=1).any()
    assert (a == c).all(axis=1).tolist() == [True, True, False]


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint32, np.uint64, ">u4"])
def test_the_integer_type_does_not_matter(dtype: str) -> None:
    tokens = np.arange(64).astype(dtype)
    assert (chain_keys(FINGERPRINT, tokens, 16) == chain_keys(FINGERPRINT, range(64), 16)).all()
    assert (
        chain_keys(FINGERPRINT, tokens[::2], 8) == chain_keys(FINGERPRINT, range(0, 64, 2), 8)
    ).all()


@pytest.mark.parametrize(
    "tokens", [[-1, 2], [2**32, 1], [1.5, 2.0], [[1, 2]], ["a", "b"], [2**80, 1]]
)
def test_tokens_that_are_refused(tokens: list[int]) -> None:
    with pytest.raises(ConfigError, match="token ids"):
        chain_keys(FINGERPRINT, tokens, 1)


def test_a_page_size_of_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match="page_size is 0"):
        chain_keys(FINGERPRINT, [1], 0)


def test_as_keys_takes_arrays_and_lists() -> None:
    array = np.arange(64, dtype=np.uint8).reshape(4, 16)
    assert as_keys(array) is array
    assert (as_keys([row.tobytes() for row in array]) == array).all()
    assert as_keys([]).shape == (0, 16)
    strided = np.zeros((4, 32), np.uint8)[:, ::2]
    assert as_keys(strided).flags.c_contiguous


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ([b"x" * 16, b"y" * 15], "key 1 has 15 bytes"),
        (["x" * 16], "key 0 has type str"),
        (b"x" * 16, "keys has type bytes; pass a list"),
        (np.zeros((2, 15), np.uint8), r"uint8 \(2, 15\)"),
        (np.zeros(16, np.uint8), r"uint8 \(16,\)"),
        (np.zeros((2, 16), np.int8), "int8"),
    ],
)
def test_as_keys_says_what_is_wrong(keys: object, message: str) -> None:
    with pytest.raises(KeySizeError, match=message):
        as_keys(keys)  # type: ignore[arg-type]
