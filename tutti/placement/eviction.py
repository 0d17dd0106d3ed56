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


def reserve_slots(slots: int) -> int:
    """Free slots that eviction works towards, so that a put finds some.

    A 64th, but no more than 256 where that suffices: what is free holds nothing. A group would be a
    tenth of a pool of 16 groups, and costs more hits there than a policy can win. In a large pool
    a 512th, because choosing is O(slots).
    """
    return max(1, min(slots // 64, max(256, slots // 512)))


def expected_slots(slots: int, missed: int) -> int:
    """Of pages that a look-up missed and a put may bring soon: how many get free slots ahead."""
    return min(missed, slots // 16)


@dataclass(frozen=True)
class EvictionView:
    """What a policy may look at; every array has one entry per slot.

    `resident`: holds an object. `busy`: pinned, or a write is under way; never a victim. `access`:
    u32, the look-up that last touched it. `depth`: u32, pages before it in its chain.
    `group_slots`: slots of a group; the number of slots is a multiple of it. `uses`: u8, stores and
    loads of the object. `now`: the latest look-up, no `access` is later. `lifetime_bits`: seven
    eighths of the gaps between uses are shorter than 2 to the power of this, in look-ups
    (tutti/placement/reuse.py).
    """

    resident: Mask
    busy: Mask
    access: npt.NDArray[np.uint32]
    depth: npt.NDArray[np.uint32]
    group_slots: int
    uses: npt.NDArray[np.uint8]
    now: int
    lifetime_bits: int


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


class MultiQueue:
    """The runs of the lowest queue, by Multi-Queue; of one queue as LeastRecentlyUsed.

    An object that was used n times after its first store is in queue log2(n), and falls by one for
    each lifetime that it is not looked up (Zhou, Philbin, Li: The Multi-Queue Replacement Algorithm
    for Second Level Buffer Caches, USENIX ATC 2001). The lifetime follows the gaps between uses, as
    theirs follows "temporal distances", and objects that come back after their eviction have the
    uses they had. So a stream of objects that are used once does not evict what is used again and
    again, what was loaded once is treated as by LeastRecentlyUsed, and what is no longer used goes
    after eight lifetimes at most. What falls counts as looked up when it was, where theirs begins
    anew: a pool that keeps objects for eight lifetimes evicts as LeastRecentlyUsed.

    A run is neighbouring slots of one group that hold successive pages of a chain, were looked up
    together and are in one queue. It goes as a whole.
    """

    def victims(self, view: EvictionView, n: int) -> Slots:
        """See EvictionPolicy. O(slots), vectorised."""
        bits = np.uint32(min(view.lifetime_bits, 31))
        queue = _QUEUES[view.uses]
        queue -= np.minimum(queue, (np.uint32(view.now) - view.access) >> bits)
        return _first_runs(view, queue.astype(np.uint64) << np.uint64(32) | view.access, n)


#: By uses: the queue of an object.
_QUEUES = np.array([max(1, uses - 1).bit_length() - 1 for uses in range(256)], np.uint32)

#: By the name that options give.
POLICIES: dict[str, EvictionPolicy] = {"lru": LeastRecentlyUsed(), "mq": MultiQueue()}


def _first_runs(
    view: EvictionView, rank: npt.NDArray[np.uint32] | npt.NDArray[np.uint64], n: int
) -> Slots:
    """At least n slots, by whole runs of one rank each, the lowest rank and the deepest first."""
    slots = np.flatnonzero(view.resident & ~view.busy)
    if n <= 0 or slots.size == 0:
        return slots[:0]
    rank = rank[slots]
    if slots.size > n:  # whole runs: all of a run have one rank
        likely = np.flatnonzero(rank <= np.partition(rank, n - 1)[n - 1])
        slots, rank = slots[likely], rank[likely]
    depth = view.depth[slots]
    follows = np.diff(slots) == 1
    follows &= slots[1:] % view.group_slots != 0
    follows &= (np.diff(depth.astype(np.int64)) == 1) & (rank[1:] == rank[:-1])
    starts = np.flatnonzero(np.append(True, ~follows))
    ends = np.append(starts[1:], slots.size)
    order = np.lexsort((_DEPTH_MAX - depth[starts], rank[starts]))
    enough = int(np.searchsorted(np.cumsum((ends - starts)[order]), n)) + 1
    chosen = order[:enough]
    first, sizes = starts[chosen], (ends - starts)[chosen]
    within = np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    victims: Slots = slots[np.repeat(first, sizes) + within]
    return victims
