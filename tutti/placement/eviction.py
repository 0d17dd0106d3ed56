"""Which objects go when space runs out.

A policy is a pure function of the view it is given: same view, same victims, on every rank. It
moves nothing; the store voids the victims' records. It takes whole groups or runs, because space
that comes back in single slots makes short runs and many commands.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tutti.arrays import Mask, Slots

_DEPTH_BITS = np.uint64(32)
_DEPTH_MAX = np.uint64(0xFFFFFFFF)


@dataclass(frozen=True)
class EvictionView:
    """What a policy may look at; every array has one entry per slot.

    `resident`: holds an object. `busy`: pinned, or a write is under way; never a victim. `access`:
    u32, the look-up that last touched it. `depth`: u32, pages before it in its chain.
    `group_slots`: slots of a group; the number of slots is a multiple of it. `worth`: the loads
    that are still expected, per use (tutti/placement/reuse.py).
    """

    resident: Mask
    busy: Mask
    access: npt.NDArray[np.uint32]
    depth: npt.NDArray[np.uint32]
    group_slots: int
    worth: npt.NDArray[np.float64]


class EvictionPolicy(Protocol):
    """Chooses victims."""

    def victims(self, view: EvictionView, n: int) -> Slots:
        """Distinct resident slots that are not busy, in the order in which to evict them.

        At least n where that many exist, and more where a whole group or run goes. Note that
        n = 0 is always safe and chooses nothing.
        """
        ...


class LeastRecentlyUsed:
    """The groups that were not looked up for longest; of those the ends of chains first.

    A look-up touches a page together with all pages before it, so a group is never colder than the
    groups of its continuation; where both are equally old the deeper one goes. A group with a busy
    slot is passed over as long as others suffice; then its other slots go.
    """

    def victims(self, view: EvictionView, n: int) -> Slots:
        """See EvictionPolicy. O(slots), vectorised."""
        rows = (-1, view.group_slots)
        resident = view.resident.reshape(rows)
        busy = view.busy.reshape(rows)
        evictable = resident & ~busy
        count = evictable.sum(axis=1)
        has_busy = busy.any(axis=1)
        score = _score(resident, view.access.reshape(rows), view.depth.reshape(rows))
        chosen = _coldest(np.flatnonzero((count > 0) & ~has_busy), score, count, n)
        short = n - int(count[chosen].sum())
        rest = _coldest(np.flatnonzero((count > 0) & has_busy), score, count, short)
        groups = np.concatenate((chosen, rest))
        row, column = np.nonzero(evictable[groups])
        slots: Slots = groups[row] * view.group_slots + column
        return slots


class LeastHitDensity:
    """The runs of which the fewest loads are expected, per use; of those the ends of chains first.

    A run is neighbouring slots of one group that hold successive pages of a chain and are expected
    to be used alike. It goes as a whole.
    """

    def victims(self, view: EvictionView, n: int) -> Slots:
        """See EvictionPolicy. O(slots), vectorised."""
        slots = np.flatnonzero(view.resident & ~view.busy)
        if n <= 0 or slots.size == 0:
            return slots[:0]
        worth, depth = view.worth[slots], view.depth[slots]
        follows = np.diff(slots) == 1
        follows &= slots[1:] % view.group_slots != 0
        follows &= (np.diff(depth.astype(np.int64)) == 1) & (worth[1:] == worth[:-1])
        starts = np.flatnonzero(np.append(True, ~follows))
        count = np.diff(np.append(starts, slots.size))
        order = np.lexsort((_DEPTH_MAX - depth[starts], worth[starts]))
        enough = int(np.searchsorted(np.cumsum(count[order]), n)) + 1
        chosen = order[:enough]
        first, sizes = starts[chosen], count[chosen]
        within = np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        victims: Slots = slots[np.repeat(first, sizes) + within]
        return victims


#: By the name that options give.
POLICIES: dict[str, EvictionPolicy] = {"density": LeastHitDensity(), "lru": LeastRecentlyUsed()}


def _score(
    resident: Mask, access: npt.NDArray[np.uint32], depth: npt.NDArray[np.uint32]
) -> npt.NDArray[np.uint64]:
    """One number per group, lowest first to go: recency, then depth from the deepest."""
    recency = np.where(resident, access, 0).max(axis=1).astype(np.uint64)
    deepest = np.where(resident, depth, 0).max(axis=1).astype(np.uint64)
    score: npt.NDArray[np.uint64] = (recency << _DEPTH_BITS) | (_DEPTH_MAX - deepest)
    return score


def _coldest(
    groups: Slots, score: npt.NDArray[np.uint64], count: npt.NDArray[np.int64], n: int
) -> Slots:
    """The fewest of `groups`, coldest first, that give n slots; equal scores by group number."""
    if n <= 0:
        return groups[:0]
    if groups.size > n:
        # Every group gives a slot at least, so n groups suffice and only they need sorting.
        limit = np.partition(score[groups], n - 1)[n - 1]
        groups = groups[score[groups] <= limit]
    ordered = groups[np.argsort(score[groups], kind="stable")]
    enough = int(np.searchsorted(np.cumsum(count[ordered]), n)) + 1
    return ordered[:enough]
