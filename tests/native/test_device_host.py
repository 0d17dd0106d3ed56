"""The host side of the device engines with the kernels themselves: on fibers, launched by the
stand-in of the driver, against a controller that polls their rings on a thread of its own.

Tables, queues and doorbells are those that a GPU would be given. It says nothing of a GPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from gio_uring.cuda_stand_in import StandInDriver, StandInTensor
from native.programs import Build

from tutti.errors import DeviceTimeout
from tutti.gio_uring import gpu_modules
from tutti.gio_uring.controller_memory import Faults, MemoryController
from tutti.gio_uring.engine import Extents
from tutti.gio_uring.gpu_device_engine import KINDS, DeviceEngine
from tutti.gio_uring.gpu_device_job import DeviceJob
from tutti.gio_uring.gpu_modules import CubinCache, DeviceSource, Modules
from tutti.gio_uring.iocb import PagedMemory
from tutti.gio_uring.nvme_spec import (
    OPCODE_READ,
    OPCODE_WRITE,
    STATUS_DIGEST_MISMATCH,
    STATUS_TIMED_OUT,
)

LAYERS, PAGES, COUNT, SEGMENTS = 3, 10, 7, (3000, 2000)
NLB = 2
EXTENTS = Extents([0, 40], [1, 1], [3, COUNT - 3], NLB, 100)
Launch = Callable[[str, int, int, list[int]], None]


@pytest.fixture
def launcher(build: Build, seed: int) -> Launch:
    library = ctypes.CDLL(str(build("device_library", "library")))
    launch = library.launch_kernel
    launch.argtypes = [ctypes.c_char_p, ctypes.c_uint64, *[ctypes.c_uint32] * 2]
    launch.argtypes += [ctypes.c_uint64, *[ctypes.c_uint32] * 2]

    def run(name: str, grid: int, block: int, values: list[int]) -> None:
        table, layer, publish = [*values, 0, 0][:3]
        result = launch(name.encode(), seed, grid, block, table, layer, publish)
        assert result == 0, f"threads of {name} wait for each other"

    return run


class Rig:
    """An engine of a kind over a memory controller, and pages in the stand-in's memory."""

    def __init__(
        self, kind: str, launcher: Launch, modules: Path, seed: int, staging: int = 1 << 20
    ) -> None:
        self.driver = StandInDriver(seed=seed, launcher=launcher)
        self.modules = Modules(self.driver, source=DeviceSource(modules), cache=CubinCache(modules))
        self.tensors = [
            [StandInTensor(self.driver, PAGES * n) for n in SEGMENTS] for _ in range(LAYERS)
        ]
        bases = np.array([[t.data_ptr() for t in row] for row in self.tensors], np.uint64)
        self.memory = PagedMemory(bases, SEGMENTS, SEGMENTS, PAGES)
        self.controller = MemoryController([4 << 20])
        self._staging = staging
        self.open(kind)

    def open(self, kind: str) -> None:
        self.engine = DeviceEngine(
            self.driver,
            self.modules,
            self.controller,
            kind=kind,
            shares=2,
            depth=4,
            staging_nbytes=self._staging,
            move_blocks=1,
            threads=32,
            command_nbytes_max=2 * NLB * 4096,
        )

    def submit(self, opcode: int, pages: list[int], **options: Any) -> DeviceJob:
        numbers = self.memory.check_pages(pages)
        return self.engine.submit(opcode, EXTENTS, numbers, self.memory, **options)

    def slices(self, pages: list[int]) -> list[bytes]:
        columns = [[t.array.reshape(PAGES, -1) for t in row] for row in self.tensors]
        return [b"".join(c[page].tobytes() for c in row) for page in pages for row in columns]

    def close(self) -> None:
        self.engine.close()
        self.modules.close()
        self.controller.close()
        self.driver.close()
        assert not self.driver.violations


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_modules, "compile_cubin", lambda *_, **__: b"\x7fELF")


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize("staging", [1 << 20, 256 << 10])
@pytest.mark.parametrize("faults", [None, Faults(delay_ppm=300_000, reorder_ppm=300_000)])
@pytest.mark.parametrize("kind", KINDS)
def test_pages_travel_through_rings_and_kernels(
    kind: str, faults: Faults | None, staging: int, seed: int, launcher: Launch, tmp_path: Path
) -> None:
    rng = np.random.default_rng(seed)
    rig = Rig(kind, launcher, tmp_path, seed, staging)
    rig.controller.set_faults(faults)
    for tensor in (t for row in rig.tensors for t in row):
        tensor.array[:] = rng.integers(0, 256, tensor.numel(), dtype=np.uint8)
    sent, other = (rng.permutation(PAGES)[:COUNT].tolist() for _ in range(2))
    expected = rig.slices(sent)
    digests = np.zeros((COUNT, LAYERS), np.uint64)
    job = rig.submit(OPCODE_WRITE, sent, digests=digests)
    assert job.wait_released(30)
    assert not job.page_status.any()
    assert digests.reshape(-1).tolist() == [xxhash.xxh3_64_intdigest(part) for part in expected]
    job = rig.submit(OPCODE_READ, other, digests=digests, compare=True)
    for layer in range(LAYERS):
        assert job.wait_layers(layer + 1, 30)
    assert job.wait_released(30)
    assert not job.page_status.any()
    assert rig.slices(other) == expected
    digests[2, LAYERS - 1] ^= np.uint64(1)
    job = rig.submit(OPCODE_READ, other, digests=digests, compare=True)
    assert job.wait_released(30)
    assert np.flatnonzero(job.page_status).tolist() == [2]
    assert job.page_status[2] == STATUS_DIGEST_MISMATCH
    rig.close()


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize("kind", KINDS)
def test_a_controller_that_dies_is_a_status_and_keeps_the_memory(
    kind: str, seed: int, launcher: Launch, tmp_path: Path
) -> None:
    rig = Rig(kind, launcher, tmp_path, seed)
    rig.controller.set_faults(Faults(stall_from=3))
    job = rig.submit(OPCODE_READ, list(range(COUNT)), timeout_s=0.0002)  # 200,000 switch points
    assert job.wait_layers(LAYERS, 60)
    assert (job.page_status == STATUS_TIMED_OUT).any()
    assert not job.wait_released(0.1)
    with pytest.raises(DeviceTimeout, match="close the engine"):
        rig.submit(OPCODE_READ, list(range(COUNT)))
    rig.close()
    assert job.wait_released(0)


@pytest.mark.usefixtures("no_compiler")
def test_one_engine_after_another_on_a_controller(
    seed: int, launcher: Launch, tmp_path: Path
) -> None:
    rng = np.random.default_rng(seed)
    rig = Rig(KINDS[0], launcher, tmp_path, seed)
    for kind in rng.permutation(np.repeat(KINDS, 2)).tolist():
        rig.engine.close()
        rig.open(kind)
        for tensor in (t for row in rig.tensors for t in row):
            tensor.array[:] = rng.integers(0, 256, tensor.numel(), dtype=np.uint8)
        pages = rng.permutation(PAGES)[:COUNT].tolist()
        expected = rig.slices(pages)
        job = rig.submit(OPCODE_WRITE, pages, timeout_s=0.1)
        assert job.wait_released(30), f"{kind} does not write"
        job = rig.submit(OPCODE_READ, pages[::-1], timeout_s=0.1)
        assert job.wait_released(30), f"{kind} does not read"
        assert not job.page_status.any()
        assert rig.slices(pages[::-1]) == expected
    rig.close()
