"""The load pipeline: one job for all layers, digests compared as slices arrive.

Digests come from the cache or from the records, which are read with the first layer: the data
job starts at once behind a gate that opens when the digests are known.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tutti.arrays import U32, U64, Keys, Slots
from tutti.errors import DeviceTimeout, KeyMissing
from tutti.gio_uring.engine import PRIORITY_LOAD
from tutti.gio_uring.iocb import PagedMemory
from tutti.gio_uring.job import Job
from tutti.gio_uring.nvme_spec import (
    OPCODE_READ,
    STATUS_CANCELLED,
    STATUS_DIGEST_MISMATCH,
    STATUS_TIMED_OUT,
    STATUS_UNRECOVERED_READ,
)
from tutti.placement.index import MISSING, SlotState
from tutti.pool.record_table import BLOCK_RECORDS, RecordTable
from tutti.transfers.core import Core
from tutti.transfers.reclaim import Reclaimer
from tutti.transfers.tickets import LoadPart, LoadProgress

_log = logging.getLogger(__name__)

SAMPLE_ONE_IN = 16
_BLOCKS = 3


@dataclass(frozen=True)
class _Pages:
    """What a load reads: everything by row of the batch."""

    keys: Keys
    slots: Slots
    sequences: U64
    pages: U32
    memory: PagedMemory
    unproven: npt.NDArray[np.bool_]
    verify: npt.NDArray[np.bool_]


class Loader:
    """Loads objects from one pool."""

    def __init__(self, core: Core, reclaimer: Reclaimer) -> None:
        self._core = core
        self._reclaimer = reclaimer
        self._table = RecordTable(core.engine, core.members, blocks=_BLOCKS)
        self._loads = 0

    def close(self) -> None:
        """Gives the staging memory back; nothing may be in flight."""
        self._table.close()

    def load(
        self, keys: Keys, pages: U32, memory: PagedMemory, *, held: bool = False
    ) -> LoadProgress:
        """Starts a load; see ObjectStore.load.  held: layers are read as ``LoadProgress.grant``
        allows; for host memory.
        """
        core = self._core
        with core.lock:
            core.begin()
            try:
                batch = self._pin(keys, pages, memory)
            except BaseException:
                core.end()
                raise
        progress = LoadProgress(len(keys), core.layers, core.guard, core.load_latency)
        settle = _Settle(self, progress, batch)
        try:
            for mask, whole in self._partition(batch):
                rows = np.flatnonzero(mask).astype(np.int64)
                if rows.size:
                    self._load_part(progress, batch, rows, whole, settle, held=held)
        except BaseException:
            progress.cancel(core.config.timeout_s)
            raise
        finally:
            settle.end_part()
        return progress

    def _pin(self, keys: Keys, pages: U32, memory: PagedMemory) -> _Pages:
        """Finds every key, checks that it may be served, and pins its slot."""
        core, index = self._core, self._core.index
        slots = index.find(keys)
        state = index.state[slots]
        present = (slots != MISSING) & ((state == SlotState.READY) | (state == SlotState.UNPROVEN))
        if not present.all():
            first = int(np.flatnonzero(~present)[0])
            raise KeyMissing(
                f"key {first} of {len(keys)} is not in the pool; ask match() which prefix is, and "
                "pin it if time passes before the load"
            )
        index.pin(slots)
        index.begin_use()
        index.touch(slots)
        index.count_hits(slots)
        core.history.loaded(slots[state == SlotState.READY], index.uses)
        self._loads += 1
        unproven = state == SlotState.UNPROVEN
        verify = unproven.copy()
        policy = core.config.verify
        if policy == "always" or (policy == "sampled" and self._loads % SAMPLE_ONE_IN == 1):
            verify |= index.has_digests[slots]
        starts, _ = core.geometry.find_runs(slots)
        core.counters.load_runs += starts.size
        return _Pages(keys, slots, index.sequence[slots], pages, memory, unproven, verify)

    @staticmethod
    def _partition(batch: _Pages) -> tuple[tuple[npt.NDArray[np.bool_], bool], ...]:
        """(rows, whole): unproven objects count only when all their layers were verified."""
        return (
            (batch.verify & ~batch.unproven, False),
            (~batch.verify, False),
            (batch.unproven, True),
        )

    def _load_part(
        self,
        progress: LoadProgress,
        batch: _Pages,
        rows: Slots,
        whole: bool,
        settle: _Settle,
        *,
        held: bool,
    ) -> None:
        core = self._core
        verify = bool(batch.verify[rows[0]])
        digests, unknown = None, np.zeros(0, np.int64)
        if verify:
            digests = np.zeros((rows.size, core.layers), np.uint64)
            with core.lock:
                known = core.digests.get(batch.slots[rows], batch.sequences[rows], digests)
            unknown = np.flatnonzero(~known).astype(np.int64)
        # Before the data, so that the digests are there when the first layer is.
        reads = self._start_records(batch, rows[unknown])
        settle.add_part()
        try:
            job = core.submitter(batch.memory).submit(
                OPCODE_READ,
                core.extents(batch.slots[rows]),
                np.ascontiguousarray(batch.pages[rows]),
                batch.memory,
                digests=digests,
                compare=verify,
                gated=unknown.size > 0,
                held=held,
                priority=PRIORITY_LOAD,
                timeout_s=core.config.timeout_s,
                on_released=lambda _: settle.end_part(),
            )
        except BaseException:
            settle.end_part()
            for read in reads:
                read.release(self._table)
            raise
        part = LoadPart(job, rows, whole)
        progress.parts.append(part)
        if digests is None or not unknown.size:
            return
        if batch.memory.path is None or core.is_remote(batch.memory):
            self._open_gate(progress, batch, part, digests, unknown, reads)
            return
        settle.add_part()
        # A stream waits for these pages instead of the caller, who goes on at once.
        arguments = (progress, batch, part, digests, unknown, reads, settle)
        threading.Thread(
            target=self._open_later, args=arguments, name="tutti-records", daemon=True
        ).start()

    def _open_gate(
        self,
        progress: LoadProgress,
        batch: _Pages,
        part: LoadPart,
        digests: U64,
        unknown: Slots,
        reads: list[_RecordRead],
    ) -> None:
        """Fills the digests that are not known from the records, and lets the job compare them."""
        rows = part.rows[unknown]
        try:
            digests[unknown], progress.record_status[rows] = self._finish_records(
                batch, rows, reads
            )
        except BaseException:
            part.job.cancel()
            raise
        part.job.open_gate()

    def _open_later(
        self,
        progress: LoadProgress,
        batch: _Pages,
        part: LoadPart,
        digests: U64,
        unknown: Slots,
        reads: list[_RecordRead],
        settle: _Settle,
    ) -> None:
        """As `_open_gate`, on a thread of its own: the ticket reports an error."""
        try:
            self._open_gate(progress, batch, part, digests, unknown, reads)
        except Exception as error:
            _log.warning("the records of a load could not be read: %s", error)
            late = isinstance(error, DeviceTimeout)
            status = STATUS_TIMED_OUT if late else STATUS_CANCELLED
            progress.record_status[part.rows[unknown]] = status
        finally:
            settle.end_part()

    def _start_records(self, batch: _Pages, rows: Slots) -> list[_RecordRead]:
        """Starts to read the records of rows, as far as staging is free; one block at least."""
        reads: list[_RecordRead] = []
        for start in range(0, rows.size, BLOCK_RECORDS):
            part = rows[start : start + BLOCK_RECORDS]
            try:
                block = self._table.reserve(0.0 if reads else self._core.config.timeout_s)
            except DeviceTimeout:
                if reads:
                    break
                raise
            try:
                job = self._table.read(
                    block, batch.slots[part], timeout_s=self._core.config.timeout_s
                )
            except BaseException:
                self._table.release(block)
                raise
            reads.append(_RecordRead(block, job, part))
        return reads

    def _finish_records(
        self, batch: _Pages, rows: Slots, reads: list[_RecordRead]
    ) -> tuple[U64, U32]:
        """Digests (n, layers) of ``rows`` from their records, and a status (n,) for each.

        A read error is not evidence of damage; a record of another object is.
        """
        digests: list[U64] = []
        statuses: list[U32] = []
        done = 0
        while done < rows.size:  # bounded: every read takes a row at least
            reads = reads or self._start_records(batch, rows[done:])
            read = reads.pop(0)
            try:
                found, status = self._check_records(batch, read)
            except BaseException:
                for other in reads:
                    other.release(self._table)
                raise
            finally:
                read.release(self._table)
            digests.append(found)
            statuses.append(status)
            done += read.rows.size
        return np.concatenate(digests), np.concatenate(statuses)

    def _check_records(self, batch: _Pages, read: _RecordRead) -> tuple[U64, U32]:
        core = self._core
        if not read.job.wait_layers(1, core.config.timeout_s * 2):
            raise DeviceTimeout(
                "the records were not read in time; the load is abandoned, try again"
            )
        slots, sequences = batch.slots[read.rows], batch.sequences[read.rows]
        found = np.zeros((slots.size, core.layers), np.uint64)
        keys = batch.keys[read.rows]
        verdict = self._table.check(read.block, slots, keys, sequences, found)
        wrong = np.where(verdict == 1, 0, STATUS_DIGEST_MISMATCH)
        unread = read.job.page_status
        status = np.where(unread == 0, wrong, unread).astype(np.uint32)
        right = status == 0
        with core.lock:
            core.digests.put(slots[right], sequences[right], found[right])
        return found, status

    def settle(self, progress: LoadProgress, batch: _Pages) -> None:
        """All jobs of a load were released: unpins, proves and quarantines."""
        core, index = self._core, self._core.index
        status = np.full(len(batch.slots), STATUS_CANCELLED, np.uint32)
        for part in progress.parts:
            status[part.rows] = part.job.page_status
        status = np.where(progress.record_status == 0, status, progress.record_status)
        with core.lock:
            index.unpin(batch.slots)
            good = status == 0
            wrong = (status == STATUS_DIGEST_MISMATCH) | (status == STATUS_UNRECOVERED_READ)
            core.counters.loaded += int(np.count_nonzero(good))
            core.counters.load_errors += int(np.count_nonzero(~good))
            core.counters.mismatches += int(np.count_nonzero(status == STATUS_DIGEST_MISMATCH))
            payload = core.geometry.slice_nbytes * core.layers
            core.counters.payload_read_nbytes += int(np.count_nonzero(good)) * payload
            proven = np.unique(batch.slots[good & batch.unproven])
            proven = proven[index.state[proven] == SlotState.UNPROVEN]
            index.set_state(proven, SlotState.READY)
            core.counters.proven += proven.size
            slots = np.unique(batch.slots[wrong])
            self._reclaimer.quarantine(slots[index.state[slots] == SlotState.READY])
            # A torn write does not condemn the slot.
            unproven = slots[index.state[slots] == SlotState.UNPROVEN]
            self._reclaimer.discard(unproven[index.pins[unproven] == 0])
        progress.settle()
        core.end()


@dataclass(frozen=True)
class _RecordRead:
    """Records of some rows on their way into a staging block."""

    block: int
    job: Job
    rows: Slots

    def release(self, table: RecordTable) -> None:
        """Releases the block, once the device can no longer write to it."""
        self.job.on_released(lambda _: table.release(self.block))


class _Settle:
    """Counts the jobs of one load and settles it after the last."""

    def __init__(self, loader: Loader, progress: LoadProgress, batch: _Pages) -> None:
        self._loader = loader
        self._progress = progress
        self._batch = batch
        self._parts = 1  # the submission itself
        self._lock = loader._core.lock

    def add_part(self) -> None:
        with self._lock:
            self._parts += 1

    def end_part(self) -> None:
        with self._lock:
            self._parts -= 1
            last = self._parts == 0
        if last:
            self._loader.settle(self._progress, self._batch)
