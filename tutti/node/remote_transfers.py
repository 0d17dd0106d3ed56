"""Transfers that a client carries out: the agent plans them, and hears how they ended.

The writer and the loader of a store work on these as on transfers of an engine: a plan collects
what they submit, the client gets it in one answer, and reports every job by its number.
"""

from __future__ import annotations

import threading
from typing import Unpack

import numpy as np

from tutti.base.arrays import U32, U64
from tutti.base.interrupts import Latch
from tutti.errors import ConfigError, Unsupported
from tutti.gio_uring.iocb import CutStruct, Extents, PagedMemory
from tutti.gio_uring.nvme_spec import STATUS_CANCELLED
from tutti.gio_uring.transfer import TransferOptions
from tutti.medium.geometry import Geometry
from tutti.node.messages import MoveJob, statuses_of
from tutti.pool.slot_extents import WHOLE


class RemoteJob:
    """Pages that a client moves.  See gio_uring's Transfer.

    page_status: u32 (pages,), what the client reported; final once released.
    """

    def __init__(self, extents: Extents, pages: U32, layers: int, options: TransferOptions) -> None:
        self.page_status: U32 = np.zeros(pages.size, np.uint32)
        self._extents = extents
        self._pages = pages
        self._layers = layers
        self._digests = options.get("digests")
        self._compare = bool(options.get("compare"))
        self._on_released = options.get("on_released")
        self._released = Latch()
        self._lock = threading.Lock()
        self._sent = False

    def message(self, number: int, whole: bool = False) -> MoveJob:
        """The job as a client gets it, who moves it from now on."""
        self._sent = True
        extents, digests = self._extents, self._digests
        runs = extents.commands(CutStruct(extents.slice_nlb, 1, WHOLE, WHOLE))
        return MoveJob(
            number,
            self._pages.astype("<u4").tobytes(),
            runs["slba"].tobytes(),
            runs["nsid"].tobytes(),
            (runs["nlb"] // extents.slice_nlb).tobytes(),
            digests.tobytes() if digests is not None and self._compare else b"",
            self._compare,
            whole,
        )

    def finish(self, status: bytes, digests: bytes) -> None:
        """The client moved the pages, or failed to.  A second report counts for nothing.

        Raises ConfigError for statuses or digests of another number of pages.
        """
        statuses = statuses_of(status, self._pages.size)
        wanted = None if self._compare else self._digests
        computed: U64 | None = None
        if wanted is not None and not statuses.all():
            if len(digests) != wanted.nbytes:
                raise ConfigError(f"{len(digests)} bytes of digests, expected {wanted.nbytes}")
            computed = np.frombuffer(digests, np.uint64).reshape(wanted.shape)
        self._end(statuses, computed)

    def fail(self, status: int) -> None:
        """The client is gone, and so is everything that it had under way."""
        self._end(np.full(self._pages.size, status, np.uint32), None)

    def _end(self, statuses: U32, digests: U64 | None) -> None:
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
        """See Transfer."""
        return self._released.is_set()

    def wait_layers(self, layers: int, timeout_s: float) -> bool:
        """See Transfer."""
        return self._released.wait(timeout_s)

    def wait_released(self, timeout_s: float) -> bool:
        """See Transfer."""
        return self._released.wait(timeout_s)

    def order_stream(self, stream: int, layers: int) -> None:
        """See Transfer."""
        raise Unsupported("the agent has no GPU stream; the client orders its own")

    def open_gate(self) -> None:
        """See Transfer: a client gets the digests with the job."""

    def cancel(self) -> None:
        """A job that no client knows of ends at once; others end when their client reports."""
        if not self._sent:
            self.fail(STATUS_CANCELLED)


class PlannedMemory:
    """Stands for a client's memory in one request: collects the jobs instead of moving pages."""

    #: Another process moves the pages: the jobs it gets are complete, and scarce staging is
    #: reserved only when it reports.
    is_remote = True

    def __init__(self, geometry: Geometry) -> None:
        self.jobs: list[RemoteJob] = []
        self._layers = geometry.layers
        self._segments = geometry.segments

    def of_rows(self, rows: int) -> tuple[U32, PagedMemory]:
        """Pages that are the numbers of the rows of a request, and memory to name them in."""
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
        job = RemoteJob(extents, pages, self._layers, options)
        self.jobs.append(job)
        return job


class JobTable:
    """The jobs that one client has not reported yet, by number.  Thread-safe."""

    def __init__(self) -> None:
        self._jobs: dict[int, RemoteJob] = {}
        self._next = 1
        self._lock = threading.Lock()
        self._ended = False

    def add(self, job: RemoteJob) -> int:
        """Gives a job its number.  After ``end`` the job fails at once."""
        with self._lock:
            number, self._next = self._next, self._next + 1
            if not self._ended:
                self._jobs[number] = job
                return number
        job.fail(STATUS_CANCELLED)
        return number

    def take(self, number: int) -> RemoteJob:
        """The job of a number, once.  Raises ConfigError for a number that is not under way."""
        with self._lock:
            job = self._jobs.pop(number, None)
        if job is None:
            raise ConfigError(f"job {number} is not under way; it was reported before, or never")
        return job

    def put_back(self, number: int, job: RemoteJob) -> None:
        """The report of a job was refused: it is under way still."""
        with self._lock:
            if not self._ended:
                self._jobs[number] = job
                return
        job.fail(STATUS_CANCELLED)

    def end(self) -> None:
        """No transfer of the client is under way any more: all jobs fail."""
        with self._lock:
            self._ended = True
            jobs, self._jobs = list(self._jobs.values()), {}
        for job in jobs:
            job.fail(STATUS_CANCELLED)
