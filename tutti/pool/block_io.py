"""Blocking reads and writes of 4096-byte blocks, for superblocks, snapshots and slot tables."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from tutti.base.arrays import U32
from tutti.base.process import Owned
from tutti.errors import DeviceTimeout
from tutti.gio_uring.controller import NativeController
from tutti.gio_uring.engine import Engine
from tutti.gio_uring.iocb import Extents, flat_memory
from tutti.gio_uring.job import Job
from tutti.gio_uring.memory import HostBuffer
from tutti.gio_uring.nvme_spec import OPCODE_READ, OPCODE_WRITE
from tutti.gio_uring.status import status_error
from tutti.medium.geometry import BLOCK_NBYTES

_CHUNK_BLOCKS = 256
_CHUNKS = 4


@contextlib.contextmanager
def opened_io(controller: NativeController) -> Iterator[tuple[Engine, BlockIo]]:
    """An engine on a controller and block I/O through it, closed at the end of the with block.

    Raises what Engine and BlockIo raise.
    """
    engine = Engine(controller)
    try:
        io = BlockIo(engine)
        try:
            yield engine, io
        finally:
            io.close()
    finally:
        engine.close()


class BlockIo(Owned):
    """Moves blocks of one controller through a small registered buffer.  Thread-safe.

    Raises MediumError, CapacityError or DeviceTimeout.  After a DeviceTimeout the device may
    still write to the buffer, so every later call raises it as well.
    """

    def __init__(self, engine: Engine, *, timeout_s: float = 60.0) -> None:
        self._engine = engine
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._lost: DeviceTimeout | None = None
        self._nlb = BLOCK_NBYTES // engine.lba_nbytes
        blocks = _CHUNKS * _CHUNK_BLOCKS
        self._buffer = HostBuffer(blocks * BLOCK_NBYTES)
        self._memory = flat_memory(self._buffer.address, BLOCK_NBYTES, blocks, self._buffer)
        self._region = engine.controller.register(self._buffer)
        self._bytes = self._buffer.array

    def close(self) -> None:
        """Releases the buffer."""
        self._region.close()

    def read(self, nsid: int, offset: int, nbytes: int) -> bytes:
        """Reads ``nbytes`` from byte ``offset`` of a namespace; both are multiples of 4096."""
        chunks = []
        for chunk, bad in self.scan(nsid, offset, nbytes // BLOCK_NBYTES):
            if bad.any():
                self._raise(int(bad[np.flatnonzero(bad)[0]]))
            chunks.append(chunk.tobytes())
        return b"".join(chunks)

    def scan(
        self, nsid: int, offset: int, blocks: int
    ) -> Iterator[tuple[npt.NDArray[np.uint8], U32]]:
        """Reads consecutive blocks in chunks of at most 256, several chunks ahead of the consumer.

        Yields (bytes, statuses): a view that is valid until the next chunk is asked for, and the
        NVMe status (n,) of every block.  Where the command of a chunk failed, each of its blocks is
        read by a command of its own.
        """
        with self._lock:
            starts = range(0, blocks, _CHUNK_BLOCKS)
            jobs: list[Job] = []
            try:
                for i, start in enumerate(starts):
                    while len(jobs) < min(len(starts), i + _CHUNKS - 1):
                        jobs.append(self._issue_chunk(OPCODE_READ, nsid, offset, blocks, len(jobs)))
                    bad = self._settle(jobs[i])
                    if bad.any():
                        bad = self._settle(self._issue_singly(nsid, offset, blocks, i))
                    first = (i % _CHUNKS) * _CHUNK_BLOCKS * BLOCK_NBYTES
                    count = min(_CHUNK_BLOCKS, blocks - start)
                    yield self._bytes[first : first + count * BLOCK_NBYTES], bad
            finally:
                self._end(jobs)

    def write(self, nsid: int, offset: int, content: bytes) -> None:
        """Writes whole blocks at byte ``offset``; returns when the device has completed them."""
        assert len(content) % BLOCK_NBYTES == 0, "whole blocks only"
        blocks = len(content) // BLOCK_NBYTES
        chunk_nbytes = _CHUNK_BLOCKS * BLOCK_NBYTES
        with self._lock:
            for i in range(-(-blocks // _CHUNK_BLOCKS)):
                piece = content[i * chunk_nbytes : (i + 1) * chunk_nbytes]
                first = (i % _CHUNKS) * chunk_nbytes
                self._bytes[first : first + len(piece)] = np.frombuffer(piece, np.uint8)
                job = self._issue_chunk(OPCODE_WRITE, nsid, offset, blocks, i)
                bad = self._settle(job)
                if bad.any():
                    self._raise(int(job.report().status))

    def flush(self, namespaces: Iterable[int]) -> None:
        """Makes completed writes durable."""
        job = self._engine.flush(namespaces, timeout_s=self._timeout_s)
        self._settle(job)
        self._raise(int(job.report().status))

    def _issue_chunk(self, opcode: int, nsid: int, offset: int, blocks: int, chunk: int) -> Job:
        start = chunk * _CHUNK_BLOCKS
        count = min(_CHUNK_BLOCKS, blocks - start)
        slba = offset // self._engine.lba_nbytes + start * self._nlb
        return self._issue(opcode, Extents([slba], [nsid], [count], self._nlb), chunk, count)

    def _issue_singly(self, nsid: int, offset: int, blocks: int, chunk: int) -> Job:
        """Reads a chunk by one command for every block."""
        start = chunk * _CHUNK_BLOCKS
        count = min(_CHUNK_BLOCKS, blocks - start)
        numbers = np.arange(start, start + count, dtype=np.uint64)
        slba = offset // self._engine.lba_nbytes + numbers * self._nlb
        ones = np.ones(count, np.int64)
        return self._issue(OPCODE_READ, Extents(slba, nsid * ones, ones, self._nlb), chunk, count)

    def _issue(self, opcode: int, extents: Extents, chunk: int, count: int) -> Job:
        if self._lost is not None:
            raise DeviceTimeout(str(self._lost)) from self._lost
        place = (chunk % _CHUNKS) * _CHUNK_BLOCKS
        pages = np.arange(place, place + count, dtype=np.uint32)
        return self._engine.submit(opcode, extents, pages, self._memory, timeout_s=self._timeout_s)

    def _settle(self, job: Job) -> U32:
        """Waits until a job was released; the statuses of its blocks."""
        if not job.wait_released(self._timeout_s * 2):
            self._lost = DeviceTimeout(
                f"the medium did not answer within {self._timeout_s * 2:g} s; check the device, "
                "then open the pool again"
            )
            raise self._lost
        return job.page_status

    def _end(self, jobs: list[Job]) -> None:
        """Cancels the reads of an abandoned scan, and waits until none is under way."""
        for job in jobs:
            job.cancel()
        for job in jobs:
            if self._lost is None:
                self._settle(job)

    def _raise(self, status: int) -> None:
        error = status_error(status, "a metadata transfer")
        if error is not None:
            raise error
