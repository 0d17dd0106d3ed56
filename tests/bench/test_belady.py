"""Reference hit counts against brute force on tiny traces."""

from __future__ import annotations

from functools import cache

from hypothesis import given
from hypothesis import strategies as st

from tutti.bench.belady import HitCount, least_recently_used, minimum, unlimited

# Tiny, so that every policy can be tried.
streams = st.lists(st.integers(0, 4), max_size=9)
requests = st.lists(st.lists(st.integers(0, 5), max_size=4, unique=True), max_size=6)


def best_hits(stream: list[int], capacity: int) -> int:
    """The most hits that any sequence of decisions reaches; a block need not be kept."""

    @cache
    def best(place: int, held: frozenset[int]) -> int:
        if place == len(stream):
            return 0
        block = stream[place]
        hit = int(block in held)
        grown = held | {block}
        kept = [grown] if len(grown) <= capacity else [grown - {victim} for victim in grown]
        return hit + max(best(place + 1, frozenset(k)) for k in kept)

    return best(0, frozenset())


def best_prefix_hits(trace: list[list[int]], capacity: int) -> int:
    """As a store: look up the whole request, then keep any of what was held and what came."""

    @cache
    def best(place: int, held: frozenset[int]) -> int:
        if place == len(trace):
            return 0
        hits = 0
        while hits < len(trace[place]) and trace[place][hits] in held:
            hits += 1
        pool = sorted(held | set(trace[place]))
        return hits + max(best(place + 1, kept) for kept in choices(pool, capacity))

    return best(0, frozenset())


def choices(pool: list[int], capacity: int) -> set[frozenset[int]]:
    """The largest subsets; a smaller one never helps."""
    if len(pool) <= capacity:
        return {frozenset(pool)}
    return set().union(*(choices([p for p in pool if p != out], capacity) for out in pool))


def naive_lru(stream: list[int], capacity: int) -> int:
    order: list[int] = []
    hits = 0
    for block in stream:
        hits += block in order
        order = [b for b in order if b != block] + [block]
        order = order[max(0, len(order) - capacity) :]
    return hits


@given(streams, st.integers(0, 3))
def test_minimum_is_the_best_there_is(stream: list[int], capacity: int) -> None:
    assert minimum([stream], capacity).hits == best_hits(stream, capacity)


@given(requests, st.integers(0, 3))
def test_no_store_of_prefixes_has_more_hits_than_minimum(
    trace: list[list[int]], capacity: int
) -> None:
    assert best_prefix_hits(trace, capacity) <= minimum(trace, capacity).hits


@given(streams, st.integers(0, 4))
def test_lru(stream: list[int], capacity: int) -> None:
    assert least_recently_used([stream], capacity).hits == naive_lru(stream, capacity)


@given(requests)
def test_enough_room_is_unlimited(trace: list[list[int]]) -> None:
    assert minimum(trace, 6) == least_recently_used(trace, 6) == unlimited(trace)


def test_a_prefix_ends_at_its_first_miss() -> None:
    count = unlimited([[1, 2, 3], [1, 9, 3], [2, 1]])
    assert count == HitCount(references=8, hits=7 - 3, prefix_hits=3)
    assert count.hit_rate == 4 / 8
    assert count.prefix_hit_rate == 3 / 8
    assert HitCount().hit_rate == HitCount().prefix_hit_rate == 0.0
