"""A bounded memory of slice digests, so that hot objects need no record reads to be verified."""

from __future__ import annotations

import ctypes

import numpy as np

from tutti.base.arrays import U64, Slots
from tutti.native import NativeDigests, address, quick


class DigestCache:
    """Digests of up to ``entries`` slots, direct-mapped by slot number.  Not thread-safe.

    Memory: entries * (8 * layers + 16) bytes.
    """

    def __init__(self, entries: int, layers: int) -> None:
        self._entries = max(1, entries)
        self.layers = layers
        self._slot = np.full(self._entries, -1, np.int64)
        self._sequence = np.zeros(self._entries, np.uint64)
        self._digests = np.zeros((self._entries, layers), np.uint64)
        self.native = NativeDigests(
            slot=address(self._slot),
            sequence=address(self._sequence),
            digests=address(self._digests),
            entries=self._entries,
            layers=layers,
        )
        self._handle = ctypes.byref(self.native)

    def put(self, slots: Slots, sequences: U64, digests: U64) -> None:
        """Remembers digests (n, layers) of slots (n,) as of their sequence numbers (n,)."""
        assert digests.shape == (slots.size, self._digests.shape[1]), "a row per slot"
        arrays = [np.ascontiguousarray(each) for each in (slots, sequences, digests)]
        places = [address(each) for each in arrays]
        quick().tutti_digests_put(self._handle, *places[:2], slots.size, places[2])
