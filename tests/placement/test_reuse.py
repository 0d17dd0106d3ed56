"""Uses of objects, the age of the pool, keys that come back, and what survives a new opening."""

from __future__ import annotations

import numpy as np
import pytest

from tutti.base.arrays import Keys, Slots
from tutti.placement.reuse import ReuseHistory

SLOTS = 64


def keys_of(*numbers: int) -> Keys:
    words = np.zeros((len(numbers), 2), np.uint64)
    words[:, 0] = np.array(numbers, np.uint64) + np.uint64(1)
    return words.view(np.uint8)


def slots_of(*numbers: int) -> Slots:
    return np.array(numbers, np.int64)


def test_an_object_is_used_when_it_is_stored_and_once_by_each_load() -> None:
    history = ReuseHistory(SLOTS)
    history.stored(slots_of(3), keys_of(3), now=1)
    assert (history.uses[3], history.value[3]) == (1, 1)
    for load in range(20):
        history.loaded(slots_of(3, 3), now=2 + load)
        assert history.uses[3] == history.value[3] == min(2 + load, 16)


def test_the_pool_is_as_old_as_what_was_worth_most_of_what_was_evicted() -> None:
    history = ReuseHistory(SLOTS)
    history.stored(slots_of(1, 2, 3), keys_of(1, 2, 3), now=1)
    for now in (2, 3):
        history.loaded(slots_of(1), now)
    history.loaded(slots_of(2), now=4)
    history.evicted(slots_of(3), keys_of(3), ages=False)
    assert history.native.age == 0, "of a part of the pool"
    history.evicted(slots_of(2, 3), keys_of(2, 3))
    history.stored(slots_of(2, 3), keys_of(4, 5), now=5)
    assert history.value[[1, 2, 3]].tolist() == [3, 3, 3], "a generation of new ones is as good"
    history.loaded(slots_of(3), now=6)
    history.loaded(slots_of(1), now=7)
    assert history.value[[1, 2, 3]].tolist() == [6, 3, 4]
    history.evicted(slots_of(2), keys_of(4))
    history.evicted(slots_of(), keys_of())
    assert history.native.age == 3


def test_what_comes_back_after_its_eviction_went_too_early() -> None:
    history = ReuseHistory(SLOTS)
    history.stored(slots_of(1, 2), keys_of(1, 2), now=5)
    history.evicted(slots_of(1, 2), keys_of(1, 2))
    history.stored(slots_of(9, 10), keys_of(1, 77), now=8)
    assert history.regretted == 1
    history.stored(slots_of(11), keys_of(1), now=9)  # it was found once
    assert history.regretted == 1


def test_a_recovered_pool_knows_the_order_alone() -> None:
    history = ReuseHistory(SLOTS)
    history.recovered(np.full(SLOTS, 2**32 - 1, np.uint32))
    assert history.value.tolist() == history.uses.tolist() == [1] * SLOTS
    history.loaded(np.arange(SLOTS), now=7)  # a use may lie in the future after times moved back
    assert history.value.tolist() == [2] * SLOTS


@pytest.mark.parametrize("slot", [-1, SLOTS])
def test_no_slot_beyond_the_pool(slot: int) -> None:
    history = ReuseHistory(SLOTS)
    with pytest.raises(AssertionError):
        history.stored(slots_of(slot), keys_of(1), now=1)
    with pytest.raises(AssertionError):
        history.loaded(slots_of(slot), now=1)
