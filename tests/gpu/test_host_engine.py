"""The engine `host` on a real GPU: bit-exact, ordered on streams, released when the medium dies."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from gpu.device_memory import Allocation
from memory_controller import Faults, MemoryController
from waiting import wait_until

from store.pools import GEOMETRY, LAYOUT, controller_of, formatted, some_keys
from tutti.errors import DeviceTimeout, MediumError, Unsupported
from tutti.gio_uring.gpu.device_batch import KernelMover
from tutti.gio_uring.gpu.device_code import Modules
from tutti.gio_uring.gpu.driver import CudaDriver
from tutti.gio_uring.gpu.green_context import partition
from tutti.gio_uring.gpu.host_engine import HostEngine
from tutti.gio_uring.gpu.mover import BatchCopyMover, CopyMover, Mover
from tutti.gio_uring.gpu.pinned_memory import PinnedMemory, TableMemory
from tutti.gio_uring.memory import HostBuffer
from tutti.memory.device_memory import DeviceMemory
from tutti.store import ObjectStore
from tutti.transfers.store_config import StoreConfig

PAGES = GEOMETRY.slots


@contextmanager
def store_on_gpu(
    driver: CudaDriver, mover: Mover | None = None, *, timeout_s: float = 10.0
) -> Iterator[tuple[ObjectStore, DeviceMemory, MemoryController]]:
    controller = controller_of(formatted())
    store = ObjectStore(controller, ["member0"], config=StoreConfig(timeout_s=timeout_s))
    tensor = Allocation(driver, PAGES * LAYOUT.object_nbytes)
    try:
        gpu = HostEngine(
            driver,
            store.engine,
            mover=mover,
            load_staging_nbytes=2 << 20,
            store_staging_nbytes=2 << 20,
        )
        store.attach(gpu)
        yield (
            store,
            store.register(DeviceMemory.from_buffer(LAYOUT, tensor, PAGES, gpu=gpu)),
            controller,
        )
    finally:
        store.close()
        tensor.close()


@pytest.mark.parametrize("name", ["copy-batch", "copy", "kernel"])
def test_pages_travel_and_come_back(
    driver: CudaDriver, modules: Modules, rng: np.random.Generator, name: str
) -> None:
    tables = TableMemory(driver, 1 << 20)
    movers = {
        "copy-batch": lambda: BatchCopyMover(driver),
        "copy": lambda: CopyMover(driver),
        "kernel": lambda: KernelMover(driver, modules["gio_move"], tables),
    }
    try:
        mover = movers[name]()
    except Unsupported as error:
        pytest.skip(str(error))
    with store_on_gpu(driver, mover) as (store, pool, _):
        keys = some_keys(rng, 12)
        sent = rng.permutation(PAGES)[:12].tolist()
        contents = [rng.bytes(LAYOUT.object_nbytes) for _ in sent]
        for page, content in zip(sent, contents, strict=True):
            pool.write(page, content)
        assert store.put(keys, sent).wait(30).stored == 12
        for page in range(PAGES):
            pool.write(page, bytes(LAYOUT.object_nbytes))
        pages = rng.permutation(PAGES)[:12].tolist()
        ticket = store.load(keys, pages)
        for layer in range(LAYOUT.layers):
            ticket.wait_layer(layer, 30)
        assert ticket.wait_settled(30)
        assert [pool.read(page) for page in pages] == contents
    tables.close()


def test_a_compute_stream_waits_for_its_layer(driver: CudaDriver, rng: np.random.Generator) -> None:
    with store_on_gpu(driver) as (store, pool, _):
        keys, pages = some_keys(rng, 8), list(range(8))
        contents = [rng.bytes(LAYOUT.object_nbytes) for _ in pages]
        for page, content in zip(pages, contents, strict=True):
            pool.write(page, content)
        compute = driver.create_stream()
        pool.follow(compute)
        store.put(keys, pages).wait(30)
        ticket = store.load(keys, list(range(8, 16)))
        n = LAYOUT.segments[0]
        out = Allocation(driver, LAYOUT.layers * n)
        for layer in range(LAYOUT.layers):
            ticket.order_stream(compute, layer)
            source = int(pool.memory.bases[layer, 0]) + 9 * pool.memory.stride_nbytes[0]
            driver.copy(out.address + layer * n, source, n, compute)
        wait_until(lambda: driver.is_stream_done(compute))
        ticket.wait(30)
        step = sum(LAYOUT.segments)
        expected = b"".join(contents[1][i * step :][:n] for i in range(LAYOUT.layers))
        assert out.read().tobytes() == expected
        out.close()
        driver.destroy_stream(compute)


def test_a_dead_controller_lets_every_stream_go(
    driver: CudaDriver, rng: np.random.Generator
) -> None:
    # The put has to end within it, and all layers to be ordered, also on a machine with much to do.
    with store_on_gpu(driver, timeout_s=2.0) as (store, pool, controller):
        keys, pages = some_keys(rng, 8), list(range(8))
        for page in pages:
            pool.write(page, rng.bytes(LAYOUT.object_nbytes))
        store.put(keys, pages).wait(30)
        controller.set_faults(Faults(stall_from=4))
        ticket = store.load(keys, list(range(8, 16)))
        streams = [driver.create_stream() for _ in range(LAYOUT.layers)]
        for layer, stream in enumerate(streams):
            ticket.order_stream(stream, layer)
        with pytest.raises((DeviceTimeout, MediumError)):
            ticket.wait(30)
        for stream in streams:
            wait_until(lambda stream=stream: driver.is_stream_done(stream))  # type: ignore[misc]
            driver.destroy_stream(stream)
        assert ticket.failed().size
        controller.set_faults(None)
        controller.release()
        assert ticket.wait_settled(30)


def test_closing_with_work_in_flight(driver: CudaDriver, rng: np.random.Generator) -> None:
    with store_on_gpu(driver, timeout_s=1.0) as (store, _, controller):
        keys = some_keys(rng, 8)
        store.put(keys, list(range(8))).wait(30)
        controller.set_faults(Faults(stall_from=2))
        store.load(keys, list(range(8, 16)))
        store.put(some_keys(rng, 8), list(range(8)))
        began = time.monotonic()
        store.close(3.0)
        assert time.monotonic() - began < 60


def test_memory_is_registered_once(driver: CudaDriver) -> None:
    buffer = HostBuffer(4 << 20)
    first = PinnedMemory(driver, buffer)
    second = PinnedMemory(driver, buffer.array[1 << 20 : 2 << 20])
    assert second.device_address == first.to_device(buffer.address + (1 << 20))
    second.close()
    first.close()
    PinnedMemory(driver, buffer).close()


def test_green_contexts_and_torch_streams(driver: CudaDriver) -> None:
    found = driver.sm_resource()
    assert found.count >= found.minimum >= 1
    part = partition(driver, found.minimum)
    assert part.is_partition, part.reason
    assert part.sms >= found.minimum
    stream = part.create_stream()
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    with torch.cuda.stream(torch.cuda.ExternalStream(stream)):
        total = torch.arange(1000, device="cuda").sum()
    wait_until(lambda: driver.is_stream_done(stream))
    assert int(total) == 499500
    part.close()


def test_torch_tensors_are_pools(driver: CudaDriver, rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    with store_on_gpu(driver) as (store, pool, _):
        tensors = [
            [torch.zeros(8 * n, dtype=torch.uint8, device="cuda") for n in LAYOUT.segments]
            for _ in range(LAYOUT.layers)
        ]
        mine = DeviceMemory.from_layers(LAYOUT, tensors, 8, gpu=pool.gpu)
        store.register(mine)
        for row in tensors:
            for tensor in row:
                tensor.copy_(torch.randint(0, 256, tensor.shape, dtype=torch.uint8))
        before = [[tensor.clone() for tensor in row] for row in tensors]
        stream = torch.cuda.current_stream().cuda_stream
        mine.follow(stream)
        keys = some_keys(rng, 8)
        store.put(keys, list(range(8)), memory=mine).wait(30)
        for row in tensors:
            for tensor in row:
                tensor.zero_()
        mine.follow(stream)
        ticket = store.load(keys, list(range(8)), memory=mine)
        for layer in range(LAYOUT.layers):
            ticket.order_stream(stream, layer)
        torch.cuda.synchronize()
        assert all(
            torch.equal(a, b)
            for x, y in zip(tensors, before, strict=True)
            for a, b in zip(x, y, strict=True)
        )
        ticket.wait(30)
        store.unregister(mine)
