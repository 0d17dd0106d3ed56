"""Second openings of member files for other processes, and how their end is noticed.

Every opening that is handed out carries a lock of its own on one byte far behind the end of the
file (an open file description lock, fcntl(2)).  The kernel drops it with the last reference to the
opening: when all processes have closed it and no request of io_uring uses it any more.  So a lock
that is gone proves that no transfer of that process is under way.
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

_FIRST = 1 << 62  # behind the end of every file
_PID_SHIFT = 30
_LAST = (1 << 63) - 1
_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux


def lock_place(pid: int) -> int:
    """A byte that one process locks, so that another opener can name the owner."""
    return _FIRST + (pid << _PID_SHIFT) + secrets.randbits(_PID_SHIFT)


def reopen(fds: Sequence[int], place: int) -> list[int]:
    """Opens the same files again, as they were opened, with a lock on the byte ``place``.

    Raises Unsupported where /proc or the file system does not allow that.
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
    """Whether an opening with a lock on the byte ``place`` still exists.  True when unknown."""
    return any(_holder(fd, place, 1) is not None for fd in fds)


def user_of(fd: int) -> int | None:
    """The process that an opening of this file was handed to and that still exists, if any."""
    start = _holder(fd, _FIRST, 0)
    return None if start is None else (start - _FIRST) >> _PID_SHIFT


def check_files(fds: Sequence[int]) -> None:
    """Raises ConfigError for what is neither a regular file nor a device that can be locked."""
    for fd in fds:
        with contextlib.suppress(OSError):
            fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _flock(fcntl.F_WRLCK, _FIRST, 1))
            continue
        raise ConfigError("the pool's files have no locks; put them on a local file system")


def _holder(fd: int, start: int, length: int) -> int | None:
    """First locked byte of a range that another opening holds; ``start`` when it is not known."""
    try:
        answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _flock(fcntl.F_WRLCK, start, length))
    except OSError as error:
        return None if error.errno in (errno.EINVAL, errno.EOPNOTSUPP) else start
    kind, _, first, _, _ = _FLOCK.unpack(answer)
    return None if kind == fcntl.F_UNLCK else int(first)


def _flock(kind: int, start: int, length: int) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, start, length, 0)
