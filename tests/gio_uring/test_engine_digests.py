"""Digests of long commands, which service threads and workers of the host engine share."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest
from memory_controller import Faults, MemoryController

from tutti.base.units import KiB
from tutti.gio_uring.engine import PRIORITY_LOAD, Engine
from tutti.gio_uring.iocb import Extents, PagedMemory
from tutti.gio_uring.job import Job
from tutti.gio_uring.memory import HostBuffer
from tutti.gio_uring.nvme_spec import OPCODE_READ, OPCODE_WRITE, STATUS_DIGEST_MISMATCH

SLICE_NBYTES, SLICE_NLB = 64 * KiB, 16
PAGES = 12  # of a job: 768 KiB, in one command of each layer
LAYERS, JOBS = 3, 4


class Rig:
    """Objects of random bytes, and memory for four loads of all of them."""

    def __init__(
        self, workers: int, layers: int = LAYERS, mode: str = "copy", **options: int
    ) -> None:
        self.layers = layers
        self.controller = MemoryController([layers * PAGES * SLICE_NBYTES], mode=mode)
        self.engine = Engine(self.controller, digest_workers=workers, **options)
        layer_nbytes = JOBS * PAGES * SLICE_NBYTES
        self.buffer = HostBuffer(layers * layer_nbytes)
        rng = np.random.default_rng(3)
        self.buffer.array[:] = rng.integers(0, 256, self.buffer.nbytes, np.uint8)
        self.region = self.controller.register(self.buffer)
        starts = np.arange(layers, dtype=np.uint64) * np.uint64(layer_nbytes)
        bases = (np.uint64(self.buffer.address) + starts)[:, None]
        self.memory = PagedMemory(bases, (SLICE_NBYTES,), (SLICE_NBYTES,), JOBS * PAGES)
        self.digests = np.zeros((PAGES, layers), np.uint64)
        assert self.submit(OPCODE_WRITE, digests=self.digests).wait_released(10)

    def submit(self, opcode: int, pages: int = PAGES, place: int = 0, **options: object) -> Job:
        extents = Extents([0], [1], [pages], SLICE_NLB, PAGES * SLICE_NLB)
        numbers = self.memory.check_pages(place * PAGES + np.arange(pages))
        return self.engine.submit(opcode, extents, numbers, self.memory, **options)  # type: ignore[arg-type]

    def load(self, digests: np.ndarray, **options: int) -> Job:
        options["priority"] = PRIORITY_LOAD
        return self.submit(OPCODE_READ, digests=digests, compare=True, **options)

    def close(self) -> None:
        self.engine.close(5)
        self.region.close()
        self.controller.close()


@pytest.fixture(params=[0, 1, 3])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    """With as many workers."""
    with closing(Rig(request.param)) as made:
        yield made


def test_a_digest_that_differs_is_found_before_its_layer_is_ready(rig: Rig) -> None:
    """In every slice of a command, whichever thread hashes it."""
    for layer in range(LAYERS):
        for page in range(PAGES):
            digests = rig.digests.copy()
            digests[page, layer] ^= np.uint64(1)
            job = rig.load(digests)
            for ready in range(layer + 1):
                assert job.wait_layers(ready + 1, 10)
            assert job.page_status[page] == STATUS_DIGEST_MISMATCH
            assert job.wait_released(10)
            assert np.flatnonzero(job.page_status).tolist() == [page]


def test_layers_whose_digests_agree_are_ready_one_after_another(rig: Rig) -> None:
    for _ in range(20):
        rig.buffer.array[:] = 0
        job = rig.load(rig.digests)
        for layer in range(LAYERS):
            assert job.wait_layers(layer + 1, 10)
            assert job.report().layers_ready > layer
        assert job.wait_released(10)
        assert job.report().status == 0


def test_loads_that_end_early_leave_no_digest_under_way(rig: Rig, seed: int) -> None:
    rig.controller.set_faults(Faults(seed=seed, status_ppm=150_000, delay_ppm=300_000))
    for turn in range(20):
        jobs = [rig.load(rig.digests, place=place) for place in range(JOBS)]
        jobs[turn % JOBS].cancel()
        assert all(job.wait_released(10) for job in jobs)
        for job in jobs:
            assert job.report().done
            assert bool(job.page_status.any()) == bool(job.report().status)


def test_a_short_first_layer_waits_for_no_worker() -> None:
    """One that sleeps needs longer to wake up than the service thread to hash it."""
    with closing(Rig(1, layers=1)) as rig:
        before = rig.engine.stats().digests_offloaded
        job = rig.load(rig.digests[:4], pages=4)
        assert job.wait_released(10)
        assert job.report().status == 0
        assert rig.engine.stats().digests_offloaded == before


def test_a_drive_that_is_faster_than_digests_goes_on_while_they_wait() -> None:
    """The service thread hashes by itself only once many commands wait for the worker."""
    layers = 1024
    with closing(Rig(1, layers=1, mode="zero_copy", window_nbytes=1)) as rig:
        bases = rig.memory.bases.repeat(layers, 0)
        memory = PagedMemory(bases, (SLICE_NBYTES,), (SLICE_NBYTES,), PAGES)
        for _ in range(20):
            before, ahead = rig.engine.stats().commands, [0]
            job = rig.engine.submit(
                OPCODE_READ,
                Extents([0], [1], [PAGES], SLICE_NLB, 0),
                memory.check_pages(np.arange(PAGES)),
                memory,
                digests=rig.digests.repeat(layers, 1),
                compare=True,
                priority=PRIORITY_LOAD,
            )
            end_s = time.monotonic() + 10
            while not job.wait_released(0.001) and time.monotonic() < end_s:
                ahead.append(rig.engine.stats().commands - before - job.layers_ready)
            assert job.report().released and job.report().status == 0
            if np.median(ahead) > 32:
                return
    pytest.fail("few commands are issued ahead of their digests")


def test_a_service_thread_with_nothing_else_to_do_hashes_what_waits() -> None:
    with closing(Rig(1, layers=1)) as rig:
        for _ in range(1000):
            before = rig.engine.stats().digests_offloaded
            job = rig.load(rig.digests, ahead=1)
            assert job.wait_released(10)
            assert job.report().status == 0
            if rig.engine.stats().digests_offloaded == before:
                return
    pytest.fail("the worker has hashed all")
