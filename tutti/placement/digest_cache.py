"""A bounded memory of slice digests, so that hot objects need no record reads to be verified."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tutti.arrays import U64, Slots


class DigestCache:
    """Digests of up to ``entries`` slots, direct-mapped by slot number.  Not thread-safe.

    Memory: entries * (8 * layers + 16) bytes.
    """

    def __init__(self, entries: int, layers: int) -> None:
        self._entries = max(1, entries)
        self._slot = np.full(self._entries, -1, np.int64)
        self._sequence = np.zeros(self._entries, np.uint64)
        self._digests = np.zeros((self._entries, layers), np.uint64)

    def put(self, slots: Slots, sequences: U64, digests: U64) -> None:
        """Remembers digests (n, layers) of slots (n,) as of their sequence numbers (n,)."""
        place = slots % self._entries
        self._slot[place] = slots
        self._sequence[place] = sequences
        self._digests[place] = digests

    def get(self, slots: Slots, sequences: U64, out: U64) -> npt.NDArray[np.bool_]:
        """Fills rows of ``out`` (n, layers); returns the mask (n,) of the rows that were known."""
        place = slots % self._entries
        known: npt.NDArray[np.bool_] = (self._slot[place] == slots) & (
            self._sequence[place] == sequences
        )
        out[known] = self._digests[place[known]]
        return known

    def knows(self, slots: Slots, sequences: U64) -> bool:
        """Whether it has the digests of all these slots."""
        place = slots % self._entries
        return bool(((self._slot[place] == slots) & (self._sequence[place] == sequences)).all())
