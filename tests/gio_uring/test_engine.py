"""The host engine over a memory controller: layers in order, digests, gates, time-outs."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from memory_controller import Faults, MemoryController
from waiting import wait_until

from tutti.errors import ConfigError, DeviceTimeout, NativeError, PoolClosed
from tutti.gio_uring import _native
from tutti.gio_uring import nvme_spec as nvme
from tutti.gio_uring.engine import Engine
from tutti.gio_uring.iocb import Extents, PagedMemory
from tutti.gio_uring.job import Job
from tutti.gio_uring.memory import HostBuffer
from tutti.gio_uring.nvme_spec import (
    OPCODE_FLUSH,
    OPCODE_READ,
    OPCODE_WRITE,
    STATUS_CANCELLED,
    STATUS_DIGEST_MISMATCH,
    STATUS_TIMED_OUT,
    STATUS_UNRECOVERED_READ,
)
from tutti.gio_uring.queue_pair import COMPLETED, QueuePair

SEGMENTS = (6000, 2500)  # padded to three blocks of 4096
SLICE_NLB = 3
LAYERS = 3
PAGES = 12


class Rig:
    """A controller, an engine, and paged memory of two segments in three layers."""

    def __init__(self, *, use_sgl: bool = True, depth: int = 16) -> None:
        self.controller = MemoryController([8 << 20])
        self.engine = Engine(
            self.controller,
            depth=depth,
            command_nbytes_max=8 * 4096,
            use_sgl=use_sgl,
        )
        self.buffer = HostBuffer(LAYERS * PAGES * 12288)
        self.region = self.controller.register(self.buffer)
        layer = np.arange(LAYERS, dtype=np.uint64)[:, None] * np.uint64(PAGES * 12288)
        bases = np.uint64(self.buffer.address) + layer + np.array([0, 8192], np.uint64)
        self.memory = PagedMemory(bases, (12288, 12288), SEGMENTS, PAGES)

    def close(self) -> None:
        self.engine.close(5)
        self.region.close()
        self.controller.close()

    def segment(self, page: int, layer: int, k: int) -> np.ndarray:
        start = int(self.memory.bases[layer, k]) - self.buffer.address + page * 12288
        return self.buffer.array[start : start + SEGMENTS[k]]

    def slice_bytes(self, page: int, layer: int) -> bytes:
        return b"".join(self.segment(page, layer, k).tobytes() for k in range(2))

    def submit(self, opcode: int, pages: list[int], **options: object) -> Job:
        """Runs of three and the rest, at LBA 10 and 200, layers 400 blocks apart."""
        counts = [min(3, len(pages)), max(0, len(pages) - 3)]
        extents = Extents([10, 200], [1, 1], counts, SLICE_NLB, 400)
        numbers = self.memory.check_pages(pages)
        return self.engine.submit(opcode, extents, numbers, self.memory, **options)  # type: ignore[arg-type]


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.close()


def test_pages_travel_by_runs(rig: Rig, rng: np.random.Generator) -> None:
    rig.buffer.array[:] = rng.integers(0, 256, rig.buffer.nbytes, dtype=np.uint8)
    sent = [rig.slice_bytes(page, layer) for layer in range(LAYERS) for page in (1, 4, 2, 7, 0)]
    digests = np.zeros((5, LAYERS), np.uint64)
    job = rig.submit(OPCODE_WRITE, [1, 4, 2, 7, 0], digests=digests)
    assert job.wait_released(5)
    assert job.report().status == 0
    expected = [xxhash.xxh3_64_intdigest(content) for content in sent]
    assert digests.T.reshape(-1).tolist() == expected
    rig.buffer.array[:] = 0
    job = rig.submit(OPCODE_READ, [5, 6, 11, 3, 8], digests=digests, compare=True)
    for layer in range(LAYERS):
        assert job.wait_layers(layer + 1, 5)
    assert not job.page_status.any()
    back = [rig.slice_bytes(page, layer) for layer in range(LAYERS) for page in (5, 6, 11, 3, 8)]
    assert back == sent
    # The padding of the medium never touches the caller's memory.
    assert not rig.buffer.array[6000:8192].any()


def test_layers_become_ready_in_order(rig: Rig) -> None:
    rig.controller.set_faults(
        Faults(seed=5, delay_ppm=500_000, delay_turns=20, reorder_ppm=300_000)
    )
    job = rig.submit(OPCODE_READ, list(range(PAGES)))
    seen = []
    deadline = time.monotonic() + 10
    while not (report := job.report()).done and time.monotonic() < deadline:
        seen.append(int(report.layers_ready))
    assert job.wait_layers(LAYERS, 5)
    assert seen == sorted(seen)


def test_a_digest_that_differs_marks_its_page(rig: Rig) -> None:
    digests = np.zeros((5, LAYERS), np.uint64)
    rig.submit(OPCODE_WRITE, [0, 1, 2, 3, 4], digests=digests).wait_released(5)
    digests[3, 1] ^= np.uint64(1)
    job = rig.submit(OPCODE_READ, [0, 1, 2, 3, 4], digests=digests, compare=True)
    assert job.wait_layers(LAYERS, 5)
    assert job.page_status.tolist() == [0, 0, 0, STATUS_DIGEST_MISMATCH, 0]


def test_a_gate_holds_readiness_back(rig: Rig) -> None:
    digests = np.zeros((4, LAYERS), np.uint64)
    rig.submit(OPCODE_WRITE, [0, 1, 2, 3], digests=digests).wait_released(5)
    late = np.zeros_like(digests)
    job = rig.submit(OPCODE_READ, [0, 1, 2, 3], digests=late, compare=True, gated=True)
    assert not job.wait_layers(1, 0.1)
    late[:] = digests
    job.open_gate()
    assert job.wait_layers(LAYERS, 5)
    assert not job.page_status.any()


def test_a_gate_that_never_opens_does_not_stop_close() -> None:
    rig = Rig()
    digests = np.zeros((4, LAYERS), np.uint64)
    job = rig.submit(OPCODE_READ, [0, 1, 2, 3], digests=digests, compare=True, gated=True)
    rig.close()
    assert job.report().released
    assert (job.page_status == STATUS_CANCELLED).all()


def test_a_failed_command_marks_its_run_only(rig: Rig) -> None:
    rig.controller.fault_range(1, 200 + 400, 1, OPCODE_READ, STATUS_UNRECOVERED_READ)
    job = rig.submit(OPCODE_READ, [0, 1, 2, 3, 4])
    assert job.wait_released(5)
    bad = STATUS_UNRECOVERED_READ
    assert job.page_status.tolist() == [0, 0, 0, bad, bad]


def test_cancel_ends_a_job(rig: Rig) -> None:
    rig.controller.set_faults(Faults(stall_from=1))
    job = rig.submit(OPCODE_READ, list(range(PAGES)), timeout_s=30.0)
    job.cancel()
    rig.controller.recover()
    assert job.wait_released(5)


@pytest.mark.parametrize("depth", [2, 16])
def test_a_stuck_controller_releases_waiters_and_keeps_memory(depth: int) -> None:
    rig = Rig(depth=depth)
    rig.controller.set_faults(Faults(stall_from=1))
    jobs = [rig.submit(OPCODE_READ, list(range(PAGES)), timeout_s=0.1) for _ in range(3)]
    for job in jobs:
        assert job.wait_layers(LAYERS, 5)
        assert (job.page_status == STATUS_TIMED_OUT).all()
    assert not jobs[0].report().released
    rig.engine.reset(5)
    for job in jobs:
        assert job.wait_released(5)
    rig.controller.set_faults(Faults())
    again = rig.submit(OPCODE_READ, [0])
    assert again.wait_released(5)
    assert again.report().status == 0
    rig.close()


def test_many_threads_submit(rig: Rig, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rig.controller.set_faults(Faults(seed=seed, delay_ppm=200_000, reorder_ppm=200_000))
    bad: list[int] = []

    def work(count: int) -> None:
        for _ in range(count):
            if not rig.submit(OPCODE_READ, list(range(PAGES))).wait_released(10):
                bad.append(1)

    threads = [
        threading.Thread(target=work, args=(int(n),)) for n in rng.integers(5, 25, 4).tolist()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not bad


def test_prp_pages_must_be_aligned_and_sgl_need_not() -> None:
    """Segments that end inside a page cannot be named by PRP: a status, and staging is needed."""
    rig = Rig(use_sgl=False)
    job = rig.submit(OPCODE_WRITE, [0, 1])
    assert job.wait_released(5)
    assert job.page_status.all()
    rig.close()


def test_callbacks_come_after_release(rig: Rig) -> None:
    called = threading.Event()
    job = rig.submit(OPCODE_READ, [0], on_released=lambda _: called.set())
    assert called.wait(5)
    assert job.report().released
    again = threading.Event()
    job.on_released(lambda _: again.set())  # too late to wait for: called at once
    assert again.is_set()


def test_a_closed_engine_refuses_work() -> None:
    rig = Rig()
    rig.close()
    rig.engine.close()
    with pytest.raises(PoolClosed):
        rig.submit(OPCODE_READ, [0])


def test_an_engine_whose_device_is_lost_says_so() -> None:
    rig = Rig()
    rig.controller.set_faults(Faults(stall_from=1, reset_fails=True))
    job = rig.submit(OPCODE_READ, [0], timeout_s=0.1)
    assert job.wait_layers(LAYERS, 5)
    with pytest.raises(DeviceTimeout, match="reset"):
        rig.engine.close(0.3)
    assert not job.report().released
    rig.controller.release()
    assert job.wait_released(5)


def threads() -> set[Path]:
    return set(Path("/proc/self/task").iterdir())


def wake_ups(of: set[Path]) -> int:
    """How often these threads slept and woke up."""
    found = [(thread / "status").read_text() for thread in of]
    return sum(int(text.rpartition("\nvoluntary_ctxt_switches:")[2].split()[0]) for text in found)


def own_sleeps() -> int:
    """How often this thread slept."""
    text = Path("/proc/thread-self/status").read_text()
    return int(text.rpartition("\nvoluntary_ctxt_switches:")[2].split()[0])


def test_a_wait_is_not_woken_by_layers_before_its_own(rig: Rig) -> None:
    """After a wait for fewer layers, as by one who takes the first layer and then the rest."""
    layers = 24
    starts = np.arange(layers, dtype=np.uint64) * np.uint64(4096)
    bases = (np.uint64(rig.buffer.address) + starts)[:, None]
    memory = PagedMemory(bases, (4096,), (4096,), 1)
    extents, pages = Extents([10], [1], [1], 1, 1), memory.check_pages([0])
    job = rig.engine.submit(OPCODE_READ, extents, pages, memory, held=True)
    sleeps: list[int] = []

    def wait() -> None:
        if job.wait_layers(1, 10):
            before = own_sleeps()
            if job.wait_layers(layers, 10):
                sleeps.append(own_sleeps() - before)

    waiter = threading.Thread(target=wait)
    waiter.start()
    for granted in range(1, layers + 1):
        time.sleep(0.005)  # by then the waiter sleeps
        job.grant(granted, 2**32 - 1, None)
    waiter.join(20)
    assert sleeps and sleeps[0] < layers // 2


def test_a_wait_for_layers_is_not_woken_by_the_end_of_other_jobs(rig: Rig) -> None:
    held = rig.submit(OPCODE_READ, [0], held=True)
    sleeps: list[int] = []

    def wait() -> None:
        before = own_sleeps()
        if held.wait_layers(LAYERS, 10):
            sleeps.append(own_sleeps() - before)

    waiter = threading.Thread(target=wait)
    waiter.start()
    others = 24
    for _ in range(others):
        time.sleep(0.005)  # by then the waiter sleeps
        assert rig.submit(OPCODE_READ, [1]).wait_released(10)
    held.grant(LAYERS, 2**32 - 1, None)
    waiter.join(20)
    assert sleeps and sleeps[0] < others // 2


def test_a_held_job_is_submitted_with_as_many_layers_as_wanted(rig: Rig) -> None:
    for layers in range(1, LAYERS):
        job = rig.submit(OPCODE_READ, [0, 1], held=1 + layers)
        assert job.wait_layers(layers, 10)
        assert not job.wait_layers(layers + 1, 0.05)
        job.grant(LAYERS, 2**32 - 1, None)
        assert job.wait_layers(LAYERS, 10)


def test_threads_wait_for_different_layers(rig: Rig) -> None:
    job = rig.submit(OPCODE_READ, [0, 1, 2], held=True)
    woken = [threading.Event() for _ in range(LAYERS)]

    def wait(layer: int) -> None:
        if job.wait_layers(layer + 1, 10):
            woken[layer].set()

    for layer in reversed(range(LAYERS)):
        threading.Thread(target=wait, args=(layer,)).start()
    for layer in range(LAYERS):
        time.sleep(0.02)
        job.grant(layer + 1, 2**32 - 1, None)
        assert woken[layer].wait(10)
        assert not any(other.is_set() for other in woken[layer + 1 :])


def test_an_engine_with_nothing_to_do_sleeps() -> None:
    """Its commands come from its own thread, so no doorbell has to be looked at."""
    others = threads()
    rig = Rig()
    assert rig.submit(OPCODE_READ, list(range(PAGES))).wait_released(5)
    its_own = threads() - others
    assert its_own
    before = wake_ups(its_own)
    time.sleep(0.5)
    assert wake_ups(its_own) - before < 50
    rig.close()


def test_one_engine_serves_a_controller(rig: Rig) -> None:
    """No other thread may service the controller while the engine's does."""
    with pytest.raises(ConfigError, match="another engine"):
        Engine(rig.controller)
    with pytest.raises(NativeError, match="its engine"):
        rig.controller.start()
    assert rig.controller.service() == 0
    rig.engine.close(5)
    rig.region.close()
    rig.region = rig.controller.register(rig.buffer)
    rig.controller.reset(1.0)


def test_other_producers_come_and_go_while_an_engine_serves(rig: Rig) -> None:
    """A device's queue pairs are served by the engine's thread, between the engine's own jobs."""
    lib: Any = _native.lib()
    for _ in range(3):
        with rig.controller.create_queue_pair(8, is_device=True) as pair:
            assert pair.qid == 2, "a closed pair leaves its place"
            rig.controller.expect_rings(True)
            job = rig.submit(OPCODE_READ, list(range(PAGES)))
            for _ in range(20):
                assert run_flush(lib, pair) == COMPLETED
            rig.controller.expect_rings(False)
            assert job.wait_released(5)
    assert rig.engine.stats().jobs == 3


def test_a_reset_ends_the_commands_of_all_producers(rig: Rig) -> None:
    lib: Any = _native.lib()
    rig.controller.set_faults(Faults(stall_from=1))
    pair = rig.controller.create_queue_pair(8, is_device=True)
    job = rig.submit(OPCODE_READ, [0])
    cid = send_flush(lib, pair)
    wait_until(lambda: rig.controller.stats().unanswered >= LAYERS + 1)
    rig.controller.reset(5.0)  # by the engine's thread
    assert job.wait_released(5)
    assert job.report().status == nvme.STATUS_ABORTED_SQ_DELETION
    assert wait_flush(lib, pair, cid) == COMPLETED | nvme.STATUS_ABORTED_SQ_DELETION
    pair.close()


def send_flush(lib: Any, pair: QueuePair) -> int:
    cid = int(lib.gio_qp_cid_acquire(pair.struct_address))
    sqe = nvme.Sqe(cdw0=nvme.make_cdw0(OPCODE_FLUSH, 0, cid), nsid=1)
    lib.gio_qp_sq_enqueue(pair.struct_address, ctypes.byref(sqe))
    lib.gio_qp_sq_ring(pair.struct_address)
    return cid


def wait_flush(lib: Any, pair: QueuePair, cid: int) -> int:
    deadline = time.monotonic() + 10
    word = 0
    while not word and time.monotonic() < deadline:
        lib.gio_qp_cq_reap(pair.struct_address, 8)
        word = int(lib.gio_qp_completion(pair.struct_address, cid))
    if word:
        lib.gio_qp_cid_release(pair.struct_address, cid)
    return word


def run_flush(lib: Any, pair: QueuePair) -> int:
    return wait_flush(lib, pair, send_flush(lib, pair))


def test_ctrl_c_between_a_submission_and_its_job(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's own thread goes on, and the device's arrays stay until it has released them."""

    def struck(*_: object) -> None:
        raise KeyboardInterrupt

    failures: list[object] = []
    monkeypatch.setattr(threading, "excepthook", failures.append)
    rig.controller.set_faults(Faults(stall_from=1))
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "check_started", struck)
        with pytest.raises(KeyboardInterrupt):
            rig.submit(OPCODE_WRITE, [0, 1, 2])
    assert len(rig.engine._jobs) == 1
    rig.controller.recover()
    released = threading.Event()
    job = rig.submit(OPCODE_WRITE, [3, 4, 5])
    job.on_released(lambda _: released.set())
    assert released.wait(10) and job.wait_layers(LAYERS, 1)
    wait_until(lambda: not rig.engine._jobs)
    assert not failures


def test_digests_are_computed_while_the_data_is_being_written(rig: Rig) -> None:
    rig.controller.set_faults(Faults(stall_from=1))
    digests = np.zeros((4, LAYERS), np.uint64)
    job = rig.submit(OPCODE_WRITE, [0, 1, 2, 3], digests=digests)
    wait_until(digests.all)
    assert not job.report().done
    rig.controller.release()
    assert job.wait_released(5) and job.report().status == 0
