"""One store on a GPU: its controller serves the host's engine and every engine of kernels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest
from gpu.device_memory import Allocation
from memory_controller import Faults
from slot_addresses import slot_lba

from store.pools import LAYOUT, controller_of, formatted, names, some_keys
from tutti.errors import CapacityError, ChecksumMismatch, DeviceTimeout, TuttiError
from tutti.gio_uring.controller import NativeController
from tutti.gio_uring.controller_span import SpanController
from tutti.gio_uring.gpu.device_code import Modules
from tutti.gio_uring.gpu.device_engine import KINDS, DeviceEngine, KernelSize
from tutti.gio_uring.gpu.driver import CudaDriver
from tutti.gio_uring.gpu.host_engine import HostEngine
from tutti.gio_uring.gpu.verifier import Verifier
from tutti.memory.device_memory import DeviceMemory
from tutti.store import ObjectStore
from tutti.transfers.store_config import StoreConfig

PAGES = 16
ENGINES = ("host", *KINDS)


class Rig:
    """A store with one engine for GPU memory, and pages in that memory."""

    def __init__(
        self,
        driver: CudaDriver,
        modules: Modules,
        kind: str,
        timeout_s: float,
        controller: NativeController | None = None,
        members: Sequence[str] = ("member0",),
    ) -> None:
        # Allocated before a kernel stays, and freed after it has ended.
        self.bytes = Allocation(driver, PAGES * LAYOUT.object_nbytes)
        self.controller = controller or controller_of(formatted())
        self.store = ObjectStore(
            self.controller, members, config=StoreConfig(timeout_s=timeout_s, verify="always")
        )
        self.attach(driver, modules, kind)

    def attach(self, driver: CudaDriver, modules: Modules, kind: str) -> None:
        """An engine for the store, and the pages as its memory."""
        self.engine = attach(self.store, driver, modules, kind)
        self.memory = self.store.register(
            DeviceMemory.from_buffer(LAYOUT, self.bytes, PAGES, gpu=self.engine)
        )


def attach(
    store: ObjectStore, driver: CudaDriver, modules: Modules, kind: str, nbytes: int = 1 << 20
) -> HostEngine | DeviceEngine:
    engine: HostEngine | DeviceEngine
    if kind == "host":
        engine = HostEngine(
            driver,
            store.engine,
            verifier=Verifier(driver, modules, tables_nbytes=1 << 20, blocks=2),
            load_staging_nbytes=nbytes,
            store_staging_nbytes=nbytes,
        )
    else:
        engine = DeviceEngine(
            driver, modules, store.engine.controller, kind=kind,
            kernels=KernelSize(shares=2, depth=16), staging_nbytes=nbytes,
        )  # fmt: skip
    store.attach(engine)
    return engine


@contextmanager
def rig_of(
    driver: CudaDriver,
    modules: Modules,
    kind: str,
    timeout_s: float = 20.0,
    controller: NativeController | None = None,
    members: Sequence[str] = ("member0",),
) -> Iterator[Rig]:
    rig = Rig(driver, modules, kind, timeout_s, controller, members)
    try:
        yield rig
    finally:
        rig.store.close()
        rig.bytes.close()


def check_objects_come_back(rig: Rig, rng: np.random.Generator) -> None:
    """Puts and loads of pages in GPU memory, bit for bit, while pages of the host go both ways."""
    content = rng.integers(0, 256, rig.bytes.nbytes, dtype=np.uint8)
    rig.bytes.write(content)
    keys, own = some_keys(rng, 8), some_keys(rng, 4)
    host = rig.store.allocate_memory(4)
    for page in range(4):
        host.write(page, rng.bytes(LAYOUT.object_nbytes))
    tickets = [
        rig.store.put(keys, list(range(8)), memory=rig.memory),
        rig.store.put(own, [0, 1, 2, 3], memory=host),
    ]
    assert [ticket.wait(30).stored for ticket in tickets] == [8, 4]
    rig.bytes.write(np.zeros(rig.bytes.nbytes, np.uint8))
    kept = [host.read(page) for page in range(4)]
    for page in range(4):
        host.write(page, bytes(LAYOUT.object_nbytes))
    target = [15, 2, 9, 4, 11, 6, 13, 0]
    loads = [
        rig.store.load(keys, target, memory=rig.memory),
        rig.store.load(own, [3, 2, 1, 0], memory=host),
    ]
    for load in loads:
        load.wait(30)
    assert [host.read(page) for page in (3, 2, 1, 0)] == kept
    pages = content.reshape(LAYOUT.layers, -1)  # layer by layer, segment by segment
    back = rig.bytes.read().reshape(LAYOUT.layers, -1)
    for layer in range(LAYOUT.layers):
        start = 0
        for nbytes in LAYOUT.segments:
            was = pages[layer, start : start + nbytes * PAGES].reshape(PAGES, nbytes)
            now = back[layer, start : start + nbytes * PAGES].reshape(PAGES, nbytes)
            assert (now[target] == was[:8]).all()
            start += nbytes * PAGES


@pytest.mark.parametrize("kind", ENGINES)
def test_memory_whose_pages_never_fit_the_staging_is_refused_at_once(
    driver: CudaDriver, modules: Modules, kind: str
) -> None:
    with rig_of(driver, modules, kind) as rig:
        small = attach(rig.store, driver, modules, kind, 4096)
        memory = DeviceMemory.from_buffer(LAYOUT, rig.bytes, PAGES, gpu=small)
        with pytest.raises(CapacityError, match=r"page of one layer needs .*gpu_staging"):
            rig.store.register(memory)
        assert all(memory is not known for known in rig.store._resources.memories)


@pytest.mark.parametrize("kind", ENGINES)
def test_objects_come_back_beside_the_hosts_own(
    driver: CudaDriver, modules: Modules, rng: np.random.Generator, kind: str
) -> None:
    with rig_of(driver, modules, kind) as rig:
        check_objects_come_back(rig, rng)


@pytest.mark.parametrize("kind", KINDS)
def test_a_pool_on_namespaces_of_two_drives(
    driver: CudaDriver, modules: Modules, rng: np.random.Generator, kind: str
) -> None:
    """Kernels ring each drive, and name a namespace as its drive does."""
    images = formatted(members=2)
    empty = np.zeros(images[0].size, np.uint8)
    drives = [controller_of([empty, images[1]]), controller_of([images[0]])]
    span = SpanController(drives, places=[(1, 1), (0, 2)])
    with rig_of(driver, modules, kind, controller=span, members=names(2)) as rig:
        before = [drive.stats().commands for drive in drives]
        check_objects_come_back(rig, rng)
        assert all(
            drive.stats().commands > count for drive, count in zip(drives, before, strict=True)
        )
        assert not drives[0].medium(1).any(), "the other namespace"


@pytest.mark.parametrize("kind", ENGINES)
def test_damage_is_found_and_the_object_quarantined(
    driver: CudaDriver, modules: Modules, rng: np.random.Generator, kind: str
) -> None:
    with rig_of(driver, modules, kind) as rig:
        rig.bytes.write(rng.integers(0, 256, rig.bytes.nbytes, dtype=np.uint8))
        keys = some_keys(rng, 6)
        rig.store.put(keys, list(range(6)), memory=rig.memory).wait(30)
        slot = rig.store._core.index.find(keys[2:3])
        lba = int(slot_lba(rig.store.geometry, slot, 1)[0])
        start = lba * rig.store.geometry.lba_nbytes
        rig.controller.medium(1)[start : start + 4] ^= 0x5A
        ticket = rig.store.load(keys, list(range(6, 12)), memory=rig.memory)
        with pytest.raises(ChecksumMismatch) as caught:
            ticket.wait(30)
        assert caught.value.pages == (2,)
        assert ticket.wait_settled(30)  # objects are judged by then
        assert rig.store.match(keys) == 2


@pytest.mark.parametrize("kind", ENGINES)
def test_a_drive_that_answers_no_more_ends_in_time(
    driver: CudaDriver, modules: Modules, rng: np.random.Generator, kind: str
) -> None:
    """The deadline passes, the store closes with a reset, and all memory is free again."""
    with rig_of(driver, modules, kind, timeout_s=2.0) as rig:
        rig.bytes.write(rng.integers(0, 256, rig.bytes.nbytes, dtype=np.uint8))
        keys = some_keys(rng, 6)
        rig.store.put(keys, list(range(6)), memory=rig.memory).wait(30)
        rig.controller.set_faults(Faults(stall_from=2))
        ticket = rig.store.load(keys, list(range(6, 12)), memory=rig.memory)
        with pytest.raises((DeviceTimeout, TuttiError)):
            ticket.wait(30)
        assert ticket.failed().size
        rig.controller.set_faults(None)
        rig.controller.release()
