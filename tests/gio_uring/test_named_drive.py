"""Addresses of drives, and what is said where a drive cannot be taken; no drive is touched."""

from __future__ import annotations

from pathlib import Path

import pytest

from tutti.errors import ConfigError, Unsupported
from tutti.gio_uring.drives import vfio
from tutti.gio_uring.named_drive import NamedDrive, is_drive, open_drives

BDF = "0000:03:00.0"
NAME = f"nvme:{BDF}"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (NAME, NamedDrive(BDF, None)),
        (f"{NAME}/ns2", NamedDrive(BDF, 2)),
        ("nvme:10000:E1:1F.7/ns300", NamedDrive("10000:e1:1f.7", 300)),
    ],
)
def test_addresses(name: str, expected: NamedDrive) -> None:
    assert NamedDrive.parse(name) == expected


@pytest.mark.parametrize(
    "name",
    [
        "nvme:",
        "nvme:03:00.0",
        "nvme:0000:03:00.8",
        "nvme:0000:03:20.0",
        f"{NAME}/ns0",
        f"{NAME}/ns",
        f"{NAME}/2",
        f"{NAME}/../../x",
        f"{NAME}\n",
        f" {NAME}",
        BDF,
    ],
)
def test_what_is_no_address(name: str) -> None:
    with pytest.raises(ConfigError, match="as `lspci -D` has it"):
        NamedDrive.parse(name)


def test_files_are_no_drives() -> None:
    assert is_drive(NAME)
    assert not any(map(is_drive, ["pool.tutti", "/dev/nvme0n1", "./nvme:x", "nvme"]))


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A sysfs with one NVMe drive, bound to the kernel's driver; returns the drive's folder."""
    device = tmp_path / "bus/pci/devices" / BDF
    device.mkdir(parents=True)
    (device / "class").write_text("0x010802\n")
    bind(device, "nvme")
    monkeypatch.setattr(vfio, "PCI_DEVICES", device.parent)
    monkeypatch.setattr(vfio, "_VFIO", tmp_path / "dev/vfio")
    return device


def bind(device: Path, driver: str) -> None:
    target = device.parents[1] / "drivers" / driver
    target.mkdir(parents=True, exist_ok=True)
    (device / "driver").unlink(missing_ok=True)
    (device / "driver").symlink_to(target)


def test_a_drive_of_the_kernel_names_its_driver_and_the_commands(machine: Path) -> None:
    with pytest.raises(ConfigError, match="bound to nvme, not to vfio-pci") as caught:
        open_drives([NAME])
    for words in (
        f"echo {BDF} > {machine}/driver/unbind",
        "driver_override",
        "modprobe vfio-pci",
    ):
        assert words in str(caught.value)
    (machine / "driver").unlink()
    with pytest.raises(ConfigError, match="bound to no driver") as caught:
        open_drives([NAME])
    assert "unbind" not in str(caught.value)


def test_a_machine_without_an_iommu(machine: Path) -> None:
    bind(machine, "vfio-pci")
    with pytest.raises(Unsupported, match="intel_iommu=on"):
        open_drives([NAME])


def test_a_kernel_without_vfio(machine: Path) -> None:
    bind(machine, "vfio-pci")
    group = machine.parents[2] / "iommu_groups/7"
    group.mkdir(parents=True)
    (machine / "iommu_group").symlink_to(group)
    with pytest.raises(Unsupported, match="modprobe -a vfio-pci"):
        open_drives([NAME])


def test_another_device(machine: Path) -> None:
    (machine / "class").write_text("0x030200\n")
    with pytest.raises(ConfigError, match="not an NVMe drive"):
        open_drives([NAME])
    with pytest.raises(ConfigError, match="does not exist; `lspci"):
        open_drives(["nvme:0000:04:00.0"])
