"""Encodes and decodes superblocks and snapshots, and checks that members form one pool; no I/O.

docs/format.md describes the format; a test compares its tables with the dtypes. Bytes of a medium
are not trusted: all values are compared with their limits before they are returned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any

import numpy as np
import xxhash

from tutti import native
from tutti.errors import (
    ConfigError,
    LayoutError,
    MemberMissing,
    MemberSwapped,
    PoolCorrupt,
    PoolMismatch,
    PoolNotFound,
)
from tutti.medium.geometry import (
    BLOCK_NBYTES,
    FORMAT_VERSION,
    LAYOUT_JSON_NBYTES_MAX,
    MEMBERS_MAX,
    SEGMENTS_MAX,
    SLOTS_MAX,
    SNAPSHOT_ENTRY_NBYTES,
    Geometry,
)
from tutti.medium.layout import KVLayout
from tutti.medium.slot_record import (
    COUNTER_MAX,
    RecordIdentity,
    Records,
    RecordState,
    block_dtype,
    octets,
)

SUPERBLOCK_DTYPE = block_dtype(
    [
        (0, "magic", "S8"),
        (8, "version", "<u4"),
        (12, "state", "<u4"),
        (16, "pool_uuid", ("u1", 16)),
        (32, "generation", "<u8"),
        (40, "epoch", "<u8"),
        (48, "member_index", "<u4"),
        (52, "members", "<u4"),
        (56, "lba_nbytes", "<u4"),
        (60, "layers", "<u4"),
        (64, "n_segments", "<u4"),
        (68, "slice_nlb", "<u4"),
        (72, "segments", ("<u8", SEGMENTS_MAX)),
        (104, "group_slots", "<u4"),
        (108, "layout_nbytes", "<u4"),
        (112, "groups", "<u8"),
        (120, "snapshot_offset", "<u8"),
        (128, "table_offset", "<u8"),
        (136, "groups_offset", "<u8"),
        (144, "fingerprint", ("u1", 16)),
        (160, "created_ns", "<u8"),
        (168, "next_sequence", "<u8"),
        (176, "snapshot_valid", "<u4"),
        (184, "snapshot_entries", "<u8"),
        (192, "snapshot_xxh3", "<u8"),
        (200, "snapshot_generation", "<u8"),
        (1024, "layout_json", ("u1", LAYOUT_JSON_NBYTES_MAX)),
    ]
)
SNAPSHOT_HEADER_DTYPE = block_dtype(
    [
        (0, "magic", "S8"),
        (8, "version", "<u4"),
        (12, "member", "<u4"),
        (16, "pool_uuid", ("u1", 16)),
        (32, "generation", "<u8"),
        (40, "epoch", "<u8"),
        (48, "entries", "<u8"),
        (56, "entries_xxh3", "<u8"),
    ]
)
SNAPSHOT_ENTRY_DTYPE = block_dtype(
    [
        (0, "slot", "<u8"),
        (8, "key", ("u1", 16)),
        (24, "sequence", "<u8"),
        (32, "depth", "<u4"),
        (36, "access_64s", "<u4"),
        (40, "state", "u1"),
        (41, "flags", "u1"),
        (42, "expiry_64s", "<u4"),
        (46, "tenant", "<u2"),
    ],
    itemsize=SNAPSHOT_ENTRY_NBYTES,
)

SUPERBLOCK_MAGIC = b"TUTTISB1"
SNAPSHOT_MAGIC = b"TUTTISN1"


class PoolState(IntEnum):
    """`state` in the superblock."""

    CLEAN = 1
    OPEN = 2


@dataclass(frozen=True)
class SnapshotDescriptor:
    """Description of the snapshot in the superblock."""

    entries: int
    xxh3: int
    generation: int

    @property
    def nbytes(self) -> int:
        """Bytes of header and entries, in whole blocks."""
        blocks = -(-self.entries * SNAPSHOT_ENTRY_NBYTES // BLOCK_NBYTES)
        return (1 + blocks) * BLOCK_NBYTES


@dataclass(frozen=True)
class Superblock:
    """One member's description of itself and of its pool (docs/format.md, section 2)."""

    pool_uuid: bytes
    member_index: int
    members: int
    geometry: Geometry
    layout_json: str
    generation: int
    epoch: int
    state: PoolState
    created_ns: int
    next_sequence: int
    snapshot: SnapshotDescriptor | None = None

    @property
    def fingerprint(self) -> bytes:
        """XXH3-128 of the layout's JSON, which is KVLayout.fingerprint."""
        return xxhash.xxh3_128_digest(self.layout_json.encode("ascii"))

    @cached_property
    def identity(self) -> RecordIdentity:
        return RecordIdentity(
            self.pool_uuid, self.member_index, self.epoch, self.fingerprint, self.geometry.layers
        )

    def encode(self) -> bytes:
        """The superblock as 4096 bytes."""
        block = np.zeros(1, SUPERBLOCK_DTYPE)
        row = block[0]
        geometry = self.geometry
        layout = self.layout_json.encode("ascii")
        assert len(layout) <= LAYOUT_JSON_NBYTES_MAX
        assert len(self.pool_uuid) == 16
        assert 0 < self.generation <= COUNTER_MAX, "the generation is out of range"
        assert 0 < self.next_sequence <= COUNTER_MAX, "the next sequence number is out of range"
        for name in ("state", *_OWN_NUMBERS):
            row[name] = getattr(self, name)
        for name in (*_GEOMETRY_NUMBERS, *_DERIVED_NUMBERS):
            row[name] = getattr(geometry, name)
        row["magic"] = SUPERBLOCK_MAGIC
        row["version"] = FORMAT_VERSION
        row["pool_uuid"] = octets(self.pool_uuid)
        row["fingerprint"] = octets(self.fingerprint)
        row["n_segments"] = len(geometry.segments)
        row["segments"][: len(geometry.segments)] = geometry.segments
        row["layout_nbytes"] = len(layout)
        row["layout_json"][: len(layout)] = octets(layout)
        if self.snapshot is not None:
            row["snapshot_valid"] = 1
            row["snapshot_entries"] = self.snapshot.entries
            row["snapshot_xxh3"] = self.snapshot.xxh3
            row["snapshot_generation"] = self.snapshot.generation
        native.records_seal(block)
        return block.tobytes()

    @classmethod
    def decode(cls, raw: bytes, path: str) -> Superblock:
        """The superblock in 4096 bytes that were read from the member at `path` (for messages).

        Raises PoolCorrupt if they are not a superblock or contradict themselves, PoolMismatch for
        another format version.
        """
        if len(raw) != BLOCK_NBYTES:
            raise PoolCorrupt(f"{path}: the superblock has {len(raw)} bytes, not 4096; restore it")
        block = np.frombuffer(raw, SUPERBLOCK_DTYPE)
        row = block[0]
        if bytes(row["magic"]) != SUPERBLOCK_MAGIC:
            raise PoolCorrupt(
                f"{path}: no superblock here: not a member of a Tutti pool; check the path"
            )
        if not native.records_check(block)[0]:
            raise PoolCorrupt(f"{path}: the superblock's CRC is wrong; it is damaged or torn")
        if row["version"] != FORMAT_VERSION:
            raise PoolMismatch(
                f"{path}: format version {row['version']}, this version reads {FORMAT_VERSION};"
                " use the software that wrote it, or format a new pool"
            )
        try:
            return cls._from_row(row)
        except (_Contradiction, LayoutError) as error:
            raise PoolCorrupt(
                f"{path}: the superblock contradicts itself ({error}) although its CRC is right;"
                " format the pool again"
            ) from error

    @classmethod
    def _from_row(cls, row: Any) -> Superblock:
        geometry = _read_geometry(row)
        length = int(row["layout_nbytes"])
        _require(length <= LAYOUT_JSON_NBYTES_MAX, f"layout of {length} bytes")
        layout = row["layout_json"][:length].tobytes()
        _require(
            xxhash.xxh3_128_digest(layout) == row["fingerprint"].tobytes() and layout.isascii(),
            "the layout does not fit its fingerprint",
        )
        _check_layout(layout.decode("ascii"), geometry)
        members, member_index = int(row["members"]), int(row["member_index"])
        _require(0 <= member_index < members <= MEMBERS_MAX, f"member {member_index} of {members}")
        _require(members * geometry.slots <= SLOTS_MAX, f"{members} x {geometry.slots} slots")
        _require(row["state"] in tuple(PoolState), f"state {row['state']}")
        for name in ("generation", "next_sequence"):
            _require(0 < int(row[name]) <= COUNTER_MAX, f"{name} {row[name]}")
        return cls(
            pool_uuid=row["pool_uuid"].tobytes(),
            geometry=geometry,
            layout_json=layout.decode("ascii"),
            state=PoolState(int(row["state"])),
            snapshot=_read_descriptor(row, geometry),
            **{name: int(row[name]) for name in _OWN_NUMBERS},
        )


_OWN_NUMBERS = ("generation", "epoch", "member_index", "members", "created_ns", "next_sequence")
_GEOMETRY_NUMBERS = ("lba_nbytes", "layers", "group_slots", "groups")
_DERIVED_NUMBERS = ("slice_nlb", "snapshot_offset", "table_offset", "groups_offset")


class _Contradiction(Exception):
    """An impossible number in a superblock; becomes PoolCorrupt with the member's path."""


def _require(condition: object, what: str) -> None:
    if not condition:
        raise _Contradiction(what)


def _read_geometry(row: Any) -> Geometry:
    n_segments = int(row["n_segments"])
    _require(1 <= n_segments <= SEGMENTS_MAX, f"{n_segments} segments")
    _require(not row["segments"][n_segments:].any(), "sizes of unused segments")
    geometry = Geometry(
        segments=tuple(int(nbytes) for nbytes in row["segments"][:n_segments]),
        **{name: int(row[name]) for name in _GEOMETRY_NUMBERS},
    )
    for name in _DERIVED_NUMBERS:
        _require(row[name] == getattr(geometry, name), f"{name} is {row[name]}")
    return geometry


def _check_layout(text: str, geometry: Geometry) -> None:
    """Requires a layout as `KVLayout.to_json` writes it, which agrees with the geometry."""
    try:
        layout = KVLayout.from_json(text)
    except ConfigError as error:
        raise _Contradiction(str(error)) from error
    _require(layout.to_json() == text, "the layout's JSON is not canonical")
    _require(
        (layout.layers, layout.segments) == (geometry.layers, geometry.segments),
        f"the layout has {layout.layers} layers of {layout.segments} bytes, the geometry"
        f" {geometry.layers} of {geometry.segments}",
    )


def _read_descriptor(row: Any, geometry: Geometry) -> SnapshotDescriptor | None:
    _require(row["snapshot_valid"] in (0, 1), f"snapshot_valid {row['snapshot_valid']}")
    _require(row["snapshot_entries"] <= geometry.slots, "more snapshot entries than slots")
    if not row["snapshot_valid"]:
        return None
    return SnapshotDescriptor(
        int(row["snapshot_entries"]), int(row["snapshot_xxh3"]), int(row["snapshot_generation"])
    )


def choose_superblock(a: bytes, b: bytes, path: str) -> tuple[Superblock, int]:
    """The current superblock of a member, from both of its copies, and which copy it is (0 or 1).

    The next superblock replaces the other copy. Raises PoolNotFound if both are zeros, PoolMismatch
    if either is of another version, PoolCorrupt if none is valid or they disagree.
    """
    if not any(a) and not any(b):
        raise PoolNotFound(f"{path}: not formatted, or a format was interrupted; format the member")
    if not any(raw.startswith(SUPERBLOCK_MAGIC) for raw in (a, b)):
        raise PoolCorrupt(
            f"{path}: no superblock here: not a member of a Tutti pool; check the path"
        )
    valid: list[tuple[Superblock, int]] = []
    reasons = []
    for copy, raw in enumerate((a, b)):
        try:
            valid.append((Superblock.decode(raw, f"{path}, superblock {'AB'[copy]}"), copy))
        except PoolCorrupt as error:
            reasons.append(str(error))
    if not valid:
        raise PoolCorrupt("; ".join(reasons))
    if len(valid) == 2 and _constants(valid[0][0]) != _constants(valid[1][0]):
        raise PoolCorrupt(
            f"{path}: superblocks A and B describe different pools; format the pool again"
        )
    return max(valid, key=lambda found: (found[0].generation, -found[1]))


def check_size(nbytes: int, geometry: Geometry, path: str) -> None:
    """Whether a member is as long as its superblock expects.  Raises PoolCorrupt."""
    if nbytes < geometry.member_nbytes:
        raise PoolCorrupt(
            f"{path} has {nbytes} bytes, its superblock expects {geometry.member_nbytes}; "
            "it was truncated: restore it, or format the pool again"
        )


def _constants(superblock: Superblock) -> tuple[object, ...]:
    """The fields of a member that only a new format changes."""
    return (superblock.member_index, *pool_constants(superblock))


def pool_constants(superblock: Superblock) -> tuple[object, ...]:
    """What all members of a pool have in common, and no other pool has."""
    return (superblock.pool_uuid, superblock.members, superblock.geometry, superblock.layout_json)


def check_members(superblocks: Sequence[Superblock], paths: Sequence[str]) -> None:
    """Whether these members, in this order, are one whole pool.

    Raises MemberSwapped for a member of another pool or in a wrong place, MemberMissing if some are
    missing. Does not compare epochs: the caller finishes an interrupted clear.
    """
    first = superblocks[0]
    for place, (superblock, path) in enumerate(zip(superblocks, paths, strict=True)):
        if pool_constants(superblock) != pool_constants(first):
            raise MemberSwapped(
                f"{path} does not belong to the pool of {paths[0]}; pass the members of one pool"
            )
        if superblock.member_index != place:
            raise MemberSwapped(
                f"{path} is member {superblock.member_index}, given as number {place};"
                " pass the members in the order of the format, each once"
            )
    if len(superblocks) != first.members:
        raise MemberMissing(
            f"the pool has {first.members} members, {len(superblocks)} were given; pass all of them"
        )


def encode_snapshot(
    entries: Records, identity: RecordIdentity, generation: int
) -> tuple[bytes, SnapshotDescriptor]:
    """The bytes of a snapshot, a multiple of 4096, and its descriptor for the superblock.

    `entries` (n, of SNAPSHOT_ENTRY_DTYPE) in ascending order of member-local slots.
    """
    assert entries.dtype == SNAPSHOT_ENTRY_DTYPE
    packed = entries.tobytes()
    descriptor = SnapshotDescriptor(len(entries), xxhash.xxh3_64_intdigest(packed), generation)
    header = np.zeros(1, SNAPSHOT_HEADER_DTYPE)
    header["magic"] = SNAPSHOT_MAGIC
    header["version"] = FORMAT_VERSION
    header["member"] = identity.member
    header["pool_uuid"] = octets(identity.pool_uuid)
    header["generation"] = generation
    header["epoch"] = identity.epoch
    header["entries"] = descriptor.entries
    header["entries_xxh3"] = descriptor.xxh3
    native.records_seal(header)
    return header.tobytes() + packed + bytes(-len(packed) % BLOCK_NBYTES), descriptor


def decode_snapshot(raw: bytes, superblock: Superblock, path: str) -> Records:
    """The entries (n, of SNAPSHOT_ENTRY_DTYPE) of the snapshot that `superblock` describes.

    Raises PoolCorrupt if `raw` is anything else; then the slot table must be scanned.
    """
    descriptor, identity = superblock.snapshot, superblock.identity
    if descriptor is None or len(raw) < BLOCK_NBYTES:
        raise PoolCorrupt(f"{path}: no snapshot was found; scan the slot table")
    header = np.frombuffer(raw, SNAPSHOT_HEADER_DTYPE, count=1)
    row = header[0]
    found = (
        bytes(row["magic"]),
        int(row["version"]),
        int(row["member"]),
        row["pool_uuid"].tobytes(),
        int(row["epoch"]),
        SnapshotDescriptor(int(row["entries"]), int(row["entries_xxh3"]), int(row["generation"])),
    )
    wanted = (SNAPSHOT_MAGIC, FORMAT_VERSION, identity.member, identity.pool_uuid, identity.epoch)
    end = BLOCK_NBYTES + descriptor.entries * SNAPSHOT_ENTRY_NBYTES
    packed = raw[BLOCK_NBYTES:end]
    if (
        found != (*wanted, descriptor)
        or not native.records_check(header)[0]
        or xxhash.xxh3_64_intdigest(packed) != descriptor.xxh3
    ):
        raise PoolCorrupt(f"{path}: the snapshot does not fit the superblock; scan the slot table")
    entries = np.frombuffer(packed, SNAPSHOT_ENTRY_DTYPE)
    slots = entries["slot"]
    if not (
        (slots < superblock.geometry.slots).all()
        and (slots[1:] > slots[:-1]).all()
        and np.isin(entries["state"], (RecordState.READY, RecordState.QUARANTINED)).all()
        and (entries["sequence"] < superblock.next_sequence).all()
    ):
        raise PoolCorrupt(f"{path}: the snapshot has impossible entries; scan the slot table")
    return entries
