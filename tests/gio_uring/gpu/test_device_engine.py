"""The GPU engines `launch`, `resident` and `persistent` on the stand-in driver and its kernels."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from gio_uring.cuda_stand_in import StandInDriver, StandInTensor
from gio_uring.kernel_stand_in import Kernels
from gio_uring.ringing_kernels import RingingKernels
from memory_controller import MemoryController
from waiting import wait_until

from tutti.errors import CapacityError, ConfigError, CudaError, DeviceTimeout, Unsupported
from tutti.gio_uring.engine import Engine
from tutti.gio_uring.gpu import device_code
from tutti.gio_uring.gpu import device_engine as gpu_device_engine
from tutti.gio_uring.gpu import persistent as gpu_persistent
from tutti.gio_uring.gpu.device_batch import KernelMover
from tutti.gio_uring.gpu.device_code import CubinCache, DeviceSource, Modules
from tutti.gio_uring.gpu.device_engine import KERNEL_S, DeviceEngine, KernelSize
from tutti.gio_uring.gpu.device_job import DeviceJob
from tutti.gio_uring.gpu.device_queues import split_shares
from tutti.gio_uring.gpu.driver import SmResource
from tutti.gio_uring.gpu.host_engine import HostEngine
from tutti.gio_uring.gpu.pinned_memory import TableMemory
from tutti.gio_uring.iocb import RUN_DTYPE, Extents, PagedMemory
from tutti.gio_uring.nvme_spec import (
    OPCODE_READ,
    OPCODE_WRITE,
    STATUS_CANCELLED,
    STATUS_DIGEST_MISMATCH,
    STATUS_TIMED_OUT,
)

KINDS = gpu_device_engine.KINDS
LAYERS, PAGES, SEGMENTS, NLB = 5, 16, (3000, 1096), 1


class Rig:
    """A device engine over a memory controller, and pages in the stand-in's memory."""

    def __init__(
        self, kind: str, modules: Modules, driver: StandInDriver, staging: int, rest_s: float
    ) -> None:
        self.driver = driver
        self.modules = modules
        self.controller = MemoryController([4 << 20])
        self.kernels = Kernels(driver, self.controller.medium(1))
        self.tensors = [[StandInTensor(driver, PAGES * n) for n in SEGMENTS] for _ in range(LAYERS)]
        bases = [[tensor.data_ptr() for tensor in row] for row in self.tensors]
        self.memory = PagedMemory(np.array(bases, np.uint64), SEGMENTS, SEGMENTS, PAGES)
        self.engine = DeviceEngine(
            driver,
            modules,
            self.controller,
            kind=kind,
            kernels=KernelSize(shares=3, depth=16, command_nbytes_max=2 * 4096),
            staging_nbytes=staging,
            rest_s=rest_s,
        )

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
    kind: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    staging: int = 1 << 20,
    rest_s: float = 60.0,
) -> Iterator[Rig]:
    monkeypatch.setattr(device_code, "compile_cubin", lambda *_, **__: b"\x7fELF")
    driver = StandInDriver()
    modules = Modules(driver, source=DeviceSource(tmp_path), cache=CubinCache(tmp_path))
    rig = Rig(kind, modules, driver, staging, rest_s)
    try:
        yield rig
    finally:
        rig.engine.close()
        modules.close()
        rig.controller.close()
        driver.close()
    assert not driver.violations


@pytest.mark.parametrize("staging", [1 << 20, 120 << 10])
@pytest.mark.parametrize("kind", KINDS)
def test_pages_travel(
    kind: str,
    staging: int,
    rng: np.random.Generator,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with device_rig(kind, tmp_path, monkeypatch, staging) as rig:
        for tensor in (t for row in rig.tensors for t in row):
            tensor.array[:] = rng.integers(0, 256, tensor.numel(), dtype=np.uint8)
        sent = rng.permutation(PAGES)[:8].tolist()
        contents = rig.contents(sent)
        digests = np.zeros((8, LAYERS), np.uint64)
        released: list[DeviceJob] = []
        job = rig.submit(OPCODE_WRITE, sent, digests=digests, on_released=released.append)
        assert job.wait_released(10)
        wait_until(lambda: released == [job])  # waiters are woken first
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
        assert rig.engine.stream_queue.staging.arena.in_use == 0


def test_who_waited_for_the_last_layer_on_a_stream_knows_what_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_device_engine, "_LOOK_S", 0.3)  # the engine's thread is slow
    with device_rig("launch", tmp_path, monkeypatch) as rig:
        digests = np.ones((8, LAYERS), np.uint64)
        stream = rig.driver.create_stream()
        job = rig.submit(OPCODE_READ, list(range(8)), digests=digests, compare=True)
        job.order_stream(stream, LAYERS)
        wait_until(lambda: rig.driver.is_stream_done(stream))
        assert (job.page_status == STATUS_DIGEST_MISMATCH).all()


@pytest.mark.parametrize("first", [STATUS_TIMED_OUT, STATUS_DIGEST_MISMATCH])
@pytest.mark.parametrize("kind", KINDS)
def test_after_a_deadline_the_memory_stays(
    kind: str, first: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where every page has another error from a layer before."""
    released: list[DeviceJob] = []
    with device_rig(kind, tmp_path, monkeypatch) as rig:
        rig.kernels.lost = {2}
        wrong = {} if first == STATUS_TIMED_OUT else {"digests": np.ones((8, LAYERS), np.uint64)}
        job = rig.submit(
            OPCODE_READ, list(range(8)), compare=bool(wrong), on_released=released.append, **wrong
        )
        assert job.wait_layers(LAYERS, 10)
        assert (job.page_status == first).all()
        assert not job.wait_released(0.1)
        assert rig.engine.stream_queue.staging.arena.in_use == 1
        with pytest.raises(DeviceTimeout, match="close the engine"):
            rig.submit(OPCODE_READ, list(range(8)))
        assert not released  # its waiter would use the slots again
    assert released == [job]
    assert job.wait_released(0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_reset_of_the_drive_ends_the_engine(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once: no kernel waits for commands that the drive does not know."""
    with device_rig(kind, tmp_path, monkeypatch) as rig:
        gated = rig.submit(OPCODE_READ, list(range(8)), gated=True)
        rig.controller._queue_pairs[-1].is_dead = True  # as a drive's reset leaves them
        with pytest.raises(DeviceTimeout, match="a drive was reset"):
            rig.submit(OPCODE_READ, list(range(8)))
        gated.open_gate()
        with pytest.raises(DeviceTimeout, match="a drive was reset"):
            gated.wait_layers(1, 10)
        assert gated.wait_released(0)
        assert "cuLaunchKernel" not in rig.driver.calls
        assert rig.engine.stream_queue.staging.arena.in_use == 0


@pytest.mark.parametrize(
    ("kind", "call", "nth"),
    [
        ("launch", "cuLaunchKernel", 3),
        ("resident", "cuEventRecord", 2),
        ("persistent", "cuStreamWaitValue32", 4),
    ],
)
def test_a_cuda_error_in_mid_job_keeps_its_memory(
    kind: str, call: str, nth: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels may be queued without an event behind them; their commands cannot be cancelled."""
    released: list[DeviceJob] = []
    with device_rig(kind, tmp_path, monkeypatch) as rig:
        rig.driver.fail[call] = nth
        rig.kernels.is_silent = True
        job = rig.submit(OPCODE_WRITE, list(range(8)), on_released=released.append)
        with pytest.raises(CudaError, match=call):
            job.wait_layers(1, 10)
        assert job.done
        assert (job.page_status == STATUS_CANCELLED).all()
        wait_until(lambda: rig.engine.wait_idle(0.1), "a stream still waits")
        rig.kernels.is_silent = False
        assert not job.wait_released(0.05)
        assert not released
        assert rig.engine.stream_queue.staging.arena.in_use == 1
        with pytest.raises(DeviceTimeout, match="close the engine"):
            rig.submit(OPCODE_READ, list(range(8)))
        with pytest.raises(ConfigError, match="start it again"):
            job.order_stream(0, 1)
    assert released == [job]
    assert job.wait_released(0)


def test_a_cuda_error_before_any_kernel_costs_the_job_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with device_rig("resident", tmp_path, monkeypatch) as rig:
        rig.driver.fail["cuMemcpyAsync"] = 1
        job = rig.submit(OPCODE_WRITE, list(range(8)))
        with pytest.raises(CudaError):
            job.wait_layers(1, 10)
        assert job.wait_released(0)
        assert rig.engine.stream_queue.staging.arena.in_use == 0
        assert rig.submit(OPCODE_WRITE, list(range(8))).wait_released(10)


def test_the_persistent_kernel_is_launched_once_and_again_after_a_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with device_rig("persistent", tmp_path, monkeypatch, rest_s=1.5) as rig:
        pages = list(range(8))
        for _ in range(3):
            assert rig.submit(OPCODE_WRITE, pages).wait_released(10)
        assert rig.driver.calls["cuLaunchKernel"] == 1
        stream = rig.engine._launcher._stream  # type: ignore[attr-defined]
        wait_until(lambda: rig.driver.is_stream_done(stream), "an idle kernel stays")
        rig.driver.free(rig.driver.allocate(4096))  # no kernel is there to wait for
        for opcode in (OPCODE_WRITE, OPCODE_READ):
            assert rig.submit(opcode, pages).wait_released(10)
        assert rig.driver.calls["cuLaunchKernel"] == 2


def test_the_mailbox_goes_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_persistent, "CAPACITY", 8)
    with device_rig("persistent", tmp_path, monkeypatch) as rig:
        jobs = [rig.submit(OPCODE_WRITE, list(range(8))) for _ in range(7)]
        assert all(job.wait_released(10) for job in jobs)
        assert not any(job.page_status.any() for job in jobs)
    monkeypatch.setattr(gpu_persistent, "CAPACITY", 4)
    with device_rig("persistent", tmp_path, monkeypatch) as rig:
        job = rig.submit(OPCODE_WRITE, list(range(8)))
        with pytest.raises(ConfigError, match="another engine"):
            job.wait_layers(1, 10)


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_persistent_kernel_that_never_answers(
    comes_back: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every waiting stream goes on; the memory is kept, permanently if the kernel stays silent."""
    monkeypatch.setattr(gpu_persistent, "_GRACE_S", 0.1)
    kept: list[object] = []
    monkeypatch.setattr(gpu_device_engine, "retain_until_exit", kept.append)
    released: list[DeviceJob] = []
    with device_rig("persistent", tmp_path, monkeypatch) as rig:
        assert rig.submit(OPCODE_WRITE, list(range(8))).wait_released(10)
        rig.kernels.is_silent = True
        stream = rig.driver.create_stream()
        jobs = [
            rig.submit(OPCODE_READ, list(range(8)), timeout_s=0.3, on_released=released.append)
            for _ in range(2)
        ]
        for layer in range(LAYERS):
            jobs[1].order_stream(stream, layer + 1)
        assert all(job.wait_layers(LAYERS, 10) for job in jobs)
        wait_until(lambda: rig.driver.is_stream_done(stream), "a stream still waits")
        assert all((job.page_status == STATUS_TIMED_OUT).all() for job in jobs)
        assert not jobs[0].wait_released(0)
        assert rig.engine.stream_queue.staging.arena.in_use == 2
        with pytest.raises(DeviceTimeout, match="close the engine"):
            rig.submit(OPCODE_READ, list(range(8)))
        if comes_back:
            rig.kernels.is_silent = False
            rig.engine.close()
            assert released == jobs
            assert not kept
            return
        with pytest.raises(DeviceTimeout, match="reserved until the process ends"):
            rig.engine.close(0.3)
        assert kept == [rig.engine]
        assert not released
        assert "cuMemHostUnregister" not in rig.driver.calls
        rig.kernels.is_silent = False  # so that all can be taken down
        rig.engine._closed = False


def test_launches_that_block_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with device_rig("launch", tmp_path, monkeypatch) as rig, monkeypatch.context() as patch:
        patch.setenv("CUDA_LAUNCH_BLOCKING", "1")
        with MemoryController([1 << 20]) as controller, pytest.raises(ConfigError, match="unset"):
            DeviceEngine(rig.driver, rig.modules, controller, kind="persistent")


def test_blocks_that_could_not_all_stay_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_code, "compile_cubin", lambda *_, **__: b"\x7fELF")
    driver = StandInDriver(sms=SmResource(2, 1, 1))
    modules = Modules(driver, source=DeviceSource(tmp_path), cache=CubinCache(tmp_path))
    with MemoryController([4 << 20]) as controller:
        three = KernelSize(shares=3)
        with pytest.raises(ConfigError, match="use fewer shares"):
            DeviceEngine(driver, modules, controller, kind="persistent", kernels=three)
        DeviceEngine(driver, modules, controller, kind="resident", kernels=three).close()
    modules.close()
    driver.close()


def test_a_forgotten_engine_tells_its_kernel_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with device_rig("persistent", tmp_path, monkeypatch) as rig:
        launcher = rig.engine._launcher
        assert isinstance(launcher, gpu_persistent.PersistentKernel)
        launcher._finalizer()  # as at the end of the process
        wait_until(lambda: rig.driver.is_stream_done(launcher._stream), "the kernel stays")


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
    rng: np.random.Generator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine `host` with the SM copy in place of the copy engine."""
    monkeypatch.setattr(device_code, "compile_cubin", lambda *_, **__: b"\x7fELF")
    driver = StandInDriver()
    controller = MemoryController([4 << 20])
    Kernels(driver, controller.medium(1))
    modules = Modules(driver, source=DeviceSource(tmp_path), cache=CubinCache(tmp_path))
    tables = TableMemory(driver, 1 << 20)
    engine = Engine(controller)
    mover = KernelMover(driver, modules["gio_move"], tables)
    gpu = HostEngine(
        driver, engine, mover=mover, load_staging_nbytes=256 << 10, store_staging_nbytes=1 << 20
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


@pytest.mark.parametrize("lba_nbytes", [512, 4096])
def test_without_sgls_the_padding_lies_in_staging(
    lba_nbytes: int, rng: np.random.Generator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real commands, of several slices each, whose PRPs name memory in a row."""
    monkeypatch.setattr(device_code, "compile_cubin", lambda *_, **__: b"\x7fELF")
    driver = StandInDriver()
    RingingKernels(driver)
    modules = Modules(driver, source=DeviceSource(tmp_path), cache=CubinCache(tmp_path))
    nbytes, pages = 3500, np.arange(PAGES, dtype=np.uint32)
    nlb = -(-nbytes // lba_nbytes)
    extents = Extents([0], [1], [PAGES], nlb, PAGES * nlb)
    with MemoryController([4 << 20], lba_nbytes=lba_nbytes, sgl_descriptors=0) as controller:
        engine = DeviceEngine(driver, modules, controller, staging_nbytes=1 << 20)
        engine.stream_queue.staging._buffer.array[:] = 0xA5  # as other jobs left it
        tensors = [StandInTensor(driver, PAGES * nbytes) for _ in range(LAYERS)]
        bases = np.array([[tensor.data_ptr()] for tensor in tensors], np.uint64)
        memory = PagedMemory(bases, (nbytes,), (nbytes,), PAGES)
        for tensor in tensors:
            tensor.array[:] = rng.integers(0, 256, tensor.numel(), dtype=np.uint8)
        before = [tensor.array.copy() for tensor in tensors]
        job = engine.submit(OPCODE_WRITE, extents, pages, memory)
        assert job.wait_released(10)
        assert not job.page_status.any()
        medium = controller.medium(1)[: LAYERS * PAGES * nlb * lba_nbytes]
        assert not medium.reshape(LAYERS, PAGES, -1)[:, :, nbytes:].any()
        for tensor in tensors:
            tensor.array[:] = 0
        job = engine.submit(OPCODE_READ, extents, pages[::-1].copy(), memory)
        assert job.wait_released(10)
        assert not job.page_status.any()
        for tensor, old in zip(tensors, before, strict=True):
            assert (tensor.array.reshape(PAGES, -1)[::-1] == old.reshape(PAGES, -1)).all()
        engine.close()
    modules.close()
    driver.close()
    assert not driver.violations


def test_a_driver_that_ends_long_kernels_gets_no_persistent_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StandInDriver, "limits_kernels", True)
    with (
        pytest.raises(Unsupported, match="KERNEL_EXEC_TIMEOUT"),
        device_rig("persistent", tmp_path, monkeypatch),
    ):
        pass
    with device_rig("launch", tmp_path, monkeypatch) as rig:
        job = rig.submit(OPCODE_READ, [0, 1, 2, 3], timeout_s=30.0)
        assert job.work.timeout_s == KERNEL_S
        assert job.wait_released(10)


def test_a_read_is_no_longer_than_its_tables_allow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slice may be a command of its own, in each of many layers."""
    monkeypatch.setattr(gpu_device_engine, "_TABLES_NBYTES", 64 << 10)
    with device_rig("launch", tmp_path, monkeypatch) as rig:
        memory = PagedMemory(np.tile(rig.memory.bases, (16, 1)), SEGMENTS, SEGMENTS, PAGES)
        layers = memory.bases.shape[0]
        most = rig.engine.read_pages_max(layers, NLB)
        assert 1 < most < rig.engine.read_pages_max(1, NLB)
        apart = Extents(np.arange(most) * 2, [1] * most, [1] * most, NLB, 12)
        job = rig.engine.submit(OPCODE_READ, apart, np.arange(most, dtype=np.uint32), memory)
        assert job.wait_released(10)
        assert job.work.batch._image.nbytes <= job.work.batch.nbytes_max(most, layers, 1)


def test_short_waits_of_kernels_shorten_no_other_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load waits for staging, and a stream for a gate, for as long as on any other GPU."""
    monkeypatch.setattr(StandInDriver, "limits_kernels", True)
    monkeypatch.setattr(gpu_device_engine, "KERNEL_S", 0.05)
    pages = list(range(12))
    with device_rig("launch", tmp_path, monkeypatch, 120 << 10) as rig:
        stream = rig.driver.create_stream()
        first, second = (rig.submit(OPCODE_READ, pages, gated=True) for _ in range(2))
        timers = [threading.Timer(0.3, job.open_gate) for job in (first, second)]
        timers[0].start()
        first.order_stream(stream, LAYERS)
        assert first.wait_released(10)
        third = rig.submit(OPCODE_READ, pages, gated=True)  # there is staging for two
        timers[1].start()
        fourth = rig.submit(OPCODE_READ, pages)
        assert fourth.work.timeout_s == 0.05
        third.cancel()
        assert all(job.wait_released(10) for job in (second, third, fourth))
        for timer in timers:
            timer.join(10)


def test_no_slice_is_in_two_shares(rng: np.random.Generator) -> None:
    for _ in range(200):
        runs = np.zeros(int(rng.integers(1, 40)), RUN_DTYPE)
        runs["skip"] = rng.integers(0, 2, runs.size) * 4096
        runs["skip"][0] = 0
        shares = split_shares(runs, int(rng.integers(1, 9)))
        assert sum(count for _, count in shares) == runs.size
        for first, count in shares:
            assert count == 0 or runs["skip"][first] == 0
