"""Describes this machine for judging a measurement, without host names or paths."""

from __future__ import annotations

import os
import platform
import stat
from pathlib import Path

from tutti.base.numa import PCI_DEVICES
from tutti.base.units import format_nbytes
from tutti.gio_uring.drives.generic_device import is_generic, readable_path
from tutti.gio_uring.drives.mounts import filesystem_of, text_of
from tutti.scheduler import policy


def machine_facts(directory: str | os.PathLike[str] | None = None) -> dict[str, str | int]:
    """Processor, memory and kernel, for JSON.

    directory: describes its disk and file system as well; may also be a device or a drive, which
    is called the same after a restart: by its size and model, or by its slot and kind.
    """
    described: dict[str, str | int] = {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": format_nbytes(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        "kernel": platform.release(),
        "transparent_hugepages": _line("/sys/kernel/mm/transparent_hugepage/enabled"),
        "reserved_hugepages": _line("/proc/sys/vm/nr_hugepages"),
    }
    if directory is not None:
        path = os.fspath(directory)
        if path.startswith("nvme:"):
            bdf = path.removeprefix("nvme:").partition("/")[0].lower()
            disk = f"a drive through vfio, {bdf}, {_line(f'{PCI_DEVICES}/{bdf}/modalias')}"
            return {**described, "filesystem": "none", "disk": disk}
        status = os.stat(readable_path(path))
        is_device = stat.S_ISBLK(status.st_mode)
        described["filesystem"] = "none" if is_device else filesystem_of(directory)
        way = ", by passthrough" if is_generic(path) else ""
        described["disk"] = _disk(status.st_rdev if is_device else status.st_dev, is_device) + way
    return described


def scheduler_form() -> str:
    """How the scheduler's code runs: "compiled" (an extension module), or "interpreted"."""
    return "compiled" if policy.__file__.endswith(".so") else "interpreted"


def _line(path: str) -> str:
    return text_of(Path(path)).partition("\n")[0].strip() or "unknown"


def _cpu() -> str:
    lines = text_of(Path("/proc/cpuinfo")).splitlines()
    found = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(found, platform.machine())


def _disk(device: int, is_device: bool) -> str:
    """Name, kind and model of a block device, of a partition's whole disk."""
    node = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    try:
        disk = node.resolve(strict=True)
    except OSError:
        return "no block device"
    if (disk / "partition").exists():
        disk = disk.parent
    model = _line(str(disk / "device/model"))
    rotational = _line(str(disk / "queue/rotational"))
    kind = {"0": "solid state", "1": "reported as rotational"}.get(rotational, "unknown kind")
    if model == "unknown":
        return f"{disk.name}, {kind}"
    # All volumes of a cloud have the same model, but seldom the same size.
    name = f"{_line(str(disk / 'size'))} sectors" if is_device else disk.name
    return f"{name}, {kind}, {model}"
