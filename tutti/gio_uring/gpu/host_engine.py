"""The GPU engine `host`: the native thread submits, a stream waits and copies, no SM is used.

A read goes through staging layer by layer.  If two layers do not fit, each layer is split into
chunks of pages.  For each chunk of a layer, this is enqueued beforehand on a stream for loads:

wait(the chunk is staged)   copies to the pages   write(its place is free)

and an event for each layer.  The streams for stores never wait for the medium.  A layer is enqueued
there when its place in staging is free, which is at once if the staging is large enough:

copies to the staging   write(the layer is staged)   record an event

Two streams take layers alternately.  A layer's copies may overlap those of the layer before; its
words and its event come after that layer's event, so that they cover all layers up to their own.
If trials found it faster, a read waits for its last layer and is copied in one call: overlap.py.

The waits are `cuStreamWaitValue32` on words that the native thread stores in all cases: a failed
command, a deadline, a cancelled job and a closed engine store them, too, after the status.  So
nothing that must run to release a stream needs a CUDA call, the GIL or a lock.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import numpy as np

from tutti.base.arrays import U32, U64
from tutti.base.process import Owned
from tutti.base.units import MiB
from tutti.errors import PoolClosed
from tutti.gio_uring.controller import NativeController
from tutti.gio_uring.engine import Engine
from tutti.gio_uring.gpu.device_batch import BatchRequest
from tutti.gio_uring.gpu.driver import Driver
from tutti.gio_uring.gpu.engine_choice import REASON
from tutti.gio_uring.gpu.moved_job import MovedJob, Route
from tutti.gio_uring.gpu.mover import CopyDescriptor, Mover, choose_mover
from tutti.gio_uring.gpu.overlap import Overlaps
from tutti.gio_uring.gpu.pinned_memory import LeaseOwner
from tutti.gio_uring.gpu.stream_queue import Cells, Needed, StagedLayers, StreamQueue, wait_until
from tutti.gio_uring.gpu.verifier import Verification, Verifier
from tutti.gio_uring.iocb import Extents, PagedMemory
from tutti.gio_uring.job import Job
from tutti.gio_uring.memory import DmaRegion
from tutti.gio_uring.nvme_spec import OPCODE_READ
from tutti.gio_uring.transfer import TIMEOUT_S, Submitter, TransferOptions

STAGING_NBYTES = 256 * MiB
#: Two, so that waits, copies and events of consecutive layers overlap.
STREAMS = 2


class _Released:
    """Calls back once, when the last of several native jobs was released and, if that is counted as
    one more, the GPU has verified their pages.

    whole: the transfer with the status of all pages; None: take the native jobs' statuses.
    read_s: time.monotonic() when the last native job so far was released.
    """

    def __init__(self, count: int, callback: Callable[[Any], None] | None) -> None:
        self._left = count
        self._callback = callback
        self._lock = threading.Lock()
        self.whole: Callable[[], MovedJob | None] = lambda: None
        self.read_s = 0.0
        self._statuses: dict[int, U32] = {}

    def of(self, number: int) -> Callable[[Job], None]:
        """The callback for native job `number`."""

        def released(job: Job) -> None:
            self.read_s = time.monotonic()
            self._statuses[number] = job.page_status
            self.ended()

        return released

    def ended(self) -> None:
        """Counts the release of one job, or the GPU's verification of all pages."""
        with self._lock:
            self._left -= 1
            is_last = self._left == 0
        if is_last and self._callback is not None:
            whole = self.whole()
            if whole is not None:
                self._callback(_Ended(whole.page_status))
            else:
                statuses = [self._statuses[number] for number in sorted(self._statuses)]
                self._callback(_Ended(np.concatenate(statuses)))


@dataclass(frozen=True)
class _Ended:
    """The argument of a callback: the status of a transfer's pages."""

    page_status: U32


@dataclass(frozen=True)
class _Through:
    """See `HostEngine.through`."""

    gpu: HostEngine
    engine: Engine

    def submit(self, *request: Any, **options: Any) -> MovedJob:
        return self.gpu.submit(*request, engine=self.engine, **options)


class HostEngine(Owned):
    """Moves pages of one GPU's memory through one native engine and staging of its own.

    engine: the native engine that does the I/O.  mover: by default the copy engines.
    verifier: compares digests of reads and computes those of writes, on the GPU; it is closed with
    this engine.  By default the native engine's workers do that, in staging.
    load_staging_nbytes, store_staging_nbytes: pinned memory for each direction; a read of which
    four layers do not fit goes in chunks.  load_streams, store_streams: streams to use, such as
    those of a green context; by default two new ones for each direction.
    """

    name = "host"
    #: Whether it supports the option `held`, for reads.
    holds = True
    #: Why this engine was chosen, for `stats`.
    reason = REASON
    #: Reason for the size of its staging.
    staging_reason = REASON

    def __init__(
        self,
        driver: Driver,
        engine: Engine,
        *,
        mover: Mover | None = None,
        verifier: Verifier | None = None,
        load_staging_nbytes: int = STAGING_NBYTES,
        store_staging_nbytes: int = STAGING_NBYTES,
        load_streams: Sequence[int] | int = STREAMS,
        store_streams: Sequence[int] | int = STREAMS,
    ) -> None:
        self.driver = driver
        self.engine = engine
        self.mover = mover or choose_mover(driver)
        self.verifier = verifier
        self._digested_layers = [0, 0]  # of writes, of reads
        self._closed = False
        self._loads = StreamQueue(driver, engine.controller, load_staging_nbytes, load_streams)
        self._overlaps = Overlaps(self._loads, engine.controller)
        try:
            self._stores = StreamQueue(
                driver, engine.controller, store_staging_nbytes, store_streams
            )
        except BaseException:
            self._loads.close(1.0)
            raise

    @property
    def stream_count(self) -> int:
        """Number of streams that it uses."""
        return len(self._loads.streams) + len(self._stores.streams)

    def follow(self, stream: int) -> None:
        """Orders transfers submitted from now on after the work that is on `stream` now."""
        for stream_queue in (self._loads, self._stores):
            stream_queue.follow(stream)

    def submit(
        self,
        opcode: int,
        extents: Extents,
        pages: U32,
        memory: PagedMemory,
        *,
        engine: Engine | None = None,
        **options: Unpack[TransferOptions],
    ) -> MovedJob:
        """See `Engine.submit`; for pages in GPU memory.

        A read may have any number of pages.  One layer of a write must fit into the staging, and
        all of them should; see `write_pages_max`.  engine: does the I/O, by default its own.
        on_released: called when the medium no longer uses the staging; the stream may still copy
        from it.
        Raises CapacityError if the staging is too small, DeviceTimeout if none becomes free,
        CudaError, and what the engine raises.
        """
        engine = engine or self.engine
        if self._closed:
            raise PoolClosed("the GPU engine is closed; attach a new one")
        is_read = opcode == OPCODE_READ
        stream_queue = self._loads if is_read else self._stores
        lba_nbytes = engine.lba_nbytes
        stride = extents.slice_nlb * lba_nbytes
        timeout_s = options.get("timeout_s", TIMEOUT_S)
        jobs: list[Job] = []
        owner, moved = LeaseOwner(stream_queue), None
        try:
            stage = stream_queue.stage_reads if is_read else stream_queue.stage_writes
            needed = Needed(memory.bases.shape[0], pages.size, stride, lba_nbytes)
            cells = stage(needed, timeout_s, owner)
            copies = []
            for c in cells.chunks:
                part = pages[c.first : c.last]
                copy = CopyDescriptor(part, memory, c.device_starts, stride, is_read, owner)
                copies.append(self.mover.prepare(copy))
            verification = self._verification(opcode, extents, pages, memory, options, owner)
            if verification is not None:
                options = {**options, "digests": None}
            is_late = is_read and verification is not None  # known only after the medium's end
            released = _Released(len(cells.chunks) + is_late, options.get("on_released"))
            for number, chunk in enumerate(cells.chunks):
                parts = _chunk_options(options, chunk, released.of(number))
                jobs.append(
                    self._submit_chunk(engine, opcode, extents, memory, cells, number, owner, parts)
                )
            route = Route(copies, cells, is_read, verification)
            route, watch = self._overlaps.choose(route, extents, pages.size * stride, options)
            moved = MovedJob(stream_queue, jobs, route)
            owner.is_free = moved.is_free
            moved.read_s = lambda: released.read_s
            if verification is not None:
                released.whole = weakref.ref(moved)
            moved.enqueue(now=not (options.get("gated") or options.get("held")))
            if is_late:
                stream_queue.watch(
                    moved.is_settled,
                    lambda: engine.guard.call("a completion callback", released.ended),
                )
            watch(moved)
            if verification is not None:
                self._digested_layers[is_read] += moved.layers
            return moved
        except BaseException:
            self._abandon(engine, owner, jobs, moved)
            raise

    def through(self, engine: Engine) -> Submitter:
        """A submitter for the same GPU whose I/O is done by another native engine; the staging must
        be lent to its controller.  An agent's client has such an engine per session.
        """
        return _Through(self, engine)

    def lend_staging(self, controller: NativeController) -> list[DmaRegion]:
        """Registers the staging with another controller of the same drives.

        The caller must close the regions before that controller.
        """
        return [queue.staging.lend(controller) for queue in (self._loads, self._stores)]

    def _verification(
        self,
        opcode: int,
        extents: Extents,
        pages: U32,
        memory: PagedMemory,
        options: TransferOptions,
        owner: LeaseOwner,
    ) -> Verification | None:
        """The GPU's work on the digests of a transfer; None if the native engine does it."""
        digests, compares = options.get("digests"), options.get("compare", False)
        if self.verifier is None or digests is None or compares != (opcode == OPCODE_READ):
            return None
        shift = self.engine.controller.info.lba_shift
        request = BatchRequest(memory, pages, opcode, extents.slice_nlb, shift, digests=digests)
        return self.verifier.prepare(request, owner)

    def _submit_chunk(
        self,
        engine: Engine,
        opcode: int,
        extents: Extents,
        memory: PagedMemory,
        cells: Cells,
        number: int,
        owner: LeaseOwner,
        options: TransferOptions,
    ) -> Job:
        """The native job of one chunk, between the medium and its cells."""
        chunk = cells.chunks[number]
        count, stride = chunk.last - chunk.first, extents.slice_nlb * engine.lba_nbytes
        staging = _staging_memory(memory, chunk.starts[:, None], stride, count, owner)
        if opcode == OPCODE_READ:
            chunk.words.grant(cells.granted(number))
        return engine.submit(
            opcode,
            part_of(extents, chunk.first, chunk.last),
            np.arange(count, dtype=np.uint32),
            staging,
            words=chunk.words,
            **options,
        )

    def first_layers(self, layers: int) -> None:
        """Sets how many layers a submitter enqueues itself; a thread enqueues the others."""
        for stream_queue in (self._loads, self._stores):
            stream_queue.first_layers = layers

    def stats(self) -> dict[str, Any]:
        """The engine that moves pages and the reason for it, its mover, and layers enqueued."""
        return {
            "gpu_engine": self.name,
            "gpu_engine_reason": self.reason,
            "gpu_staging_nbytes": self._loads.staging.nbytes + self._stores.staging.nbytes,
            "gpu_staging_reason": self.staging_reason,
            "gpu_numa_node": self.driver.numa_node,
            "gpu_streams": self.stream_count,
            "gpu_mover": self.mover.name,
            "gpu_digested_layers": self._digested_layers[0],
            "gpu_verified_layers": self._digested_layers[1],
            "gpu_kernel_jobs": self.mover.kernel_jobs,
            "gpu_layers": self._loads.layers + self._stores.layers,
            "gpu_overlaps": self._overlaps.stats(),
            "gpu_cross_overlaps": self._overlaps.cross,
        }

    def check_page(self, memory: PagedMemory, slice_nlb: int) -> None:
        """Raises CapacityError if one layer of a page does not fit into the staging of a direction,
        and Unsupported if the drive cannot address a page there.
        """
        lba_nbytes = self.engine.lba_nbytes
        staging = _staging_memory(memory, np.zeros((1, 1), np.uint64), slice_nlb * lba_nbytes)
        self.engine.check_memory(staging, slice_nlb)
        for queue in (self._loads, self._stores):
            queue.check_page(Needed(1, 1, slice_nlb * lba_nbytes, lba_nbytes))

    def write_pages_max(self, layers: int, slice_nlb: int) -> int:
        """Most pages of a write of which all layers fit into half of the staging.

        Then one part can be copied out while another is written.
        """
        lba_nbytes = self.engine.lba_nbytes
        return self._stores.pages_max(Needed(layers, 1, slice_nlb * lba_nbytes, lba_nbytes))

    @staticmethod
    def _abandon(
        engine: Engine, owner: LeaseOwner, jobs: Sequence[Job], moved: MovedJob | None
    ) -> None:
        """Cleans up after an error or an interruption anywhere in `submit`: Ctrl-C can come between
        a native submission and its job.  Memory that a device may use is kept.
        """
        if moved is not None:
            moved.abandon()
            owner.is_free = moved.is_free
            return
        owner.is_free = lambda: not engine.is_using(owner)
        for job in jobs:  # none of them is on the stream
            job.on_released(None)
            job.cancel()

    def wait_idle(self, timeout_s: float) -> bool:
        """Waits until nothing is on the streams.  False after the timeout."""
        return all(
            wait_until(stream_queue.is_idle, timeout_s)
            for stream_queue in (self._loads, self._stores)
        )

    def close(self, timeout_s: float = 10.0) -> None:
        """Waits for both streams and releases everything; a second call does nothing.

        Close the native engine first: it releases every waiting stream.
        Raises DeviceTimeout when a stream does not end; its memory is then kept.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self._loads.close(timeout_s)
        finally:
            self._stores.close(timeout_s)
        if self.verifier is not None:
            self.verifier.close()


def _staging_memory(
    memory: PagedMemory, starts: U64, stride: int, pages: int = 1, owner: Any = None
) -> PagedMemory:
    """Staged pages of ``memory`` for the drive: each slice is one segment."""
    return PagedMemory(starts, (stride,), (sum(memory.segment_nbytes),), pages, owner)


def _chunk_options(
    options: TransferOptions, chunk: StagedLayers, on_released: Callable[[Job], None]
) -> TransferOptions:
    """Options of a transfer for the pages of one chunk."""
    mine = options.copy()
    digests = options.get("digests")
    if digests is not None:
        mine["digests"] = digests[chunk.first : chunk.last]
    mine["on_released"] = on_released
    return mine


def part_of(extents: Extents, first: int, last: int) -> Extents:
    """The extents of slices ``first`` to ``last - 1``, in the order of pages, in every layer."""
    count = np.asarray(extents.count, np.int64)
    ends = np.cumsum(count)
    starts = ends - count
    skipped = np.clip(first - starts, 0, count)
    kept = np.clip(last - starts, 0, count) - skipped
    rows = np.flatnonzero(kept)
    blocks = skipped.astype(np.uint64) * np.uint64(extents.slice_nlb)
    slba = np.asarray(extents.slba, np.uint64) + blocks
    nsid = np.asarray(extents.nsid)
    stride = extents.layer_stride_nlb
    return Extents(slba[rows], nsid[rows], kept[rows], extents.slice_nlb, stride)
