"""In the guest: the device kernels ring the registers of an emulated drive, no GPU is involved.

Kernels run on fibers behind the stand-in of libcuda.so.1 and store to BAR0 as vfio maps it.  The
drive writes to pinned memory by DMA, and kernels move it to the pages.
"""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path

import numpy as np
import pytest
from gpu.conftest import driver as driver
from gpu.conftest import modules as modules
from gpu.test_store_engines import Rig, check_objects_come_back, rig_of

from qemu.cases_drive import BLOCKS
from qemu.inside import OUT, Drives
from store.pools import GEOMETRY, LAYOUT, names, some_keys
from tutti.errors import TuttiError
from tutti.gio_uring.controller import NativeController
from tutti.gio_uring.controller_span import SpanController
from tutti.gio_uring.controller_vfio import VfioController
from tutti.gio_uring.gpu.device_code import Modules
from tutti.gio_uring.gpu.device_engine import KINDS, DeviceEngine
from tutti.gio_uring.gpu.driver import CudaDriver
from tutti.gio_uring.iocb import Extents, flat_memory
from tutti.gio_uring.job import Job
from tutti.gio_uring.memory import DmaRegion, HostBuffer
from tutti.gio_uring.nvme_spec import OPCODE_READ
from tutti.pool.block_io import opened_io
from tutti.pool.members import Members

LEFT, SLOW, RIGHT = range(3)  # as the guest counts them: RIGHT is behind a port
DEADLINE_S = 60.0


def drive_of(drives: Drives, place: int, *, use_sgl: bool | None = None) -> VfioController:
    return VfioController(drives.bdfs[place], shadow_doorbells=False, use_sgl=use_sgl)


def format_pool(controller: NativeController, members: int) -> None:
    with controller, opened_io(controller) as (engine, io):
        Members.format(io, engine, names(members), LAYOUT, GEOMETRY)


def report_queues(*controllers: VfioController) -> None:
    """Tells the host which queue pairs kernels have, by drive."""
    path = OUT / "queues"
    known = json.loads(path.read_text()) if path.exists() else {}
    for controller in controllers:
        found = [pair.qid for pair in controller._queue_pairs if pair.is_device]
        assert found
        assert known.setdefault(controller.identity.serial, found) == found
    path.write_text(json.dumps(known))


@pytest.fixture
def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.mark.parametrize("use_sgl", [True, False], ids=["sgl", "prp"])
@pytest.mark.parametrize("kind", KINDS)
def test_objects_come_back(
    drives: Drives,
    driver: CudaDriver,
    modules: Modules,
    rng: np.random.Generator,
    kind: str,
    use_sgl: bool,
) -> None:
    format_pool(drive_of(drives, LEFT), 1)
    controller = drive_of(drives, LEFT, use_sgl=use_sgl)
    assert controller.doorbell_registers, "tier T1"
    assert bool(controller.info.sgl_descriptors) == use_sgl
    with rig_of(driver, modules, kind, controller=controller) as rig:
        report_queues(controller)
        check_objects_come_back(rig, rng)


@pytest.mark.parametrize("kind", KINDS)
def test_two_drives(
    drives: Drives, driver: CudaDriver, modules: Modules, rng: np.random.Generator, kind: str
) -> None:
    def span() -> SpanController:
        return SpanController([drive_of(drives, place) for place in (LEFT, RIGHT)])

    format_pool(span(), 2)
    controller = span()
    with rig_of(driver, modules, kind, controller=controller, members=names(2)) as rig:
        report_queues(*controller.drives)  # type: ignore[arg-type]
        check_objects_come_back(rig, rng)


def keep_busy(rig: Rig, reads: int = 24) -> tuple[list[Job], DmaRegion]:
    """Seconds of reads by the host's engine, ahead of what kernels will ring."""
    engine, nbytes = rig.store.engine, rig.store.engine.lba_nbytes
    buffer = HostBuffer(BLOCKS * nbytes)
    region = rig.controller.register(buffer)
    memory = flat_memory(buffer.address, nbytes, BLOCKS, buffer)
    pages, whole = np.arange(BLOCKS, dtype=np.uint32), Extents([0], [1], [BLOCKS], 1)
    jobs = [engine.submit(OPCODE_READ, whole, pages, memory, timeout_s=30.0) for _ in range(reads)]
    return jobs, region


@pytest.mark.parametrize("kind", KINDS)
def test_a_deadline_then_a_reset_then_a_new_engine(
    drives: Drives, driver: CudaDriver, modules: Modules, rng: np.random.Generator, kind: str
) -> None:
    """Memory comes back by the reset alone, and registers are mapped anew behind it."""
    format_pool(drive_of(drives, SLOW), 1)
    controller = drive_of(drives, SLOW)
    with rig_of(driver, modules, kind, 2.0, controller) as rig:
        content = rng.integers(0, 256, rig.bytes.nbytes, dtype=np.uint8)
        rig.bytes.write(content)
        keys = some_keys(rng, 6)
        assert rig.store.put(keys, list(range(6)), memory=rig.memory).wait(30).stored == 6
        ahead, region = keep_busy(rig)
        ticket = rig.store.load(keys, list(range(6, 12)), memory=rig.memory)
        with pytest.raises(TuttiError):
            ticket.wait(30)
        assert isinstance(rig.engine, DeviceEngine)
        assert rig.engine.kept_jobs == 1
        assert not ticket.wait_settled(0.0)
        rig.engine.close(30)
        assert ticket.wait_settled(30)
        assert all(job.wait_released(30) for job in ahead)
        region.close()
        [after], region = keep_busy(rig, 1)  # QEMU makes up for the time of what was ended
        assert after.wait_released(30)
        assert not after.page_status.any()
        region.close()
        rig.attach(driver, modules, kind)
        rig.store.load(keys, list(range(6, 12)), memory=rig.memory).wait(30)


def test_unplugged(
    drives: Drives, driver: CudaDriver, modules: Modules, rng: np.random.Generator
) -> None:
    """Kernels end by their deadline, and what they had is free once the store is closed."""
    format_pool(drive_of(drives, RIGHT), 1)
    controller = drive_of(drives, RIGHT)
    rig = Rig(driver, modules, "launch", 2.0, controller)
    rig.bytes.write(rng.integers(0, 256, rig.bytes.nbytes, dtype=np.uint8))
    keys = some_keys(rng, 6)
    assert rig.store.put(keys, list(range(6)), memory=rig.memory).wait(30).stored == 6
    for _ in range(3):
        rig.store.load(keys, list(range(6, 12)), memory=rig.memory).wait(30)
    (OUT / "loading").touch()
    deadline_s = time.monotonic() + DEADLINE_S

    def load_on() -> None:
        while time.monotonic() < deadline_s:
            rig.store.load(keys, list(range(6, 12)), memory=rig.memory).wait(30)

    with pytest.raises(TuttiError):
        load_on()
    while (Path("/sys/bus/pci/devices") / drives.bdfs[RIGHT]).exists():
        assert time.monotonic() < deadline_s, "the kernel still waits for the drive"
        time.sleep(0.05)
    assert controller.is_gone
    with contextlib.suppress(TuttiError):  # nothing can be written any more
        rig.store.close()
    rig.bytes.close()
