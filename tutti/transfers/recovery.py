"""Recovers the index of a pool: from snapshots, written at close, else from its slot tables."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from tutti.errors import CapacityError, MediumError, PoolClosed, PoolCorrupt
from tutti.medium.slot_record import (
    FLAG_DIGESTS,
    FLAG_PINNED,
    RECORD_DTYPE,
    RecordState,
    check_records,
)
from tutti.medium.superblock import (
    SNAPSHOT_ENTRY_DTYPE,
    SnapshotDescriptor,
    Superblock,
    decode_snapshot,
    encode_snapshot,
)
from tutti.placement.index import MISSING, SlotState
from tutti.pool.block_io import BlockIo
from tutti.transfers.core import Core
from tutti.transfers.reclaim import Reclaimer

_log = logging.getLogger(__name__)

Entries = npt.NDArray[np.void]


def recover(
    core: Core,
    reclaimer: Reclaimer,
    found_as: Sequence[Superblock | None],
    *,
    proven: bool,
    before_ready: Sequence[Callable[[], None]],
) -> None:
    """Fills the index.

    found_as: the superblocks as they were before the pool was marked open.
    proven: they show that the pool was closed cleanly, so its records can be trusted.
    before_ready: called with the lock held when the index is complete, before any transfer begins.
    Reads without the lock, so look-ups miss meanwhile; then fills the index in one step.
    """
    members = core.members
    snapshots = found_as if proven else [None] * members.count
    if len(members.present) == 1:
        found = [_member_entries(core, m, snapshots[m]) for m in members.present]
    else:
        found = _all_entries(core, snapshots)
    entries = np.concatenate([part for part, _ in found])
    top = max(highest for _, highest in found)
    with core.lock:
        core.sequence = max(core.sequence, members.next_sequence, top + 1)
        _take_over(core, reclaimer, entries, proven)
        core.quotas.recovered(core.now_64s() - int(entries["access_64s"].max(initial=0)) - 1)
        for call in before_ready:
            call()
        core.ready = True
        core.changed.notify_all()


def _all_entries(core: Core, snapshots: Sequence[Superblock | None]) -> list[tuple[Entries, int]]:
    """What the members hold, several at a time.  Raises CapacityError without threads."""
    present = core.members.present
    with ThreadPoolExecutor(max_workers=min(4, len(present))) as pool:
        try:
            return list(pool.map(lambda m: _member_entries(core, m, snapshots[m]), present))
        except RuntimeError as error:
            raise CapacityError(
                "cannot start threads for the recovery; end other work, or raise the limit of "
                "threads (ulimit -u)"
            ) from error


def write_snapshots(core: Core) -> list[SnapshotDescriptor | None]:
    """Writes what the index knows to every member; the pool must be quiet."""
    members, index = core.members, core.index
    geometry = members.geometry
    entries = _entries_of(core)
    descriptors: list[SnapshotDescriptor | None] = [None] * members.count
    owner, local = geometry.split_members(entries["slot"].astype(np.int64))
    assert index.slots == members.count * geometry.slots
    for member in members.present:
        mine = entries[owner == member]
        mine["slot"] = local[owner == member]
        superblock = members.superblock(member)
        raw, descriptor = encode_snapshot(mine, superblock.identity, superblock.generation)
        members.io.write(members.nsid(member), geometry.snapshot_offset, raw)
        descriptors[member] = descriptor
    return descriptors


def _entries_of(core: Core) -> Entries:
    index = core.index
    held = index.resident() | (index.state == SlotState.QUARANTINED)
    slots = np.flatnonzero(held)
    entries = np.zeros(slots.size, SNAPSHOT_ENTRY_DTYPE)
    entries["slot"] = slots
    entries["key"] = index.key[slots]
    entries["sequence"] = index.sequence(slots)
    entries["depth"] = index.depth[slots]
    # The order of accesses is what counts: one use stands for one unit of time, the last for now.
    age = np.minimum(index.uses - index.access[slots].astype(np.int64), core.now_64s())
    entries["access_64s"] = core.now_64s() - age + age.min(initial=core.now_64s())
    quarantined = index.state[slots] == SlotState.QUARANTINED
    entries["state"] = np.where(quarantined, RecordState.QUARANTINED, RecordState.READY)
    entries["flags"] = np.where(index.has_digests(slots) & ~quarantined, FLAG_DIGESTS, 0)
    entries["flags"] |= np.where(index.pinned[slots], FLAG_PINNED, 0).astype(np.uint8)
    entries["expiry_64s"] = index.expiry[slots]
    entries["tenant"] = index.tenant[slots]
    return entries


def _member_entries(core: Core, member: int, superblock: Superblock | None) -> tuple[Entries, int]:
    """What one member holds, with pool-wide slot numbers, and its highest sequence number."""
    if superblock is not None and superblock.snapshot is not None:
        entries = _read_snapshot(core, member, superblock, superblock.snapshot.nbytes)
        if entries is not None:
            return entries, 0
        entries, top = scan_member(core, member)
        if entries.size < superblock.snapshot.entries:
            _log.warning(
                "%s: %d of the %d records of the last clean close are torn or overwritten; their"
                " objects are lost",
                core.members.name(member),
                superblock.snapshot.entries - entries.size,
                superblock.snapshot.entries,
            )
        return entries, top
    return scan_member(core, member)


def _read_snapshot(core: Core, member: int, superblock: Superblock, nbytes: int) -> Entries | None:
    members = core.members
    try:
        raw = members.io.read(members.nsid(member), members.geometry.snapshot_offset, nbytes)
        entries = decode_snapshot(raw, superblock, members.name(member)).copy()
    except (PoolCorrupt, MediumError) as error:
        _log.warning("the slot table is scanned: %s", error)
        return None
    entries["slot"] += np.uint64(member * members.geometry.slots)
    return entries


def scan_member(core: Core, member: int) -> tuple[Entries, int]:
    """Reads the slot table of a member: ready and quarantined slots, highest sequence number."""
    members = core.members
    geometry, identity = members.geometry, members.identity(member)
    io = BlockIo(core.engine, timeout_s=core.config.timeout_s)
    parts: list[Entries] = []
    top, done = 0, 0
    try:
        for chunk, bad in io.scan(members.nsid(member), geometry.table_offset, geometry.slots):
            if core.closing:
                raise PoolClosed("the pool was closed during recovery; open it again")
            records = chunk.view(RECORD_DTYPE)
            slots = np.arange(done, done + records.size)
            # A record that cannot be read may be of any state; its slot is not used.
            verdict = check_records(records, slots, identity)
            verdict = np.where(bad == 0, verdict, RecordState.QUARANTINED)
            counted = (verdict >= RecordState.READY) & (verdict <= RecordState.QUARANTINED)
            counted &= bad == 0
            if counted.any():
                top = max(top, int(records["sequence"][counted].max()))
            rows = np.flatnonzero(
                (verdict == RecordState.READY) | (verdict == RecordState.QUARANTINED)
            )
            part = np.zeros(rows.size, SNAPSHOT_ENTRY_DTYPE)
            for name in ("key", "sequence", "depth", "access_64s"):
                part[name] = records[name][rows]
            part["slot"] = slots[rows] + member * geometry.slots
            part["state"] = verdict[rows]
            part["flags"] = records["flags"][rows] & (FLAG_DIGESTS | FLAG_PINNED)
            part["expiry_64s"] = records["expiry_64s"][rows]
            part["tenant"] = records["tenant"][rows] & 0xFFFF
            parts.append(part)
            done += records.size
    finally:
        io.close()
    return np.concatenate(parts), top


def _take_over(core: Core, reclaimer: Reclaimer, entries: Entries, proven: bool) -> None:
    """Enters what was found: the highest sequence number of a key wins, losers are voided."""
    index, geometry = core.index, core.geometry
    for member in range(core.members.count):
        if core.members.superblocks[member] is None:
            lost = np.arange(member * geometry.slots, (member + 1) * geometry.slots)
            core.allocator.take(lost)
            index.set_state(lost, SlotState.QUARANTINED)
    slots = entries["slot"].astype(np.int64)
    core.allocator.take(slots)
    bad = entries["state"] == RecordState.QUARANTINED
    index.set_state(slots[bad], SlotState.QUARANTINED)
    has_digests = (entries["flags"] & FLAG_DIGESTS) != 0
    order = np.flatnonzero(~bad)
    order = order[np.argsort(entries["sequence"][order], kind="stable")[::-1]]
    taken = index.insert(
        slots[order],
        np.ascontiguousarray(entries["key"][order]),
        entries["sequence"][order],
        entries["depth"][order],
        state=SlotState.READY if proven else SlotState.UNPROVEN,
        access=entries["access_64s"][order],
        has_digests=has_digests[order],
    )
    core.history.recovered(index.uses)
    mine = order[taken == MISSING]
    index.describe(
        slots[mine],
        tenant=entries["tenant"][mine],
        expiry=entries["expiry_64s"][mine],
        pinned=(entries["flags"][mine] & FLAG_PINNED) != 0,
    )
    lost_rows = order[taken != MISSING]
    losers = slots[lost_rows]
    winners = taken[taken != MISSING]
    even = winners[index.sequence(winners) == entries["sequence"][lost_rows]]
    unprovable = np.zeros(0, np.int64)
    if not proven:
        unprovable = slots[order][(taken == MISSING) & ~has_digests[order]]
    gone = np.union1d(even, unprovable)
    index.remove(gone, SlotState.VOIDING)
    index.set_state(losers, SlotState.VOIDING)
    doomed = np.sort(np.concatenate([gone, losers]))
    if doomed.size:
        reclaimer.void(doomed)
