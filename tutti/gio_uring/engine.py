"""The host engine: submits I/O control blocks, and keeps memory that late commands may touch.

Python does O(runs) work per batch here and none per layer.  All memory that a job names stays
referenced by the engine until the device can no longer touch it, also after a timeout.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import threading
from collections.abc import Callable, Iterable
from typing import Any, Unpack

import numpy as np
import numpy.typing as npt

from tutti.base.arrays import U32
from tutti.base.callbacks import Guard
from tutti.base.interrupts import uninterrupted
from tutti.base.process import Owned, finalize
from tutti.base.threads import start_thread
from tutti.errors import CapacityError, ConfigError, DeviceTimeout, PoolClosed, Unsupported
from tutti.gio_uring import _native
from tutti.gio_uring.controller import NativeController
from tutti.gio_uring.engine_structs import (
    EngineConfig,
    EngineStats,
    JobConfig,
    RouteStruct,
    ServiceThreadConfig,
    WindowStats,
)
from tutti.gio_uring.iocb import RUN_DTYPE, CutStruct, Extents, PagedMemory, Runs
from tutti.gio_uring.job import Job, nanoseconds
from tutti.gio_uring.memory import HostBuffer
from tutti.gio_uring.nvme_spec import (
    FUA,
    OPCODE_DATASET_MANAGEMENT,
    OPCODE_FLUSH,
    OPCODE_READ,
    PAGE_NBYTES,
    PSDT_PRP,
    PSDT_SGL,
)
from tutti.gio_uring.queue_pair import QueuePair
from tutti.gio_uring.transfer import TIMEOUT_S, HostOptions
from tutti.native import address

DIGEST_NONE, DIGEST_COMPUTE, DIGEST_COMPARE = 0, 1, 2

#: Small transfers that others wait for; loads that a model waits for; stores, which can wait.
PRIORITY_RECORDS, PRIORITY_LOAD, PRIORITY_STORE = 0, 1, 2

#: Entries of a queue pair: more than the commands of a page each that fit into any window.
DEPTH = 256

LIST_NBYTES = 4096  # per CID: 256 SGL descriptors or 512 PRP entries
_DESCRIPTORS_PER_LIST = LIST_NBYTES // 16
_PRP_UNIT = 4  # bytes

_POLL_NS = 200_000_000
_STOP_TIMEOUT_S = 5.0
_ENDED = 2**64 - 1
_REPORT = 1 << 63

#: Engines whose controller could not be reset: a device may still write to their memory.
_ORPHANS: list[object] = []


class Engine(Owned):
    """Submits I/O control blocks to one controller, through one queue pair per service thread.

    depth: entries of a queue pair, a power of two.  command_nbytes_max: longest command, further
    limited by the controller's MDTS.  window_nbytes: limit of bytes in flight per service thread;
    None finds the smallest window with full bandwidth.  digest_workers: number of threads that
    compute digests for the service threads; None uses at most half of the processors.

    Raises ConfigError if the controller is served already.
    """

    def __init__(
        self,
        controller: NativeController,
        *,
        depth: int = DEPTH,
        command_nbytes_max: int = 1 << 20,
        use_sgl: bool | None = None,
        window_nbytes: int | None = None,
        digest_workers: int | None = None,
    ) -> None:
        if controller.is_served:
            raise ConfigError("another engine serves this controller; close that one first")
        self.controller = controller
        info = controller.info
        self.lba_nbytes = 1 << info.lba_shift
        self.command_nlb_max = max(1, min(command_nbytes_max, info.mdts_nbytes) // self.lba_nbytes)
        self.psdt = PSDT_SGL if (info.sgl_descriptors > 0 if use_sgl is None else use_sgl) else 0
        self.descriptors_max = min(
            _DESCRIPTORS_PER_LIST, info.sgl_descriptors or _DESCRIPTORS_PER_LIST
        )
        self.service_threads = len(controller.handles)
        depth = min(depth, info.depth_max)
        lists_nbytes = depth * LIST_NBYTES
        self._arena = HostBuffer(self.service_threads * lists_nbytes + 2 * self.lba_nbytes)
        self.scratch = self._arena.address + self.service_threads * lists_nbytes
        self.zeros = self.scratch + self.lba_nbytes
        self._closed = self._ended = False
        self._stopping = threading.Lock()  # taken by close, the finalizer, or the process's exit
        self._tags = itertools.count(1)
        self._running = _Running()
        self.guard, self._jobs = self._running.guard, self._running.jobs
        self.free_job: Callable[..., None] = _native.quick().gio_job_free
        self._thread = threading.Thread(
            target=self._running.complete, name="gio-completions", daemon=True
        )
        self.queue_pairs: list[QueuePair] = []
        self._arena_region = controller.register(self._arena)
        try:
            controller.served_by(self)
            for i in range(self.service_threads):
                self.queue_pairs.append(controller.create_queue_pair(depth, service_thread=i))
            self._create(lists_nbytes, window_nbytes, digest_workers)
            # For an exit without close: the controller's finalizer runs after this one.
            keep = controller.keep_after_failure
            native = self._running.native
            self._finalizer = finalize(self, _stop, native, self._stopping, keep)
            start_thread(self._thread)
        except BaseException:
            if self.handle:
                _native.lib().gio_engine_stop(self.handle, nanoseconds(_STOP_TIMEOUT_S))
            for queue_pair in self.queue_pairs:
                queue_pair.close()
            self._arena_region.close()
            raise

    @property
    def handle(self) -> int:
        """The native engine."""
        return self._running.native.value or 0

    def _create(
        self, lists_nbytes: int, window_nbytes: int | None, digest_workers: int | None
    ) -> None:
        """Creates the native engine and starts its threads."""
        threads = (ServiceThreadConfig * self.service_threads)()
        for i, thread in enumerate(threads):
            thread.controller = self.controller.handles[i]
            thread.queue_pair = self.queue_pairs[i].struct_address
            thread.lists = self._arena.address + i * lists_nbytes
        routes = self.controller.routes
        route_structs = (RouteStruct * len(routes))(*(RouteStruct(*route) for route in routes))
        if digest_workers is None:
            digest_workers = min(2 * self.service_threads, (os.cpu_count() or 1) // 2)
        config = EngineConfig(
            threads=ctypes.addressof(threads),
            routes=ctypes.addressof(route_structs),
            n_threads=self.service_threads,
            n_routes=len(routes),
            list_nbytes=LIST_NBYTES,
            digest_workers=digest_workers,
            window_nbytes=window_nbytes or 0,
        )
        native = ctypes.byref(self._running.native)
        result = _native.lib().gio_engine_create(ctypes.byref(config), native)
        remedy = "free memory, or end other threads"
        _native.check(result, "cannot start an engine", remedy, CapacityError)

    def check_memory(self, memory: PagedMemory, slice_nlb: int) -> None:
        """Raises Unsupported for memory that needs SGLs if the controller has only PRPs: with PRPs,
        only a command's first segment may start, and only its last may end, within a page.
        """
        if self.psdt != PSDT_PRP or memory.fills_pages:
            return
        nbytes, start = memory.segment_nbytes, int(memory.bases[0, 0])
        places = np.append(memory.bases, np.array(memory.stride_nbytes, np.uint64))
        if nbytes != (slice_nlb * self.lba_nbytes,) or np.any(places % np.uint64(_PRP_UNIT)):
            raise Unsupported(
                f"the drive has no SGLs, so the parts of a page must begin and end at multiples of"
                f" {PAGE_NBYTES} bytes; these have {', '.join(map(str, nbytes))} bytes and begin at"
                f" {start:#x}: use a page size and memory that fit, a drive with SGLs, or a file on"
                " the kernel's driver"
            )

    def descriptors_of(self, memory: PagedMemory) -> int:
        """Most descriptors of a command; one for PRPs and segments that are not whole pages."""
        if self.psdt == PSDT_PRP and not memory.fills_pages:
            return len(memory.segment_nbytes) + 2
        return self.descriptors_max

    def submit(
        self,
        opcode: int,
        extents: Extents,
        pages: U32,
        memory: PagedMemory,
        **options: Unpack[HostOptions],
    ) -> Job:
        """Moves slices between the medium and paged memory, all layers of ``memory`` in order.

        opcode: OPCODE_READ or OPCODE_WRITE.  pages: uint32 (n,) from ``memory.check_pages``, one
        per slice of the extents.  on_released: called on the engine's thread once no command of
        the job is outstanding; it must not wait for a job.
        Raises PoolClosed after ``close``, CapacityError without memory for the job.
        """
        slices_max = max(1, (self.descriptors_of(memory) - 1) // (len(memory.segment_nbytes) + 1))
        runs = extents.commands(
            CutStruct(extents.slice_nlb, self.lba_nbytes, self.command_nlb_max, slices_max)
        )
        config = JobConfig(iocb=memory.iocb)
        io = config.iocb
        io.pages, io.n_pages = address(pages), pages.size
        io.padding = self.scratch if opcode == OPCODE_READ else self.zeros
        io.slice_nlb, io.layer_stride_nlb = extents.slice_nlb, extents.layer_stride_nlb
        io.psdt = self.psdt
        io.flags = FUA if options.get("fua") else 0
        digests, words = options.get("digests"), options.get("words")
        if digests is not None:
            if digests.shape != (pages.size, memory.bases.shape[0]):
                raise ValueError("digests must have the shape (pages, layers)")
            config.digests = address(digests)
            config.digest = DIGEST_COMPARE if options.get("compare") else DIGEST_COMPUTE
        config.gated = int(options.get("gated", False))
        if words is not None:
            config.words, config.window = words.address, options.get("window", 0)
        layer_ns = options.get("layer_ns")
        if layer_ns is not None:
            config.layer_ns = address(layer_ns)
        config.held = options.get("held", 0)
        config.ahead = int(options.get("ahead", False))
        config.priority = options.get("priority", PRIORITY_RECORDS)
        keep = (pages, memory, digests, words, layer_ns)
        timeout_s, on_released = options.get("timeout_s", TIMEOUT_S), options.get("on_released")
        return self._submit(config, opcode, runs, pages.size, keep, timeout_s, on_released)

    def flush(
        self,
        namespaces: Iterable[int],
        *,
        timeout_s: float = 60.0,
        on_released: Callable[[Job], None] | None = None,
    ) -> Job:
        """Makes every command that completed before durable, one Flush per namespace."""
        nsid = np.fromiter(namespaces, np.uint32)
        runs = np.zeros(nsid.size, RUN_DTYPE)
        runs["nsid"], runs["nlb"], runs["first"] = nsid, 1, np.arange(nsid.size)
        return self._raw(OPCODE_FLUSH, runs, timeout_s, on_released)

    def deallocate(
        self, slba: npt.ArrayLike, nsid: npt.ArrayLike, nlb: npt.ArrayLike, *, timeout_s: float
    ) -> Job:
        """Deallocates ranges of LBAs (DSM), whose content is lost; goes after all loads."""
        slba = np.asarray(slba, np.uint64)
        runs = np.zeros(slba.size, RUN_DTYPE)
        runs["slba"], runs["nsid"], runs["nlb"] = slba, nsid, nlb
        runs["first"] = np.arange(slba.size)
        return self._raw(OPCODE_DATASET_MANAGEMENT, runs, timeout_s, priority=PRIORITY_STORE)

    def reset(self, timeout_s: float) -> None:
        """Resets the controller: every outstanding command ends.

        Raises DeviceTimeout when the device still owns memory after the deadline.
        """
        result = _native.lib().gio_engine_reset(self.handle, nanoseconds(timeout_s))
        if result != 0:
            raise DeviceTimeout(
                f"the controller could not be reset within {timeout_s:g} s; "
                "its memory stays reserved, restart the process to get it back"
            )

    def is_using(self, owner: object) -> bool:
        """Whether a job on memory of `owner`, even one submitted in part, is not released yet."""
        kept = [job.kept for job in list(self._jobs.values())]
        things = itertools.chain.from_iterable(kept)
        return any(isinstance(thing, PagedMemory) and thing.owner is owner for thing in things)

    def stats(self) -> EngineStats:
        """Totals since the engine started."""
        out = EngineStats()
        _native.lib().gio_engine_stats(self.handle, ctypes.byref(out))
        return out

    def windows(self) -> list[WindowStats]:
        """Statistics of each service thread about its drive."""
        out = [WindowStats() for _ in range(self.service_threads)]
        for i, stats in enumerate(out):
            _native.lib().gio_engine_window(self.handle, i, ctypes.byref(stats))
        return out

    @uninterrupted()
    def close(self, timeout_s: float = 10.0) -> None:
        """Waits for commands in flight, resets the controller if they do not end, and stops.

        Raises DeviceTimeout if the reset fails, too; all memory stays reserved then.
        """
        if self._ended:
            return
        self._closed = True
        with self._stopping:
            stopped = _native.lib().gio_engine_stop(self.handle, nanoseconds(timeout_s)) == 0
        if stopped and self._thread.ident is not None:
            self._thread.join(timeout_s)
        if not stopped or self._thread.is_alive():
            _ORPHANS.append((self, self.controller, dict(self._jobs)))
            self._ended = True
            raise DeviceTimeout(
                f"the device answered neither its commands nor a reset within {timeout_s:g} s; "
                "its memory stays reserved until the process ends"
            )
        self._finalizer.detach()
        for queue_pair in self.queue_pairs:
            queue_pair.close()
        self._arena_region.close()
        self._ended = True

    def _raw(
        self,
        opcode: int,
        runs: Runs,
        timeout_s: float,
        on_released: Callable[[Job], None] | None = None,
        priority: int = PRIORITY_RECORDS,
    ) -> Job:
        config = JobConfig()
        config.iocb.n_layers, config.iocb.slice_nlb = 1, 1
        config.iocb.psdt = PSDT_PRP
        config.priority = priority
        return self._submit(config, opcode, runs, 0, (), timeout_s, on_released)

    @uninterrupted(lambda _, job: job.cancel())
    def _submit(
        self,
        config: JobConfig,
        opcode: int,
        runs: Runs,
        n_pages: int,
        keep: tuple[Any, ...],
        timeout_s: float,
        on_released: Callable[[Job], None] | None,
    ) -> Job:
        page_status = np.zeros(n_pages, np.uint32)
        config.iocb.opcode = opcode
        config.iocb.lba_shift = self.controller.info.lba_shift
        config.iocb.runs, config.iocb.n_runs = address(runs), runs.size
        config.page_status = address(page_status) if n_pages else 0
        config.timeout_ns = nanoseconds(timeout_s)
        job = self.open_job(page_status, (page_status, runs, *keep), on_released)
        config.tag = job.tag
        submit, native = _native.quick().gio_engine_submit, ctypes.byref(job.native)
        self.check_started(job, submit(self.handle, ctypes.byref(config), native))
        return job

    def open_job(
        self, page_status: U32, keep: tuple[Any, ...], on_released: Callable[[Job], None] | None
    ) -> Job:
        """Makes and registers a job, for a native call that submits it under its tag and may
        release it before it returns.  keep: objects that must live until the release.

        Raises PoolClosed after ``close``.
        """
        if self._closed:
            raise PoolClosed("the engine is closed; open the pool again")
        job = Job(self, next(self._tags), page_status, keep, on_released)
        self._jobs[job.tag] = job
        return job

    def forget_job(self, job: Job) -> None:
        """Removes a job that was not submitted."""
        del self._jobs[job.tag]

    def check_started(self, job: Job | None, result: int) -> None:
        """Removes a job whose submission failed, and raises the error; see ``submit``."""
        if result < 0 and job is not None:
            self.forget_job(job)
        if result == -errno.ESHUTDOWN:
            raise PoolClosed("the engine is closing; open the pool again")
        _native.check(result, "cannot start a transfer", "free memory", CapacityError)


class _Running(Owned):
    """The native engine and its jobs.  Outlives an Engine that is dropped, until its thread and all
    waits have ended.
    """

    def __init__(self) -> None:
        self.native = ctypes.c_void_p()
        self.guard = Guard()
        self.jobs: dict[int, Job] = {}
        finalize(self, _destroy, self.native).atexit = False

    def complete(self) -> None:
        """Drops released jobs and runs their callbacks, until the native threads have ended."""
        lib = _native.lib()
        ended = False
        while not ended:  # bounded by close(): a native engine that ended reports it
            tag = int(lib.gio_engine_next(self.native, _POLL_NS))  # a fork in a callback ends it
            if tag in (0, _ENDED):
                ended = tag == _ENDED
                continue
            if tag & _REPORT:
                reported = self.jobs.get(tag ^ _REPORT)
                if reported is not None:
                    reported.report_ready()
                del reported
                continue
            job = self.jobs.pop(tag)
            callback = job.release()
            if callback is not None:
                self.guard.call("a completion callback", callback, job)
            del job, callback  # they reference the engine, and would keep a dropped one alive


def _destroy(native: ctypes.c_void_p) -> None:
    if native and _native.lib().gio_engine_stop(native, nanoseconds(_STOP_TIMEOUT_S)) == 0:
        _native.lib().gio_engine_destroy(native)
        native.value = None


def _stop(
    native: ctypes.c_void_p, lock: threading.Lock, keep_controller: Callable[[], None]
) -> None:
    with lock:
        if native and _native.lib().gio_engine_stop(native, nanoseconds(_STOP_TIMEOUT_S)) != 0:
            keep_controller()
