"""Frees slots: evicts ahead into a reserve, voids records before reuse, quarantines.

Everything here is driven by completions, so a put normally finds free slots and does not wait.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from functools import partial

import numpy as np

from tutti.base.arrays import Keys, Mask, Slots
from tutti.errors import DeviceTimeout, PoolClosed, TuttiError
from tutti.gio_uring.job import Job
from tutti.medium.slot_record import COUNTER_MAX, RecordContent, RecordState
from tutti.placement.eviction import reserve_slots
from tutti.placement.index import SlotState
from tutti.pool.record_table import RecordTable
from tutti.transfers.core import Core
from tutti.transfers.member_faults import MemberFaults

_log = logging.getLogger(__name__)

_BLOCKS = 3
_TRIES = 3
NO_SLOTS: Slots = np.zeros(0, np.int64)


class Reclaimer:
    """Voids and quarantines slots of one pool.  Methods are called with the core's lock held."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._table = RecordTable(core.engine, core.members, blocks=_BLOCKS)
        self._queue: deque[tuple[Slots, SlotState, int]] = deque()
        self._nothing_at: tuple[int, ...] = ()
        self._active = 0
        self._voiding = 0
        self.returning = 0  # slots that are free once their blocks are deallocated
        self.faults = MemberFaults(core)
        self.reserve_slots = reserve_slots(core.index.slots)
        core.refill = self.refill

    def close(self) -> None:
        """Releases the staging memory; nothing may be in flight."""
        self._core.refill = lambda: None  # breaks a cycle of references
        self._table.close()

    @property
    def busy(self) -> bool:
        """Whether slots are on their way to being free."""
        return self._active > 0 or bool(self._queue) or self.returning > 0

    def make_room(self, keys: Keys, timeout_s: float, kept: Slots) -> None:
        """Evicts until a slot is free for each key, or as many as can be evicted in time.

        kept: slots that are not evicted.
        Waits, with the lock released, while slots are on their way to being free.
        """
        core, n, begun = self._core, len(keys), self._core.index.uses
        self.top_up(n, kept, keys)
        if core.allocator.free_slots < n:
            core.counters.space_waits += self.busy
            core.changed.wait_for(
                lambda: core.allocator.free_slots >= n or not self.busy or core.closing, timeout_s
            )
            if core.history.by_uses:  # other operations have come: this is still the same use
                core.history.missed(keys, core.index.uses, begun)
        core.check_open()

    def refill(self) -> None:
        """Makes room for what is expected, before it is put."""
        core = self._core
        with core.lock:
            expected, core.expected = core.expected, 0
            if not expected or not core.ready or core.closing:
                return
            try:
                self.top_up(expected)
            except BaseException as error:  # of the user's policy; the next put raises it
                core.guard.caught("the eviction ahead of a put", error)

    def top_up(self, extra: int, kept: Slots = NO_SLOTS, keys: Keys | None = None) -> None:
        """Evicts when fewer slots than the reserve and ``extra`` are free or on their way to that.

        Evicting twice the reserve at a time keeps the cost of choosing, O(slots), rare.  While uses
        decide, a put evicts only objects that are used less than its pages, without a reserve.
        """
        core, paused, history = self._core, self.faults.paused, self._core.history
        history.choose()
        if history.by_uses and keys is None:
            return
        reserve = 0 if history.by_uses else self.reserve_slots
        available = core.allocator.free_slots + self._voiding + self.returning
        if available >= reserve + extra:
            return
        state = (core.lookup_pins.changes, core.counters.stored, core.index.unpins, *paused)
        if state == self._nothing_at and not kept.size:
            return
        limit = 256  # more uses than are counted
        if history.by_uses and keys is not None:
            limit = history.missed(keys, core.index.uses)
            if limit == 1:
                return  # every object has been used
        among = history.uses < limit
        among[kept] = False
        evicted = self.evict(2 * reserve + extra - available, among)
        if not (evicted or kept.size or history.by_uses):
            self._nothing_at = state  # looking again would find the same

    def evict(self, n: int, among: Mask) -> int:
        """Evicts at least ``n`` of a mask of slots if the policy finds so many; returns how many.

        None of a member that is paused: no put could use its slots.
        """
        core = self._core
        among.reshape(core.members.count, -1)[list(self.faults.paused)] = False
        victims = core.choose_victims(n, among)
        self.discard(np.sort(victims))
        return victims.size

    def void(self, slots: Slots) -> None:
        """Writes void records for slots in state VOIDING; they are free once that is done."""
        self._voiding += slots.size
        self._enqueue(slots, SlotState.VOIDED)

    def discard(self, slots: Slots) -> None:
        """Removes the objects from slots, and frees the slots."""
        self._core.remove(slots, SlotState.VOIDING)
        self.void(slots)

    def quarantine(self, slots: Slots) -> None:
        """Takes slots that own a key out of use permanently, on the medium as well."""
        self._core.counters.quarantined += slots.size
        self._core.remove(slots, SlotState.QUARANTINED)
        self._enqueue(slots, SlotState.QUARANTINED)

    def quarantine_again(self, slots: Slots) -> None:
        """Writes the records of slots in quarantine once more: others may have replaced them."""
        self._enqueue(slots, SlotState.QUARANTINED)

    def _enqueue(self, slots: Slots, outcome: SlotState, tries: int = 0) -> None:
        most = self._table.block_records
        for start in range(0, slots.size, most):
            self._queue.append((slots[start : start + most], outcome, tries))
        self._issue()

    def _issue(self) -> None:
        core = self._core
        while self._queue and self._active < _BLOCKS:
            slots, outcome, tries = self._queue.popleft()
            block = self._table.reserve(0.0)
            self._active += 1
            core.in_flight += 1
            state = RecordState.VOID if outcome == SlotState.VOIDED else RecordState.QUARANTINED
            # These records name no object, so they may share the last number.
            first = min(core.sequence, COUNTER_MAX - 1)
            sequences = np.minimum(first + np.arange(slots.size, dtype=np.uint64), COUNTER_MAX - 1)
            core.sequence = min(first + slots.size, COUNTER_MAX)
            content = RecordContent(slots, sequences, state, access_64s=core.now_64s())
            settle = partial(self._settle, block, slots, outcome, tries)
            is_durable, timeout_s = core.config.durability == "flush", core.config.timeout_s
            try:
                self._table.write(block, content, settle, fua=is_durable, timeout_s=timeout_s)
            except TuttiError as error:
                self._table.release(block)
                self._active -= 1
                self._lose(slots, outcome)
                core.end()
                if isinstance(error, PoolClosed):
                    self._queue.clear()
                else:
                    _log.warning("%d slots stay out of use: %s", slots.size, error)

    def _settle(self, block: int, slots: Slots, outcome: SlotState, tries: int, job: Job) -> None:
        """Ends a write of records: frees voided slots, tries failed records up to _TRIES times."""
        core = self._core
        with core.lock:
            status = self._table.statuses(job, slots)
            failed = status != 0
            self._table.release(block)
            self._active -= 1
            if outcome == SlotState.VOIDED:
                done = slots[~failed]
                self._voiding -= done.size
                core.index.set_state(done, SlotState.VOIDED)
                core.allocator.free(done)
            if failed.any():
                if tries + 1 < _TRIES:
                    self._enqueue(slots[failed], outcome, tries + 1)
                else:
                    self._lose(slots[failed], outcome)
            if failed.any() or core.members.lost:  # a lost one keeps no slot that is free now
                self.faults.of_write(slots, status)
            self._issue()
            core.end()

    def _lose(self, slots: Slots, outcome: SlotState) -> None:
        """Keeps slots whose records cannot be written out of use until the next open reads them."""
        core = self._core
        is_lost = np.isin(slots // core.geometry.slots, list(core.members.lost))
        core.leave_open |= not is_lost.all()
        if outcome == SlotState.VOIDED:
            self._voiding -= slots.size
            core.counters.quarantined += slots.size
            core.index.set_state(slots, SlotState.QUARANTINED)


def deallocate_empty(core: Core, reclaimer: Reclaimer, gone: Slots) -> None:
    """Deallocates those groups of these slots in which all slots are free.

    Nothing is put into them meanwhile, nor later in this process if the medium does not answer.
    """
    size = core.geometry.group_slots
    groups = np.unique(gone // size)
    if not groups.size:
        return
    with (
        contextlib.suppress(TuttiError),  # not needed during a clear or close, or after a failure
        core.admitted(core.config.timeout_s),
    ):
        with core.lock:
            slots = (groups[:, None] * size + np.arange(size)).astype(np.int64)
            empty = core.allocator.is_free(slots).all(axis=1)
            groups, slots = groups[empty], slots[empty].reshape(-1)
            if not groups.size:
                return
            core.allocator.take(slots)
            reclaimer.returning += slots.size
        is_answered = True
        try:
            core.deallocate(groups)
        except DeviceTimeout as error:
            is_answered = False
            _log.warning("%d empty slots stay out of use: %s", slots.size, error)
        finally:
            with core.lock:
                reclaimer.returning -= slots.size
                if is_answered:
                    core.allocator.free(slots)
                core.changed.notify_all()
