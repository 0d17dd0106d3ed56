"""Times one read, one write or both on a file; `at_open.py` decides when, and makes the profile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tutti.base.units import MiB, format_nbytes
from tutti.errors import ConfigError, DeviceTimeout
from tutti.gio_uring.controller_file import FileController
from tutti.gio_uring.engine import PRIORITY_LOAD, PRIORITY_STORE, Engine
from tutti.gio_uring.file_creation import allocate_file
from tutti.gio_uring.iocb import Extents, flat_memory
from tutti.gio_uring.job import Job
from tutti.gio_uring.memory import HostBuffer
from tutti.gio_uring.nvme_spec import OPCODE_READ, OPCODE_WRITE
from tutti.gio_uring.status import status_error
from tutti.pool.member_controller import open_controller
from tutti.pool.places import is_device
from tutti.pool.pool_format import label, make_blank, member_names

_GROUP_NBYTES = 2 * MiB  # slices of a run lie together, as one layer of a pool's group does


class Medium:
    """Members made for measuring, written once and removed at the end; a context manager.

    paths: new files, or blank devices or drives, over which groups rotate as in a pool.  nbytes:
    total size, at least twice the largest transfer.  Reads and writes have the priorities of loads
    and puts of a store.  wrote: called with (bytes written, bytes in all) while a file is written.
    timeout_s: of one transfer.  Raises the errors of making and opening the members.
    """

    def __init__(
        self,
        paths: Sequence[str],
        nbytes: int,
        largest_nbytes: int,
        force: Sequence[str] = (),
        *,
        executor: str = "auto",
        timeout_s: float = 120.0,
        wrote: Callable[[int, int], None] | None = None,
    ) -> None:
        if nbytes < 2 * largest_nbytes:
            raise ConfigError(
                f"a file of {format_nbytes(nbytes)} is too small: transfers of"
                f" {format_nbytes(largest_nbytes)} would read the same bytes again; make it larger"
            )
        self._paths = member_names(paths)
        self._files = [path for path in self._paths if not is_device(path)]
        self._timeout_s = timeout_s
        self._rng = np.random.default_rng(1)
        if len(self._files) < len(self._paths):
            label(self._paths, force=list(force))  # refuses what is not blank
        try:
            for path in self._files:
                groups = -(-nbytes // _GROUP_NBYTES // len(self._paths))
                allocate_file(path, groups * _GROUP_NBYTES, True, wrote)
            self._open(nbytes, largest_nbytes, executor)
        except BaseException:  # Ctrl-C as well
            self._remove()
            raise

    def _open(self, nbytes: int, largest_nbytes: int, executor: str) -> None:
        self._controller = open_controller(self._paths, executor=executor)
        self._lba_nbytes = self._controller.info.lba_nbytes
        own_nbytes = min(self._controller.info.namespace_nlb) * self._lba_nbytes
        nbytes = min(nbytes, own_nbytes * len(self._paths))
        self._groups = nbytes // _GROUP_NBYTES
        self._engine = Engine(self._controller)
        self._buffers = [HostBuffer(largest_nbytes) for _ in range(2)]
        noise = self._rng.integers(0, 256, MiB, np.uint8)
        for buffer in self._buffers:
            buffer.array[:] = np.resize(noise, buffer.array.size)
        self._regions = self._controller.register_all(self._buffers)
        self.facts: dict[str, Any] = {
            "members": len(self._paths),
            "memory": str(self._buffers[0].backing),
        }
        if isinstance(self._controller, FileController):
            self.facts["executor"] = self._controller.executor_name
            self.facts["direct_io"] = self._controller.direct

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
        members = len(self._paths)
        extents = Extents(
            (groups // members).astype(np.uint64) * np.uint64(_GROUP_NBYTES // self._lba_nbytes),
            (1 + groups % members).astype(np.uint32),
            counts,
            slice_nbytes // self._lba_nbytes,
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
            timeout_s=self._timeout_s,
        )

    def _end(self, job: Job) -> float:
        if not job.wait_released(self._timeout_s):
            raise DeviceTimeout("the medium does not answer; look at the kernel's log")
        report = job.report()
        error = status_error(int(report.status), "a transfer of the profile")
        if error is not None:
            raise error
        return float(report.done_ns - report.submitted_ns) / 1e3

    def close(self) -> None:
        """Removes the files, and makes devices blank again."""
        try:
            self._engine.close()
            for region in self._regions:
                region.close()
            self._controller.close()
        finally:
            self._remove()

    def _remove(self) -> None:
        for path in self._files:
            Path(path).unlink(missing_ok=True)
        if len(self._files) < len(self._paths):
            make_blank(self._paths)

    def __enter__(self) -> Medium:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
