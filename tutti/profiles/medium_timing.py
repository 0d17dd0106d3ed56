"""Times one read, one write or both on files or devices; `at_open.py` decides when."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from tutti.base.units import MiB, format_nbytes
from tutti.errors import CapacityError, ConfigError, DeviceTimeout
from tutti.gio_uring.controller_file import FileController
from tutti.gio_uring.drives.device_content import TAIL_NBYTES
from tutti.gio_uring.engine import PRIORITY_LOAD, PRIORITY_STORE
from tutti.gio_uring.file_creation import allocate_file
from tutti.gio_uring.iocb import Extents, flat_memory
from tutti.gio_uring.job import Job
from tutti.gio_uring.memory import HostBuffer
from tutti.gio_uring.nvme_spec import OPCODE_READ, OPCODE_WRITE
from tutti.gio_uring.status import status_error
from tutti.pool.block_io import BlockIo, opened_io
from tutti.pool.member_controller import open_controller
from tutti.pool.places import is_device
from tutti.pool.pool_format import label, make_blank, member_names, unused_from

_GROUP_NBYTES = 2 * MiB  # slices of a run lie together, as one layer of a pool's group does


class Medium(ExitStack):
    """Members made for measuring, written once and removed at the end; a context manager.

    paths: new files, or blank devices or drives, over which groups rotate as in a pool.  nbytes:
    total size, at least twice the largest transfer.  force: as for `label`; None: pools on the
    devices stay, see `unused_from`.  Reads and writes have the priorities of loads and puts of a
    store.  wrote: called with (bytes written, bytes in all) before the first read.  timeout_s: of
    one transfer.  Raises the errors of making and opening the members.
    """

    def __init__(
        self,
        paths: Sequence[str],
        nbytes: int,
        largest_nbytes: int,
        force: Sequence[str] | None = (),
        *,
        executor: str = "auto",
        timeout_s: float = 120.0,
        wrote: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        super().__init__()
        if nbytes < 2 * largest_nbytes:
            raise ConfigError(
                f"a file of {format_nbytes(nbytes)} is too small: transfers of"
                f" {format_nbytes(largest_nbytes)} would read the same bytes again; make it larger"
            )
        self._paths = member_names(paths)
        self._files = [path for path in self._paths if not is_device(path)]
        self._timeout_s = timeout_s
        self._rng = np.random.default_rng(1)
        if force is not None and len(self._files) < len(self._paths):
            label(self._paths, force=list(force))  # refuses what is not blank
        try:
            if force is not None:
                self.callback(self._remove)
            for path in self._files:
                groups = -(-nbytes // _GROUP_NBYTES // len(self._paths))
                allocate_file(path, groups * _GROUP_NBYTES, True, wrote)
            io = self._open(executor, nbytes, largest_nbytes, force is None)
            if not self._files:
                self.callback(self._deallocate)
                self._write_once(io, wrote)
        except BaseException:  # Ctrl-C as well
            self.close()
            raise

    def _open(self, executor: str, nbytes: int, largest_nbytes: int, in_place: bool) -> BlockIo:
        """Opens the members.  Raises CapacityError if they have no room for a measurement."""
        controller = open_controller(self._paths, executor=executor)
        self.callback(controller.close)
        self._buffers = [HostBuffer(largest_nbytes) for _ in range(2)]
        noise = self._rng.integers(0, 256, MiB, np.uint8)
        for buffer in self._buffers:
            buffer.array[:] = np.resize(noise, buffer.array.size)
        for region in controller.register_all(self._buffers):
            self.callback(region.close)
        self._engine, io = self.enter_context(opened_io(controller))
        self._lba_nbytes, members = controller.info.lba_nbytes, len(self._paths)
        self._offset, end = 0, min(controller.info.namespace_nlb[:members]) * self._lba_nbytes
        if in_place:
            self._offset = unused_from(io, self._engine, self._paths)
            end -= TAIL_NBYTES
        groups = max(0, end - self._offset) // _GROUP_NBYTES * members
        if groups * _GROUP_NBYTES < 2 * largest_nbytes:
            raise CapacityError(f"{self._paths[0]} has no room to be measured; see docs/profile.md")
        self._groups = min(nbytes // _GROUP_NBYTES, groups)
        self.facts: dict[str, Any] = {"members": members, "memory": str(self._buffers[0].backing)}
        if isinstance(controller, FileController):
            self.facts.update(executor=controller.executor_name, direct_io=controller.direct)
        return io

    def _write_once(self, io: BlockIo, wrote: Callable[[int, int], None]) -> None:
        """Writes what will be read: a drive answers at once for blocks that were never written."""
        members, noise = len(self._paths), self._rng.bytes(_GROUP_NBYTES)
        for group in range(self._groups):
            wrote(group * _GROUP_NBYTES, self._groups * _GROUP_NBYTES)
            io.write(1 + group % members, self._offset + group // members * _GROUP_NBYTES, noise)
        io.flush(range(1, members + 1))

    def _deallocate(self) -> None:
        """Gives the blocks back to the devices; one that refuses keeps them, which is harmless."""
        nsids = np.arange(1, len(self._paths) + 1)
        first = np.full(nsids.size, self._offset // self._lba_nbytes)
        nlb = -(-self._groups // nsids.size) * _GROUP_NBYTES // self._lba_nbytes
        job = self._engine.deallocate(first, nsids, nlb, timeout_s=self._timeout_s)
        job.wait_released(self._timeout_s)

    def time_us(self, direction: str, nbytes: int, slice_nbytes: int) -> list[float]:
        """Microseconds of one read or one write, or of a read and a write at once."""
        parts = ("read", "write") if direction == "both" else (direction,)
        jobs = [self._start(part, nbytes, slice_nbytes, i) for i, part in enumerate(parts)]
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
        offsets = self._offset + groups // members * _GROUP_NBYTES
        extents = Extents(
            (offsets // self._lba_nbytes).astype(np.uint64),
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

    def _remove(self) -> None:
        for path in self._files:
            Path(path).unlink(missing_ok=True)
        if len(self._files) < len(self._paths):
            make_blank(self._paths)
