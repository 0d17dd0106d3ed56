"""Counts uses of objects, and values them by LFU with dynamic aging.

An object's value is how often it was used, plus the age of the pool when it was used last; the age
is the highest value that was ever evicted (LFU-DA: Arlitt, Cherkasova, Dilley, Friedrich, Jin,
SIGMETRICS Performance Evaluation Review 27(4), 2000).  So an object that was used often outlasts
as many generations of others, and then goes, too; at most 16, so that a pool whose users change
what they ask for does not turn new objects away for long.  An object is used when it is stored and
with each load.  A table of evicted keys counts objects that were evicted too early.

No clock is read, so that ranks with the same uses agree.
"""

from __future__ import annotations

import ctypes

import numpy as np

from tutti.base.arrays import U32, Keys, Slots
from tutti.native import NativeReuse, address, quick


class ReuseHistory:
    """Uses and evictions of one pool.  Not thread-safe: the store holds a lock around it.

    `used`: u32, the use in which a slot was filled or last loaded.  `uses`: u8, how often that was,
    16 for more.  `value`: u32.
    """

    def __init__(self, slots: int) -> None:
        self.used = np.zeros(slots, np.uint32)
        self.value = np.zeros(slots, np.uint32)
        self.uses = np.zeros(slots, np.uint8)
        self._tag = np.zeros(slots, np.uint16)  # of evicted keys, one in each entry, the newest
        self.native = NativeReuse(
            used=address(self.used),
            value=address(self.value),
            uses=address(self.uses),
            tag=address(self._tag),
            slots=slots,
        )
        self._handle = ctypes.byref(self.native)
        # Objects that were stored again after their eviction.
        self.regretted = 0

    @property
    def nbytes(self) -> int:
        """Memory of all arrays."""
        return sum(array.nbytes for array in (self.used, self.value, self.uses, self._tag))

    def recovered(self, access: U32) -> None:
        """What an open pool starts with: the order of uses survived, the number of loads not."""
        self.used[:] = access
        self.value[:] = self.uses[:] = 1

    def stored(self, slots: Slots, keys: Keys, now: int) -> None:
        """Objects came into slots; those that were evicted before went too early."""
        slots, keys = np.ascontiguousarray(slots), np.ascontiguousarray(keys)
        arguments = (address(slots), address(keys), slots.size, now)
        late = quick().tutti_reuse_stored(self._handle, *arguments)
        assert late >= 0, "a slot number lies beyond the pool"
        self.regretted += late

    def loaded(self, slots: Slots, now: int) -> None:
        """Objects were loaded."""
        slots = np.ascontiguousarray(slots)
        done = quick().tutti_reuse_loaded(self._handle, address(slots), slots.size, now)
        assert done >= 0, "a slot number lies beyond the pool"

    def evicted(self, slots: Slots, keys: Keys, *, ages: bool = True) -> None:
        """Objects were evicted.  ages: False where chosen for a limit of one namespace."""
        keys = np.ascontiguousarray(keys)
        quick().tutti_reuse_evicted(self._handle, address(keys), len(keys))
        if ages and slots.size:
            self.native.age = max(self.native.age, int(self.value[slots].max()))
