"""The NVMe formats that gio_uring uses: queue entries, opcodes, status codes, SGL descriptors.

Names and values are those of `kernels/include/gio_uring/nvme_spec.h`, which cites the
specification; a test compiles that header and compares every layout and constant.
"""

from __future__ import annotations

import ctypes

from tutti.native import members

_U8 = ctypes.c_uint8
_U32 = ctypes.c_uint32
_U64 = ctypes.c_uint64

FUA = 1 << 30  # cdw12
DSM_DEALLOCATE = 1 << 2  # cdw11
DSM_RANGES_MAX = 256
PAGE_NBYTES = 4096
NLB_MAX = 1 << 16

OPCODE_FLUSH = 0x00
OPCODE_WRITE = 0x01
OPCODE_READ = 0x02
OPCODE_DATASET_MANAGEMENT = 0x09

# PSDT: the kind of a command's data pointer.
PSDT_PRP = 0
PSDT_SGL = 1

# The last byte of an SGL descriptor: type and subtype.
SGL_DATA_BLOCK = 0x00
SGL_BIT_BUCKET = 0x10
SGL_SEGMENT = 0x20
SGL_LAST_SEGMENT = 0x30

# Status code type << 8 | status code.
STATUS_OK = 0x000
STATUS_INVALID_OPCODE = 0x001
STATUS_INVALID_FIELD = 0x002
STATUS_DATA_TRANSFER_ERROR = 0x004
STATUS_INTERNAL_ERROR = 0x006
STATUS_ABORT_REQUESTED = 0x007
STATUS_ABORTED_SQ_DELETION = 0x008
STATUS_INVALID_NAMESPACE = 0x00B
STATUS_INVALID_SGL_SEGMENT = 0x00D
STATUS_INVALID_SGL_COUNT = 0x00E
STATUS_SGL_LENGTH_INVALID = 0x00F
STATUS_SGL_TYPE_INVALID = 0x011
STATUS_INVALID_PRP_OFFSET = 0x013
STATUS_NAMESPACE_WRITE_PROTECTED = 0x020
STATUS_LBA_OUT_OF_RANGE = 0x080
STATUS_CAPACITY_EXCEEDED = 0x081
STATUS_WRITE_TO_READ_ONLY_RANGE = 0x182
STATUS_WRITE_FAULT = 0x280
STATUS_UNRECOVERED_READ = 0x281
STATUS_DIGEST_MISMATCH = 0x7C0
STATUS_TIMED_OUT = 0x7C1
STATUS_CANCELLED = 0x7C2
STATUS_DEVICE_GONE = 0x7C3
STATUS_MEMBER_MOVED = 0x7C4


class Sqe(ctypes.LittleEndianStructure):
    """Submission queue entry, 64 bytes."""

    _fields_ = (
        *members(_U32, "cdw0 nsid cdw2 cdw3"),
        ("mptr", _U64),
        ("dptr", _U64 * 2),
        *members(_U32, "cdw10 cdw11 cdw12 cdw13 cdw14 cdw15"),
    )


class Cqe(ctypes.LittleEndianStructure):
    """Completion queue entry, 16 bytes."""

    _fields_ = (("result", _U32), ("reserved", _U32), ("sq", _U32), ("status", _U32))


class SglDescriptor(ctypes.LittleEndianStructure):
    """SGL descriptor, 16 bytes."""

    _fields_ = (("address", _U64), ("nbytes", _U32), ("reserved", _U8 * 3), ("type", _U8))


class DsmRange(ctypes.LittleEndianStructure):
    """Dataset Management range, 16 bytes; `nlb` is not 0-based."""

    _fields_ = (("attributes", _U32), ("nlb", _U32), ("slba", _U64))


def make_cdw0(opcode: int, psdt: int, cid: int) -> int:
    """Dword 0 of a command."""
    return opcode | psdt << 14 | cid << 16
