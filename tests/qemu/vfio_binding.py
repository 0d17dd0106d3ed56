"""Hands the guest's NVMe drives to vfio-pci."""

from __future__ import annotations

from pathlib import Path

_DEVICES = Path("/sys/bus/pci/devices")
_NVME_CLASS = "0x010802"


def bind() -> list[str]:
    """The addresses of all NVMe functions, in order, bound to vfio-pci."""
    found = []
    for device in sorted(_DEVICES.iterdir()):
        if (device / "class").read_text().strip() != _NVME_CLASS:
            continue
        (device / "driver_override").write_text("vfio-pci")
        if (device / "driver").exists():
            (device / "driver/unbind").write_text(device.name)
        Path("/sys/bus/pci/drivers_probe").write_text(device.name)
        found.append(device.name)
    return found
