"""Submitting commands one by one from Python, in liburing's vocabulary, and reading statuses.

For control paths, tools and tests; what moves data in earnest submits from native or device code.
This is the one place where an NVMe status becomes an exception.
"""

from __future__ import annotations

import ctypes
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from tutti.errors import (
    CapacityError,
    ChecksumMismatch,
    DeviceGone,
    DeviceTimeout,
    MediumError,
    PoolClosed,
    PoolMoved,
    TuttiError,
)
from tutti.gio_uring import _native, nvme_spec
from tutti.gio_uring.controller import NativeController
from tutti.gio_uring.nvme_spec import (
    STATUS_CANCELLED,
    STATUS_CAPACITY_EXCEEDED,
    STATUS_DEVICE_GONE,
    STATUS_DIGEST_MISMATCH,
    STATUS_INTERNAL_ERROR,
    STATUS_MEMBER_MOVED,
    STATUS_OK,
    STATUS_TIMED_OUT,
    Sqe,
)
from tutti.gio_uring.queue_pair import COMPLETED, NO_CID, QueuePair
from tutti.process import Owned

_STATUS_NAMES = {
    status: name.removeprefix("STATUS_").lower().replace("_", " ")
    for name, status in vars(nvme_spec).items()
    if name.startswith("STATUS_")
}
_NAP_S = 0.001


@dataclass(frozen=True)
class Completion:
    """One command's end: its CID and NVMe status, 0 for success."""

    cid: int
    status: int


def status_name(status: int) -> str:
    """For people: "lba out of range (0x080)"."""
    return f"{_STATUS_NAMES.get(status, 'unknown status')} ({status:#05x})"


def status_error(
    status: int, what: str = "a command", pages: Sequence[int] = ()
) -> TuttiError | None:
    """The exception for an NVMe status that `what` ended with; None for success.

    `pages` are positions in the caller's batch. DeviceTimeout where the command had not ended,
    CapacityError for a full medium, ChecksumMismatch for bytes with another digest, PoolClosed for
    what a close cancelled, PoolMoved, DeviceGone, else MediumError.
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
    if status == STATUS_CAPACITY_EXCEEDED:
        return CapacityError(f"{name}; free space on the medium")
    if status == STATUS_DIGEST_MISMATCH:
        message = f"{name}; the data is not used, check the drive's health"
        return ChecksumMismatch(message, status=status, pages=pages)
    log = "this process's log" if status == STATUS_INTERNAL_ERROR else "the kernel's log"
    return MediumError(f"{name}; check the drive's health and {log}", status=status, pages=pages)


def error_status(error: BaseException) -> int:
    """The status of a transfer that could not be started; `status_error` makes the same of it."""
    if isinstance(error, DeviceTimeout):
        return STATUS_TIMED_OUT
    return STATUS_CANCELLED if isinstance(error, PoolClosed) else STATUS_INTERNAL_ERROR


class Ring(Owned):
    """One submitter on a queue pair that a native controller made.

    `get_sqe` and fill, `submit`, then `peek_cqe` or `wait_cqe` and `cq_advance`. A controller that
    without a service thread is served inline while waiting. Not thread-safe.
    """

    def __init__(self, queue_pair: QueuePair) -> None:
        assert isinstance(queue_pair.owner, NativeController), "a controller's own queue pair"
        self.queue_pair = queue_pair
        self._controller = queue_pair.owner
        self._lib = _native.lib()
        self._prepared: list[Sqe] = []
        self._inflight: dict[int, None] = {}  # an ordered set: the oldest first
        self._completed: deque[Completion] = deque()

    @property
    def inflight(self) -> int:
        """Commands submitted whose completion was not seen yet."""
        return len(self._inflight)

    def get_sqe(self) -> Sqe | None:
        """A zeroed SQE with its CID set, to be filled before `submit`; None when full."""
        cid = self._lib.gio_qp_cid_acquire(self.queue_pair.struct_address)
        if cid == NO_CID:
            return None
        sqe = Sqe(cdw0=cid << 16)
        self._prepared.append(sqe)
        return sqe

    def submit(self) -> int:
        """Hand over the prepared SQEs with one doorbell; returns how many."""
        address = self.queue_pair.struct_address
        count = len(self._prepared)
        for sqe in self._prepared:
            self._lib.gio_qp_sq_enqueue(address, ctypes.byref(sqe))
            self._inflight[sqe.cdw0 >> 16] = None
        self._prepared.clear()
        if count:
            self._lib.gio_qp_sq_ring(address)
        return count

    def peek_cqe(self) -> Completion | None:
        """The oldest completion that `cq_advance` has not consumed; None when there is none."""
        if not self._completed:
            self._reap()
        return self._completed[0] if self._completed else None

    def wait_cqe(self, timeout_us: int) -> Completion | None:
        """Like `peek_cqe`, waiting at most `timeout_us`; None when nothing completed."""
        deadline_s = time.monotonic() + timeout_us * 1e-6
        completion = self.peek_cqe()
        while completion is None and (left_s := deadline_s - time.monotonic()) > 0:
            if self._controller.is_served:
                time.sleep(min(left_s, _NAP_S))
            else:
                self._controller.service(left_s)
            completion = self.peek_cqe()
        return completion

    def cq_advance(self, count: int) -> None:
        """Consume `count` completions: their CIDs may be used again."""
        assert 0 <= count <= len(self._completed), "only what was peeked can be consumed"
        for _ in range(count):
            cid = self._completed.popleft().cid
            self._lib.gio_qp_cid_release(self.queue_pair.struct_address, cid)

    def _reap(self) -> None:
        address = self.queue_pair.struct_address
        while self._lib.gio_qp_cq_reap(address, 32) == 32:
            pass  # bounded: a queue holds at most its depth of completions
        for cid in list(self._inflight):
            word = int(self._lib.gio_qp_completion(address, cid))
            if word & COMPLETED:
                del self._inflight[cid]
                self._completed.append(Completion(cid, word & ~COMPLETED))
