"""The GPU engines whose kernels write commands, ring doorbells, poll and move slices.

Each has queue pairs of its own in the store's controller.  The default at tier T0 is not one of
them but `HostEngine`, which uses no multiprocessor.  `launch` submits a layer's commands with one
kernel, finishes the layer before, and reaps the completions with a second kernel; `resident` does
all of a layer in one kernel that waits; `persistent` has one kernel for all layers and jobs.  Every
kernel has a deadline for commands, and the engine's thread has one for the persistent kernel, so
the stream always ends.

After a deadline or a CUDA error the drive may still write into staging: the engine then refuses new
work and keeps that memory until `close` has reset the controller.
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple, Unpack

import numpy as np

from tutti.base.arrays import U32, U64
from tutti.base.callbacks import Guard
from tutti.base.process import Owned
from tutti.base.units import MiB
from tutti.errors import ConfigError, DeviceTimeout, PoolClosed, Unsupported
from tutti.gio_uring.controller import NativeController
from tutti.gio_uring.gpu.device_batch import BatchRequest, Commands, DeviceBatch, Staged
from tutti.gio_uring.gpu.device_code import Modules
from tutti.gio_uring.gpu.device_job import DeviceJob
from tutti.gio_uring.gpu.device_queues import DeviceQueues, handles_rung
from tutti.gio_uring.gpu.driver import Driver
from tutti.gio_uring.gpu.engine_choice import REASON
from tutti.gio_uring.gpu.host_engine import STAGING_NBYTES
from tutti.gio_uring.gpu.launcher import KernelWork, Launcher, ResidentKernels, ShortKernels
from tutti.gio_uring.gpu.persistent import PersistentKernel
from tutti.gio_uring.gpu.pinned_memory import LeaseOwner, TableMemory, retain_until_exit
from tutti.gio_uring.gpu.stream_queue import Needed, StreamQueue, wait_until
from tutti.gio_uring.iocb import CutStruct, Extents, IocbStruct, PagedMemory
from tutti.gio_uring.memory import view_at
from tutti.gio_uring.nvme_spec import OPCODE_READ, PSDT_SGL, STATUS_TIMED_OUT
from tutti.gio_uring.transfer import TIMEOUT_S, TransferOptions

KINDS = ("launch", "resident", "persistent")
#: Time without a job after which the persistent kernel is told to end.
REST_S = 1.0
#: Longest wait in a kernel if the driver kills kernels that run for seconds.
KERNEL_S = 1.0
#: Least memory for tables, and its share of larger staging.
_TABLES_NBYTES, _TABLES_SHARE = 8 * MiB, 64
_LOOK_S = 0.0002

_log = logging.getLogger(__name__)


class KernelSize(NamedTuple):
    """The share of a GPU and of a drive's queues that kernels use.

    shares: queue pairs per drive, each driven by one block.  depth: entries of each queue pair.
    move_blocks: blocks of the kernel that moves slices, for "launch".
    command_nbytes_max: limit of one command.
    """

    shares: int = 4
    depth: int = 64
    move_blocks: int = 16
    command_nbytes_max: int = MiB


_SIZE = KernelSize()


class DeviceEngine(Owned):
    """Moves pages of one GPU's memory by kernels that drive queue pairs.

    controller: the store's, whose thread polls the queue pairs of all producers; if no thread
    serves it, this engine starts one, and `close` stops it.
    kind: one of KINDS.  kernels: their size.  stream: to use instead of a new one, such as a
    green context's; for "persistent" its context needs a multiprocessor per share.
    rest_s: idle time after which the persistent kernel ends; the next job starts it again.
    """

    #: Why this engine was chosen, for `stats`.
    reason = REASON
    #: Reason for the size of its staging.
    staging_reason = REASON

    def __init__(
        self,
        driver: Driver,
        modules: Modules,
        controller: NativeController,
        *,
        kind: str = "launch",
        kernels: KernelSize = _SIZE,
        staging_nbytes: int = STAGING_NBYTES,
        stream: int | None = None,
        rest_s: float = REST_S,
    ) -> None:
        if kind not in KINDS:
            raise ConfigError(f"the engine {kind!r} does not exist; use one of {', '.join(KINDS)}")
        if kind == "persistent":
            _check_staying(driver, kernels.shares * handles_rung(controller))
        self._limits_kernels = driver.limits_kernels
        self.driver = driver
        self.name = kind
        self._controller = controller
        info = controller.info
        self._lba_nbytes = info.lba_nbytes
        self._command_nlb = max(
            1, min(kernels.command_nbytes_max, info.mdts_nbytes) // info.lba_nbytes
        )
        self._closed = self._broken = False
        #: Whether it supports the option `held`, and enqueues held layers only when granted.
        self.holds = self.launches = kind != "persistent"
        self._is_server = False  # this engine started the controller's thread
        self._busy: set[DeviceJob] = set()  # kernels may ring doorbells for these
        self._tables = TableMemory(driver, max(_TABLES_NBYTES, staging_nbytes // _TABLES_SHARE))
        with ExitStack() as undo:
            undo.callback(self._tables.close)
            stays = kind == "persistent"
            self.stream_queue = StreamQueue(
                driver, controller, staging_nbytes, 1 if stays or stream is None else (stream,)
            )
            undo.callback(self.stream_queue.close, TIMEOUT_S)
            self._queues = DeviceQueues(
                driver,
                controller,
                self._tables,
                self.stream_queue.stream,
                kernels.shares,
                kernels.depth,
            )
            undo.callback(self._queues.close)
            if not self.wait_idle(TIMEOUT_S):  # the persistent kernel is on another stream
                raise DeviceTimeout("the tables were not copied to the GPU in time; try again")
            self._launcher: Launcher
            parts = (modules, self._queues, self.stream_queue)
            if stays:
                self._launcher = PersistentKernel(*parts, self._tables, stream, rest_s)
            else:
                launcher = ResidentKernels if kind == "resident" else ShortKernels
                self._launcher = launcher(*parts, kernels.move_blocks)
            undo.pop_all()
        if not controller.is_served:
            controller.start()
            self._is_server = True
        self._jobs: list[DeviceJob] = []
        self._kept: list[DeviceJob] = []
        self.guard = Guard()
        self._lock = threading.RLock()  # used directly: an interrupted Condition.__enter__ keeps it
        self._changed = threading.Condition(self._lock)
        for arena in (self.stream_queue.staging.arena, *self._tables.arenas):
            arena.on_full = self._release_held  # their grants may wait for the one that waits here
        self._thread = threading.Thread(target=self._watch, name="tutti-device-jobs", daemon=True)
        self._thread.start()

    @property
    def stream_count(self) -> int:
        """Number of streams that it uses; the persistent kernel has one of its own."""
        return 2 if self.name == "persistent" else 1

    def follow(self, stream: int) -> None:
        """Orders transfers submitted from now on after the work that is on `stream` now."""
        self.stream_queue.follow(stream)

    def wait_idle(self, timeout_s: float) -> bool:
        """Waits until nothing is on the stream or held.  False after the timeout."""
        return wait_until(self.stream_queue.is_idle, timeout_s)

    def submit(
        self,
        opcode: int,
        extents: Extents,
        pages: U32,
        memory: PagedMemory,
        **options: Unpack[TransferOptions],
    ) -> DeviceJob:
        """See `Engine.submit`; for pages in GPU memory.  Jobs run in the order of submission.

        timeout_s: of each kernel.  held: other jobs run between its layers, or end this if they
        need its memory.  Raises CapacityError if a layer does not fit into the staging,
        DeviceTimeout if no staging becomes free, a deadline has passed or a drive was reset.
        """
        self._check()
        layers, digests = memory.bases.shape[0], options.get("digests")
        stride = extents.slice_nlb * self._lba_nbytes
        timeout_s = options.get("timeout_s", TIMEOUT_S)
        kernel_s = min(timeout_s, KERNEL_S) if self._limits_kernels else timeout_s
        owner, job = LeaseOwner(), None
        try:
            needed = Needed(layers, pages.size, stride, self._lba_nbytes)
            staged = self.stream_queue.stage(needed, timeout_s, owner)
            batch = DeviceBatch(
                self._tables,
                BatchRequest(
                    memory,
                    pages,
                    opcode=opcode,
                    slice_nlb=extents.slice_nlb,
                    lba_shift=self._controller.info.lba_shift,
                    staged=Staged(staged.device_starts, stride),
                    commands=self._commands(
                        opcode, extents, pages.size, memory, staged.starts, stride
                    ),
                    digests=digests,
                    flags=staged.device_words + staged.words.ready_offset(0),
                    timeout_s=kernel_s,
                ),
                owner,
            )
            is_read = opcode == OPCODE_READ
            computed = None if options.get("compare", False) else digests
            work = KernelWork(batch, staged, is_read, computed, kernel_s)
            held_s = timeout_s if options.get("held") and self.holds else None
            job = DeviceJob(self, work, pages.size, options.get("on_released"), held_s)
            owner.is_free = job.is_free
            if not options.get("gated"):
                job.enqueue()
            return job
        except BaseException:
            if job is None:
                owner.is_free = lambda: True
            else:  # interrupted; its waiters get an error
                job.abandon()
                owner.is_free = job.is_free
            raise

    def _check(self) -> None:
        if self._closed:
            raise PoolClosed("the GPU engine is closed; make a new one")
        if self._broken:
            raise DeviceTimeout(
                "a deadline passed or a CUDA call failed, and the device may still write; close "
                "the engine"
            )
        self._check_queues()

    def _check_queues(self) -> None:
        if self._queues.are_dead:
            raise DeviceTimeout(
                "a drive was reset, which ended the queues that the GPU rings; close the engine, "
                "and make a new one"
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
        slices_max = max(1, (min(info.sgl_descriptors or 256, 256) - 1) // 2)
        runs = extents.commands(
            CutStruct(extents.slice_nlb, self._lba_nbytes, self._command_nlb, slices_max)
        )
        runs, shares = self._queues.split(runs)
        io = IocbStruct()
        io.n_runs, io.n_pages, io.n_layers, io.n_segments = runs.size, pages, starts.size, 1
        nbytes = sum(memory.segment_nbytes)
        if not info.sgl_descriptors:  # PRPs need contiguous memory, so staging includes the padding
            if opcode != OPCODE_READ:
                _clear_padding(starts, pages, stride, nbytes)
            nbytes = stride
        io.segment_nbytes[0], io.segment_stride[0] = nbytes, stride
        io.padding = self._queues.scratch if opcode == OPCODE_READ else self._queues.zeros
        io.opcode, io.lba_shift = opcode, info.lba_shift
        io.slice_nlb, io.layer_stride_nlb = extents.slice_nlb, extents.layer_stride_nlb
        io.psdt = PSDT_SGL if info.sgl_descriptors else 0
        return Commands(io, runs, np.arange(pages, dtype=np.uint32), starts, shares)

    def enqueue(self, job: DeviceJob) -> None:
        """Launches the granted layers of a job, and watches it; see `_go_on` for the others."""
        with self.stream_queue.lock:
            self._check()  # an earlier job may have failed meanwhile
            self._launch(job)
            with self._lock:  # in the order of the stream
                self._jobs.append(job)
                self._changed.notify_all()

    def _go_on(self, job: DeviceJob) -> None:
        """Launches what was granted meanwhile, on the stream queue's thread.

        Also after the deadline of another job: this one was accepted before.
        """
        try:
            with self.stream_queue.lock:
                if not job.done:
                    self._check_queues()
                    self._launch(job)
        except Exception as error:  # the thread goes on with other jobs
            job.fail(error)

    def _launch(self, job: DeviceJob) -> None:
        """Enqueues the layers that were granted since the last call.  The queue's lock is held.

        A grant is a launch, never a word that the stream waits for: what follows on the stream,
        such as a write that the grant waits for, would wait for that word, too.
        """
        stream_queue, work, launcher = self.stream_queue, job.work, self._launcher
        batch, layers, window = work.batch, work.layers, range(job.launched, job.granted)
        if window and not (job.is_begun or job.take()):
            return  # cancelled
        if window:
            events = job.acquire_events()
            driver, stream = stream_queue.driver, stream_queue.stream
            if not window.start:
                launcher.wake(layers, work.timeout_s)
                batch.upload(stream)
                self.begun(job)
            with driver.together():
                if not window.start:
                    launcher.begin(work)
                for layer in window:
                    launcher.put_layer(work, layer, window)
                    if layer + 1 < layers:
                        driver.record_event(events[layer], stream)
                if window.stop == layers:
                    batch.download_outcome(driver, stream)
                    if work.computed is not None:
                        batch.download_digests(driver, stream)
                    driver.write_value(stream, work.staged.device_words, 1)
                    # The last layer's event comes after the outcome of all layers.
                    driver.record_event(events[-1], stream)
            stream_queue.layers += len(window)
            job.was_launched(window.stop)
        if job.launched < layers:
            stream_queue.add_watch(job.is_due, partial(self._go_on, job))

    def _release_held(self) -> None:
        for job in tuple(self._jobs):
            job.release_hold()

    def rest(self, timeout_s: float) -> bool:
        """Ends the persistent kernel until the next job; False if it still runs after the timeout.

        Needed before calls that wait for all kernels of the context; nothing may be under way.
        """
        with self.stream_queue.lock:
            return self._launcher.stop(timeout_s)

    def stats(self) -> dict[str, Any]:
        """The engine that moves pages and the reason for it, its mover, and layers enqueued."""
        return {
            "gpu_engine": self.name,
            "gpu_engine_reason": self.reason,
            "gpu_staging_nbytes": self.stream_queue.staging.nbytes,
            "gpu_staging_reason": self.staging_reason,
            "gpu_numa_node": self.driver.numa_node,
            "gpu_streams": self.stream_count,
            "gpu_mover": "kernel",
            "gpu_layers": self.stream_queue.layers,
        }

    def check_page(self, _: PagedMemory, slice_nlb: int) -> None:
        """Raises CapacityError if one layer of a page does not fit into the staging."""
        lba_nbytes = self._lba_nbytes
        self.stream_queue.check_page(Needed(1, 1, slice_nlb * lba_nbytes, lba_nbytes))

    def write_pages_max(self, layers: int, slice_nlb: int) -> int:
        """Most pages of a write of which all layers fit into half of the staging."""
        lba_nbytes = self._lba_nbytes
        needed = Needed(layers, 1, slice_nlb * lba_nbytes, lba_nbytes)
        return self.stream_queue.pages_max(needed)

    def read_pages_max(self, layers: int, slice_nlb: int) -> int:
        """Most pages of a read: a layer takes half of the staging, its tables half of theirs."""
        least, one = (DeviceBatch.nbytes_max(pages, layers, 1) for pages in (0, 1))
        fitting = (self._tables.nbytes // 2 - least) // (one - least)
        return max(1, min(self.write_pages_max(1, slice_nlb), fitting))

    def begun(self, job: DeviceJob) -> None:
        """Announces that kernels ring for a job: the controller's thread polls more often."""
        job.is_begun = True
        self._busy.add(job)
        self._controller.expect_rings(True)

    def ended(self, job: DeviceJob) -> None:
        """Announces that no kernel rings for a job any more; a second call does nothing."""
        if job in self._busy:
            self._busy.discard(job)
            self._controller.expect_rings(False)

    def keep(self, job: DeviceJob) -> None:
        """Keeps a job's memory until the controller was reset, and refuses new jobs."""
        self._broken = True
        with self._lock:
            self._kept.append(job)

    @property
    def kept_jobs(self) -> int:
        """Number of jobs whose commands were lost; `close` resets the controller and frees them."""
        return len(self._kept)

    def _watch(self) -> None:
        """Polls the final status of each job; makes no CUDA call."""
        while not self._closed or self._jobs:  # bounded by close(), which fails what is left
            with self._changed:
                if not self._jobs:
                    self._changed.wait(0.2)
                live = [job for job in self._jobs if not job.done]  # failed, or cancelled
                ended = [job for job in live if job.is_moved]
                self._jobs = [job for job in live if job not in ended]
                jobs = tuple(self._jobs)
            for job in (*ended, *jobs):
                job.report_ready()
            for job in ended:
                self._finish(job)
            if not jobs:
                self._launcher.rest()
            elif self._launcher.is_overdue(jobs[0].work):
                _log.error("the transfer kernel does not respond; its jobs fail")
                self._give_up()
            elif not ended:
                time.sleep(_LOOK_S)

    def _give_up(self) -> None:
        """Fails all jobs and wakes streams that wait for a kernel; the jobs keep their memory."""
        with self._changed:
            jobs, self._jobs = self._jobs, []
        self._broken = True
        for job in jobs:
            job.work.staged.words.abort(STATUS_TIMED_OUT)
            job.finish(STATUS_TIMED_OUT, is_kept=True)

    def _finish(self, job: DeviceJob) -> None:
        work = job.work
        status, is_owned = work.batch.outcome()
        if work.computed is not None:
            work.computed[:] = work.batch.digests()
        job.finish(status, is_kept=is_owned or bool((status == STATUS_TIMED_OUT).any()))

    def close(self, timeout_s: float = 10.0) -> None:
        """Waits for the stream and frees everything; a second call does nothing.

        Does not close the controller, but resets it if a device may still use memory of a job; this
        ends the commands of its other producers, too.
        Raises DeviceTimeout if the stream, a kernel or the reset does not end, CudaError if the
        context is lost; all memory is kept then.
        """
        with self.stream_queue.lock:
            is_closed, self._closed = self._closed, True
        if is_closed:
            return
        try:
            if not self._controller.is_served:  # the engine that served it was closed earlier
                self._controller.start()
                self._is_server = True
            self._release_held()
            is_idle = self.wait_idle(timeout_s)
            is_stopped = self._launcher.stop(timeout_s)
            if not is_idle:
                self._give_up()
            if not is_stopped or not (is_idle or self.wait_idle(timeout_s)):
                raise DeviceTimeout(
                    f"a kernel or a stream of the GPU did not end within {timeout_s:g} s; what it "
                    "may touch stays reserved until the process ends"
                )
            self._thread.join(timeout_s)
            if self._is_server:
                self._controller.stop()
            if self._is_server or self._kept:
                self._controller.reset(timeout_s)
        except BaseException:
            self._give_up()
            retain_until_exit(self)
            raise
        for job in self._kept:
            job.release()
        self._launcher.close()
        self.stream_queue.close(timeout_s)
        self._queues.close()
        self._tables.close()


def _clear_padding(starts: U64, pages: int, stride: int, nbytes: int) -> None:
    """Clears the padding after each staged slice; kernels write only the slices."""
    for start in np.unique(starts).tolist():
        view_at(start, pages * stride).reshape(pages, stride)[:, nbytes:] = 0


def _check_staying(driver: Driver, blocks: int) -> None:
    """Raises ConfigError if a persistent kernel of so many blocks cannot run here."""
    if blocks > (sms := driver.sm_resource().count):
        raise ConfigError(
            f"{blocks} persistent thread blocks do not fit on {sms} multiprocessors, so some would "
            "never start; use fewer shares"
        )
    if driver.limits_kernels:
        raise Unsupported(
            "the driver ends kernels that run long (KERNEL_EXEC_TIMEOUT), and the engine "
            "persistent has one that stays; use launch, or a GPU without a display"
        )
