"""Memory that this process may still use, and whether tasks wait for memory: /proc and cgroups."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from tutti.errors import Unsupported

#: Version 1 writes "no limit" as a page-aligned number near 2^63.
_UNLIMITED_NBYTES = 1 << 60


@dataclass(frozen=True)
class MemoryFacts:
    """Memory that this process may still use.

    available_nbytes: MemAvailable of the machine, which counts page cache that can be reclaimed.
    limit_nbytes: of the tightest control group around the process, None without one; anon_nbytes,
    shmem_nbytes: memory of that group that cannot be reclaimed; source: its version of cgroups;
    folder: its folder.  told: for each group around the process, whether its limit could be read.
    """

    available_nbytes: int
    limit_nbytes: int | None = None
    anon_nbytes: int = 0
    shmem_nbytes: int = 0
    source: str = "no control group"
    folder: Path | None = None
    told: dict[Path, bool] = field(default_factory=dict)

    @property
    def free_nbytes(self) -> int:
        """The smaller of what the machine and the control group leave, not below 0."""
        if self.limit_nbytes is None:
            return self.available_nbytes
        left = self.limit_nbytes - self.anon_nbytes - self.shmem_nbytes
        return max(0, min(self.available_nbytes, left))


def read_stall_us(root: Path = Path("/")) -> int | None:
    """Total microseconds in which tasks waited for memory; None without PSI (proc(5)).

    Of the control group around the process, if that is of version 2, else of the machine.
    """
    for folder, is_v2 in _groups_around(root):
        stalled = _stall_us(folder / "memory.pressure") if is_v2 else None
        if stalled is not None:
            return stalled
    return _stall_us(root / "proc/pressure/memory")


def total_nbytes(root: Path = Path("/")) -> int:
    """Memory of the machine, or the limit of a control group if that is less: always the same.

    Raises Unsupported without /proc/meminfo.
    """
    total = _numbers(root / "proc/meminfo").get("MemTotal:")
    if total is None:
        raise Unsupported("/proc/meminfo has no MemTotal; mount /proc")
    limits = [_limit_nbytes(folder, is_v2) for folder, is_v2 in _groups_around(root)]
    return min([total * 1024, *(limit for limit in limits if limit is not None)])


def _stall_us(path: Path) -> int | None:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        total = line.rpartition("total=")[2]
        if line.startswith("some ") and total.isdigit():
            return int(total)
    return None


def read_memory(root: Path = Path("/")) -> MemoryFacts:
    """Reads the current facts from proc(5) and from control groups of version 1 or 2.

    root: of the file system that holds proc and sys.  Raises Unsupported without MemAvailable,
    which Linux has had since 3.14.
    """
    available = _numbers(root / "proc/meminfo").get("MemAvailable:")
    if available is None:
        raise Unsupported("/proc/meminfo has no MemAvailable; mount /proc to plan residency")
    told: dict[Path, bool] = {}
    tightest = MemoryFacts(available * 1024, told=told)
    for folder, is_v2 in _groups_around(root):
        limit_nbytes = _limit_nbytes(folder, is_v2)
        told[folder] = limit_nbytes is not None
        if limit_nbytes is None or limit_nbytes >= _UNLIMITED_NBYTES:
            continue
        facts = _group_facts(folder, is_v2, limit_nbytes, tightest)
        if facts.free_nbytes <= tightest.free_nbytes:
            tightest = facts
    return tightest


def _limit_nbytes(folder: Path, is_v2: bool) -> int | None:
    """The limit: _UNLIMITED_NBYTES or more for a group without one, None if it cannot be read."""
    # Above memory.high pages are reclaimed and tasks throttled: page cache is of no use there.
    names = ("memory.max", "memory.high") if is_v2 else ("memory.limit_in_bytes",)
    limits = []
    for name in names:
        try:
            text = (folder / name).read_text().strip()
        except OSError as error:
            if name == "memory.high" and isinstance(error, FileNotFoundError):
                continue
            return None
        if not text.isdigit() and not (is_v2 and text == "max"):
            return None
        limits.append(int(text) if text.isdigit() else _UNLIMITED_NBYTES)
    return min(limits)


def _group_facts(folder: Path, is_v2: bool, limit_nbytes: int, machine: MemoryFacts) -> MemoryFacts:
    """The facts of a group with a limit.  machine: has the fields that are not of the group."""
    stat = _numbers(folder / "memory.stat")
    # "total_" counts the groups below as well; version 2 always does.
    anon = stat.get("anon", 0) if is_v2 else stat.get("total_rss", stat.get("rss", 0))
    shmem = stat.get("shmem", 0) if is_v2 else stat.get("total_shmem", stat.get("shmem", 0))
    version = "version 2" if is_v2 else "version 1"
    source = f"control group, {version}"
    available_nbytes, told = machine.available_nbytes, machine.told
    return MemoryFacts(available_nbytes, limit_nbytes, anon, shmem, source, folder, told)


def _groups_around(root: Path) -> Iterator[tuple[Path, bool]]:
    """Folders of the memory controller for this process and the groups around it."""
    try:
        lines = os.fsdecode((root / "proc/self/cgroup").read_bytes()).splitlines()
    except OSError:
        return
    for mount, mounted_root, is_v2 in _memory_mounts(root):
        for line in lines:
            number, controllers, path = line.split(":", 2)
            wanted = number == "0" and not controllers if is_v2 else "memory" in controllers
            if not wanted:
                continue
            below = PurePosixPath(path)
            if below.is_relative_to(mounted_root):
                below = below.relative_to(mounted_root)
            for part in (below, *below.parents):
                folder = mount / str(part).lstrip("/")
                if folder.is_dir():
                    yield folder, is_v2


def _memory_mounts(root: Path) -> Iterator[tuple[Path, PurePosixPath, bool]]:
    """(where, which part of the hierarchy, version 2?) of mounts that may limit memory."""
    try:
        lines = os.fsdecode((root / "proc/self/mountinfo").read_bytes()).splitlines()
    except OSError:
        return
    for line in lines:  # proc(5): the fields behind " - " are type, source and options
        left, _, right = line.partition(" - ")
        fields, facts = left.split(), right.split()
        if len(fields) < 5 or len(facts) < 3:
            continue
        is_v2 = facts[0] == "cgroup2"
        if is_v2 or (facts[0] == "cgroup" and "memory" in facts[2].split(",")):
            yield root / fields[4].lstrip("/"), PurePosixPath(fields[3]), is_v2


def _numbers(path: Path) -> dict[str, int]:
    """Lines of a name and a number; empty for a file that is not there."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.split() for line in lines)
    return {p[0]: int(p[1]) for p in pairs if len(p) >= 2 and p[1].isdigit()}
