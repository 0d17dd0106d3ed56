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
        self.ring: list[int | None] = [None] * slots  # by place; empty if the key came back
        self.oldest = self.regretted = 0
        self.gaps = [0] * 33
        self.references = self.since = 0
        self.hits = self.hits_by_uses = self.hits_by_recency = 0.0

    def gap(self, now: int, then: int) -> None:
        self.gaps[(now - then).bit_length()] += 1
        if sum(self.gaps) >= 8 * self.slots:
            self.gaps = [count // 2 for count in self.gaps]

    def reference(self, now: int, uses: int, then: int) -> None:
        """Counts a reference to an object that had so many uses, the last of them then."""
        if uses:
            known = [count for count in self.uses if count]
            known += [ghost[0] for ghost in self.ghosts.values() if ghost is not None]
            more = sum(count > uses for count in known)
            share = (self.slots - more) / known.count(uses)
            self.hits_by_uses += min(1.0, max(0.0, share))
            passed = now - self.since
            self.hits_by_recency += (now - then) * self.references <= self.slots * passed
        self.references += 1
        if self.references >= 16 * self.slots:
            self.references, self.since = self.references // 2, (self.since + now) // 2
            self.hits, self.hits_by_uses = self.hits / 2, self.hits_by_uses / 2
            self.hits_by_recency /= 2

    def stored(self, slot: int, key: int, now: int) -> None:
        ghost = self.ghosts.get(key) or (0, 0)
        self.reference(now, *ghost)
        self.uses[slot] = min(255, ghost[0] + 1)
        if key in self.ghosts:
            del self.ghosts[key]
            self.ring[self.ring.index(key)] = None
            self.regretted += 1
            self.gap(now, ghost[1])
        self.used[slot] = now

    def loaded(self, slot: int, now: int) -> None:
        if self.used[slot] != now:
            self.hits += 1
            self.gap(now, self.used[slot])
            self.reference(now, self.uses[slot], self.used[slot])
            self.used[slot], self.uses[slot] = now, min(255, self.uses[slot] + 1)

    def evicted(self, slot: int, key: int) -> None:
        replaced = self.ring[self.oldest]
        if replaced is not None:
            del self.ghosts[replaced]
        self.ghosts[key] = self.uses[slot], self.used[slot]
        self.uses[slot] = 0
        self.ring[self.oldest] = key
        self.oldest = (self.oldest + 1) % len(self.ring)


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
        assert history.native.references == model.references
        hits, by_uses, by_recency = history.native.hits
        assert (hits, by_recency) == (model.hits, model.hits_by_recency)
        assert by_uses == pytest.approx(model.hits_by_uses)
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


def test_as_many_evicted_keys_are_remembered_as_there_are_slots() -> None:
    history = ReuseHistory(SLOTS)
    for key in range(SLOTS + 1):
        history.stored(slots_of(0), keys_of(key), now=key + 1)
        history.evicted(slots_of(0), keys_of(key))
    history.stored(slots_of(0, 1), keys_of(0, 1), now=1000)
    assert history.uses[:2].tolist() == [1, 2], "the first key is forgotten, the second is not"


def test_a_put_that_may_be_refused_counts_as_one_use() -> None:
    history = ReuseHistory(SLOTS)
    assert history.missed(keys_of(1, 2), now=5) == 1
    assert history.missed(keys_of(2, 3), now=7) == 2
    assert history.missed(keys_of(2), now=7) == 2, "the same use"
    history.stored(slots_of(4, 5), keys_of(2, 1), now=7)
    assert history.uses[4:6].tolist() == [2, 2]
    assert history.regretted == 1, "the put of the other key was refused"
    history.stored(slots_of(6), keys_of(2), now=8)
    assert history.uses[6] == 1, "a stored key is not remembered"


def test_a_put_during_which_others_come_counts_as_one_use() -> None:
    history = ReuseHistory(SLOTS)
    history.missed(keys_of(1), now=5)
    assert history.missed(keys_of(1), now=7) == 2
    assert history.missed(keys_of(1), now=9, since=7) == 2
    history.stored(slots_of(0), keys_of(1), now=9)
    assert history.uses[0] == 2
    assert history.missed(keys_of(2), now=9, since=7) == 1, "not counted before"


def in_turn(history: ReuseHistory, keys: int, first: int, operations: int) -> None:
    """Stores so many keys in turn, each in place of the one that was stored first."""
    for now in range(first, first + operations):
        slot = slots_of(now % SLOTS)
        if now > SLOTS:
            history.evicted(slot, keys_of((now - SLOTS) % keys))
        history.stored(slot, keys_of(now % keys), now=now)
        history.choose()


def test_few_uses_go_first_while_what_is_in_use_does_not_fit() -> None:
    history = ReuseHistory(SLOTS, chooses=True)
    in_turn(history, 3 * SLOTS // 2, 1, 8 * SLOTS)
    assert history.by_uses, "a part of the keys would be kept, none if those used last were"
    in_turn(history, 2, 8 * SLOTS + 1, 24)
    assert not history.by_uses, "both keys would be found again"


def test_objects_that_are_kept_can_be_replaced_after_their_last_use() -> None:
    history = ReuseHistory(SLOTS, chooses=True)
    in_turn(history, 3 * SLOTS // 2, 1, 8 * SLOTS)
    assert history.by_uses
    for now in range(8 * SLOTS + 1, 64 * SLOTS):
        history.missed(keys_of(now), now)
        history.choose()
    assert not history.by_uses, "or each later put would be refused, too"


def test_few_uses_go_first_only_if_that_finds_more() -> None:
    unable, fits = ReuseHistory(SLOTS), ReuseHistory(SLOTS, chooses=True)
    in_turn(unable, 3 * SLOTS // 2, 1, 16 * SLOTS)
    assert not unable.by_uses
    fits.stored(np.arange(SLOTS // 2), keys_of(*range(SLOTS // 2)), now=1)
    for now in range(2, 100):
        fits.loaded(np.arange(SLOTS // 2), now)
        fits.choose()
    assert not fits.by_uses, "all hit"


def test_the_rate_of_references_begins_with_an_opening() -> None:
    """A reopened pool goes on from the time of its records, which is a large number."""
    history, opened = ReuseHistory(SLOTS), 28_000_000
    history.recovered(now=opened)
    in_turn(history, 3 * SLOTS // 2, opened + 1, 8 * SLOTS)
    _, by_uses, by_recency = history.native.hits
    assert by_uses > by_recency == 0, "more keys than slots, in turn"


def test_no_gap_begins_before_an_opening() -> None:
    history = ReuseHistory(SLOTS)
    assert history.lifetime_bits == 0
    history.recovered(now=2**31 - 1)
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
