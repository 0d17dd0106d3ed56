"""The GPU engines `launch` and `resident` on the stand-in driver.

The kernels here are short Python ones that read the same tables: they show that the host side fills
every table with the right addresses and launches in the right order, not that device code works.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import xxhash
from gio_uring.cuda_stand_in import DEVICE_MARK, PINNED_MARK, StandInDriver, StandInTensor

from tutti.errors import CapacityError, ConfigError, DeviceTimeout
from tutti.gio_uring import gpu_device_engine, gpu_modules
from tutti.gio_uring.controller_memory import MemoryController
from tutti.gio_uring.device_batch import (
    RUN_PENDING,
    BatchStruct,
    QueueShareStruct,
    RunStateStruct,
    SliceTableStruct,
)
from tutti.gio_uring.engine import Engine, Extents
from tutti.gio_uring.gpu_batch import KernelMover
from tutti.gio_uring.gpu_device_engine import DeviceEngine, DeviceJob, split_shares
from tutti.gio_uring.gpu_engine import HostEngine
from tutti.gio_uring.gpu_memory import TableMemory
from tutti.gio_uring.gpu_modules import CubinCache, DeviceSource, Modules
from tutti.gio_uring.iocb import RUN_DTYPE, IocbStruct, PagedMemory
from tutti.gio_uring.layer_words import LayerWordStruct
from tutti.gio_uring.memory import view_at
from tutti.gio_uring.nvme_spec import (
    OPCODE_READ,
    OPCODE_WRITE,
    STATUS_DIGEST_MISMATCH,
    STATUS_TIMED_OUT,
)
from tutti.gio_uring.queue_pair import QueuePairStruct

LAYERS, PAGES, SEGMENTS, NLB = 5, 16, (3000, 1096), 1


class Kernels:
    """What the kernels do with the tables, without queues: commands go straight to the medium."""

    def __init__(self, driver: StandInDriver, medium: np.ndarray) -> None:
        self.driver = driver
        self.medium = medium
        self.lost: set[int] = set()  # layers whose commands are never answered
        for name in ("submit", "drain", "resident"):
            driver.kernels[f"gio_{name}_word"] = getattr(self, name)
        driver.kernels["gio_move"] = self.move

    def at(self, kind: type[ctypes.Structure], address: int, index: int = 0) -> ctypes.Structure:
        nbytes = ctypes.sizeof(kind)
        assert address & (DEVICE_MARK | PINNED_MARK), "kernels use device addresses"
        return kind.from_address(self.driver.host(address + index * nbytes, nbytes))

    def words(self, address: int, count: int, kind: str = "<u4") -> np.ndarray:
        nbytes = count * np.dtype(kind).itemsize
        return view_at(self.driver.host(address, nbytes), nbytes).view(kind)

    def submit(self, batch: int, layer: int) -> None:
        self._send(batch, layer)

    def drain(self, batch: int, layer: int, publish: int) -> None:
        self._send(batch, layer)
        if publish:
            self._publish(batch, layer)

    def resident(self, batch: int, layer: int, publish: int) -> None:
        table = self.at(SliceTableStruct, self.at(BatchStruct, batch).slices)
        reads = self.at(IocbStruct, table.paged).opcode == OPCODE_READ
        for step in (self._send, self._move) if reads else (self._move, self._send):
            step(batch, layer)
        if publish:
            self._publish(batch, layer)

    def move(self, batch: int, layer: int, publish: int) -> None:
        self._move(batch, layer)
        if publish:
            self._publish(batch, layer)

    def _send(self, batch_address: int, layer: int) -> None:
        """All runs of all shares that were not sent yet."""
        batch = self.at(BatchStruct, batch_address)
        io = self.at(IocbStruct, batch.iocb)
        runs = self.words(batch.iocb and io.runs, io.n_runs * RUN_DTYPE.itemsize, "u1")
        table = runs.view(RUN_DTYPE)
        pages = self.words(io.pages, io.n_pages)
        bases = self.words(io.bases, io.n_layers * io.n_segments, "<u8")
        for number in range(batch.n_shares):
            share = self.at(QueueShareStruct, batch.shares, number)
            queue = self.at(QueuePairStruct, share.qp)
            assert queue.depth == 16
            assert queue.cid_free & DEVICE_MARK
            assert queue.sq & PINNED_MARK
            assert self.words(queue.cid_free, 1)[0] == 0x7FFF
            assert share.lists & PINNED_MARK
            for i in range(share.first_run, share.first_run + share.n_runs):
                state = self.at(RunStateStruct, batch.states, layer * io.n_runs + i)
                if state.status != RUN_PENDING:
                    continue
                state.status = 0
                if layer in self.lost:
                    self._fail(batch, layer, table[i], STATUS_TIMED_OUT)
                    continue
                self._transfer(io, table[i], pages, int(bases[layer]), layer)

    def _transfer(
        self, io: IocbStruct, run: np.void, pages: np.ndarray, base: int, layer: int
    ) -> None:
        slice_nbytes = io.slice_nlb << io.lba_shift
        lba = int(run["slba"]) + layer * io.layer_stride_nlb
        for n in range(int(run["nlb"]) // io.slice_nlb):
            host = base + int(pages[int(run["first"]) + n]) * io.segment_stride[0]
            assert not host & (DEVICE_MARK | PINNED_MARK), (
                "commands name the controller's addresses"
            )
            place = (lba << io.lba_shift) + n * slice_nbytes
            there = self.medium[place : place + io.segment_nbytes[0]]
            here = view_at(host, io.segment_nbytes[0])
            if io.opcode == OPCODE_READ:
                here[:] = there
            else:
                there[:] = here

    def _fail(self, batch: BatchStruct, layer: int, run: np.void, status: int) -> None:
        table = self.at(SliceTableStruct, batch.slices)
        paged = self.at(IocbStruct, table.paged)
        for n in range(int(run["nlb"]) // paged.slice_nlb):
            self.words(table.page_status, paged.n_pages)[int(run["first"]) + n] = status
        self.at(LayerWordStruct, batch.flags, layer).status = status

    def _move(self, batch_address: int, layer: int) -> None:
        batch = self.at(BatchStruct, batch_address)
        table = self.at(SliceTableStruct, batch.slices)
        paged = self.at(IocbStruct, table.paged)
        pages = self.words(paged.pages, paged.n_pages)
        bases = self.words(paged.bases, paged.n_layers * paged.n_segments, "<u8")
        staged = int(self.words(table.staged_bases, paged.n_layers, "<u8")[layer])
        for i, page in enumerate(pages.tolist()):
            start = staged + i * table.staged_stride
            parts = []
            for k in range(paged.n_segments):
                n = paged.segment_nbytes[k]
                there = int(bases[layer * paged.n_segments + k]) + page * paged.segment_stride[k]
                page_bytes = view_at(self.driver.host(there, n), n)
                stage_bytes = view_at(self.driver.host(start, n), n)
                if paged.opcode == OPCODE_READ:
                    page_bytes[:] = stage_bytes
                else:
                    stage_bytes[:] = page_bytes
                parts.append(stage_bytes.tobytes())
                start += n
            if table.digests:
                self._digest(batch, layer, i, b"".join(parts))

    def _digest(self, batch: BatchStruct, layer: int, i: int, content: bytes) -> None:
        table = self.at(SliceTableStruct, batch.slices)
        paged = self.at(IocbStruct, table.paged)
        known = self.words(table.digests, paged.n_pages * paged.n_layers, "<u8")
        place = i * paged.n_layers + layer
        if paged.opcode != OPCODE_READ:
            known[place] = xxhash.xxh3_64_intdigest(content)
        elif known[place] != xxhash.xxh3_64_intdigest(content):
            self.words(table.page_status, paged.n_pages)[i] = STATUS_DIGEST_MISMATCH
            self.at(LayerWordStruct, batch.flags, layer).status = STATUS_DIGEST_MISMATCH

    def _publish(self, batch_address: int, layer: int) -> None:
        batch = self.at(BatchStruct, batch_address)
        self.at(LayerWordStruct, batch.flags, layer).ready = batch.ready


class Rig:
    """A device engine over a memory controller, and pages in the stand-in's memory."""

    def __init__(self, kind: str, modules: Modules, driver: StandInDriver, staging: int) -> None:
        self.driver = driver
        self.controller = MemoryController([4 << 20])
        self.kernels = Kernels(driver, self.controller.medium(1))
        self.engine = DeviceEngine(
            driver,
            modules,
            self.controller,
            kind=kind,
            shares=3,
            depth=16,
            staging_nbytes=staging,
            command_nbytes_max=2 * 4096,
        )
        self.tensors = [[StandInTensor(driver, PAGES * n) for n in SEGMENTS] for _ in range(LAYERS)]
        bases = [[tensor.data_ptr() for tensor in row] for row in self.tensors]
        self.memory = PagedMemory(np.array(bases, np.uint64), SEGMENTS, SEGMENTS, PAGES)

    def submit(self, opcode: int, pages: list[int], **options: object) -> DeviceJob:
        counts = [3, len(pages) - 3]
        extents = Extents([0, 100], [1, 1], counts, NLB, 200)
        numbers = self.memory.check_pages(pages)
        return self.engine.submit(opcode, extents, numbers, self.memory, **options)  # type: ignore[arg-type]

    def contents(self, pages: list[int]) -> list[bytes]:
        return [
            t.array[page * n : (page + 1) * n].tobytes()
            for row in self.tensors
            for page in pages
            for t, n in zip(row, SEGMENTS, strict=True)
        ]


@contextmanager
def device_rig(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, staging: int = 1 << 20
) -> Iterator[Rig]:
    monkeypatch.setattr(gpu_modules, "compile_cubin", lambda *_, **__: b"\x7fELF")
    driver = StandInDriver()
    modules = Modules(driver, source=DeviceSource(tmp_path), cache=CubinCache(tmp_path))
    rig = Rig(kind, modules, driver, staging)
    try:
        yield rig
    finally:
        rig.engine.close()
        modules.close()
        rig.controller.close()
        driver.close()
    assert not driver.violations


@pytest.mark.parametrize("staging", [1 << 20, 120 << 10])
@pytest.mark.parametrize("kind", ["launch", "resident"])
def test_pages_travel(
    kind: str, staging: int, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(seed)
    with device_rig(kind, tmp_path, monkeypatch, staging) as rig:
        for tensor in (t for row in rig.tensors for t in row):
            tensor.array[:] = rng.integers(0, 256, tensor.numel(), dtype=np.uint8)
        sent = rng.permutation(PAGES)[:8].tolist()
        contents = rig.contents(sent)
        digests = np.zeros((8, LAYERS), np.uint64)
        released: list[DeviceJob] = []
        job = rig.submit(OPCODE_WRITE, sent, digests=digests, on_released=released.append)
        assert job.wait_released(10)
        assert released == [job]
        assert digests.all()
        other = rng.permutation(PAGES)[:8].tolist()
        gated = rig.submit(OPCODE_READ, other, digests=digests, compare=True, gated=True)
        assert not gated.wait_layers(1, 0.05)
        gated.open_gate()
        stream = rig.driver.create_stream()
        for layer in range(LAYERS):
            assert gated.wait_layers(layer + 1, 10)
            gated.order_stream(stream, layer + 1)
        assert gated.wait_released(10)
        assert not gated.page_status.any()
        assert rig.contents(other) == contents
        digests[5, 2] ^= np.uint64(1)
        job = rig.submit(OPCODE_READ, other, digests=digests, compare=True)
        assert job.wait_layers(LAYERS, 10)
        assert job.page_status.tolist() == [0] * 5 + [STATUS_DIGEST_MISMATCH] + [0] * 2
        assert rig.engine.lane.staging.arena.in_use == 0


def test_who_waited_for_the_last_layer_on_a_stream_knows_what_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_device_engine, "_LOOK_S", 0.3)  # the engine's thread is slow
    with device_rig("launch", tmp_path, monkeypatch) as rig:
        digests = np.ones((8, LAYERS), np.uint64)
        stream = rig.driver.create_stream()
        job = rig.submit(OPCODE_READ, list(range(8)), digests=digests, compare=True)
        job.order_stream(stream, LAYERS)
        deadline = time.monotonic() + 10
        while not rig.driver.is_stream_done(stream):
            assert time.monotonic() < deadline
        assert (job.page_status == STATUS_DIGEST_MISMATCH).all()


def test_after_a_deadline_the_memory_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with device_rig("launch", tmp_path, monkeypatch) as rig:
        rig.kernels.lost = {2}
        job = rig.submit(OPCODE_READ, list(range(8)))
        assert job.wait_layers(LAYERS, 10)
        assert (job.page_status == STATUS_TIMED_OUT).all()
        assert not job.wait_released(0.1)
        assert rig.engine.lane.staging.arena.in_use == 1
        with pytest.raises(DeviceTimeout, match="close the engine"):
            rig.submit(OPCODE_READ, list(range(8)))


def test_a_cancelled_gate_ends_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with device_rig("resident", tmp_path, monkeypatch) as rig:
        job = rig.submit(OPCODE_READ, list(range(8)), gated=True)
        job.cancel()
        assert job.done
        with pytest.raises(ConfigError):
            job.order_stream(0, 1)
        with pytest.raises(CapacityError):
            rig.submit(OPCODE_READ, list(range(16)) * 20)


def test_the_kernel_mover_fills_its_tables(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine `host` with the SM copy in place of the copy engine."""
    rng = np.random.default_rng(seed)
    monkeypatch.setattr(gpu_modules, "compile_cubin", lambda *_, **__: b"\x7fELF")
    driver = StandInDriver()
    controller = MemoryController([4 << 20])
    Kernels(driver, controller.medium(1))
    modules = Modules(driver, source=DeviceSource(tmp_path), cache=CubinCache(tmp_path))
    tables = TableMemory(driver, 1 << 20)
    engine = Engine(controller)
    mover = KernelMover(driver, modules["gio_move"], tables)
    gpu = HostEngine(
        driver, engine, mover=mover, load_staging_nbytes=256 << 10, store_staging_nbytes=256 << 10
    )
    tensors = [[StandInTensor(driver, PAGES * n) for n in SEGMENTS] for _ in range(LAYERS)]
    for tensor in (t for row in tensors for t in row):
        tensor.array[:] = rng.integers(0, 256, tensor.numel(), dtype=np.uint8)
    before = [[t.array.copy() for t in row] for row in tensors]
    bases = np.array([[t.data_ptr() for t in row] for row in tensors], np.uint64)
    memory = PagedMemory(bases, SEGMENTS, SEGMENTS, PAGES)
    extents = Extents([0], [1], [PAGES], NLB, 64)
    pages = np.arange(PAGES, dtype=np.uint32)
    assert gpu.submit(OPCODE_WRITE, extents, pages, memory).wait_released(10)
    for tensor in (t for row in tensors for t in row):
        tensor.array[:] = 0
    assert gpu.submit(OPCODE_READ, extents, pages[::-1].copy(), memory).wait_released(10)
    for row, kept in zip(tensors, before, strict=True):
        for tensor, array, n in zip(row, kept, SEGMENTS, strict=True):
            assert (tensor.array.reshape(PAGES, n)[::-1] == array.reshape(PAGES, n)).all()
    engine.close()
    gpu.close()
    tables.close()
    modules.close()
    controller.close()
    driver.close()
    assert not driver.violations


def test_no_slice_is_in_two_shares(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(200):
        runs = np.zeros(int(rng.integers(1, 40)), RUN_DTYPE)
        runs["skip"] = rng.integers(0, 2, runs.size) * 4096
        runs["skip"][0] = 0
        shares = split_shares(runs, int(rng.integers(1, 9)))
        assert sum(count for _, count in shares) == runs.size
        for first, count in shares:
            assert count == 0 or runs["skip"][first] == 0
