"""Tells which results are older than the code that they measure, by the history of the checkout."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

_STORE = (
    *("tutti/store.py", "tutti/medium", "tutti/placement", "tutti/pool", "tutti/memory"),
    *("tutti/transfers", "tutti/scheduler", "tutti/profiles"),
)
_RINGS = ("kernels/include", "kernels/native", "bench/controller_memory.py")
_ENGINE = (*_RINGS, "tutti/gio_uring")
_TRANSFERS = (*_STORE, *_ENGINE)
_PAGES = ("bench/stamps.py", "bench/shape.py", "bench/fio.py")
_RIG = (*_PAGES, "bench/workload.py", "bench/meter.py", "bench/pool_file.py")
_TRACES = ("bench/traces.py", "bench/belady.py")
_SIMULATOR = ("tutti/scheduler", "bench/simulate", "bench/ttft", *_TRACES)
_DRIVE = tuple(f"bench/simulate/{name}" for name in ("device.py", "hardware.py", "hardware.json"))
_SLACK = ("tutti/scheduler", *_DRIVE, "bench/slack")

#: What results depend on, by their name or that of their benchmark: files and folders of the
#: checkout.
DEPENDS: dict[str, tuple[str, ...]] = {
    "agent": (*_TRANSFERS, "tutti/node", "bench/agent.py"),
    "commits": ("bench/compare/commits.py",),  # of the code, two fixed versions
    "compare": (*_TRANSFERS, *_RIG, "bench/compare", "bench/file_per_object.py"),
    "decisions": (*_TRANSFERS, *_SLACK),
    "eviction": ("tutti/placement", "bench/eviction.py", *_TRACES),
    "failures": ("kernels/native", "tutti", "tests/native/failures.py"),
    "fuzz": ("tutti", "tests/fuzz"),
    "gpu": (
        *("tutti/gio_uring", "kernels", "bench/gpu", "bench/fio.py"),
        *("bench/controller_memory.py", "bench/compare/paired.py"),
    ),
    "kv_cache": (
        *_TRANSFERS,
        *(f"bench/yardsticks/{name}.py" for name in ("backends", "round", "run")),
        "bench/residency/control_group.py",
    ),
    "paths": (*_TRANSFERS, *_RIG, "bench/paths.py"),
    "peers": (
        *(*_TRANSFERS, *_PAGES, "bench/peers"),
        *("integration/sglang/hicache.py", "integration/sglang/host"),
    ),
    "placement": (*_TRANSFERS, "bench/placement.py", "tests/qemu/placement.py"),
    "profile": (
        *_TRANSFERS,
        "bench/profile",
        "bench/gpu",
        "bench/fio.py",
        "bench/compare/paired.py",
    ),
    "replay": (*_TRANSFERS, *_RIG, *_TRACES, "bench/replay.py"),
    "residency": (*_TRANSFERS, *_RIG, "bench/residency"),
    "residency-moving": (*_TRANSFERS, *_RIG, "bench/residency"),
    "short": (*_TRANSFERS, "bench/short.py", "bench/pool_file.py", "bench/shape.py"),
    "ring": (
        *("kernels/include/gio_uring", "kernels/native/ring_bench.cpp"),
        *("bench/ring.py", "bench/controller_memory.py"),
    ),
    "second_tier": (*_TRANSFERS, "tutti/cluster", "bench/second_tier.py"),
    "serving": (
        *_TRANSFERS,
        *("integration/sglang", "bench/yardsticks/serving.py"),
        *(f"bench/ttft/{name}.py" for name in ("http", "recipes", "server_control")),
    ),
    "simulate": _SIMULATOR,
    "slack": _SLACK,
    "slack-file": (*_TRANSFERS, *_SLACK),
    "soak": ("kernels", "tutti", "tests/soak"),
    "submit": (
        *("kernels/device", "tutti/gio_uring/gpu", "integration/sglang/direct"),
        *("bench/submit.py", "bench/counting_driver.py", "bench/controller_memory.py"),
    ),
    "threads": (*_ENGINE, "bench/threads.py"),
    "window": (*_ENGINE, "bench/window.py"),
}


def has_history(root: Path) -> bool:
    """Whether the folder is a checkout with all of its history."""
    return _git(root, "rev-parse", "--is-shallow-repository") == (0, "false")


def depends(name: str, result: dict[str, Any]) -> tuple[str, ...]:
    """What the result of a file NAME.json depends on."""
    return DEPENDS[name] if name in DEPENDS else DEPENDS[result["benchmark"]]


def is_stale(name: str, result: dict[str, Any], root: Path) -> bool:
    """Whether the measured code was changed after the commit that a result names.

    A commit outside of the history, or with changes of its own, cannot be looked up: such a result
    is stale.
    """
    commit = str(result["machine"]["commit"])
    if _git(root, "merge-base", "--is-ancestor", commit, "HEAD")[0] != 0:
        return True
    return _git(root, "diff", "--quiet", commit, "--", *depends(name, result))[0] != 0


def _git(root: Path, *arguments: str) -> tuple[int, str]:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=root, capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return -1, ""
    return done.returncode, done.stdout.strip()
