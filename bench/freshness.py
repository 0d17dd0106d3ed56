"""Tells which results are older than the code that they measure, by the history of the checkout."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

_STORE = ("tutti/medium", "tutti/placement", "tutti/pool", "tutti/memory", "tutti/transfers")
_RINGS = ("kernels/include", "kernels/native")
_TRANSFERS = (*_STORE, *_RINGS, "tutti/gio_uring")

#: What the results of a benchmark depend on: files and folders of the checkout.
DEPENDS: dict[str, tuple[str, ...]] = {
    "agent": (*_STORE, "tutti/node", "bench/agent.py"),
    "commits": ("bench/compare/commits.py",),  # of the code, two fixed versions
    "compare": (*_TRANSFERS, "bench/compare", "bench/fio.py"),
    "eviction": ("tutti/placement", "bench/eviction.py"),
    "failures": ("kernels/native", "tutti", "tests/native/failures.py"),
    "fuzz": ("tutti", "tests/fuzz"),
    "gpu": ("tutti/gio_uring", "kernels", "bench/gpu"),
    "kv_cache": (*_TRANSFERS, "bench/yardsticks"),
    "peers": (
        *_TRANSFERS,
        "integration/sglang/hicache.py",
        "integration/sglang/host",
        "bench/peers",
    ),
    "profile": (*_TRANSFERS, "bench/profile"),
    "replay": (*_TRANSFERS, "bench/replay.py"),
    "residency": (*_TRANSFERS, "bench/residency"),
    "residency-moving": (*_TRANSFERS, "bench/residency"),
    "ring": ("kernels/include/gio_uring", "kernels/native/ring_bench.cpp", "bench/ring.py"),
    "simulate": ("tutti/scheduler", "bench/simulate"),
    "slack": (
        "tutti/scheduler",
        "bench/simulate/device.py",
        "bench/simulate/hardware.py",
        "bench/simulate/hardware.json",
        "bench/slack",
    ),
    "soak": ("kernels", "tutti", "tests/soak"),
    "submit": (
        "kernels/device",
        "tutti/gio_uring/gpu",
        "integration/sglang/direct",
        "bench/submit.py",
    ),
    "threads": (*_RINGS, "tutti/gio_uring", "bench/threads.py"),
    "window": (*_RINGS, "tutti/gio_uring", "bench/window.py"),
}


def has_history(root: Path) -> bool:
    """Whether the folder is a checkout with all of its history."""
    return _git(root, "rev-parse", "--is-shallow-repository") == (0, "false")


def is_stale(result: dict[str, Any], root: Path) -> bool:
    """Whether the measured code was changed after the commit that a result names.

    A commit outside of the history, or with changes of its own, cannot be looked up: such a result
    is stale.
    """
    commit = str(result["machine"]["commit"])
    if _git(root, "merge-base", "--is-ancestor", commit, "HEAD")[0] != 0:
        return True
    return _git(root, "diff", "--quiet", commit, "--", *DEPENDS[result["benchmark"]])[0] != 0


def _git(root: Path, *arguments: str) -> tuple[int, str]:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=root, capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return -1, ""
    return done.returncode, done.stdout.strip()
