"""Every call of the seam to CUDA, with what it does to bytes and to order."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager

import numpy as np
import pytest
from gpu.device_memory import Allocation
from waiting import wait_until

from tutti.errors import CudaError
from tutti.gio_uring.gpu.calls import BATCH_MAX
from tutti.gio_uring.gpu.device_batch import BatchRequest, DeviceBatch, launch_layer
from tutti.gio_uring.gpu.device_code import KERNELS, Modules
from tutti.gio_uring.gpu.driver import CudaDriver
from tutti.gio_uring.gpu.pinned_memory import LeaseOwner, PinnedMemory, TableMemory
from tutti.gio_uring.iocb import PagedMemory
from tutti.gio_uring.memory import HostBuffer, view_at
from tutti.gio_uring.nvme_spec import OPCODE_WRITE

NBYTES = 64 << 10


@pytest.fixture
def stream(driver: CudaDriver) -> Iterator[int]:
    made = driver.create_stream(-1)
    yield made
    driver.destroy_stream(made)


@pytest.fixture
def memory(driver: CudaDriver) -> Iterator[Allocation]:
    made = Allocation(driver, NBYTES)
    yield made
    made.close()


@pytest.fixture
def words(driver: CudaDriver) -> Iterator[PinnedMemory]:
    made = PinnedMemory(driver, HostBuffer(4096, hugepages=False))
    yield made
    made.close()


def done(driver: CudaDriver, stream: int) -> bool:
    wait_until(lambda: driver.is_stream_done(stream))
    return True


def refusal(code: int) -> AbstractContextManager[object]:
    """A CudaError of this code."""
    return pytest.raises(CudaError, check=lambda error: error.code == code)


def test_the_device_is_described(driver: CudaDriver) -> None:
    assert driver.architecture.startswith("sm_")
    assert int(driver.version.split(".")[0]) >= 13
    assert driver.has_copy_batch
    assert driver.device == 0
    assert driver.numa_node is None or driver.numa_node >= 0


def test_bytes_are_filled_and_copied(
    driver: CudaDriver, stream: int, memory: Allocation, rng: np.random.Generator
) -> None:
    content = rng.integers(0, 256, NBYTES, dtype=np.uint8)
    memory.write(content)
    there = driver.allocate(NBYTES)
    driver.copy(there, memory.address, NBYTES, stream)
    driver.fill(memory.address + 100, 0xA5, 1000, stream)
    driver.copy(memory.address + 2000, there + 1, 3000, stream)
    assert done(driver, stream)
    expected = content.copy()
    expected[100:1100] = 0xA5
    expected[2000:5000] = content[1:3001]
    assert (memory.read() == expected).all()
    driver.free(there)


@pytest.mark.parametrize("count", [1, 7, BATCH_MAX + 1])
def test_a_batch_scatters_what_it_is_given(
    driver: CudaDriver, stream: int, memory: Allocation, rng: np.random.Generator, count: int
) -> None:
    content = rng.integers(0, 256, NBYTES, dtype=np.uint8)
    memory.write(content)
    there = driver.allocate(NBYTES)
    driver.fill(there, 0, NBYTES, stream)
    sizes = rng.integers(1, 9, count).astype(np.uint64)
    sources = rng.permutation(NBYTES // 8)[:count].astype(np.uint64) * np.uint64(8)
    targets = rng.permutation(NBYTES // 8)[:count].astype(np.uint64) * np.uint64(8)
    base = np.uint64(memory.address)
    driver.copy_batch(targets + np.uint64(there), sources + base, sizes, stream)
    driver.copy(memory.address, there, NBYTES, stream)
    assert done(driver, stream)
    expected = np.zeros(NBYTES, np.uint8)
    for target, source, nbytes in zip(targets, sources, sizes, strict=True):
        expected[int(target) :][: int(nbytes)] = content[int(source) :][: int(nbytes)]
    assert (memory.read() == expected).all()
    driver.free(there)


def test_a_stream_waits_for_a_word_and_an_event_for_the_stream(
    driver: CudaDriver, stream: int, memory: Allocation, words: PinnedMemory
) -> None:
    array = view_at(words.address, words.nbytes).view(np.uint32)
    array[:] = 0
    array[0] = 0xFFFFFFFE
    other = driver.create_stream()
    event, never = driver.create_event(), driver.create_event()
    memory.write(np.zeros(NBYTES, np.uint8))
    assert driver.is_event_done(event)  # never recorded
    driver.wait_value(stream, words.device_address, 3)  # cyclic: the word is -2
    driver.fill(memory.address, 7, NBYTES, stream)
    driver.record_event(event, stream)
    driver.write_value(stream, words.device_address + 128, 11)
    driver.stream_wait_event(other, never)
    driver.stream_wait_event(other, event)
    driver.write_value(other, words.device_address + 256, 12)
    time.sleep(0.05)
    assert not driver.is_stream_done(stream)
    assert not driver.is_stream_done(other)
    assert not driver.is_event_done(event)
    assert (array[[32, 64]] == 0).all()
    array[0] = 4
    assert done(driver, other)
    assert done(driver, stream)
    assert driver.is_event_done(event)
    assert array[[32, 64]].tolist() == [11, 12]
    assert (memory.read() == 7).all()
    driver.destroy_stream(other)
    driver.destroy_event(event)
    driver.destroy_event(never)


def test_the_default_stream_is_followed_and_ordered(
    driver: CudaDriver, stream: int, memory: Allocation
) -> None:
    """It is PyTorch's, unless another one was chosen."""
    event = driver.create_event()
    driver.fill(memory.address, 1, NBYTES, 0)
    driver.record_event(event, 0)
    driver.stream_wait_event(stream, event)
    driver.fill(memory.address, 2, NBYTES, stream)
    driver.record_event(event, stream)
    driver.stream_wait_event(0, event)
    driver.fill(memory.address, 3, 8, 0)
    assert done(driver, 0)
    content = memory.read()
    assert content[:9].tolist() == [3] * 8 + [2]
    driver.destroy_event(event)


def test_registered_memory_is_told_from_other(driver: CudaDriver) -> None:
    buffer = HostBuffer(4 * 4096, hugepages=False)
    assert driver.register_host(buffer.address, 2 * 4096)
    assert not driver.register_host(buffer.address, 2 * 4096)
    assert not driver.register_host(buffer.address + 4096, 4096)
    with pytest.raises(CudaError):
        driver.register_host(buffer.address, 4 * 4096)  # only a part of it is
    assert (
        driver.device_address(buffer.address + 5000) == driver.device_address(buffer.address) + 5000
    )
    driver.unregister_host(buffer.address)
    with pytest.raises(CudaError):
        driver.device_address(buffer.address)
    with pytest.raises(CudaError):
        driver.unregister_host(buffer.address)


def test_calls_work_on_every_thread_and_leave_its_context(
    driver: CudaDriver, stream: int, memory: Allocation
) -> None:
    found: list[object] = []

    def run() -> None:
        driver.fill(memory.address, 9, NBYTES, stream)
        driver.copy_batch(
            *np.array([[memory.address], [memory.address + 8], [8]], np.uint64), stream
        )
        found.append(driver.is_stream_done(stream))
        found.append(int(driver._raw("cuCtxGetCurrent")))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(30)
    assert len(found) == 2
    assert found[1] == 0, "a thread that had no context has none again"
    assert done(driver, stream)
    assert (memory.read() == 9).all()


def test_kernels_take_their_arguments(
    driver: CudaDriver, modules: Modules, stream: int, memory: Allocation
) -> None:
    assert len({modules[name] for name in KERNELS}) == len(KERNELS)
    memory.write(np.full(NBYTES, 3, np.uint8))
    tables = TableMemory(driver, 1 << 20)
    layers = 300  # more than a byte counts
    one = PagedMemory(np.full((layers, 1), memory.address, np.uint64), (NBYTES,), (NBYTES,), 1)
    batch = DeviceBatch(
        tables,
        BatchRequest(
            one,
            np.zeros(1, np.uint32),
            opcode=OPCODE_WRITE,
            slice_nlb=NBYTES >> 9,
            lba_shift=9,
            digests=np.zeros((1, layers), np.uint64),
        ),
        LeaseOwner(),
    )
    batch.upload(stream)
    launch_layer(driver, modules["gio_verify"], batch, 299, stream, 1, threads=64)
    batch.download_digests(driver, stream)
    assert done(driver, stream)
    assert np.flatnonzero(batch.digests()).tolist() == [299], "of the layer that was named"
    tables.close()


def test_code_that_is_not_there_is_an_error(driver: CudaDriver, modules: Modules) -> None:
    with refusal(500):
        driver.find_function(modules._module, "gio_nothing")
    with pytest.raises(CudaError):
        driver.load_module(bytes(4096))


def test_what_a_driver_refuses_is_an_error(
    driver: CudaDriver,
    modules: Modules,
    stream: int,
    memory: Allocation,
    words: PinnedMemory,
) -> None:
    table = np.array([[memory.address], [memory.address + 8], [8]], np.uint64)
    with refusal(1):
        driver.copy_batch(*table, 0)  # the legacy default stream
    with pytest.raises(CudaError):
        driver.wait_value(stream, words.device_address + 2, 1)
    with pytest.raises(CudaError):
        driver.write_value(stream, words.device_address + 1, 1)
    arguments = [(memory.address, ctypes.c_void_p), (0, ctypes.c_uint32), (0, ctypes.c_uint32)]
    with pytest.raises(CudaError):
        driver.launch(modules["gio_move"], 1, 1024, arguments, stream)  # made for 256
    with pytest.raises(CudaError):
        driver.launch(modules["gio_move"], 0, 32, arguments, stream)
    assert driver.is_stream_done(stream)


def test_green_contexts_split_the_device(driver: CudaDriver, memory: Allocation) -> None:
    found = driver.sm_resource()
    assert found.count > found.minimum >= 1
    first, rest = driver.create_green_pair(found.minimum)
    assert first[1] >= found.minimum
    assert first[1] < rest[1] <= found.count - first[1]
    one = driver.create_green_context(found.minimum + 1)
    assert one[1] >= found.minimum + 1
    event = driver.create_event()
    ordinary = driver.create_stream()
    for context, _ in (first, rest, one):
        stream = driver.create_green_stream(context, -1)
        driver.fill(memory.address, 5, NBYTES, stream)
        driver.record_event(event, stream)
        driver.stream_wait_event(ordinary, event)
        assert done(driver, ordinary)
        assert driver.is_event_done(event)
        driver.destroy_stream(stream)
        driver.destroy_green_context(context)
    assert (memory.read() == 5).all()
    driver.destroy_event(event)
    driver.destroy_stream(ordinary)


def test_a_driver_is_closed_once(driver: CudaDriver) -> None:
    other = CudaDriver()
    other.close()
    other.close()
    driver.destroy_event(driver.create_event())  # the context is still there
