"""The superblocks of an open pool's members, and the changes that are written to them."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from tutti.base.arrays import Slots
from tutti.base.process import Owned
from tutti.errors import ConfigError, MemberMissing, MemberSwapped, PoolCorrupt, PoolNotFound
from tutti.gio_uring.drives.device_content import LABEL
from tutti.gio_uring.engine import Engine
from tutti.medium.geometry import BLOCK_NBYTES, Geometry
from tutti.medium.layout import KVLayout
from tutti.medium.slot_record import COUNTER_MAX, RecordIdentity
from tutti.medium.superblock import (
    PoolState,
    SnapshotDescriptor,
    Superblock,
    check_members,
    check_size,
    choose_superblock,
    pool_constants,
)
from tutti.pool.block_io import BlockIo

_GENERATIONS_LEFT_MIN = 2**32  # more superblocks than one opening writes


class Members(Owned):
    """The superblocks of a pool whose namespaces are open.

    superblocks: one per member, None for one that is missing in a degraded pool.
    lost: members that failed while the pool was open; nothing is written to them any more.
    The namespace of member m is ``nsid(m)``.
    """

    def __init__(
        self, io: BlockIo, names: Sequence[str], superblocks: Sequence[Superblock | None]
    ) -> None:
        self.io = io
        self._names = list(names)
        self.superblocks = list(superblocks)
        self.lost: set[int] = set()
        self._nsids: list[int] = []
        given = iter(range(1, len(names) + 1))
        for superblock in superblocks:
            self._nsids.append(0 if superblock is None else next(given))
        first = next(s for s in superblocks if s is not None)
        self.geometry: Geometry = first.geometry
        self.layout = KVLayout.from_json(first.layout_json)
        self.uuid = first.pool_uuid
        self._copies = [0] * len(superblocks)

    @classmethod
    def format(
        cls, io: BlockIo, engine: Engine, names: Sequence[str], layout: KVLayout, geometry: Geometry
    ) -> Members:
        """Makes a new, empty pool on these namespaces, whose contents are lost."""
        uuid, epoch = secrets.token_bytes(16), secrets.randbits(64)
        superblocks = [
            Superblock(
                pool_uuid=uuid,
                member_index=member,
                members=len(names),
                geometry=geometry,
                layout_json=layout.to_json(),
                generation=1,
                epoch=epoch,
                state=PoolState.CLEAN,
                created_ns=time.time_ns(),
                next_sequence=1,
            )
            for member in range(len(names))
        ]
        _check_sizes(engine, names, geometry)
        for nsid in range(1, len(names) + 1):
            io.write(nsid, 0, bytes(2 * BLOCK_NBYTES))
        io.flush(range(1, len(names) + 1))
        members = cls(io, names, superblocks)
        members._write_both(members.superblocks)
        return members

    @classmethod
    def open(
        cls, io: BlockIo, engine: Engine, names: Sequence[str], *, degraded: bool = False
    ) -> Members:
        """Reads and checks the superblocks of all namespaces.

        degraded: accept a pool whose other members are missing; their objects are misses.
        Raises PoolNotFound, PoolCorrupt, PoolMismatch, MemberMissing or MemberSwapped.
        """
        found, copies = [], []
        for nsid, name in enumerate(names, 1):
            if _nbytes(engine, nsid) < 2 * BLOCK_NBYTES:
                raise PoolCorrupt(
                    f"{name} is too short for a member; check the path, or format the pool again"
                )
            raw = io.read(nsid, 0, 2 * BLOCK_NBYTES)
            if raw.startswith(LABEL):
                raise PoolNotFound(
                    f"{name} is labelled for a server and holds no pool yet; pass layout and"
                    " capacity, or format a pool there"
                )
            superblock, copy = choose_superblock(raw[:BLOCK_NBYTES], raw[BLOCK_NBYTES:], name)
            found.append(superblock)
            copies.append(copy)
        whole: list[Superblock | None] = list(found)
        if degraded:
            whole = _place(found, names)
            copies = [copies[found.index(s)] if s is not None else 0 for s in whole]
        else:
            check_members(found, names)
        members = cls(io, names, whole)
        members._copies = copies
        members._check_generations()
        _check_sizes(engine, names, members.geometry)
        members._finish_clear()
        return members

    @property
    def count(self) -> int:
        """Members of the pool, missing ones included."""
        return len(self.superblocks)

    @property
    def present(self) -> list[int]:
        """Indices of the members that are open and not lost; of all open ones if all are lost."""
        there = [m for m, s in enumerate(self.superblocks) if s is not None]
        return [m for m in there if m not in self.lost] or there

    @property
    def missing(self) -> int:
        """How many members are not used: missing when the pool was opened, or lost since."""
        return self.superblocks.count(None) + len(self.lost)

    @property
    def clean(self) -> bool:
        """Whether every member was closed cleanly."""
        return all(self.superblock(m).state == PoolState.CLEAN for m in self.present)

    @property
    def next_sequence(self) -> int:
        """A sequence number above those of all records of a clean pool."""
        return max(self.superblock(m).next_sequence for m in self.present)

    def superblock(self, member: int) -> Superblock:
        """The superblock of a member that is present."""
        superblock = self.superblocks[member]
        if superblock is None:
            raise MemberMissing(f"member {member} is not open; open the pool with all its members")
        return superblock

    def identity(self, member: int) -> RecordIdentity:
        """What the records of a member have in common."""
        return self.superblock(member).identity

    def name(self, member: int) -> str:
        """The name of a member that is present, for messages."""
        return self._names[self.nsid(member) - 1]

    def nsid(self, member: int) -> int:
        """The namespace of a member."""
        return self._nsids[member]

    def nsids(self) -> list[int]:
        """The namespaces of the members that are present."""
        return [self.nsid(member) for member in self.present]

    def nsids_of(self, slots: Slots) -> list[int]:
        """The namespaces on which slots (n,) lie, each once."""
        return [self.nsid(m) for m in np.unique(slots // self.geometry.slots).tolist()]

    def mark_open(self, next_sequence: int) -> None:
        """Marks the pool as in use, before anything else is written."""
        self._change(PoolState.OPEN, next_sequence, [None] * self.count)

    def mark_clean(
        self, next_sequence: int, snapshots: Sequence[SnapshotDescriptor | None]
    ) -> None:
        """Marks the pool as clean, after everything else was written and flushed."""
        self._change(PoolState.CLEAN, next_sequence, snapshots)

    def new_epoch(self) -> None:
        """Makes every ready record stale; durable on return."""
        epoch = secrets.randbits(64)
        self._write_both(self._updated(lambda s: replace(s, epoch=epoch, snapshot=None)))

    def _change(
        self, state: PoolState, next_sequence: int, snapshots: Sequence[SnapshotDescriptor | None]
    ) -> None:
        self._write_next(
            self._updated(
                lambda s: replace(
                    s, state=state, next_sequence=next_sequence, snapshot=snapshots[s.member_index]
                )
            )
        )

    def _updated(self, change: Callable[[Superblock], Superblock]) -> list[Superblock | None]:
        """The superblocks after a change, none of them written yet."""
        generation = max(self.superblock(m).generation for m in self.present) + 1
        return [s and replace(change(s), generation=generation) for s in self.superblocks]

    def _write_both(self, superblocks: list[Superblock | None]) -> None:
        """Writes both copies, the outdated one first, so that a torn write leaves a valid copy."""
        for _ in range(2):
            self._write_next(superblocks)

    def _write_next(self, superblocks: list[Superblock | None]) -> None:
        """Replaces the outdated copy of every member, which then is the current one.

        After an error this object is unchanged, and a retry writes to the same place.
        """
        for member, superblock in enumerate(superblocks):
            if superblock is not None and member in self.present:
                offset = (self._copies[member] ^ 1) * BLOCK_NBYTES
                self.io.write(self.nsid(member), offset, superblock.encode())
        self.io.flush(self.nsids())
        self._copies = [copy ^ 1 for copy in self._copies]
        self.superblocks = list(superblocks)

    def _check_generations(self) -> None:
        """Raises PoolCorrupt where the generation is so high that later ones would overflow."""
        newest = max(self.superblock(m).generation for m in self.present)
        if newest > COUNTER_MAX - _GENERATIONS_LEFT_MIN:
            raise PoolCorrupt(
                f"{self._names[0]}: generation {newest} is impossibly high, so the superblock is"
                " damaged; format the pool again"
            )

    def _finish_clear(self) -> None:
        """Gives all members the epoch of the newest one, which finishes an interrupted clear."""
        newest = max((self.superblock(m) for m in self.present), key=lambda s: s.generation)
        if all(self.superblock(m).epoch == newest.epoch for m in self.present):
            return
        self._write_both(self._updated(lambda s: replace(s, epoch=newest.epoch, snapshot=None)))


def _place(found: Sequence[Superblock], names: Sequence[str]) -> list[Superblock | None]:
    """The superblocks in the order of their members, None where one is missing."""
    places: list[Superblock | None] = [None] * found[0].members
    last = -1
    for superblock, name in zip(found, names, strict=True):
        if pool_constants(superblock) != pool_constants(found[0]):
            raise MemberSwapped(f"{name} is not a member of the pool of {names[0]}; leave it out")
        if superblock.member_index <= last:
            raise MemberSwapped(
                f"{name} is member {superblock.member_index}; pass the available members in the "
                "order of the format, each once"
            )
        last = superblock.member_index
        places[last] = superblock
    return places


def _nbytes(engine: Engine, nsid: int) -> int:
    return engine.controller.info.namespace_nlb[nsid - 1] * engine.lba_nbytes


def _check_sizes(engine: Engine, names: Sequence[str], geometry: Geometry) -> None:
    if engine.lba_nbytes != geometry.lba_nbytes:
        raise ConfigError(
            f"the pool was formatted with LBAs of {geometry.lba_nbytes} bytes, the controller has "
            f"LBAs of {engine.lba_nbytes}; open it the way it was formatted"
        )
    for nsid, name in enumerate(names, 1):
        check_size(_nbytes(engine, nsid), geometry, name)
