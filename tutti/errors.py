"""Every error that Tutti raises on purpose.

The code that raises one writes the message: what is wrong, and what to do.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterator, Sequence


class TuttiError(Exception):
    """The root: `except TuttiError` catches whatever this project raises on purpose."""


class ConfigError(TuttiError, ValueError):
    """A setting or an argument is not acceptable."""


class LayoutError(ConfigError):
    """A KV layout or a geometry that is unsupported, or that would waste too much of the medium."""


class ProfileError(ConfigError):
    """A profile that cannot be used: other schema, missing points, or impossible numbers."""


class KeySizeError(ConfigError):
    """A key or hash has the wrong number of bytes."""


class PageRangeError(TuttiError, IndexError):
    """A page, slot or layer number lies outside what was registered or formatted."""


class KeyMissing(TuttiError, KeyError):
    """A key that was required is not in the pool."""

    def __str__(self) -> str:
        return Exception.__str__(self)  # KeyError would print the repr of the message


class CapacityError(TuttiError):
    """There is not enough space: less than one group at format, or a full disk."""


class Unsupported(TuttiError):
    """The machine, kernel, drive or build lacks a feature that was asked for."""


class NativeError(TuttiError):
    """The native library is missing, was built for another version, or failed."""


class PoolError(TuttiError):
    """The root of errors about one pool or one of its members."""


class PoolNotFound(PoolError):
    """No formatted pool was found at a path."""


class PoolExists(PoolError):
    """There is already something where a pool was to be formatted."""


class PoolInUse(PoolError):
    """Another process owns the pool."""


class PoolUntrusted(PoolError):
    """Another user can change the pool, or where its path leads."""


class PoolMoved(PoolError):
    """A file of the pool was renamed, removed, replaced or truncated while the pool was open."""


class PoolMismatch(PoolError):
    """A pool, but not the expected one: other layout, geometry, format version or UUID."""


class PoolCorrupt(PoolError):
    """Bytes on the medium that contradict the format or themselves."""


class MemberMissing(PoolError):
    """A member of the pool is not there."""


class MemberSwapped(PoolMismatch):
    """A member is in another's place, or belongs to another pool."""


class PoolReadOnly(PoolError):
    """A write to a pool that was opened for reading, or that stopped writing after errors."""


class PoolClosed(PoolError):
    """A call to a pool that is closed or closing."""


class ForkedProcess(PoolClosed):
    """A call in a forked process to what the process before the fork opened."""


class AgentRefused(TuttiError):
    """The agent or a client does not follow the protocol, or the client may not connect."""


class AgentLost(PoolError):
    """The agent did not answer in time, or its connection ended; the client reconnects."""


class RemoteFailed(TuttiError):
    """The remote store of the second tier did not answer in time, or returned an error."""


class MediumError(TuttiError):
    """The medium failed a transfer.

    `status` is the NVMe status field (0 when there is none), `pages` the positions in the caller's
    batch that are affected.
    """

    def __init__(self, message: str, *, status: int = 0, pages: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.status = status
        self.pages = tuple(int(page) for page in pages)


class ChecksumMismatch(MediumError):
    """The medium returned bytes whose digest is not the recorded one."""


class DeviceGone(MediumError):
    """The device was removed, was returned to the kernel, or failed permanently."""


class DeviceTimeout(TuttiError):
    """A deadline passed before the device answered; memory it may still write stays reserved."""


class PagesInUse(DeviceTimeout):
    """A load was aborted, and the device may still write into its pages.

    wait_settled(timeout_s): waits until the device can no longer write into them.  Returns False
    after the timeout.
    """

    def __init__(
        self, message: str, wait_settled: Callable[[float], bool] = lambda timeout_s: False
    ) -> None:
        super().__init__(message)
        self.wait_settled = wait_settled


class CudaError(TuttiError):
    """A call of the CUDA driver or of NVRTC failed.

    `call` is its name, `code` its result (0 when there is none).
    """

    def __init__(self, message: str, *, call: str = "", code: int = 0) -> None:
        super().__init__(message)
        self.call = call
        self.code = code


#: Remedies for errors of system calls, by errno.
_ADVICE = {
    errno.ENOENT: "correct the path, or create the missing file or folder",
    errno.ENOTDIR: "correct the path: one of its parts is not a folder",
    errno.EISDIR: "pass a file",
    errno.EEXIST: "choose another name",
    errno.ELOOP: "correct the link",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.EACCES: "change its permissions, or run this as its owner",
    errno.EPERM: "change its permissions, or run this as its owner",
    errno.EROFS: "choose another disk, or remount this one writable",
    errno.ENOSPC: "free space on this disk, or choose another",
    errno.EDQUOT: "free space on this disk, or choose another",
    errno.EFBIG: "raise the limit (ulimit -f), or choose another disk",
    errno.ENOMEM: "free memory, or raise the limit (ulimit -v)",
    errno.EAGAIN: "end other work, or raise the limits (ulimit -a)",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "close other programs: the system has too many open files",
    errno.EIO: "look for disk errors in the kernel log (dmesg)",
}
_OTHER_ADVICE = "check the path, the device and the limits (ulimit -a)"


def system_message(error: OSError) -> str:
    """The path, the error and the remedy, as one line."""
    if error.errno is None or error.strerror is None:  # not from a system call: it has a message
        return str(error)
    where = "" if error.filename is None else f"{error.filename}: "
    return f"{where}{error.strerror}; {_ADVICE.get(error.errno, _OTHER_ADVICE)}"


@contextlib.contextmanager
def system_errors() -> Iterator[None]:
    """Turns an OSError inside, for which no other error fits better, into MediumError."""
    try:
        yield
    except OSError as error:
        raise MediumError(system_message(error)) from error
