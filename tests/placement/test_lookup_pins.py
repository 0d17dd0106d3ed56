"""What look-ups keep from eviction: shared, bounded, and for so many later look-ups."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tutti.placement.lookup_pins import LookupPins


def made(slots: int = 16, *, lookups: int = 3, slots_max: int | None = None) -> LookupPins:
    most = slots if slots_max is None else slots_max
    return LookupPins(np.zeros(slots, np.uint16), lookups=lookups, slots_max=most)


def slots(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def kept(holds: LookupPins) -> list[int]:
    return np.flatnonzero(holds._kept).tolist()


def test_a_hold_ends_by_later_look_ups_alone() -> None:
    holds = made()
    holds.lookup()
    assert holds.pin(True, slots(0, 1)) == 2
    for _ in range(3):
        holds.lookup()
        assert kept(holds) == [0, 1]
    holds.lookup()
    assert kept(holds) == []
    assert holds.count == 0


def test_what_several_keep_counts_once_and_stays_for_the_last() -> None:
    holds = made(slots_max=4)
    assert holds.pin("a", slots(0, 1, 2)) == 3
    assert holds.pin("b", slots(0, 1, 2, 3)) == 4, "three of them cost nothing"
    assert holds.count == 4
    assert holds.pin("c", slots(0, 1, 2, 3, 4)) == 4, "and here the room ends"
    for name in "ab":
        holds.release(name)
        assert holds.count == 4
    holds.release("c")
    assert (kept(holds), holds.count) == ([], 0)
    holds.release("c")
    assert holds.pin("d", slots(7, 7)) == 2
    holds.pin("e", slots(7))
    assert holds.count == 1
    for name in "de":
        holds.release(name)
    assert (kept(holds), holds.count) == ([], 0)


def test_room_goes_to_the_first_or_the_last() -> None:
    holds = made(slots_max=3)
    assert holds.pin("a", slots(9)) == 1
    assert holds.pin("b", slots(0, 1, 9, 2, 3)) == 3
    assert kept(holds) == [0, 1, 9]
    assert holds.pin("b", slots(0, 1, 9, 2, 3), last=True) == 3, "its own do not count against it"
    assert kept(holds) == [2, 3, 9]


def test_who_looks_up_again_keeps_the_new_and_for_longer() -> None:
    holds = made(lookups=2)
    for _ in range(5):
        holds.lookup()
        assert holds.pin("a", slots(4, 5)) == 2
    assert (holds.count, kept(holds)) == (2, [4, 5])
    holds.pin("b", slots(1))
    holds.lookup()
    holds.pin("a", slots(5, 6))
    assert kept(holds) == [1, 5, 6]
    for _ in range(2):
        holds.lookup()
    assert kept(holds) == [5, 6], "b is older than the renewed a"


@pytest.mark.parametrize("seed", range(20))
def test_counts_are_those_of_a_plain_model(seed: int) -> None:
    rng, holds = random.Random(seed), made(32, lookups=4, slots_max=12)
    model: dict[str, tuple[int, set[int]]] = {}
    for now in range(200):
        holds.lookup()
        model = {name: held for name, held in model.items() if held[0] >= now - 4}
        name, step = rng.choice("abcdef"), rng.random()
        model.pop(name, None)
        if step < 0.3:
            holds.release(name)
        else:
            start = rng.randrange(24)
            wanted = list(range(start, rng.randint(start, 32)))
            others = set().union(*(held for _, held in model.values()))
            most = next(
                n for n in range(len(wanted), -1, -1) if len(others | set(wanted[:n])) <= 12
            )
            assert holds.pin(name, slots(*wanted)) == most, (seed, now)
            if most:
                model[name] = now, set(wanted[:most])
        assert kept(holds) == sorted(set().union(*(held for _, held in model.values())))
        assert holds.count == len(kept(holds)) <= 12
    holds.clear()
    assert (kept(holds), holds.count) == ([], 0)


def test_a_slot_that_is_named_again_takes_no_more_room() -> None:
    holds = made(slots_max=3)
    assert holds.pin("a", slots(0, 1, 0, 1, 0, 2, 1, 5, 0)) == 7, "the first three, however often"
    assert kept(holds) == [0, 1, 2]
    assert holds.pin("a", slots(0, 5, 0, 4, 4, 5, 3), last=True) == 4, "and the last three"
    assert kept(holds) == [3, 4, 5]


def test_a_slot_has_no_more_pins_than_can_be_counted() -> None:
    holds = made()
    holds._kept[2] = 0xFFFE
    assert holds.pin("a", slots(1, 2, 3)) == 3
    assert holds.pin("b", slots(1, 2, 3)) == 1
    holds.release("a")
    assert holds.pin("b", slots(1, 2, 3)) == 3
