"""The native verbs and their model in Python do the same to the same bytes."""

from __future__ import annotations

import ctypes
import struct

import pytest
from gio_uring.ring_model import ControllerQueueStruct, ModelController, ModelQueuePair
from hypothesis import given
from hypothesis import strategies as st

from tutti.errors import ConfigError
from tutti.gio_uring import _native
from tutti.gio_uring.nvme_spec import Sqe
from tutti.gio_uring.queue_pair import (
    COMPLETED,
    NO_CID,
    QueueLayout,
    QueuePair,
)

COUNTERS = ("ticket", "tail", "cq_head", "cid_hint")
CONTROLLER_COUNTERS = ("sq_head", "sq_tail", "cq_tail", "cq_head")
QID = 5


class Replay:
    """One queue pair twice: in native code and as the model. Every step compares all of it."""

    def __init__(self, depth: int, start: int) -> None:
        self.lib = _native.lib()
        self.native = QueuePair(depth, QID)
        self.model = ModelQueuePair(depth)
        self.model_controller = ModelController(self.model, QID)
        self.queue = ControllerQueueStruct(depth=depth, qid=QID)
        for name in ("sq", "cq", "sq_doorbell", "cq_doorbell"):
            setattr(self.queue, name, getattr(self.native.struct, name))
        for name in ("ticket", "tail", "cq_head"):
            setattr(self.native.struct, name, start)
            setattr(self.model, name, start)
        for name in ("sq_head", "cq_tail"):
            setattr(self.queue, name, start)
            setattr(self.model_controller, name, start)
        self.address = self.native.struct_address
        self.submitted: set[int] = set()
        self.fetched: list[int] = []
        self.posted: set[int] = set()

    def compare(self) -> None:
        shared = self.model.layout.queue_pair
        assert self.native.memory.array[:shared].tobytes() == self.model.memory[:shared]
        for name in COUNTERS:
            assert getattr(self.native.struct, name) == getattr(self.model, name), name
        for name in CONTROLLER_COUNTERS:
            assert getattr(self.queue, name) == getattr(self.model_controller, name), name
        assert (self.native.struct.tail_lock, self.native.struct.cq_lock) == (0, 0)

    def acquire_and_enqueue(self, salt: int) -> None:
        cid = self.lib.gio_qp_cid_acquire(self.address)
        assert cid == self.model.cid_acquire()
        outstanding = len(self.submitted) + len(self.fetched) + len(self.posted)
        assert (cid == NO_CID) == (outstanding == self.model.depth - 1)
        if cid != NO_CID:
            assert cid not in self.submitted | self.posted | set(self.fetched)
            words = [cid << 16 | 2, *((salt * (i + 3)) & 0xFFFFFFFF for i in range(15))]
            sqe = struct.pack("<16I", *words)
            self.lib.gio_qp_sq_enqueue(self.address, sqe)
            self.model.sq_enqueue(sqe)
            self.submitted.add(cid)

    def ring(self, _: int) -> None:
        self.lib.gio_qp_sq_ring(self.address)
        self.model.sq_ring()

    def fetch(self, _: int) -> None:
        sqe = Sqe()
        is_fetched = self.lib.gio_queue_sq_fetch(ctypes.byref(self.queue), ctypes.byref(sqe))
        expected = self.model_controller.sq_fetch()
        assert (bytes(sqe) if is_fetched else None) == expected
        if is_fetched:
            self.submitted.remove(sqe.cdw0 >> 16)
            self.fetched.append(sqe.cdw0 >> 16)

    def post(self, salt: int) -> None:
        if self.fetched:
            cid = self.fetched[salt % len(self.fetched)]
            status = salt % 0x800
            is_posted = self.lib.gio_queue_cq_post(ctypes.byref(self.queue), cid, status)
            assert bool(is_posted) == self.model_controller.cq_post(cid, status)
            assert is_posted, "at most depth - 1 commands exist, so there is always room"
            self.fetched.remove(cid)
            self.posted.add(cid)

    def reap(self, salt: int) -> None:
        count = salt % 40
        assert self.lib.gio_qp_cq_reap(self.address, count) == self.model.cq_reap(count)

    def release(self, salt: int) -> None:
        done = [c for c in sorted(self.posted) if self.model.completion(c) & COMPLETED]
        for cid in self.posted:
            assert self.lib.gio_qp_completion(self.address, cid) == self.model.completion(cid)
        if done:
            cid = done[salt % len(done)]
            self.lib.gio_qp_cid_release(self.address, cid)
            self.model.cid_release(cid)
            self.posted.remove(cid)


VERBS = (Replay.acquire_and_enqueue, Replay.ring, Replay.fetch, Replay.post)
VERBS += (Replay.reap, Replay.release)
STEPS = st.lists(st.tuples(st.integers(0, len(VERBS) - 1), st.integers(0, 2**32 - 1)), max_size=120)


@given(depth=st.sampled_from([2, 4, 8, 32, 64]), wraps=st.booleans(), steps=STEPS)
def test_native_verbs_follow_the_model(
    depth: int, wraps: bool, steps: list[tuple[int, int]]
) -> None:
    replay = Replay(depth, start=2**32 - 2 * depth if wraps else 0)
    replay.compare()
    for verb, salt in steps:
        VERBS[verb](replay, salt)
        replay.compare()


@given(depth=st.sampled_from([2, 4, 64]), salts=st.lists(st.integers(0, 2**32 - 1), max_size=200))
def test_laps_without_a_full_queue(depth: int, salts: list[int]) -> None:
    """Whole commands one after another, so that long traces pass every slot and both phases."""
    replay = Replay(depth, start=2**32 - 2 * depth)
    for salt in salts:
        for verb in VERBS[:5]:
            verb(replay, salt | 1)
        replay.reap(32)
        replay.release(salt)
        replay.compare()
    assert not replay.posted


def test_a_full_completion_queue_refuses() -> None:
    """A submitter that never reaps: the controller keeps its answer instead of overwriting."""
    replay = Replay(4, start=0)
    for i in range(3):
        assert replay.lib.gio_queue_cq_post(ctypes.byref(replay.queue), i, 0)
        assert replay.model_controller.cq_post(i, 0)
    assert not replay.lib.gio_queue_cq_post(ctypes.byref(replay.queue), 3, 0)
    assert not replay.model_controller.cq_post(3, 0)
    replay.compare()


@pytest.mark.parametrize("depth", [2, 32, 64, 1024])
def test_layout_keeps_the_parts_apart(depth: int) -> None:
    layout = QueueLayout(depth)
    sizes = {
        "sq": 64 * depth,
        "cq": 16 * depth,
        "sq_doorbell": 64,
        "cq_doorbell": 64,
        "marks": 4 * depth,
        "cid_free": 4 * layout.cid_words,
        "completions": 4 * depth,
        "queue_pair": 192,
    }
    end = 0
    for name, nbytes in sizes.items():
        start = getattr(layout, name)
        assert start >= end
        assert start % (4096 if name in ("sq", "cq") else 64) == 0
        end = start + nbytes
    assert layout.nbytes >= end
    free = sum(word.bit_count() for word in layout.free_cids())
    assert free == depth - 1


@pytest.mark.parametrize("depth", [-2, 0, 1, 3, 1 << 17])
def test_bad_depth(depth: int) -> None:
    with pytest.raises(ConfigError, match="power of two"):
        QueueLayout(depth)
