"""Eviction policies: choose the objects to evict when space runs out.

A policy is a pure function of the view it is given: same view, same victims, on every rank. It
moves nothing; the store voids the victims' records. It takes whole runs, because space that comes
back in single slots makes short runs and many commands.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tutti.base.arrays import Mask, Slots

_DEPTH_MAX = np.uint64(0xFFFFFFFF)


@dataclass(frozen=True)
class EvictionView:
    """What a policy may look at; every array has one entry per slot.

    `resident`: holds an object. `busy`: pinned, or a write is under way; never a victim. `access`:
    u32, the look-up that last touched it. `depth`: u32, pages before it in its chain.
    `group_slots`: slots of a group; the number of slots is a multiple of it. `value`: u32, uses and
    age (tutti/placement/reuse.py).
    """

    resident: Mask
    busy: Mask
    access: npt.NDArray[np.uint32]
    depth: npt.NDArray[np.uint32]
    group_slots: int
    value: npt.NDArray[np.uint32]


class EvictionPolicy(Protocol):
    """Chooses victims."""

    def victims(self, view: EvictionView, n: int) -> Slots:
        """Distinct resident slots that are not busy, in the order in which to evict them.

        At least n where that many exist, and more where a whole run goes. Note that
        n = 0 is always safe and chooses nothing.
        """
        ...


class LeastRecentlyUsed:
    """The runs that were not looked up for longest; of those the ends of chains first.

    A run is neighbouring slots of one group that hold successive pages of a chain and were looked
    up together.  It goes as a whole.  A look-up touches a page together with all pages before it,
    so a run is never colder than its continuation; where both are equally old the deeper one goes.
    """

    def victims(self, view: EvictionView, n: int) -> Slots:
        """See EvictionPolicy. O(slots), vectorised."""
        return _first_runs(view, view.access, n)


class LeastFrequentlyUsed:
    """The runs of least value, by LFU with dynamic aging; of equal value as LeastRecentlyUsed.

    A run is neighbouring slots of one group that hold successive pages of a chain and were used
    alike. It goes as a whole.
    """

    def victims(self, view: EvictionView, n: int) -> Slots:
        """See EvictionPolicy. O(slots), vectorised."""
        return _first_runs(view, view.value.astype(np.uint64) << np.uint64(32) | view.access, n)


#: By the name that options give.
POLICIES: dict[str, EvictionPolicy] = {"lfuda": LeastFrequentlyUsed(), "lru": LeastRecentlyUsed()}


def _first_runs(
    view: EvictionView, rank: npt.NDArray[np.uint32] | npt.NDArray[np.uint64], n: int
) -> Slots:
    """At least n slots, by whole runs of one rank each, the lowest rank and the deepest first."""
    slots = np.flatnonzero(view.resident & ~view.busy)
    if n <= 0 or slots.size == 0:
        return slots[:0]
    rank, depth = rank[slots], view.depth[slots]
    follows = np.diff(slots) == 1
    follows &= slots[1:] % view.group_slots != 0
    follows &= (np.diff(depth.astype(np.int64)) == 1) & (rank[1:] == rank[:-1])
    starts = np.flatnonzero(np.append(True, ~follows))
    ends = np.append(starts[1:], slots.size)
    if starts.size > n:
        # Every run gives a slot at least, so n runs suffice and only they need sorting.
        likely = np.flatnonzero(rank[starts] <= np.partition(rank[starts], n - 1)[n - 1])
        starts, ends = starts[likely], ends[likely]
    order = np.lexsort((_DEPTH_MAX - depth[starts], rank[starts]))
    enough = int(np.searchsorted(np.cumsum((ends - starts)[order]), n)) + 1
    chosen = order[:enough]
    first, sizes = starts[chosen], (ends - starts)[chosen]
    within = np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    victims: Slots = slots[np.repeat(first, sizes) + within]
    return victims
