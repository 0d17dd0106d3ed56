"""Eviction policies: choose the objects to evict when space runs out.

A policy is a pure function of the view it is given: same view, same victims, on every rank. It
moves nothing; the store voids the victims' records. It takes whole runs, because space that comes
back in single slots makes short runs and many commands.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tutti.base.arrays import Mask, Slots

_UINT32_MAX = np.uint64(0xFFFFFFFF)
_SAMPLE = 16  # one slot in so many


def reserve_slots(slots: int) -> int:
    """Number of slots that eviction keeps free, so that a put finds some.

    slots / 64, but at most 256, because free slots hold no objects: in a pool of 16 groups, keeping
    a whole group free costs more hits than a policy can win. From 131,072 slots on slots / 512,
    because choosing victims is O(slots).
    """
    return max(1, min(slots // 64, max(256, slots // 512)))


def expected_slots(slots: int, missed: int) -> int:
    """How many slots are freed in advance for the pages that a look-up missed."""
    return min(missed, slots // 16)


@dataclass(frozen=True)
class EvictionView:
    """What a policy may look at; every array has one entry per slot.

    `resident`: holds an object. `busy`: pinned, or a write is under way; never a victim. `access`:
    u32, the look-up that last touched it. `depth`: u32, pages before it in its chain.
    `group_slots`: slots of a group; the number of slots is a multiple of it. `uses`: u8, stores and
    loads of the object. `now`: the latest look-up, no `access` is later. `lifetime_bits`: seven
    eighths of the gaps between uses are shorter than 2 to the power of this, in look-ups
    (tutti/placement/reuse.py). `by_uses`: `mq` evicts the objects with the fewest uses.
    """

    resident: Mask
    busy: Mask
    access: npt.NDArray[np.uint32]
    depth: npt.NDArray[np.uint32]
    group_slots: int
    uses: npt.NDArray[np.uint8]
    now: int
    lifetime_bits: int
    by_uses: bool = False


class EvictionPolicy(Protocol):
    """Chooses victims."""

    def victims(self, view: EvictionView, n: int) -> Slots:
        """Distinct resident slots that are not busy, in the order in which to evict them.

        At least n where that many exist, and more where a whole run goes. Note that
        n = 0 is always safe and chooses nothing.
        """
        ...


class LeastRecentlyUsed:
    """Evicts the runs whose last look-up is oldest; of equally old ones the ends of chains first.

    A run is neighbouring slots of one group that hold successive pages of a chain and were looked
    up together. It is evicted as a whole. A look-up touches a page together with all pages before
    it, so a run is never colder than its continuation; of equally old ones the deeper one is first.
    """

    def victims(self, view: EvictionView, n: int) -> Slots:
        """See EvictionPolicy: whole runs of one rank each. O(slots), vectorised."""
        slots, rank = self._coldest(view, max(0, n))
        if n <= 0 or slots.size == 0:
            return slots[:0]
        if slots.size > n:  # keeps runs whole: all slots of a run have one rank
            likely = np.flatnonzero(rank <= np.partition(rank, n - 1)[n - 1])
            slots, rank = slots[likely], rank[likely]
        depth = view.depth[slots]
        follows = np.diff(slots) == 1
        follows &= slots[1:] % view.group_slots != 0
        follows &= (np.diff(depth.astype(np.int64)) == 1) & (rank[1:] == rank[:-1])
        starts = np.flatnonzero(np.append(True, ~follows))
        ends = np.append(starts[1:], slots.size)
        order = np.lexsort((_UINT32_MAX - depth[starts], rank[starts]))
        enough = int(np.searchsorted(np.cumsum((ends - starts)[order]), n)) + 1
        chosen = order[:enough]
        first, sizes = starts[chosen], (ends - starts)[chosen]
        within = np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        victims: Slots = slots[np.repeat(first, sizes) + within]
        return victims

    def rank(self, view: EvictionView, slots: Slots) -> npt.NDArray[np.unsignedinteger[Any]]:
        """The lowest goes first. One of up to 32 bits is the last look-up and nothing else."""
        return view.access[slots]

    def _coldest(self, view: EvictionView, n: int) -> tuple[Slots, npt.NDArray[Any]]:
        """Slots that may be evicted, among them those of the n lowest ranks, and their ranks.

        So that few are ranked, a sample tells by when enough slots had their last look-up.
        """
        movable = view.resident & ~view.busy
        sample = np.flatnonzero(movable[::_SAMPLE]) * _SAMPLE
        enough = 2 * n // _SAMPLE + 8
        if sample.size > 4 * enough:
            last = int(np.partition(self.rank(view, sample), enough)[enough])
            if last <= _UINT32_MAX:
                # No slot of such a rank, or a lower one, was looked up later.
                slots = np.flatnonzero(movable & (view.access <= last))
                ranks = self.rank(view, slots)
                if np.count_nonzero(ranks <= last) >= n:
                    return slots, ranks
        slots = np.flatnonzero(movable)
        return slots, self.rank(view, slots)


class MultiQueue(LeastRecentlyUsed):
    """Evicts the runs of the lowest queue, by Multi-Queue; within a queue as LeastRecentlyUsed.

    An object that was used n times after its first store is in queue log2(n). It falls by one queue
    for each lifetime without a look-up (Zhou, Philbin, Li: The Multi-Queue Replacement Algorithm
    for Second Level Buffer Caches, USENIX ATC 2001). The lifetime follows the gaps between uses, as
    theirs follows "temporal distances". An object that is stored again after its eviction keeps the
    uses it had. So a stream of objects that are used once does not evict objects that are used
    often; objects that were loaded once are treated as by LeastRecentlyUsed; and an object that is
    no longer used is evicted after at most eight lifetimes. Unlike in the paper, an object that
    falls keeps the time of its last look-up, so a pool that keeps objects for eight lifetimes
    evicts as LeastRecentlyUsed.

    In a pool that is much smaller than what is in use, that evicts objects before they are used
    again, often used or not. There the objects with the fewest uses go first (`by_uses`), which two
    lifetimes without a use halve; of equal ones the newest, so that the others stay until used. A
    put replaces none that has as many uses as its pages (tutti/transfers/reclaim.py).

    A run is as there, and in one queue.
    """

    def rank(self, view: EvictionView, slots: Slots) -> npt.NDArray[np.unsignedinteger[Any]]:
        """The queue, and below it the last look-up."""
        access, uses = view.access[slots], view.uses[slots]
        falls = (np.uint32(view.now) - access) >> np.uint32(min(view.lifetime_bits, 31))
        first = _QUEUES[uses]
        if view.by_uses:
            first, access = (uses >> np.minimum(falls // 2, 8)) + np.uint32(1), ~access
        else:
            first -= np.minimum(first, falls)
        return first.astype(np.uint64) << np.uint64(32) | access


#: The queue of an object, by its number of uses.
_QUEUES = np.array([max(1, uses - 1).bit_length() - 1 for uses in range(256)], np.uint32)

#: Policies, by the names that options use.
POLICIES: dict[str, EvictionPolicy] = {"lru": LeastRecentlyUsed(), "mq": MultiQueue()}
