"""Counts uses of objects, also after their eviction, and measures how far apart uses are.

An object is used when it is stored and with each load. The keys that were evicted last, as many as
the pool has slots, are remembered with their uses ("ghosts"). An object that is stored again
continues with these uses, and counts as evicted too early. The number of operations between two
uses of an object is its gap; seven eighths of the gaps are shorter than `lifetime`. The policies
of tutti/placement/eviction.py read both.

`choose` compares the hits of the pool with those it would have had if it kept the objects with the
most uses, or those that were used last, of all that are known.

No clock is read. A ghost is identified by a part of its key's hash, which confuses two keys once in
2^30 puts. So ranks with the same operations agree, whatever their keys are.
"""

from __future__ import annotations

import ctypes

import numpy as np

from tutti.base.arrays import Keys, Slots
from tutti.native import GAPS, NativeReuse, address, quick

_GHOST = np.dtype([("tag", np.uint32), ("used", np.uint32), ("next", np.uint32)])
_NO_GHOST = 0xFFFFFFFF


class ReuseHistory:
    """Uses and evictions of one pool.  Not thread-safe: the store holds a lock around it.

    `used`: u32, the operation in which a slot was filled or last loaded, 0 if unknown.  `uses`: u8,
    number of these operations, at most 255; 0 after an eviction.  `by_uses`: whether objects with
    few uses should be evicted first; never if not `chooses`.
    """

    def __init__(self, slots: int, *, chooses: bool = False) -> None:
        self.by_uses, self.chooses = False, chooses
        self.used = np.zeros(slots, np.uint32)
        self.uses = np.zeros(slots, np.uint8)
        self._ghosts = np.zeros(slots, _GHOST)
        self._ghost_uses = np.zeros(slots, np.uint8)
        self._heads = np.full(max(1, slots // 4), _NO_GHOST, np.uint32)
        self._gaps = np.zeros(GAPS, np.uint32)  # by number of bits
        self._known = np.zeros(256, np.uint32)  # objects and ghosts, by number of uses
        self.native = NativeReuse(
            used=address(self.used),
            uses=address(self.uses),
            ghosts=address(self._ghosts),
            ghost_uses=address(self._ghost_uses),
            heads=address(self._heads),
            gaps=address(self._gaps),
            known=address(self._known),
            slots=slots,
            buckets=self._heads.size,
        )
        self._handle = ctypes.byref(self.native)
        # Objects that were stored again after their eviction.
        self.regretted = 0

    @property
    def nbytes(self) -> int:
        """Memory of all arrays of slots."""
        ghosts = (self._ghosts, self._ghost_uses, self._heads)
        return sum(array.nbytes for array in (self.used, self.uses, *ghosts))

    @property
    def lifetime_bits(self) -> int:
        """Seven eighths of the latest gaps are shorter than 2 to the power of this."""
        below = np.cumsum(self._gaps, dtype=np.uint64)
        return int(np.searchsorted(8 * below, 7 * below[-1]))

    def recovered(self, now: int) -> None:
        """Resets all after recovery: neither times nor numbers of uses are on the medium."""
        self.native.since = now
        self.used[:] = 0
        self.uses[:] = 1
        self._known[1] = self.uses.size

    def choose(self) -> None:
        """Changes `by_uses` if the pool would have had more hits otherwise, by as many as a quarter
        of its slots: fewer may be chance. Ends it as well if what is kept is hardly used any more.
        """
        (hits, *others), slots = self.native.hits, self.uses.size  # by uses, by recency
        is_useless = self.by_uses and hits < slots / 8
        if self.chooses and (is_useless or others[self.by_uses] > hits + slots / 4):
            self.by_uses = not self.by_uses
            self.native.hits[:] = 3 * [slots]  # equal, and `is_useless` not before four halvings

    def missed(self, keys: Keys, now: int, since: int | None = None) -> int:
        """Counts a use of keys that may not be stored; returns the uses of the most used one.

        since: the operation in which this use may have been counted before.
        """
        keys, since = np.ascontiguousarray(keys), now if since is None else since
        return int(quick().tutti_reuse_missed(self._handle, address(keys), len(keys), since, now))

    def stored(self, slots: Slots, keys: Keys, now: int) -> None:
        """Counts objects that were stored in slots; those with ghosts were evicted too early."""
        slots, keys = np.ascontiguousarray(slots), np.ascontiguousarray(keys)
        arguments = (address(slots), address(keys), slots.size, now)
        late = quick().tutti_reuse_stored(self._handle, *arguments)
        assert late >= 0, "a slot number lies beyond the pool"
        self.regretted += late

    def loaded(self, slots: Slots, now: int) -> None:
        """Counts a use of objects that were loaded."""
        slots = np.ascontiguousarray(slots)
        done = quick().tutti_reuse_loaded(self._handle, address(slots), slots.size, now)
        assert done >= 0, "a slot number lies beyond the pool"

    def evicted(self, slots: Slots, keys: Keys) -> None:
        """Remembers objects that are evicted from slots as ghosts."""
        slots, keys = np.ascontiguousarray(slots), np.ascontiguousarray(keys)
        arguments = (address(slots), address(keys), slots.size)
        done = quick().tutti_reuse_evicted(self._handle, *arguments)
        assert done >= 0, "a slot number lies beyond the pool"
