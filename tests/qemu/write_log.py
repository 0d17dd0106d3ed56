"""QEMU's log of writes (`blklogwrites`), as the power-loss tests read logs.

Format: Linux, Documentation/admin-guide/device-mapper/log-writes.rst; QEMU writes the same, with
entries in the order of submission.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
from crash.power_log import Entry

from qemu.lives import MARK
from tutti.gio_uring.nvme_spec import OPCODE_DATASET_MANAGEMENT, OPCODE_FLUSH, OPCODE_WRITE

_MAGIC = 0x6A736677736872
_SUPER = struct.Struct("<QQQI")
_ENTRY = struct.Struct("<QQQQ")
_FLUSH, _FUA, _DISCARD = 1, 2, 4


def read_write_log(
    content: bytes, pool_nbytes: int, forced: range
) -> tuple[list[Entry], list[int]]:
    """(entries, marks): what reached the drive below `pool_nbytes`, and where the marks were.

    Positions count entries of the log. A flush covers what was logged before it. QEMU's drive takes
    FUA and passes none on, so the log has none: `forced` are the bytes whose writes carry it.
    """
    magic, version, _, sector = _SUPER.unpack_from(content)
    assert (magic, version) == (_MAGIC, 1), "not a log of writes"
    found: list[Entry] = []
    marks: list[int] = []
    position = 0
    at = sector
    while at + _ENTRY.size <= len(content):
        first, count, flags, _ = _ENTRY.unpack_from(content, at)
        if count == 0 and flags == 0:
            break  # the log was not written any further
        at += sector
        position += 1
        offset, nbytes = first * sector, count * sector
        if flags & _DISCARD:
            entry = Entry(OPCODE_DATASET_MANAGEMENT, 1, False, offset, nbytes, 0, b"", position)
        elif count == 0:
            entry = Entry(OPCODE_FLUSH, 1, False, 0, 0, len(found), b"", position)
        else:
            data = content[at : at + nbytes]
            at += nbytes
            if offset >= pool_nbytes:
                assert data.startswith(MARK), "a write behind the pool that is not a mark"
                # Nothing was under way meanwhile, so a mark is as old as the write before it.
                marks.append(found[-1].end if found else 0)
                continue
            fua = bool(flags & _FUA) or offset in forced
            entry = Entry(OPCODE_WRITE, 1, fua, offset, nbytes, len(found), data, position)
        found.append(entry)
    return found, marks


def image_at_end(base: np.ndarray, entries: Sequence[Entry]) -> np.ndarray:
    """What the drive holds after all entries."""
    image = base.copy()
    for entry in entries:
        place = image[entry.offset : entry.offset + entry.nbytes]
        if entry.opcode == OPCODE_WRITE:
            place[:] = np.frombuffer(entry.data, np.uint8)
    return image
