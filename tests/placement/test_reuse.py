"""What loads teach: classes, ages, keys that come back, and what survives a new opening."""

from __future__ import annotations

import numpy as np
import pytest

from tutti.base.arrays import Keys, Slots
from tutti.placement.reuse import BUCKETS, LEVELS, ReuseHistory

SLOTS = 64


def keys_of(*numbers: int) -> Keys:
    words = np.zeros((len(numbers), 2), np.uint64)
    words[:, 0] = np.array(numbers, np.uint64) + np.uint64(1)
    return words.view(np.uint8)


def slots_of(*numbers: int) -> Slots:
    return np.array(numbers, np.int64)


def resident(*slots: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    mask = np.zeros(SLOTS, np.bool_)
    mask[list(slots)] = True
    return mask


def test_before_anything_was_learnt_the_order_is_that_of_recency() -> None:
    history = ReuseHistory(SLOTS)
    worth = history.worth(np.arange(SLOTS, dtype=np.uint32), 10_000)
    assert (np.diff(worth) >= 0).all()
    far = history.worth(np.geomspace(1, 10_000, SLOTS).astype(np.uint32), 20_000)
    assert far[-1] > far[0]


def test_a_class_counts_loads_up_to_its_end() -> None:
    history = ReuseHistory(SLOTS)
    history.stored(slots_of(3), keys_of(3), now=1)
    for load in range(1, LEVELS + 3):
        history.loaded(slots_of(3, 3), now=1 + load)  # twice in one load is one use
        assert history.level[3] == min(load, LEVELS - 1)


def test_a_key_that_comes_back_keeps_its_class_and_is_regretted() -> None:
    history = ReuseHistory(SLOTS)
    history.stored(slots_of(1, 2), keys_of(1, 2), now=5)
    history.loaded(slots_of(1), now=6)
    history.evicted(slots_of(1, 2), keys_of(1, 2), resident(), now=7)
    history.stored(slots_of(9, 10), keys_of(1, 77), now=8)
    assert history.regretted == 1
    assert history.level[[9, 10]].tolist() == [2, 0]
    history.stored(slots_of(11), keys_of(1), now=9)  # it was found once
    assert history.regretted == 1


def test_what_is_loaded_again_is_worth_more_than_what_never_is() -> None:
    history = ReuseHistory(SLOTS)
    now = 1
    for turn in range(200):
        now += 10
        # Slot 0 holds a key that is loaded every turn; the others come and are evicted.
        if turn == 0:
            history.stored(slots_of(0), keys_of(1), now)
        history.loaded(slots_of(0), now)
        history.stored(slots_of(1), keys_of(1000 + turn), now)
        history.evicted(slots_of(1), keys_of(1000 + turn), resident(0), now + 40)
    access = np.full(SLOTS, now, np.uint32)
    worth = history.worth(access, now + 5)
    assert worth[0] > 4 * worth[1]


def test_a_page_is_worth_at_least_as_much_as_its_continuation(seed: int) -> None:
    rng = np.random.default_rng(seed)
    history = ReuseHistory(SLOTS)
    now = 1
    for _ in range(300):
        now += int(rng.integers(1, 50))
        slots = np.unique(rng.integers(0, SLOTS, 8))
        history.loaded(slots, now)
        gone = np.unique(rng.integers(0, SLOTS, 4))
        numbers = rng.integers(0, 200, gone.size).tolist()
        history.evicted(gone, keys_of(*numbers), resident(), now)
        history.stored(gone, keys_of(*numbers), now)
    for age in (1, 10, 1000, 100_000):
        history.level[:LEVELS] = np.arange(LEVELS)
        worth = history.worth(np.full(SLOTS, 1, np.uint32), 1 + age)[:LEVELS]
        assert (np.diff(worth) >= 0).all()


@pytest.mark.parametrize("now", [1, 2**32 - 1])
def test_times_at_the_ends_of_their_range_are_counted(now: int) -> None:
    history = ReuseHistory(SLOTS)
    history.recovered(np.full(SLOTS, 2**32 - 1, np.uint32))
    history.loaded(np.arange(SLOTS), now)  # a use may lie in the future after times moved back
    history.evicted(np.arange(SLOTS), keys_of(*range(SLOTS)), resident(), now)
    assert np.isfinite(history.worth(history.used, now)).all()
    assert history.worth(np.zeros(SLOTS, np.uint32), 2**32 - 1).size == SLOTS
    assert BUCKETS == 256
