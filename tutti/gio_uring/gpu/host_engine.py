"""The GPU engine `host`: the native thread submits, a stream waits and copies, no SM is used.

A read goes through staging layer after layer, and each layer in chunks of pages where two layers
do not fit.  For each chunk of a layer a stream of loads holds, enqueued beforehand:

    wait(the chunk is staged)   copies to the pages   write(its place is free)

and an event for each layer.  The streams of stores never wait for the medium: they hold copies of
layers whose places are free, which is all of them where the staging is large enough.

    copies to the staging   write(the layer is staged)   record an event

Two streams take the layers by turns.  A layer's copies may run with those of the layer before; its
words and its event come after that one's event, so that they tell of all layers up to their own.
Where trials found it faster, a read waits for its last layer and is copied in one call: overlap.py.

The waits are `cuStreamWaitValue32` on words that the native thread stores, whatever happens: a
failed command, a deadline, a cancelled job and a closed engine all store them, after the status.
So nothing that must run to release a stream needs a CUDA call, the GIL or a lock.
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
from tutti.gio_uring.gpu.driver import Driver
from tutti.gio_uring.gpu.engine_choice import REASON
from tutti.gio_uring.gpu.moved_job import MovedJob, Route
from tutti.gio_uring.gpu.mover import CopyDescriptor, Mover, choose_mover
from tutti.gio_uring.gpu.overlap import Overlaps
from tutti.gio_uring.gpu.pinned_memory import LeaseOwner
from tutti.gio_uring.gpu.stream_queue import Cells, Needed, StagedLayers, StreamQueue, wait_until
from tutti.gio_uring.gpu.verifier import Expected, Verification, Verifier
from tutti.gio_uring.iocb import Extents, PagedMemory
from tutti.gio_uring.job import Job
from tutti.gio_uring.memory import DmaRegion
from tutti.gio_uring.nvme_spec import OPCODE_READ
from tutti.gio_uring.transfer import TIMEOUT_S, Submitter, TransferOptions

STAGING_NBYTES = 256 * MiB
#: So that waits, copies and events of neighbouring layers overlap.
STREAMS = 2


class _Released:
    """Calls back once, when the last of several native jobs is released, and where that is counted,
    the GPU has verified their pages.

    whole: has the status of all pages; None where that of the native jobs counts.
    read_s: monotonic; when the last native job so far was released.
    """

    def __init__(self, count: int, callback: Callable[[Any], None] | None) -> None:
        self._left = count
        self._callback = callback
        self._lock = threading.Lock()
        self.whole: Callable[[], MovedJob | None] = lambda: None
        self.read_s = 0.0
        self._statuses: dict[int, U32] = {}

    def of(self, number: int) -> Callable[[Job], None]:
        """What job `number` of them calls."""

        def released(job: Job) -> None:
            self.read_s = time.monotonic()
            self._statuses[number] = job.page_status
            self.ended()

        return released

    def ended(self) -> None:
        """One more of them is released, or the GPU has verified the pages of all."""
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
    """What a callback is told of a transfer."""

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

    engine: whose controller and thread do the I/O.  mover: by default the copy engines.
    verifier: compares what was read with its digests, and computes those of what is written; it is
    closed with the engine.  By default the native engine's workers do both, in staging.
    load_staging_nbytes, store_staging_nbytes: pinned memory for each direction; four layers of the
    longest read should fit, or it goes in chunks.  load_streams, store_streams: streams to use,
    such as those of a green context; by default two of its own each, which take layers by turns.
    """

    name = "host"
    #: Whether it takes the option `held`, for reads.
    holds = True
    #: Why this engine was chosen, for `stats`.
    reason = REASON
    #: Why its staging has the size that it has.
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
        """Streams that it uses."""
        return len(self._loads.streams) + len(self._stores.streams)

    def follow(self, stream: int) -> None:
        """Transfers submitted from now on touch pages only after what is on `stream` by now."""
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
        """As `Engine.submit`, for pages in GPU memory.

        A read may have any number of pages.  One layer of a write must fit into the staging, and
        all of them should; see `write_pages_max`.  engine: does the I/O, by default its own.
        on_released: called when the medium is done with the staging; the stream may still copy
        out of it.
        Raises CapacityError when the staging is too small, DeviceTimeout when none comes free,
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
            is_late = is_read and verification is not None  # known after the medium is through
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
        """What moves the same pages with the I/O done by another native engine, whose controller
        was lent the staging: an agent's client has one for each session.
        """
        return _Through(self, engine)

    def lend_staging(self, controller: NativeController) -> list[DmaRegion]:
        """Makes the staging known to another controller of the same drives.

        The caller closes the regions before that controller.
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
        """Where the GPU compares or computes the digests; None where the native engine does."""
        digests, compares = options.get("digests"), options.get("compare", False)
        if self.verifier is None or digests is None or compares != (opcode == OPCODE_READ):
            return None
        shift = self.engine.controller.info.lba_shift
        expected = Expected(opcode, memory, pages, digests, extents.slice_nlb, shift)
        return self.verifier.prepare(expected, owner)

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
        """How many layers a submitter puts on the stream itself; a thread puts the others."""
        for stream_queue in (self._loads, self._stores):
            stream_queue.first_layers = layers

    def stats(self) -> dict[str, Any]:
        """Which engine moves the pages, why, by which mover, and how many layers it enqueued."""
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
        """Raises CapacityError where staging of a direction has no room for a page of one layer,
        and Unsupported where the drive could not reach a page there.
        """
        lba_nbytes = self.engine.lba_nbytes
        staging = _staging_memory(memory, np.zeros((1, 1), np.uint64), slice_nlb * lba_nbytes)
        self.engine.check_memory(staging, slice_nlb)
        for queue in (self._loads, self._stores):
            queue.check_page(Needed(1, 1, slice_nlb * lba_nbytes, lba_nbytes))

    def write_pages_max(self, layers: int, slice_nlb: int) -> int:
        """Pages of a write whose layers all have a place in the staging, twice over.

        So one part is copied out while another is written.
        """
        lba_nbytes = self.engine.lba_nbytes
        return self._stores.pages_max(Needed(layers, 1, slice_nlb * lba_nbytes, lba_nbytes))

    @staticmethod
    def _abandon(
        engine: Engine, owner: LeaseOwner, jobs: Sequence[Job], moved: MovedJob | None
    ) -> None:
        """After an error, or an interruption anywhere in `submit`: Ctrl-C can strike between a
        native submission and its job.  What a device may use stays.
        """
        if moved is not None:
            moved.abandon()
            owner.is_free = moved.is_free
            return
        owner.is_free = lambda: not engine.is_using(owner)
        for job in jobs:  # nothing of them is on the stream
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
    """Staged pages of ``memory`` as the drive sees them: the segments of a slice in one."""
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
    """The slices ``first`` to ``last - 1`` in the order of pages, of every layer."""
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
