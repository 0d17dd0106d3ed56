"""Which process has a vfio device: over a kernel made of Python, whose device is an empty file."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tutti.errors import DeviceGone
from tutti.gio_uring.drives import vfio
from tutti.gio_uring.drives.vfio import VfioDevice


class Kernel:
    """Answers vfio's calls as for a device with interrupts, in group 7."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        for name in ("vfio", "7", "device"):
            (folder / name).touch()

    def ioctl(self, fd: int, request: int, argument: Any = 0) -> int:
        if request == vfio._CHECK_EXTENSION:
            return 1
        if request == vfio._GROUP_GET_STATUS:
            struct.pack_into("<I", argument, 4, vfio._GROUP_VIABLE)
        elif request == vfio._GROUP_GET_DEVICE_FD:
            return os.open(self._folder / "device", os.O_RDWR | os.O_CLOEXEC)
        elif request == vfio._DEVICE_GET_IRQ_INFO:
            struct.pack_into("<I", argument, 12, 1)
        return 0


def files_of(pid: int, folder: Path) -> int:
    """How many event counters and files of a folder a process has open."""
    names = [os.path.realpath(fd) for fd in Path(f"/proc/{pid}/fd").iterdir()]
    return sum("eventfd" in name or Path(name).parent == folder for name in names)


@pytest.mark.parametrize("is_removed", [False, True])
def test_a_device_that_is_gone_when_its_reset_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_removed: bool
) -> None:
    """The rescue of a drive gives it up after a typed error, and ended its thread after others."""
    monkeypatch.setattr(vfio, "_VFIO", tmp_path)
    monkeypatch.setattr(vfio, "iommu_group", lambda bdf: "7")
    monkeypatch.setattr(fcntl, "ioctl", Kernel(tmp_path).ioctl)
    device = VfioDevice("0000:03:00.0")
    if not is_removed:
        monkeypatch.setattr(os, "pread", Mock(side_effect=OSError(errno.EIO, "I/O error")))
    with pytest.raises(DeviceGone, match="check it"):
        device.enable_dma()
    device.close()


def test_a_forked_child_has_no_part_of_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its copies would keep the device from its owner, who closes it or is killed."""
    monkeypatch.setattr(vfio, "_VFIO", tmp_path)
    monkeypatch.setattr(vfio, "iommu_group", lambda bdf: "7")
    monkeypatch.setattr(fcntl, "ioctl", Kernel(tmp_path).ioctl)
    own = os.getpid()
    before = files_of(own, tmp_path)
    device = VfioDevice("0000:03:00.0")
    begun, told = os.pipe()
    stay, end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(told, b".")
        os.close(end)
        os.read(stay, 1)
        os._exit(0)
    assert os.read(begun, 1) == b"."
    kept, owned = files_of(pid, tmp_path), files_of(own, tmp_path)
    for fd in (begun, told, stay, end):
        os.close(fd)
    assert os.waitpid(pid, 0)[1] == 0
    assert (kept, owned) == (before, before + 6)
    device.close()
    assert files_of(own, tmp_path) == before
