"""Late commands of a drive made of Python, and of the native controller over a file."""

from __future__ import annotations

import ctypes
import os
import threading
from typing import Any

import pytest
from gio_uring.drives.test_admin import READY, FakeDrive, brought_up
from gio_uring.test_controller_vfio import DEPTH, Rig
from waiting import wait_until

from tutti.errors import DeviceTimeout
from tutti.gio_uring import _native
from tutti.gio_uring import nvme_spec as nvme
from tutti.gio_uring.controller import NativeController
from tutti.gio_uring.drives import rescue as drive_rescue
from tutti.gio_uring.drives.rescue import Ask, DriveRescue, Late, NativeDrive, RescueResult
from tutti.gio_uring.engine import Engine
from tutti.gio_uring.queue_pair import COMPLETED, QueuePair

GRACE_S = 0.05
COMMANDS: list[Late] = [(1, cid, 1000 + cid) for cid in range(6)]


class StuckDrive(FakeDrive):
    """Aborts are counted; `wakes` says whether a reset makes it answer again."""

    def __init__(self) -> None:
        super().__init__()
        self.aborted: list[tuple[int, int]] = []
        self.wakes = True

    def _configure(self, cc: int) -> None:
        self.is_mute = self.is_mute and not self.wakes
        super()._configure(cc)

    def _execute(self, opcode: int, sqe: nvme.Sqe) -> int:
        if opcode == 0x08:
            self.aborted.append((sqe.cdw10 & 0xFFFF, sqe.cdw10 >> 16))
        return super()._execute(opcode, sqe)


class Commands:
    """Stands in for the native controller: its late commands, and what was asked of it."""

    def __init__(self, device: StuckDrive, *, aborts_work: bool = False) -> None:
        self.device = device
        self.aborts_work = aborts_work
        self.is_served = True
        self.commands = list(COMMANDS)
        self.log: list[object] = []

    def late(self) -> list[Late]:
        if self.aborts_work and len(self.device.aborted) == drive_rescue.ABORTS_MAX:
            self.commands = []
        return list(self.commands)

    def park(self) -> None:
        self.log.append("park")

    def ask(self, what: Ask) -> None:
        if not self.is_served:
            raise DeviceTimeout("nobody")
        if what is Ask.END_ALL:
            assert not self.device.csts & READY, "ended while the drive could still write"
        self.commands = []
        self.log.append(what)


def stuck(**options: Any) -> tuple[StuckDrive, Commands, DriveRescue]:
    device = StuckDrive()
    admin = brought_up(device)
    admin.request_queues(4)
    admin.queue_pairs = [QueuePair(16, 1)]
    admin.create_queues(admin.queue_pairs[0])
    commands = Commands(device, **options)
    return device, commands, DriveRescue(admin, commands, grace_s=GRACE_S)


def test_nothing_is_done_to_a_drive_in_time() -> None:
    device, commands, rescue = stuck()
    commands.commands = []
    assert rescue.look() is RescueResult.NOTHING_LATE
    assert not device.aborted
    assert not commands.log


def test_an_abort_that_helps_is_all() -> None:
    device, commands, rescue = stuck(aborts_work=True)
    assert rescue.look() is RescueResult.ABORTED
    assert device.aborted == [(1, cid) for cid in range(drive_rescue.ABORTS_MAX)]
    assert not commands.log


def test_a_command_that_ends_meanwhile_is_not_aborted() -> None:
    """Its CID is another command's by now."""
    device, commands, rescue = stuck()
    answered = StuckDrive._execute

    def execute(opcode: int, sqe: nvme.Sqe) -> int:
        if opcode == 0x08:
            commands.commands = [(1, cid, 7777 + cid) for cid in range(6)]
        return answered(device, opcode, sqe)

    device._execute = execute  # type: ignore[method-assign]
    assert rescue.look() is RescueResult.ABORTED
    assert device.aborted == [(1, 0)]


@pytest.mark.parametrize("is_mute", [False, True])
def test_a_reset_brings_the_queues_back(is_mute: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The drive answers aborts without ending a command, or does not even answer these."""
    monkeypatch.setattr(drive_rescue, "ABORT_TIMEOUT_S", 0.05)
    device, commands, rescue = stuck()
    device.is_mute = is_mute
    assert rescue.look() is RescueResult.RESET
    assert commands.log == ["park", Ask.END_ALL, Ask.GO_ON]
    assert [qid for kind, qid, _ in device.created if kind == "sq"] == [1]
    assert rescue.look() is RescueResult.NOTHING_LATE


@pytest.mark.parametrize("fault", ["is_deaf", "is_gone"])
def test_a_drive_that_cannot_be_reset_is_given_up(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drive_rescue, "RESET_TIMEOUT_S", 0.05)
    device, commands, rescue = stuck()
    device.resets_work = False
    setattr(device, fault, True)
    assert rescue.look() is RescueResult.LOST
    assert commands.log == ["park", Ask.LOSE]


def test_a_drive_that_sticks_again_and_again_is_given_up() -> None:
    _, commands, rescue = stuck()
    ends = []
    for _ in range(drive_rescue.RESETS_MAX + 1):
        commands.commands = list(COMMANDS)
        ends.append(rescue.look())
    assert ends == [RescueResult.RESET] * drive_rescue.RESETS_MAX + [RescueResult.LOST]


def test_memory_stays_owned_where_nobody_serves_the_queues() -> None:
    _, commands, rescue = stuck()
    commands.is_served = False
    with pytest.raises(DeviceTimeout):
        rescue.look()
    assert commands.late(), "ended though the rings' owner never said so"


class LateRig(NativeDrive):
    """The native part, told from here what is late."""

    commands: tuple[Late, ...] = ()

    def late(self) -> list[Late]:
        return list(self.commands)

    def ask(self, what: Ask) -> None:
        super().ask(what)
        self.commands = ()


def doorbell(rig: Rig, index: int) -> int:
    """The commands that the drive itself received, whatever is mapped."""
    return int.from_bytes(os.pread(rig.registers, 4, 4 * index), "little")


def test_the_rings_of_a_served_controller_start_anew_beside_it() -> None:
    rig, device = Rig(), StuckDrive()
    admin = brought_up(device)
    admin.request_queues(1)
    admin.queue_pairs = [rig.pair]
    drive = LateRig(rig.handle or 0, "rig")
    rescue = DriveRescue(admin, drive, grace_s=GRACE_S)
    cids = rig.submit(5)
    drive.commands = tuple((1, cid, 0) for cid in cids)
    stop = threading.Event()

    def serve() -> None:
        while not stop.is_set():
            _native.lib().gio_controller_service(rig.handle, 1_000_000)

    server = threading.Thread(target=serve)
    server.start()
    try:
        assert rescue.look() is RescueResult.RESET
    finally:
        stop.set()
        server.join(10)
    assert _native.lib().gio_qp_cq_reap(rig.address, 32) == 1
    ended = COMPLETED | nvme.STATUS_ABORTED_SQ_DELETION
    assert [rig.status(cid) for cid in cids] == [ended] * 5
    rig.submit(2)
    assert doorbell(rig, 2) == 2, "the drive's doorbell is rung again, from the start"
    rig.close()


def test_doorbells_that_are_rung_during_a_reset_are_rung_after_it() -> None:
    rig = Rig()
    drive = NativeDrive(rig.handle or 0, "rig")
    rig.submit(3)
    drive.park()
    rig.submit(1)
    assert doorbell(rig, 2) == 3, "a parked doorbell reached the drive"
    lib: Any = drive_rescue._lib()
    service = _native.lib().gio_controller_service
    lib.gio_vfio_controller_ask(rig.handle, Ask.END_ALL.value)
    service(rig.handle, 0)
    assert lib.gio_vfio_controller_asked(rig.handle) == 0
    rig.submit(2)
    assert doorbell(rig, 2) == 3
    lib.gio_vfio_controller_ask(rig.handle, Ask.GO_ON.value)
    service(rig.handle, 0)
    assert doorbell(rig, 2) == 2
    rig.close()


class RigController(NativeController):
    """The native part under an engine, with one queue pair."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        super().__init__(rig.handle or 0)

    def create_queue_pair(
        self, depth: int, *, is_device: bool = False, service_thread: int = 0
    ) -> QueuePair:
        return self._rig.pair


def test_a_command_is_late_until_it_ends_and_no_longer() -> None:
    """Another command has its CID at once."""
    rig = Rig()
    controller, drive = RigController(rig), NativeDrive(rig.handle or 0, "rig")
    engine = Engine(controller, depth=DEPTH)
    job = engine.flush([1], timeout_s=0.01)
    wait_until(drive.late)
    ((qid, cid, _),) = drive.late()
    rig.complete(0, cid, 0)
    assert job.wait_released(30)
    assert qid == 1
    assert not drive.late()
    engine.close()
    controller.keep_after_failure()
    rig.close()


def test_asking_somebody_who_does_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drive_rescue, "ASK_TIMEOUT_S", 0.02)
    rig = Rig()
    drive = NativeDrive(rig.handle or 0, "rig")
    with pytest.raises(DeviceTimeout, match="no thread serves"):
        drive.ask(Ask.END_ALL)
    assert ctypes.sizeof(drive_rescue.LateCommandStruct) == 16
    rig.close()
