"""NVMe commands executed on files and block devices, by io_uring or by threads.

Namespace i+1 is file i: a file, a block device, or an NVMe generic character device (/dev/ngXnY),
whose commands bypass the block layer. Files are opened for direct I/O if their file system
supports it; each `FileMember` has the reason if it does not. Ranges of blocks can go through the
page cache instead, see `FileController.set_buffered`. `kernels/native/controller_file.h` describes
how commands become requests to the kernel.
"""

from __future__ import annotations

import bisect
import ctypes
import errno
import mmap
import os
import stat
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tutti.base.arrays import U64
from tutti.base.units import KiB, MiB
from tutti.errors import ConfigError, Unsupported
from tutti.gio_uring import _native
from tutti.gio_uring.controller import NativeController
from tutti.gio_uring.file_member import FileMember
from tutti.gio_uring.memory import address_of, hugepage_nbytes
from tutti.native import members

EXECUTORS = ("auto", "uring", "threads", "passthrough")

_P = ctypes.c_void_p
_I = ctypes.c_int
_U32 = ctypes.c_uint32
_U64 = ctypes.c_uint64

_DIRECT = 1  # FileNamespace::flags
_MDTS_NBYTES = MiB  # largest transfer of one command
# Longest request from memory on 4 KiB pages, as in kernels/native/controller_file.cpp.
_ORDINARY_NBYTES = 512 * KiB
_LARGE_SHARE = 0.9  # share of registered memory on large pages above which requests are long

_lib = _native.part(
    {
        "gio_file_controller_create": (_I, (_P, _P)),
        "gio_file_controller_executor": (_U32, (_P, _P)),
        "gio_file_controller_stats": (None, (_P, _P)),
        "gio_file_controller_set_buffered": (_I, (_P, _P, _U64)),
        "gio_file_controller_set_large_pages": (None, (_P, _I)),
        "gio_uring_refusal": (_I, ()),
    }
)


class FileNamespaceStruct(ctypes.LittleEndianStructure):
    """`gio::FileNamespace`."""

    _fields_ = (
        *members(_I, "fd buffered_fd"),
        *members(_U32, "flags generic_nsid"),
        ("nlb", _U64),
        *members(_U32, "memory_alignment offset_alignment"),
    )


class BufferedRangeStruct(ctypes.LittleEndianStructure):
    """`gio::BufferedRange`."""

    _fields_ = (("nsid", _U32), ("reserved", _U32), ("slba", _U64), ("nlb", _U64))


class FileConfigStruct(ctypes.LittleEndianStructure):
    """`gio::FileConfig`."""

    _fields_ = (
        ("namespaces", _U64),
        *members(_U32, "n_namespaces lba_shift mdts_nbytes request_nbytes_max requests executor"),
        ("threads", _U32),
        ("record_fd", _I),
    )


class FileStats(ctypes.LittleEndianStructure):
    """`gio::FileStats`: totals since creation.

    commands: fetched. requests: submitted to the kernel, without repetitions. joined: commands,
    or parts of them, merged into the request of an adjacent one. bounced: requests copied because
    direct I/O does not accept their memory. repeated: requests continued or repeated after short
    transfers and errors. buffered: requests through the page cache, of files opened for direct I/O.
    """

    _fields_ = (
        *members(_U64, "commands requests nbytes_read nbytes_written joined bounced repeated"),
        ("buffered", _U64),
    )


class BlockRange(NamedTuple):
    """Consecutive blocks of one namespace."""

    nsid: int
    slba: int
    nlb: int


class RequestLimits(NamedTuple):
    """Limits of requests to the kernel.

    nbytes_max: adjacent commands are joined, and long ones split, up to this size; up to 512 KiB
    if memory is not on large pages, see `FileController.read_page_sizes`. in_flight_max: requests
    at a time. threads: number of threads of the executor "threads".
    """

    nbytes_max: int = 2 * MiB
    in_flight_max: int = 256
    threads: int = 4


_LIMITS = RequestLimits()


class FileController(NativeController):
    """NVMe over files.

    files: paths, file descriptors or `FileMember`s; the controller closes what it opened.
    lba_nbytes: the block size, 512 to 65536. executor: "uring", "threads", "passthrough" (NVMe
    commands through io_uring, for generic character devices only), or "auto": io_uring unless it is
    refused, see `executor_name` and `fallback_reason`. limits: of requests.
    service_threads: number of threads that serve the files, each with an executor, at most one per
    file; None: one per drive that the files are on. record_fd: an open file that receives what
    reached the medium (`RecordHeader` in `kernels/native/executor.h`), for tests of power loss.
    lock: open the files exclusively, see `FileMember.lock`.

    Raises what FileMember raises, ConfigError for unacceptable arguments, Unsupported where
    executor="uring" is refused.
    """

    def __init__(
        self,
        files: Sequence[str | os.PathLike[str] | int | FileMember],
        *,
        lba_nbytes: int = 4 * KiB,
        executor: str = "auto",
        limits: RequestLimits = _LIMITS,
        record_fd: int | None = None,
        lock: bool = False,
        service_threads: int | None = None,
    ) -> None:
        if not isinstance(executor, str) or executor not in EXECUTORS:
            raise ConfigError(f"executor is {executor!r}; use one of {', '.join(EXECUTORS)}")
        if lba_nbytes & (lba_nbytes - 1) or not 512 <= lba_nbytes <= 64 * KiB:
            raise ConfigError(f"lba_nbytes={lba_nbytes} is not a power of two from 512 to 65536")
        if not files:
            raise ConfigError("no file was given; pass at least one")
        self.members: list[FileMember] = []
        self._own_members: list[FileMember] = []
        handles: list[int] = []
        try:
            self._take_members(files, lba_nbytes, lock)
            executor = self._choose_executor(executor)
            request_nbytes_max = limits.nbytes_max
            for member in self.members:
                if member.generic is not None:
                    most = min(_ORDINARY_NBYTES, member.generic.request_nbytes_max)
                    request_nbytes_max = min(request_nbytes_max, most)
            config = FileConfigStruct(
                n_namespaces=len(self.members),
                lba_shift=lba_nbytes.bit_length() - 1,
                mdts_nbytes=_MDTS_NBYTES,
                request_nbytes_max=request_nbytes_max,
                requests=limits.in_flight_max,
                executor=EXECUTORS.index(executor),
                threads=limits.threads,
                record_fd=-1 if record_fd is None else record_fd,
            )
            most = len(self.members) if record_fd is None else 1
            if service_threads is not None and not 1 <= service_threads <= most:
                raise ConfigError(
                    f"service_threads={service_threads}; each serves at least one file: pass 1 to"
                    f" {most}{'' if record_fd is None else ' with record_fd'}"
                )
            self._routes, service_threads = _deal(_drives_of(self.members), service_threads)
            self._create(config, lba_nbytes, service_threads, handles)
            super().__init__(*handles)
        except BaseException:
            if not hasattr(self, "_finalizer"):
                for made in handles:
                    _native.lib().gio_controller_destroy(made)
            self._close_members()
            raise
        self._buffered: tuple[BlockRange, ...] = ()
        self._spans = np.zeros(0, np.uint64), np.zeros(0, np.uint64)  # their ends, by `_places`
        self._request_nbytes_max = (request_nbytes_max, min(request_nbytes_max, _ORDINARY_NBYTES))
        self._has_large_pages = False
        self._closing = threading.Lock()
        self.executor_name, self.fallback_reason = self._read_executor()

    def check_places(self, nsids: Iterable[int]) -> None:
        for nsid in nsids:
            self.members[nsid - 1].check_place()

    def _take_members(
        self,
        files: Sequence[str | os.PathLike[str] | int | FileMember],
        lba_nbytes: int,
        lock: bool,
    ) -> None:
        for file in files:
            member = file if isinstance(file, FileMember) else FileMember(file, lock=lock)
            self.members.append(member)
            if member is not file:
                self._own_members.append(member)
            if member.generic is not None and lba_nbytes % member.generic.lba_nbytes:
                raise ConfigError(
                    f"{member.name} has blocks of {member.generic.lba_nbytes} bytes, more than the"
                    f" {lba_nbytes} of a pool; format the namespace with 512 or 4096 by nvme-cli"
                )
            if member.direct and lba_nbytes % member.offset_alignment:
                member.give_up_direct(
                    f"blocks of {lba_nbytes} bytes are smaller than its direct I/O,"
                    f" {member.offset_alignment}"
                )
            if member.nbytes < lba_nbytes:
                raise ConfigError(
                    f"{member.name} has {member.nbytes} bytes, less than a block of {lba_nbytes};"
                    " correct the path, or allocate it first"
                )

    def _choose_executor(self, asked: str) -> str:
        """Checks the executor: files and generic devices have different ones, and do not mix."""
        generic = [member.name for member in self.members if member.generic is not None]
        if generic and len(generic) < len(self.members):
            raise ConfigError(
                f"{generic[0]} is an NVMe generic device and others are not; name the block"
                " devices of all, or the generic ones of all"
            )
        if generic and asked not in ("auto", "passthrough"):
            raise ConfigError(f"{generic[0]} supports only executor='passthrough', not {asked!r}")
        if not generic and asked == "passthrough":
            raise ConfigError(
                f"{self.members[0].name} is not an NVMe generic device; name one, as /dev/ng0n1"
            )
        return "passthrough" if generic else asked

    @property
    def routes(self) -> list[tuple[int, int]]:
        """As NativeController.routes: the files of one drive share a service thread."""
        return self._routes

    def _create(
        self, config: FileConfigStruct, lba_nbytes: int, service_threads: int, handles: list[int]
    ) -> None:
        """Creates the native objects in ``handles``; the caller destroys these if it raises."""
        namespaces = (FileNamespaceStruct * len(self.members))()
        for entry, member in zip(namespaces, self.members, strict=True):
            entry.fd = member.fd
            entry.buffered_fd = -1 if member.buffered_fd is None else member.buffered_fd
            entry.flags = _DIRECT if member.direct else 0
            entry.generic_nsid = 0 if member.generic is None else member.generic.nsid
            entry.nlb = member.nbytes // lba_nbytes
            entry.memory_alignment = member.memory_alignment
            entry.offset_alignment = member.offset_alignment
        config.namespaces = ctypes.addressof(namespaces)
        result = 0
        while len(handles) < service_threads and result == 0:
            handle = _P()
            result = _lib().gio_file_controller_create(ctypes.byref(config), ctypes.byref(handle))
            handles += [int(handle.value)] if handle.value else []
        is_uring = config.executor == EXECUTORS.index("uring")
        if result < 0 and is_uring and (reason := uring_refusal()):
            raise Unsupported(f"io_uring is refused: {reason}; use executor='auto' or 'threads'")
        if config.executor == EXECUTORS.index("passthrough") and result < 0:
            raise Unsupported(
                f"no passthrough: {_refusal(result)}; it needs io_uring of Linux 5.19 or newer,"
                " name the block device instead"
            )
        remedy = (
            "sizes are at least one block, requests 1 to 4096 and threads 1 to 64; with fewer of"
            " both it needs less"
        )
        _native.check(result, "cannot create a file controller", remedy, ConfigError)

    def _read_executor(self) -> tuple[str, str | None]:
        error = _I()
        kind = _lib().gio_file_controller_executor(self.handle, ctypes.byref(error))
        return EXECUTORS[kind], _refusal(error.value)

    @property
    def direct(self) -> bool:
        """Whether every file is opened for direct I/O; see `members` for the reasons."""
        return all(member.direct for member in self.members)

    @property
    def buffered(self) -> tuple[BlockRange, ...]:
        """The ranges of the last `set_buffered`, which go through the page cache."""
        return self._buffered

    def set_buffered(self, ranges: Sequence[BlockRange]) -> None:
        """Sends exactly these blocks through the page cache, and all others through direct I/O.

        Blocks that leave the page cache are written back and dropped first, so that no byte exists
        twice. No command to blocks that change may be under way or start meanwhile.
        Raises ConfigError for ranges that are empty, overlap, lie outside or are not whole memory
        pages, Unsupported if a file lacks a direct or a buffered descriptor, and MediumError if the
        write-back fails. Nothing has changed after an error.
        """
        self._check_open()
        for given in ranges:
            if any(nbytes % mmap.PAGESIZE for nbytes in self._span(given)):
                raise ConfigError(
                    f"{given} begins or ends within a page of {mmap.PAGESIZE} bytes, which would be"
                    " written back over its neighbour; choose whole pages within the namespace"
                )
        for nsid in {r.nsid for r in ranges}:
            self.check_has_both(nsid)
        for piece in _without(self._buffered, ranges):
            self.drop(piece)
        array = (BufferedRangeStruct * len(ranges))()
        for entry, given in zip(array, ranges, strict=True):
            entry.nsid, entry.slba, entry.nlb = given
        remedy = "give disjoint ranges of at least one block within their namespace"
        for handle in self.handles:  # all have the same ranges: if one refuses, the first does
            result = _lib().gio_file_controller_set_buffered(
                handle, ctypes.addressof(array), len(ranges)
            )
            _native.check(result, "cannot choose what is buffered", remedy, ConfigError)
        self._buffered = tuple(ranges)
        rows = np.array(sorted(ranges), np.uint64).reshape(-1, 3)
        first = _places(rows[:, 0], rows[:, 1])
        self._spans = first, first + rows[:, 2]
        self.path_changes += 1

    def path_of(self, nsid: npt.ArrayLike, slba: npt.ArrayLike) -> str:
        first, end = self._spans
        cached = ~np.array([member.direct for member in self.members])[
            np.asarray(nsid, np.intp) - 1
        ]
        if first.size:
            places = _places(nsid, slba)
            row = np.searchsorted(first, places, "right") - 1
            cached |= (row >= 0) & (places < end[row])
        if not cached.any():
            return "direct"
        return "page cache" if cached.all() else "both"

    def check_has_both(self, nsid: int) -> None:
        """Raises Unsupported unless ranges of this file can go through the page cache."""
        if not 1 <= nsid <= len(self.members):
            raise ConfigError(f"no namespace {nsid}; there are 1 to {len(self.members)}")
        member = self.members[nsid - 1]
        if not member.direct:
            raise Unsupported(
                f"{member.name} is buffered as a whole: {member.buffered_reason}; put it on a file"
                " system with direct I/O"
            )
        if member.buffered_fd is None:
            raise Unsupported(f"{member.name} cannot be opened twice; mount /proc")

    def _span(self, blocks: BlockRange) -> tuple[int, int]:
        lba_nbytes = self.info.lba_nbytes
        return blocks.slba * lba_nbytes, blocks.nlb * lba_nbytes

    def read_page_sizes(self) -> None:
        """See NativeController.read_page_sizes; if most memory is on large pages, all counts so."""
        ranges = [address_of(buffer) for buffer in list(self._buffers.values())]
        total = sum(nbytes for _, nbytes in ranges)
        self._has_large_pages = total > 0 and hugepage_nbytes(ranges) >= _LARGE_SHARE * total
        with self._closing:
            for handle in () if self.is_closed else self.handles:
                _lib().gio_file_controller_set_large_pages(handle, self._has_large_pages)

    @property
    def request_nbytes_max(self) -> int:
        large, ordinary = self._request_nbytes_max
        return large if self._has_large_pages else ordinary

    def drop(self, blocks: BlockRange) -> None:
        """Writes blocks back and drops them from the page cache.  Raises MediumError."""
        self.members[blocks.nsid - 1].drop(*self._span(blocks))

    def resident_nbytes(self, blocks: BlockRange) -> int:
        """Number of bytes of these blocks in the page cache.  Raises MediumError."""
        return self.members[blocks.nsid - 1].resident_nbytes(*self._span(blocks))

    def stats(self) -> FileStats:
        """Totals since creation."""
        self._check_open()
        total, part = FileStats(), FileStats()
        for handle in self.handles:
            _lib().gio_file_controller_stats(handle, ctypes.byref(part))
            for name in (field[0] for field in FileStats._fields_):
                setattr(total, name, getattr(total, name) + getattr(part, name))
        return total

    def close(self) -> None:
        with self._closing:
            super().close()
        self._close_members()

    def _close_members(self) -> None:
        for member in self._own_members:
            member.close()


def _places(nsid: npt.ArrayLike, slba: npt.ArrayLike) -> U64:
    """Encodes (nsid, slba) of blocks (n,) as one number each, for searches."""
    return (np.asarray(nsid, np.uint64) << np.uint64(48)) + np.asarray(slba, np.uint64)


def _deal(drives: list[int], threads: int | None) -> tuple[list[tuple[int, int]], int]:
    """((service thread, its nsid) of each file, number of threads), by the drives of the files.

    Files of one drive share a service thread unless there are to be more threads than drives.
    """
    n_drives = max(drives) + 1
    threads = n_drives if threads is None else threads
    turns = drives if threads <= n_drives else range(len(drives))
    return [(turn % threads, nsid) for nsid, turn in enumerate(turns, 1)], threads


def _drives_of(members: Sequence[FileMember]) -> list[int]:
    """The drive of each member, numbered from 0; partitions of one disk are on the same drive."""
    numbers: dict[str, int] = {}
    found = []
    for member in members:
        status = os.fstat(member.fd)
        is_device = stat.S_ISBLK(status.st_mode) or stat.S_ISCHR(status.st_mode)
        device = status.st_rdev if is_device else status.st_dev
        node = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
        drive = f"{device} {stat.S_ISCHR(status.st_mode)}"
        if not stat.S_ISCHR(status.st_mode) and node.exists():
            real = node.resolve()
            drive = str(real.parent if (real / "partition").exists() else real)
        found.append(numbers.setdefault(drive, len(numbers)))
    return found


def uring_refusal() -> str | None:
    """The reason why io_uring cannot be used in this process; None if it can."""
    return _refusal(int(_lib().gio_uring_refusal()))


def _refusal(error: int) -> str | None:
    if error == 0:
        return None
    text = os.strerror(-error)
    if -error in (errno.EPERM, errno.EACCES):
        return f"{text}: a sandbox or the sysctl kernel.io_uring_disabled forbids it"
    if -error in (errno.ENOSYS, errno.EINVAL):
        return f"{text}: this kernel has none, or one older than Linux 5.11"
    return text


def _without(old: Sequence[BlockRange], new: Sequence[BlockRange]) -> list[BlockRange]:
    """The parts of the ranges `old` that no range in `new` covers."""
    ordered = sorted(new)
    pieces = []
    for nsid, slba, nlb in old:
        end = slba + nlb
        # From the last range that begins at or before this one; the ranges are disjoint.
        first = max(0, bisect.bisect_right(ordered, (nsid, slba, nlb)) - 1)
        for i in range(first, len(ordered)):
            other = ordered[i]
            if other[:2] >= (nsid, end):
                break
            if other.nsid == nsid and slba < other.slba + other.nlb:
                if slba < other.slba:
                    pieces.append(BlockRange(nsid, slba, other.slba - slba))
                slba = other.slba + other.nlb
        if slba < end:
            pieces.append(BlockRange(nsid, slba, end - slba))
    return pieces
