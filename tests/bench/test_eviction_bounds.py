"""Bounds on eviction policies against brute force on tiny traces."""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tutti.bench.belady import unlimited
from tutti.bench.eviction_bounds import by_classes, whole_puts

that_fit = st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=4, unique=True), max_size=6)
requests = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=4, unique=True), max_size=6)


def most_hits(trace: list[list[int]], capacity: int, reserve: int, window: int) -> int:
    """Every choice of victims is tried."""

    def without(held: frozenset[int], size: int, busy: set[int]) -> list[frozenset[int]]:
        free = sorted(held - busy)
        out = min(len(free), max(0, len(held) - size))
        return [held - set(victims) for victims in combinations(free, out)]

    @cache
    def best(place: int, held: frozenset[int]) -> int:
        if place == len(trace):
            return 0
        found = held & set(trace[place])
        fresh = [block for block in trace[place] if block not in found]
        pools = {held}
        for start in range(0, len(fresh), window):
            part = fresh[start : start + window]
            room = {p for pool in pools for p in without(pool, capacity - len(part), found)}
            full = {p | set(part[: capacity - len(p)]) for p in room}
            pools = {p for pool in full for p in without(pool, capacity - reserve, set())}
        return len(found) + max(best(place + 1, pool) for pool in pools)

    return best(0, frozenset())


@given(that_fit, st.integers(4, 5), st.integers(0, 1), st.sampled_from([2, 9]))
def test_no_order_of_evictions_hits_more_with_whole_puts(
    trace: list[list[int]], capacity: int, reserve: int, window: int
) -> None:
    counted = whole_puts(trace, capacity, reserve, window)
    most = most_hits(trace, capacity, reserve, window)
    assert counted.hits == most if window > 4 else counted.hits <= most


@given(requests, st.integers(1, 6), st.booleans())
def test_no_times_of_keeping_by_class_hit_more(
    trace: list[list[int]], capacity: int, gaps: bool
) -> None:
    intervals = defaultdict(list)
    last: dict[int, tuple[int, tuple[int, ...]]] = {}
    uses: dict[int, int] = defaultdict(int)
    budget = 0
    for now, request in enumerate(trace):
        for depth, block in enumerate(request):
            gap = now - last[block][0] if block in last else 0
            if block in last:
                intervals[last[block][1]].append((gap - 1, 1))
            uses[block] += 1
            sizes = (uses[block], depth, gap if gaps else 0)
            last[block] = now, tuple(size.bit_length() for size in sizes)
        budget += min(capacity, len(last))
    for now, kind in last.values():
        intervals[kind].append((len(trace) - now - 1, 0))
    ages = range(-1, 3)  # of longer ones there are few
    best = 0
    for chosen in product(ages, repeat=min(5, len(intervals))):
        some = list(zip(chosen, intervals.values(), strict=False))
        slots = sum(min(gap, max(0, age)) for age, kind in some for gap, _ in kind)
        hits = sum(hit for age, kind in some for gap, hit in kind if gap <= age)
        best = max(best, hits if slots <= budget else 0)
    references = sum(map(len, trace))
    bound = references * by_classes(trace, capacity, gaps)
    assert bound >= best - 1e-9
    assert bound <= unlimited(trace).hits + 1e-9
    if references:
        assert by_classes(trace, 99, gaps) * references == pytest.approx(unlimited(trace).hits)


def test_of_two_classes_the_one_with_more_hits_per_slot_is_kept() -> None:
    # Blocks at depth 0 come again after one other request, those at depth 1 never.
    trace = [[at % 2, 10 + at] for at in range(10)]
    assert by_classes(trace, 1, gaps=False) == pytest.approx(8 / 20)
    assert by_classes(trace, 0, gaps=False) == 0
