"""Drives by their addresses: "nvme:0000:03:00.0", or "nvme:0000:03:00.0/ns2" for a namespace."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass

from tutti.errors import ConfigError, TuttiError
from tutti.gio_uring.controller import NativeController
from tutti.gio_uring.controller_span import SpanController
from tutti.gio_uring.controller_vfio import VfioController
from tutti.gio_uring.drives import vfio

PREFIX = "nvme:"
_NVME_CLASS = "0x010802"  # PCI Code and ID Assignment Specification 1.15, 1.2
#: domain:bus:device.function, the kernel's name of a PCI function, and an optional namespace.
_FORM = re.compile(r"([0-9a-f]{4,8}:[0-9a-f]{2}:[0-1][0-9a-f]\.[0-7])(?:/ns([1-9][0-9]{0,9}))?")


@dataclass(frozen=True)
class NamedDrive:
    """One drive, or one of its namespaces.

    bdf: the PCI function, "0000:03:00.0".  nsid: None for the drive's only namespace.
    """

    bdf: str
    nsid: int | None

    @classmethod
    def parse(cls, name: str) -> NamedDrive:
        """Raises ConfigError for a name that is not an address."""
        found = _FORM.fullmatch(name.removeprefix(PREFIX).lower())
        if found is None or not is_drive(name):
            raise ConfigError(
                f"{name!r} is not a drive's address; write nvme:0000:03:00.0 as `lspci -D` has it,"
                " and /ns2 behind it for its second namespace"
            )
        return cls(found[1], int(found[2]) if found[2] else None)


def is_drive(name: str) -> bool:
    """Whether a name is a drive's address, not a file's path."""
    return name.startswith(PREFIX)


def open_drives(names: Sequence[str]) -> NativeController:
    """Opens the drives as one controller; its namespace n is ``names[n - 1]``.

    Raises what VfioController raises, and ConfigError for addresses that are malformed, ambiguous
    or given twice, or drives that do not fit together.
    """
    addresses = [NamedDrive.parse(name) for name in names]
    drives: dict[str, VfioController] = {}
    try:
        for address in addresses:
            if address.bdf not in drives:
                _check_is_nvme(address.bdf)
                drives[address.bdf] = VfioController(address.bdf)
        order = list(drives)
        places = [
            (order.index(address.bdf), _namespace(address, drives[address.bdf]))
            for address in addresses
        ]
        if len(set(places)) != len(places):
            raise ConfigError("a namespace is given twice; pass each one once")
        if len(drives) == 1 and places == [(0, n) for n in range(1, len(places) + 1)]:
            return next(iter(drives.values()))
        return SpanController(list(drives.values()), places=places)
    except BaseException:
        for drive in drives.values():
            with contextlib.suppress(TuttiError):
                drive.close()
        raise


def _check_is_nvme(bdf: str) -> None:
    """Raises ConfigError for a device that is not NVMe; VfioDevice reports one that is missing."""
    where = vfio.PCI_DEVICES / bdf / "class"
    if where.exists() and where.read_text().strip() != _NVME_CLASS:
        raise ConfigError(
            f"{bdf} is not an NVMe drive; `lspci -D` lists those that there are as"
            " Non-Volatile memory controller"
        )


def _namespace(address: NamedDrive, drive: VfioController) -> int:
    usable = [nsid for nsid, nlb in enumerate(drive.info.namespace_nlb, 1) if nlb]
    if address.nsid is None and len(usable) == 1:
        return usable[0]
    if address.nsid in usable:
        return address.nsid
    what = "has several namespaces"
    if address.nsid is not None:
        why = drive.refusals.get(address.nsid, "there is none of that number")
        what = f"has no namespace {address.nsid} that can be used ({why})"
    choice = ", ".join(f"{PREFIX}{address.bdf}/ns{nsid}" for nsid in usable)
    raise ConfigError(f"{address.bdf} {what}; use one of {choice}")


def serial_of(controller: NativeController, nsid: int) -> str:
    """Serial number of the drive of a namespace; controller: from ``open_drives``."""
    if isinstance(controller, SpanController):
        controller = controller.drives[controller.places[nsid - 1][0]]
    assert isinstance(controller, VfioController), "a controller of named drives"
    return controller.identity.serial
