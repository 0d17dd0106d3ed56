"""The index: against a dict, and its states, pins and clock one by one."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from integrity import check_index

from tutti.placement.index import CLOCK_MAX, MISSING, Index, SlotState
from tutti.placement.reuse import ReuseHistory

UNIVERSE = 40


def make_keys(numbers: npt.ArrayLike) -> npt.NDArray[np.uint8]:
    """Distinct keys for distinct numbers; alike in half their bytes, as an attacker's might be."""
    words = np.zeros((np.size(numbers), 2), np.uint64)
    words[:, 1] = np.asarray(numbers, np.uint64)
    return words.view(np.uint8)


def as_slots(*slots: int) -> npt.NDArray[np.int64]:
    return np.array(slots, np.int64)


def filled(slots: int, held: int) -> Index:
    """An index whose first `held` slots are READY and hold the keys 0, 1, 2..."""
    index = Index(slots, seed=1)
    numbers = np.arange(held)
    index.insert(numbers, make_keys(numbers), numbers + 100, numbers, state=SlotState.READY)
    return index


class IndexModel(RuleBasedStateMachine):
    """The index against a dict from key number to slot, and a dict from slot to state."""

    SLOTS = 24

    def __init__(self) -> None:
        super().__init__()
        self.index = Index(self.SLOTS, seed=7)
        self.slot_of: dict[int, int] = {}
        self.state = dict.fromkeys(range(self.SLOTS), SlotState.FREE)

    def in_state(self, *states: SlotState) -> list[int]:
        return [slot for slot, state in self.state.items() if state in states]

    @precondition(lambda self: self.slot_of)
    @rule(data=st.data(), tenant=st.integers(0, 2))
    def name(self, data: st.DataObject, tenant: int) -> None:
        owners = st.sampled_from(sorted(self.slot_of.values()))
        slots = as_slots(*data.draw(st.lists(owners, unique=True)))
        self.index.describe(slots, tenant=tenant)

    @precondition(lambda self: self.in_state(SlotState.FREE, SlotState.VOIDED))
    @rule(data=st.data(), state=st.sampled_from([2, 3, 4]).map(SlotState))
    def insert(self, data: st.DataObject, state: SlotState) -> None:
        free = self.in_state(SlotState.FREE, SlotState.VOIDED)
        slots = data.draw(st.lists(st.sampled_from(free), unique=True, max_size=8))
        if any(self.state[slot] == SlotState.VOIDED for slot in slots):
            state = SlotState.WRITING
        numbers = data.draw(
            st.lists(st.integers(0, UNIVERSE), min_size=len(slots), max_size=len(slots))
        )
        expected = []
        for slot, number in zip(slots, numbers, strict=True):
            expected.append(self.slot_of.get(number, MISSING))
            if number not in self.slot_of:
                self.slot_of[number] = slot
                self.state[slot] = state
        answer = self.index.insert(as_slots(*slots), make_keys(numbers), 1, 0, state=state)
        assert answer.tolist() == expected

    @precondition(lambda self: self.slot_of)
    @rule(data=st.data(), state=st.sampled_from([0, 5, 6]).map(SlotState))
    def remove(self, data: st.DataObject, state: SlotState) -> None:
        numbers = data.draw(st.lists(st.sampled_from(sorted(self.slot_of)), unique=True))
        if state == SlotState.FREE:
            writing = self.in_state(SlotState.WRITING)
            numbers = [number for number in numbers if self.slot_of[number] not in writing]
        slots = [self.slot_of.pop(number) for number in numbers]
        self.index.remove(as_slots(*slots), state)
        self.state.update(dict.fromkeys(slots, state))

    @rule()
    def finish(self) -> None:
        for before, after in ((2, 3), (6, 1)):
            slots = self.in_state(SlotState(before))
            self.index.set_state(as_slots(*slots), SlotState(after))
            self.state.update(dict.fromkeys(slots, SlotState(after)))

    @rule()
    def clear(self) -> None:
        self.finish()
        assert sorted(self.index.clear()) == sorted(self.slot_of.values())
        self.slot_of.clear()
        for slot in self.in_state(*(set(SlotState) - {SlotState.QUARANTINED})):
            self.state[slot] = SlotState.FREE

    @rule(numbers=st.lists(st.integers(0, UNIVERSE), max_size=70))
    def look_up(self, numbers: list[int]) -> None:
        keys = make_keys(numbers)
        found = [self.slot_of.get(number, MISSING) for number in numbers]
        assert self.index.find(keys).tolist() == found
        prefix = []
        for slot in found:
            if slot == MISSING or self.state[slot] == SlotState.WRITING:
                break
            prefix.append(slot)
        assert self.index.match(keys).tolist() == prefix

    @invariant()
    def agrees(self) -> None:
        check_index(self.index)
        assert self.index.state.tolist() == [self.state[slot] for slot in range(self.SLOTS)]
        numbers = self.index.counts()
        assert numbers == {state: len(self.in_state(state)) for state in SlotState}


TestIndexModel = IndexModel.TestCase


def test_churn_at_full_load_against_a_dict(rng: np.random.Generator) -> None:
    slots = 3000
    index = Index(slots)
    slot_of: dict[int, int] = {}
    free = list(range(slots))
    for _ in range(60):
        numbers = rng.choice(100_000, int(rng.integers(1, len(free) + 1)), replace=False)
        chosen = [free.pop() for _ in numbers]
        answer = index.insert(as_slots(*chosen), make_keys(numbers), 0, 0, state=SlotState.READY)
        for number, slot, existing in zip(numbers.tolist(), chosen, answer.tolist(), strict=True):
            assert existing == slot_of.get(number, MISSING)
            if existing == MISSING:
                slot_of[number] = slot
            else:
                free.append(slot)
        held = rng.permutation(sorted(slot_of))
        gone = [slot_of.pop(int(number)) for number in held[: len(held) // 2]]
        index.remove(as_slots(*gone), SlotState.FREE)
        free += gone
        check_index(index)
        numbers = np.arange(100_000)[:: int(rng.integers(1, 50))]
        expected = [slot_of.get(number, MISSING) for number in numbers.tolist()]
        assert index.find(make_keys(numbers)).tolist() == expected


def test_match_stops_at_a_gap_and_at_a_slot_in_writing() -> None:
    index = filled(16, 6)
    index.insert(as_slots(6), make_keys([6]), 1, 6)
    assert index.match(make_keys([0, 1, 2])).tolist() == [0, 1, 2]
    assert index.match(make_keys([3, 99, 4])).tolist() == [3]
    assert index.match(make_keys([5, 6])).tolist() == [5]
    assert index.match(make_keys([99, 0])).size == 0
    assert index.match(make_keys([])).size == 0
    assert index.match(make_keys([0, 99, 1, 99, 2])[::2]).tolist() == [0, 1, 2]
    index.set_state(as_slots(6), SlotState.READY)
    assert index.match(make_keys([5, 6])).tolist() == [5, 6]


def test_look_answers_for_every_key_on_its_own_as_one_lookup() -> None:
    index = filled(16, 6)
    index.insert(as_slots(6), make_keys([6]), 1, 6)
    index.insert(as_slots(9), make_keys([9]), 1, 0, state=SlotState.UNPROVEN)
    before = index.uses
    assert index.look(make_keys([99, 3, 6, 9, 0])).tolist() == [-1, 3, -1, 9, 0]
    assert index.uses == before + 1
    assert np.flatnonzero(index.access == index.uses).tolist() == [0, 3, 9]
    assert np.flatnonzero(index.busy()).tolist() == [6], "6 is being written"
    assert index.look(make_keys([])).size == 0


def test_unproven_slots_match() -> None:
    index = Index(4)
    index.insert(as_slots(2), make_keys([5]), 1, 0, state=SlotState.UNPROVEN)
    assert index.match(make_keys([5])).tolist() == [2]


@pytest.mark.parametrize("before", SlotState)
@pytest.mark.parametrize("after", SlotState)
def test_only_the_listed_transitions_are_allowed(before: SlotState, after: SlotState) -> None:
    allowed = {
        SlotState.FREE: "VOIDED VOIDING QUARANTINED",
        SlotState.VOIDED: "FREE QUARANTINED",
        SlotState.WRITING: "READY",
        SlotState.READY: "",
        SlotState.UNPROVEN: "READY",
        SlotState.QUARANTINED: "VOIDING",
        SlotState.VOIDING: "VOIDED QUARANTINED",
    }
    index = Index(1)
    index.state[0] = before
    if after.name in allowed[before].split():
        index.set_state(as_slots(0), after)
        assert index.state[0] == after
    else:
        with pytest.raises(AssertionError):
            index.set_state(as_slots(0), after)
        assert index.state[0] == before


def test_pins_in_flight_count_and_do_not_expire() -> None:
    index = filled(8, 4)
    index.pin(as_slots(0, 1, 1))
    index.pin(as_slots(1))
    for _ in range(5):
        index.match(make_keys([3]))
    assert np.flatnonzero(index.busy()).tolist() == [0, 1]
    index.unpin(as_slots(0, 1))
    index.unpin(as_slots(1, 1))
    assert not index.busy().any()
    with pytest.raises(AssertionError, match="more often"):
        index.unpin(as_slots(1))
    with pytest.raises(AssertionError, match="more often"):
        index.unpin(as_slots(0))
    with pytest.raises(AssertionError, match="without a key"):
        index.pin(as_slots(5))


def test_a_slot_in_flight_is_quarantined_but_never_given_up() -> None:
    index = filled(4, 2)
    index.pin(as_slots(0))
    for state in (SlotState.VOIDING, SlotState.FREE):
        with pytest.raises(AssertionError, match="in flight"):
            index.remove(as_slots(0), state)
    index.remove(as_slots(0), SlotState.QUARANTINED)
    assert index.find(make_keys([0])).tolist() == [MISSING]
    with pytest.raises(AssertionError, match="in flight"):
        index.set_state(as_slots(0), SlotState.VOIDING)
    index.unpin(as_slots(0))
    index.set_state(as_slots(0), SlotState.VOIDING)
    check_index(index)


def test_insert_writes_the_columns_of_new_keys_only() -> None:
    index = filled(8, 2)
    answer = index.insert(
        as_slots(4, 5, 6),
        make_keys([7, 1, 7]),
        np.array([20, 21, 22]),
        np.array([3, 4, 5]),
        has_digests=np.array([True, True, True]),
    )
    assert answer.tolist() == [MISSING, 1, 4]
    assert index.sequence(as_slots(4, 5, 6)).tolist() == [20, 0, 0]
    assert index.depth[[1, 4]].tolist() == [1, 3]
    assert index.has_digests(np.arange(8)).tolist() == [slot == 4 for slot in range(8)]
    assert index.state[[4, 5, 6]].tolist() == [SlotState.WRITING, SlotState.FREE, SlotState.FREE]


def test_a_slot_cannot_be_given_twice_or_lie_outside() -> None:
    index = Index(4)
    with pytest.raises(AssertionError, match="twice"):
        index.insert(as_slots(1, 1), make_keys([1, 2]), 0, 0)
    with pytest.raises(AssertionError, match="beyond"):
        index.insert(as_slots(4), make_keys([1]), 0, 0)
    with pytest.raises(AssertionError, match="negative"):
        index.remove(as_slots(-1))
    with pytest.raises(AssertionError, match="16 bytes"):
        index.find(np.zeros((1, 8), np.uint8))
    with pytest.raises(AssertionError, match="16 bytes"):
        index.match(np.zeros((1, 8), np.uint8))


def test_recovered_access_times_stay_in_order_with_later_lookups() -> None:
    index = Index(8)
    index.insert(
        as_slots(0, 1), make_keys([0, 1]), 1, 0, state=SlotState.READY, access=np.array([9000, 50])
    )
    index.match(make_keys([1]))
    assert index.access[1] > index.access[0] > 0


def test_the_clock_wraps_without_losing_order() -> None:
    index = filled(4, 4)
    index.uses = CLOCK_MAX - 4
    index.match(make_keys([1]))
    index.match(make_keys([2]))
    for _ in range(5):
        index.match(make_keys([3]))
    assert index.uses < (1 << 31) + 10, "it did not wrap"
    assert index.access[3] > index.access[2] > index.access[1] > index.access[0]
    check_index(index)


def test_clear_keeps_the_quarantined_and_refuses_work_in_flight() -> None:
    index = filled(8, 5)
    index.remove(as_slots(0), SlotState.QUARANTINED)
    index.insert(as_slots(6), make_keys([50]), 1, 0)
    with pytest.raises(AssertionError, match="being written"):
        index.clear()
    index.set_state(as_slots(6), SlotState.READY)
    index.pin(as_slots(6))
    with pytest.raises(AssertionError, match="in flight"):
        index.clear()
    index.unpin(as_slots(6))
    assert index.clear().tolist() == [1, 2, 3, 4, 6]
    assert index.counts()[SlotState.QUARANTINED] == 1
    assert index.counts()[SlotState.FREE] == 7
    assert index.match(make_keys([1])).size == 0
    check_index(index)


@pytest.mark.parametrize("slots", [1, 1000, 1024, 1025, 100_000])
def test_memory_per_slot_is_bounded(slots: int) -> None:
    index, history = Index(slots), ReuseHistory(slots)
    index.own("hits")  # every load counts them
    assert slots * index.nbytes_per_slot + history.nbytes <= 78 * slots


def test_features_that_no_slot_uses_take_no_memory() -> None:
    index = filled(1 << 12, 20)
    before = index.nbytes_per_slot
    index.describe(as_slots(1, 2))
    assert index.nbytes_per_slot == before
    index.describe(as_slots(3), tenant=7, expiry=9, pinned=True)
    index.own("hits")[3] = 1
    assert index.nbytes_per_slot == before + 2 + 4 + 1 + 2
    read = (index.tenant[3], index.expiry[3], index.pinned[3], index.hits[3])
    assert read == (7, 9, True, 1) and index.hits.sum() == 1
    index.clear()
    assert index.nbytes_per_slot == before and not index.tenant.any()


@pytest.mark.parametrize("count", [8, 200])
def test_absent_keys_are_named_once_and_in_order(count: int, seed: int) -> None:
    index = filled(256, 20)
    numbers = np.random.default_rng(seed).integers(0, 40, count)
    index.begin_use()
    rows = index.absent(make_keys(numbers))
    first = {int(number): row for row, number in reversed(list(enumerate(numbers)))}
    assert rows.tolist() == sorted(row for number, row in first.items() if number >= 20)
    touched = np.unique(numbers[numbers < 20])
    assert (index.access[touched] == index.uses).all()


def test_slots_from_outside_are_refused_before_anything_changes() -> None:
    index = filled(8, 4)
    for slots in (as_slots(0, 8), as_slots(0, -1), as_slots(0, 2**40)):
        with pytest.raises(AssertionError):
            index.set_state(slots, SlotState.VOIDING)
        with pytest.raises(AssertionError):
            index.unpin(slots)
        with pytest.raises(AssertionError):
            index.insert(slots, make_keys([50, 51]), 0, 0)
    assert index.counts()[SlotState.READY] == 4 and not index.pins.any()
