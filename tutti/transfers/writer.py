"""The put pipeline: data, then records, then acknowledgement; driven by completions.

    put -> slots -> data job -> [flush, shared by all that wait for it] -> record job -> ready

A long put is split into batches, so long that Python costs little; records follow each of them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tutti.base.arrays import U32, U64, Mask, Slots
from tutti.errors import DeviceTimeout, MediumError, PoolMoved, TuttiError
from tutti.gio_uring.iocb import PagedMemory
from tutti.gio_uring.job import Job
from tutti.gio_uring.nvme_spec import (
    OPCODE_WRITE,
    STATUS_CANCELLED,
    STATUS_MEMBER_MOVED,
    STATUS_TIMED_OUT,
    STATUS_WRITE_FAULT,
)
from tutti.gio_uring.status import error_status
from tutti.medium.keys import KEY_NBYTES
from tutti.medium.slot_record import RecordContent, RecordState
from tutti.native import NativePutRequest
from tutti.placement.index import SlotState
from tutti.pool.record_table import BLOCK_RECORDS_MIN, RecordTable
from tutti.transfers.core import Core
from tutti.transfers.put_limits import Grant
from tutti.transfers.put_request import OPEN_PARTS_MAX, PlannedPut, PutPart, PutRequest, PutTogether
from tutti.transfers.quick_put import QuickPut, QuickPuts
from tutti.transfers.reclaim import Reclaimer
from tutti.transfers.tickets import Outcome, PutProgress

_log = logging.getLogger(__name__)

#: Two blocks are left for other puts while all open parts are stopped.
_BLOCKS = OPEN_PARTS_MAX + 2
_NO_BLOCK = -1
_NOWHERE = PagedMemory(np.zeros((1, 1), np.uint64), (0,), (0,), 0)


class _Batch(NamedTuple):
    """Pages that got slots: rows (m,) of what is written together, and everything else by row."""

    together: PutTogether
    request: PutRequest
    rows: Slots
    slots: Slots
    sequences: U64
    digests: U64 | None
    block: int

    def at(self, mask: npt.NDArray[np.bool_]) -> _Batch:
        digests = None if self.digests is None else self.digests[mask]
        own = self.rows[mask], self.slots[mask], self.sequences[mask], digests
        return _Batch(self.together, self.request.take(np.flatnonzero(mask)), *own, self.block)


class Writer:
    """Stores objects into one pool."""

    def __init__(self, core: Core, reclaimer: Reclaimer) -> None:
        self._core = core
        self._reclaimer = reclaimer
        self._table = RecordTable(core.engine, core.members, blocks=_BLOCKS)
        self.batch_pages = self._table.block_records
        self._quick = QuickPuts(core, self._table, _BLOCKS)
        self.active = 0  # batches under way
        self.finished = 0  # batches that ended
        self.batch_ended: Callable[[], object] = lambda: None  # called after each
        self._unflushed: list[_Batch] = []
        self._flushing = False
        self._flushes_failed = 0
        self._flush_status = STATUS_WRITE_FAULT  # of the last that failed

    def close(self) -> None:
        """Releases the staging memory; nothing may be in flight."""
        self._table.close()
        self.batch_ended = lambda: None  # breaks a cycle of references

    def put(self, parts: Sequence[PutPart]) -> BaseException | None:
        """Starts parts of puts, as one; see ObjectStore.put and PutTogether.  The caller counts
        them as in flight meanwhile.

        Every part ends; returns why nothing was started, or None.
        """
        core, together = self._core, PutTogether(parts)
        try:
            with core.lock:
                if core.closing or core.failure is not None or self._reclaimer.faults.paused:
                    core.check_open()
                    self._reclaimer.faults.end_pauses()
                if together.request.has_start:
                    # Not for appended pages: these must not be newer than the start of their chain.
                    core.index.begin_use()
                request, rows, quick = together.request, parts[0].rows, None
                n = request.n
                is_whole = request is parts[0].request or all(
                    part.rows.size == part.request.n for part in parts
                )
                block = self._table.take() if is_whole and n <= BLOCK_RECORDS_MIN else None
                if block is not None:
                    try:
                        rows = rows if rows.size == n else np.arange(n, dtype=np.int64)
                        quick = self._start_quick(together, request, rows, block)
                    finally:
                        if quick is None:
                            self._release(block)
                if quick is not None:
                    core.expect(1)  # decoding puts page after page
                    return None
                new = self._absent(together, np.arange(together.request.n))
                grant = self._granted(together, new.size)
            self._put_rows(together, new, grant)
        except BaseException as error:
            together.refuse(error)
            return error
        together.end_batch()
        return None

    def plan(self, keys: bytes, request: NativePutRequest) -> PlannedPut | None:
        """Gives slots to a chain that another process writes, where that takes no waiting and no
        choice: `written_elsewhere` has to follow if it gets any.  None: nothing changed.
        """
        core, n = self._core, len(keys) // KEY_NBYTES
        with core.lock:
            core.wait_admitted(core.config.timeout_s)
            core.check_open()
            self._reclaimer.faults.end_pauses()
            if not 0 < n <= core.allocator.free_slots or not core.is_unlimited:
                return None
            if request.depth == 0:
                core.index.begin_use()  # see put
            request.sequence = core.take_sequences(n)
            chain = core.placer.answer(keys, request)
            if chain.count < n:
                core.index.absent(chain.keys)  # the others count as accessed
                core.counters.present += n - chain.count
            if chain.count:
                core.in_flight += 1
                self.active += 1
                core.expect(1)
            return PlannedPut(chain, self._flushes_failed, time.monotonic())

    def written_elsewhere(
        self, put: PlannedPut, status: U32, digests: U64 | None, over: Callable[[PutProgress], None]
    ) -> None:
        """Pages of a chain that was planned are written.  status, digests: of those with slots.

        over: called when the outcome of every key is known.
        """
        core, chain = self._core, put.chain
        core.moved_elsewhere(OPCODE_WRITE, int(np.count_nonzero(status == 0)))
        keys, rows = chain.keys, chain.rows
        # Which pages these are, and of which memory, only the other process knows.
        request = PutRequest.of(keys, chain.parents, chain.depths, chain.depths, _NOWHERE)
        progress = PutProgress(len(keys), core.guard, core.store_latency, put.begun_s)
        progress.on_done(over)
        every = np.arange(len(keys), dtype=np.int64)
        progress.outcome[:] = Outcome.PRESENT
        progress.outcome[rows] = Outcome.PENDING
        together = PutTogether([PutPart(request, every, progress, lambda *_: progress.end_part())])
        own = rows, chain.slots, chain.sequences, digests
        batch = _Batch(together, request.take(rows), *own, _NO_BLOCK)
        self._data_written(batch, status, put.flushes_failed)

    def _start_quick(
        self, together: PutTogether, request: PutRequest, rows: Slots, block: int
    ) -> QuickPut | None:
        """Starts a batch, if all of its keys are absent and one native call can.  Lock held."""
        ended = partial(self._quick_ended, together, request, rows)
        put = self._quick.start(block, request, together.grant, ended)
        if put is not None:
            put.flushes_failed = self._flushes_failed
            self._core.in_flight += 1
            self.active += 1
        return put

    def _quick_ended(
        self, together: PutTogether, request: PutRequest, rows: Slots, put: QuickPut, job: Job
    ) -> None:
        core = self._core
        with core.lock:
            is_ready = self._quick.end(put)
            if is_ready:
                together.tell(rows, Outcome.STORED)
                core.count_stored(put.n)
        if is_ready:
            self._finish(together, put.block)
            return
        digests = put.digests if core.config.verify != "off" else None
        batch = _Batch(together, request, rows, put.slots, put.sequences, digests, put.block)
        status = put.status(of_records=False)
        if not put.is_chained or np.count_nonzero(status):
            self._data_written(batch, status, put.flushes_failed)
        else:
            job.page_status = put.status(of_records=True)
            self._records_written(batch, job)

    def _put_rows(self, together: PutTogether, new: Slots, grant: Grant) -> None:
        """Puts the granted rows, the first of ``new``, and drops the rest.  Raises only for the
        first batch: later errors are for the tickets.
        """
        step = self._core.write_pages_max(together.request.memory, self.batch_pages)
        history, rows, granted, done, written = self._core.history, new[:0], grant.objects, 0, 0
        try:
            while done < granted:  # bounded: each turn but the last takes a batch
                rows = new[done : min(done + step, granted)]
                try:
                    taken, placed = self._put_batch(together, rows)
                except BaseException as error:  # of any class if it is the eviction policy's
                    if done == 0:
                        raise
                    if not isinstance(error, TuttiError):
                        _log.error("the rest of a put failed", exc_info=error)
                    together.tell(new[done:granted], Outcome.FAILED, error_status(error))
                    done = granted
                    break
                done, written = done + taken, written + placed
                if taken < rows.size:
                    break
            if done < new.size:
                limit = grant.limit if done == granted else None
                with self._core.lock:
                    rest = self._absent(together, new[done:])  # others may have put some
                    self._core.counters.dropped += rest.size
                    if limit is None and history.by_uses:  # make_room did so for the last batch
                        later = together.request.keys[rest[rest > rows.max(initial=-1)]]
                        history.missed(later, self._core.index.uses)
                together.cut(rest, limit)
        finally:
            if granted and not self._core.is_unlimited:
                tenant, quotas = together.request.tenant, self._core.quotas
                with self._core.lock:
                    quotas.settle(tenant, granted - together.placed)
                    quotas.give_back(tenant, granted - written)

    def _absent(self, together: PutTogether, rows: Slots) -> Slots:
        """Of these rows those whose key has no slot, each key once; the others count as accessed.
        Lock held.
        """
        absent = self._core.index.absent(together.request.keys[rows])
        if absent.size < rows.size:
            self._present(together, np.delete(rows, absent))
        return rows[absent]

    def _granted(self, together: PutTogether, n: int) -> Grant:
        """How many of n new rows quotas and budgets let be written, from the first on."""
        core = self._core
        if core.is_unlimited and not together.is_cut:
            return Grant(n)

        def evict(wanted: int, among: Mask) -> int:
            among[together.found(core.index)] = False  # no chain evicts its own start for its end
            return self._reclaimer.evict(wanted, among)

        tenant, quotas = together.request.tenant, core.quotas
        if together.is_cut:
            grant = quotas.refuse(tenant, n, together.cut_by)
        else:
            grant = quotas.grant(tenant, n, core.index, evict)
        core.counters.over_budget += grant.over_budget
        return grant

    def _present(self, together: PutTogether, rows: Slots) -> None:
        together.tell(rows, Outcome.PRESENT)
        self._core.counters.present += rows.size

    def _put_batch(self, together: PutTogether, rows: Slots) -> tuple[int, int]:
        """Gives slots to a batch and starts its data job; returns how many rows, from the first,
        have a slot now, and how many of these got it here.
        """
        core, request = self._core, together.request
        # While another process moves the data, it does not occupy a block of staging for records.
        late = core.is_remote(request.memory)
        block = _NO_BLOCK if late else self._table.reserve(core.config.timeout_s)
        try:
            with core.lock:
                asked = request.take(rows)
                # By uses, what was touched last may go first: the start of the chain here.
                kept = together.found(core.index) if core.history.by_uses else together.slots
                self._reclaimer.make_room(asked.keys, core.config.timeout_s, kept)
                quick = None if late else self._start_quick(together, asked, rows, block)
                if quick is not None:
                    together.add_batch()
                    together.add_slots(quick.slots)
                    return rows.size, rows.size
                batch, placed = self._place(together, asked, rows, block)
                core.in_flight += 1
                self.active += 1
                together.add_batch()
        except BaseException:
            self._release(block)
            raise
        if batch.rows.size == 0:
            self._finish(batch.together, batch.block)
            return placed, 0
        failed = self._flushes_failed
        try:
            job = core.write(
                batch.slots,
                batch.request.pages,
                request.memory,
                digests=batch.digests if request.digests is None else None,
                held=together.grant is not None,  # of host memory alone
                on_released=lambda job: self._data_written(batch, job.page_status, failed),
            )
        except BaseException:
            self._give_up(batch, STATUS_CANCELLED)
            raise
        if together.grant is not None and isinstance(job, Job):
            together.grant.begin(job)  # one that is never allowed to go on ends by its deadline
        return placed, batch.rows.size

    def _place(
        self, together: PutTogether, request: PutRequest, rows: Slots, block: int
    ) -> tuple[_Batch, int]:
        """Allocates slots for rows and claims their keys; returns how many rows, from the first,
        are done.  request: of the rows alone.
        """
        core = self._core
        has_digests = core.config.verify != "off"
        digests = request.digests if has_digests else None
        if has_digests and digests is None:
            digests = np.empty((rows.size, core.layers), np.uint64)
        sequence = core.take_sequences(rows.size)
        placed = core.placer.place(
            request.keys, request.parents, request.depths, sequence, has_digests=has_digests
        )
        if placed.rows is not None:
            there = np.setdiff1d(np.arange(placed.keys), placed.rows, assume_unique=True)
            self._present(together, rows[there])
            request, rows = request.take(placed.rows), rows[placed.rows]
            digests = None if digests is None else digests[placed.rows]
        if request.tenant or request.expiry_64s:
            core.index.describe(placed.slots, tenant=request.tenant, expiry=request.expiry_64s)
        _, _, slots, sequences = placed
        together.add_slots(slots)
        together.placed += slots.size
        core.quotas.settle(request.tenant, slots.size)
        return _Batch(together, request, rows, slots, sequences, digests, block), placed.keys

    def _data_written(self, batch: _Batch, status: U32, flushes_failed: int) -> None:
        if np.count_nonzero(status):
            good = status == 0
            with self._core.lock:  # no other put gets these slots of a lost member in between
                self._drop(batch.at(~good), status[~good], status[~good] == STATUS_WRITE_FAULT)
                self._reclaimer.faults.of_write(batch.slots, status)
            batch = batch.at(good)
        if batch.rows.size and batch.block == _NO_BLOCK:
            try:
                batch = batch._replace(block=self._table.reserve(self._core.config.timeout_s))
            except DeviceTimeout:
                self._give_up(batch, STATUS_TIMED_OUT)
                return
        if batch.rows.size == 0:
            self._finish(batch.together, batch.block)
        elif self._core.config.durability != "flush":
            self._write_records(batch)
        else:
            self._flush(batch, flushes_failed)

    def _flush(self, batch: _Batch | None = None, flushes_failed: int = 0) -> None:
        """Group commit: batches that arrive during a flush share the next one.

        flushes_failed: how many had failed before the batch was written.
        """
        batches: list[_Batch] = []
        with self._core.lock:
            is_lost = batch is not None and self._flushes_failed != flushes_failed
            if batch is not None and not is_lost:
                self._unflushed.append(batch)
            if not self._flushing:
                batches, self._unflushed = self._unflushed, []
                self._flushing = bool(batches)
        if batch is not None and is_lost:  # a flush that failed meanwhile may have lost these
            self._give_up(batch, self._flush_status)
        if not batches:
            return

        def on_released(job: Job) -> None:
            status = int(job.report().status) or self._moved(nsids)
            if status:
                # All that was written before may be lost: an error is reported once (fsync(2)).
                with self._core.lock:
                    batches.extend(self._unflushed)
                    self._unflushed, self._flush_status = [], status
                    self._flushes_failed += 1
            for flushed in batches:
                if status:
                    self._give_up(flushed, status)
                else:
                    self._write_records(flushed)
            with self._core.lock:
                self._flushing = False
            self._flush()

        core = self._core
        nsids = core.members.nsids_of(np.concatenate([one.slots for one in batches]))
        try:
            core.engine.flush(nsids, timeout_s=core.config.timeout_s, on_released=on_released)
        except TuttiError as error:
            for refused in batches:
                self._give_up(refused, error_status(error))
            with core.lock:
                self._flushing = False
            self._flush()  # other threads may have brought more meanwhile

    def _moved(self, nsids: Sequence[int]) -> int:
        """A status where the files are not what was opened, or that cannot be found out, else 0."""
        try:
            self._core.engine.controller.check_places(nsids)
        except (PoolMoved, MediumError) as error:
            status = STATUS_MEMBER_MOVED if isinstance(error, PoolMoved) else error_status(error)
            if status != self._flush_status:  # else it was logged
                _log.error("%s", error)
            return status
        return 0

    def _write_records(self, batch: _Batch) -> None:
        core, request, written = self._core, batch.request, partial(self._records_written, batch)
        is_durable, timeout_s = core.config.durability == "flush", core.config.timeout_s
        content = RecordContent(
            batch.slots,
            batch.sequences,
            RecordState.READY,
            keys=request.keys,
            parents=request.parents,
            depths=request.depths,
            access_64s=core.now_64s(),
            tenants=request.tenant,
            expiry_64s=request.expiry_64s,
            digests=batch.digests,
        )
        try:
            self._table.write(batch.block, content, written, fua=is_durable, timeout_s=timeout_s)
        except TuttiError as error:
            self._give_up(batch, error_status(error))

    def _records_written(self, batch: _Batch, job: Job) -> None:
        core = self._core
        status = self._table.statuses(job, batch.slots)
        with core.lock:
            if np.count_nonzero(status):
                good = status == 0
                # A record may be on the medium all the same: void it before the slot is reused.
                bad = batch.at(~good)
                self._fail(bad, status[~good])
                self._reclaimer.discard(bad.slots)
                self._reclaimer.faults.of_write(batch.slots, status)
                batch = batch.at(good)
            core.index.set_state(batch.slots, SlotState.READY)
            if batch.digests is not None:
                core.digests.put(batch.slots, batch.sequences, batch.digests)
            batch.together.tell(batch.rows, Outcome.STORED)
            core.count_stored(batch.rows.size)
        self._finish(batch.together, batch.block)

    def _give_up(self, batch: _Batch, status: int) -> None:
        nothing = np.zeros(batch.rows.size, np.bool_)  # these errors do not concern single slots
        self._drop(batch, np.full(batch.rows.size, status, np.uint32), nothing)
        self._finish(batch.together, batch.block)

    def _drop(self, batch: _Batch, status: U32, bad: Mask) -> None:
        """Frees slots whose data was not written, at once, as no record describes them.

        bad: mask of slots that the medium could not write, which are quarantined instead.
        """
        core = self._core
        with core.lock:
            self._fail(batch, status)
            core.index.remove(batch.slots[~bad], SlotState.VOIDED)
            core.allocator.free(batch.slots[~bad])
            self._reclaimer.quarantine(batch.slots[bad])

    def _fail(self, batch: _Batch, status: U32) -> None:
        self._core.counters.store_errors += batch.rows.size
        batch.together.tell(batch.rows, Outcome.FAILED, status)

    def _finish(self, together: PutTogether, block: int) -> None:
        with self._core.lock:
            self._release(block)
            self.finished += 1
            self.active -= 1
        self.batch_ended()
        together.end_batch()
        self._core.end()

    def _release(self, block: int) -> None:
        if block != _NO_BLOCK:
            self._table.release(block)
