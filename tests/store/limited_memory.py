"""A machine made of files whose control group limits memory, for what follows the free memory."""

from __future__ import annotations

from pathlib import Path


def machine_of(root: Path, limit_nbytes: int) -> Path:
    """A file system with proc and a control group of version 2 that limits memory."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemAvailable: {1 << 24} kB\n")
    (root / "proc/self/cgroup").write_text("0::/job\n")
    mount = "30 22 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
    (root / "proc/self/mountinfo").write_text(mount)
    (root / "sys/fs/cgroup/job").mkdir(parents=True)
    set_limit(root, limit_nbytes)
    return root


def set_limit(root: Path, limit_nbytes: int | str) -> None:
    folder = root / "sys/fs/cgroup/job"
    (folder / "memory.stat").write_text("anon 0\nshmem 0\n")
    (folder / "new").write_text(f"{limit_nbytes}\n")
    (folder / "new").rename(folder / "memory.max")
