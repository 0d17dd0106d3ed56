"""Kernels on a real GPU that submit, poll, move and digest, with every engine that has them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import xxhash
from gpu.device_memory import Allocation, page_bytes, paged
from memory_controller import Faults, MemoryController
from waiting import wait_until

from tutti.gio_uring.gpu.device_batch import BatchRequest, DeviceBatch, launch_layer
from tutti.gio_uring.gpu.device_code import Modules
from tutti.gio_uring.gpu.device_engine import KINDS, DeviceEngine, KernelSize
from tutti.gio_uring.gpu.driver import CudaDriver
from tutti.gio_uring.gpu.green_context import partition
from tutti.gio_uring.gpu.pinned_memory import LeaseOwner, TableMemory
from tutti.gio_uring.iocb import Extents, PagedMemory
from tutti.gio_uring.nvme_spec import (
    OPCODE_READ,
    OPCODE_WRITE,
    STATUS_DIGEST_MISMATCH,
    STATUS_TIMED_OUT,
)

LAYERS, PAGES = 6, 64
EXTENTS = Extents([0, 4096], [1, 1], [40, PAGES - 40], 2, 256)

Allocate = Callable[[int], Allocation]


@pytest.fixture
def allocate(driver: CudaDriver) -> Iterator[Allocate]:
    """Device memory; freed when the test has closed its engine, as that may wait for a kernel."""
    made: list[Allocation] = []

    def new(nbytes: int) -> Allocation:
        made.append(Allocation(driver, nbytes))
        return made[-1]

    yield new
    for memory in made:
        memory.close()


@contextmanager
def engine_of(
    driver: CudaDriver,
    modules: Modules,
    kind: str,
    controller: MemoryController,
    stream: int | None = None,
    staging_nbytes: int = 4 << 20,
) -> Iterator[DeviceEngine]:
    engine = DeviceEngine(
        driver,
        modules,
        controller,
        kind=kind,
        kernels=KernelSize(shares=3, depth=16, command_nbytes_max=64 << 10),
        staging_nbytes=staging_nbytes,
        stream=stream,
    )
    try:
        yield engine
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("staging_nbytes", "faults"),
    [(4 << 20, None), (1 << 20, None), (4 << 20, Faults(delay_ppm=300_000, reorder_ppm=300_000))],
    ids=["all_layers", "two_layers", "faults"],
)
@pytest.mark.parametrize("kind", KINDS)
def test_pages_travel_and_come_back(
    driver: CudaDriver,
    modules: Modules,
    rng: np.random.Generator,
    allocate: Allocate,
    kind: str,
    staging_nbytes: int,
    faults: Faults | None,
) -> None:
    segments = (4096, 4000)
    memory = allocate(LAYERS * PAGES * sum(segments))
    with MemoryController([64 << 20]) as controller:
        controller.set_faults(faults)
        with engine_of(driver, modules, kind, controller, staging_nbytes=staging_nbytes) as engine:
            pages = paged(memory, segments, LAYERS, PAGES)
            content = rng.integers(0, 256, memory.nbytes, dtype=np.uint8)
            memory.write(content)
            sent = rng.permutation(PAGES).astype(np.uint32)
            digests = np.zeros((PAGES, LAYERS), np.uint64)
            job = engine.submit(OPCODE_WRITE, EXTENTS, sent, pages, digests=digests)
            assert job.wait_released(20)
            assert not job.page_status.any()
            slices = page_bytes(content, segments, LAYERS, PAGES)
            for i, page in enumerate(sent.tolist()):
                for layer in range(LAYERS):
                    expected = xxhash.xxh3_64_intdigest(slices[layer, page].tobytes())
                    assert int(digests[i, layer]) == expected
            memory.write(np.zeros(memory.nbytes, np.uint8))
            digests[7, 3] ^= np.uint64(1)
            other = rng.permutation(PAGES).astype(np.uint32)
            job = engine.submit(OPCODE_READ, EXTENTS, other, pages, digests=digests, compare=True)
            for layer in range(LAYERS):
                assert job.wait_layers(layer + 1, 20)
            assert job.wait_released(20)
            assert np.flatnonzero(job.page_status).tolist() == [7]
            assert job.page_status[7] == STATUS_DIGEST_MISMATCH
            back = page_bytes(memory.read(), segments, LAYERS, PAGES)
            good = np.arange(PAGES) != 7  # its layers after the wrong one may be left out
            assert (back[:, other[good]] == slices[:, sent[good]]).all()
            assert (back[:3, other[7]] == slices[:3, sent[7]]).all()


@pytest.mark.parametrize("kind", KINDS)
def test_kernels_run_on_a_partition_of_the_multiprocessors(
    driver: CudaDriver, modules: Modules, rng: np.random.Generator, allocate: Allocate, kind: str
) -> None:
    memory = allocate(LAYERS * PAGES * 8192)
    part = partition(driver, driver.sm_resource().minimum)
    assert part.is_partition, part.reason
    stream = part.create_stream()
    with (
        MemoryController([64 << 20]) as controller,
        engine_of(driver, modules, kind, controller, stream) as engine,
    ):
        pages = paged(memory, (8192,), LAYERS, PAGES)
        content = rng.integers(0, 256, memory.nbytes, dtype=np.uint8)
        memory.write(content)
        numbers = np.arange(PAGES, dtype=np.uint32)
        for opcode in (OPCODE_WRITE, OPCODE_READ):
            job = engine.submit(opcode, EXTENTS, numbers, pages)
            assert job.wait_released(20)
            assert not job.page_status.any()
            if opcode == OPCODE_WRITE:
                memory.write(np.zeros(memory.nbytes, np.uint8))
        assert (memory.read() == content).all()
    part.close()


def test_a_layer_of_more_commands_than_a_queue_has_places(
    driver: CudaDriver, modules: Modules, rng: np.random.Generator, allocate: Allocate
) -> None:
    memory = allocate(LAYERS * PAGES * 8192)
    scattered = Extents(np.arange(PAGES) * 4, [1] * PAGES, [1] * PAGES, 2, 256)
    with (
        MemoryController([64 << 20]) as controller,
        engine_of(driver, modules, "launch", controller) as engine,
    ):
        pages = paged(memory, (8192,), LAYERS, PAGES)
        content = rng.integers(0, 256, memory.nbytes, dtype=np.uint8)
        memory.write(content)
        numbers = rng.permutation(PAGES).astype(np.uint32)
        assert engine.submit(OPCODE_WRITE, scattered, numbers, pages).wait_released(20)
        memory.write(np.zeros(memory.nbytes, np.uint8))
        job = engine.submit(OPCODE_READ, scattered, numbers, pages, timeout_s=5.0)
        assert job.wait_released(20)
        assert not job.page_status.any()
        assert (memory.read() == content).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_controller_that_dies_ends_the_kernels(
    driver: CudaDriver, modules: Modules, allocate: Allocate, kind: str
) -> None:
    memory = allocate(LAYERS * PAGES * 8192)
    with MemoryController([64 << 20]) as controller:
        controller.set_faults(Faults(stall_from=5))
        with engine_of(driver, modules, kind, controller) as engine:
            pages = paged(memory, (8192,), LAYERS, PAGES)
            job = engine.submit(
                OPCODE_READ, EXTENTS, np.arange(PAGES, dtype=np.uint32), pages, timeout_s=0.5
            )
            assert job.wait_layers(LAYERS, 20)
            assert (job.page_status == STATUS_TIMED_OUT).any()
            assert not job.wait_released(0.1)


def test_an_idle_persistent_kernel_ends_and_comes_back(
    driver: CudaDriver, modules: Modules, rng: np.random.Generator, allocate: Allocate
) -> None:
    memory = allocate(LAYERS * PAGES * 8192)
    pages = paged(memory, (8192,), LAYERS, PAGES)
    content = rng.integers(0, 256, memory.nbytes, dtype=np.uint8)
    numbers = np.arange(PAGES, dtype=np.uint32)
    memory.write(content)
    with (
        MemoryController([64 << 20]) as controller,
        engine_of(driver, modules, "persistent", controller) as engine,
    ):
        assert engine.submit(OPCODE_WRITE, EXTENTS, numbers, pages).wait_released(20)
        driver.free(driver.allocate(1 << 20))  # may wait for the kernel, which rests after a second
        memory.write(np.zeros(memory.nbytes, np.uint8))
        time.sleep(2)
        for _ in range(20):
            job = engine.submit(OPCODE_READ, EXTENTS, numbers, pages)
            compute = driver.create_stream()
            for layer in range(LAYERS):
                job.order_stream(compute, layer + 1)
            wait_until(lambda stream=compute: driver.is_stream_done(stream))  # type: ignore[misc]
            driver.destroy_stream(compute)
            assert not job.page_status.any()
        assert (memory.read() == content).all()


def test_one_engine_after_another_on_a_controller(
    driver: CudaDriver, modules: Modules, rng: np.random.Generator, allocate: Allocate
) -> None:
    memory = allocate(LAYERS * PAGES * 8192)
    pages = paged(memory, (8192,), LAYERS, PAGES)
    numbers = rng.permutation(PAGES).astype(np.uint32)
    with MemoryController([64 << 20]) as controller:
        for kind in rng.permutation(np.repeat(KINDS, 2)).tolist():
            content = rng.integers(0, 256, memory.nbytes, dtype=np.uint8)
            memory.write(content)
            with engine_of(driver, modules, kind, controller) as engine:
                assert engine.submit(OPCODE_WRITE, EXTENTS, numbers, pages).wait_released(20), kind
                memory.write(np.zeros(memory.nbytes, np.uint8))
                job = engine.submit(OPCODE_READ, EXTENTS, numbers, pages)
                assert job.wait_released(20), kind
                assert not job.page_status.any()
            assert (memory.read() == content).all(), kind


def test_digests_of_every_length(
    driver: CudaDriver, modules: Modules, rng: np.random.Generator, allocate: Allocate
) -> None:
    lengths = [*range(1, 600), 1023, 1024, 1025, 4096, 65535, 65536, 65537, 1 << 20]
    lengths += rng.integers(600, 1 << 20, 200).tolist()
    tables = TableMemory(driver, 1 << 20)
    memory = allocate(1 << 20)
    content = rng.integers(0, 256, memory.nbytes, dtype=np.uint8)
    memory.write(content)
    stream = driver.create_stream()
    for nbytes in lengths:
        one = PagedMemory(np.array([[memory.address]], np.uint64), (nbytes,), (nbytes,), 1)
        owner = LeaseOwner()
        batch = DeviceBatch(
            tables,
            BatchRequest(
                one,
                np.zeros(1, np.uint32),
                opcode=OPCODE_WRITE,
                slice_nlb=-(-nbytes // 512),
                lba_shift=9,
                digests=np.zeros((1, 1), np.uint64),
            ),
            owner,
        )
        batch.upload(stream)
        launch_layer(driver, modules["gio_verify"], batch, 0, stream, 1, threads=64)
        batch.download_digests(driver, stream)
        wait_until(lambda: driver.is_stream_done(stream))
        found = int(batch.digests()[0, 0])
        assert found == xxhash.xxh3_64_intdigest(content[:nbytes].tobytes()), nbytes
        owner.is_free = lambda: True
    driver.destroy_stream(stream)
    tables.close()
