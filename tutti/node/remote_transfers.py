"""Transfers that a client carries out: the agent plans them, and the client reports their end.

The writer and the loader of a store work on these as on transfers of an engine: a plan collects
what they submit, the client gets it in one answer, and reports every job by its number.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from typing import Unpack

import numpy as np

from tutti.base.arrays import U32, U64, Slots
from tutti.base.interrupts import Latch
from tutti.errors import ConfigError, Unsupported
from tutti.gio_uring.iocb import Extents, PagedMemory
from tutti.gio_uring.nvme_spec import STATUS_CANCELLED
from tutti.gio_uring.transfer import TransferOptions
from tutti.medium.geometry import Geometry
from tutti.node.messages import MoveJob, statuses_of
from tutti.placement.load_plan import LoadPlan
from tutti.pool.slot_extents import SlotExtents
from tutti.transfers.loader import Loader
from tutti.transfers.put_request import PlannedPut
from tutti.transfers.tickets import PutProgress
from tutti.transfers.writer import Writer


class Planned:
    """What a client reports; it ends once.

    pages: their number.  layers: number of digests that the client computes per page; 0 for none.
    """

    def __init__(self, pages: int, layers: int = 0) -> None:
        self._count, self._computed = pages, layers

    def finish(self, status: bytes, digests: bytes) -> None:
        """Ends with the client's report.  Raises ConfigError if the number of statuses or digests
        is wrong.
        """
        statuses = statuses_of(status, self._count)
        computed = None
        if self._computed and not statuses.all():
            expected = 8 * self._computed * self._count
            if len(digests) != expected:
                raise ConfigError(f"{len(digests)} bytes of digests, expected {expected}")
            computed = np.frombuffer(bytearray(digests), "<u8").reshape(-1, self._computed)
        self._end(statuses, computed)

    def fail(self, status: int) -> None:
        """Ends with one status for all pages, after the client is gone."""
        self._end(np.full(self._count, status, np.uint32), None)

    def _end(self, statuses: U32, digests: U64 | None) -> None:
        """digests: (pages, layers); None if the client computes none, or moved no page."""
        raise NotImplementedError


class RemoteJob(Planned):
    """Pages that a client moves.  See gio_uring's Transfer.

    page_status: u32 (pages,), as the client reported; final once released.
    """

    def __init__(self, slots: Slots, pages: U32, options: TransferOptions) -> None:
        self._digests = options.get("digests")
        self._compare = bool(options.get("compare"))
        layers = 0 if self._digests is None or self._compare else self._digests.shape[1]
        super().__init__(pages.size, layers)
        self.page_status: U32 = np.zeros(pages.size, np.uint32)
        self._slots = slots
        self._pages = pages
        self._on_released = options.get("on_released")
        self._released = Latch()
        self._lock = threading.Lock()
        self._sent = False

    def message(self, number: int, whole: bool = False) -> MoveJob:
        """The job as a message; from now on the client moves its pages."""
        self._sent = True
        digests = self._digests
        return MoveJob(
            number,
            self._slots.astype("<i8").tobytes(),
            self._pages.astype("<u4").tobytes(),
            digests.tobytes() if digests is not None and self._compare else b"",
            self._compare,
            whole,
        )

    def _end(self, statuses: U32, digests: U64 | None) -> None:
        """A second end has no effect."""
        with self._lock:
            if self._released.is_set():
                return
            self.page_status[:] = statuses
            if digests is not None and self._digests is not None:
                self._digests[:] = digests
            self._released.set()
            callback, self._on_released = self._on_released, None
        if callback is not None:
            callback(self)

    @property
    def done(self) -> bool:
        return self._released.is_set()

    def wait_layers(self, layers: int, timeout_s: float) -> bool:
        return self._released.wait(timeout_s)

    def wait_released(self, timeout_s: float) -> bool:
        return self._released.wait(timeout_s)

    def order_stream(self, stream: int, layers: int) -> None:
        raise Unsupported("the agent cannot use GPU streams; order them in the client")

    def open_gate(self) -> None:
        """Does nothing: the client gets the digests with the job."""

    def cancel(self) -> None:
        """Ends a job that was not sent to the client; others end with the client's report."""
        if not self._sent:
            self.fail(STATUS_CANCELLED)


class PlannedMemory:
    """Stands for a client's memory in one request: collects the jobs instead of moving pages."""

    #: Another process moves the pages.  Its jobs must be complete, with their digests; staging,
    #: which is scarce, is reserved only when it reports.
    is_remote = True

    def __init__(self, geometry: Geometry) -> None:
        self.jobs: list[RemoteJob] = []
        self._layers = geometry.layers
        self._segments = geometry.segments

    def of_rows(self, rows: int) -> tuple[U32, PagedMemory]:
        """Pages 0 .. rows - 1, and a memory without addresses that contains them."""
        bases = np.zeros((self._layers, len(self._segments)), np.uint64)
        memory = PagedMemory(bases, self._segments, self._segments, max(1, rows), None, self)
        return np.arange(rows, dtype=np.uint32), memory

    def submit(
        self,
        opcode: int,
        extents: Extents,
        pages: U32,
        memory: PagedMemory,
        **options: Unpack[TransferOptions],
    ) -> RemoteJob:
        """See Submitter."""
        assert isinstance(extents, SlotExtents), "a store's transfers are of slots"
        job = RemoteJob(extents.slots, pages, options)
        self.jobs.append(job)
        return job


class PlannedLoad(Planned):
    """The only job of a load that a client carries out; its digests, if needed, are known."""

    def __init__(self, loader: Loader, plan: LoadPlan) -> None:
        super().__init__(plan.slots.size)
        self._loader, self._plan = loader, plan
        self._begun_s = time.monotonic()

    def _end(self, statuses: U32, digests: U64 | None) -> None:
        self._loader.moved_elsewhere(self._plan, statuses, self._begun_s)


class PlacedPut(Planned):
    """The only job of a put that a client carries out.  over: called with the outcome."""

    def __init__(
        self, writer: Writer, put: PlannedPut, layers: int, over: Callable[[PutProgress], None]
    ) -> None:
        super().__init__(put.chain.count, layers)
        self._writer, self._put, self._over = writer, put, over

    def _end(self, statuses: U32, digests: U64 | None) -> None:
        self._writer.written_elsewhere(self._put, statuses, digests, self._over)


class JobTable:
    """The jobs that one client has not reported yet, by number.  Thread-safe."""

    def __init__(self) -> None:
        self._jobs: dict[int, Planned] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._ended = False

    def number(self) -> int:
        """A number that no other job of this client has had."""
        return next(self._numbers)

    def add(self, number: int, job: Planned) -> None:
        """Adds a job that is under way.  After ``end`` it fails at once."""
        with self._lock:
            if not self._ended:
                self._jobs[number] = job
                return
        job.fail(STATUS_CANCELLED)

    def take(self, number: int) -> Planned:
        """Removes and returns a job.  Raises ConfigError for a number that is not under way."""
        with self._lock:
            job = self._jobs.pop(number, None)
        if job is None:
            raise ConfigError(f"job {number} is unknown: it was already reported, or never planned")
        return job

    def is_empty(self) -> bool:
        """Whether all have been reported."""
        return not self._jobs

    def end(self) -> None:
        """Fails all jobs, when no transfer of the client is under way any more."""
        with self._lock:
            self._ended = True
            jobs, self._jobs = list(self._jobs.values()), {}
        for job in jobs:
            job.fail(STATUS_CANCELLED)
