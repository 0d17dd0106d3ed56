"""Checks a pool without changing one byte of it, and repairs what the check found.

The check reads superblocks, snapshots and slot tables, then every object whose record has digests,
and compares them slice by slice. Repair opens the pool as usual and loads the damaged objects,
which removes them: their slots are quarantined, or free again after an unclean close. It
quarantines those without digests itself. Then all of them are misses.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tutti import store
from tutti.base.arrays import U64, Rows
from tutti.base.terminal import ProgressFactory
from tutti.base.units import MiB
from tutti.errors import DeviceTimeout, MediumError, PoolCorrupt
from tutti.gio_uring.engine import Engine
from tutti.gio_uring.job import Job
from tutti.gio_uring.memory import DmaRegion
from tutti.gio_uring.nvme_spec import OPCODE_READ
from tutti.gio_uring.status import status_name
from tutti.medium.geometry import BLOCK_NBYTES
from tutti.medium.slot_record import (
    COUNTER_MAX,
    FLAG_DIGESTS,
    RECORD_DTYPE,
    RecordState,
    check_records,
    torn_records,
)
from tutti.medium.superblock import (
    SNAPSHOT_ENTRY_DTYPE,
    Superblock,
    check_members,
    choose_superblock,
    decode_snapshot,
)
from tutti.memory.host_memory import HostMemory
from tutti.pool.block_io import BlockIo, opened_io
from tutti.pool.member_controller import open_controller
from tutti.pool.members import Members
from tutti.pool.record_table import RecordTable
from tutti.transfers.core import Core
from tutti.transfers.store_config import StoreConfig

FINDINGS_MAX = 1000  # kept in a report; all of them are counted
_BATCHES = 2  # one is compared while the next is read
_MEMORY_NBYTES = 64 * MiB
_PROVE_OBJECTS = 64
_TIMEOUT_S = 60.0
_SEQUENCES_LEFT_MIN = 2**32
_RECORD_RIGHT, _RECORD_WITHOUT_DIGESTS = 1, 2  # results of RecordTable.check

Entries = npt.NDArray[np.void]
Verdict = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    kind: "superblock", "clear", "counter", "snapshot", "lost", "record", "payload" or "unreadable".
    slot: number within the member; -1, with an empty key, where the finding concerns no object.
    layers: those whose slices differ from their digests.
    """

    kind: str
    member: int
    message: str
    slot: int = -1
    key: str = ""
    layers: tuple[int, ...] = ()


@dataclass
class FsckReport:
    """What a pool holds and what is wrong with it.

    objects: served after the next opening.  verified: read and compared.  without_digests: stored
    with verify="off", so they cannot be checked.  torn: records whose magic or CRC is wrong, in
    slots that count as empty; a crash leaves such records.  lost: records that a member had when
    it was closed and has no longer, while the snapshot that would name them is damaged too.
    found: all findings; findings keeps the first FINDINGS_MAX.  damaged: all damaged objects; their
    keys are in damaged_keys, and also in blind_keys where no load would find the damage.
    """

    pool_uuid: str = ""
    state: str = ""
    slots: int = 0
    objects: int = 0
    verified: int = 0
    verified_nbytes: int = 0
    without_digests: int = 0
    quarantined: int = 0
    duplicates: int = 0
    torn: int = 0
    lost: int = 0
    damaged: int = 0
    found: int = 0
    findings: list[Finding] = field(default_factory=list)
    damaged_keys: list[bytes] = field(default_factory=list)
    blind_keys: list[bytes] = field(default_factory=list)

    @property
    def sound(self) -> bool:
        """Whether nothing is wrong."""
        return self.found == 0

    def add(self, finding: Finding) -> None:
        """Counts a finding, and keeps it while there are fewer than FINDINGS_MAX."""
        self.found += 1
        if finding.key:
            self.damaged += 1
            self.damaged_keys.append(bytes.fromhex(finding.key))
        if len(self.findings) < FINDINGS_MAX:
            self.findings.append(finding)


@dataclass(frozen=True)
class RepairReport:
    """What became of damaged objects: the first four numbers add up to all of them.

    quarantined: were removed, see above.  gone: were no longer in the pool.  sound: another copy
    of the same key is intact and was kept.  left: could not be removed.  given_up: lost
    records (FsckReport.lost), whose objects are unknown: they are misses.  found_again:
    findings of a second check, which reads superblocks, snapshots and records but no objects.
    """

    quarantined: int
    gone: int
    sound: int
    left: int
    given_up: int
    found_again: int


def check_files(
    paths: Sequence[str], progress: ProgressFactory, *, sample: int | None = None, seed: int = 0
) -> FsckReport:
    """Checks the pool in these files or on these drives, which must not be open; writes nothing.

    sample: how many objects to compare, drawn at random by `seed` (default: all).  Raises
    PoolNotFound, PoolCorrupt, PoolMismatch, MemberMissing, MemberSwapped when no pool can be
    checked, MediumError for an unreadable slot table.
    """
    with open_controller(paths) as controller, opened_io(controller) as (engine, io):
        report = FsckReport()
        if not _superblocks_agree(io, paths, report):
            return report
        members = Members.open(io, engine, paths)
        report.pool_uuid = members.uuid.hex()
        report.state = "clean" if members.clean else "open"
        report.slots = members.count * members.geometry.slots
        entries = _Tables(members, report, progress).scan()
        if sample is not None and sample < entries.size:
            drawn = np.random.default_rng(seed).choice(entries.size, sample, replace=False)
            entries = entries[np.sort(drawn)]
        with _Verifier(engine, members, report) as verifier:
            verifier.verify(entries, progress)
        return report


def repair(paths: Sequence[str], report: FsckReport, progress: ProgressFactory) -> RepairReport:
    """Opens the pool, which rewrites superblocks and snapshots, and removes the damaged objects
    of a report.  Raises what `store.open` raises.
    """
    counts = dict.fromkeys(("quarantined", "gone", "sound", "left"), 0)
    # Nothing is served here, so files that other users can change are accepted.
    config = StoreConfig(verify="always", any_owner=True)
    with store.open(list(paths), config=config, profile=None) as pool:
        pool.wait_recovered()
        pool.allocate_memory(1)
        keys = list(dict.fromkeys(report.damaged_keys))
        blind = set(report.blind_keys)
        with progress("repair", len(keys)) as bar:
            for key in keys:
                counts[_quarantine(pool, key, key in blind)] += 1
                bar.advance(1)
        with progress("prove", _unproven(pool)) as bar:
            prove_all(pool, bar.advance)
    again = check_files(paths, progress, sample=0)
    return RepairReport(**counts, given_up=report.lost, found_again=again.found)


def prove_all(pool: store.ObjectStore, advance: Callable[[int], object] = lambda n: None) -> int:
    """Verifies once what an unclean close left unproven; returns how many are still unproven."""
    for _ in range(0, _unproven(pool), _PROVE_OBJECTS):
        advance(pool.prove(_PROVE_OBJECTS))
    return _unproven(pool)


def _unproven(pool: store.ObjectStore) -> int:
    return int(pool.stats()["slots"]["unproven"])


def _quarantine(pool: store.ObjectStore, key: bytes, is_blind: bool) -> str:
    if pool.match([key]) == 0:
        return "gone"
    if is_blind:
        return "quarantined" if pool.quarantine([key]) else "left"
    ticket = pool.load([key], [0])
    try:
        ticket.wait(_TIMEOUT_S)
    except MediumError:
        ticket.wait_settled(_TIMEOUT_S)
        return "left" if pool.match([key]) else "quarantined"
    return "sound"


def _superblocks_agree(io: BlockIo, names: Sequence[str], report: FsckReport) -> bool:
    """Checks both copies of every superblock.  False when a clear was interrupted: then there is
    nothing else to check, because the next opening finishes the clear.
    """
    found = []
    for nsid, name in enumerate(names, 1):
        raw = io.read(nsid, 0, 2 * BLOCK_NBYTES)
        copies = raw[:BLOCK_NBYTES], raw[BLOCK_NBYTES:]
        superblock, _ = choose_superblock(*copies, name)
        found.append(superblock)
        for letter, copy in zip("AB", copies, strict=True):
            try:
                Superblock.decode(copy, f"{name}, superblock {letter}")
            except PoolCorrupt as error:
                report.add(Finding("superblock", superblock.member_index, str(error)))
        report.pool_uuid = superblock.pool_uuid.hex()
    check_members(found, names)  # first: members of different pools have different epochs, too
    is_cleared = len({superblock.epoch for superblock in found}) > 1
    if is_cleared:
        message = "a clear was interrupted; the next opening of the pool finishes it"
        report.add(Finding("clear", 0, message))
    return not is_cleared


class _Tables:
    """The slot tables of a pool, and the snapshots that replace them after a clean close."""

    def __init__(self, members: Members, report: FsckReport, progress: ProgressFactory) -> None:
        self._members = members
        self._report = report
        self._progress = progress
        self._top = members.next_sequence

    def scan(self) -> Entries:
        """Entries, with pool-wide slot numbers, of the objects that can be verified."""
        report = self._report
        with self._progress("scan", report.slots) as bar:
            parts = [
                part
                for member in self._members.present
                for part in self._scan_member(member, bar.advance)
            ]
        if self._top > COUNTER_MAX - _SEQUENCES_LEFT_MIN:
            message = f"sequence number {self._top} is too high for puts; format the pool again"
            report.add(Finding("counter", 0, message))
        entries = np.concatenate(parts)
        report.objects += entries.size  # besides those whose record is damaged
        report.duplicates = entries.size - len(np.unique(entries["key"], axis=0))
        has_digests = (entries["flags"] & FLAG_DIGESTS) != 0
        report.without_digests = int(np.count_nonzero(~has_digests))
        known: Entries = entries[has_digests]
        return known

    def _scan_member(self, member: int, advance: Callable[[int], None]) -> list[Entries]:
        geometry, identity = self._members.geometry, self._members.identity(member)
        snapshot = self._snapshot(member)
        parts: list[Entries] = []
        done = found = 0
        nsid = self._members.nsid(member)
        for chunk, bad in self._members.io.scan(nsid, geometry.table_offset, geometry.slots):
            records = chunk.view(RECORD_DTYPE)
            slots = np.arange(done, done + records.size)
            verdict = check_records(records, slots, identity)
            counted = (verdict >= RecordState.READY) & (verdict <= RecordState.QUARANTINED)
            self._top = max(self._top, int(records["sequence"][counted].max(initial=0)))
            for row in np.flatnonzero(bad).tolist():
                message = f"its record cannot be read: {status_name(int(bad[row]))}"
                self._report.add(Finding("unreadable", member, message, slot=int(slots[row])))
                verdict[row] = RecordState.FOREIGN
            torn = torn_records(records, verdict)
            if snapshot is None:
                part = _entries(records, slots, verdict)
                found += part.size
            else:
                inside = (snapshot["slot"] >= done) & (snapshot["slot"] < done + records.size)
                part = snapshot[inside]
                torn[part["slot"] - done] = False  # not empty slots: a finding, or quarantined
                part = self._confirmed(part, records[part["slot"] - done], verdict, member, done)
            self._report.torn += int(np.count_nonzero(torn))
            quarantined = part["state"] == RecordState.QUARANTINED
            self._report.quarantined += int(np.count_nonzero(quarantined))
            part = part[~quarantined]
            part["slot"] += np.uint64(member * geometry.slots)
            parts.append(part)
            done += records.size
            advance(records.size)
        if snapshot is None:
            self._count_lost(member, found)
        return parts

    def _count_lost(self, member: int, found: int) -> None:
        """Compares the records of the table with the number that a clean close wrote, if any."""
        described = self._members.superblock(member).snapshot
        if not self._members.clean or described is None or found >= described.entries:
            return
        lost = described.entries - found
        self._report.lost += lost
        message = (
            f"{lost} of the {described.entries} records that this member had when it was closed are"
            " torn, overwritten or unreadable, and its snapshot is damaged: their keys are unknown"
        )
        self._report.add(Finding("lost", member, message))

    def _snapshot(self, member: int) -> Entries | None:
        """The entries of a member's snapshot; None where the slot table must be used instead."""
        members = self._members
        superblock = members.superblock(member)
        if not members.clean or superblock.snapshot is None:
            return None
        nsid, nbytes = members.nsid(member), superblock.snapshot.nbytes
        try:
            raw = members.io.read(nsid, members.geometry.snapshot_offset, nbytes)
            return decode_snapshot(raw, superblock, members.name(member)).copy()
        except (PoolCorrupt, MediumError) as error:
            self._report.add(Finding("snapshot", member, str(error)))
            return None

    def _confirmed(
        self, part: Entries, records: Entries, verdict: Verdict, member: int, done: int
    ) -> Entries:
        """The entries that their records confirm; the others become findings."""
        held = verdict[(part["slot"] - done).astype(np.int64)] == RecordState.READY
        same = (records["key"] == part["key"]).all(axis=1)
        same &= records["sequence"] == part["sequence"]
        right = (part["state"] == RecordState.QUARANTINED) | (held & same)
        message = "the slot's record is damaged or belongs to another object"
        for entry in part[~right]:
            self._report.objects += 1
            key = entry["key"].tobytes()
            if not entry["flags"] & FLAG_DIGESTS:
                self._report.blind_keys.append(key)
            self._report.add(Finding("record", member, message, int(entry["slot"]), key.hex()))
        confirmed: Entries = part[right]
        return confirmed


def _entries(records: Entries, slots: Rows, verdict: Verdict) -> Entries:
    rows = np.flatnonzero((verdict == RecordState.READY) | (verdict == RecordState.QUARANTINED))
    part = np.zeros(rows.size, SNAPSHOT_ENTRY_DTYPE)
    for name in ("key", "sequence"):
        part[name] = records[name][rows]
    part["slot"] = slots[rows]
    part["state"] = verdict[rows]
    part["flags"] = records["flags"][rows] & FLAG_DIGESTS
    return part


@dataclass(frozen=True)
class _Batch:
    """Objects on their way into memory; `digests` (n, layers) fills as their slices arrive."""

    entries: Entries
    slots: Rows
    job: Job
    digests: U64


class _Verifier:
    """Reads objects into memory of its own and compares their digests; a context manager."""

    def __init__(self, engine: Engine, members: Members, report: FsckReport) -> None:
        self._members = members
        self._report = report
        self._engine = engine
        self._core = Core(engine, members, StoreConfig(digest_cache_nbytes=0))
        self._timeout_s = 2 * self._core.config.timeout_s
        layout = members.layout
        self._table = RecordTable(engine, members, blocks=1)
        pages = min(_MEMORY_NBYTES // layout.object_nbytes // _BATCHES, self._table.block_records)
        self._pages = max(1, pages)  # of one batch
        self._pool = HostMemory.allocate(layout, self._pages * _BATCHES)
        self._core.check_path(self._pool.memory)  # or every object would look unreadable
        self._regions: list[DmaRegion] = []

    def __enter__(self) -> _Verifier:
        self._regions = self._engine.controller.register_all(self._pool.buffers)
        return self

    def __exit__(self, *exception: object) -> None:
        for region in self._regions:
            region.close()
        self._table.close()

    def verify(self, entries: Entries, progress: ProgressFactory) -> None:
        """Compares every object with its record's digests."""
        entries = entries[np.argsort(entries["slot"])]
        pending: deque[_Batch] = deque()
        with progress("verify", entries.size) as bar:
            for number, start in enumerate(range(0, entries.size, self._pages)):
                if len(pending) == _BATCHES:
                    bar.advance(self._settle(pending.popleft()))
                part = entries[start : start + self._pages]
                pending.append(self._issue(part, number % _BATCHES * self._pages))
            while pending:
                bar.advance(self._settle(pending.popleft()))

    def _issue(self, entries: Entries, first_page: int) -> _Batch:
        slots = entries["slot"].astype(np.int64)
        digests = np.zeros((entries.size, self._core.layers), np.uint64)
        pages = np.arange(first_page, first_page + entries.size, dtype=np.uint32)
        job = self._engine.submit(
            OPCODE_READ,
            self._core.extents(slots),
            pages,
            self._pool.memory,
            digests=digests,
            timeout_s=self._core.config.timeout_s,
        )
        return _Batch(entries, slots, job, digests)

    def _settle(self, batch: _Batch) -> int:
        """Waits for a batch, reports what is wrong with it, and returns its size."""
        recorded, verdict = self._recorded(batch)
        if not batch.job.wait_released(self._timeout_s):
            raise DeviceTimeout(
                f"the medium did not answer within {self._timeout_s:g} s; check the device"
            )
        status = batch.job.page_status
        differs = (batch.digests != recorded) & (verdict == _RECORD_RIGHT)[:, None]
        wrong = differs.any(axis=1) | (verdict == 0) | (status != 0)
        for row in np.flatnonzero(wrong).tolist():
            self._report.add(self._finding(batch, row, int(status[row]), differs[row]))
        read = int(np.count_nonzero((status == 0) & (verdict != _RECORD_WITHOUT_DIGESTS)))
        self._report.verified += read
        self._report.verified_nbytes += read * self._members.layout.object_nbytes
        return int(batch.slots.size)

    def _recorded(self, batch: _Batch) -> tuple[U64, Verdict]:
        """Digests (n, layers) of the records, and the verdict on each (see RecordTable.check)."""
        digests = np.zeros_like(batch.digests)
        block = self._table.reserve(self._timeout_s)
        job = self._table.read(block, batch.slots, timeout_s=self._timeout_s)
        if not job.wait_released(self._timeout_s):
            raise DeviceTimeout(
                f"the slot table was not read within {self._timeout_s:g} s; check the device"
            )
        verdict = self._table.check(
            block,
            batch.slots,
            np.ascontiguousarray(batch.entries["key"]),
            batch.entries["sequence"],
            digests,
        )
        self._table.release(block)
        verdict[job.page_status != 0] = 0
        return digests, verdict

    def _finding(
        self, batch: _Batch, row: int, status: int, differs: npt.NDArray[np.bool_]
    ) -> Finding:
        split = self._members.geometry.split_members(batch.slots[row : row + 1])
        member, slot = (int(part[0]) for part in split)
        key = batch.entries["key"][row].tobytes().hex()
        if status:
            message = f"the medium failed: {status_name(status)}"
            return Finding("unreadable", member, message, slot, key)
        layers = tuple(np.flatnonzero(differs).tolist())
        if not layers:
            return Finding("record", member, "the slot's record cannot be read", slot, key)
        message = f"{len(layers)} of {differs.size} slices differ from their digests"
        return Finding("payload", member, message, slot, key, layers)
