"""Ctrl-C anywhere in the start of a transfer, on a stand-in for the CUDA driver.

A KeyboardInterrupt is raised at one line after the other of the GPU engines, and where a function
returns to them.  In every case memory that a device may use stays, and no stream hangs.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from gio_uring.cuda_stand_in import StandInDriver, StandInTensor
from gio_uring.gpu.test_device_engine import device_rig
from memory_controller import MemoryController
from waiting import wait_until

from tutti.errors import CudaError
from tutti.gio_uring.engine import Engine
from tutti.gio_uring.gpu.device_engine import KINDS
from tutti.gio_uring.gpu.host_engine import HostEngine
from tutti.gio_uring.gpu.moved_job import MovedJob
from tutti.gio_uring.iocb import Extents, PagedMemory
from tutti.gio_uring.nvme_spec import OPCODE_READ, OPCODE_WRITE

LAYERS, PAGES, NBYTES = 4, 8, 4096
#: Whose calls are struck; the second only when it returns: a native job has begun by then.
_STRUCK = "/tutti/gio_uring/gpu/"
_RETURNS = (_STRUCK, "/tutti/gio_uring/engine.py", "/tutti/gio_uring/job.py")


class Interrupt:
    """Raises a KeyboardInterrupt where the `nth` call begins or ends, as the interpreter does;
    `place` says which it was.
    """

    def __init__(self, nth: int) -> None:
        self.left = nth
        self.place = ""

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        name, caller = (f.f_code.co_filename if f else "" for f in (frame, frame.f_back))
        if event == "return":  # to one of them
            is_place = _STRUCK in caller and any(part in name for part in _RETURNS)
        else:
            is_place = _STRUCK in name and event in ("call", "c_return")
        if is_place:
            self.left -= 1
            if self.left == 0:
                self.place = f"{Path(name).name}:{frame.f_lineno} ({event})"
                sys.setprofile(None)
                raise KeyboardInterrupt


def interrupt(nth: int, call: Callable[[], object]) -> str:
    """Calls, and strikes at the `nth` place; "" when there are not so many."""
    hit = Interrupt(nth)
    before = sys.getprofile()
    gc.disable()  # an exception in what a collection calls is lost
    try:
        sys.setprofile(hit)
        call()
    except KeyboardInterrupt:
        assert hit.place
    finally:
        sys.setprofile(before)
        gc.enable()
    return hit.place


class HostRig:
    """The engine `host`: reads go in chunks, writes have a place for each layer."""

    def __init__(self) -> None:
        self.driver = StandInDriver()
        self.controller = MemoryController([4 << 20])
        self.engine = Engine(self.controller)
        self.gpu = HostEngine(
            self.driver,
            self.engine,
            load_staging_nbytes=(PAGES + 3) * NBYTES * 2,
            store_staging_nbytes=(PAGES * LAYERS + 2) * NBYTES,
        )
        rows = [[StandInTensor(self.driver, PAGES * NBYTES)] for _ in range(LAYERS)]
        self.tensors = [row[0] for row in rows]
        bases = np.array([[row[0].data_ptr()] for row in rows], np.uint64)
        self.memory = PagedMemory(bases, (NBYTES,), (NBYTES,), PAGES)

    def submit(self, opcode: int, **options: Any) -> MovedJob:
        pages = np.arange(PAGES, dtype=np.uint32)
        extents = Extents([0], [1], [PAGES], 1, 128)
        return self.gpu.submit(opcode, extents, pages, self.memory, timeout_s=0.2, **options)

    def half(self, opcode: int) -> Any:
        return self.gpu._loads if opcode == OPCODE_READ else self.gpu._stores

    def is_device_busy(self) -> bool:
        jobs = list(self.engine._jobs.values())
        return any(isinstance(job, tuple) or not job.report().released for job in jobs)

    def check(self, opcode: int, place: str) -> None:
        """Free memory has no owner, and in the end all of it is free."""
        half = self.half(opcode)

        def is_free() -> bool:
            if half.staging.arena.in_use:
                return False
            assert not self.is_device_busy(), f"{place}: the device still uses it"
            return True

        wait_until(is_free, f"{place}: the staging never comes back")


@contextmanager
def host_rig() -> Iterator[HostRig]:
    rig = HostRig()
    try:
        yield rig
    finally:
        rig.engine.close()
        rig.gpu.close()
        rig.controller.close()
        rig.driver.close()
    assert not rig.driver.violations


@pytest.mark.parametrize("opcode", [OPCODE_WRITE, OPCODE_READ])
def test_the_start_of_a_transfer_is_interrupted_anywhere(opcode: int) -> None:
    with host_rig() as rig:
        rng = np.random.default_rng(1)
        for tensor in rig.tensors:
            tensor.array[:] = rng.integers(0, 256, PAGES * NBYTES, dtype=np.uint8)
        contents = [tensor.array.copy() for tensor in rig.tensors]
        assert rig.submit(OPCODE_WRITE).wait_released(10)
        word = rig.driver.array(marked := rig.driver.allocate(256))
        compute = rig.driver.create_stream()
        nth, place = 0, "first"
        while place:  # bounded by the places there are
            nth += 1
            word[0] = 0
            rig.driver.wait_value(compute, marked, 1)  # what is on the stream stays there
            rig.half(opcode).follow(compute)
            jobs: list[MovedJob] = []
            copies = rig.driver.calls["cuMemcpyBatchAsync"]
            place = interrupt(nth, lambda to=jobs: to.append(rig.submit(opcode)))  # type: ignore[misc]
            is_free = rig.half(opcode).staging.arena.in_use == 0
            assert not (is_free and rig.is_device_busy()), place
            assert not (is_free and rig.driver.calls["cuMemcpyBatchAsync"] > copies), place
            word[0] = 1
            rig.check(opcode, place)
        assert nth > 100
        assert jobs[0].wait_released(10)
        for tensor in rig.tensors:
            tensor.array[:] = 0
        assert rig.submit(OPCODE_WRITE if opcode == OPCODE_READ else OPCODE_READ).wait_released(10)
        if opcode == OPCODE_WRITE:
            assert all((t.array == c).all() for t, c in zip(rig.tensors, contents, strict=True))


def test_an_abandoned_transfer_has_its_memory_while_a_thread_puts_it() -> None:
    """Or its copies would be put on the stream when the memory is another transfer's."""
    with host_rig() as rig:
        assert rig.submit(OPCODE_WRITE).wait_released(10)
        rig.gpu.first_layers(0)
        entered, goes_on = threading.Event(), threading.Event()
        copy = rig.driver.copy_batch

        def slow(*columns: Any, **options: Any) -> None:
            entered.set()
            assert goes_on.wait(10)
            copy(*columns, **options)

        rig.driver.copy_batch = slow  # type: ignore[method-assign]
        job = rig.submit(OPCODE_READ)
        assert entered.wait(10)
        thread = threading.Thread(target=job.abandon)
        thread.start()
        wait_until(lambda: not rig.is_device_busy(), "the commands never end")
        wait_until(rig.gpu._loads.are_streams_done, "a stream waits")
        thread.join(0.2)
        assert not job.is_free()
        goes_on.set()
        thread.join(10)
        rig.check(OPCODE_READ, "abandoned")


def test_an_interrupted_gate_says_that_nothing_was_moved() -> None:
    """Layers that were not put on the stream are not taken for moved."""
    with host_rig() as rig:
        assert rig.submit(OPCODE_WRITE).wait_released(10)
        nth, place = 0, "first"
        while place:  # bounded by the places there are
            nth += 1
            digests = np.zeros((PAGES, LAYERS), np.uint64)
            job = rig.submit(OPCODE_READ, digests=digests, compare=True, gated=True)
            place = interrupt(nth, job.open_gate)
            if place and job._failure is None:  # before the gate
                job.cancel()
            else:
                with pytest.raises(CudaError, match="interrupted") if place else nullcontext():
                    job.wait_layers(LAYERS, 10)
            rig.check(OPCODE_READ, place)
        assert nth > 5


@pytest.mark.parametrize("kind", KINDS)
def test_the_start_of_a_job_of_kernels_is_interrupted_anywhere(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Kernels are silent, so that what they have stays until the engine is closed."""
    nth, step, place = seed % 29 + 1, 29, "first"  # each needs an engine of its own
    seen: set[bool] = set()
    while place:  # bounded by the places there are
        with device_rig(kind, tmp_path, monkeypatch) as rig:
            released: list[object] = []
            jobs: list[Any] = []
            assert rig.submit(OPCODE_WRITE, list(range(8))).wait_released(10)
            rig.kernels.is_silent = True

            def submit(rig: Any = rig, jobs: list[Any] = jobs, then: Any = released.append) -> None:
                jobs.append(rig.submit(OPCODE_WRITE, list(range(8)), on_released=then))

            place = interrupt(nth, submit)
            if place:
                wait_until(lambda rig=rig: rig.engine.wait_idle(0), f"{place}: a stream waits")  # type: ignore[misc]
                is_free = rig.engine.stream_queue.staging.arena.in_use == 0
                seen.add(is_free)
                # Either nothing of it is on its way, or it is kept until the controller was reset.
                assert is_free != rig.engine._broken == bool(rig.engine._kept), place
            rig.kernels.is_silent = False
            rig.engine.close()
            assert not (place and released), f"{place}: the callback's owner does not know the job"
        gc.collect()
        nth += step
    assert len(seen) > 1
