"""The GPU engines `launch` and `resident`: kernels write commands, ring, poll and move slices.

Each has queue pairs in a controller of its own, whose thread polls them; the default at tier T0 is
`HostEngine`, which needs no multiprocessor at all.  `launch` sends a layer's commands with one
kernel, goes on with the layer before, and takes the completions with a second one; `resident` does
all of a layer in one kernel that stays.  Every kernel has a deadline, so the stream always ends.

After a deadline the device may still write into staging: the engine then refuses new work and keeps
that memory until `close` has reset the controller.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tutti.errors import ConfigError, DeviceTimeout, PoolClosed, TuttiError
from tutti.gio_uring.controller import NativeController
from tutti.gio_uring.device_batch import BLOCK_THREADS_MAX, QueueShareStruct
from tutti.gio_uring.engine import LIST_NBYTES, Extents
from tutti.gio_uring.gpu_batch import Commands, DeviceBatch, Staged, launch_layer
from tutti.gio_uring.gpu_driver import Driver
from tutti.gio_uring.gpu_engine import STAGING_NBYTES, Lane, lease_layers, wait_until
from tutti.gio_uring.gpu_memory import TableMemory
from tutti.gio_uring.gpu_modules import Modules
from tutti.gio_uring.gpu_queues import DeviceQueues
from tutti.gio_uring.iocb import U32, U64, IocbStruct, PagedMemory, split_runs
from tutti.gio_uring.layer_words import LayerWords
from tutti.gio_uring.nvme_spec import (
    OPCODE_READ,
    PSDT_SGL,
    STATUS_CANCELLED,
    STATUS_TIMED_OUT,
)
from tutti.units import MiB

KINDS = ("launch", "resident")
_TABLES_NBYTES = 8 * MiB
_LOOK_S = 0.0002
#: Longest time from a job's last word to its status; the engine's thread looks every _LOOK_S.
_SETTLE_S = 5.0
_WARP = 32

_log = logging.getLogger(__name__)


@dataclass
class _Work:
    """What the engine needs of a job until it is over."""

    batch: DeviceBatch
    words: LayerWords
    device_words: int
    window: int
    is_read: bool
    compare: bool
    digests: U64 | None


class DeviceJob:
    """A job whose commands a kernel sends; a `Transfer`.

    page_status is final once the job is done, or the event of its last layer has happened.
    """

    def __init__(
        self,
        engine: DeviceEngine,
        work: _Work,
        pages: int,
        on_released: Callable[[DeviceJob], None] | None,
    ) -> None:
        self._page_status: U32 = np.zeros(pages, np.uint32)
        self._engine = engine
        self.work = work
        self._on_released = on_released
        self._events: list[int] = []
        self._finished = threading.Event()
        self._failure: TuttiError | None = None
        self.is_kept = False  # the device may still write into its staging

    @property
    def page_status(self) -> U32:
        """uint32 (pages,), 0 or the first NVMe status that a page met."""
        if not self._finished.is_set() and self.work.words.moved:
            self._finished.wait(_SETTLE_S)  # the stream is through, the engine's thread not yet
        return self._page_status

    @property
    def done(self) -> bool:
        """Whether every layer is in its place or failed."""
        return self._finished.is_set()

    def is_free(self) -> bool:
        """Whether staging and tables may be used again."""
        if self._failure is not None:
            lane = self._engine.lane
            return lane.driver.is_stream_done(lane.stream)
        return self._finished.is_set() and not self.is_kept

    def enqueue(self) -> None:
        """Puts all layers on the stream.  A CUDA error ends the job with what was enqueued."""
        try:
            self._events = self._engine.enqueue(self.work)
            give = self._engine.lane.give_events
            weakref.finalize(self, give, self._events).atexit = False
        except TuttiError as error:
            _log.exception("a transfer could not be put on the GPU's stream")
            self._failure = error
            self.finish(STATUS_CANCELLED)
            return
        self._engine.watch(self)

    def finish(self, status: int | U32) -> None:
        """The stream is through, or nothing was put on it."""
        self._page_status[:] = status
        self.is_kept = bool((self._page_status == STATUS_TIMED_OUT).any())
        self._finished.set()
        callback, self._on_released = self._on_released, None
        if callback is not None:
            try:
                callback(self)
            except Exception:
                _log.exception("a completion callback failed")

    def wait_layers(self, layers: int, timeout_s: float) -> bool:
        """Waits until `layers` layers were moved or failed.  False after the timeout."""
        if self._failure is not None:
            raise self._failure
        deadline = time.monotonic() + timeout_s
        words = self.work.words
        if not wait_until(lambda: self.done or words.is_ready(layers - 1), timeout_s):
            return False
        is_good = not any(words.status(layer) for layer in range(layers))
        # Which pages failed is known at the end alone.
        return is_good or self._finished.wait(max(0.0, deadline - time.monotonic()))

    def order_stream(self, stream: int, layers: int) -> None:
        """Lets `stream` wait on the GPU until `layers` layers were moved or failed."""
        if len(self._events) < layers:
            raise ConfigError("the transfer was cancelled or its gate is closed; start it again")
        self._engine.lane.driver.stream_wait_event(stream, self._events[layers - 1])

    def wait_released(self, timeout_s: float) -> bool:
        """Waits until the stream is through.  False after the timeout, or when the device may
        still write into the staging.
        """
        return self._finished.wait(timeout_s) and not self.is_kept

    def open_gate(self) -> None:
        """The digests are there: starts the job."""
        self.enqueue()

    def cancel(self) -> None:
        """Ends a job whose gate is closed; one that runs ends by itself, in bounded time."""
        if not self._events and not self.done:
            self.finish(STATUS_CANCELLED)


class DeviceEngine:
    """Moves pages of one GPU's memory by kernels that drive queue pairs.

    controller: for this engine alone; it is started here and stopped by `close`.
    kind: "launch" or "resident".  shares: queue pairs, and blocks that drive them.  depth: of each.
    move_blocks: blocks of the kernel that moves slices, for "launch".  threads: of a resident
    block.  stream: to use instead of one of its own, such as a green context's.
    """

    def __init__(
        self,
        driver: Driver,
        modules: Modules,
        controller: NativeController,
        *,
        kind: str = "launch",
        shares: int = 4,
        depth: int = 64,
        staging_nbytes: int = STAGING_NBYTES,
        move_blocks: int = 16,
        threads: int = BLOCK_THREADS_MAX,
        command_nbytes_max: int = MiB,
        stream: int | None = None,
    ) -> None:
        if kind not in KINDS:
            raise ConfigError(f"there is no engine {kind!r}; use one of {', '.join(KINDS)}")
        self.driver = driver
        self.name = kind
        self._modules = modules
        self._controller = controller
        self._move_blocks, self._threads = move_blocks, threads
        info = controller.info
        self._lba_nbytes = info.lba_nbytes
        self._command_nlb = max(1, min(command_nbytes_max, info.mdts_nbytes) // info.lba_nbytes)
        self._closed = self._broken = False
        self._tables = TableMemory(driver, _TABLES_NBYTES)
        self.lane = Lane(driver, controller, staging_nbytes, stream)
        self._queues = DeviceQueues(
            driver, controller, self._tables, self.lane.stream, shares, depth
        )
        controller.start()
        self._jobs: list[DeviceJob] = []
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._watch, name="tutti-device-jobs", daemon=True)
        self._thread.start()

    def follow(self, stream: int) -> None:
        """Transfers submitted from now on touch pages only after what is on `stream` by now."""
        self.lane.follow(stream)

    def wait_idle(self, timeout_s: float) -> bool:
        """Waits until nothing is on the stream.  False after the timeout."""
        return wait_until(lambda: self.driver.is_stream_done(self.lane.stream), timeout_s)

    def submit(
        self,
        opcode: int,
        extents: Extents,
        pages: U32,
        memory: PagedMemory,
        *,
        digests: U64 | None = None,
        compare: bool = False,
        gated: bool = False,
        priority: int = 0,
        timeout_s: float = 30.0,
        on_released: Callable[[DeviceJob], None] | None = None,
    ) -> DeviceJob:
        """As `Engine.submit`, for pages in GPU memory; jobs run in the order they were submitted.

        timeout_s: for each kernel.  Raises CapacityError when a layer does not fit into the
        staging, DeviceTimeout when none comes free or after a deadline passed.
        """
        self._check()
        layers = memory.bases.shape[0]
        stride = extents.slice_nlb * self._lba_nbytes
        head = LayerWords.nbytes_of(layers) + self._lba_nbytes
        lease, window = lease_layers(self.lane, layers, pages.size * stride, head, timeout_s)
        is_read = opcode == OPCODE_READ
        try:
            words = LayerWords(lease.address, layers)
            words.clear()
            base = lease.address + LayerWords.nbytes_of(layers)
            base += -base % self._lba_nbytes
            place = np.arange(layers, dtype=np.uint64) % np.uint64(window)
            starts = np.uint64(base) + place * np.uint64(pages.size * stride)
            pinned = self.lane.staging.pinned
            to_device = pinned.device_address - pinned.address
            device_words = lease.address + to_device
            batch = DeviceBatch(
                self._tables,
                memory,
                pages,
                opcode=opcode,
                slice_nlb=extents.slice_nlb,
                lba_shift=self._controller.info.lba_shift,
                staged=Staged(starts + np.uint64(to_device), stride),
                commands=self._commands(opcode, extents, pages.size, memory, starts, stride),
                digests=digests,
                flags=device_words + words.ready_offset(0),
                timeout_s=timeout_s,
            )
        except BaseException:
            lease.is_free = lambda: True
            raise
        work = _Work(batch, words, device_words, window, is_read, compare, digests)
        job = DeviceJob(self, work, pages.size, on_released)
        lease.is_free = job.is_free
        batch.tables.hold(job.is_free)
        if not gated:
            job.enqueue()
        return job

    def _check(self) -> None:
        if self._closed:
            raise PoolClosed("the GPU engine is closed; make a new one")
        if self._broken:
            raise DeviceTimeout(
                "a command missed its deadline and the device may still write; close the engine"
            )

    def _commands(
        self,
        opcode: int,
        extents: Extents,
        pages: int,
        memory: PagedMemory,
        starts: U64,
        stride: int,
    ) -> Commands:
        """What the kernels submit: slices between the medium and staging."""
        info = self._controller.info
        runs = split_runs(
            extents.slba,
            extents.nsid,
            extents.count,
            slice_nlb=extents.slice_nlb,
            lba_nbytes=self._lba_nbytes,
            command_nlb_max=self._command_nlb,
            command_slices_max=max(1, (min(info.sgl_descriptors or 256, 256) - 1) // 2),
        )
        io = IocbStruct()
        io.n_runs, io.n_pages, io.n_layers, io.n_segments = runs.size, pages, starts.size, 1
        io.segment_nbytes[0], io.segment_stride[0] = sum(memory.segment_nbytes), stride
        queues = self._queues
        io.padding = queues.scratch if opcode == OPCODE_READ else queues.zeros
        io.opcode, io.lba_shift = opcode, info.lba_shift
        io.slice_nlb, io.layer_stride_nlb = extents.slice_nlb, extents.layer_stride_nlb
        io.psdt = PSDT_SGL if info.sgl_descriptors else 0
        shares = [self._share(q, *part) for q, part in enumerate(split_shares(runs, queues.count))]
        return Commands(io, runs, np.arange(pages, dtype=np.uint32), starts, shares)

    def _share(self, number: int, first: int, count: int) -> QueueShareStruct:
        queue = self._queues.queues[number]
        return QueueShareStruct(
            qp=queue.struct_address,
            lists=queue.lists,
            lists_dma=queue.lists_dma,
            list_nbytes=LIST_NBYTES,
            first_run=first,
            n_runs=count,
        )

    def enqueue(self, work: _Work) -> list[int]:
        """Puts a job on the stream; returns the layers' events."""
        lane, layers, batch = self.lane, work.words.layers, work.batch
        events = lane.take_events(layers)
        with lane.lock, lane.driver.bound():
            batch.upload(lane.stream)
            for layer in range(layers):
                if self.name == "resident":
                    self._launch("gio_resident", batch, layer, self._threads, 1)
                else:
                    self._launch_layer(work, layer)
                if layer + 1 < layers:
                    lane.driver.record_event(events[layer], lane.stream)
            batch.download(lane.driver, batch.status_offset, 4 * batch.pages, lane.stream)
            if work.digests is not None and not work.compare and batch.digests_offset is not None:
                size = work.digests.nbytes
                batch.download(lane.driver, batch.digests_offset, size, lane.stream)
            lane.driver.write_value(lane.stream, work.device_words, 1)
            # With the last layer comes what became of all: who waited for it knows.
            lane.driver.record_event(events[-1], lane.stream)
        return events

    def _launch_layer(self, work: _Work, layer: int) -> None:
        """One layer of `launch`: reads are sent a layer ahead where staging has the room."""
        batch, layers = work.batch, work.words.layers
        if not work.is_read:
            self._move(batch, layer, publish=0)
            self._launch("gio_drain", batch, layer, _WARP, 1)
            return
        if layer == 0:
            self._launch("gio_submit", batch, 0, _WARP, None)
        if work.window > 1 and layer + 1 < layers:
            self._launch("gio_submit", batch, layer + 1, _WARP, None)
        self._launch("gio_drain", batch, layer, _WARP, 0)
        self._move(batch, layer, publish=1)

    def _launch(
        self, name: str, batch: DeviceBatch, layer: int, threads: int, publish: int | None
    ) -> None:
        launch_layer(
            self.driver,
            self._modules[f"{name}_{self._queues.ring}"],
            batch,
            layer,
            self.lane.stream,
            self._queues.count,
            threads=threads,
            publish=publish,
        )

    def _move(self, batch: DeviceBatch, layer: int, *, publish: int) -> None:
        function = self._modules["gio_move"]
        stream = self.lane.stream
        launch_layer(
            self.driver, function, batch, layer, stream, self._move_blocks, publish=publish
        )

    def watch(self, job: DeviceJob) -> None:
        """Finishes the job once its stream is through."""
        with self._changed:
            self._jobs.append(job)
            self._changed.notify_all()

    def _watch(self) -> None:
        """Looks at the last word of each job; makes no CUDA call."""
        while not self._closed or self._jobs:  # bounded by close(): kernels have deadlines
            with self._changed:
                if not self._jobs:
                    self._changed.wait(0.2)
                ended = [job for job in self._jobs if job.work.words.moved]
                self._jobs = [job for job in self._jobs if not job.work.words.moved]
            for job in ended:
                self._finish(job)
            if not ended:
                time.sleep(_LOOK_S)

    def _finish(self, job: DeviceJob) -> None:
        work = job.work
        status = work.batch.result(work.batch.status_offset, 4 * work.batch.pages).view(np.uint32)
        if work.digests is not None and not work.compare and work.batch.digests_offset is not None:
            found = work.batch.result(work.batch.digests_offset, work.digests.nbytes)
            work.digests[:] = found.view(np.uint64).reshape(work.digests.shape)
        self._broken = self._broken or bool((status == STATUS_TIMED_OUT).any())
        job.finish(status.copy())

    def close(self, timeout_s: float = 10.0) -> None:
        """Waits for the stream, resets the controller and gives everything back.

        The controller itself stays the caller's.  Raises DeviceTimeout when the stream or the
        reset does not end; all memory is then kept.  A second call does nothing.
        """
        if self._closed:
            return
        self._closed = True
        if not self.wait_idle(timeout_s):
            self.lane.staging.abandon()
            raise DeviceTimeout(f"the GPU's stream did not end within {timeout_s:g} s")
        self._thread.join(timeout_s)
        self._controller.stop()
        self._controller.reset(timeout_s)
        self.lane.close(timeout_s)
        self._queues.close()
        self._tables.close()


def split_shares(runs: npt.NDArray[np.void], count: int) -> list[tuple[int, int]]:
    """(first, number) of each of `count` shares: equally many runs, no slice in two of them."""
    whole = np.append(np.flatnonzero(runs["skip"] == 0), runs.size)
    wanted = np.arange(count + 1) * runs.size // count
    cuts = whole[np.searchsorted(whole, wanted)].tolist()
    return [(first, last - first) for first, last in itertools.pairwise(cuts)]
