"""Uses of objects and the gaps between them, keys that come back, and what a new opening knows."""

from __future__ import annotations

from collections import OrderedDict

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


class Model:
    """The same in plain Python."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.uses, self.used = [0] * slots, [0] * slots
        self.ghosts: OrderedDict[int, tuple[int, int] | None] = OrderedDict()
        self.ring: list[int | None] = [None] * slots  # by place; a key that came back left it empty
        self.oldest = self.regretted = 0
        self.gaps = [0] * 33

    def gap(self, now: int, then: int) -> None:
        self.gaps[(now - then).bit_length()] += 1
        if sum(self.gaps) >= 8 * self.slots:
            self.gaps = [count // 2 for count in self.gaps]

    def stored(self, slot: int, key: int, now: int) -> None:
        self.uses[slot] = 1
        if key in self.ghosts:
            ghost = self.ghosts.pop(key)
            assert ghost is not None
            self.ring[self.ring.index(key)] = None
            self.uses[slot] = min(255, ghost[0] + 1)
            self.regretted += 1
            self.gap(now, ghost[1])
        self.used[slot] = now

    def loaded(self, slot: int, now: int) -> None:
        if self.used[slot] != now:
            self.gap(now, self.used[slot])
            self.used[slot], self.uses[slot] = now, min(255, self.uses[slot] + 1)

    def evicted(self, slot: int, key: int) -> None:
        replaced = self.ring[self.oldest]
        if replaced is not None:
            del self.ghosts[replaced]
        self.ghosts[key] = self.uses[slot], self.used[slot]
        self.ring[self.oldest] = key
        self.oldest = (self.oldest + 1) % self.slots


@pytest.mark.parametrize("slots", [1, 7, SLOTS])
def test_agrees_with_the_model(slots: int, rng: np.random.Generator) -> None:
    history, model = ReuseHistory(slots), Model(slots)
    holds: dict[int, int] = {}
    for now in range(1, 3000):
        slot, key = int(rng.integers(slots)), int(rng.integers(3 * slots))
        if slot in holds and rng.random() < 0.6:
            history.loaded(slots_of(slot, slot), now)
            model.loaded(slot, now)
            continue
        if slot in holds:
            history.evicted(slots_of(slot), keys_of(holds[slot]))
            model.evicted(slot, holds.pop(slot))
        if key not in holds.values():
            history.stored(slots_of(slot), keys_of(key), now)
            model.stored(slot, key, now)
            holds[slot] = key
        assert history.uses.tolist() == model.uses
        assert history.regretted == model.regretted
        assert history._gaps.tolist() == model.gaps
    assert model.regretted > 100
    bits = history.lifetime_bits
    assert 8 * sum(model.gaps[: bits + 1]) >= 7 * sum(model.gaps) > 8 * sum(model.gaps[:bits])


def test_an_object_is_used_when_it_is_stored_and_once_by_each_load() -> None:
    history = ReuseHistory(SLOTS)
    history.stored(slots_of(3), keys_of(3), now=1)
    assert history.uses[3] == 1
    for load in range(300):
        history.loaded(slots_of(3, 3), now=2 + load)
        assert history.uses[3] == min(2 + load, 255)


def test_what_comes_back_after_its_eviction_went_too_early_and_has_its_uses() -> None:
    history = ReuseHistory(SLOTS)
    history.stored(slots_of(1, 2), keys_of(1, 2), now=5)
    history.loaded(slots_of(1), now=6)
    history.evicted(slots_of(1, 2), keys_of(1, 2))
    history.stored(slots_of(9, 10), keys_of(1, 77), now=8)
    assert (history.regretted, history.uses[9], history.uses[10]) == (1, 3, 1)
    history.stored(slots_of(11), keys_of(1), now=9)  # it was found once
    assert (history.regretted, history.uses[11]) == (1, 1)


def test_no_gap_begins_before_an_opening() -> None:
    history = ReuseHistory(SLOTS)
    assert history.lifetime_bits == 0
    history.recovered()
    history.loaded(np.arange(SLOTS), now=2**31)
    assert history.uses.tolist() == [2] * SLOTS
    assert history.lifetime_bits == 0
    history.loaded(slots_of(4), now=2**31 + 5)
    assert history.lifetime_bits == 3
    history.loaded(slots_of(4), now=7)  # times moved back: one gap is too long
    assert history.uses[4] == 4


@pytest.mark.parametrize("slot", [-1, SLOTS])
def test_no_slot_beyond_the_pool(slot: int) -> None:
    history = ReuseHistory(SLOTS)
    with pytest.raises(AssertionError):
        history.stored(slots_of(slot), keys_of(1), now=1)
    with pytest.raises(AssertionError):
        history.loaded(slots_of(slot), now=1)
    with pytest.raises(AssertionError):
        history.evicted(slots_of(slot), keys_of(1))
