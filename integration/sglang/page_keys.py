"""Makes ObjectKeys from SGLang's page hashes."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from tutti import native
from tutti.base.arrays import Keys
from tutti.medium.keys import check_key, object_keys


def page_keys(fingerprint: bytes, weights: bytes, hashes: Sequence[str]) -> Keys:
    """ObjectKeys (n, 16) of page hashes, which SGLang writes as hexadecimal digits.

    fingerprint: of the layout.  weights: `WeightsWatch.namespace`; other weights have other keys.
    Of a hash with other characters its bytes are used.  Raises KeySizeError for an empty hash.
    """
    check_key("fingerprint", fingerprint)
    if weights:
        fingerprint = xxhash.xxh3_128_digest(fingerprint + weights)
    keys = native.named_keys(fingerprint, hashes) if hashes else None
    if keys is None:
        keys = object_keys(fingerprint, [_hash_bytes(name) for name in hashes])
    return keys


def prompt_keys(fingerprint: bytes, tokens: npt.ArrayLike, page_size: int) -> Keys:
    """Keys of a prompt's full pages, for a request without salt and the weights of the server's
    start.  Imports SGLang.
    """
    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.mem_cache.utils import get_storage_hash_str

    ids = array("q", np.asarray(tokens, np.int64).tolist())
    ids = ids[: len(ids) // page_size * page_size]
    hashes = get_storage_hash_str(RadixKey(ids), page_size=page_size)
    return page_keys(fingerprint, b"", hashes)


def _hash_bytes(name: str) -> bytes:
    try:
        return bytes.fromhex(name)
    except ValueError:
        return name.encode()
