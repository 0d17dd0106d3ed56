"""Makes ObjectKeys of the page hashes by which SGLang names pages."""

from __future__ import annotations

import binascii
import contextlib
from collections.abc import Sequence

import numpy as np
import xxhash

from tutti import native
from tutti.base.arrays import Keys
from tutti.medium.keys import check_key, object_keys


def page_keys(fingerprint: bytes, weights: bytes, hashes: Sequence[str]) -> Keys:
    """The ObjectKey of each page hash, which SGLang writes as hexadecimal digits.

    fingerprint: of the layout.  weights: `WeightsWatch.namespace`; keys of other weights differ.
    A hash of anything but digits counts as its own bytes.  Raises KeySizeError for an empty one.
    """
    check_key("fingerprint", fingerprint)
    if weights:
        fingerprint = xxhash.xxh3_128_digest(fingerprint + weights)
    sizes = set(map(len, hashes))
    if len(sizes) == 1 and 0 < max(sizes) <= 2 * native.HASH_NBYTES_MAX and max(sizes) % 2 == 0:
        with contextlib.suppress(ValueError):  # some are no hexadecimal digits
            raw = np.frombuffer(binascii.unhexlify("".join(hashes)), np.uint8)
            return native.object_keys(fingerprint, raw.reshape(len(hashes), -1))
    return object_keys(fingerprint, [_hash_bytes(name) for name in hashes])


def _hash_bytes(name: str) -> bytes:
    try:
        return bytes.fromhex(name)
    except ValueError:
        return name.encode()
