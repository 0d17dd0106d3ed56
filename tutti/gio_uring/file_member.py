"""Files and devices as members of a file controller: opened, locked, allocated.

Devices are opened exclusively (O_EXCL, open(2)): nobody can mount them meanwhile, and what somebody
has mounted cannot be opened.

A member that is opened for direct I/O has a second, buffered opening of the same file, for the
blocks that are meant to stay in the page cache.
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
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TypeVar

import numpy as np

from tutti.errors import (
    CapacityError,
    ConfigError,
    MediumError,
    PoolExists,
    PoolInUse,
    PoolNotFound,
    PoolReadOnly,
    TuttiError,
)
from tutti.gio_uring import _native, shared_file
from tutti.gio_uring.drives.generic_device import GenericNamespace, claim, identify, is_generic
from tutti.process import Owned, finalize
from tutti.units import MiB, format_nbytes

#: Progress of `allocate_file`: bytes done, bytes in all.
Progress = Callable[[int, int], None]

_T = TypeVar("_T")
_P = ctypes.c_void_p
_U32 = ctypes.c_uint32

_lib = _native.part({"gio_file_alignment": (ctypes.c_int, (ctypes.c_int, _P, _P))})

_READ_ONLY_ERRNOS = (errno.EROFS, errno.EACCES, errno.EPERM)
_LOCK_NAP_S = 0.02
_LOCK_TIMEOUT_S = 2.0
_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_PREWRITE_NBYTES = 4 * MiB
_FOLIO_NBYTES_MAX = 2 * MiB  # folios are aligned to their size, at most this on x86-64 (PMD_SIZE)
_SYNC_AND_WAIT = 1 | 2 | 4  # sync_file_range(2): WAIT_BEFORE, WRITE, WAIT_AFTER


class FileMember(Owned):
    """One open file, block device or NVMe generic device; closed by `close`, or when collected.

    file: a path, or the number of an open file, which is duplicated and kept as it was opened.
    direct: whether to ask for direct I/O at all (paths only).

    fd: its number, for locks. nbytes: its size. direct: whether it is opened for direct I/O, with
    `memory_alignment` and `offset_alignment` in bytes; else `buffered_reason` says why it is not.
    buffered_fd: of a direct member, the same file opened for the page cache; None where /proc does
    not allow that, and for generic devices, which have none. generic: what such a device says.

    Raises PoolNotFound, PoolReadOnly, ConfigError for what is no file, else MediumError.
    """

    def __init__(self, file: str | os.PathLike[str] | int, *, direct: bool = True) -> None:
        self.name = f"file {file}" if isinstance(file, int) else os.fspath(file)
        self.buffered_reason: str | None = None
        self.generic: GenericNamespace | None = None
        self.memory_alignment = self.offset_alignment = 1
        if isinstance(file, int):
            self.fd = fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, 0)
            direct = bool(fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT)
            self._set_direct(direct, "it was opened so")
        else:
            self.fd = self._open(self.name, direct)
        self._finalizer = finalize(self, _unlock_and_close, self.fd)
        self.buffered_fd: int | None = None
        self._buffered_finalizer: Callable[[], object] = _nothing
        if is_generic(self.name):
            self._become_generic()
            return
        self.nbytes = self._size()
        if self.direct:
            self._find_alignment()
        if self.direct:
            self._open_buffered()

    def _become_generic(self) -> None:
        """Commands go past the block layer: memory is aligned to dwords, offsets to blocks."""
        self.generic = identify(self.fd, self.name)
        claimed = _patiently(lambda: claim(self.name))
        if claimed is not None:
            self._buffered_finalizer = finalize(self, os.close, claimed)
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
            raise _open_error(path, error) from error

    def _size(self) -> int:
        status = os.fstat(self.fd)
        if stat.S_ISREG(status.st_mode):
            return status.st_size
        if not stat.S_ISBLK(status.st_mode):
            raise ConfigError(f"{self.name} is no file and no block device; give one of those")
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
            # By its number, so that it is the same file whatever became of its name.
            fd = os.open(f"/proc/self/fd/{self.fd}", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return
        self._buffered_finalizer = finalize(self, os.close, fd)
        self.buffered_fd = fd
        # Nothing is read ahead into blocks that are not meant for the page cache.
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)

    def give_up_direct(self, reason: str) -> None:
        """Go through the page cache from here on."""
        flags = fcntl.fcntl(self.fd, fcntl.F_GETFL)
        fcntl.fcntl(self.fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        self.memory_alignment = self.offset_alignment = 1
        self._set_direct(False, reason)

    def _set_direct(self, direct: bool, reason: str) -> None:
        self.direct = direct
        self.buffered_reason = None if direct else reason

    def lock(self) -> None:
        """Makes this the only open file that is locked, until `close`.

        The lock belongs to the open file that the kernel's transfers use, so after a process was
        killed it holds until the last of them has ended; therefore this tries for two seconds.
        Raises PoolInUse.
        """
        _patiently(lambda: _lock(self.fd, self.name))

    def write_back(self, offset: int, nbytes: int) -> None:
        """Hands what the page cache holds of these bytes to the medium, and waits for that.

        It is durable only after a flush of the medium as well.  Raises MediumError.
        """
        arguments = (ctypes.c_int64(offset), ctypes.c_int64(nbytes), _SYNC_AND_WAIT)
        if _libc().sync_file_range(self._cached_fd, *arguments) != 0:
            code = ctypes.get_errno()
            raise MediumError(
                f"cannot write the page cache of {self.name} back: {os.strerror(code)}; check the"
                " device and its free space"
            )

    def drop(self, offset: int, nbytes: int) -> None:
        """Writes these bytes back and lets the page cache forget them.  Raises MediumError.

        The kernel keeps a folio that reaches beyond the range, so whole folios are dropped; what
        that takes of the neighbours is read again when it is needed.
        """
        start = offset - offset % _FOLIO_NBYTES_MAX
        end = offset + nbytes + -(offset + nbytes) % _FOLIO_NBYTES_MAX
        self.write_back(start, end - start)
        os.posix_fadvise(self._cached_fd, start, end - start, os.POSIX_FADV_DONTNEED)

    def resident_nbytes(self, offset: int, nbytes: int) -> int:
        """How many of these bytes the page cache holds, in whole pages (mincore(2)).

        Raises MediumError when the kernel does not tell.
        """
        start = offset - offset % mmap.ALLOCATIONGRANULARITY
        length = offset + nbytes - start
        with mmap.mmap(self._cached_fd, length, mmap.MAP_SHARED, mmap.PROT_READ, offset=start) as m:
            view = np.frombuffer(m, np.uint8)
            pages = np.zeros(-(-length // mmap.PAGESIZE), np.uint8)
            address, size = ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(length)
            failed = _libc().mincore(address, size, ctypes.c_void_p(pages.ctypes.data))
            code = ctypes.get_errno()
            del view  # or the mapping cannot be closed
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
        """A second call does nothing."""
        self._buffered_finalizer()
        self._finalizer()


def _patiently(take: Callable[[], _T], timeout_s: float = _LOCK_TIMEOUT_S) -> _T:
    """Tries again while it is in use: a ring lets go of its files some time after it was closed."""
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        with contextlib.suppress(PoolInUse):
            return take()
        time.sleep(_LOCK_NAP_S)
    return take()


def _open_alone(path: str, flags: int) -> int:
    """Opens a file, or a block device that nobody else has opened so or mounted."""
    if not Path(path).is_block_device():
        return os.open(path, flags)

    def take() -> int:
        try:
            return os.open(path, flags | os.O_EXCL)
        except OSError as error:
            if error.errno == errno.EBUSY:
                raise PoolInUse(
                    f"{path} is mounted or in use by another program; give it back there first"
                ) from error
            raise

    return _patiently(take)


def _open_error(path: str, error: OSError) -> TuttiError:
    reason = f"cannot open {path} for writing: {error.strerror}"
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return PoolNotFound(f"{path} does not exist; format a pool there, or correct the path")
    if error.errno in _READ_ONLY_ERRNOS:
        return PoolReadOnly(f"{reason}; change its permissions or remount it writable")
    if error.errno in (errno.ENXIO, errno.ENODEV, errno.EIO):
        return MediumError(f"{reason}; check the device")
    return ConfigError(f"{reason}; give a file or a block device")


def allocate_file(
    path: str | os.PathLike[str],
    nbytes: int,
    prewrite: bool = False,
    progress: Progress | None = None,
    *,
    may_exist: bool = True,
) -> bool:
    """Make a file of exactly `nbytes` whose blocks exist; whether it is a new one.

    may_exist: take a file or a device that is there. What a file holds is kept or becomes zeros, a
    device only has to be large enough. prewrite: write zeros once and flush, so that later writes
    convert no extents. `progress` is called with (bytes done, nbytes).

    Raises PoolExists for what may not exist, CapacityError without enough space (a new file is
    removed then), PoolInUse when another process holds the file's lock, PoolReadOnly, PoolNotFound
    when the folder does not exist.
    """
    name = os.fspath(path)
    if is_generic(name):
        _check_generic(name, nbytes, prewrite)
        return False
    fd, is_new = _create(name, may_exist)
    try:
        # Who opens a file before it is a pool locks it for a moment.
        _patiently(lambda: _lock(fd, name), _LOCK_TIMEOUT_S if is_new else 0.0)
        _reserve(fd, name, nbytes)
        if prewrite:
            _prewrite(fd, nbytes, progress)
        os.fsync(fd)
        _sync_folder(name)
    except BaseException as error:
        if is_new and not isinstance(error, PoolInUse):
            Path(name).unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno in _FULL_ERRNOS:
            raise CapacityError(
                f"no room for {format_nbytes(nbytes)} in {name}: {error.strerror}; free space or"
                " choose a smaller capacity"
            ) from error
        if isinstance(error, OSError):
            reason = f"cannot allocate {name}: {error.strerror}"
            raise MediumError(f"{reason}; check the device and its file system") from error
        raise
    finally:
        os.close(fd)
    if progress is not None:
        progress(nbytes, nbytes)
    return is_new


def _create(name: str, may_exist: bool) -> tuple[int, bool]:
    """Opens a file, and whether it is new: of several that want it at once, for one alone."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    try:
        try:
            return os.open(os.path.realpath(name), flags | os.O_EXCL, 0o600), True
        except FileExistsError as error:
            if not may_exist:
                raise PoolExists(
                    f"{name} exists; open it, or format with force to lose what it holds"
                ) from error
            return os.open(name, flags, 0o600), False
    except OSError as error:
        if error.errno == errno.ENOENT:
            raise PoolNotFound(f"the folder of {name} does not exist; create it first") from error
        raise _open_error(name, error) from error


def _nothing() -> None:
    """Stands for the closing of what was not opened."""


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _unlock_and_close(fd: int) -> None:
    # A ring lets go of its files some time after it was closed: closing alone would unlock late.
    with contextlib.suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


def _lock(fd: int, name: str) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise PoolInUse(
            f"{name} is in use by another process or another store; close it there first"
        ) from error
    if (user := shared_file.user_of(fd)) is not None:
        fcntl.flock(fd, fcntl.LOCK_UN)
        raise PoolInUse(
            f"process {user} still has {name} open, from an agent that ended; it closes it by"
            " itself once its transfers have ended, or when it is ended"
        )


def _reserve(fd: int, name: str, nbytes: int) -> None:
    if stat.S_ISBLK(os.fstat(fd).st_mode):
        _check_room(name, os.lseek(fd, 0, os.SEEK_END), nbytes)
        return
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"{name} is no file and no block device; give one of those")
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except BaseException:
        # What did not suffice is the file's all the same: ext4 would leave the disk full.
        os.ftruncate(fd, status.st_size)
        raise
    os.ftruncate(fd, nbytes)


def _check_generic(name: str, nbytes: int, prewrite: bool) -> None:
    if prewrite:
        raise ConfigError(f"{name} has no blocks to prepare; leave prewrite out")
    member = FileMember(name)
    try:
        _check_room(name, member.nbytes, nbytes)
    finally:
        member.close()


def _check_room(name: str, available: int, nbytes: int) -> None:
    if available < nbytes:
        raise CapacityError(
            f"{name} has {format_nbytes(available)}, not {format_nbytes(nbytes)}; choose a"
            " smaller capacity"
        )


def _prewrite(fd: int, nbytes: int, progress: Progress | None) -> None:
    """Zeros over the whole file, past the page cache where that is possible."""
    try:
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        if nbytes % mmap.PAGESIZE == 0:
            fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
    except OSError:
        pass  # through the page cache, then
    with mmap.mmap(-1, _PREWRITE_NBYTES) as zeros, memoryview(zeros) as view:
        done = 0
        while done < nbytes:
            # Released also when Ctrl-C ends the write, or the mapping could not be closed.
            with view[: min(_PREWRITE_NBYTES, nbytes - done)] as part:
                done += os.pwrite(fd, part, done)
            if progress is not None and done < nbytes:
                progress(done, nbytes)


def _sync_folder(name: str) -> None:
    """Make the file's directory entry durable."""
    fd = os.open(Path(name).absolute().parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
