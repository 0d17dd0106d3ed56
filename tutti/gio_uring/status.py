"""Converts NVMe statuses to exceptions, and exceptions to statuses."""

from __future__ import annotations

from collections.abc import Sequence

from tutti.errors import (
    CapacityError,
    ChecksumMismatch,
    DeviceGone,
    DeviceTimeout,
    MediumError,
    PoolClosed,
    PoolMoved,
    PoolReadOnly,
    TuttiError,
)
from tutti.gio_uring import nvme_spec
from tutti.gio_uring.nvme_spec import (
    STATUS_CANCELLED,
    STATUS_CAPACITY_EXCEEDED,
    STATUS_DEVICE_GONE,
    STATUS_DIGEST_MISMATCH,
    STATUS_INTERNAL_ERROR,
    STATUS_MEMBER_MOVED,
    STATUS_NAMESPACE_WRITE_PROTECTED,
    STATUS_OK,
    STATUS_TIMED_OUT,
    STATUS_WRITE_TO_READ_ONLY_RANGE,
)

_STATUS_NAMES = {
    status: name.removeprefix("STATUS_").lower().replace("_", " ")
    for name, status in vars(nvme_spec).items()
    if name.startswith("STATUS_")
}


def status_name(status: int) -> str:
    """A readable name: "lba out of range (0x080)"."""
    return f"{_STATUS_NAMES.get(status, 'unknown status')} ({status:#05x})"


def status_error(
    status: int, what: str = "a command", pages: Sequence[int] = ()
) -> TuttiError | None:
    """The exception for the NVMe status of `what`; None for success.

    pages: positions in the caller's batch. DeviceTimeout for a command that did not end in time,
    CapacityError for a full medium, ChecksumMismatch for a digest that differs, PoolClosed if a
    close cancelled it, PoolMoved, PoolReadOnly, DeviceGone, else MediumError.
    """
    if status == STATUS_OK:
        return None
    name = f"{what} failed: {status_name(status)}"
    if status == STATUS_TIMED_OUT:
        return DeviceTimeout(f"{name}; the device may be stuck, see the kernel's log")
    if status == STATUS_DEVICE_GONE:
        message = f"{name}; check its slot and power, then open the pool again"
        return DeviceGone(message, status=status, pages=pages)
    if status == STATUS_CANCELLED:
        return PoolClosed(f"{name}, because the pool was closed; open it again")
    if status == STATUS_MEMBER_MOVED:
        return PoolMoved(f"{name}; a file of the pool was renamed, removed, replaced or truncated")
    if status in (STATUS_NAMESPACE_WRITE_PROTECTED, STATUS_WRITE_TO_READ_ONLY_RANGE):
        return PoolReadOnly(f"{name}; make the medium writable, or replace a worn-out drive")
    if status == STATUS_CAPACITY_EXCEEDED:
        return CapacityError(f"{name}; free space on the medium")
    if status == STATUS_DIGEST_MISMATCH:
        message = f"{name}; the data is not used, check the drive's health"
        return ChecksumMismatch(message, status=status, pages=pages)
    log = "this process's log" if status == STATUS_INTERNAL_ERROR else "the kernel's log"
    return MediumError(f"{name}; check the drive's health and {log}", status=status, pages=pages)


def error_status(error: BaseException) -> int:
    """The status of a transfer that could not be started; `status_error` is the inverse."""
    if isinstance(error, DeviceTimeout):
        return STATUS_TIMED_OUT
    return STATUS_CANCELLED if isinstance(error, PoolClosed) else STATUS_INTERNAL_ERROR
