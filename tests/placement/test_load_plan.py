"""What a load begins with: its slots, their digests, and what is counted."""

from __future__ import annotations

import numpy as np
import pytest
from placement.test_index import as_slots, filled, make_keys

from tutti.errors import CapacityError
from tutti.placement.digest_cache import DigestCache
from tutti.placement.index import Index, SlotState
from tutti.placement.load_plan import LoadPlanner
from tutti.placement.reuse import ReuseHistory

LAYERS = 3


def planner(index: Index) -> tuple[LoadPlanner, ReuseHistory, DigestCache]:
    history, digests = ReuseHistory(index.slots), DigestCache(index.slots, LAYERS)
    return LoadPlanner(index, history, digests, 4), history, digests


def test_a_load_pins_all_of_its_keys_or_none() -> None:
    index = filled(8, 5)
    loads, history, _ = planner(index)
    plan = loads.begin(make_keys([0, 1, 3, 1]), verify=True)
    assert plan.slots.tolist() == [0, 1, 3, 1] and plan.runs == 3
    assert plan.sequences.tolist() == [100, 101, 103, 101]
    assert index.pins.tolist() == [1, 2, 0, 1, 0, 0, 0, 0]
    assert index.hits[:4].tolist() == [1, 2, 0, 1]
    assert history.uses[:4].tolist() == [1, 1, 0, 1], "twice in one load is one use"
    assert (index.access[[0, 1, 3]] == index.uses).all()
    with pytest.raises(LookupError, match="2"):
        loads.begin(make_keys([0, 1, 7, 2]), verify=True)
    assert index.pins.tolist() == [1, 2, 0, 1, 0, 0, 0, 0]
    plan = loads.begin(make_keys([3, 4]), verify=True)
    assert plan.runs == 2, "a run ends with its group"
    assert loads.begin(make_keys([]), verify=True).slots.size == 0
    with pytest.raises(AssertionError, match="16 bytes"):
        loads.begin(make_keys([0])[:, :8].copy(), verify=True)


def test_an_object_with_as_many_transfers_as_can_be_counted_is_missed() -> None:
    index = filled(8, 3)
    loads, _, _ = planner(index)
    index.pins[1] = 0xFFFE
    with pytest.raises(LookupError, match="3"):
        loads.begin(make_keys([0, 1, 0, 1]), verify=True)
    with pytest.raises(CapacityError, match="try again"):
        index.pin(as_slots(0, 1))
    assert index.pins.tolist() == [0, 0xFFFE, 0, 0, 0, 0, 0, 0]
    index.pin(as_slots(1))
    assert index.pins[1] == 0xFFFF


@pytest.mark.parametrize("verify", [True, False])
def test_digests_are_copied_where_they_are_known_and_wanted(verify: bool) -> None:
    index = filled(8, 3)
    index._numbers[:5] |= np.uint64(1 << 63)
    index.insert(as_slots(4), make_keys([9]), 7, 0, state=SlotState.UNPROVEN, has_digests=True)
    loads, history, digests = planner(index)
    written = np.arange(12, dtype=np.uint64).reshape(4, LAYERS)
    # That of slot 2 is of an object that was there before.
    digests.put(as_slots(0, 2, 4, 6), np.array([100, 1, 7, 0], np.uint64), written)
    plan = loads.begin(make_keys([0, 1, 2, 9]), verify=verify)
    assert plan.marks.tolist() == [2 + 4 * verify, 2, 2, 7]
    assert plan.digests[3].tolist() == written[2].tolist()
    if verify:
        assert plan.digests[0].tolist() == written[0].tolist()
    assert history.uses[:5].tolist() == [1, 1, 1, 0, 0], "an unproven object was not used yet"
