"""Submitting commands one by one from Python, in liburing's vocabulary."""

from __future__ import annotations

import ctypes
import time
from collections import deque
from dataclasses import dataclass

from tutti.base.process import Owned
from tutti.gio_uring import _native
from tutti.gio_uring.controller import NativeController
from tutti.gio_uring.nvme_spec import NLB_MAX, PSDT_PRP, Sqe, make_cdw0
from tutti.gio_uring.queue_pair import COMPLETED, NO_CID, QueuePair

_NAP_S = 0.001


@dataclass(frozen=True)
class Completion:
    """One command's end: its CID and NVMe status, 0 for success."""

    cid: int
    status: int


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


def transfer_command(sqe: Sqe, opcode: int, nsid: int, slba: int, nlb: int, flags: int = 0) -> None:
    """Fill a read or write of `nlb` blocks (1 to 65536) but for its data pointer.

    Keeps the CID that `sqe` has; `flags` may be FUA.
    """
    assert 1 <= nlb <= NLB_MAX, "NLB has 16 bits and is 0-based"
    cid = sqe.cdw0 >> 16
    sqe.cdw0 = make_cdw0(opcode, PSDT_PRP, cid)
    sqe.nsid = nsid
    sqe.cdw10 = slba & 0xFFFFFFFF
    sqe.cdw11 = slba >> 32
    sqe.cdw12 = (nlb - 1) | flags


def simple_command(sqe: Sqe, opcode: int, nsid: int) -> None:
    """Fill a command without a transfer, such as FLUSH; keeps the CID that `sqe` has."""
    sqe.cdw0 = make_cdw0(opcode, PSDT_PRP, sqe.cdw0 >> 16)
    sqe.nsid = nsid
