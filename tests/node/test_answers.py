"""Answers that native code writes are the messages that they stand for."""

from __future__ import annotations

import numpy as np
import pytest
from integrity import check_allocator
from placement.test_index import as_slots, make_keys

from tutti.medium.keys import KEY_NBYTES
from tutti.native import NativePutRequest
from tutti.node.messages import HEADER, MoveJob, Plan, body_nbytes, frame, read_reply
from tutti.placement.allocator import Allocator, Placer
from tutti.placement.digest_cache import DigestCache
from tutti.placement.index import Index, SlotState
from tutti.placement.load_plan import LoadPlanner
from tutti.placement.reuse import ReuseHistory

LAYERS, PAGES = 3, 21


def read(answer: memoryview) -> Plan:
    """A message, whose length is right and which MessagePack's own encoder would read as well."""
    assert body_nbytes(answer[: HEADER.size]) == len(answer) - HEADER.size
    plan = read_reply(answer[HEADER.size :])
    assert isinstance(plan, Plan)
    assert read_reply(frame(plan)[HEADER.size :]) == plan
    return plan


def loads() -> tuple[LoadPlanner, Index, DigestCache]:
    index = Index(32)
    slots = np.arange(PAGES, dtype=np.int64)
    index.insert(slots, make_keys(range(PAGES)), 100, 0, has_digests=True)
    index.set_state(slots, SlotState.READY)
    digests = DigestCache(index.slots, LAYERS)
    return LoadPlanner(index, ReuseHistory(index.slots), digests, 8), index, digests


@pytest.mark.parametrize("n", [1, 7, PAGES])
@pytest.mark.parametrize("compare", [True, False])
def test_a_load_that_one_job_moves(n: int, compare: bool) -> None:
    planner, index, cache = loads()
    known = np.arange(PAGES * LAYERS, dtype=np.uint64).reshape(PAGES, LAYERS)
    cache.put(np.arange(PAGES, dtype=np.int64), np.full(PAGES, 100, np.uint64), known)
    plan = planner.answer(make_keys(range(n)).tobytes(), verify=compare, job=2**40 + 3)
    assert plan.answer is not None
    digests = known[:n].tobytes() if compare else b""
    job = MoveJob(2**40 + 3, plan.slots.tobytes(), digests=digests, compare=compare)
    assert read(plan.answer) == Plan(0, [job])
    assert plan.slots.tolist() == list(range(n))
    assert index.pins[:n].all()


def test_a_load_in_several_jobs_has_no_answer_yet() -> None:
    planner, index, cache = loads()
    keys = make_keys(range(4)).tobytes()
    assert planner.answer(keys, verify=True, job=1).answer is None, "digests are not known"
    cache.put(as_slots(0, 1, 2), np.full(3, 100, np.uint64), np.zeros((3, LAYERS), np.uint64))
    assert planner.answer(keys, verify=True, job=1).answer is None, "one is not known"
    assert planner.answer(b"", verify=True, job=1).answer is None, "there is nothing to move"
    before = index.pins.copy()
    with pytest.raises(LookupError, match="1"):
        planner.answer(keys[:KEY_NBYTES] + b"\xff" * KEY_NBYTES, verify=True, job=1)
    assert (index.pins == before).all()


@pytest.mark.parametrize("there", [(), (0, 3, 4), tuple(range(7))])
def test_a_put(there: tuple[int, ...]) -> None:
    index, history, allocator = Index(32), ReuseHistory(32), Allocator(1, 4, 8)
    placer, keys = Placer(index, history, allocator), make_keys(range(7))
    if there:
        own = make_keys(list(there))
        depths = np.zeros(len(there), np.uint32)
        placer.place(own, np.zeros_like(own), depths, 1, has_digests=False)
    parent = make_keys([30]).tobytes()
    request = NativePutRequest(parent=parent, sequence=50, number=9, job=4, depth=11, has_digests=1)
    chain = placer.answer(keys.tobytes(), request)
    new = [row for row in range(7) if row not in there]
    assert chain.count == len(new)
    assert chain.rows.tolist() == new
    assert chain.sequences.tolist() == [50 + row for row in new]
    assert (chain.keys == keys).all()
    assert chain.parents.tobytes() == parent + keys[:-1].tobytes()
    assert chain.depths.tolist() == list(range(11, 18))
    assert index.find(keys[new]).tolist() == chain.slots.tolist()
    rows = np.array(new, "<u4").tobytes() if there else b""
    assert read(chain.answer) == Plan(9, [MoveJob(4, chain.slots.tobytes(), rows)])
    assert allocator.free_slots == 32 - 7
    check_allocator(allocator)
