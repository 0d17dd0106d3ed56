"""Eviction by runs: against a plain Python model, and the rules one by one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tutti.placement import eviction
from tutti.placement.eviction import (
    EvictionPolicy,
    EvictionView,
    LeastRecentlyUsed,
    MultiQueue,
)

POLICY: EvictionPolicy = LeastRecentlyUsed()
MQ: EvictionPolicy = MultiQueue()


def make_view(
    group_slots: int,
    access: npt.ArrayLike,
    depth: npt.ArrayLike,
    *,
    empty: tuple[int, ...] = (),
    busy: tuple[int, ...] = (),
) -> EvictionView:
    times = np.asarray(access, np.uint32)
    resident = np.ones(times.size, np.bool_)
    resident[list(empty)] = False
    pinned = np.zeros(times.size, np.bool_)
    pinned[list(busy)] = True
    depths = np.asarray(depth, np.uint32)
    uses = np.ones(times.size, np.uint8)
    return EvictionView(resident, pinned, times, depths, group_slots, uses, 16, 2)


def victims_by_definition(view: EvictionView, rank: Sequence[Any], n: int) -> list[int]:
    """Whole runs of one rank, the lowest first and the deepest of those: one slot at a time."""
    runs: list[list[int]] = []
    for slot in np.flatnonzero(view.resident & ~view.busy).tolist():
        if (
            runs
            and runs[-1][-1] == slot - 1
            and slot % view.group_slots
            and int(view.depth[slot]) == int(view.depth[slot - 1]) + 1
            and rank[slot] == rank[slot - 1]
        ):
            runs[-1].append(slot)
        else:
            runs.append([slot])
    chosen: list[int] = []
    for run in sorted(runs, key=lambda run: (rank[run[0]], -int(view.depth[run[0]]))):
        if len(chosen) < n:
            chosen += run
    return chosen


def queue_by_definition(view: EvictionView, slot: int) -> tuple[int, int]:
    """The queue of a slot, and when it was looked up: one fall at a time."""
    queue = max(0, math.floor(math.log2(max(1, int(view.uses[slot]) - 1))))
    since, lifetime = int(view.access[slot]), 1 << min(31, view.lifetime_bits)
    while queue and view.now - since >= lifetime:
        queue, since = queue - 1, since + lifetime
    return queue, int(view.access[slot])


def uses_by_definition(view: EvictionView, slot: int) -> tuple[int, int]:
    """Slots are ordered by uses, halved every two lifetimes; of equal ones the newest is first."""
    age = view.now - int(view.access[slot])
    falls = age // (1 << min(31, view.lifetime_bits))
    return int(view.uses[slot]) >> (falls // 2), -int(view.access[slot])


@given(st.data())
def test_agrees_with_the_definition(data: st.DataObject) -> None:
    group_slots = data.draw(st.sampled_from([1, 2, 4, 8]))
    size = group_slots * data.draw(st.integers(1, 12))
    flags = st.lists(st.booleans(), min_size=size, max_size=size).map(np.array)
    small = st.lists(st.integers(0, 4), min_size=size, max_size=size)
    large = st.lists(st.integers(0, 2**32 - 1), min_size=size, max_size=size)
    numbers = st.one_of(small, large).map(lambda values: np.array(values, np.uint32))
    uses = st.lists(st.sampled_from([0, 1, 2, 3, 5, 9, 255]), min_size=size, max_size=size)
    access = data.draw(numbers)
    view = EvictionView(
        data.draw(flags),
        data.draw(flags),
        access,
        data.draw(numbers),
        group_slots,
        np.array(data.draw(uses), np.uint8),
        int(access.max()),
        data.draw(st.sampled_from([0, 1, 3, 20, 31, 32])),
    )
    n = data.draw(st.integers(0, size + 2))
    assert POLICY.victims(view, n).tolist() == victims_by_definition(view, view.access.tolist(), n)
    queues = [queue_by_definition(view, slot) for slot in range(size)]
    assert MQ.victims(view, n).tolist() == victims_by_definition(view, queues, n)
    view = replace(view, by_uses=True)
    uses_left = [uses_by_definition(view, slot) for slot in range(size)]
    assert MQ.victims(view, n).tolist() == victims_by_definition(view, uses_left, n)
    assert POLICY.victims(view, n).tolist() == victims_by_definition(view, view.access.tolist(), n)


def large_view(seed: int, *, uses: Sequence[int], misleads: bool) -> EvictionView:
    """Chains of eight pages in 4096 slots.  misleads: the slots of a sample are the oldest."""
    random = np.random.default_rng(seed)
    access = random.integers(1, 2000, 512, np.uint32).repeat(8)
    if misleads:
        access[:: eviction._SAMPLE] = 1
    view = make_view(8, access, np.arange(4096) % 8, empty=(7, 900), busy=(16, 17, 2048))
    counts = random.choice(np.array(uses, np.uint8), 512).repeat(8)
    return replace(view, uses=counts, now=2000, lifetime_bits=9)


@pytest.mark.parametrize("n", [1, 100, 300, 1500, 5000])
@pytest.mark.parametrize("uses", [(1, 2), (1, 2, 3, 5, 9, 255), (255,)])
@pytest.mark.parametrize("misleads", [False, True])
def test_a_sample_changes_no_choice(n: int, uses: tuple[int, ...], misleads: bool) -> None:
    view = large_view(n, uses=uses, misleads=misleads)
    assert POLICY.victims(view, n).tolist() == victims_by_definition(view, view.access.tolist(), n)
    queues = [queue_by_definition(view, slot) for slot in range(view.access.size)]
    assert MQ.victims(view, n).tolist() == victims_by_definition(view, queues, n)
    view = replace(view, by_uses=True)
    left = [uses_by_definition(view, slot) for slot in range(view.access.size)]
    assert MQ.victims(view, n).tolist() == victims_by_definition(view, left, n)


class Counted(LeastRecentlyUsed):
    """Counts what it ranks."""

    ranked = 0

    def rank(self, view: EvictionView, slots: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        self.ranked += slots.size
        return super().rank(view, slots)


def test_few_ranks_are_computed_for_a_few_victims_of_many_objects() -> None:
    view, policy = large_view(1, uses=(1, 2, 255), misleads=False), Counted()
    assert policy.victims(view, 100).size >= 100
    assert policy.ranked < view.access.size // 4


def test_what_was_looked_up_together_goes_together_and_the_coldest_first() -> None:
    view = make_view(4, [5, 5, 1, 1, 3, 3, 3, 9], [0, 1, 0, 1, 0, 1, 2, 0])
    assert POLICY.victims(view, 1).tolist() == [2, 3]
    assert POLICY.victims(view, 3).tolist() == [2, 3, 4, 5, 6]


def test_a_run_ends_with_its_group_and_with_its_chain() -> None:
    view = make_view(2, [7] * 6, [4, 5, 6, 0, 1, 2])
    assert POLICY.victims(view, 1).tolist() == [2], "another chain begins behind it"
    assert POLICY.victims(view, 2).tolist() == [2, 0, 1]


def test_the_tail_of_a_chain_goes_before_its_head() -> None:
    view = make_view(2, [7] * 6, [0, 1, 4, 5, 2, 3])
    assert POLICY.victims(view, 6).tolist() == [2, 3, 4, 5, 0, 1]


def test_a_busy_slot_keeps_only_itself() -> None:
    view = make_view(2, [1, 1, 9, 9], [0, 1, 0, 1], busy=(0,))
    assert POLICY.victims(view, 1).tolist() == [1]
    assert POLICY.victims(view, 2).tolist() == [1, 2, 3]


def test_busy_and_empty_slots_are_never_victims() -> None:
    view = make_view(4, [1] * 8, [0] * 8, empty=(0, 5), busy=(1, 5, 6))
    assert sorted(POLICY.victims(view, 100).tolist()) == [2, 3, 4, 7]


def test_nothing_to_evict_is_not_an_error() -> None:
    nothing = make_view(2, [1, 1], [0, 0], empty=(0, 1))
    assert POLICY.victims(nothing, 5).size == 0
    assert POLICY.victims(make_view(2, [1, 1], [0, 0]), 0).size == 0
    assert POLICY.victims(nothing, 0).dtype == np.int64


def test_what_was_loaded_often_stays_as_many_lifetimes_longer() -> None:
    view = make_view(4, [9, 9, 12, 12, 7, 7, 7, 7], [0, 1, 0, 1, 0, 1, 2, 3])
    assert MQ.victims(view, 8).tolist() == POLICY.victims(view, 8).tolist()
    often = replace(view, uses=np.array([2, 2, 1, 1, 5, 5, 5, 5], np.uint8))
    assert MQ.victims(often, 5).tolist() == [4, 5, 6, 7, 0, 1], "two falls, and the oldest"
    later = replace(often, access=np.array([9, 9, 12, 12, 10, 10, 10, 10], np.uint32))
    assert MQ.victims(later, 1).tolist() == [0, 1], "one load is not often"
    assert MQ.victims(later, 4).tolist() == [0, 1, 2, 3], "one fall: still a queue above"
    longer = replace(often, lifetime_bits=3)
    longer = replace(longer, access=np.array([9, 9, 16, 16, 8, 8, 8, 8], np.uint32))
    assert MQ.victims(longer, 3).tolist() == [0, 1, 2, 3], "one fall: still a queue above"


def test_by_uses_the_newest_of_those_with_the_fewest_goes_first() -> None:
    view = make_view(4, [9, 9, 15, 15, 12, 12, 12, 12], [0, 1, 0, 1, 0, 1, 2, 3])
    rare = replace(view, uses=np.array([2, 2, 2, 2, 3, 3, 3, 3], np.uint8), by_uses=True)
    assert MQ.victims(rare, 8).tolist() == [2, 3, 0, 1, 4, 5, 6, 7]
    long_ago = replace(rare, now=20)
    assert MQ.victims(long_ago, 1).tolist() == [4, 5, 6, 7], "two lifetimes: half of the uses"
