"""Memory that a controller may read and write: allocation on hugepages, addresses, regions.

On virtual disks and behind an IOMMU every 4 KiB page of a transfer takes a descriptor, so the page
size of a buffer determines the bandwidth; `HostBuffer.backing` reports it.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tutti.base.process import Owned
from tutti.base.units import MiB, format_nbytes
from tutti.errors import CapacityError, ConfigError

HUGEPAGE_NBYTES = 2 * MiB
# linux/mman.h; the mmap module does not name these two.
_MAP_HUGETLB = 0x40000
_MADV_POPULATE_WRITE = 23
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS

Bytes = npt.NDArray[np.uint8]


_NBYTES_MAX = 1 << 56


class HostBuffer:
    """Anonymous zeroed memory, freed when the last view of it is gone.

    hugepages: start at a 2 MiB boundary, use hugetlb pages if enough are reserved, else
    transparent hugepages if the kernel has them, and touch the memory at once.
    array: the memory as uint8 (nbytes,).

    Raises CapacityError when there is not enough memory, ConfigError for a size below one byte.
    """

    def __init__(self, nbytes: int, *, hugepages: bool = True) -> None:
        if nbytes < 1:
            raise ConfigError(f"a buffer of {nbytes} bytes is impossible; ask for at least 1")
        if nbytes > _NBYTES_MAX:
            raise CapacityError(f"{nbytes} bytes are more than a process can address; ask for less")
        self.nbytes = nbytes
        self._is_hugetlb = False
        try:
            self._mapping = self._map_hugetlb() if hugepages else None
            if self._mapping is None:
                # Private: shared memory has transparent hugepages only if shmem_enabled allows it.
                length = nbytes + (HUGEPAGE_NBYTES if hugepages else 0)
                self._mapping = mmap.mmap(-1, length, flags=_PRIVATE)
        except OSError as error:
            raise CapacityError(
                f"cannot allocate {format_nbytes(nbytes)} of memory ({error.strerror});"
                " use a smaller buffer or stop other programs"
            ) from error
        whole: Bytes = np.frombuffer(self._mapping, np.uint8)
        start = -whole.ctypes.data % HUGEPAGE_NBYTES if hugepages else 0
        self.array: Bytes = whole[start : start + nbytes]
        self.address = int(self.array.ctypes.data)
        if hugepages and not self._is_hugetlb:
            self._advise(start)

    def _map_hugetlb(self) -> mmap.mmap | None:
        """Maps reserved hugepages; None if there are not enough."""
        flags = _PRIVATE | _MAP_HUGETLB
        length = -(-self.nbytes // HUGEPAGE_NBYTES) * HUGEPAGE_NBYTES
        try:
            mapping = mmap.mmap(-1, length, flags=flags)
        except OSError:
            return None
        self._is_hugetlb = True
        return mapping

    def _advise(self, start: int) -> None:
        """Requests transparent hugepages and touches them; a refusal only costs speed."""
        assert self._mapping is not None
        length = -(-self.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        for advice in (mmap.MADV_HUGEPAGE, _MADV_POPULATE_WRITE):
            try:
                self._mapping.madvise(advice, start, length)
            except OSError:
                return

    @property
    def backing(self) -> str:
        """Page kind of most of the touched memory: "hugetlb", "thp" or "pages" (4 KiB)."""
        if self._is_hugetlb:
            return "hugetlb"
        for mapping in _mappings():
            if mapping.start <= self.address < mapping.end and mapping.resident_nbytes:
                return "thp" if mapping.huge_nbytes * 2 >= mapping.resident_nbytes else "pages"
        return "pages"


@dataclass
class _Mapping:
    """A mapping of this process: addresses [start, end), and its resident and large bytes."""

    start: int
    end: int
    resident_nbytes: int = 0
    huge_nbytes: int = 0


#: Lines of smaps with the large pages of a mapping of 4 KiB pages (proc(5)).
_HUGE = ("AnonHugePages:", "ShmemPmdMapped:")


def _mappings() -> list[_Mapping]:
    """Mappings of the process in ascending order (proc(5), smaps); none if unknown."""
    try:
        text = Path("/proc/self/smaps").read_bytes().decode(errors="replace")
    except OSError:
        return []
    found: list[_Mapping] = []
    for line in text.rstrip("\n").split("\n") if text else ():
        head = line.split(maxsplit=2)
        if not head[0].endswith(":"):
            first, _, last = head[0].partition("-")
            found.append(_Mapping(int(first, 16), int(last, 16)))
        elif head[0] == "Rss:":
            found[-1].resident_nbytes = int(head[1]) << 10
        elif head[0] == "KernelPageSize:" and int(head[1]) << 10 > mmap.PAGESIZE:
            found[-1].huge_nbytes = found[-1].end - found[-1].start  # hugetlb, touched or not
        elif head[0] in _HUGE:
            found[-1].huge_nbytes += int(head[1]) << 10
    return found


def hugepage_nbytes(ranges: Iterable[tuple[int, int]]) -> int:
    """Bytes of ranges (address, nbytes) that are on large pages now.

    If a mapping is larger than a range, the range counts in proportion.
    """
    mappings = _mappings()
    total = 0.0
    for address, nbytes in ranges:
        for mapping in mappings:
            common = min(address + nbytes, mapping.end) - max(address, mapping.start)
            if common > 0:
                total += mapping.huge_nbytes * common / (mapping.end - mapping.start)
    return int(total)


def address_of(buffer: Any) -> tuple[int, int]:
    """(address, nbytes) of memory that a device may write.

    buffer: a HostBuffer, a numpy array, an object with `data_ptr()` (a torch tensor) or the buffer
    protocol (bytearray, mmap, shared memory's `buf`), or an (address, nbytes) pair whose memory the
    caller keeps mapped.

    Raises ConfigError for memory that is read-only, not contiguous or empty.
    """
    if isinstance(buffer, tuple):
        if len(buffer) != 2 or not all(isinstance(part, int | np.integer) for part in buffer):
            raise ConfigError(
                f"memory {buffer!r} is not a pair of integers; pass (address, nbytes)"
            )
        address, nbytes = map(int, buffer)
    elif isinstance(buffer, HostBuffer):
        address, nbytes = buffer.address, buffer.nbytes
    elif hasattr(buffer, "data_ptr"):
        if not buffer.is_contiguous():
            raise ConfigError("the tensor is not contiguous; pass a contiguous one")
        address, nbytes = int(buffer.data_ptr()), int(buffer.numel() * buffer.element_size())
    else:
        address, nbytes = _address_of_view(buffer)
    if address <= 0 or nbytes <= 0:
        raise ConfigError("the buffer is empty; pass one of at least one byte")
    if address + nbytes > 1 << 64:
        raise ConfigError(
            f"memory at {address:#x} with {nbytes} bytes ends beyond 64 bits; pass its real address"
        )
    return address, nbytes


def _address_of_view(buffer: Any) -> tuple[int, int]:
    try:
        view = memoryview(buffer)
    except TypeError as error:
        kind = type(buffer).__name__
        raise ConfigError(
            f"cannot take the address of a {kind}; pass a numpy array, a tensor, a writable buffer"
            " or (address, nbytes)"
        ) from error
    if view.readonly:
        raise ConfigError("the buffer is read-only; pass a writable one")
    if not view.c_contiguous:
        raise ConfigError("the buffer is not C-contiguous; pass a contiguous one")
    if view.nbytes == 0:
        return 0, 0
    return int(np.frombuffer(view, np.uint8).ctypes.data), view.nbytes


class DmaRegion(Owned):
    """Memory registered with one controller.

    dma: its address in commands. References the buffer and the controller, so that both live at
    least as long. Close it when no command uses the memory any more.
    """

    def __init__(self, buffer: Any, dma: int, unregister: Callable[[DmaRegion], None]) -> None:
        self.buffer = buffer
        self.address, self.nbytes = address_of(buffer)
        self.dma = dma
        self._unregister: Callable[[DmaRegion], None] | None = unregister

    def close(self) -> None:
        """Unregisters the memory; a second call does nothing."""
        if self._unregister is not None:
            self._unregister(self)
            self._unregister = None

    def __enter__(self) -> DmaRegion:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def view_at(address: int, nbytes: int, owner: Any = None) -> Bytes:
    """uint8 of shape (nbytes,) over memory at an address.

    owner: lives as long as the view; without one the caller keeps the memory alive.
    """
    memory: Any = (ctypes.c_uint8 * nbytes).from_address(address)
    memory.owner = owner
    return np.ctypeslib.as_array(memory)
