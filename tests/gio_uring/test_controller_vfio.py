"""The native part of the vfio controller, over a file that stands in for a drive's registers."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tutti.gio_uring import _native
from tutti.gio_uring import nvme_spec as nvme
from tutti.gio_uring.controller_vfio import _RESTART, VfioConfigStruct, _lib
from tutti.gio_uring.drives import rescue as drive_rescue
from tutti.gio_uring.drives.rescue import Ask, NativeDrive
from tutti.gio_uring.memory import HostBuffer, view_at
from tutti.gio_uring.queue_pair import COMPLETED, QueuePair

DEPTH = 8
CSTS = 8192


class Rig:
    """A controller with one queue pair, whose commands are not executed."""

    def __init__(self, *, has_shadow: bool = False) -> None:
        self.registers = os.memfd_create("registers")
        os.ftruncate(self.registers, CSTS + 8)
        self.events = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(2)]
        self.shadow = HostBuffer(8192, hugepages=False)
        self.restart_result = 0
        self.is_ending = True
        self.callback = _RESTART(self._restart)
        sizes = (ctypes.c_uint64 * 1)(1000)
        config = VfioConfigStruct(
            namespace_nlb=ctypes.addressof(sizes),
            doorbells_nbytes=4096,
            shadow=self.shadow.address if has_shadow else 0,
            event_index=self.shadow.address + 4096 if has_shadow else 0,
            restart=ctypes.cast(self.callback, ctypes.c_void_p).value or 0,
            csts=CSTS,
            doorbell_nbytes=4,
            namespaces=1,
            lba_shift=12,
            mdts_nbytes=1 << 20,
            depth_max=64,
            device_fd=self.registers,
            container_fd=self.registers,  # no container: nothing can be taken from the drive
            irq_fd=-1,
            request_fd=self.events[0],
            wake_fd=self.events[1],
        )
        handle = ctypes.c_void_p()
        assert _lib().gio_vfio_controller_create(ctypes.byref(config), ctypes.byref(handle)) == 0
        self.handle = handle.value
        self.pair = QueuePair(DEPTH, 1)
        self.doorbells = int(_lib().gio_vfio_controller_doorbells(self.handle))
        base = self.shadow.address if has_shadow else self.doorbells
        self.pair.struct.sq_doorbell, self.pair.struct.cq_doorbell = base + 8, base + 12
        self.address = self.pair.struct_address
        assert _lib().gio_vfio_controller_attach(self.handle, self.address) == 0

    def _restart(self, timeout_ns: int) -> int:
        if self.is_ending:
            _lib().gio_vfio_controller_end_all(self.handle, nvme.STATUS_ABORTED_SQ_DELETION)
        return self.restart_result

    def submit(self, count: int) -> list[int]:
        lib: Any = _native.lib()
        cids = [int(lib.gio_qp_cid_acquire(self.address)) for _ in range(count)]
        for cid in cids:
            sqe = nvme.Sqe(cdw0=cid << 16)
            lib.gio_qp_sq_enqueue(self.address, ctypes.byref(sqe))
        lib.gio_qp_sq_ring(self.address)
        return cids

    def complete(self, position: int, cid: int, status: int) -> None:
        """What the drive would write: the completion at a position that counts on."""
        cqe = nvme.Cqe.from_address(self.pair.struct.cq + 16 * (position % DEPTH))
        cqe.status = cid | (1 - position // DEPTH % 2) << 16 | status << 17

    def status(self, cid: int) -> int:
        return int(_native.lib().gio_qp_completion(self.address, cid))

    def register(self, index: int) -> int:
        return ctypes.c_uint32.from_address(self.doorbells + 4 * index).value

    def close(self) -> None:
        _native.lib().gio_controller_destroy(self.handle)
        for fd in (self.registers, *self.events):
            os.close(fd)


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.close()


def test_submitters_ring_the_drive_itself(rig: Rig) -> None:
    rig.submit(3)
    assert rig.register(2) == 3
    rig.complete(0, 1, 0)
    assert _native.lib().gio_controller_service(rig.handle, 0) == 1
    assert _native.lib().gio_qp_cq_reap(rig.address, 32) == 1
    assert rig.register(3) == 1


def test_a_reset_ends_every_command_once_and_keeps_true_statuses(rig: Rig) -> None:
    lib = _native.lib()
    for lap in range(4):  # so that the rings are at different places
        cids = rig.submit(5)
        start = 2 * DEPTH if lap else 0
        rig.complete(start, cids[2], 0x281)  # in memory, but not reaped yet
        assert lib.gio_controller_reset(rig.handle, 10**9) == 0
        assert lib.gio_qp_cq_reap(rig.address, 32) == 1, "the submitter finds a completion"
        expected = [nvme.STATUS_ABORTED_SQ_DELETION] * 5
        expected[2] = 0x281
        assert [rig.status(cid) for cid in cids] == [COMPLETED | status for status in expected]
        for cid in cids:
            lib.gio_qp_cid_release(rig.address, cid)
        assert lib.gio_qp_cq_reap(rig.address, 32) == 0
        assert rig.pair.inflight == 0
        assert not view_at(rig.pair.struct.sq, 64 * DEPTH).any(), "old commands are still there"


def test_a_reset_of_an_idle_controller_leaves_no_completion(rig: Rig) -> None:
    assert _native.lib().gio_controller_reset(rig.handle, 10**9) == 0
    assert _native.lib().gio_qp_cq_reap(rig.address, 32) == 0


def test_memory_stays_owned_while_the_drive_can_reach_it(rig: Rig) -> None:
    """The restart fails, and the IOMMU does not release the memory either."""
    rig.restart_result, rig.is_ending = -5, False
    cids = rig.submit(3)
    assert _native.lib().gio_controller_reset(rig.handle, 10**9) < 0
    assert [rig.status(cid) for cid in cids] == [0, 0, 0]
    assert not _lib().gio_vfio_controller_is_gone(rig.handle)


def test_shadow_doorbells_are_forwarded_when_the_drive_asks() -> None:
    rig = Rig(has_shadow=True)
    service = _native.lib().gio_controller_service
    event = ctypes.c_uint32.from_address(rig.shadow.address + 4096 + 8)
    for count, asked, expected in ((2, 0, 2), (2, 7, 2), (1, 4, 5), (1, 4, 5)):
        event.value = asked
        rig.submit(count)
        service(rig.handle, 0)
        assert rig.register(2) == expected
    rig.close()


def is_kept_from_children(address: int) -> bool:
    """Whether the kernel does not copy the mapping at this address in a fork."""
    is_here = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        if "-" in first:
            start, end = (int(text, 16) for text in first.split("-"))
            is_here = start <= address < end
        elif first == "VmFlags:" and is_here:
            return "dc" in rest.split()
    raise AssertionError("it is not mapped")


def test_a_forked_child_gets_no_doorbells(rig: Rig) -> None:
    """A mapping of the drive's keeps the drive from its owner, who closes it or is killed."""
    assert is_kept_from_children(rig.doorbells)
    drive = NativeDrive(rig.handle or 0, "rig")
    drive.park()
    lib: Any = drive_rescue._lib()
    lib.gio_vfio_controller_ask(rig.handle, Ask.GO_ON.value)
    assert _native.lib().gio_controller_service(rig.handle, 0) == 0
    assert is_kept_from_children(rig.doorbells)
