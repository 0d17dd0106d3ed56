"""The ring in Python, and statuses that become exceptions."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from gio_uring.command_ring import Ring, simple_command
from memory_controller import Faults, MemoryController

from tutti.base.units import MiB
from tutti.errors import (
    CapacityError,
    ChecksumMismatch,
    DeviceTimeout,
    MediumError,
    PoolReadOnly,
)
from tutti.gio_uring import nvme_spec as nvme
from tutti.gio_uring.status import status_error, status_name


@pytest.fixture
def controller() -> Iterator[MemoryController]:
    with MemoryController((1 * MiB,)) as made:
        yield made


def prepare(ring: Ring) -> int:
    sqe = ring.get_sqe()
    assert sqe is not None
    simple_command(sqe, nvme.OPCODE_FLUSH, 1)
    return sqe.cdw0 >> 16


def test_completions_are_peeked_then_consumed(controller: MemoryController) -> None:
    ring = Ring(controller.create_queue_pair(4))
    assert ring.submit() == 0
    cids = [prepare(ring) for _ in range(3)]
    assert ring.get_sqe() is None
    assert ring.peek_cqe() is None
    assert ring.submit() == 3
    assert ring.inflight == 3
    first = ring.wait_cqe(1_000_000)
    assert first is not None
    assert ring.peek_cqe() == first
    assert ring.get_sqe() is None, "nothing was consumed yet"
    ring.cq_advance(3)
    assert ring.inflight == 0
    assert ring.peek_cqe() is None
    assert len({*cids, *(prepare(ring) for _ in range(3))}) == 3, "the CIDs are used again"


def test_waiting_ends(controller: MemoryController) -> None:
    ring = Ring(controller.create_queue_pair(4))
    assert ring.wait_cqe(0) is None
    controller.set_faults(Faults(stall_from=1))
    prepare(ring)
    ring.submit()
    assert ring.wait_cqe(2000) is None
    controller.release()
    assert ring.wait_cqe(1_000_000) is not None


def test_waiting_for_a_started_controller(controller: MemoryController) -> None:
    ring = Ring(controller.create_queue_pair(4))
    controller.start()
    assert controller.service() == 0, "its own thread does the work"
    prepare(ring)
    ring.submit()
    assert ring.wait_cqe(20_000_000) is not None
    controller.stop()


@pytest.mark.parametrize(
    ("status", "kind", "text"),
    [
        (nvme.STATUS_TIMED_OUT, DeviceTimeout, "timed out"),
        (nvme.STATUS_CAPACITY_EXCEEDED, CapacityError, "capacity exceeded"),
        (nvme.STATUS_NAMESPACE_WRITE_PROTECTED, PoolReadOnly, r"write protected \(0x020\)"),
        (nvme.STATUS_WRITE_TO_READ_ONLY_RANGE, PoolReadOnly, "make the medium writable"),
        (nvme.STATUS_DIGEST_MISMATCH, ChecksumMismatch, "digest mismatch"),
        (nvme.STATUS_UNRECOVERED_READ, MediumError, r"a read failed: unrecovered read \(0x281\)"),
        (nvme.STATUS_LBA_OUT_OF_RANGE, MediumError, r"lba out of range \(0x080\)"),
        (0x5FF, MediumError, r"unknown status \(0x5ff\)"),
    ],
)
def test_status_errors(status: int, kind: type[Exception], text: str) -> None:
    error = status_error(status, "a read", pages=[3])
    assert type(error) is kind
    with pytest.raises(kind, match=text):
        raise error
    if isinstance(error, MediumError):
        assert (error.status, error.pages) == (status, (3,))


def test_success_is_no_error() -> None:
    assert status_error(nvme.STATUS_OK) is None
    assert status_name(nvme.STATUS_OK) == "ok (0x000)"
