"""Common parts of the GPU benchmarks: driver, device memory, engines, and timed rounds.

Everything uses the `Driver` protocol, so that tests can run a case with a substitute; only
concurrent compute needs PyTorch.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from tutti.base.units import MiB
from tutti.bench.compare.paired import ComparedSystem, Round
from tutti.bench.controller_memory import MemoryController
from tutti.errors import DeviceTimeout, TuttiError
from tutti.gio_uring.controller import NativeController
from tutti.gio_uring.engine import Engine
from tutti.gio_uring.gpu.device_batch import KernelMover
from tutti.gio_uring.gpu.device_code import Modules
from tutti.gio_uring.gpu.device_engine import DeviceEngine, KernelSize
from tutti.gio_uring.gpu.driver import Driver
from tutti.gio_uring.gpu.host_engine import STREAMS, HostEngine
from tutti.gio_uring.gpu.mover import BatchCopyMover, CopyMover, Mover
from tutti.gio_uring.gpu.pinned_memory import PinnedMemory, TableMemory
from tutti.gio_uring.iocb import Extents, PagedMemory
from tutti.gio_uring.memory import HostBuffer
from tutti.gio_uring.nvme_spec import OPCODE_READ, OPCODE_WRITE
from tutti.gio_uring.status import status_error
from tutti.gio_uring.transfer import Submitter, Transfer

LBA_NBYTES = 4096
MOVERS = ("copy-batch", "copy", "kernel")
OPCODES = {"load": OPCODE_READ, "store": OPCODE_WRITE}
#: Limit of every wait, much longer than anything here takes: a row has 75 seconds in all.
_TIMEOUT_S = 20.0
_LOOK_S = 0.0005
_TABLES_NBYTES = 8 * MiB
_COUNT_MAX = 200
#: Transfers in flight, so that there is a next one when one ends.
_INFLIGHT = 2
#: Queue pairs of the engine with short kernels; each has one warp, which is sufficient.
_SHARES = 4


@dataclass(frozen=True)
class LayerLoad:
    """One transfer: `pages` slices of `slice_nbytes` in each of `layers` layers.

    segments: fragments of a slice in GPU memory, such as K and V.
    """

    slice_nbytes: int
    pages: int
    layers: int = 32
    segments: int = 2

    @property
    def nbytes(self) -> int:
        """Bytes of all layers."""
        return self.slice_nbytes * self.pages * self.layers

    @property
    def extents(self) -> Extents:
        """One run on the medium, layer after layer."""
        nlb = self.slice_nbytes // LBA_NBYTES
        return Extents([0], [1], [self.pages], nlb, nlb * self.pages)

    @classmethod
    def of_nbytes(cls, slice_nbytes: int, nbytes: int, layers: int = 32) -> LayerLoad:
        """A load whose size is closest to `nbytes`."""
        return cls(slice_nbytes, max(1, nbytes // (slice_nbytes * layers)), layers)


class DevicePages:
    """Pages of a `LayerLoad` in GPU memory, in random order, so that fragments are not adjacent."""

    def __init__(self, driver: Driver, load: LayerLoad, seed: int = 1) -> None:
        self._driver = driver
        self.load = load
        self.address = driver.allocate(load.nbytes)
        segment = load.slice_nbytes // load.segments
        layer = np.arange(load.layers, dtype=np.uint64) * np.uint64(load.pages * load.slice_nbytes)
        k = np.arange(load.segments, dtype=np.uint64) * np.uint64(load.pages * segment)
        bases = np.uint64(self.address) + layer[:, None] + k[None, :]
        shape = (segment,) * load.segments
        self.memory = PagedMemory(bases, shape, shape, load.pages)
        self.pages = np.random.default_rng(seed).permutation(load.pages).astype(np.uint32)

    def close(self) -> None:
        self._driver.free(self.address)


def facts_of(driver: Driver) -> dict[str, Any]:
    """A driver's facts about itself and the device, for JSON."""
    try:
        sms: Any = driver.sm_resource().count
    except TuttiError as error:  # one without green contexts
        sms = f"unknown: {error}"
    return {
        "version": getattr(driver, "version", "stand-in"),
        "architecture": driver.architecture,
        "multiprocessors": sms,
        "copy_batch": driver.has_copy_batch,
    }


class GpuUnderTest:
    """The GPU under test.  modules: None if kernels cannot be launched, with the reason."""

    def __init__(self, driver: Driver, modules: Modules | None, why_no_modules: str = "") -> None:
        self.driver = driver
        self.modules = modules
        self._why_no_modules = why_no_modules
        self.tables = TableMemory(driver, _TABLES_NBYTES)

    @property
    def facts(self) -> dict[str, Any]:
        """The driver's facts about itself, the device and the device code, for JSON."""
        code = "loaded" if self.modules is not None else self._why_no_modules
        return {**facts_of(self.driver), "device_code": code}

    def mover(self, name: str, blocks: int = 16) -> Mover:
        """One of MOVERS."""
        if name == "kernel":
            assert self.modules is not None, "kernels need modules"
            return KernelMover(self.driver, self.modules["gio_move"], self.tables, blocks=blocks)
        return BatchCopyMover(self.driver) if name == "copy-batch" else CopyMover(self.driver)

    @contextmanager
    def host_engine(
        self,
        mover: str,
        *,
        controller: NativeController | None = None,
        staging_nbytes: int = 256 * MiB,
        store_staging_nbytes: int | None = None,
        blocks: int = 16,
        streams: Sequence[int] | int = STREAMS,
    ) -> Iterator[HostEngine]:
        """The engine `host` over a controller, by default one that moves nothing.

        store_staging_nbytes: by default as much as for loads.
        """
        with ExitStack() as stack:
            medium = controller or stack.enter_context(zero_copy())
            engine = Engine(medium)
            stack.callback(engine.close, _TIMEOUT_S)
            gpu = HostEngine(
                self.driver,
                engine,
                mover=self.mover(mover, blocks),
                load_staging_nbytes=staging_nbytes,
                store_staging_nbytes=store_staging_nbytes or staging_nbytes,
                load_streams=streams,
                store_streams=streams,
            )
            stack.callback(gpu.close, _TIMEOUT_S)
            stack.callback(engine.close, _TIMEOUT_S)  # first: it wakes waiting streams
            yield gpu

    @contextmanager
    def device_engine(
        self,
        kind: str,
        *,
        controller: NativeController | None = None,
        staging_nbytes: int = 256 * MiB,
        blocks: int = 16,
    ) -> Iterator[DeviceEngine]:
        """An engine whose kernels submit, by default over a controller that moves nothing.

        blocks: number of blocks that move slices; also of queue pairs if these blocks drive them.
        """
        assert self.modules is not None, "kernels need modules"
        with ExitStack() as stack:
            medium = controller or stack.enter_context(zero_copy())
            engine = DeviceEngine(
                self.driver,
                self.modules,
                medium,
                kind=kind,
                kernels=KernelSize(_SHARES if kind == "launch" else blocks, move_blocks=blocks),
                staging_nbytes=staging_nbytes,
            )
            stack.callback(engine.close, _TIMEOUT_S)
            yield engine

    def close(self) -> None:
        self.tables.close()


def zero_copy() -> MemoryController:
    """A controller that checks and completes commands but moves nothing."""
    return MemoryController([1024 * MiB], mode="zero_copy")


def spin_until(is_done: Callable[[], bool], what: str) -> None:
    """Polls without pauses: for timing, while no other thread needs the GIL."""
    poll_until(is_done, what, 0.0)


def poll_until(is_done: Callable[[], bool], what: str, pause_s: float = _LOOK_S) -> None:
    """Polls with pauses.  Raises DeviceTimeout after 20 seconds."""
    deadline = time.monotonic() + _TIMEOUT_S
    while not is_done():
        if time.monotonic() > deadline:
            raise DeviceTimeout(f"{what} did not end in {_TIMEOUT_S:g} s; is the GPU stuck?")
        if pause_s:
            time.sleep(pause_s)


def transfers(submitter: Submitter, pages: DevicePages, direction: str, count: int) -> None:
    """Runs a load or store `count` times, two at once, and waits for all."""
    for _ in stream_of_transfers(submitter, pages, direction, count):
        pass


def stream_of_transfers(
    submitter: Submitter, pages: DevicePages, direction: str, count: int
) -> Generator[float, None, None]:
    """As `transfers`; yields each end, of time.perf_counter().  Also waits if closed early."""
    running: deque[Transfer] = deque()
    try:
        for _ in range(count):
            if len(running) == _INFLIGHT:
                finish(running.popleft())
                yield time.perf_counter()
            running.append(
                submitter.submit(
                    OPCODES[direction],
                    pages.load.extents,
                    pages.pages,
                    pages.memory,
                    priority=1,
                    timeout_s=_TIMEOUT_S,
                )
            )
    finally:
        while running:  # bounded by _INFLIGHT
            finish(running.popleft())


def count_for(submitter: Submitter, pages: DevicePages, direction: str, round_s: float) -> int:
    """Number of transfers in a round of `round_s`, found by two transfers after three others."""
    transfers(submitter, pages, direction, 3)
    began_s = time.perf_counter()
    transfers(submitter, pages, direction, 2)
    each_s = (time.perf_counter() - began_s) / 2
    return max(2, min(_COUNT_MAX, int(round_s / each_s)))


def finish(transfer: Transfer) -> None:
    """Waits for its end.  Raises its error, or DeviceTimeout after 20 seconds."""
    if not transfer.wait_released(_TIMEOUT_S):
        raise DeviceTimeout("a transfer did not end; is the GPU stuck?")
    failed = np.flatnonzero(transfer.page_status)
    if failed.size:
        error = status_error(int(transfer.page_status[failed[0]]), "a transfer", failed.tolist())
        assert error is not None, "a failed page has a status"
        raise error


def timed(nbytes: int, work: Callable[[], None]) -> Round:
    """One round: its speed, and the CPU time of all threads of the process."""
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    work()
    wall_s = time.perf_counter() - wall_s
    return Round(nbytes / wall_s / 1e9, (time.process_time() - cpu_s) / (nbytes / 1e9))


def tutti_system(
    name: str, submitter: Submitter, pages: DevicePages, direction: str, count: int
) -> ComparedSystem:
    """Rounds of transfers through an engine."""
    nbytes = count * pages.load.nbytes
    return ComparedSystem(
        name, lambda: timed(nbytes, lambda: transfers(submitter, pages, direction, count))
    )


class PlainCopies:
    """The bars: copies between pinned memory and the device, without a store.

    one: one cuMemcpyAsync of all bytes.  batch: all fragments of a layer by cuMemcpyBatchAsync.
    loop: one cuMemcpyAsync per fragment, from Python, as engines do.  All wait by polling without
    pauses, so that their CPU time is their wall time.
    """

    def __init__(self, driver: Driver, pages: DevicePages) -> None:
        self._driver = driver
        self._pages = pages
        self._buffer = HostBuffer(pages.load.nbytes)
        self._pinned = PinnedMemory(driver, self._buffer)
        self._stream = driver.create_stream()
        self._layers = [self._fragments(layer) for layer in range(pages.load.layers)]

    @property
    def backing(self) -> str:
        """Page kind of the pinned memory; the engine's staging is made in the same way."""
        return self._buffer.backing

    def system(self, kind: str, direction: str, count: int) -> ComparedSystem:
        """Rounds of one kind of copy."""
        work = {"one": self._one, "batch": self._batch, "loop": self._loop}[kind]
        nbytes = count * self._pages.load.nbytes

        def run() -> None:
            for _ in range(count):
                with self._driver.together():  # as the engine's calls are
                    work(direction == "load")
            spin_until(lambda: self._driver.is_stream_done(self._stream), "a copy")

        return ComparedSystem(f"memcpy {kind}", lambda: timed(nbytes, run))

    def _one(self, to_device: bool) -> None:
        ends = (self._pages.address, self._pinned.device_address)
        target, source = ends if to_device else ends[::-1]
        self._driver.copy(target, source, self._pages.load.nbytes, self._stream)

    def _fragments(self, layer: int) -> tuple[Any, Any, Any]:
        """(device, host, nbytes) of every fragment of a layer, K and V of each page."""
        pages, load = self._pages, self._pages.load
        segment = load.slice_nbytes // load.segments
        numbers = pages.pages.astype(np.uint64) * np.uint64(segment)
        there = (pages.memory.bases[layer][None, :] + numbers[:, None]).reshape(-1)
        start = self._pinned.device_address + layer * load.pages * load.slice_nbytes
        here = start + np.arange(there.size, dtype=np.uint64) * np.uint64(segment)
        return there, here.astype(np.uint64), np.full(there.size, segment, np.uint64)

    def _batch(self, to_device: bool) -> None:
        for there, here, nbytes in self._layers:
            target, source = (there, here) if to_device else (here, there)
            self._driver.copy_batch(target, source, nbytes, self._stream)

    def _loop(self, to_device: bool) -> None:
        for layer in self._layers:
            columns: Sequence[list[int]] = [c.tolist() for c in layer]
            for there, here, nbytes in zip(*columns, strict=True):
                target, source = (there, here) if to_device else (here, there)
                self._driver.copy(target, source, nbytes, self._stream)

    def close(self) -> None:
        self._driver.destroy_stream(self._stream)
        self._pinned.close()
