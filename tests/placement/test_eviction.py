"""LRU by groups: against a plain Python model, and the rules one by one."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from tutti.placement.eviction import (
    EvictionPolicy,
    EvictionView,
    LeastHitDensity,
    LeastRecentlyUsed,
)

POLICY: EvictionPolicy = LeastRecentlyUsed()


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
    worth = times.astype(float)
    return EvictionView(resident, pinned, times, np.asarray(depth, np.uint32), group_slots, worth)


def victims_by_definition(view: EvictionView, n: int) -> list[int]:
    """The same policy, one group at a time."""
    clean: list[tuple[tuple[int, int, int], list[int]]] = []
    mixed: list[tuple[tuple[int, int, int], list[int]]] = []
    for first in range(0, view.resident.size, view.group_slots):
        slots = range(first, first + view.group_slots)
        held = [slot for slot in slots if view.resident[slot]]
        loose = [slot for slot in held if not view.busy[slot]]
        if loose:
            order = (int(max(view.access[held])), -int(max(view.depth[held])), first)
            queue = mixed if any(view.busy[slot] for slot in slots) else clean
            queue.append((order, loose))
    chosen: list[int] = []
    for _, loose in [*sorted(clean), *sorted(mixed)]:
        if len(chosen) < n:
            chosen += loose
    return chosen


@given(st.data())
def test_agrees_with_the_definition(data: st.DataObject) -> None:
    group_slots = data.draw(st.sampled_from([1, 2, 4]))
    size = group_slots * data.draw(st.integers(1, 12))
    flags = st.lists(st.booleans(), min_size=size, max_size=size).map(np.array)
    small = st.lists(st.integers(0, 4), min_size=size, max_size=size)
    large = st.lists(st.integers(0, 2**32 - 1), min_size=size, max_size=size)
    numbers = st.one_of(small, large).map(lambda values: np.array(values, np.uint32))
    view = EvictionView(
        data.draw(flags),
        data.draw(flags),
        data.draw(numbers),
        data.draw(numbers),
        group_slots,
        np.zeros(size),
    )
    n = data.draw(st.integers(0, size + 2))
    assert POLICY.victims(view, n).tolist() == victims_by_definition(view, n)


def test_whole_groups_go_coldest_first() -> None:
    view = make_view(2, [5, 5, 1, 1, 3, 3], [0] * 6)
    assert POLICY.victims(view, 1).tolist() == [2, 3]
    assert POLICY.victims(view, 3).tolist() == [2, 3, 4, 5]


def test_a_group_is_as_recent_as_its_most_recent_slot() -> None:
    view = make_view(2, [1, 9, 2, 2], [0] * 4)
    assert POLICY.victims(view, 2).tolist() == [2, 3]


def test_the_tail_of_a_chain_goes_before_its_head() -> None:
    view = make_view(2, [7] * 6, [0, 1, 4, 5, 2, 3])
    assert POLICY.victims(view, 6).tolist() == [2, 3, 4, 5, 0, 1]


def test_a_group_with_a_busy_slot_is_the_last_resort() -> None:
    view = make_view(2, [1, 1, 9, 9], [0] * 4, busy=(0,))
    assert POLICY.victims(view, 2).tolist() == [2, 3]
    assert POLICY.victims(view, 4).tolist() == [2, 3, 1]


def test_busy_and_empty_slots_are_never_victims() -> None:
    view = make_view(4, [1] * 8, [0] * 8, empty=(0, 5), busy=(1, 5, 6))
    assert sorted(POLICY.victims(view, 100).tolist()) == [2, 3, 4, 7]


def test_nothing_to_evict_is_not_an_error() -> None:
    nothing = make_view(2, [1, 1], [0, 0], empty=(0, 1))
    assert POLICY.victims(nothing, 5).size == 0
    assert POLICY.victims(make_view(2, [1, 1], [0, 0]), 0).size == 0
    assert POLICY.victims(nothing, 0).dtype == np.int64


DENSITY: EvictionPolicy = LeastHitDensity()


def test_density_takes_whole_runs_of_what_is_worth_least() -> None:
    view = make_view(4, [1, 1, 1, 9, 5, 5, 5, 5], [3, 4, 5, 0, 0, 1, 2, 3])
    assert DENSITY.victims(view, 1).tolist() == [0, 1, 2]
    assert DENSITY.victims(view, 4).tolist() == [0, 1, 2, 4, 5, 6, 7]


def test_density_takes_the_end_of_a_chain_before_its_beginning() -> None:
    view = make_view(4, [7] * 8, [0, 1, 2, 3, 4, 5, 6, 7])
    assert DENSITY.victims(view, 4).tolist() == [4, 5, 6, 7]


@given(st.data())
def test_density_names_distinct_slots_that_may_go(data: st.DataObject) -> None:
    group_slots = data.draw(st.sampled_from([1, 2, 8]))
    size = group_slots * data.draw(st.integers(1, 12))
    flags = st.lists(st.booleans(), min_size=size, max_size=size).map(np.array)
    small = st.lists(st.integers(0, 4), min_size=size, max_size=size)
    view = EvictionView(
        data.draw(flags),
        data.draw(flags),
        np.array(data.draw(small), np.uint32),
        np.array(data.draw(small), np.uint32),
        group_slots,
        np.array(data.draw(small), float),
    )
    n = data.draw(st.integers(0, size + 2))
    victims = DENSITY.victims(view, n)
    assert np.unique(victims).size == victims.size
    assert (view.resident & ~view.busy)[victims].all()
    assert victims.size >= min(n, int((view.resident & ~view.busy).sum()))
    assert n > 0 or victims.size == 0
