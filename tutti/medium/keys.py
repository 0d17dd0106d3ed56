"""ObjectKeys: 16 bytes that name one page of KV, from page hashes or from token ids.

XXH3 is fast and well mixed, but it is not a cryptographic hash: a user who can choose token ids
freely can construct collisions of `chain_keys`. If tenants do not trust each other, start from a
cryptographic page hash (`object_keys`), such as SGLang's SHA-256 chain.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from tutti import native
from tutti.base.arrays import UINT8, Keys
from tutti.base.checks import whole
from tutti.errors import ConfigError, KeySizeError

KEY_NBYTES = 16
_TOKEN_MAX = 2**32 - 1


def object_keys(fingerprint: bytes, hashes: Sequence[bytes]) -> Keys:
    """The ObjectKey of each page: XXH3-128(fingerprint || hash), (n, 16) uint8 (docs/format.md).

    fingerprint: 16 bytes, see `KVLayout.fingerprint`. hashes: one per page, of at least one byte.
    Raises KeySizeError, which names the first wrong hash.
    """
    _check_fingerprint(fingerprint)
    for i, page_hash in enumerate(_sequence("hashes", hashes)):
        if not isinstance(page_hash, bytes):
            raise KeySizeError(f"page hash {i} is a {type(page_hash).__name__}; pass bytes")
        if not page_hash:
            raise KeySizeError(f"page hash {i} is empty; pass the bytes of each page's chain hash")
    sizes = set(map(len, hashes))
    if len(sizes) == 1 and max(sizes) <= native.HASH_NBYTES_MAX:
        raw = np.frombuffer(b"".join(hashes), np.uint8)
        return native.object_keys(fingerprint, raw.reshape(len(hashes), -1))
    digest = xxhash.xxh3_128_digest
    return _stack([digest(fingerprint + page_hash) for page_hash in hashes])


def chain_keys(
    fingerprint: bytes,
    tokens: npt.NDArray[np.integer[Any]] | Sequence[int],
    page_size: int,
    *,
    salt: bytes = b"",
) -> Keys:
    """Keys of the full pages of a token sequence, each depending on all tokens before it.

    h_0 = XXH3-128(fingerprint || salt), h_i = XXH3-128(h_(i-1) || token ids of page i as
    little-endian u32); the keys are h_1, h_2, ...: (len(tokens) // page_size, 16) uint8. Tokens
    after the last full page are ignored. fingerprint: as for `object_keys`. page_size: in tokens.
    Raises ConfigError for ids outside 0 .. 2^32 - 1, KeySizeError for a wrong fingerprint.
    """
    _check_fingerprint(fingerprint)
    whole("page_size", page_size, 1, _TOKEN_MAX)
    if not isinstance(salt, bytes):
        raise ConfigError(f"salt is a {type(salt).__name__}; pass bytes")
    raw = _token_bytes(tokens)
    pages = len(raw) // 4 // page_size
    digest = xxhash.xxh3_128_digest
    chained = digest(fingerprint + salt)
    keys = []
    for page in range(pages):
        begin = page * page_size * 4
        chained = digest(chained + raw[begin : begin + page_size * 4])
        keys.append(chained)
    return _stack(keys)


def as_keys(keys: Keys | Sequence[bytes]) -> Keys:
    """(n, 16) uint8, C-contiguous, from such an array or from a list of 16-byte strings.

    Raises KeySizeError, which names the first wrong key and its size.
    """
    if isinstance(keys, np.ndarray):
        if keys.dtype != UINT8 or keys.ndim != 2 or keys.shape[1] != KEY_NBYTES:
            raise KeySizeError(
                f"keys are an array of {keys.dtype} {keys.shape}; pass uint8 (n, {KEY_NBYTES})"
            )
        return np.ascontiguousarray(keys)
    for i, key in enumerate(_sequence("keys", keys)):
        if not isinstance(key, bytes) or len(key) != KEY_NBYTES:
            what = f"{len(key)} bytes" if isinstance(key, bytes) else f"type {type(key).__name__}"
            raise KeySizeError(f"key {i} has {what}; pass bytes of length {KEY_NBYTES}")
    return _stack(keys)


def check_key(name: str, key: object) -> None:
    """Raises KeySizeError for what is not one key."""
    if not isinstance(key, bytes):
        raise KeySizeError(f"{name} is a {type(key).__name__}; pass bytes of length {KEY_NBYTES}")
    if len(key) != KEY_NBYTES:
        raise KeySizeError(f"{name} has {len(key)} bytes; pass bytes of length {KEY_NBYTES}")


def _token_bytes(tokens: npt.NDArray[np.integer[Any]] | Sequence[int]) -> bytes:
    try:
        ids = np.asarray(tokens if isinstance(tokens, np.ndarray) else _sequence("tokens", tokens))
    except (ValueError, OverflowError) as error:
        raise ConfigError(f"token ids are not integers: {error}") from error
    if ids.shape == (0,):
        return b""
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ConfigError(
            f"token ids are {ids.dtype} {ids.shape}; pass one dimension of integers below 2^32"
        )
    if int(ids.min()) < 0 or int(ids.max()) > _TOKEN_MAX:
        raise ConfigError(
            f"token ids run from {ids.min()} to {ids.max()}; they must be 0 to {_TOKEN_MAX}"
        )
    return ids.astype("<u4").tobytes()


def _stack(keys: Sequence[bytes]) -> Keys:
    # A bytearray, because the address of a writable array is found faster.
    return np.frombuffer(bytearray().join(keys), np.uint8).reshape(-1, KEY_NBYTES)


def _check_fingerprint(fingerprint: bytes) -> None:
    if not isinstance(fingerprint, bytes) or len(fingerprint) != KEY_NBYTES:
        is_bytes = isinstance(fingerprint, bytes)
        what = f"{len(fingerprint)} bytes" if is_bytes else f"type {type(fingerprint).__name__}"
        raise KeySizeError(
            f"the fingerprint has {what}, not {KEY_NBYTES} bytes; pass KVLayout.fingerprint"
        )


def _sequence(name: str, values: Any) -> Sequence[Any]:
    """``values``.  Raises KeySizeError for what is not a sequence of several."""
    if isinstance(values, (bytes, bytearray, memoryview, str)) or not isinstance(values, Sequence):
        raise KeySizeError(f"{name} has type {type(values).__name__}; pass a list of {name}")
    return values
