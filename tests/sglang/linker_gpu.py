"""The linker on a stand-in for a GPU: SGLang's real pools in host memory, which the stand-in for
the CUDA driver takes for a GPU's.  It shows order, ownership and bytes; no GPU is involved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import linker_engine as engine
import numpy as np
import pytest
import torch
from gio_uring.cuda_stand_in import StandInDriver
from gio_uring.ringing_kernels import RingingKernels
from linker_engine import PAGE, Rig
from triton.runtime.interpreter import InterpretedFunction

from tutti.gio_uring.gpu import device_code
from tutti.gio_uring.gpu.device_code import CubinCache
from tutti.gio_uring.memory import view_at
from tutti.integration.sglang import linker as linker_module
from tutti.integration.sglang.direct import table_copy
from tutti.integration.sglang.direct.gpu_copies import Gpu
from tutti.integration.sglang.linker import TuttiLinker
from tutti.kernels.triton.copy_pages import copy_pages


class StandInEvent:
    """An event of PyTorch's, as far as a linker uses it."""

    def __init__(self, driver: StandInDriver, stream: int) -> None:
        self._driver = driver
        self.cuda_event = driver.spare_events.popleft()
        driver.record_event(self.cuda_event, stream)

    def query(self) -> bool:
        return self._driver.is_event_done(self.cuda_event)


class StandInStreams:
    """PyTorch's streams: what the scheduler and the forward enqueue on."""

    def __init__(self, driver: StandInDriver) -> None:
        self.scheduler, self.forward = driver.create_stream(), driver.create_stream()
        self.kernels = RingingKernels(driver)
        self.tables = TableKernel(driver)

    def current(self) -> int:
        return self.forward

    def on_side_stream(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def handle_of(self, event: Any) -> int:
        return int(event.cuda_event)


class TableKernel:
    """The kernel that copies by tables, in Triton's interpreter."""

    def __init__(self, driver: StandInDriver) -> None:
        self._driver = driver
        self._kernel = InterpretedFunction(copy_pages.fn)
        driver.kernels["copy_pages"] = self._run

    def _run(self, address: int, segments: int, pages: int, programs: int, *scratch: int) -> None:
        nbytes = 8 * (5 * segments + 2 * pages)
        table = view_at(self._driver.host(address, nbytes), nbytes).view(np.int64).copy()
        spans = table[: 5 * segments].reshape(segments, 5)
        unit = max(u for u in (16, 4, 1) if not (spans % u).any())
        for span in spans:  # where the host finds the whole of both sides
            for side, numbers in zip((0, 2), table[5 * segments :].reshape(2, pages), strict=True):
                reach = int(numbers.max() * span[side + 1] + span[4])
                span[side] = self._driver.host(int(span[side]), reach)
        here = int(table.ctypes.data)
        self._kernel[(programs,)](here, segments, pages, programs, UNIT=unit, BLOCK=8192)


class GpuRig(Rig):
    """A rig whose forward runs on a stream."""

    driver: StandInDriver
    streams: StandInStreams
    kernels: RingingKernels

    def seen_by_forward(self, pages: Sequence[int], layer: int) -> list[np.ndarray]:
        """Enqueues a reader of a layer on the forward's stream: what it saw, later."""
        seen = []
        for page in pages:
            for buffer in self.buffers(layer):
                part = buffer[page * PAGE : (page + 1) * PAGE]
                copy = np.zeros(part.nbytes, np.uint8)
                here, there = part.data_ptr(), int(copy.ctypes.data)
                self.driver.copy(there, here, copy.size, self.streams.forward)
                seen.append(copy)
        return seen

    def hold(self, stream: int) -> np.ndarray:
        """The stream stops until the word that is returned is set to 1."""
        word = np.zeros(1, np.uint32)
        self.driver.register_host(int(word.ctypes.data), 4)
        address = self.driver.device_address(int(word.ctypes.data))
        self.driver.wait_value(stream, address, 1)
        return word

    def drain(self) -> None:
        engine.wait_for(lambda: self.driver.is_stream_done(self.streams.forward))


#: As `gpu_rig` below, in a folder of the test's own: a fixture of conftest.py.
RigOf = Callable[..., AbstractContextManager[GpuRig]]


@contextmanager
def stand_in_gpu(
    monkeypatch: pytest.MonkeyPatch, **driver_options: Any
) -> Iterator[tuple[StandInDriver, StandInStreams]]:
    """Linkers take host memory for a GPU's.

    Checks in the end that the product did nothing that a GPU would not forgive.
    """
    driver = StandInDriver(**driver_options)
    streams = StandInStreams(driver)

    def opened(device: torch.device, mover: str, profile: Any, engine: str) -> Gpu:
        assert device.type == "cpu", "the stand-in's memory is the host's"
        return Gpu(driver, streams, mover, profile, engine)  # type: ignore[arg-type]

    def ready(linker: TuttiLinker) -> list[StandInEvent]:
        return [StandInEvent(driver, s) for s in (streams.scheduler, streams.forward)]

    monkeypatch.setattr(device_code, "compile_cubin", lambda *_, **__: b"\x7fELF")
    monkeypatch.setattr(table_copy, "compile_for", lambda *_: b"\x7fELF")
    monkeypatch.setattr(CubinCache, "read", lambda *_: None)  # such code must not be cached
    monkeypatch.setattr(CubinCache, "write", lambda *_: None)
    monkeypatch.setattr(linker_module, "open_gpu", opened)
    monkeypatch.setattr(TuttiLinker, "record_offload_ready", ready)
    try:
        yield driver, streams
    finally:
        driver.close()
    assert not driver.violations, driver.violations[:3]


@contextmanager
def gpu_rig(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str = "mha",
    *,
    driver_options: dict[str, Any] | None = None,
    **options: Any,
) -> Iterator[GpuRig]:
    """A rig on the stand-in, whose kernels submit through the linker's own queue pairs."""
    with (
        stand_in_gpu(monkeypatch, **(driver_options or {})) as (driver, streams),
        GpuRig(folder, kind, **options) as rig,
    ):
        rig.driver, rig.streams, rig.kernels = driver, streams, streams.kernels
        yield rig
