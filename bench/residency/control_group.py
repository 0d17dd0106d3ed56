"""A control group that limits memory, made for one measurement and removed after it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tutti.errors import Unsupported

_ROOT = Path("/sys/fs/cgroup")
_REMOVE_S = 10.0
_NAP_S = 0.05


class MemoryGroup:
    """One control group, of version 1 or 2."""

    def __init__(self, folder: Path, is_v2: bool) -> None:
        self.folder = folder
        self.version = 2 if is_v2 else 1
        self._limit = "memory.max" if is_v2 else "memory.limit_in_bytes"
        self._cached = "file" if is_v2 else "total_cache"

    def limit(self, nbytes: int) -> None:
        (self.folder / self._limit).write_text(str(nbytes))

    def cached_nbytes(self) -> int:
        """Page cache that is charged to the group."""
        for line in (self.folder / "memory.stat").read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == self._cached:
                return int(value)
        return 0

    @property
    def limit_file(self) -> str:
        return str(self.folder / self._limit)

    @property
    def members_file(self) -> str:
        """The file to which a process writes its pid to join."""
        return str(self.folder / "cgroup.procs")


@contextmanager
def memory_group(name: str) -> Iterator[MemoryGroup]:
    """Makes an empty group; removes it at the end.

    Raises Unsupported if control groups are missing or this user may not make any.
    """
    folder, is_v2 = _parent()
    child = folder / f"tutti-{name}-{os.getpid()}"
    try:
        if is_v2 and "memory" not in (folder / "cgroup.subtree_control").read_text().split():
            (folder / "cgroup.subtree_control").write_text("+memory")
        child.mkdir()
    except OSError as error:
        raise Unsupported(
            f"cannot make a control group in {folder}: {error.strerror}; run this as root, on a"
            " machine or in a container that may limit memory"
        ) from error
    try:
        yield MemoryGroup(child, is_v2)
    finally:
        _remove(child)


def _parent() -> tuple[Path, bool]:
    if (_ROOT / "memory/memory.limit_in_bytes").exists():
        return _ROOT / "memory", False
    controllers = _ROOT / "cgroup.controllers"
    if controllers.exists() and "memory" in controllers.read_text().split():
        return _ROOT, True
    raise Unsupported(
        f"no control groups that limit memory below {_ROOT}; mount cgroup2 there with the memory"
        " controller"
    )


def _remove(folder: Path) -> None:
    """Retries: the kernel releases a group some time after its last process has ended."""
    deadline_s = time.monotonic() + _REMOVE_S
    while folder.exists() and time.monotonic() < deadline_s:
        try:
            folder.rmdir()
        except OSError:
            time.sleep(_NAP_S)
