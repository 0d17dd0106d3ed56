"""Files and devices as members of a file controller: opened, locked, allocated.

Devices are opened exclusively (O_EXCL, open(2)): they cannot be mounted meanwhile, and a mounted
device cannot be opened.

A member that is opened for direct I/O has a second, buffered file descriptor of the same file, for
blocks that are to stay in the page cache.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import stat
import time
from collections.abc import Callable, Iterator
from functools import cache
from io import FileIO
from pathlib import Path
from typing import TypeVar

import numpy as np

from tutti.base.process import Owned, finalize, own_file
from tutti.base.units import MiB
from tutti.errors import (
    ConfigError,
    MediumError,
    PoolInUse,
    PoolMoved,
    PoolNotFound,
    PoolReadOnly,
    TuttiError,
)
from tutti.gio_uring import _native, shared_file
from tutti.gio_uring.drives.generic_device import GenericNamespace, claim, identify, is_generic

_T = TypeVar("_T")
_P = ctypes.c_void_p
_U32 = ctypes.c_uint32

_lib = _native.part({"gio_file_alignment": (ctypes.c_int, (ctypes.c_int, _P, _P))})

_READ_ONLY_ERRNOS = (errno.EROFS, errno.EACCES, errno.EPERM)
_LOCK_NAP_S = 0.02
LOCK_TIMEOUT_S = 2.0
_FOLIO_NBYTES_MAX = 2 * MiB  # folios are aligned to their size, at most this on x86-64 (PMD_SIZE)
_SYNC_AND_WAIT = 1 | 2 | 4  # sync_file_range(2): WAIT_BEFORE, WRITE, WAIT_AFTER


class FileMember(Owned):
    """One open file, block device or NVMe generic device; closed by `close`, or by the collector.

    file: a path, or a file descriptor, which is duplicated with its flags. direct: whether to try
    direct I/O (paths only). lock: lock the file as `lock` does, before reading anything.

    fd: the file descriptor. nbytes: size. direct: whether it is open for direct I/O, with
    `memory_alignment` and `offset_alignment` in bytes; if not, `buffered_reason` has the reason.
    buffered_fd: of a direct member, a descriptor that uses the page cache; None if /proc does not
    allow it, and for generic devices. generic: the identification of a generic device.

    Raises PoolNotFound, PoolReadOnly, ConfigError for other kinds of files, else MediumError.
    """

    def __init__(
        self, file: str | os.PathLike[str] | int, *, direct: bool = True, lock: bool = False
    ) -> None:
        self.name = f"file {file}" if isinstance(file, int) else os.fspath(file)
        #: Absolute path; None if a descriptor was given.
        self._path = None if isinstance(file, int) else os.path.join(os.getcwd(), self.name)
        self.buffered_reason: str | None = None
        self.generic: GenericNamespace | None = None
        self.memory_alignment = self.offset_alignment = 1
        with _explained(self.name):
            # The lock of a given descriptor belongs to its opener, and stays.
            if isinstance(file, int):
                self._file = FileIO(fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, 0), "r+")
                self._finalizer = finalize(self, FileIO.close, own_file(self._file))
                direct = bool(fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT)
                self._set_direct(direct, "it was opened so")
            else:
                self._file = FileIO(self._open(self.name, direct), "r+")
                self._finalizer = finalize(self, unlock_and_close, own_file(self._file))
        self.fd = self._file.fileno()
        self.buffered_fd: int | None = None
        self._buffered_finalizer: Callable[[], object] = _nothing
        try:
            self._prepare(lock)
        except BaseException:
            self.close()
            raise

    def _prepare(self, lock: bool) -> None:
        if lock:
            self.lock()
        if is_generic(self.name):
            self._become_generic()
            return
        with _explained(self.name):
            self.nbytes = self._size()
        if self.direct:
            self._find_alignment()
        if self.direct:
            self._open_buffered()

    def _become_generic(self) -> None:
        """Commands bypass the block layer: memory is aligned to dwords, offsets to blocks."""
        self.generic = identify(self.fd, self.name)
        claimed = patiently(lambda: claim(self.name), LOCK_TIMEOUT_S)
        if claimed is not None:
            self._buffered_finalizer = finalize(self, FileIO.close, own_file(FileIO(claimed, "r+")))
        self.nbytes = self.generic.nlb * self.generic.lba_nbytes
        self.memory_alignment, self.offset_alignment = 4, self.generic.lba_nbytes
        self._set_direct(True, "")

    def _open(self, path: str, direct: bool) -> int:
        flags = os.O_RDWR | os.O_CLOEXEC
        self._set_direct(direct, "direct I/O was not asked for")
        try:
            if direct:
                try:
                    return _open_alone(path, flags | os.O_DIRECT)
                except OSError as error:
                    if error.errno != errno.EINVAL:
                        raise
                    self._set_direct(False, "its file system refuses O_DIRECT")
            return _open_alone(path, flags)
        except OSError as error:
            raise open_error(path, error) from error

    def _size(self) -> int:
        status = os.fstat(self.fd)
        if stat.S_ISREG(status.st_mode):
            return status.st_size
        if not stat.S_ISBLK(status.st_mode):
            raise ConfigError(
                f"{self.name} is neither a file nor a block device; pass one of those"
            )
        return os.lseek(self.fd, 0, os.SEEK_END)

    def _find_alignment(self) -> None:
        memory, offset = _U32(), _U32()
        result = _lib().gio_file_alignment(self.fd, ctypes.byref(memory), ctypes.byref(offset))
        if result == -errno.EOPNOTSUPP:
            self.give_up_direct("its file system has no direct I/O")
            return
        remedy = "check the medium, or open the file without direct I/O"
        _native.check(result, f"cannot tell the alignment of {self.name}", remedy, MediumError)
        self.memory_alignment, self.offset_alignment = memory.value, offset.value

    def _open_buffered(self) -> None:
        try:
            # Through /proc/self/fd, so that it is the same file even if its name changed.
            file = FileIO(f"/proc/self/fd/{self.fd}", "r+")
        except OSError:
            return
        self._buffered_finalizer = finalize(self, FileIO.close, own_file(file))
        self.buffered_fd = file.fileno()
        # No read-ahead: it would cache blocks that belong to direct I/O.
        os.posix_fadvise(self.buffered_fd, 0, 0, os.POSIX_FADV_RANDOM)

    def give_up_direct(self, reason: str) -> None:
        """Switches to the page cache permanently."""
        with _explained(self.name):
            flags = fcntl.fcntl(self.fd, fcntl.F_GETFL)
            fcntl.fcntl(self.fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        self.memory_alignment = self.offset_alignment = 1
        self._set_direct(False, reason)

    def _set_direct(self, direct: bool, reason: str) -> None:
        self.direct = direct
        self.buffered_reason = None if direct else reason

    def lock(self) -> None:
        """Locks the file exclusively until `close`.

        The lock belongs to the open file description, which the kernel's transfers reference: after
        a process was killed, it is released when the last transfer ends. So this retries for two
        seconds. Raises PoolInUse.
        """
        patiently(lambda: lock_file(self.fd, self.name), LOCK_TIMEOUT_S)

    def check_place(self) -> None:
        """Raises PoolMoved if the path leads to another file now, or the file was truncated."""
        with _explained(self.name):
            status = os.fstat(self.fd)
        if not stat.S_ISREG(status.st_mode):
            return
        if status.st_size < self.nbytes:
            raise PoolMoved(
                f"{self.name} was truncated to {status.st_size} of {self.nbytes} bytes while it was"
                " open; format it again"
            )
        if self._path is None:
            return
        try:
            found = os.stat(self._path)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise PoolMoved(
                f"{self.name} was removed or renamed while it was open; name it so again, or close"
                " the pool and open it where it is"
            ) from error
        except OSError:
            return  # unknown
        if not os.path.samestat(found, status):
            raise PoolMoved(
                f"{self.name} was replaced by another file while it was open; close the pool and"
                " open the one that is meant"
            )

    def write_back(self, offset: int, nbytes: int) -> None:
        """Writes these bytes from the page cache to the medium, and waits for that.

        They are durable only after a flush of the medium.  Raises MediumError.
        """
        arguments = (ctypes.c_int64(offset), ctypes.c_int64(nbytes), _SYNC_AND_WAIT)
        if _libc().sync_file_range(self._cached_fd, *arguments) != 0:
            code = ctypes.get_errno()
            raise MediumError(
                f"cannot write the page cache of {self.name} back: {os.strerror(code)}; check the"
                " device and its free space"
            )

    def drop(self, offset: int, nbytes: int) -> None:
        """Writes these bytes back and drops them from the page cache.  Raises MediumError.

        The kernel does not drop folios that extend beyond the range, so the range is extended to
        whole folios; neighbours that are dropped with it are read again when needed.
        """
        start = offset - offset % _FOLIO_NBYTES_MAX
        end = offset + nbytes + -(offset + nbytes) % _FOLIO_NBYTES_MAX
        self.write_back(start, end - start)
        with _explained(self.name):
            os.posix_fadvise(self._cached_fd, start, end - start, os.POSIX_FADV_DONTNEED)

    def resident_nbytes(self, offset: int, nbytes: int) -> int:
        """Number of these bytes in the page cache, in whole pages (mincore(2)).

        Raises MediumError if they cannot be mapped or mincore fails, PoolMoved if the file was
        truncated.
        """
        start = offset - offset % mmap.ALLOCATIONGRANULARITY
        length = offset + nbytes - start
        try:
            mapped = mmap.mmap(
                self._cached_fd, length, mmap.MAP_SHARED, mmap.PROT_READ, offset=start
            )
        except (OSError, ValueError) as error:  # ValueError: it is shorter
            self.check_place()
            raise MediumError(
                f"cannot map {self.name}: {error}; check the limits of open files and of memory"
            ) from error
        with mapped:
            view = np.frombuffer(mapped, np.uint8)
            pages = np.zeros(-(-length // mmap.PAGESIZE), np.uint8)
            address, size = ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(length)
            failed = _libc().mincore(address, size, ctypes.c_void_p(pages.ctypes.data))
            code = ctypes.get_errno()
            del view  # otherwise the mapping cannot be closed
        if failed:
            raise MediumError(
                f"mincore of {self.name}: {os.strerror(code)}; residency cannot be told here"
            )
        first = (offset - start) // mmap.PAGESIZE
        return int(np.count_nonzero(pages[first:] & 1)) * mmap.PAGESIZE

    @property
    def _cached_fd(self) -> int:
        return self.fd if self.buffered_fd is None else self.buffered_fd

    def close(self) -> None:
        """Closes and unlocks the file.  A second call does nothing."""
        self._buffered_finalizer()
        self._finalizer()


def patiently(take: Callable[[], _T], timeout_s: float) -> _T:
    """Retries on PoolInUse: a ring releases its files some time after it was closed."""
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        with contextlib.suppress(PoolInUse):
            return take()
        time.sleep(_LOCK_NAP_S)
    return take()


def _open_alone(path: str, flags: int) -> int:
    """Opens a file, or exclusively a block device, which must not be mounted or open elsewhere."""
    if not Path(path).is_block_device():
        return os.open(path, flags)

    def take() -> int:
        try:
            return os.open(path, flags | os.O_EXCL)
        except OSError as error:
            if error.errno == errno.EBUSY:
                raise PoolInUse(
                    f"{path} is mounted or in use by another program; release it first"
                ) from error
            raise

    return patiently(take, LOCK_TIMEOUT_S)


def open_error(path: str, error: OSError) -> TuttiError:
    """The error for a member that cannot be opened."""
    reason = f"cannot open {path} for writing: {error.strerror}"
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return PoolNotFound(f"{path} does not exist; format a pool there, or correct the path")
    if error.errno in _READ_ONLY_ERRNOS:
        return PoolReadOnly(f"{reason}; change its permissions or remount it writable")
    if error.errno == errno.ENXIO and Path(path).is_socket():
        return ConfigError(f"{path} is a socket; for the pools of an agent give unix:{path}")
    if error.errno in (errno.ENXIO, errno.ENODEV, errno.EIO):
        return MediumError(f"{reason}; check the device")
    return ConfigError(f"{reason}; give a file or a block device")


@contextlib.contextmanager
def _explained(name: str) -> Iterator[None]:
    """Turns OSError about an open file into MediumError."""
    try:
        yield
    except OSError as error:
        raise MediumError(
            f"cannot use {name}: {error.strerror}; check the device, and the limit of open files"
        ) from error


def _nothing() -> None:
    """Placeholder for closing a file that was not opened."""


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def unlock_and_close(file: FileIO) -> None:
    """Unlocks and closes a file; a second call does nothing."""
    # A ring releases its files some time after its close; closing the file alone unlocks late.
    with contextlib.suppress(OSError, ValueError):
        fcntl.flock(file, fcntl.LOCK_UN)
    file.close()


def lock_file(fd: int, name: str) -> None:
    """Locks an open file, without waiting.  Raises PoolInUse."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        user = shared_file.user_of(fd)
    except BlockingIOError as error:
        owner = lock_owner(os.fstat(fd))
        who = f"process {owner}" if owner and owner > 0 else "another process"
        who = "another store of this process" if owner == os.getpid() else who
        raise PoolInUse(f"{name} is in use by {who}; close it there first") from error
    except OSError as error:
        reason = f"cannot lock {name}: {error.strerror}"
        raise MediumError(f"{reason}; put it on a file system with flock(2)") from error
    if user is not None:
        fcntl.flock(fd, fcntl.LOCK_UN)
        raise PoolInUse(
            f"process {user} still has {name} open, from an agent that ended; it closes it by"
            " itself once its transfers have ended, or when it is ended"
        )


def lock_owner(status: os.stat_result) -> int | None:
    """The process that has locked a file, from /proc/locks (proc(5)).

    Trying the lock instead would make a concurrent opening fail.
    """
    wanted = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    try:
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        words = line.split()
        if "FLOCK" in words and "->" not in words and wanted in words:
            return int(words[words.index(wanted) - 1])
    return None
