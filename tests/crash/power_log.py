"""What a medium may hold after a loss of power, from the recorder's log.

The log (`RecordHeader` in kernels/native/executor.h) has an entry for every request that ended, in
that order. When the power fails after `cut` entries, then

* a write that was forced (FUA), or that a flush among those entries covers, is on the medium;
* every other write may be there, or not, or in part, sector by sector;
* so may any write that was under way: it ended later and had been submitted by then.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tutti.gio_uring.nvme_spec import OPCODE_DATASET_MANAGEMENT, OPCODE_FLUSH, OPCODE_WRITE

HEADER = struct.Struct("<4sIIIQQQ")
FLAG_FUA = 1

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Entry:
    """One request that ended. end: bytes of the log up to and with it. covered: as in the log."""

    opcode: int
    nsid: int
    fua: bool
    offset: int
    nbytes: int
    covered: int
    data: bytes
    end: int


def read_log(content: bytes) -> list[Entry]:
    found, at = [], 0
    while at < len(content):
        magic, opcode, nsid, flags, offset, nbytes, covered = HEADER.unpack_from(content, at)
        assert magic == b"GREC", "not an entry of the recorder"
        at += HEADER.size
        data = content[at : at + nbytes] if opcode == OPCODE_WRITE else b""
        at += len(data)
        fua = bool(flags & FLAG_FUA)
        found.append(Entry(opcode, nsid, fua, offset, nbytes, covered, data, at))
    return found


@dataclass(frozen=True)
class Damage:
    """What happens to writes that are not durable yet, each by itself.

    lost: the chance that nothing of one lands, torn: that some of its sectors do not; under_way:
    that a write that had not ended lands at all, in whole or in part. sector_nbytes: what is never
    torn.
    """

    lost: float
    torn: float
    under_way: float
    sector_nbytes: int = 4096


NOTHING = Damage(0.0, 0.0, 0.0)
DAMAGES = (
    NOTHING,
    Damage(1.0, 0.0, 0.0),  # the cache is lost whole
    Damage(0.5, 0.0, 0.5),  # any subset
    Damage(0.3, 0.4, 0.5, 4096),
    Damage(0.2, 0.6, 0.7, 512),
    Damage(0.0, 0.0, 1.0, 512),
)


def durable(entries: list[Entry], cut: int) -> list[bool]:
    """For each of the first `cut` entries, whether a loss of power cannot touch it any more."""
    ended = entries[:cut]
    covered = {entry.nsid: 0 for entry in ended}
    for entry in ended:
        if entry.opcode == OPCODE_FLUSH:
            covered[entry.nsid] = max(covered[entry.nsid], entry.covered)
    return [entry.fua or i < covered[entry.nsid] for i, entry in enumerate(ended)]


def image_after(
    base: list[Bytes],
    entries: list[Entry],
    cut: int,
    damage: Damage,
    rng: np.random.Generator,
) -> list[Bytes]:
    """The members, which were `base` at the start of the log, after a loss of power at `cut`."""
    images = [member.copy() for member in base]
    for entry, is_durable in zip(entries[:cut], durable(entries, cut), strict=True):
        _apply(images, entry, 0.0 if is_durable else damage.lost, damage, rng, is_durable)
    for entry in entries[cut:]:
        if entry.covered <= cut:
            _apply(images, entry, 1.0 - damage.under_way, damage, rng, False)
    return images


def _apply(
    images: list[Bytes],
    entry: Entry,
    lost: float,
    damage: Damage,
    rng: np.random.Generator,
    is_durable: bool,
) -> None:
    if entry.opcode not in (OPCODE_WRITE, OPCODE_DATASET_MANAGEMENT) or rng.random() < lost:
        return
    place = images[entry.nsid - 1][entry.offset : entry.offset + entry.nbytes]
    data = np.frombuffer(entry.data or bytes(entry.nbytes), np.uint8)
    if is_durable or rng.random() >= damage.torn:
        place[:] = data
        return
    for start in range(0, entry.nbytes, damage.sector_nbytes):
        if rng.random() < 0.5:
            end = start + damage.sector_nbytes
            place[start:end] = data[start:end]
