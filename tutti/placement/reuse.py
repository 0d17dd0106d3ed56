"""Predicts from past loads how soon an object is used again, by its age and number of uses.

The ranking is that of LHD (Beckmann, Chen, Cidon, NSDI 2018): hits that are expected per unit of
space and time.  An object's class is how often it was loaded, 0 to 3 or more.  For each class the
chance of a load at each age is estimated from loads, counting what is still resident, or was
evicted, as observed up to its age only (Kaplan and Meier, 1958).  A table of evicted keys tells
loads that came too late.  Before anything was observed the ranking is by recency.

Time is counted in uses of the index, never by a clock, so that ranks with the same uses agree.
"""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt

from tutti.base.arrays import U32, Keys, Mask, Slots
from tutti.native import NativeReuse, address, quick

LEVELS = 4
_PER_OCTAVE = 8
BUCKETS = 32 * _PER_OCTAVE
_EDGES = 2.0 ** (np.arange(BUCKETS + 1) / _PER_OCTAVE)
_DECAY = 0.99
#: Weight, in objects, of the hazard that is assumed before any was observed, and that hazard: the
#: same in every bucket, a tenth of the share of its class that is ever loaded again.
_PRIOR_WEIGHT = 20.0
_PRIOR_SHARE = 0.3
_PRIOR_HAZARD = 0.1

Table = npt.NDArray[np.float64]


class ReuseHistory:
    """Loads and evictions of one pool.  Not thread-safe: the store holds a lock around it.

    `used`: u32, the use in which a slot was filled or last loaded.  `level`: u8, its class.
    """

    def __init__(self, slots: int) -> None:
        self.used = np.zeros(slots, np.uint32)
        self.level = np.zeros(slots, np.uint8)
        self._reused = np.zeros((LEVELS, BUCKETS))
        self._censored = np.zeros((LEVELS, BUCKETS))
        # Evicted keys, one in each entry, the newest: a tag above the two bits of its level, or 0.
        self._tag = np.zeros(slots, np.uint16)
        self._ghost_used = np.zeros(slots, np.uint32)
        self.native = NativeReuse(
            used=address(self.used),
            level=address(self.level),
            reused=address(self._reused),
            censored=address(self._censored),
            tag=address(self._tag),
            ghost_used=address(self._ghost_used),
            slots=slots,
        )
        self._handle = ctypes.byref(self.native)
        self._evictions = 0
        self._worth = _ranking(self._reused, self._censored)
        # Loads of objects that were evicted too early.
        self.regretted = 0

    @property
    def nbytes(self) -> int:
        """Memory of all arrays."""
        arrays = (self.used, self.level, self._tag, self._ghost_used)
        return sum(array.nbytes for array in arrays)

    def recovered(self, access: U32) -> None:
        """What an open pool starts with: the order of uses survived, the number of loads not."""
        self.used[:] = access
        self.level[:] = 0

    def stored(self, slots: Slots, keys: Keys, now: int) -> None:
        """Objects came into slots; those that were evicted before are loads that came too late."""
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

    def evicted(self, slots: Slots, keys: Keys, resident: Mask, now: int) -> None:
        """Objects were evicted; `resident` are the slots that hold one still.

        Learns anew once half the pool was evicted since the last time; that is O(slots).
        """
        slots, keys = np.ascontiguousarray(slots), np.ascontiguousarray(keys)
        arguments = (address(slots), address(keys), slots.size, now)
        done = quick().tutti_reuse_evicted(self._handle, *arguments)
        assert done >= 0, "a slot number lies beyond the pool"
        self._evictions += slots.size
        if self._evictions >= self.used.size // 2:
            self._evictions = 0
            self._learn(resident, now)

    def worth(self, access: U32, now: int) -> npt.NDArray[np.float64]:
        """Expected loads per use of each slot, (slots,); `access`: when it was last touched."""
        worth: npt.NDArray[np.float64] = self._worth[self.level, _bucket(access, now)]
        return worth

    def _learn(self, resident: Mask, now: int) -> None:
        watched = self._censored.copy()
        self._count(watched, self.level[resident], self.used[resident], now)
        there = self._tag != 0
        self._count(watched, self._tag[there] % LEVELS, self._ghost_used[there], now)
        self._worth = _ranking(self._reused, watched)
        self._reused *= _DECAY
        self._censored *= _DECAY

    @staticmethod
    def _count(into: Table, level: npt.NDArray[np.unsignedinteger], used: U32, now: int) -> None:
        places = level.astype(np.int64) * BUCKETS + _bucket(used, now)
        into += np.bincount(places, minlength=into.size).reshape(into.shape)


def _bucket(used: U32, now: int) -> npt.NDArray[np.int64]:
    age = np.maximum(now - used.astype(np.int64), 1)
    return np.minimum((np.log2(age) * _PER_OCTAVE).astype(np.int64), BUCKETS - 1)


def _ranking(reused: Table, watched: Table) -> Table:
    """Loads per use that each class and age can still expect: the best ratio over all horizons.

    A page is worth at least as much as its continuation, which was loaded at most as often, so no
    class ranks below a lower one.
    """
    at_risk = np.cumsum((reused + watched)[:, ::-1], axis=1)[:, ::-1]
    share = _PRIOR_SHARE + np.zeros(LEVELS)
    np.divide(reused.sum(axis=1), at_risk[:, 0], out=share, where=at_risk[:, 0] > 0)
    prior = _PRIOR_WEIGHT * _PRIOR_HAZARD * share[:, None]
    hazard = (reused + prior) / (at_risk - watched / 2 + _PRIOR_WEIGHT)
    survival = np.ones((LEVELS, BUCKETS + 1))
    survival[:, 1:] = np.cumprod(1 - np.minimum(hazard, 0.99), axis=1)
    time = np.zeros((LEVELS, BUCKETS + 1))
    time[:, 1:] = np.cumsum(np.diff(_EDGES) * (survival[:, 1:] + survival[:, :-1]) / 2, axis=1)
    best = np.zeros((LEVELS, BUCKETS))
    for start in range(BUCKETS):
        gained = survival[:, start, None] - survival[:, start + 1 :]
        spent = time[:, start + 1 :] - time[:, start, None]
        ratio = np.divide(gained, spent, out=np.zeros_like(gained), where=spent > 0)
        best[:, start] = ratio.max(axis=1)
    ranking: Table = np.maximum.accumulate(best, axis=0)
    return ranking
