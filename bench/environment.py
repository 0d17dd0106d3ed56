"""What a result was measured on: enough to judge it, nothing that names the machine or paths."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

import tutti
from tutti.units import format_nbytes


def describe(directory: str | os.PathLike[str] | None = None) -> dict[str, Any]:
    """The machine, the software, the commit and the command line, for JSON.

    directory: where the pool lies; its disk and file system are described.
    """
    described: dict[str, Any] = {
        "cpu": _field("/proc/cpuinfo", "model name"),
        "cores": len(os.sched_getaffinity(0)),
        "memory": format_nbytes(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        "kernel": platform.release(),
        "transparent_hugepages": _line("/sys/kernel/mm/transparent_hugepage/enabled"),
        "reserved_hugepages": _line("/proc/sys/vm/nr_hugepages"),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "tutti": tutti.__version__,
        "commit": _commit(),
        "command": command_line(sys.argv),
    }
    if directory is not None:
        described["filesystem"] = _filesystem(Path(directory).resolve())
        described["disk"] = _disk(os.stat(directory).st_dev)
    return described


def command_line(arguments: list[str]) -> str:
    """The command with paths cut to their last part."""
    return " ".join(Path(a).name if os.sep in a else a for a in arguments)


def _line(path: str) -> str:
    try:
        return Path(path).read_text().splitlines()[0].strip()
    except (OSError, IndexError):
        return "unknown"


def _field(path: str, name: str) -> str:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return "unknown"
    found = (line.partition(":")[2].strip() for line in lines if line.startswith(name))
    return next(found, platform.machine())


def _filesystem(directory: Path) -> str:
    """Type of the file system of the longest mount point above (proc(5), mountinfo)."""
    best, kind = 0, "unknown"
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return kind
    for line in lines:
        left, _, right = line.partition(" - ")
        mount = Path(left.split()[4].encode().decode("unicode_escape"))
        if directory.is_relative_to(mount) and len(mount.parts) >= best:
            best, kind = len(mount.parts), right.split()[0]
    return kind


def _disk(device: int) -> str:
    """Model and kind of a block device, of the whole disk for a partition."""
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
    return f"{disk.name}, {kind}" + ("" if model == "unknown" else f", {model}")


def _commit() -> str:
    """The commit of the checkout that runs, "+dirty" with changes; "unknown" outside of one."""
    folder = Path(__file__).resolve().parent
    try:
        commit = _git(folder, "rev-parse", "--short=12", "HEAD")
        dirty = _git(folder, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return f"{commit}+dirty" if dirty else commit


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10, check=True
    )
    return done.stdout.strip()
