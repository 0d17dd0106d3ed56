"""The allocator: against a set of free slots, and the order in which it hands them out."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from integrity import check_allocator, check_index

from tutti.placement.allocator import Allocator, Placer
from tutti.placement.index import Index
from tutti.placement.reuse import ReuseHistory


def as_slots(*slots: int) -> npt.NDArray[np.int64]:
    return np.array(slots, np.int64)


def runs_of(slots: npt.NDArray[np.int64], group_slots: int) -> list[tuple[int, int]]:
    """(first slot, length) of each run, by the definition."""
    runs: list[tuple[int, int]] = []
    for slot in slots.tolist():
        follows = runs and slot == sum(runs[-1]) and slot % group_slots != 0
        if follows:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((slot, 1))
    return runs


class AllocatorModel(RuleBasedStateMachine):
    """The allocator against a set of the free slots."""

    @initialize(
        members=st.integers(1, 3), groups=st.integers(1, 6), group_slots=st.sampled_from([1, 2, 5])
    )
    def start(self, members: int, groups: int, group_slots: int) -> None:
        self.allocator = Allocator(members, groups, group_slots)
        self.twin = Allocator(members, groups, group_slots)
        self.free = set(range(members * groups * group_slots))
        self.used: set[int] = set()

    @rule(n=st.integers(0, 40), data=st.data(), chained=st.booleans())
    def allocate(self, n: int, data: st.DataObject, chained: bool) -> None:
        after = data.draw(st.integers(0, self.allocator.slots - 1)) if chained else None
        slots = self.allocator.allocate(n, after=after)
        assert slots.dtype == np.int64
        assert len(slots) == min(n, len(self.free)), "space was left unused"
        assert np.array_equal(slots, self.twin.allocate(n, after=after)), "not deterministic"
        if after is not None and after in self.used and after + 1 in self.free and n:
            assert slots[0] == after + 1 or (after + 1) % self.allocator.group_slots == 0
        given_out = set(slots.tolist())
        assert len(given_out) == len(slots), "a slot was given out twice"
        assert given_out <= self.free, "a slot was given out that was in use"
        self.free -= given_out
        self.used |= given_out

    @precondition(lambda self: self.used)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        slots = data.draw(st.lists(st.sampled_from(sorted(self.used)), unique=True))
        for allocator in (self.allocator, self.twin):
            allocator.free(as_slots(*slots))
        self.used -= set(slots)
        self.free |= set(slots)

    @precondition(lambda self: self.free)
    @rule(data=st.data())
    def recover(self, data: st.DataObject) -> None:
        slots = data.draw(st.lists(st.sampled_from(sorted(self.free)), unique=True, max_size=4))
        for allocator in (self.allocator, self.twin):
            allocator.take(as_slots(*slots))
        self.free -= set(slots)
        self.used |= set(slots)

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "allocator"):
            return
        allocator = self.allocator
        check_allocator(allocator)
        assert allocator.free_slots == len(self.free)
        everything = np.arange(allocator.slots)
        assert set(np.flatnonzero(allocator.is_free(everything)).tolist()) == self.free


TestAllocatorModel = AllocatorModel.TestCase
TestAllocatorModel.settings = settings(deadline=None, stateful_step_count=30)


def test_groups_of_one_prefix_rotate_over_the_members() -> None:
    allocator = Allocator(members=3, groups_per_member=4, group_slots=4)
    slots = allocator.allocate(16)
    member = slots // 16
    assert member.tolist() == [0] * 4 + [1] * 4 + [2] * 4 + [0] * 4
    assert runs_of(slots, 4) == [(0, 4), (16, 4), (32, 4), (4, 4)]


def test_the_next_prefix_starts_on_the_next_member() -> None:
    allocator = Allocator(members=2, groups_per_member=4, group_slots=4)
    assert allocator.allocate(4).tolist() == [0, 1, 2, 3]
    assert allocator.allocate(4).tolist() == [16, 17, 18, 19]


def test_a_chain_continues_in_its_run_then_on_the_next_member() -> None:
    allocator = Allocator(members=2, groups_per_member=4, group_slots=4)
    first = allocator.allocate(2)
    assert first.tolist() == [0, 1]
    more = allocator.allocate(6, after=1)
    assert more.tolist() == [2, 3, 16, 17, 18, 19]


def test_pages_appended_one_by_one_stay_in_one_run() -> None:
    allocator = Allocator(members=2, groups_per_member=4, group_slots=8)
    slots = [int(allocator.allocate(1)[0])]
    for _ in range(7):
        slots.append(int(allocator.allocate(1, after=slots[-1])[0]))
    assert runs_of(as_slots(*slots), 8) == [(slots[0], 8)]


def test_a_remainder_takes_the_tightest_run_before_a_whole_group() -> None:
    allocator = Allocator(members=1, groups_per_member=4, group_slots=8)
    allocator.allocate(24)
    allocator.free(as_slots(0, 1, 2, 3, 4, 10, 11, 12, 17, 18, 20))
    # Longest free runs: 5 in group 0, 3 in group 1, 2 in group 2; group 3 is whole.
    assert allocator.allocate(3).tolist() == [10, 11, 12]
    assert allocator.allocate(1).tolist() == [20]
    assert allocator.allocate(6).tolist() == [24, 25, 26, 27, 28, 29]


def test_without_whole_groups_the_longest_runs_go_first() -> None:
    allocator = Allocator(members=1, groups_per_member=3, group_slots=8)
    allocator.allocate(24)
    allocator.free(as_slots(1, 2, 9, 10, 11, 12, 20))
    assert allocator.allocate(7).tolist() == [9, 10, 11, 12, 1, 2, 20]
    assert allocator.allocate(1).size == 0


def test_a_free_predecessor_is_no_place_to_continue() -> None:
    allocator = Allocator(members=1, groups_per_member=2, group_slots=4)
    slots = allocator.allocate(3)
    allocator.free(slots)
    assert len(allocator.allocate(4, after=0)) == 4
    check_allocator(allocator)


def test_space_that_comes_back_is_whole_again() -> None:
    allocator = Allocator(members=2, groups_per_member=3, group_slots=4)
    slots = allocator.allocate(24)
    assert allocator.free_slots == 0
    allocator.free(slots[::-1].copy())
    assert allocator.free_slots == 24
    assert len(runs_of(allocator.allocate(4), 4)) == 1
    check_allocator(allocator)


def test_mistakes_of_the_caller_are_noticed() -> None:
    allocator = Allocator(members=1, groups_per_member=2, group_slots=4)
    slots = allocator.allocate(2)
    with pytest.raises(AssertionError, match="was free"):
        allocator.free(as_slots(5))
    with pytest.raises(AssertionError, match="not free"):
        allocator.take(slots)
    with pytest.raises(AssertionError, match="twice"):
        allocator.free(as_slots(0, 0))


def test_a_chain_lies_in_a_run_and_keys_that_are_there_give_their_slots_back() -> None:
    index, allocator = Index(12), Allocator(members=2, groups_per_member=2, group_slots=3)
    placer = Placer(index, ReuseHistory(12), allocator)
    keys = np.arange(80, dtype=np.uint8).reshape(5, 16)
    depths, none = np.arange(5, dtype=np.uint32), np.zeros((1, 16), np.uint8)
    placed = placer.place(keys[:1], none, depths[:1], 7, has_digests=False)
    assert (placed.keys, placed.rows, placed.sequences.tolist()) == (1, None, [7])
    chained = placer.place(keys[1:4], keys[:3], depths[1:4], 8, has_digests=True)
    first = int(placed.slots[0])
    assert chained.slots[:2].tolist() == [first + 1, first + 2], "behind the slot of its parent"
    free = allocator.free_slots
    again = placer.place(keys[2:], keys[1:4], depths[2:], 11, has_digests=True)
    assert again.keys == 3 and again.rows is not None and again.rows.tolist() == [2]
    assert again.sequences.tolist() == [13] and allocator.free_slots == free - 1
    assert index.find(keys[4:]).tolist() == again.slots.tolist()
    assert index.depth[again.slots].tolist() == [4]
    many = np.arange(128, 256, dtype=np.uint8).reshape(8, 16)
    many_depths = np.zeros(8, np.uint32)
    short = placer.place(many, np.zeros_like(many), many_depths, 14, has_digests=False)
    assert short.keys == 7 and short.slots.size == 7 and allocator.free_slots == 0
    check_allocator(allocator)
    check_index(index)
