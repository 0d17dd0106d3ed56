"""Makes the files of a pool: locked before they get a name, with all blocks allocated."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import NamedTuple

from tutti.base.units import MiB, format_nbytes
from tutti.errors import (
    CapacityError,
    ConfigError,
    MediumError,
    PoolExists,
    PoolInUse,
    PoolNotFound,
)
from tutti.gio_uring.drives.generic_device import is_generic
from tutti.gio_uring.file_member import (
    LOCK_TIMEOUT_S,
    FileMember,
    lock_file,
    open_error,
    patiently,
    unlock_and_close,
)
from tutti.gio_uring.file_trust import check_owner, resolve

#: Progress callback of `allocate_file`: (bytes done, bytes in total).
Progress = Callable[[int, int], None]

_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_PREWRITE_NBYTES = 4 * MiB
_STAT_BLOCK_NBYTES = 512  # of st_blocks, whatever the file system: inode(7)


def allocate_file(
    path: str | os.PathLike[str],
    nbytes: int,
    prewrite: bool = False,
    progress: Progress | None = None,
    *,
    may_exist: bool = True,
) -> bool:
    """See `reserve_file`; closes the file again, and returns whether it is new."""
    file = reserve_file(path, nbytes, prewrite, progress, may_exist=may_exist)
    file.close()
    return file.is_new


class ReservedFile(NamedTuple):
    """A file that was made or taken for a member.

    path: resolved, without symbolic links.  file: open and locked until `close`; None for devices,
    which are not kept open.
    """

    path: str
    file: FileIO | None
    is_new: bool

    def close(self) -> None:
        """Unlocks and closes the file."""
        if self.file is not None:
            unlock_and_close(self.file)


def reserve_file(
    path: str | os.PathLike[str],
    nbytes: int,
    prewrite: bool = False,
    progress: Progress | None = None,
    *,
    may_exist: bool = True,
) -> ReservedFile:
    """Makes a file of exactly `nbytes` with all blocks allocated, and keeps it locked.

    may_exist: accept an existing file or device. A file's content is kept or becomes zeros; a
    device must be large enough. prewrite: write zeros once and flush, so that later writes
    convert no unwritten extents. progress: called with (bytes done, nbytes).

    Raises PoolExists if it exists and must not, CapacityError without enough space (a new file is
    removed then), PoolInUse if another process has locked the file, PoolReadOnly, PoolNotFound if
    the folder does not exist, PoolUntrusted if other users control the file.
    """
    name = os.fspath(path)
    if is_generic(name):
        _check_generic(name, nbytes, prewrite)
        return ReservedFile(name, None, False)
    target = resolve(name)
    is_device = Path(target).is_block_device()
    fd, is_new = _create(name, target, may_exist)
    file = FileIO(fd, "r+")
    try:
        # Another process that opens the file before it is a pool locks it for a moment.
        patiently(lambda: lock_file(fd, name), LOCK_TIMEOUT_S if is_new else 0.0)
        _reserve(fd, name, nbytes)
        if prewrite:
            _prewrite(fd, nbytes, progress)
        os.fsync(fd)
        sync_folder(target)
    except BaseException as error:
        if is_new and not isinstance(error, PoolInUse):
            Path(target).unlink(missing_ok=True)
        unlock_and_close(file)
        if isinstance(error, OSError) and error.errno in _FULL_ERRNOS:
            raise CapacityError(
                f"no room for {format_nbytes(nbytes)} in {name}: {error.strerror}; free space or"
                " choose a smaller capacity"
            ) from error
        if isinstance(error, OSError):
            reason = f"cannot allocate {name}: {error.strerror}"
            raise MediumError(f"{reason}; check the device and its file system") from error
        raise
    if progress is not None:
        progress(nbytes, nbytes)
    if is_device:
        unlock_and_close(file)
    return ReservedFile(target, None if is_device else file, is_new)


def _create(name: str, target: str, may_exist: bool) -> tuple[int, bool]:
    """Opens a file; returns whether it is new, which is true for one of concurrent callers."""
    try:
        try:
            return _create_locked(target), True
        except FileExistsError as error:
            if not may_exist:
                raise PoolExists(
                    f"{name} exists; open it, or use --force to overwrite it"
                ) from error
            fd = os.open(target, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                check_owner(fd, name)
            except BaseException:
                os.close(fd)
                raise
            return fd, False
    except OSError as error:
        if error.errno == errno.ENOENT:
            raise PoolNotFound(f"the folder of {name} does not exist; create it first") from error
        raise open_error(name, error) from error


def _create_locked(path: str) -> int:
    """Makes a file that is locked before it gets its name.  Raises FileExistsError."""
    flags = os.O_RDWR | os.O_CLOEXEC
    try:
        fd = os.open(os.path.dirname(path), flags | os.O_TMPFILE, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise
        # Some file systems lack O_TMPFILE: another process may lock the file first.
        return os.open(path, flags | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    folder = -1
    try:
        lock_file(fd, path)
        folder = os.open(os.path.dirname(path), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        # With dir_fd Python calls linkat(2), which follows the link in /proc.
        os.link(f"/proc/self/fd/{fd}", os.path.basename(path), dst_dir_fd=folder)
    except BaseException:
        os.close(fd)
        raise
    finally:
        if folder >= 0:
            os.close(folder)
    return fd


def _reserve(fd: int, name: str, nbytes: int) -> None:
    if stat.S_ISBLK(os.fstat(fd).st_mode):
        _check_room(name, os.lseek(fd, 0, os.SEEK_END), nbytes)
        return
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"{name} is neither a file nor a block device; pass one of those")
    # fallocate would take all free space before it fails, and other pools on this file system
    # could not write meanwhile.
    room = os.fstatvfs(fd)
    missing = nbytes - status.st_blocks * _STAT_BLOCK_NBYTES
    if room.f_blocks and missing > room.f_bavail * room.f_frsize:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except BaseException:
        # The file owns what was allocated before the failure: ext4 would leave the disk full.
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
    """Writes zeros to the whole file, bypassing the page cache if possible."""
    try:
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        if nbytes % mmap.PAGESIZE == 0:
            fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
    except OSError:
        pass  # through the page cache, then
    with mmap.mmap(-1, _PREWRITE_NBYTES) as zeros, memoryview(zeros) as view:
        done = 0
        while done < nbytes:
            # Released even if Ctrl-C ends the write; otherwise the mapping could not be closed.
            with view[: min(_PREWRITE_NBYTES, nbytes - done)] as part:
                done += os.pwrite(fd, part, done)
            if progress is not None and done < nbytes:
                progress(done, nbytes)


def sync_folder(name: str) -> None:
    """Makes the file's directory entry durable."""
    fd = os.open(Path(name).absolute().parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
