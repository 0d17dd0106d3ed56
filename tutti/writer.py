"""The put pipeline: data, then records, then acknowledgement; driven by completions.

    put -> slots -> data job -> [flush, shared by all that wait for it] -> record job -> ready

A batch is at most BLOCK_RECORDS pages, so a long put is a pipeline of batches.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tutti.core import Core
from tutti.errors import DeviceTimeout, PoolClosed, TuttiError
from tutti.gio_uring.engine import Job
from tutti.gio_uring.iocb import PagedMemory
from tutti.gio_uring.nvme_spec import (
    OPCODE_WRITE,
    STATUS_CANCELLED,
    STATUS_TIMED_OUT,
    STATUS_WRITE_FAULT,
)
from tutti.index import MISSING, SlotState
from tutti.medium import RecordState
from tutti.reclaim import Reclaimer
from tutti.record_table import BLOCK_RECORDS, RecordContent, RecordTable
from tutti.tickets import PutTicket

Keys = npt.NDArray[np.uint8]
Slots = npt.NDArray[np.int64]
U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class PutRequest:
    """One put: keys (n, 16) that follow one another in a chain, and where their pages lie."""

    keys: Keys
    pages: U32
    memory: PagedMemory
    parent: bytes | None
    depth: int


@dataclass(frozen=True)
class _Batch:
    """Pages of one put that got slots: rows (m,) of the request, and everything else by row."""

    ticket: PutTicket
    request: PutRequest
    rows: Slots
    slots: Slots
    sequences: U64
    digests: U64 | None
    block: int

    def at(self, mask: npt.NDArray[np.bool_]) -> _Batch:
        digests = None if self.digests is None else self.digests[mask]
        return _Batch(
            self.ticket,
            self.request,
            self.rows[mask],
            self.slots[mask],
            self.sequences[mask],
            digests,
            self.block,
        )


class Writer:
    """Stores objects into one pool."""

    def __init__(self, core: Core, reclaimer: Reclaimer) -> None:
        self._core = core
        self._reclaimer = reclaimer
        self._table = RecordTable(core.engine, core.members)
        self._unflushed: list[_Batch] = []
        self._flushing = False

    def close(self) -> None:
        """Gives the staging memory back; nothing may be in flight."""
        self._table.close()

    def put(self, request: PutRequest) -> PutTicket:
        """Starts a put; see ObjectStore.put."""
        core = self._core
        ticket = PutTicket(len(request.keys))
        with core.lock:
            core.begin()
            new = self._absent_rows(request, ticket)
        try:
            for start in range(0, new.size, BLOCK_RECORDS):
                rows = new[start : start + BLOCK_RECORDS]
                try:
                    placed = self._put_batch(ticket, request, rows)
                except TuttiError as error:
                    if start == 0:
                        raise
                    # Earlier batches are on their way: the ticket must reach the caller.
                    late = isinstance(error, DeviceTimeout)
                    ticket.status[new[start:]] = STATUS_TIMED_OUT if late else STATUS_CANCELLED
                    break
                if placed < rows.size:
                    ticket.dropped += new.size - start - placed
                    break
        finally:
            with core.lock:
                core.counters.dropped += ticket.dropped
                core.counters.present += ticket.present
            ticket.end_part()
            core.end()
        return ticket

    def _absent_rows(self, request: PutRequest, ticket: PutTicket) -> Slots:
        """Rows whose key has no slot, each key once; the others count as accessed."""
        index = self._core.index
        found = index.find(request.keys)
        index.touch(np.unique(found[found != MISSING]))
        rows = np.flatnonzero(found == MISSING).astype(np.int64)
        words = request.keys[rows].view(np.uint64)
        _, first = np.unique(words, axis=0, return_index=True)
        rows = rows[np.sort(first)]
        ticket.present = len(request.keys) - rows.size
        return rows

    def _put_batch(self, ticket: PutTicket, request: PutRequest, rows: Slots) -> int:
        """Gives slots to a batch and starts its data job; returns how many rows have a slot now."""
        core = self._core
        block = self._table.reserve(core.config.timeout_s)
        try:
            with core.lock:
                batch, present = self._place(ticket, request, rows, block)
                core.in_flight += 1
                ticket.add_part()
                ticket.present += present
        except BaseException:
            self._table.release(block)
            raise
        if batch.rows.size == 0:
            self._finish(batch)
            return present
        try:
            core.engine.submit(
                OPCODE_WRITE,
                core.extents(batch.slots),
                np.ascontiguousarray(request.pages[batch.rows]),
                request.memory,
                digests=batch.digests,
                priority=1,
                timeout_s=core.config.timeout_s,
                on_released=lambda job: self._data_written(batch, job),
            )
        except BaseException:
            self._cancel(batch)
            raise
        return present + batch.rows.size

    def _place(
        self, ticket: PutTicket, request: PutRequest, rows: Slots, block: int
    ) -> tuple[_Batch, int]:
        """Allocates slots and claims the keys; also how many rows somebody else claimed."""
        core = self._core
        after = self._slot_before(request, int(rows[0]))
        slots = self._reclaimer.allocate(rows.size, after=after, deadline_s=core.config.timeout_s)
        rows = rows[: slots.size]
        sequences = core.sequence + np.arange(rows.size, dtype=np.uint64)
        core.sequence += rows.size
        digests = None
        if core.config.verify != "off":
            digests = np.zeros((rows.size, core.layers), np.uint64)
        taken = core.index.insert(
            slots,
            request.keys[rows],
            sequences,
            request.depth + rows,
            has_digests=digests is not None,
        )
        mine = taken == MISSING
        batch = _Batch(ticket, request, rows, slots, sequences, digests, block)
        if not mine.all():
            core.allocator.free(slots[~mine])
            batch = batch.at(mine)
        return batch, int(np.count_nonzero(~mine))

    def _slot_before(self, request: PutRequest, row: int) -> int | None:
        """The slot of the page before a row, so that a chain stays one run."""
        if row > 0:
            key = request.keys[row - 1 : row]
        elif request.parent is not None:
            key = np.frombuffer(request.parent, np.uint8)[None, :]
        else:
            return None
        slot = int(self._core.index.find(np.ascontiguousarray(key))[0])
        return None if slot == MISSING else slot

    def _data_written(self, batch: _Batch, job: Job) -> None:
        good = job.page_status == 0
        if not good.all():
            self._drop(batch.at(~good), job.page_status[~good])
            batch = batch.at(good)
        if batch.rows.size == 0:
            self._finish(batch)
        elif self._core.config.durability == "flush":
            self._flush(batch)
        else:
            self._write_records(batch)

    def _flush(self, batch: _Batch | None) -> None:
        """Group commit: whoever comes while a flush runs shares the next one."""
        with self._core.lock:
            if batch is not None:
                self._unflushed.append(batch)
            if self._flushing or not self._unflushed:
                return
            self._flushing = True
            batches, self._unflushed = self._unflushed, []

        def on_released(job: Job) -> None:
            status = int(job.report().status)
            for flushed in batches:
                if status:
                    self._drop(flushed, np.full(flushed.rows.size, status, np.uint32))
                    self._finish(flushed)
                else:
                    self._write_records(flushed)
            with self._core.lock:
                self._flushing = False
            self._flush(None)

        core = self._core
        try:
            core.engine.flush(
                core.members.nsids(), timeout_s=core.config.timeout_s, on_released=on_released
            )
        except PoolClosed:
            for cancelled in batches:
                self._cancel(cancelled)
            with core.lock:
                self._flushing = False

    def _write_records(self, batch: _Batch) -> None:
        core, request = self._core, batch.request
        parents = np.zeros((batch.rows.size, 16), np.uint8)
        inner = batch.rows > 0
        parents[inner] = request.keys[batch.rows[inner] - 1]
        if request.parent is not None:
            parents[~inner] = np.frombuffer(request.parent, np.uint8)
        content = RecordContent(
            batch.slots,
            batch.sequences,
            RecordState.READY,
            keys=request.keys[batch.rows],
            parents=parents,
            depths=request.depth + batch.rows,
            access_64s=core.now_64s(),
            digests=batch.digests,
        )
        try:
            self._table.write(
                batch.block,
                content,
                lambda job: self._records_written(batch, job),
                fua=core.config.durability == "flush",
                timeout_s=core.config.timeout_s,
            )
        except PoolClosed:
            self._cancel(batch)

    def _records_written(self, batch: _Batch, job: Job) -> None:
        core = self._core
        status = int(job.report().status)
        with core.lock:
            if status:
                # A record may be on the medium all the same: void it before the slot is reused.
                self._fail(batch, np.full(batch.rows.size, status, np.uint32))
                core.index.remove(batch.slots, SlotState.VOIDING)
                self._reclaimer.void(batch.slots)
            else:
                core.index.set_state(batch.slots, SlotState.READY)
                if batch.digests is not None:
                    core.digests.put(batch.slots, batch.sequences, batch.digests)
                core.counters.stored += batch.rows.size
                payload = core.geometry.slice_nbytes * core.layers
                core.counters.payload_written_nbytes += batch.rows.size * payload
        self._finish(batch, stored=0 if status else batch.rows.size)

    def _cancel(self, batch: _Batch) -> None:
        self._drop(batch, np.full(batch.rows.size, STATUS_CANCELLED, np.uint32))
        self._finish(batch)

    def _drop(self, batch: _Batch, status: U32) -> None:
        """Data that was not written: no record speaks of the slots, so they are free at once."""
        core = self._core
        with core.lock:
            self._fail(batch, status)
            bad = status == STATUS_WRITE_FAULT
            core.index.remove(batch.slots[~bad], SlotState.VOIDED)
            core.allocator.free(batch.slots[~bad])
            if bad.any():
                self._reclaimer.quarantine(batch.slots[bad])

    def _fail(self, batch: _Batch, status: U32) -> None:
        self._core.counters.store_errors += batch.rows.size
        batch.ticket.status[batch.rows] = status

    def _finish(self, batch: _Batch, *, stored: int = 0) -> None:
        self._table.release(batch.block)
        batch.ticket.end_part(stored=stored)
        self._core.end()
