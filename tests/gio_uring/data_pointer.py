"""Building a command's data pointer in Python: SGL or PRP.

The product builds it in `kernels/include/gio_uring/sgl.h`; here tests build malformed ones too.
`Extent` is (address, nbytes) as the controller addresses memory. Lists are written into
`ListMemory`, which must be registered with the controller.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tutti.errors import ConfigError
from tutti.gio_uring.nvme_spec import (
    DSM_DEALLOCATE,
    DSM_RANGES_MAX,
    PAGE_NBYTES,
    PSDT_PRP,
    PSDT_SGL,
    SGL_DATA_BLOCK,
    SGL_LAST_SEGMENT,
    DsmRange,
    SglDescriptor,
    Sqe,
)

Extent = tuple[int, int]
_U32_MAX = 0xFFFFFFFF


class ListMemory(NamedTuple):
    """Where one command's descriptor list is written: 16 bytes per descriptor, 8 per PRP entry."""

    address: int
    dma: int
    nbytes: int


def join(extents: Iterable[Extent]) -> list[Extent]:
    """Adjacent extents made one, as long as a descriptor's 32-bit length holds them."""
    joined: list[Extent] = []
    for address, nbytes in extents:
        if joined:
            last, last_nbytes = joined[-1]
            if last + last_nbytes == address and last_nbytes + nbytes <= _U32_MAX:
                joined[-1] = (last, last_nbytes + nbytes)
                continue
        joined.append((address, nbytes))
    return joined


def set_sgl(sqe: Sqe, extents: Iterable[Extent], memory: ListMemory) -> None:
    """Point `sqe` at the extents by SGL: one data block, or one last segment in `memory`.

    Raises ConfigError when the list does not fit.
    """
    blocks = join(extents)
    assert blocks, "a transfer has at least one extent"
    if len(blocks) == 1:
        head = SglDescriptor(blocks[0][0], blocks[0][1], type=SGL_DATA_BLOCK)
    else:
        nbytes = len(blocks) * ctypes.sizeof(SglDescriptor)
        _check_room("SGL", nbytes, memory)
        descriptors = (SglDescriptor * len(blocks)).from_address(memory.address)
        for descriptor, (address, length) in zip(descriptors, blocks, strict=True):
            ctypes.memset(ctypes.addressof(descriptor), 0, ctypes.sizeof(SglDescriptor))
            descriptor.address = address
            descriptor.nbytes = length
        head = SglDescriptor(memory.dma, nbytes, type=SGL_LAST_SEGMENT)
    set_descriptor(sqe, head)


def set_descriptor(sqe: Sqe, descriptor: SglDescriptor) -> None:
    """Make `descriptor` the data pointer of `sqe`."""
    sqe.cdw0 = (sqe.cdw0 & ~(3 << 14)) | PSDT_SGL << 14
    sqe.dptr[0] = descriptor.address
    sqe.dptr[1] = descriptor.nbytes | descriptor.type << 56


def prp_pages(extents: Sequence[Extent]) -> list[int]:
    """PRP1 and the addresses of all later pages.

    Raises ConfigError where PRP cannot express the extents: it allows an offset in the first page
    only, and every extent but the last must end on a page boundary.
    """
    pages: list[int] = []
    end = 0
    for address, nbytes in extents:
        if nbytes == 0:
            continue
        continues = bool(pages) and end % PAGE_NBYTES != 0
        aligned = address % 4 == 0 if not pages else address % PAGE_NBYTES == 0
        if (continues and address != end) or (not continues and not aligned):
            raise ConfigError(
                f"PRP cannot describe an extent at {address:#x}; align it to {PAGE_NBYTES} bytes"
            )
        first = -(-end // PAGE_NBYTES) * PAGE_NBYTES if continues else address
        end = address + nbytes
        while first < end:
            pages.append(first)
            first = (first // PAGE_NBYTES + 1) * PAGE_NBYTES
    return pages


def set_prp(sqe: Sqe, extents: Sequence[Extent], memory: ListMemory) -> None:
    """Point `sqe` at the extents by PRP, with a list in `memory` beyond two pages.

    The list may cross pages of its own: then the last entry of each page leads to the next.
    Raises ConfigError when the list does not fit or the extents are not aligned as PRP needs.
    """
    pages = prp_pages(extents)
    assert pages, "a transfer has at least one extent"
    sqe.cdw0 = (sqe.cdw0 & ~(3 << 14)) | PSDT_PRP << 14
    sqe.dptr[0] = pages[0]
    sqe.dptr[1] = 0
    if len(pages) == 2:
        sqe.dptr[1] = pages[1]
    elif len(pages) > 2:
        sqe.dptr[1] = _write_prp_list(pages[1:], memory)


def _write_prp_list(pages: Sequence[int], memory: ListMemory) -> int:
    entries: list[int] = []
    for i, page in enumerate(pages):
        dma = memory.dma + 8 * len(entries)
        if dma % PAGE_NBYTES == PAGE_NBYTES - 8 and i != len(pages) - 1:
            entries.append(dma + 8)
        entries.append(page)
    _check_room("PRP", 8 * len(entries), memory)
    target = (ctypes.c_uint64 * len(entries)).from_address(memory.address)
    for i, entry in enumerate(entries):
        target[i] = entry
    return memory.dma


def set_deallocate(sqe: Sqe, ranges: Sequence[tuple[int, int]], memory: ListMemory) -> None:
    """Write (slba, nlb) ranges, at most 256, to `memory` and point a DSM command at them."""
    assert 1 <= len(ranges) <= DSM_RANGES_MAX, "DSM takes 1 to 256 ranges"
    nbytes = len(ranges) * ctypes.sizeof(DsmRange)
    _check_room("DSM", nbytes, memory)
    listed = (DsmRange * len(ranges)).from_address(memory.address)
    for entry, (slba, nlb) in zip(listed, ranges, strict=True):
        entry.attributes, entry.nlb, entry.slba = 0, nlb, slba
    sqe.cdw10 = len(ranges) - 1
    sqe.cdw11 = DSM_DEALLOCATE
    set_prp(sqe, [(memory.dma, nbytes)], ListMemory(0, 0, 0))


def _check_room(kind: str, nbytes: int, memory: ListMemory) -> None:
    if nbytes > memory.nbytes:
        raise ConfigError(
            f"a {kind} list of {nbytes} bytes does not fit its {memory.nbytes} bytes of memory;"
            " move fewer or larger extents with one command"
        )
