"""One engine over several drives: a thread for each, and jobs that all of them share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from memory_controller import Faults, MemoryController
from nvme_host import NvmeHost

import tutti
from store.pools import GEOMETRY, LAYOUT
from tutti.errors import ConfigError, DeviceTimeout
from tutti.gio_uring.controller_file import FileController
from tutti.gio_uring.controller_span import SpanController
from tutti.gio_uring.engine import PRIORITY_LOAD, Engine
from tutti.gio_uring.file_creation import allocate_file
from tutti.gio_uring.iocb import Extents, PagedMemory
from tutti.gio_uring.job import Job
from tutti.gio_uring.memory import HostBuffer
from tutti.gio_uring.nvme_spec import (
    OPCODE_READ,
    OPCODE_WRITE,
    STATUS_OK,
    STATUS_TIMED_OUT,
    STATUS_UNRECOVERED_READ,
)
from tutti.pool.block_io import opened_io
from tutti.pool.member_controller import open_controller
from tutti.pool.members import Members
from tutti.store import ObjectStore
from tutti.transfers.store_config import StoreConfig

LAYERS, PAGES, NBYTES = 4, 16, 4096
DRIVES = 3


class Rig:
    """Drives of memory, and pages that take turns on them: page p is on drive p % DRIVES."""

    def __init__(self) -> None:
        self.drives = [MemoryController([4 << 20]) for _ in range(DRIVES)]
        self.span = SpanController(self.drives)
        self.engine = Engine(self.span)
        self.buffer = HostBuffer(LAYERS * PAGES * NBYTES)
        self.region = self.span.register(self.buffer)
        layers = np.arange(LAYERS, dtype=np.uint64) * np.uint64(PAGES * NBYTES)
        bases = (np.uint64(self.buffer.address) + layers)[:, None]
        self.memory = PagedMemory(bases, (NBYTES,), (NBYTES,), PAGES)

    def submit(self, opcode: int, **options: object) -> Job:
        page = np.arange(PAGES)
        extents = Extents(page // DRIVES, page % DRIVES + 1, [1] * PAGES, 1, 64)
        pages = self.memory.check_pages(page)
        return self.engine.submit(opcode, extents, pages, self.memory, **options)  # type: ignore[arg-type]

    def close(self) -> None:
        self.engine.close(5)
        self.region.close()
        self.span.close()


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.close()


def test_a_job_is_shared_by_the_drives(rig: Rig, seed: int) -> None:
    content = np.random.default_rng(seed).integers(0, 256, rig.buffer.nbytes, dtype=np.uint8)
    rig.buffer.array[:] = content
    digests = np.zeros((PAGES, LAYERS), np.uint64)
    assert rig.submit(OPCODE_WRITE, digests=digests).wait_released(10)
    rig.buffer.array[:] = 0
    job = rig.submit(OPCODE_READ, digests=digests, compare=True, priority=PRIORITY_LOAD)
    for layer in range(LAYERS):
        assert job.wait_layers(layer + 1, 10)
    assert job.wait_released(10)
    assert not job.page_status.any()
    assert (rig.buffer.array == content).all()
    of_drive = [(np.arange(PAGES) % DRIVES == i).sum() * LAYERS for i in range(DRIVES)]
    assert [stats.commands for stats in rig.engine.windows()] == [2 * n for n in of_drive]
    assert [drive.stats().commands for drive in rig.drives] == [2 * n for n in of_drive]
    assert [stats.bytes_read for stats in rig.engine.windows()] == [n * NBYTES for n in of_drive]


def test_an_error_of_one_drive_fails_its_pages_alone(rig: Rig) -> None:
    assert rig.submit(OPCODE_WRITE).wait_released(10)
    rig.drives[1].set_faults(Faults(status_ppm=1_000_000))
    job = rig.submit(OPCODE_READ)
    assert job.wait_released(10)
    expected = [STATUS_UNRECOVERED_READ if p % DRIVES == 1 else STATUS_OK for p in range(PAGES)]
    assert job.page_status.tolist() == expected
    assert job.report().layers_ready == LAYERS


def test_a_drive_that_is_stuck_is_reset_and_the_others_go_on(rig: Rig) -> None:
    rig.drives[2].set_faults(Faults(stall_from=1))
    job = rig.submit(OPCODE_READ, timeout_s=0.05)
    assert job.wait_layers(LAYERS, 10)
    assert job.report().status == STATUS_TIMED_OUT
    assert not job.wait_released(0.05)  # the drive may still write
    rig.engine.reset(10)
    assert job.wait_released(10)
    rig.drives[2].set_faults(Faults())
    assert rig.submit(OPCODE_READ).wait_released(10)


def test_a_reset_that_fails_on_one_drive_is_reported(rig: Rig) -> None:
    rig.drives[1].set_faults(Faults(stall_from=1, reset_fails=True))
    job = rig.submit(OPCODE_READ, timeout_s=0.05)
    assert job.wait_layers(LAYERS, 10)
    with pytest.raises(DeviceTimeout):
        rig.span.reset(0.05)
    assert not job.wait_released(0.0)
    rig.drives[1].set_faults(Faults())
    rig.span.reset(10)
    assert job.wait_released(10)


def test_jobs_are_cancelled_on_all_drives(rig: Rig) -> None:
    for drive in rig.drives:
        drive.set_faults(Faults(delay_ppm=1_000_000, delay_turns=50))
    jobs = [rig.submit(OPCODE_READ) for _ in range(8)]
    for job in jobs:
        job.cancel()
    assert all(job.wait_released(10) for job in jobs)


def test_service_threads_end_with_work_left() -> None:
    made = Rig()
    jobs = [made.submit(OPCODE_WRITE) for _ in range(32)]
    made.close()
    assert all(job.wait_released(0.0) for job in jobs)


def test_members_that_one_thread_each_serves(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("left", "right")]
    for path in paths:
        allocate_file(path, 1 << 20)
    with FileController(paths, service_threads=2) as controller:
        assert controller.routes == [(0, 1), (1, 2)]
        engine = Engine(controller)
        assert engine.service_threads == 2
        engine.close()
    with FileController(paths) as controller:
        assert len(controller.handles) == 1, "one drive"
    with pytest.raises(ConfigError, match="service_threads=0"):
        FileController(paths, service_threads=0)
    with pytest.raises(ConfigError, match=r"service_threads=3; .* pass 1 to 2"):
        FileController(paths, service_threads=3)


def test_more_threads_than_files_are_an_error_of_open(tmp_path: Path) -> None:
    """The number is never reduced silently."""
    paths = [str(tmp_path / name) for name in ("left", "right")]
    with pytest.raises(ConfigError, match="service_threads=3"):
        tutti.open(paths, LAYOUT, "8MiB", config=StoreConfig(service_threads=3))
    with tutti.open(paths, LAYOUT, config=StoreConfig(service_threads=2)) as store:
        assert store.engine.service_threads == 2
    with pytest.raises(ConfigError, match="service_threads is 2, but each vfio drive"):
        open_controller(["nvme:0000:99:00.0"], service_threads=2)


def test_an_idle_controller_does_not_delay_the_others(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("left", "right")]
    for path in paths:
        allocate_file(path, 1 << 20)
    with FileController(paths, service_threads=2) as controller:
        host = NvmeHost(controller)
        for i in range(16):  # if an idle one slept to the end, this would take too long
            assert host.write(i, bytes([i]) * controller.info.lba_nbytes) == STATUS_OK
        host.close()


def test_a_pool_on_drives_reports_each(seed: int) -> None:
    drives = [MemoryController([8 << 20]) for _ in range(2)]
    span = SpanController(drives)
    names = ["left", "right"]
    with opened_io(span) as (engine, io):
        Members.format(io, engine, names, LAYOUT, GEOMETRY)
    with ObjectStore(span, names) as store:
        store.wait_recovered(10)
        pool = store.allocate_memory(32, hugepages=False)
        rng = np.random.default_rng(seed)
        keys = rng.integers(0, 256, (32, 16), dtype=np.uint8)
        content = [rng.bytes(LAYOUT.object_nbytes) for _ in range(32)]
        for page, one in enumerate(content):
            pool.write(page, one)
        assert store.put(keys, np.arange(32)).wait(10).stored == 32
        store.load(keys, np.arange(32)[::-1].copy()).wait(10)
        assert [pool.read(31 - page) for page in range(32)] == content
        stats = store.stats()["drives"]
        assert len(stats) == 2
        assert all(drive["read_nbytes"] > 0 and drive["written_nbytes"] > 0 for drive in stats)
        assert sum(drive["commands"] for drive in stats) == store.stats()["commands"]
    assert span.is_closed


def test_drives_whose_blocks_differ_are_no_pool() -> None:
    drives = [MemoryController([4 << 20], lba_nbytes=nbytes) for nbytes in (512, 4096)]
    with pytest.raises(ConfigError, match="the same block size"):
        SpanController(drives)
    for drive in drives:
        drive.close()
