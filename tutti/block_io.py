"""Blocking reads and writes of 4096-byte blocks, for superblocks, snapshots and slot tables."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from tutti.errors import DeviceTimeout
from tutti.geometry import BLOCK_NBYTES
from tutti.gio_uring.engine import Engine, Extents, Job
from tutti.gio_uring.iocb import flat_memory
from tutti.gio_uring.memory import HostBuffer
from tutti.gio_uring.nvme_spec import OPCODE_READ, OPCODE_WRITE
from tutti.gio_uring.ring import status_error

_CHUNK_BLOCKS = 256
_CHUNKS = 4


class BlockIo:
    """Moves blocks of one controller through a small registered buffer.  Thread-safe.

    Raises MediumError, CapacityError or DeviceTimeout; then the buffer may be lost to the device
    and later calls fail as well.
    """

    def __init__(self, engine: Engine, *, timeout_s: float = 60.0) -> None:
        self._engine = engine
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._nlb = BLOCK_NBYTES // engine.lba_nbytes
        self._buffer = HostBuffer(_CHUNKS * _CHUNK_BLOCKS * BLOCK_NBYTES)
        self._region = engine.controller.register(self._buffer)
        self._bytes = self._buffer.array

    def close(self) -> None:
        """Gives the buffer back."""
        self._region.close()

    def read(self, nsid: int, offset: int, nbytes: int) -> bytes:
        """``nbytes`` from byte ``offset`` of a namespace, both multiples of 4096."""
        chunks = [chunk.tobytes() for chunk in self.scan(nsid, offset, nbytes // BLOCK_NBYTES)]
        return b"".join(chunks)

    def scan(self, nsid: int, offset: int, blocks: int) -> Iterator[npt.NDArray[np.uint8]]:
        """Consecutive blocks in chunks of at most 256, several reads ahead of the consumer.

        Every chunk is a view that is valid until the next one is asked for.
        """
        with self._lock:
            starts = range(0, blocks, _CHUNK_BLOCKS)
            jobs: list[Job] = []
            for i, start in enumerate(starts):
                while len(jobs) < min(len(starts), i + _CHUNKS - 1):
                    jobs.append(self._issue(OPCODE_READ, nsid, offset, blocks, len(jobs)))
                jobs[i] = self._settle(jobs[i])
                first = (i % _CHUNKS) * _CHUNK_BLOCKS * BLOCK_NBYTES
                count = min(_CHUNK_BLOCKS, blocks - start)
                yield self._bytes[first : first + count * BLOCK_NBYTES]

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
                self._settle(self._issue(OPCODE_WRITE, nsid, offset, blocks, i))

    def flush(self, namespaces: Iterable[int]) -> None:
        """Makes completed writes durable."""
        self._settle(self._engine.flush(namespaces, timeout_s=self._timeout_s))

    def _issue(self, opcode: int, nsid: int, offset: int, blocks: int, chunk: int) -> Job:
        start = chunk * _CHUNK_BLOCKS
        count = min(_CHUNK_BLOCKS, blocks - start)
        place = (chunk % _CHUNKS) * _CHUNK_BLOCKS
        memory = flat_memory(self._buffer.address, BLOCK_NBYTES, _CHUNKS * _CHUNK_BLOCKS)
        slba = offset // self._engine.lba_nbytes + start * self._nlb
        pages = np.arange(place, place + count, dtype=np.uint32)
        extents = Extents([slba], [nsid], [count], self._nlb)
        return self._engine.submit(opcode, extents, pages, memory, timeout_s=self._timeout_s)

    def _settle(self, job: Job) -> Job:
        if not job.wait_released(self._timeout_s * 2):
            raise DeviceTimeout(
                f"the medium did not answer within {self._timeout_s * 2:g} s; check the device, "
                "then open the pool again"
            )
        error = status_error(int(job.report().status), "a metadata transfer")
        if error is not None:
            raise error
        return job
