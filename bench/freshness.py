"""Tells which results are older than the code that they measure, by the history of the checkout."""

from __future__ import annotations

import ast
import csv
import functools
import re
import subprocess
from collections import Counter
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
_RIG = (*_PAGES, "bench/pool_workload.py", "bench/meter.py", "bench/pool_file.py")
_PLACES = ("bench/pool_file.py", "bench/members.py")
_COMPARE = tuple(
    f"bench/compare/{name}.py"
    for name in ("cases", "churn", "index_cost", "paired", "run", "systems")
)
_TRACES = ("bench/traces.py", "bench/belady.py")
_RESIDENCY = ("tutti/base/memory_pressure.py", "bench/residency")
_SIMULATOR = ("tutti/scheduler", "bench/simulate", "bench/ttft", *_TRACES)
_DRIVE = tuple(f"bench/simulate/{name}" for name in ("device.py", "hardware.py", "hardware.json"))
_SLACK = ("tutti/scheduler", *_DRIVE, "bench/slack")

_GPU = "tutti/gio_uring/gpu"
#: In folders above, but in no result that does not name it: making and replacing pools ends before
#: anything is measured, and without a GPU none of its engines runs.
_APART = ("tutti/pool/pool_format.py", "tutti/pool/replacement.py", _GPU)

#: What results depend on, by their name or that of their benchmark: files and folders of the
#: checkout.
DEPENDS: dict[str, tuple[str, ...]] = {
    "agent": (*_TRANSFERS, *_PLACES, "tutti/node", "bench/agent.py"),
    "commits": ("bench/compare/commits.py",),  # of the code, two fixed versions
    "compare": (*_TRANSFERS, *_RIG, *_COMPARE, "bench/file_per_object.py"),
    "decisions": (*_TRANSFERS, *_SLACK),
    "eviction": (
        *("tutti/placement", "tutti/transfers/reclaim.py", "tutti/medium/geometry.py"),
        *(f"kernels/native/{name}.cpp" for name in ("allocator", "index", "reuse")),
        *("bench/eviction.py", *_TRACES),
    ),
    "failures": ("kernels/native", "tutti", "tests/native/failures.py"),
    "fuzz": ("tutti", "tests/fuzz"),
    "gpu": (
        *(*_TRANSFERS, _GPU, "kernels", "bench/gpu", "bench/gpu_memory.py", "bench/fio.py"),
        "bench/compare/paired.py",
    ),
    "kv_cache": (
        *_TRANSFERS,
        *(f"bench/yardsticks/{name}.py" for name in ("backends", "round", "run")),
        "bench/residency/control_group.py",
    ),
    "paths": (*_TRANSFERS, *_RIG, "bench/members.py", "bench/paths.py"),
    "peers": (
        *(*_TRANSFERS, *_PAGES, "bench/peers"),
        *(f"integration/sglang/{name}" for name in ("hicache.py", "host", "page_keys.py")),
    ),
    "placement": (*_TRANSFERS, "bench/placement.py", "tests/qemu/placement.py"),
    "profile": (
        *_TRANSFERS,
        "bench/profile",
        *("bench/gpu", "bench/gpu_memory.py", "bench/fio.py", "bench/compare/paired.py"),
    ),
    "replay": (*_TRANSFERS, *_RIG, *_TRACES, "bench/fio.py", "bench/replay.py"),
    "residency": (*_TRANSFERS, *_RIG, *_RESIDENCY),
    "residency-moving": (*_TRANSFERS, *_RIG, *_RESIDENCY),
    "short": (*_TRANSFERS, *_PLACES, "bench/short.py", "bench/shape.py"),
    "ring": (
        *("kernels/include/gio_uring", "kernels/native/ring_bench.cpp"),
        *("bench/ring.py", "bench/controller_memory.py"),
    ),
    "second_tier": (*_TRANSFERS, "tutti/cluster", "bench/second_tier.py", "bench/pool_file.py"),
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
        *("kernels/device", _GPU, "integration/sglang/direct"),
        *("bench/submit.py", "bench/counting_driver.py", "bench/controller_memory.py"),
    ),
    "threads": (*_ENGINE, "bench/threads.py"),
    "window": (*_ENGINE, "bench/window.py", *_PLACES),
}


#: What the rows of a figure in docs/figures depend on, by their source.
_ROWS = {"simulated": "simulate", "measured": "residency"}

#: Lines of C++ without code: comments, and names of files.
_NO_CODE = re.compile(r'\s*(//|#include "|$)')


def has_history(root: Path) -> bool:
    """Whether the folder is a checkout with all of its history."""
    return _git(root, "rev-parse", "--is-shallow-repository") == (0, "false")


def depends(name: str, result: dict[str, Any]) -> tuple[str, ...]:
    """What the result of a file NAME.json depends on."""
    return DEPENDS[name] if name in DEPENDS else DEPENDS[result["benchmark"]]


def is_stale(name: str, result: dict[str, Any], root: Path) -> bool:
    """Whether the measured code was changed after the commit that a result names.

    Comments, docstrings, and names of files and of modules that are imported are no code.  A commit
    outside of the history, or with changes of its own, cannot be looked up: such a result is stale.
    """
    commit = str(result["machine"]["commit"])
    if _git(root, "merge-base", "--is-ancestor", commit, "HEAD")[0] != 0:
        return True
    on = depends(name, result)
    without = (f":(exclude){path}" for path in _APART if path not in on)
    among = ("--no-renames", "--name-only", commit, "--", *on, *without)
    failed, changed = _git(root, "diff", *among)
    if failed:
        return True
    gone, new = Counter[str](), Counter[str]()
    for path in changed.splitlines():
        was_absent, old = _git(root, "show", f"{commit}:{path}")
        before = None if was_absent else _code(path, old)
        file = root / path
        now = _code(path, file.read_text().strip()) if file.exists() else None
        if before is not None and now is not None and before != now:
            return True
        if before != now:  # the file has another name now
            gone.update([before] if before is not None else [])
            new.update([now] if now is not None else [])
    return gone != new


def figure_is_stale(file: Path, root: Path) -> bool:
    """Whether the code behind a row of a figure's CSV was changed after the commit of the row."""
    with file.open(newline="") as lines:
        made = {(row["source"], row["commit"]) for row in csv.DictReader(lines)}
    return any(
        is_stale(_ROWS[source], {"machine": {"commit": commit}}, root)
        for source, commit in made
        if source in _ROWS
    )


@functools.cache
def _code(path: str, text: str) -> str:
    """What a file does, in a form that comments and names of files do not change."""
    if not path.endswith(".py"):
        return "\n".join(line for line in text.splitlines() if not _NO_CODE.match(line))
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            node.module, node.level = None, 0
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            is_text = ast.get_docstring(node, clean=False) is not None
            node.body = node.body[is_text:]
    return ast.dump(tree)


def _git(root: Path, *arguments: str) -> tuple[int, str]:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=root, capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return -1, ""
    return done.returncode, done.stdout.strip()
