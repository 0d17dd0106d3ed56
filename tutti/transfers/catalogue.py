"""Operations of an operator on a pool's objects: list, delete, pin, and limit their life.

Works on the index and on slot records alone: nothing here reads or writes KV.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tutti.base.arrays import Keys, Slots
from tutti.base.checks import optional, seconds, takes, text
from tutti.base.interrupts import uninterrupted
from tutti.base.process import Owned
from tutti.base.threads import start_thread
from tutti.errors import CapacityError, DeviceTimeout, MediumError
from tutti.gio_uring.job import Job
from tutti.medium.keys import as_keys
from tutti.medium.slot_record import (
    EXPIRY_UNIT_S,
    FLAG_DIGESTS,
    RecordContent,
    RecordState,
    expiry_of,
    tenant_of,
)
from tutti.placement.index import MISSING, SlotState
from tutti.pool.record_table import RecordTable
from tutti.transfers.core import Core
from tutti.transfers.expiry import Expiry
from tutti.transfers.reclaim import Reclaimer, deallocate_empty

_PAUSE_S = 0.01


@dataclass(frozen=True)
class ObjectInfo:
    """One object as the catalogue shows it.

    key, parent: 16 bytes; parent is zeros for the first page of a chain.  depth: pages before it.
    nbytes: payload.  age_s: since it was written, in steps of 64 s.  hits: loads since the pool was
    opened, at most 65535.  tenant: number of its namespace.  expires_s: until it is removed, None
    for never.  proven: needs no verification before it is served.  has_digests: can be verified.
    """

    key: bytes
    parent: bytes
    depth: int
    nbytes: int
    age_s: int
    hits: int
    tenant: int
    pinned: bool
    expires_s: int | None
    proven: bool
    has_digests: bool


class Catalogue(Owned):
    """The catalogue of one open pool.  Thread-safe.

    Keys are uint8 (n, 16); those that are not in the pool are skipped.
    """

    def __init__(self, core: Core, reclaimer: Reclaimer) -> None:
        self._core = core
        self._reclaimer = reclaimer
        self._table = RecordTable(core.engine, core.members, blocks=1)
        self._changing = threading.Lock()  # one thread at a time reads and rewrites records
        self._pinning = threading.Lock()  # one thread at a time checks pin_share and pins
        self.expiry = Expiry(core, reclaimer)

    def close(self) -> None:
        """Releases the staging memory; nothing may be in flight."""
        self.expiry.stop(1.0)
        self._table.close()

    @takes(namespace=optional(text))
    def keys(self, namespace: str | None = None) -> Keys:
        """Keys of all objects, or of one namespace ("" for none), in the order of their slots."""
        core = self._core
        with core.lock:
            core.check_open()
            held = core.index.resident()
            if namespace is not None:
                held &= core.index.tenant == tenant_of(namespace)
            return core.index.key[np.flatnonzero(held)].copy()

    def keys_by_use(self) -> Keys:
        """Keys of all objects, the least recently used first; of equal use in order of slots."""
        core = self._core
        with core.lock:
            core.check_open()
            slots = np.flatnonzero(core.index.resident())
            slots = slots[np.argsort(core.index.access[slots], kind="stable")]
            return core.index.key[slots].copy()

    @uninterrupted()
    def objects(self, keys: Keys) -> list[ObjectInfo]:
        """Describes objects by their records, in the order of their slots.

        Raises MediumError for records that cannot be read, DeviceTimeout.
        """
        return [info for info, _ in self.described(keys)]

    def described(self, keys: Keys) -> list[tuple[ObjectInfo, np.void]]:
        """As ``objects``, each with its record."""
        found: list[tuple[ObjectInfo, np.void]] = []
        for slots, records in self._records(keys):
            found += zip(self._infos(slots, records), records.copy(), strict=True)
        return found

    @uninterrupted()
    @takes(timeout_s=seconds)
    def delete(self, keys: Keys, *, timeout_s: float = 30.0) -> int:
        """Removes objects, pinned ones too; returns how many, once their records are voided.

        Waits for transfers of these objects, and raises DeviceTimeout when they do not end in time;
        then for the medium to deallocate empty groups, which otherwise goes on.
        """
        core = self._core
        keys = as_keys(keys)
        deadline_s = time.monotonic() + timeout_s
        gone = np.zeros(0, np.int64)
        with core.admitted(timeout_s), core.lock:
            slots = self._resident(keys)
            while slots.size:
                idle = slots[core.index.pins[slots] == 0]
                core.lookup_pins.forget(idle)
                self._reclaimer.discard(np.sort(idle))
                gone = np.concatenate((gone, idle))
                slots = self._resident(keys)
                if time.monotonic() >= deadline_s:
                    break
                if slots.size:
                    core.changed.wait(_PAUSE_S)
                    slots = self._resident(keys)
            voided = core.changed.wait_for(
                lambda: not (core.index.state[gone] == SlotState.VOIDING).any(),
                max(_PAUSE_S, deadline_s - time.monotonic()),
            )
        with contextlib.suppress(CapacityError):  # the objects are gone also without a thread
            rest = threading.Thread(
                target=deallocate_empty, args=(core, self._reclaimer, gone), daemon=True
            )
            start_thread(rest, "tutti-deallocate")  # the medium may take long
            rest.join(max(0.0, deadline_s - time.monotonic()))
        if slots.size or not voided:
            raise DeviceTimeout(
                f"{gone.size} objects were removed, but their records may not be voided yet;"
                f" {slots.size} are still being transferred: try again"
            )
        return int(gone.size)

    @uninterrupted()
    def pin(self, keys: Keys) -> int:
        """Protects objects from eviction until ``unpin``, also after a restart; returns how many.

        Raises CapacityError where that exceeds ``pin_share`` of the pool: nothing is pinned then.
        """
        core, keys = self._core, as_keys(keys)
        with self._pinning:
            with core.lock:
                slots = self._resident(keys)
                new = int(np.count_nonzero(~core.index.pinned[slots]))
                most = int(core.index.slots * core.config.pin_share)
                if core.lookup_pins.reserved + new > most:
                    raise CapacityError(
                        f"{core.lookup_pins.reserved} objects are pinned and {new} more cannot"
                        f" be pinned, the limit is {most}; unpin some, or raise pin_share"
                    )
            return self._change(keys, pinned=True)

    @uninterrupted()
    def unpin(self, keys: Keys) -> int:
        """Undoes ``pin``; returns how many of these objects are in the pool."""
        return self._change(keys, pinned=False)

    @uninterrupted()
    def expire(self, keys: Keys, ttl_s: float | None) -> int:
        """Removes objects in ``ttl_s`` seconds, rounded up to 64 s, or never; returns how many."""
        expiry = expiry_of(ttl_s)
        self.expiry.watch(expiry > 0)
        return self._change(keys, expiry=expiry)

    def recount(self) -> None:
        """After recovery: counts pinned objects, and watches those that expire.  Lock held."""
        self._core.lookup_pins.reserved = int(np.count_nonzero(self._core.index.pinned))
        self.expiry.watch(bool(self._core.index.expiry.any()))

    def _resident(self, keys: Keys) -> Slots:
        """Distinct slots of keys that are there, ascending.  Lock held."""
        index = self._core.index
        slots = np.unique(index.find(keys))
        slots = slots[slots != MISSING]
        held: Slots = slots[index.resident()[slots]]
        return held

    def _change(self, keys: Keys, *, pinned: bool | None = None, expiry: int | None = None) -> int:
        """Rewrites records; the index follows once they are on the medium."""
        core, count = self._core, 0
        for slots, records in self._records(keys):
            index = core.index
            pins = index.pinned[slots] if pinned is None else np.full(slots.size, pinned)
            expiries = index.expiry[slots] if expiry is None else np.full(slots.size, expiry)
            self._write(slots, records, pins, expiries)
            with core.lock:
                # A load may have found damage meanwhile, and taken its slot out of use.
                left = index.resident()[slots]
                self._reclaimer.quarantine_again(slots[~left])
                slots, pins, expiries = slots[left], pins[left], expiries[left]
                core.lookup_pins.reserve(
                    int(np.count_nonzero(pins) - np.count_nonzero(index.pinned[slots]))
                )
                index.describe(slots, tenant=index.tenant[slots], expiry=expiries, pinned=pins)
            count += slots.size
        return count

    def _records(self, keys: Keys) -> Iterator[tuple[Slots, npt.NDArray[np.void]]]:
        """Yields (slots, their records), a block at a time; the objects are pinned meanwhile."""
        core, keys = self._core, as_keys(keys)
        most = self._table.block_records
        for start in range(0, len(keys), most):
            some = np.ascontiguousarray(keys[start : start + most])
            with core.admitted(core.config.timeout_s), self._changing:
                with core.lock:
                    slots = self._resident(some)
                    core.index.pin(slots)
                try:
                    yield self._read(slots)
                finally:
                    with core.lock:
                        core.index.unpin(slots)
                        core.changed.notify_all()

    def _read(self, slots: Slots) -> tuple[Slots, npt.NDArray[np.void]]:
        """Slots and their records, without those whose record is not that of the object."""
        core, timeout_s = self._core, self._core.config.timeout_s
        block = self._table.reserve(timeout_s)
        try:
            job = self._table.read(block, slots, timeout_s=timeout_s)
        except BaseException:
            self._table.release(block)
            raise
        if not job.wait_released(2 * timeout_s):
            job.on_released(lambda _: self._table.release(block))
            raise DeviceTimeout("the records were not read in time; try again")
        try:
            if (bad := np.flatnonzero(job.page_status)).size:
                raise MediumError(f"{bad.size} records cannot be read; check the device")
            digests = np.zeros((slots.size, core.layers), np.uint64)
            keys, sequences = core.index.key[slots], core.index.sequence(slots)
            right = self._table.check(block, slots, keys, sequences, digests) != 0
            return slots[right], self._table.content(block, slots.size)[right]
        finally:
            self._table.release(block)

    def _write(
        self,
        slots: Slots,
        records: npt.NDArray[np.void],
        pinned: npt.NDArray[np.bool_],
        expiry: npt.NDArray[np.uint32],
    ) -> None:
        core, timeout_s = self._core, self._core.config.timeout_s
        has = (records["flags"] & FLAG_DIGESTS) != 0
        for rows in (np.flatnonzero(has), np.flatnonzero(~has)):
            if not rows.size:
                continue
            digests = records["digests"][rows, : core.layers] if has[rows[0]] else None
            content = RecordContent(
                slots[rows],
                records["sequence"][rows],
                RecordState.READY,
                keys=records["key"][rows],
                parents=records["parent"][rows],
                depths=records["depth"][rows],
                access_64s=records["access_64s"][rows],
                tenants=records["tenant"][rows],
                expiry_64s=expiry[rows],
                pinned=pinned[rows],
                digests=digests,
            )
            block = self._table.reserve(timeout_s)
            try:
                done = self._table.write(
                    block,
                    content,
                    lambda _, block=block: self._table.release(block),  # type: ignore[misc]
                    fua=core.config.durability == "flush",
                    timeout_s=timeout_s,
                )
            except BaseException:
                self._table.release(block)
                raise
            if not done.wait_released(2 * timeout_s):
                self._keep_until_written(slots[rows], done)
                raise DeviceTimeout("the records were not written in time; try again")
            if done.page_status.any():
                core.leave_open = True  # a record may be torn: the next open has to read them all
                raise MediumError("records cannot be written; check the device")

    def _keep_until_written(self, slots: Slots, job: Job) -> None:
        """A record that is written late must not replace that of the slot's next object."""
        core = self._core
        with core.lock:
            core.leave_open = True  # the index does not know whether it is written
            core.index.pin(slots)
            core.in_flight += 1

        def over(_: Job) -> None:
            with core.lock:
                core.index.unpin(slots)
                core.end()

        job.on_released(over)

    def _infos(self, slots: Slots, records: npt.NDArray[np.void]) -> list[ObjectInfo]:
        core, index = self._core, self._core.index
        nbytes, now = core.geometry.slice_nbytes * core.layers, core.now_64s()
        now_s = math.ceil(time.time())
        found = []
        for slot, record in zip(slots.tolist(), records, strict=True):
            expiry = int(index.expiry[slot])
            found.append(
                ObjectInfo(
                    key=record["key"].tobytes(),
                    parent=record["parent"].tobytes(),
                    depth=int(record["depth"]),
                    nbytes=nbytes,
                    age_s=max(0, now - int(record["access_64s"])) * EXPIRY_UNIT_S,
                    hits=int(index.hits[slot]),
                    tenant=int(index.tenant[slot]),
                    pinned=bool(index.pinned[slot]),
                    expires_s=expiry * EXPIRY_UNIT_S - now_s if expiry else None,
                    proven=bool(index.state[slot] == SlotState.READY),
                    has_digests=bool(record["flags"] & FLAG_DIGESTS),
                )
            )
        return found
