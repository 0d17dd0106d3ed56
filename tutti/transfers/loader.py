"""The load pipeline: one job for all layers, digests compared as slices arrive.

Digests come from the cache or from the records, which are read with the first layer: the data
job starts at once behind a gate that opens when the digests are known.
"""

from __future__ import annotations

import logging
import threading
from ctypes import addressof
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Unpack

import numpy as np

from tutti.base.arrays import U32, U64, Keys, Mask, Slots
from tutti.base.threads import start_thread
from tutti.errors import DeviceTimeout, KeyMissing, PageRangeError
from tutti.gio_uring.engine import PRIORITY_LOAD
from tutti.gio_uring.iocb import PagedMemory, Pages
from tutti.gio_uring.job import Job
from tutti.gio_uring.nvme_spec import (
    OPCODE_READ,
    STATUS_CANCELLED,
    STATUS_DIGEST_MISMATCH,
    STATUS_TIMED_OUT,
    STATUS_UNRECOVERED_READ,
)
from tutti.medium.keys import KEY_NBYTES
from tutti.placement.index import SlotState
from tutti.placement.load_plan import (
    BAD_PAGES,
    LoadAnswer,
    LoadPlan,
    PartRows,
    partition,
)
from tutti.pool.record_table import RecordTable
from tutti.transfers.core import Core
from tutti.transfers.in_flight import Countdown, NotAdmitted
from tutti.transfers.reclaim import Reclaimer
from tutti.transfers.starters import Order
from tutti.transfers.tickets import NO_STATUS, LoadPart, LoadProgress

_log = logging.getLogger(__name__)

SAMPLE_ONE_IN = 16
#: Status of the pages of a planned load that the other process did not begin: these did not fail.
STATUS_NOT_BEGUN = 0x7FF
_BLOCKS = 3


class _Pages(NamedTuple):
    """What a load in parts reads: everything by row of the batch."""

    keys: Keys
    slots: Slots
    plan: LoadPlan
    pages: U32
    memory: PagedMemory


class _Gate(NamedTuple):
    """What a gated job waits for: digests of rows whose records are being read."""

    progress: LoadProgress
    batch: _Pages
    part: LoadPart
    digests: U64
    unknown: Slots
    reads: list[_RecordRead]

    @property
    def rows(self) -> Slots:
        """The rows of the load whose digests are not known yet."""
        assert self.part.rows is not None, "a load whose digests are known has no gate"
        return self.part.rows[self.unknown]


@dataclass(eq=False)
class QueuedLoad:
    """A load that the scheduler knows.  progress: of a load whose layers are held.

    due: of a load into GPU memory, set when it may start.  started: whether it has.
    granted, ready: layers that may be read, and that the scheduler knows to have arrived.
    """

    name: str
    layers: int
    progress: LoadProgress | None = None
    due: threading.Event | None = None
    started: bool = False
    granted: int = 0
    ready: int = 0


def are_passed(loads: dict[str, QueuedLoad]) -> bool:
    """Whether none of them would delay a later load on the same stream of a GPU."""
    on_streams = [load for load in loads.values() if load.due is not None]
    return all(load.started and load.granted == load.layers for load in on_streams)


class Loader:
    """Loads objects from one pool."""

    def __init__(self, core: Core, reclaimer: Reclaimer) -> None:
        self._core = core
        self._reclaimer = reclaimer
        self._table = RecordTable(core.engine, core.members, blocks=_BLOCKS)
        self._verifies_all = core.config.verify == "always"
        self.begun = self.ended = 0  # loads, since the pool was opened

    def close(self) -> None:
        """Releases the staging memory; nothing may be in flight."""
        self._table.close()

    def load(
        self,
        keys: Keys,
        pages: Pages,
        memory: PagedMemory,
        *,
        admit: bool = False,
        waits: bool = True,
        **order: Unpack[Order],
    ) -> LoadProgress:
        """Starts a load; see ObjectStore.load.  admit: see Core.admitted.

        Raises NotAdmitted if it is not admitted yet and not to wait.
        """
        core, n = self._core, len(keys)
        with core.lock:
            if admit and not core.ready:
                if not waits:
                    raise NotAdmitted(f"{core.quiesced_by or 'recovery'} is under way; try again")
                core.wait_admitted(core.config.timeout_s, memory)
            progress = LoadProgress(n, core.layers, core.guard, core.load_latency)
            core.begin(memory)
            try:
                plan, every = self._begin(progress, keys, pages, memory, order)
            except BaseException:
                core.end(memory)
                raise
        if progress.job is None:
            numbers = plan.pages if memory.path is None else pages.astype(np.uint32)
            batch = _Pages(keys, plan.slots, plan, numbers, memory)
            self._load_parts(progress, batch, memory, every, order)
        return progress

    def plan(self, keys: bytes, job: int) -> tuple[LoadAnswer, bool]:
        """Begins a load that another process carries out: pins the slots, as ``load`` does.

        job: number of its job, if it takes one: then `moved_elsewhere` has to follow, else
        `load_planned`.  Also returns whether proven objects are verified.
        """
        core = self._core
        with core.lock:
            core.wait_admitted(core.config.timeout_s)
            core.check_open()
            every = self._verifies_every()
            try:
                plan = core.planner.answer(keys, verify=every, job=job)
            except LookupError as error:
                raise _missing(error, len(keys) // KEY_NBYTES) from None
            core.in_flight += 1
            self.begun += 1
            core.counters.load_runs += plan.runs
        return plan, every

    def load_planned(
        self, batch: tuple[Keys, LoadPlan, U32, PagedMemory], *, every: bool
    ) -> LoadProgress:
        """Submits a load that was planned, in as many jobs as it takes."""
        core, (keys, plan, pages, memory) = self._core, batch
        progress = LoadProgress(len(keys), core.layers, core.guard, core.load_latency)
        parts = _Pages(keys, plan.slots, plan, pages, memory)
        self._load_parts(progress, parts, None, every, Order())
        return progress

    def moved_elsewhere(self, plan: LoadPlan, status: U32, begun_s: float) -> None:
        """Ends a planned load that another process carried out.  status: of its pages, (n,)."""
        core, n = self._core, plan.slots.size
        core.moved_elsewhere(OPCODE_READ, int(np.count_nonzero(status == 0)))
        progress = LoadProgress(n, core.layers, core.guard, core.load_latency, begun_s)
        self.settle(progress, plan, None, status=status)

    def _verifies_every(self) -> bool:
        policy = self._core.config.verify
        return policy == "always" or (policy == "sampled" and self.begun % SAMPLE_ONE_IN == 0)

    def _begin(
        self, progress: LoadProgress, keys: Keys, pages: Pages, memory: PagedMemory, order: Order
    ) -> tuple[LoadPlan, bool]:
        """Finds every key, checks that it may be served, pins its slot, and submits the load if one
        job of the engine can move it.  Also returns whether proven objects are verified.
        """
        core, once, job = self._core, self._core.config.verify != "off", None
        every = core.config.verify == "always" or self._verifies_every()
        is_ours = memory.path is None
        jobs, start = core.slot_jobs, core.planner.begin
        plan = LoadPlan(len(keys), core.layers, jobs.words + 1 if is_ours else 0, 1)
        try:
            if not is_ours:
                start(keys, every, plan)
            else:
                ended = partial(self.settle, progress, plan, memory)
                job = core.engine.open_job(NO_STATUS, (plan, memory), ended)
                progress.job, progress.plan = job, plan
                if jobs.has_prps:
                    jobs.common.descriptors_max = core.engine.descriptors_of(memory)
                when = order.get("held", False), order.get("ahead", False)
                its = *when, addressof(memory.iocb), job.tag, addressof(job.native)
                start(keys, every, plan, jobs.handle, pages, (once, *its))
                if plan.refused == BAD_PAGES:
                    pages = memory.check_pages(pages, once=once)
                    start(keys, every, plan, jobs.handle, pages, (0, *its))
            if plan.refused:
                core.engine.check_started(None, plan.refused)
        except PageRangeError:
            raise
        except LookupError as error:
            raise _missing(error, len(keys)) from None
        finally:
            if job is not None and not job.native:  # the load failed, or takes other jobs
                core.engine.forget_job(job)
                progress.job, progress.plan = None, None  # or a cycle keeps the memory alive
        self.begun += 1
        core.counters.load_runs += plan.runs
        return plan, every

    def _load_parts(
        self,
        progress: LoadProgress,
        batch: _Pages,
        memory: PagedMemory | None,
        every: bool,
        order: Order,
    ) -> None:
        """Submits a load that one native call cannot: of several kinds of rows, or by a path.

        memory: as for `settle`.
        """
        unproven: Mask | None = None
        jobs = Countdown(lambda: self.settle(progress, batch.plan, memory, unproven=unproven))
        progress.record_status = np.zeros(progress.keys, np.uint32)
        try:
            unproven, parts = partition(batch.plan.marks, every)
            if len(parts) > 2 and batch.memory.path is not None:  # two may fill a GPU's staging,
                order = {**order, "held": False}  # and are granted once all are submitted
            for part in parts:
                self._load_part(progress, batch, part, jobs, order)
        except BaseException:
            progress.cancel(self._core.config.timeout_s)
            raise
        finally:
            jobs.end()

    def _load_part(
        self, progress: LoadProgress, batch: _Pages, part: PartRows, jobs: Countdown, order: Order
    ) -> None:
        core = self._core
        rows, unknown, verify, whole = part
        slots, pages = batch.slots, batch.pages
        digests = batch.plan.digests.copy() if verify else None  # to be completed
        if rows.size != slots.size:
            slots, pages = slots[rows], pages[rows]
            digests = None if digests is None else digests[rows]
        # Before the data, so that the digests are there when the first layer is.
        reads = self._start_records(batch, rows[unknown]) if unknown.size else []
        jobs.add()
        try:
            job = core.submitter(batch.memory).submit(
                OPCODE_READ,
                core.extents(slots),
                pages,
                batch.memory,
                digests=digests,
                compare=verify,
                gated=unknown.size > 0,
                priority=PRIORITY_LOAD,
                timeout_s=core.config.timeout_s,
                on_released=jobs.end,
                **order,
            )
        except BaseException:
            jobs.end()
            for read in reads:
                read.release(self._table)
            raise
        if core.is_remote(batch.memory):
            core.moved_elsewhere(OPCODE_READ, rows.size)
        loaded = LoadPart(job, rows, whole)
        progress.parts.append(loaded)
        if digests is None or not unknown.size:
            return
        gate = _Gate(progress, batch, loaded, digests, unknown, reads)
        if batch.memory.path is None or core.is_remote(batch.memory):
            self._open_gate(gate)
            return
        jobs.add()
        # A stream waits for these pages instead of the caller, who goes on at once.
        thread = threading.Thread(target=self._open_later, args=(gate, jobs), daemon=True)
        try:
            start_thread(thread, "tutti-records")
        except BaseException:
            jobs.end()
            for read in reads:
                read.release(self._table)
            raise

    def _open_gate(self, gate: _Gate) -> None:
        """Takes the missing digests from the records, and lets the job compare them."""
        job, rows, unknown = gate.part.job, gate.rows, gate.unknown
        try:
            gate.digests[unknown], gate.progress.record_status[rows] = self._finish_records(
                gate.batch, rows, gate.reads
            )
        except BaseException:
            job.cancel()
            raise
        job.open_gate()

    def _open_later(self, gate: _Gate, jobs: Countdown) -> None:
        """As `_open_gate`, on a thread of its own: the ticket reports an error."""
        try:
            self._open_gate(gate)
        except Exception as error:
            _log.warning("the records of a load could not be read: %s", error)
            late = isinstance(error, DeviceTimeout)
            gate.progress.record_status[gate.rows] = STATUS_TIMED_OUT if late else STATUS_CANCELLED
        finally:
            jobs.end()

    def _start_records(self, batch: _Pages, rows: Slots) -> list[_RecordRead]:
        """Starts to read the records of rows, as far as staging is free; one block at least."""
        reads: list[_RecordRead] = []
        most, timeout_s = self._table.block_records, self._core.config.timeout_s
        for start in range(0, rows.size, most):
            part = rows[start : start + most]
            try:
                block = self._table.reserve(0.0 if reads else timeout_s)
            except DeviceTimeout:
                if reads:
                    break
                raise
            try:
                job = self._table.read(block, batch.slots[part], timeout_s=timeout_s)
            except BaseException:
                self._table.release(block)
                for read in reads:
                    read.release(self._table)
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
        slots, sequences = batch.slots[read.rows], batch.plan.sequences[read.rows]
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

    def settle(
        self,
        progress: LoadProgress,
        plan: LoadPlan,
        memory: PagedMemory | None,
        _: object = None,
        *,
        unproven: Mask | None = None,
        status: U32 | None = None,
    ) -> None:
        """All jobs of a load were released: unpins, proves and quarantines.

        memory: None where another process moved the pages.  unproven: mask of rows, if there are
        some.  status: of the pages, (n,); by default that of the jobs.
        """
        core, slots = self._core, plan.slots
        status = progress.status(STATUS_CANCELLED) if status is None else status
        failed = int(np.count_nonzero(status))
        loaded = progress.keys - failed
        with core.lock:
            core.index.unpin(slots)
            self.ended += 1
            core.counters.loaded += loaded
            core.counters.payload_read_nbytes += loaded * core.object_nbytes
            if failed or unproven is not None or self._reclaimer.faults.unread:
                self._judge(slots, unproven, status)
        progress.settle()
        core.end(memory)

    def _judge(self, slots: Slots, unproven: Mask | None, status: U32) -> None:
        """Proves, removes or quarantines objects by the result of a load.  Lock held."""
        core, index = self._core, self._core.index
        wrong = (status == STATUS_DIGEST_MISMATCH) | (status == STATUS_UNRECOVERED_READ)
        failed = (status != 0) & (status != STATUS_NOT_BEGUN)
        core.counters.load_errors += int(np.count_nonzero(failed))
        core.counters.mismatches += int(np.count_nonzero(status == STATUS_DIGEST_MISMATCH))
        if unproven is not None:
            proven = np.unique(slots[(status == 0) & unproven])
            proven = proven[index.state[proven] == SlotState.UNPROVEN]
            index.set_state(proven, SlotState.READY)
            core.counters.proven += proven.size
        self._reclaimer.faults.of_load(slots, status)
        slots = np.unique(slots[wrong])
        self._reclaimer.quarantine(slots[index.state[slots] == SlotState.READY])
        # A torn write does not condemn the slot.
        torn = slots[index.state[slots] == SlotState.UNPROVEN]
        self._reclaimer.discard(torn[index.pins[torn] == 0])


def _missing(error: LookupError, keys: int) -> KeyMissing:
    return KeyMissing(
        f"key {error} of {keys} is not in the pool; ask match() which prefix is, and pin it if time"
        " passes before the load"
    )


@dataclass(frozen=True)
class _RecordRead:
    """Records of some rows on their way into a staging block."""

    block: int
    job: Job
    rows: Slots

    def release(self, table: RecordTable) -> None:
        """Releases the block, once the device can no longer write to it."""
        self.job.on_released(lambda _: table.release(self.block))
