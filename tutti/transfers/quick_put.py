"""Batches of keys that are all absent, where there is room: a native call starts each, another
ends it.  Its records follow its data without Python in between.
"""

from __future__ import annotations

import ctypes
import errno
from collections.abc import Callable
from ctypes import addressof
from functools import partial

import numpy as np

from tutti.base.arrays import U32, U64, Slots
from tutti.gio_uring.engine import DIGEST_COMPUTE, PRIORITY_STORE
from tutti.gio_uring.job import Job, nanoseconds
from tutti.gio_uring.nvme_spec import OPCODE_WRITE
from tutti.medium.slot_record import COUNTER_MAX
from tutti.native import address, quick
from tutti.placement.index import SlotState
from tutti.pool.record_table import RecordTable
from tutti.pool.slot_jobs import PutStruct
from tutti.transfers.core import Core
from tutti.transfers.put_request import PutGrant, PutRequest
from tutti.transfers.tickets import NO_STATUS


class QuickPut:
    """The memory of one such batch at a time; each staging block of records has one.

    words: see tutti_put_start.  n: keys of the batch under way.
    """

    __slots__ = ("block", "flushes_failed", "layers", "n", "place", "words")

    def __init__(self, block: int, words: U64, layers: int) -> None:
        self.block, self.words, self.place, self.layers = block, words, address(words), layers
        self.n = 0
        self.flushes_failed = 0  # when it started

    @property
    def slots(self) -> Slots:
        """Slots of the keys, (n,)."""
        return self.words[: self.n].view(np.int64)

    @property
    def sequences(self) -> U64:
        """Their sequence numbers, (n,)."""
        return self.words[self.n : 2 * self.n]

    @property
    def digests(self) -> U64:
        """Digests of their slices, (n, layers)."""
        n = self.n
        return self.words[2 * n : (2 + self.layers) * n].reshape(n, self.layers)

    def status(self, *, of_records: bool) -> U32:
        """NVMe status of data or records, (n,)."""
        start = (2 + self.layers) * self.n + (self.n // 2 + 1) * of_records
        return self.words[start:].view(np.uint32)[: self.n]

    @property
    def is_chained(self) -> bool:
        """Whether the records were written if the data was."""
        return bool(self.words[(2 + self.layers) * self.n + 2 * (self.n // 2 + 1)])


class QuickPuts:
    """Starts and ends such batches.  The caller holds the core's lock.  blocks: of the table."""

    def __init__(self, core: Core, table: RecordTable, blocks: int) -> None:
        self._core, self._table = core, table
        self._superblocks: object = None
        self._put = put = PutStruct(
            tables=core.placer.tables,
            cache=addressof(core.digests.native),
            data=core.slot_jobs.common,
            records=table.writes,
            staging=table.staging_address,
            member_slots=core.geometry.slots,
            layers=core.layers,
        )
        put.data.opcode, put.data.priority = OPCODE_WRITE, PRIORITY_STORE
        put.data.digest = DIGEST_COMPUTE if core.config.verify != "off" else 0
        put.records.timeout_ns = nanoseconds(core.config.timeout_s)
        if core.config.durability == "flush":
            put.records.memory = 0  # a flush comes before the records
        self._handle = ctypes.byref(put)
        self._start = quick().tutti_put_start  # to find it takes a microsecond
        self._batch = (ctypes.c_uint64 * 10)()  # `struct tutti_put_batch`
        commands = put.data.slot_runs_max + put.records.slot_runs_max
        words, layers = core.layers + 11 + 3 * commands, core.layers
        n = 24 + table.block_records * words  # no memory before it is used
        self._puts = [QuickPut(b, np.empty(n, np.uint64), layers) for b in range(blocks)]

    def start(
        self,
        block: int,
        request: PutRequest,
        grant: PutGrant | None,
        ended: Callable[[QuickPut, Job], None],
    ) -> QuickPut | None:
        """Starts a batch of at most ``block_records`` keys, and calls back when its job was
        released; None where it is of another kind, and nothing changed.  block: of the table, which
        stays the caller's where nothing was started.  Raises as Engine.submit.
        """
        core, engine = self._core, self._core.engine
        n, memory, packed = request.n, request.memory, request.packed
        if request.tenant or request.expiry_64s or memory.path is not None:
            return None
        if request.digests is not None or not core.is_unlimited or core.sequence + n > COUNTER_MAX:
            return None
        started, held = self._puts[block], 0 if grant is None else 1 + grant.layers
        started.n = n
        keep = (started.words, packed, memory)
        job = engine.open_job(NO_STATUS, keep, partial(ended, started))
        try:
            if core.members.superblocks is not self._superblocks:
                self._look()
            its = addressof(memory.iocb), engine.descriptors_of(memory), addressof(job.native)
            first_page = block * self._table.block_records
            numbers = n, core.sequence, core.index.uses, core.now_64s(), first_page
            self._batch[:] = [*numbers, *its, job.tag, held]
            result = self._start(self._handle, self._batch, packed, started.place)
        except BaseException:
            engine.forget_job(job)
            raise
        if result > 0:
            core.sequence += n
            core.history.regretted += result - 1
            if grant is not None:  # a job that is never granted ends by its deadline
                core.guard.call("the grant of a put's layers", grant.begin, job, held - 1)
            return started
        engine.forget_job(job)
        if result < 0:
            assert result != -errno.EINVAL, "a free slot is in use"
            core.index.remove(started.slots, SlotState.VOIDED)
            core.allocator.free(started.slots)
            core.counters.store_errors += n
            engine.check_started(None, result)
        return None

    def end(self, started: QuickPut) -> bool:
        """Makes the objects ready; False if any of their data or records was not written."""
        return bool(quick().tutti_put_end(self._handle, started.n, started.place) == 0)

    def _look(self) -> None:
        """Takes the identity for records, which changes with the superblocks."""
        members = self._core.members
        self._identity = members.identity(members.present[0])  # keeps its memory alive
        self._put.identity = addressof(self._identity.struct)
        self._superblocks = members.superblocks
