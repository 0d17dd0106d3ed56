"""Free slots of a pool, handed out so that consecutive pages get consecutive slots.

A group is `group_slots` consecutive slots of one member; a run is consecutive slots of one group.
Global slot = member * slots_per_member + group * group_slots + slot in group, so `slot //
group_slots` numbers the groups of the whole pool. The allocator knows nothing of keys and states,
and it is not thread-safe: the store holds a lock around it. It is deterministic.

Its steps are native (`kernels/native/allocator.cpp`).
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tutti.base.arrays import U32, U64, Keys, Slots
from tutti.medium.keys import KEY_NBYTES
from tutti.native import (
    ANSWER_NBYTES,
    NativeAllocator,
    NativePlacement,
    NativePutRequest,
    NativePutTables,
    address,
    quick,
)
from tutti.placement.index import MISSING, Index
from tutti.placement.reuse import ReuseHistory


class Allocator:
    """The free slots of `members` members with `groups_per_member` groups each."""

    def __init__(self, members: int, groups_per_member: int, group_slots: int) -> None:
        """All slots are free at first; `take` marks those that are not."""
        assert members > 0, "a pool has a member"
        assert groups_per_member > 0, "a member has a group"
        assert group_slots > 0, "a group has a slot"
        self.members = members
        self.groups_per_member = groups_per_member
        self.group_slots = group_slots
        groups = members * groups_per_member
        self._free = np.ones((groups, group_slots), np.bool_)
        self._longest, self._next, self._previous = np.zeros((3, groups), np.uint32)
        self._first, self._last = np.zeros((2, members + group_slots), np.uint32)
        self.native = NativeAllocator(
            free=address(self._free),
            longest=address(self._longest),
            next=address(self._next),
            previous=address(self._previous),
            first=address(self._first),
            last=address(self._last),
            members=members,
            groups_per_member=groups_per_member,
            group_slots=group_slots,
        )
        self._handle = ctypes.byref(self.native)
        quick().tutti_allocator_rebuild(self._handle)

    @property
    def slots(self) -> int:
        """Slots of the pool, free or not."""
        return self._free.size

    @property
    def free_slots(self) -> int:
        """Slots that can be allocated."""
        return int(self.native.free_slots)

    def is_free(self, slots: Slots) -> npt.NDArray[np.bool_]:
        """For every slot whether it is free, shape (n,)."""
        free: npt.NDArray[np.bool_] = self._free.reshape(-1)[slots]
        return free

    def allocate(self, n: int, *, after: int | None = None) -> Slots:
        """Up to n slots in page order, shape (<= n,); fewer only when the pool is full.

        In this order: the free slots directly behind slot `after`, which is the predecessor's, in
        its group (short tails stay in one run); whole groups on rotating members, beginning behind
        the member of `after`; for the rest, the run that fits best in the partly used group whose
        longest free run fits best, else the front of a whole group; and without whole groups the
        longest free runs.
        """
        assert n >= 0, "a count is not negative"
        assert after is None or 0 <= after < self.slots, "a slot number lies beyond the pool"
        out = np.empty(n, np.int64)
        behind = MISSING if after is None else after
        return out[: quick().tutti_allocator_allocate(self._handle, n, behind, address(out))]

    def free(self, slots: Slots) -> None:
        """Frees distinct allocated slots, in any order."""
        slots = np.sort(slots)
        done = quick().tutti_allocator_free(self._handle, address(slots), slots.size)
        assert done == slots.size, "a slot was freed that was free, or given twice"

    def take(self, slots: Slots) -> None:
        """Marks given distinct free slots as allocated, at recovery. O(slots of the pool)."""
        flat = self._free.reshape(-1)
        assert flat[slots].all(), "a slot was taken that was not free"
        flat[slots] = False
        quick().tutti_allocator_rebuild(self._handle)


class Placed(NamedTuple):
    """Keys of a put that have slots now.

    keys: how many, from the first, got a slot.  rows: of those, the ones that the index did
    not have, or None for all.  slots, sequences: of these rows.
    """

    keys: int
    rows: Slots | None
    slots: Slots
    sequences: U64


class PlacedChain:
    """A chain of keys that another process stores, and the message to that process.

    count: number of keys that the index did not have; these have slots now.
    """

    __slots__ = ("_block", "_counts", "_keys", "count")

    def __init__(self, keys: int) -> None:
        self._counts = 2 * (keys + 1) + keys // 2 + 1 + 5 * keys  # where tutti_put_place counts
        rest = (ANSWER_NBYTES + 12 * keys) // 8 + 1
        self._block: U64 = np.empty(self._counts + 4 + rest, np.uint64)
        self._keys, self.count = keys, 0

    @property
    def address(self) -> int:
        """Address to which native code writes the chain."""
        return address(self._block)

    @property
    def keys(self) -> Keys:
        """All keys of the chain, (n, 16)."""
        return self._block[2 : 2 * (self._keys + 1)].view(np.uint8).reshape(-1, KEY_NBYTES)

    @property
    def parents(self) -> Keys:
        """Their predecessors, (n, 16)."""
        return self._block[: 2 * self._keys].view(np.uint8).reshape(-1, KEY_NBYTES)

    @property
    def depths(self) -> U32:
        """Number of pages before each of them, (n,)."""
        return self._block[2 * (self._keys + 1) :].view(np.uint32)[: self._keys]

    @property
    def rows(self) -> Slots:
        """Rows of the keys that got slots, (count,)."""
        n = self._keys
        return self._placed[2 * n : 2 * n + self.count].view(np.int64)

    @property
    def slots(self) -> Slots:
        """Their slots, (count,)."""
        return self._placed[: self.count].view(np.int64)

    @property
    def sequences(self) -> U64:
        """Their sequence numbers, (count,)."""
        return self._placed[self._keys : self._keys + self.count]

    @property
    def late(self) -> int:
        """How many of them had been evicted recently."""
        return int(self._block.item(self._counts + 2))

    @property
    def answer(self) -> memoryview:
        """The message to the process that stores them."""
        nbytes, first = int(self._block.item(self._counts + 3)), 8 * (self._counts + 4)
        return self._block.data.cast("B")[first : first + nbytes]

    @property
    def _placed(self) -> U64:
        return self._block[self._counts - 5 * self._keys :]


class Placer:
    """Gives slots to keys: one native call changes index, history of uses and allocator."""

    def __init__(self, index: Index, history: ReuseHistory, allocator: Allocator) -> None:
        self._index, self._history = index, history
        self._parts = (index, history, allocator)  # keeps their memory alive
        tables = (index.native, history.native, allocator.native)
        self.tables = NativePutTables(*map(ctypes.addressof, tables))

    def place(
        self, keys: Keys, parents: Keys, depths: U32, sequence: int, *, has_digests: bool
    ) -> Placed:
        """Allocates slots until none is free, for each stretch of a chain behind the slot of its
        parent, and maps keys (n, 16) to them in state WRITING.  sequence: number of the first.
        """
        index, n = self._index, len(keys)
        index.check_keys(keys)
        index.check_keys(parents)
        assert depths.shape == (n,) and depths.dtype == np.uint32, "a depth per key"
        out = np.empty(5 * n + 3, np.uint64)
        arrays = (address(keys), address(parents), address(depths))
        placement = NativePlacement(*arrays, n, sequence, index.uses, has_digests)
        pointers = (ctypes.byref(self.tables), ctypes.byref(placement), address(out))
        result = quick().tutti_put_place(*pointers)
        assert result == 0, "a free slot is in use"
        count, mapped, late = out[5 * n :].tolist()
        self._history.regretted += late
        rows = None if mapped == n else out[2 * n : 2 * n + mapped].view(np.int64)
        return Placed(count, rows, out[:mapped].view(np.int64), out[n : n + mapped])

    def answer(self, keys: bytes, request: NativePutRequest) -> PlacedChain:
        """As `place`, for a chain that another process stores and that fits into the free slots.
        request: has the other arguments; its parent is None or 16 bytes.
        """
        index, n = self._index, len(keys) // KEY_NBYTES
        assert n * KEY_NBYTES == len(keys), "a key is 16 bytes"
        chain = PlacedChain(n)
        request.keys, request.n, request.uses = keys, n, index.uses
        handles = (ctypes.byref(self.tables), ctypes.byref(request))
        chain.count = quick().tutti_put_answer(*handles, chain.address)
        assert chain.count >= 0, "a free slot is in use"
        self._history.regretted += chain.late
        return chain
