"""Whether an index, or an allocator, agrees with itself slot by slot."""

from __future__ import annotations

import numpy as np

from tutti.native import NO_SLOT
from tutti.placement.allocator import Allocator
from tutti.placement.index import _OWNS_KEY, Index, SlotState


def check_index(index: Index) -> None:
    """Asserts that the table and the arrays agree."""
    owners = np.flatnonzero(_OWNS_KEY[index.state])
    entries = index._table[index._table != NO_SLOT]
    mapped = np.sort(entries & np.uint32(index.native.slot_mask)).astype(np.int64)
    assert np.array_equal(mapped, owners), "the table and the states disagree"
    assert np.array_equal(index.find(index.key[owners]), owners), "a key is not found"
    others = ~_OWNS_KEY[index.state]
    assert not index._words[others].any(), "a slot kept a key that it does not own"
    pinned = others & (index.pins > 0)
    assert (index.state[pinned] == SlotState.QUARANTINED).all(), "a slot in flight was given up"
    assert (index.access <= index.uses).all(), "an access lies in the future"
    tenants = np.bincount(index.tenant, minlength=index.tenant_slots.size)
    assert np.array_equal(index.tenant_slots[1:], tenants[1:]), "a namespace's count is off"
    assert not index.tenant[others].any(), "a slot without a key has a namespace"


def check_allocator(allocator: Allocator) -> None:
    """Asserts that counts and lists agree with the free slots."""
    free = np.count_nonzero(allocator._free)
    assert allocator.free_slots == free, "the count of free slots is off"
    longest = [max(map(len, row.tobytes().split(b"\0"))) for row in allocator._free]
    assert longest == allocator._longest.tolist(), "a group has another longest run"
    listed: dict[int, int] = {}
    for number, group in enumerate(allocator._first.tolist()):
        while group != NO_SLOT:  # bounded: a group is in one list
            assert group not in listed, "a group is listed twice"
            listed[group] = number
            group = int(allocator._next[group])
    for group, length in enumerate(longest):
        member, is_whole = group // allocator.groups_per_member, length == allocator.group_slots
        number = member if is_whole else allocator.members + length
        assert listed.get(group) == (number if length else None), "a group is filed wrongly"
