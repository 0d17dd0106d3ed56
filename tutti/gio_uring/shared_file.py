"""Reopens member files for other processes, and detects when those have closed them.

Every open file description that is given to a process has a lock on one byte far beyond the end of
the file (fcntl(2), F_OFD_SETLK).  The kernel releases it with the last reference to the open file
description: when all processes have closed it and no io_uring request uses it.  So a lock that is
gone proves that no transfer of that process is under way.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import struct
from collections.abc import Sequence

from tutti.errors import ConfigError, Unsupported

_FIRST = 1 << 62  # beyond the end of any file
_PID_SHIFT = 30
_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux


def lock_place(pid: int) -> int:
    """An offset for a process's lock: encodes the pid, so that others can name the owner."""
    return _FIRST + (pid << _PID_SHIFT) + secrets.randbits(_PID_SHIFT)


def reopen(fds: Sequence[int], place: int) -> list[int]:
    """Reopens files with the same flags, and locks the byte ``place`` of each.

    Raises Unsupported if /proc or the file system does not allow that.
    """
    opened: list[int] = []
    try:
        for fd in fds:
            flags = os.O_RDWR | os.O_CLOEXEC | (fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)
            opened.append(os.open(f"/proc/self/fd/{fd}", flags))
            fcntl.fcntl(opened[-1], fcntl.F_OFD_SETLK, _flock(fcntl.F_RDLCK, place, 1))
    except OSError as error:
        for fd in opened:
            os.close(fd)
        raise Unsupported(
            f"the pool's files cannot be shared with other processes: {error.strerror}; mount"
            " /proc, and put the pool on a local file system"
        ) from error
    return opened


def is_open_elsewhere(fds: Sequence[int], place: int) -> bool:
    """Whether another open file description still locks byte ``place``.  True if unknown."""
    try:
        return any(_holder(fd, place, 1) is not None for fd in fds)
    except OSError:
        return True


def user_of(fd: int) -> int | None:
    """A process that still has this file open by ``reopen``, if any.  Raises OSError if unknown."""
    try:
        start = _holder(fd, _FIRST, 0)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return None  # the file has no such locks: reopen fails as well
        raise
    return None if start is None else (start - _FIRST) >> _PID_SHIFT


def check_files(fds: Sequence[int]) -> None:
    """Raises ConfigError if the files do not support such locks."""
    for fd in fds:
        with contextlib.suppress(OSError):
            fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _flock(fcntl.F_WRLCK, _FIRST, 1))
            continue
        raise ConfigError("the pool's files have no locks; put them on a local file system")


def _holder(fd: int, start: int, length: int) -> int | None:
    """First byte of a range that another open file description has locked.  Raises OSError."""
    answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _flock(fcntl.F_WRLCK, start, length))
    kind, _, first, _, _ = _FLOCK.unpack(answer)
    return None if kind == fcntl.F_UNLCK else int(first)


def _flock(kind: int, start: int, length: int) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, start, length, 0)
