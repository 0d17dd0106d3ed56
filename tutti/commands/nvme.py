"""`tutti nvme list`: which devices can hold a pool, and why others cannot."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from tutti.base.terminal import table
from tutti.base.units import format_nbytes
from tutti.commands.outcome import CommandResult
from tutti.errors import TuttiError
from tutti.gio_uring.drives.block_device import BlockDevice, Devices
from tutti.gio_uring.probe import ControllerFacts, probe_controllers

_DESCRIPTION = """\
Lists NVMe namespaces and partitions that can hold a pool, and why the others cannot. The first and
last bytes of each device are read, which may need root; nothing is written."""
_EXAMPLE = """\
example:
  tutti nvme list
  tutti nvme list --all --json"""
_HINTS = """\
To use a free device: tutti format PATH ...; /dev/ng... devices bypass the block layer.
To overwrite a device, add --force SERIAL. A device in use is refused."""


def add_list(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = _DESCRIPTION, _EXAMPLE
    parser.add_argument("--all", action="store_true", help="list other block devices too")
    parser.set_defaults(run=run_list)


def run_list(args: argparse.Namespace) -> CommandResult:
    machine = Devices()
    devices, unreadable = [], []
    for name in machine.names():
        if not (args.all or name.startswith("nvme")):
            continue
        try:
            devices.append(machine.inspect(name))
        except TuttiError as error:  # taken away, or broken: the others are listed
            unreadable.append((name, str(error)))
    given_away = [c for c in probe_controllers() if c.driver == "vfio-pci"]
    result = {
        "devices": [{**asdict(device), "is_free": device.is_free} for device in devices],
        "unreadable": [{"name": name, "reason": reason} for name, reason in unreadable],
        "vfio": [asdict(controller) for controller in given_away],
    }
    return CommandResult(result, _text(devices, unreadable, given_away))


def _text(
    devices: list[BlockDevice], unreadable: list[tuple[str, str]], given_away: list[ControllerFacts]
) -> str:
    rows: list[tuple[object, ...]] = [
        (
            d.generic or d.path,
            format_nbytes(d.nbytes),
            d.lba_nbytes,
            d.serial or "-",
            d.model or "-",
            _verdict(d),
        )
        for d in devices
    ]
    rows += [(f"/dev/{name}", "-", "-", "-", "-", reason) for name, reason in unreadable]
    rows += [
        (c.address, "-", "-", "-", c.model, "bound to vfio-pci: see docs/vfio.md")
        for c in given_away
    ]
    if not rows:
        return "No NVMe drive found; --all lists other disks. A pool can also be an ordinary file."
    listed = table(("device", "size", "LBA", "serial", "model", "verdict"), rows)
    return f"{listed}\n\n{_HINTS}"


def _verdict(device: BlockDevice) -> str:
    if device.in_use:
        return "in use: " + "; ".join(device.in_use)
    return "holds " + ", ".join(device.holds) if device.holds else "free"
