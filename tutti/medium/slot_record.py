"""Slot records (docs/format.md, section 3): the description of each slot on the medium.  Tells
valid records from stale, foreign and torn ones, and torn ones from those of free slots.

All functions work on arrays of records; a record is never trusted before `check_records`.
"""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from tutti import native
from tutti.base.arrays import Mask, Slots
from tutti.base.checks import text
from tutti.errors import ConfigError
from tutti.medium.geometry import BLOCK_NBYTES, FORMAT_VERSION, LAYERS_MAX

Records = npt.NDArray[np.void]


def block_dtype(
    columns: Sequence[tuple[int, str, Any]], itemsize: int = BLOCK_NBYTES
) -> np.dtype[np.void]:
    """A structured dtype from (offset, name, format); blocks end in their CRC."""
    if itemsize == BLOCK_NBYTES:
        columns = [*columns, (BLOCK_NBYTES - 4, "crc", "<u4")]
    offsets, names, formats = zip(*columns, strict=True)
    return np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": itemsize})


RECORD_DTYPE = block_dtype(
    [
        (0, "magic", "<u4"),
        (4, "version", "<u2"),
        (6, "state", "<u2"),
        (8, "pool_uuid", ("u1", 16)),
        (24, "slot", "<u8"),
        (32, "sequence", "<u8"),
        (40, "epoch", "<u8"),
        (48, "key", ("u1", 16)),
        (64, "parent", ("u1", 16)),
        (80, "fingerprint", ("u1", 16)),
        (96, "tenant", "<u8"),
        (104, "member", "<u4"),
        (108, "depth", "<u4"),
        (112, "access_64s", "<u4"),
        (116, "layers", "<u4"),
        (120, "flags", "<u4"),
        (124, "expiry_64s", "<u4"),
        (128, "digests", ("<u8", LAYERS_MAX)),
    ]
)
_FEW = 32  # so many records are filled in microseconds
RECORD_MAGIC = int.from_bytes(b"TREC", "little")
FLAG_DIGESTS = 1
FLAG_PINNED = 2
EXPIRY_UNIT_S = 64
_EXPIRY_MAX = 2**32 - 1
_TENANTS = 2**16 - 1
#: Highest generation and next sequence number; the sequence number of a record is below it.
COUNTER_MAX = 2**63 - 1


class RecordState(IntEnum):
    """`state` of a slot record; STALE and FOREIGN are verdicts of `check_records`, never stored."""

    EMPTY = 0
    READY = 1
    VOID = 2
    QUARANTINED = 3
    STALE = 4
    FOREIGN = 5


@dataclass(frozen=True)
class RecordIdentity:
    """What every record of one member has in common."""

    pool_uuid: bytes
    member: int
    epoch: int
    fingerprint: bytes
    layers: int

    @cached_property
    def struct(self) -> native.NativeRecordIdentity:
        """For native code."""
        return native.NativeRecordIdentity(
            (ctypes.c_uint8 * 16)(*self.pool_uuid),
            (ctypes.c_uint8 * 16)(*self.fingerprint),
            self.epoch,
            self.member,
            self.layers,
        )


def access_64s(unix_ns: int) -> int:
    """Wall time in the unit of records and snapshots: 64 s, enough until the year 10,000."""
    return min(unix_ns // 64_000_000_000, 2**32 - 1)


class RecordContent(NamedTuple):
    """What the records of n slots hold: keys and parents (n, 16), digests (n, layers).

    An ArrayLike has n rows, or is one value for all.  Missing keys and parents are zeros.
    """

    slots: Slots
    sequences: npt.ArrayLike
    state: RecordState
    keys: npt.NDArray[np.uint8] | None = None
    parents: npt.NDArray[np.uint8] | None = None
    depths: npt.ArrayLike = 0
    access_64s: npt.ArrayLike = 0
    tenants: npt.ArrayLike = 0
    expiry_64s: npt.ArrayLike = 0
    pinned: npt.ArrayLike = False
    digests: npt.NDArray[np.uint64] | None = None

    def take(self, rows: Slots) -> RecordContent:
        """The same for some rows (m,)."""
        taken: dict[str, Any] = {
            name: np.asarray(value)[rows] if value is not None and np.ndim(value) else value
            for name, value in self._asdict().items()
        }
        return RecordContent(**taken)


def fill_records(records: Records, identity: RecordIdentity, content: RecordContent) -> None:
    """Overwrite `records` (n, of RECORD_DTYPE, C-contiguous, e.g. a view of staging) and seal them.

    The slots of the content are member-local.
    """
    n, state, digests = len(records), content.state, content.digests
    assert state in (RecordState.READY, RecordState.VOID, RecordState.QUARANTINED)
    flags: Any = 0 if digests is None else FLAG_DIGESTS
    if content.pinned is not False:
        flags = np.where(content.pinned, FLAG_PINNED, 0) | flags
    columns = np.empty((7, n), np.uint64)
    columns[0], columns[1], columns[2] = content.slots, content.sequences, content.tenants
    columns[3], columns[4], columns[5] = content.depths, content.access_64s, flags
    columns[6] = content.expiry_64s
    assert not np.count_nonzero(columns[1] >= COUNTER_MAX), "a sequence number is out of range"
    rows = (content.keys, content.parents, digests)
    places: list[int | None] = []
    for each, width in zip(rows, (16, 16, identity.layers), strict=True):
        assert each is None or each.shape == (n, width), "a row per record"
        places.append(None if each is None else native.address(each))
    library = native.quick() if n <= _FEW else native.lib()
    head = native.address(records), n, ctypes.byref(identity.struct), state
    library.tutti_records_fill(*head, native.address(columns), *places)


def check_records(
    records: Records, slots: Slots, identity: RecordIdentity
) -> npt.NDArray[np.uint8]:
    """What each record, read from the place of member-local `slots`, is: a RecordState (n,) uint8.

    EMPTY for free slots and for torn records, both of which hold no object; `torn_records` tells
    them apart.  Never raises for bytes; the order of the verdicts is that of docs/format.md,
    section 3.
    """
    state = records["state"]
    ours = (
        (records["version"] == FORMAT_VERSION)
        & (records["pool_uuid"] == octets(identity.pool_uuid)).all(axis=1)
        & (records["member"] == identity.member)
        & (records["slot"] == np.asarray(slots, np.uint64))
        & (records["fingerprint"] == octets(identity.fingerprint)).all(axis=1)
        & (records["layers"] == identity.layers)
        & (state <= RecordState.QUARANTINED)
        & (records["sequence"] < COUNTER_MAX)
    )
    current = (records["epoch"] == np.uint64(identity.epoch)) | (state == RecordState.QUARANTINED)
    written = (records["magic"] == RECORD_MAGIC) & (state != RecordState.EMPTY)
    verdicts = np.where(current, state, RecordState.STALE)
    verdicts = np.where(ours, verdicts, RecordState.FOREIGN)
    intact = written & native.records_check(records)
    return np.where(intact, verdicts, RecordState.EMPTY).astype(np.uint8)


def torn_records(records: Records, verdicts: npt.NDArray[np.uint8]) -> Mask:
    """Which records (n,) are torn: EMPTY by `check_records`, but not zeros as those of free slots.

    records: contiguous, as they were read.
    """
    raw = records.view(np.uint8).reshape(-1, BLOCK_NBYTES)
    torn: Mask = (verdicts == RecordState.EMPTY) & raw.any(axis=1)
    return torn


def octets(raw: bytes) -> npt.NDArray[np.uint8]:
    """Bytes as an array, for comparison with and assignment to a field."""
    return np.frombuffer(raw, np.uint8)


def tenant_of(namespace: str) -> int:
    """The number of a namespace on the medium: 0 for none, else 1 to 65535 (docs/format.md).

    Raises ConfigError for what is not a string.
    """
    text("namespace", namespace)
    return xxhash.xxh3_64_intdigest(namespace.encode()) % _TENANTS + 1 if namespace else 0


def expiry_of(ttl_s: float | None) -> int:
    """The end of a time to live that begins now, in Unix time, units of 64 s; 0 for None (never).

    Raises ConfigError for what is not a positive number of seconds.
    """
    if ttl_s is None:
        return 0
    if isinstance(ttl_s, bool) or not isinstance(ttl_s, int | float) or not 0 < ttl_s < math.inf:
        raise ConfigError(f"ttl_s is {ttl_s!r}; pass seconds above 0, or None for no limit")
    until_s = time.time() + min(ttl_s, _EXPIRY_MAX * EXPIRY_UNIT_S)
    return int(min(-(-until_s // EXPIRY_UNIT_S), _EXPIRY_MAX))
