"""The I/O half of a profile: how long reads, writes and both at once take on one file."""

from __future__ import annotations

import os
from types import TracebackType

import numpy as np

from tutti.errors import ConfigError, DeviceTimeout
from tutti.gio_uring.controller_file import FileController, allocate_file
from tutti.gio_uring.engine import (
    PRIORITY_LOAD,
    PRIORITY_STORE,
    Engine,
    Extents,
    Job,
)
from tutti.gio_uring.iocb import flat_memory
from tutti.gio_uring.memory import HostBuffer
from tutti.gio_uring.nvme_spec import OPCODE_READ, OPCODE_WRITE
from tutti.gio_uring.ring import status_error
from tutti.units import MiB, format_nbytes

_GROUP_NBYTES = 2 * MiB  # slices of a run lie together, as one layer of a pool's group does
_TIMEOUT_S = 120.0
_LBA_NBYTES = 4096


class Medium:
    """A file made for measuring, written once and removed at the end; a context manager.

    nbytes: of the file, at least twice the largest transfer.  Reads and writes have the priorities
    that loads and puts of a store have.  Raises what files raise.
    """

    def __init__(self, path: str, nbytes: int, largest_nbytes: int) -> None:
        if nbytes < 2 * largest_nbytes:
            raise ConfigError(
                f"a file of {format_nbytes(nbytes)} is too small for transfers of"
                f" {format_nbytes(largest_nbytes)} that do not repeat; make it larger"
            )
        self._path = path
        self._rng = np.random.default_rng(1)
        allocate_file(path, nbytes, prewrite=True)
        try:
            self._open(nbytes, largest_nbytes)
        except BaseException:  # Ctrl-C as well
            os.unlink(path)
            raise

    def _open(self, nbytes: int, largest_nbytes: int) -> None:
        self._controller = FileController([self._path], lba_nbytes=_LBA_NBYTES)
        self._groups = nbytes // _GROUP_NBYTES
        self._engine = Engine(self._controller)
        self._buffers = [HostBuffer(largest_nbytes) for _ in range(2)]
        noise = self._rng.integers(0, 256, MiB, np.uint8)
        for buffer in self._buffers:
            buffer.array[:] = np.resize(noise, buffer.array.size)
        self._regions = [self._controller.register(buffer) for buffer in self._buffers]
        self.facts = {
            "executor": self._controller.executor_name,
            "direct_io": self._controller.direct,
            "memory": str(self._buffers[0].backing),
        }

    def time_us(self, direction: str, nbytes: int, slice_nbytes: int) -> list[float]:
        """Microseconds of one read or one write, or of a read and a write at once."""
        if direction == "both":
            jobs = [self._start("read", nbytes, slice_nbytes, 0)]
            jobs.append(self._start("write", nbytes, slice_nbytes, 1))
        else:
            jobs = [self._start(direction, nbytes, slice_nbytes, 0)]
        return [self._end(job) for job in jobs]

    def _start(self, direction: str, nbytes: int, slice_nbytes: int, which: int) -> Job:
        slices = max(1, nbytes // slice_nbytes)
        per_group = max(1, _GROUP_NBYTES // slice_nbytes)
        runs = -(-slices // per_group)
        # Each run in a group of its own; reads and writes at once in halves of their own.
        span = max(1, self._groups // 2) // max(1, -(-slice_nbytes // _GROUP_NBYTES))
        step = self._groups // 2 // span
        groups = self._rng.permutation(span)[:runs] * step + which * (self._groups // 2)
        counts = np.full(runs, per_group)
        counts[-1] = slices - per_group * (runs - 1)
        extents = Extents(
            groups.astype(np.uint64) * np.uint64(_GROUP_NBYTES // _LBA_NBYTES),
            np.ones(runs, np.uint32),
            counts,
            slice_nbytes // _LBA_NBYTES,
        )
        buffer = self._buffers[which]
        memory = flat_memory(buffer.address, slice_nbytes, slices, buffer)
        is_read = direction == "read"
        return self._engine.submit(
            OPCODE_READ if is_read else OPCODE_WRITE,
            extents,
            np.arange(slices, dtype=np.uint32),
            memory,
            priority=PRIORITY_LOAD if is_read else PRIORITY_STORE,
            timeout_s=_TIMEOUT_S,
        )

    def _end(self, job: Job) -> float:
        if not job.wait_released(_TIMEOUT_S):
            raise DeviceTimeout("the medium does not answer; look at the kernel's log")
        report = job.report()
        error = status_error(int(report.status), "a transfer of the profile")
        if error is not None:
            raise error
        return float(report.done_ns - report.submitted_ns) / 1e3

    def close(self) -> None:
        """Removes the file."""
        try:
            self._engine.close()
            for region in self._regions:
                region.close()
            self._controller.close()
        finally:
            os.unlink(self._path)

    def __enter__(self) -> Medium:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
