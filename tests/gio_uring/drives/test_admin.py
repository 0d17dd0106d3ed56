"""Bring-up, admin commands and shutdown against a drive made of Python, which can misbehave."""

from __future__ import annotations

import ctypes
import os
import struct
from typing import Any

import pytest
from gio_uring.drives.test_identify import controller, namespace

from tutti.errors import ConfigError, DeviceGone, DeviceTimeout, MediumError
from tutti.gio_uring import controller_vfio
from tutti.gio_uring.controller_vfio import VfioController
from tutti.gio_uring.drives import admin as drive_admin
from tutti.gio_uring.drives.admin import NvmeAdmin
from tutti.gio_uring.drives.identify import IDENTIFY_NBYTES
from tutti.gio_uring.nvme_spec import Cqe, Sqe
from tutti.gio_uring.queue_pair import QueuePair

CAP = 1023 | 1 << 24 | 1 << 37  # 1024 entries, 500 ms, the NVM command set
READY, FATAL = 1, 2


class FakeDrive:
    """Stands in for VfioDevice: executes admin commands when their doorbell is written.

    grants: I/O queue pairs. is_deaf: CSTS.RDY never changes. is_mute: commands get no answer.
    is_gone: every register reads as ones. refuses: opcodes that are answered with a status.
    """

    bdf = "0000:99:00.0"
    irq_fd = -1
    cap = CAP
    crto = 0
    looks_until_shut_down = 0

    def __init__(self) -> None:
        self.csts = 0
        self.cc = 0
        self.written: dict[int, int] = {}
        self.mapped: dict[int, int] = {}
        self.log: list[str] = []
        self.grants = 4
        self.is_deaf = self.is_mute = self.is_gone = self.is_fatal = False
        self.resets_work = True
        self.refuses: dict[int, int] = {}
        self.identify: dict[int, bytes] = {}
        self.created: list[tuple[str, int, int]] = []
        self.interrupting: list[int] = []
        self._head = self._tail = 0

    def enable_dma(self) -> None:
        self.log.append("dma")

    def map(self, where: tuple[int, int]) -> None:
        self.mapped[where[0]] = where[1]

    def unmap(self, where: tuple[int, int]) -> None:
        assert self.mapped.pop(where[0]) == where[1], "unmapped otherwise than mapped"

    def reset(self) -> bool:
        self.log.append("reset")
        self.is_deaf = not self.resets_work
        self.csts = 0 if self.resets_work else self.csts
        return self.resets_work

    def read_register(self, offset: int, nbytes: int) -> int:
        if self.is_gone:
            raise DeviceGone("all ones")
        if offset == 0x1C and self.csts & 1 << 2:  # it shuts down
            self.looks_until_shut_down -= 1
            self.csts ^= 3 << 2 if self.looks_until_shut_down < 0 else 0
        known = {0x00: self.cap, 0x14: self.cc, 0x1C: self.csts, 0x68: self.crto}
        return known[offset]

    def write_register(self, offset: int, nbytes: int, content: int) -> None:
        if offset == 0x14:
            self._configure(content)
        elif offset == 0x1000:
            self._serve(content)
        elif offset != 0x1004:
            self.written[offset] = content

    def _configure(self, cc: int) -> None:
        enables = cc & 1 and not self.cc & 1
        self.cc = cc
        if self.is_deaf:
            return
        self.csts = self.csts & ~READY | cc & 1
        if enables:
            self.csts |= FATAL if self.is_fatal else 0
            self.csts &= ~READY if self.is_fatal else ~0
            self._head = self._tail = 0
            self.created.clear()
            self.log.append("enabled")
        if cc >> 14 & 3 == 1:
            self.csts |= 1 << 2
            self.log.append("shut down")

    def _serve(self, tail: int) -> None:
        depth = (self.written[0x24] & 0xFFF) + 1
        while self._head != tail and not self.is_mute:
            sqe = Sqe.from_address(self.written[0x28] + 64 * self._head)
            self._head = (self._head + 1) % depth
            opcode = sqe.cdw0 & 0xFF
            status = self.refuses.get(opcode, 0)
            dword = 0 if status else self._execute(opcode, sqe)
            slot, lap = self._tail % depth, self._tail // depth
            cqe = Cqe.from_address(self.written[0x30] + ctypes.sizeof(Cqe) * slot)
            cqe.result = dword
            cqe.status = sqe.cdw0 >> 16 | (lap + 1 & 1) << 16 | status << 17
            self._tail += 1

    def _execute(self, opcode: int, sqe: Sqe) -> int:
        if opcode == 0x06:
            assert sqe.dptr[0] in self.mapped, "an address that the IOMMU does not know"
            ctypes.memmove(sqe.dptr[0], self.identify[sqe.cdw10], IDENTIFY_NBYTES)
        elif opcode == 0x09:
            return (self.grants - 1) << 16 | (self.grants - 1)
        elif opcode in (0x01, 0x05):
            kind = "sq" if opcode == 1 else "cq"
            self.created.append((kind, sqe.cdw10 & 0xFFFF, (sqe.cdw10 >> 16) + 1))
            if kind == "cq" and sqe.cdw11 & 2:  # IEN
                self.interrupting.append(sqe.cdw10 & 0xFFFF)
        elif opcode in (0x00, 0x04):
            self.log.append(f"delete {'sq' if opcode == 0 else 'cq'} {sqe.cdw10}")
        return 0


def brought_up(drive: Any) -> NvmeAdmin:
    admin = NvmeAdmin(drive)
    admin.disable()
    admin.enable()
    return admin


def test_bring_up_and_shutdown() -> None:
    drive = FakeDrive()
    admin = brought_up(drive)
    assert drive.written[0x24] == 31 << 16 | 31
    assert drive.written[0x28] in drive.mapped
    assert drive.cc == 6 << 16 | 4 << 20 | 1
    assert admin.request_queues(8) == 4
    pairs = [QueuePair(depth, qid) for qid, depth in ((1, 16), (2, 64))]
    for pair in pairs:
        admin.create_queues(pair)
    assert drive.created == [("cq", 1, 16), ("sq", 1, 16), ("cq", 2, 64), ("sq", 2, 64)]
    admin.delete_queues(pairs[0])
    admin.shut_down()
    assert drive.log[-3:] == ["delete sq 1", "delete cq 1", "shut down"]
    assert not drive.cc & 1


def test_a_drive_has_the_time_that_it_says_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drive_admin, "_SHUTDOWN_TIMEOUT_S", 0.005)
    drive = FakeDrive()
    drive.cap, drive.crto = CAP | 1 << 59, 240
    drive.identify[1] = controller(at88=struct.pack("<I", 20_000_000))
    admin = brought_up(drive)
    assert admin.capabilities.timeout_s == 120
    drive.looks_until_shut_down = 100
    with pytest.raises(DeviceTimeout, match="shut down"):
        admin.shut_down()
    admin.identify()
    drive.csts = READY
    drive.looks_until_shut_down = 100
    admin.shut_down()
    assert drive.log[-1] == "shut down"


def test_the_admin_ring_wraps() -> None:
    admin = brought_up(FakeDrive())
    for _ in range(100):
        assert admin.request_queues(2) == 2


def test_more_queues_than_granted() -> None:
    admin = brought_up(FakeDrive())
    admin.request_queues(2)
    with pytest.raises(ConfigError, match="grants 2"):
        admin.create_queues(QueuePair(16, 3))


def test_a_refused_command_is_an_error_with_its_status() -> None:
    drive = FakeDrive()
    admin = brought_up(drive)
    drive.refuses[0x09] = 0x00B
    with pytest.raises(MediumError, match="0x00b") as caught:
        admin.request_queues(2)
    assert caught.value.status == 0x00B


class FakeFunction(FakeDrive):
    """A FakeDrive for a whole controller: a file stands in for its registers."""

    registers, registers_nbytes = 0, 0x4000

    def __init__(self, bdf: str) -> None:
        super().__init__()
        self.fd = os.memfd_create("registers")
        os.ftruncate(self.fd, self.registers_nbytes)
        self.container_fd = self.fd
        self.request_fd, self.wake_fd = (os.eventfd(0, os.EFD_NONBLOCK) for _ in range(2))
        self.identify = {
            0: namespace(),
            1: controller(),
            2: struct.pack("<I", 1).ljust(IDENTIFY_NBYTES, b"\0"),
        }

    def check_mappable(self, offset: int, nbytes: int) -> None:
        assert offset + nbytes <= self.registers_nbytes

    def close(self) -> None:
        for fd in (self.fd, self.request_fd, self.wake_fd):
            os.close(fd)


@pytest.mark.parametrize("opcode", [0x01, 0x05])
def test_a_refused_queue_pair_leaves_nothing(opcode: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller_vfio, "VfioDevice", FakeFunction)
    made = VfioController("0000:99:00.0", shadow_doorbells=False, rescues=False)
    drive: Any = made.device
    mapped = dict(drive.mapped)
    drive.refuses[opcode] = 0x102
    for _ in range(2):
        with pytest.raises(MediumError, match="refused to create queue pair 1"):
            made.create_queue_pair(16)
    assert drive.mapped == mapped, "rings stay mapped"
    assert drive.log.count("delete cq 1") == (2 if opcode == 0x01 else 0)
    drive.refuses.clear()
    made.create_queue_pair(16).close()
    made.close()


def test_a_mute_drive_times_out() -> None:
    drive = FakeDrive()
    admin = brought_up(drive)
    drive.is_mute = True
    with pytest.raises(DeviceTimeout, match="did not answer"):
        admin.run(Sqe(cdw0=0x09), timeout_s=0.01)
    drive.is_gone = True
    with pytest.raises(DeviceGone):
        admin.run(Sqe(cdw0=0x09), timeout_s=0.01)


def test_a_late_answer_is_not_taken_for_another() -> None:
    """The completion of a command that timed out comes before that of the next one."""
    drive = FakeDrive()
    admin = brought_up(drive)
    drive.is_mute = True
    with pytest.raises(DeviceTimeout):
        admin.run(Sqe(cdw0=0x06), timeout_s=0.01)
    drive.is_mute = False
    drive.refuses[0x06] = 0x006
    assert admin.run(Sqe(cdw0=0x09, cdw10=7, cdw11=0)).dword == 3 << 16 | 3


@pytest.mark.parametrize(
    ("fault", "error"), [("is_deaf", DeviceTimeout), ("is_fatal", MediumError)]
)
def test_a_drive_that_does_not_become_ready(fault: str, error: type[Exception]) -> None:
    drive: Any = FakeDrive()
    admin = NvmeAdmin(drive)
    setattr(drive, fault, True)
    with pytest.raises(error):
        admin.enable()


def test_restart_makes_the_queues_again() -> None:
    drive = FakeDrive()
    admin = brought_up(drive)
    admin.request_queues(4)
    admin.queue_pairs = [QueuePair(16, 1), QueuePair(32, 2)]
    ended: list[int] = []
    admin.restart(5.0, lambda: ended.append(drive.csts & READY))
    assert ended == [0], "commands are ended while the drive is disabled, once"
    assert [qid for kind, qid, _ in drive.created if kind == "sq"] == [1, 2]


def test_queue_pairs_of_a_device_have_no_interrupts_and_end_with_a_reset() -> None:
    drive = FakeDrive()
    drive.irq_fd = 0
    admin = brought_up(drive)
    admin.request_queues(4)
    pairs = [QueuePair(16, 1), QueuePair(16, 2, is_device=True)]
    for pair in pairs:
        admin.create_queues(pair)
    admin.queue_pairs = pairs
    assert drive.interrupting == [1]
    drive.created.clear()
    admin.restart(5.0, lambda: None)
    assert [pair.is_dead for pair in pairs] == [False, True]
    assert [qid for kind, qid, _ in drive.created if kind == "sq"] == [1]


def test_restart_of_a_stuck_drive_resets_the_function() -> None:
    drive = FakeDrive()
    admin = brought_up(drive)
    drive.is_deaf = True
    admin.restart(0.05, lambda: None)
    assert "reset" in drive.log
    drive.is_deaf, drive.resets_work = True, False
    with pytest.raises(DeviceTimeout):
        admin.restart(0.05, lambda: pytest.fail("the drive may still write"))


def test_what_the_drive_lists_is_checked() -> None:
    drive = FakeDrive()
    admin = brought_up(drive)
    drive.identify[2] = struct.pack("<2I", 1, 9).ljust(IDENTIFY_NBYTES, b"\0")
    with pytest.raises(MediumError, match="namespace 9"):
        admin.identify_namespaces(4)
