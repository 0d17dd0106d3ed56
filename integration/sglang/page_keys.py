"""Makes ObjectKeys of the page hashes by which SGLang names pages."""

from __future__ import annotations

from collections.abc import Sequence

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
    keys = native.named_keys(fingerprint, hashes) if hashes else None
    if keys is None:
        keys = object_keys(fingerprint, [_hash_bytes(name) for name in hashes])
    return keys


def _hash_bytes(name: str) -> bytes:
    try:
        return bytes.fromhex(name)
    except ValueError:
        return name.encode()
