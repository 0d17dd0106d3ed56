"""Slot records on the medium: written after the data, voided before reuse, read to verify."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from tutti.base.arrays import U32, U64, Keys, Slots
from tutti.base.process import Owned
from tutti.errors import DeviceTimeout
from tutti.gio_uring.engine import Engine
from tutti.gio_uring.iocb import PagedMemory, flat_memory
from tutti.gio_uring.job import Job
from tutti.gio_uring.memory import HostBuffer
from tutti.gio_uring.nvme_spec import OPCODE_READ, OPCODE_WRITE
from tutti.gio_uring.transfer import TIMEOUT_S
from tutti.medium.geometry import RECORD_NBYTES
from tutti.medium.slot_record import (
    FLAG_DIGESTS,
    RECORD_DTYPE,
    RecordContent,
    RecordState,
    check_records,
    fill_records,
)
from tutti.pool.members import Members
from tutti.pool.slot_extents import record_places
from tutti.pool.slot_jobs import SlotJobs, SlotJobStruct

#: A staging block has as many records as objects fit into 256 MiB, within these limits.
BLOCK_RECORDS_MIN, _BLOCK_RECORDS_MAX = 64, 1024
_BLOCK_OBJECTS_NBYTES = 256 << 20


class RecordTable(Owned):
    """Reads and writes records through a bounded set of registered staging blocks.  Thread-safe.

    block_records: records in a block, at most 4 MiB of them.  A put is written in batches of so
    many pages: then the time for records is small compared with that for data.
    """

    def __init__(self, engine: Engine, members: Members, *, blocks: int) -> None:
        self._members = members
        self._geometry = geometry = members.geometry
        most = _BLOCK_OBJECTS_NBYTES // (geometry.slice_nbytes * geometry.layers)
        self.block_records = min(_BLOCK_RECORDS_MAX, max(BLOCK_RECORDS_MIN, most))
        self._buffer = HostBuffer(blocks * self.block_records * RECORD_NBYTES)
        self._region = engine.controller.register(self._buffer)
        self._records = self._buffer.array.view(RECORD_DTYPE)
        self._memory: PagedMemory = flat_memory(
            self._buffer.address, RECORD_NBYTES, blocks * self.block_records, self._buffer
        )
        self._nsids = np.array([members.nsid(m) for m in range(members.count)], np.uint32)
        places, nlb = record_places(members.geometry, self._nsids), members.geometry.record_nlb
        self._jobs = SlotJobs(engine, places, nlb, timeout_s=TIMEOUT_S)
        self._free = list(range(blocks))
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)

    def close(self) -> None:
        """Releases the staging memory."""
        self._region.close()

    @property
    def writes(self) -> SlotJobStruct:
        """What all writes of READY records from staging have in common, for native code."""
        struct = SlotJobStruct.from_buffer_copy(self._jobs.common)
        struct.memory, struct.opcode = ctypes.addressof(self._memory.iocb), OPCODE_WRITE
        return struct

    @property
    def staging_address(self) -> int:
        """Address of the first block."""
        return self._buffer.address

    def take(self) -> int | None:
        """As ``reserve``, but returns None if no block is free now."""
        with self._lock:
            return self._free.pop() if self._free else None

    def reserve(self, timeout_s: float) -> int:
        """Reserves a block; returns its number.  Raises DeviceTimeout when none became free."""
        with self._lock:
            if not self._free and not self._changed.wait_for(lambda: bool(self._free), timeout_s):
                raise DeviceTimeout(
                    f"no record staging became free within {timeout_s:g} s; the medium is stuck"
                )
            return self._free.pop()

    def release(self, block: int) -> None:
        """Makes a staging block free again; no transfer of it may be outstanding."""
        with self._lock:
            self._free.append(block)
            self._changed.notify()

    def write(
        self,
        block: int,
        content: RecordContent,
        on_released: Callable[[Job], None],
        *,
        fua: bool = False,
        timeout_s: float = 30.0,
    ) -> Job:
        """Writes the records of at most ``block_records`` slots, each run by one command."""
        records = self._staged(block, content.slots.size)
        order, slots = self._order(content.slots), content.slots
        if order is None:
            fill_records(records, self._members.identity(0), content)
        else:
            members, local = self._geometry.split_members(slots)
            slots, members = slots[order], members[order]
            for member in np.unique(members).tolist():
                where = np.flatnonzero(members == member)
                fill_records(
                    records[where[0] : where[-1] + 1],
                    self._members.identity(member),
                    content._replace(slots=local).take(order[where]),
                )
        return self._submit(OPCODE_WRITE, block, slots, on_released, fua=fua, timeout_s=timeout_s)

    def statuses(self, job: Job, slots: Slots) -> U32:
        """The NVMe status of every slot of a ``write`` that was released, (n,)."""
        order = self._order(slots)
        if order is None:
            return job.page_status
        statuses = np.zeros(slots.size, np.uint32)
        statuses[order] = job.page_status
        return statuses

    def read(self, block: int, slots: Slots, *, timeout_s: float) -> Job:
        """Reads the records of at most ``block_records`` slots, in their order, into a block."""
        return self._submit(OPCODE_READ, block, slots, None, fua=False, timeout_s=timeout_s)

    def check(
        self, block: int, slots: Slots, keys: Keys, sequences: U64, digests: U64
    ) -> npt.NDArray[np.uint8]:
        """Compares records that were read with what the index says of their slots.

        Fills ``digests`` (n, layers).  Returns (n,): 0 the record is not that of this key, 1 it
        is and has digests, 2 it is and has none.
        """
        records = self._staged(block, slots.size)
        members, local = self._geometry.split_members(slots)
        right = np.zeros(slots.size, np.bool_)
        for member in np.unique(members).tolist():
            rows = np.flatnonzero(members == member)
            # As bytes: a copy of structured rows leaves out what lies between the fields.
            mine = records.view(np.uint8).reshape(-1, RECORD_NBYTES)[rows].view(RECORD_DTYPE)
            verdict = check_records(mine[:, 0], local[rows], self._members.identity(member))
            right[rows] = verdict == RecordState.READY
        right &= (records["key"] == keys).all(axis=1) & (records["sequence"] == sequences)
        digests[:] = records["digests"][:, : digests.shape[1]]
        has = (records["flags"] & FLAG_DIGESTS) != 0
        return np.where(right, np.where(has, 1, 2), 0).astype(np.uint8)

    def content(self, block: int, n: int) -> npt.NDArray[np.void]:
        """A copy of the first n records of a block, after a ``read``; see ``check``."""
        raw = self._staged(block, n).view(np.uint8).reshape(-1, RECORD_NBYTES)
        records: npt.NDArray[np.void] = raw.copy().view(RECORD_DTYPE)[:, 0]
        return records

    def _staged(self, block: int, n: int) -> npt.NDArray[np.void]:
        """The first n records of a block."""
        return self._records[block * self.block_records :][:n]

    def _order(self, slots: Slots) -> Slots | None:
        """The order of slots by member, in which their records lie in staging and are written.

        None where there is one member: the order is that of the slots.
        """
        if self._members.count == 1:
            return None
        members, _ = self._geometry.split_members(slots)
        return np.argsort(members, kind="stable")

    def _submit(
        self,
        opcode: int,
        block: int,
        slots: Slots,
        on_released: Callable[[Job], None] | None,
        *,
        fua: bool,
        timeout_s: float,
    ) -> Job:
        assert slots.size <= self.block_records, "a block holds block_records records"
        first = block * self.block_records
        pages = np.arange(first, first + slots.size, dtype=np.uint32)
        return self._jobs.start(
            opcode,
            slots,
            pages,
            self._memory,
            fua=fua,
            timeout_s=timeout_s,
            on_released=on_released,
        )
