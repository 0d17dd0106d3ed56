"""Finds results that are older than the code that they measure, by the history of the checkout.

The code of a result is identified by a digest of the files that it depends on, at its commit.
"""

from __future__ import annotations

import ast
import csv
import functools
import hashlib
import json
import re
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

_STORE = (
    *("tutti/store.py", "tutti/medium", "tutti/placement", "tutti/pool", "tutti/memory"),
    *("tutti/transfers", "tutti/scheduler", "tutti/profiles", "tutti/base", "tutti/interface.py"),
)
_RINGS = ("kernels/include", "kernels/native", "bench/controller_memory.py")
_STATISTICS = "bench/statistics.py"
_GOALS = "bench/goals.py"
_ENGINE = (*_RINGS, "tutti/native.py", "tutti/gio_uring", _STATISTICS)
_TRANSFERS = (*_STORE, *_ENGINE)
_PAGES = ("bench/stamps.py", "bench/shape.py", "bench/fio.py")
_RIG = (*_PAGES, "bench/pool_workload.py", "bench/meter.py", "bench/pool_file.py")
_PLACES = ("bench/pool_file.py", "bench/members.py")
_COMPARE = ("bench/compare", "bench/peers/same_memory.py", "bench/file_per_object.py")
_TRACES = ("bench/traces.py", "bench/belady.py")
_RESIDENCY = ("bench/residency", *_PLACES)
_SIMULATOR = ("tutti/scheduler", "bench/simulate", "bench/ttft", _STATISTICS, *_TRACES)
_DRIVE = tuple(f"bench/simulate/{name}" for name in ("device.py", "hardware.py", "hardware.json"))

_BANDWIDTH = (
    *(*_TRANSFERS, *_RIG, "bench/bandwidth.py", "bench/members.py", "bench/compare/paired.py"),
)
_RING_SOAK = (
    *(f"kernels/include/gio_uring/{n}.h" for n in ("atomics", "controller_queue", "nvme_spec")),
    *("kernels/include/gio_uring/queue_pair.h", "tests/native/ring_harness.h"),
    *(f"tests/native/{n}" for n in ("fiber.h", "programs.py")),
    "tests/soak/rings.py",
)
_GPU = (
    *("tutti/gio_uring/gpu", "kernels/device"),
    *("kernels/native/cuda_calls.cpp", "kernels/native/cuda_calls.h"),
)
#: Imported by benches that can also measure a GPU; without a GPU this code does not run.
GPU_BENCHES = ("bench/gpu", "bench/gpu_memory.py")
_GPU_RIG = ("bench/gpu/cases.py", "bench/gpu/rig.py", "bench/compare/paired.py")
_GPU_COPIES = (*_TRANSFERS, *_GPU, "kernels", *_GPU_RIG)
_ON_GPU = (*_GPU_COPIES, *GPU_BENCHES, "bench/fio.py")
#: Code that makes and replaces pools, before a benchmark measures anything.
_MAKING = ("tutti/pool/pool_format.py", "tutti/pool/replacement.py")
#: The choice of an engine, which benchmarks do not use: they name theirs.
_CHOICE = "tutti/gio_uring/gpu/engine_choice.py"
#: Command lines of servers, which neither simulations nor random operations start.
_LAUNCHES = ("tutti/commands/sglang.py", "bench/ttft/recipes.py")
#: Used by the second tier and SGLang's linker, not by stores.
_BREAKER = "tutti/base/breaker.py"
#: Files in the folders above that count only for results that name them: they run before
#: measurements or only on a GPU, or they only show results, or simulations do not use them.
_APART = (
    *(*_MAKING, *_GPU, _CHOICE, *GPU_BENCHES, *_LAUNCHES, "tutti/commands/demo.py", _BREAKER),
    *(f"bench/slack/{n}.py" for n in ("report", "file", "decisions")),
)

#: What results that name a file depend on, if not on all of it.
_USED = {"tutti/profiles/at_open.py": ("store_limits", "_PRESSING_US", "_WRITE_PATIENCE_US")}

#: Files and folders of the checkout that results depend on, by the name of the result or of its
#: benchmark.
DEPENDS: dict[str, tuple[str, ...]] = {
    "agent": (*_TRANSFERS, *_PLACES, "tutti/node", "bench/agent.py"),
    "bandwidth": _BANDWIDTH,  # in host memory
    "bandwidth-gpu": (*_BANDWIDTH, *_ON_GPU),
    "compare": (*_TRANSFERS, *_RIG, *_COMPARE),
    "decisions": (
        *(*_TRANSFERS, *_DRIVE, "bench/slack/decisions.py", "bench/slack/file.py"),
        *(f"bench/slack/{n}.py" for n in ("conditions", "lower_bound", "server", "workload")),
    ),
    "eviction": (
        *("tutti/placement", "tutti/transfers/reclaim.py", "tutti/medium/geometry.py"),
        *(f"kernels/native/{name}.cpp" for name in ("allocator", "index", "reuse")),
        *(f"bench/{name}.py" for name in ("eviction", "eviction_bounds", "eviction_pool")),
        *_TRACES,
    ),
    "failures": ("kernels/native", "tutti", *_MAKING, "tests/native/failures.py"),
    "fuzz": ("tutti", *_MAKING, "tests/fuzz"),
    "gpu": _GPU_COPIES,
    "gpu-pipeline": (
        *(*_GPU_COPIES, "bench/gpu/overlap.py", "bench/gpu/interference.py"),
        "bench/gpu_memory.py",
    ),
    "gpu-tests": (
        *("tutti", *_GPU, _CHOICE, _BREAKER, "kernels", "integration/sglang/direct", "tests/gpu"),
    ),
    "gpu-probes": (
        *(*_GPU, *_GPU_RIG, "bench/gpu/probes.py", "bench/gpu/interference.py"),
        *("bench/controller_memory.py", _STATISTICS),
    ),
    "kv_cache": (
        *_TRANSFERS,
        *(f"bench/yardsticks/{name}.py" for name in ("backends", "round", "run")),
        *("bench/residency/control_group.py", "bench/meter.py"),
    ),
    "paths": (*_TRANSFERS, *_RIG, "bench/members.py", "bench/paths.py"),
    "peers": (
        *(*_TRANSFERS, *_PAGES, "bench/peers", _GOALS),
        *(f"integration/sglang/{name}" for name in ("hicache.py", "host", "page_keys.py")),
    ),
    "placement": (*_TRANSFERS, "bench/placement.py", "tests/qemu/placement.py"),
    "profile": (*_TRANSFERS, "bench/profile"),
    "profile-gpu": (*_ON_GPU, "bench/profile"),
    "replay": (
        *(*_TRANSFERS, *_RIG, *_TRACES, *_PLACES, "bench/fio.py", "bench/replay.py"),
        *("bench/engine_alone.py", "bench/prepared_read.py"),
    ),
    "residency": (*_TRANSFERS, *_RIG, *_RESIDENCY),
    "residency-moving": (*_TRANSFERS, *_RIG, *_RESIDENCY),
    "short": (
        *(*_TRANSFERS, *_PLACES, "bench/short.py", "bench/shape.py"),
        *("bench/path_model.py", "bench/prepared_read.py", "bench/meter.py"),
    ),
    "ring": (
        *("kernels/include/gio_uring", "kernels/native/ring_bench.cpp"),
        *("bench/ring.py", "bench/controller_memory.py", _STATISTICS),
    ),
    "second_tier": (
        *(*_TRANSFERS, "tutti/cluster", _BREAKER, "bench/pool_file.py", "bench/meter.py"),
        *(f"bench/{name}.py" for name in ("second_tier", "mooncake_cluster", "mooncake_reader")),
    ),
    "serving": (
        *(*_TRANSFERS, _BREAKER, "integration/sglang"),
        *(f"bench/yardsticks/{name}.py" for name in ("serving", "serving_steps", "sglang_clients")),
        *(f"bench/ttft/{name}.py" for name in ("arrivals", "client", "http", "metrics")),
        *(f"bench/ttft/{name}.py" for name in ("protocol", "recipes", "server_control")),
        *("bench/ttft/workloads", *_TRACES, "bench/meter.py"),
    ),
    "sglang-gpu": (
        *(*_ON_GPU, _CHOICE, _BREAKER, *_TRACES, "integration/sglang", "bench/ttft"),
        "bench/ttft/recipes.py",
    ),
    "simulate": (*_SIMULATOR, "tutti/profiles/at_open.py"),  # the limits of stores
    "slack": (
        *("tutti/scheduler", *_DRIVE, "bench/slack", _STATISTICS),
        "tutti/profiles/at_open.py",  # likewise
    ),
    "slack-file": (*_TRANSFERS, "bench/slack/file.py"),
    "soak": ("kernels", "tutti", *_MAKING, "tests/soak"),
    "soak-rings": (*_RING_SOAK, "tests/native/ring_fiber.cpp"),
    "soak-threads": (*_RING_SOAK, "tests/native/ring_stress.cpp"),
    "submit": (
        *(*_GPU, "integration/sglang/direct"),
        *("bench/submit.py", "bench/counting_driver.py", "bench/controller_memory.py"),
    ),
    "threads": (*_ENGINE, "bench/threads.py"),
    "window": (*_TRANSFERS, *_PLACES, "bench/window.py", "bench/shape.py", _GOALS),
}


#: Errors of a medium, with which every benchmark fails; these results are about such errors.
_FAILURES = frozenset({"ChecksumMismatch", "DeviceGone", "MediumError", "PoolMoved"})
_OF_FAILURES = ("failures", "fuzz", "gpu-tests", "soak")

#: Functions in bench that only show a result.
_SHOWN = ("rows_of", "notes_of", "bounds_of", "report")

#: What the rows of a figure in docs/figures depend on, by their source.
_ROWS = {"simulated": "simulate", "measured": "residency"}

#: Digests of the measured code, as lines of name, commit and digest: needed for commits that a
#: rebase removed from the history.
LOCK = "bench/results/code.lock"

CHANGED = "the code that it measures has changed since"
UNKNOWN = "its commit is not in this history"

#: Lines of C++ that are not code: whole-line comments, and included file names.
_NO_CODE = re.compile(r'\s*(//|#include "|$)')


def has_history(root: Path) -> bool:
    """Whether the folder is a checkout with all of its history."""
    return _git(root, "rev-parse", "--is-shallow-repository") == (0, "false")


def depends(name: str, result: dict[str, Any]) -> tuple[str, ...]:
    """What the result of a file NAME.json depends on."""
    return DEPENDS[_key(name, result)]


def why_stale(name: str, result: dict[str, Any], root: Path) -> str:
    """CHANGED if the measured code differs from the checkout's, UNKNOWN if it is unknown, else "".

    Comments (of C++ only those on lines of their own), docstrings, Markdown, the texts of errors
    and log lines, names of files and of imported modules, and functions that show results are not
    code; nor is what handles the failure of a medium, but for results about failures.  The code of
    a result from a checkout with uncommitted changes is UNKNOWN.
    """
    key = _key(name, result)
    measured = _measured(key, str(result["machine"]["commit"]), root)
    if measured is None:
        return UNKNOWN
    return "" if measured == _digest(key, _files_now(key, root)) else CHANGED


def figure_is_stale(file: Path, root: Path) -> bool:
    """Whether the code behind a row of a figure's CSV was changed after the commit of the row."""
    return any(
        why_stale(key, {"benchmark": key, "machine": {"commit": commit}}, root)
        for key, commit in _figure_rows(file)
    )


def write_lock(root: Path) -> None:
    """Writes the digests of all results and figures of the checkout whose commits are known."""
    wanted = set[tuple[str, str]]()
    for file in root.joinpath("bench/results").glob("*.json"):
        result = json.loads(file.read_text())
        wanted.add((_key(file.stem, result), str(result["machine"]["commit"])))
    for file in root.joinpath("docs/figures").glob("*.csv"):
        wanted |= _figure_rows(file)
    lines = [
        f"{key} {commit} {digest}\n"
        for key, commit in sorted(wanted)
        if key in DEPENDS and (digest := _measured(key, commit, root)) is not None
    ]
    root.joinpath(LOCK).write_text("".join(lines))


def _figure_rows(file: Path) -> set[tuple[str, str]]:
    with file.open(newline="") as lines:
        rows = [(row["source"], row["commit"]) for row in csv.DictReader(lines)]
    return {(_ROWS[source], commit) for source, commit in rows if source in _ROWS}


def _key(name: str, result: dict[str, Any]) -> str:
    return name if name in DEPENDS else str(result["benchmark"])


def _measured(key: str, commit: str, root: Path) -> str | None:
    """The digest of a result's code at its commit; None if neither history nor lock has it."""
    if _git(root, "merge-base", "--is-ancestor", commit, "HEAD")[0] == 0:
        return _digest(key, _files_at(key, commit, root))
    file = root / LOCK
    kept = (line.split() for line in file.read_text().splitlines()) if file.exists() else ()
    return next((words[2] for words in kept if words[:2] == [key, commit]), None)


def _digest(key: str, files: Iterable[tuple[str, str]]) -> str:
    """The digest of files, as (path, text), which does not depend on the paths."""
    codes = []
    for path, text in files:
        shown = _SHOWN if path.startswith("bench/") else ()
        used = _USED.get(path, ()) if path in DEPENDS[key] else ()
        codes.append(_code(Path(path).suffix, text.strip(), shown, used, key in _OF_FAILURES))
    codes.sort()
    return hashlib.sha256("\0".join(codes).encode()).hexdigest()[:16]


def _files_at(key: str, commit: str, root: Path) -> Iterator[tuple[str, str]]:
    for line in _git(root, "ls-tree", "-r", commit, "--", *DEPENDS[key])[1].splitlines():
        facts, path = line.split("\t", 1)
        if _belongs(path, key):
            yield path, _blob(root, facts.split()[2])


def _files_now(key: str, root: Path) -> Iterator[tuple[str, str]]:
    which = ("--cached", "--others", "--exclude-standard", "--deduplicate")
    for path in _git(root, "ls-files", *which, "--", *DEPENDS[key])[1].splitlines():
        file = root / path
        if _belongs(path, key) and file.exists():
            yield path, file.read_text(errors="replace")


def _belongs(path: str, key: str) -> bool:
    named = DEPENDS[key]
    apart = (other for other in _APART if other not in named)
    is_apart = any(path == other or path.startswith(f"{other}/") for other in apart)
    return path in named or not (is_apart or path.endswith(".md"))


@functools.cache
def _blob(root: Path, name: str) -> str:
    return _git(root, "cat-file", "blob", name)[1]


@functools.cache
def _code(
    suffix: str, text: str, shown: tuple[str, ...], used: tuple[str, ...], of_failures: bool
) -> str:
    """A file's code, without file names, presentation, messages and comments (in C++ only whole
    lines).  used: names of the module that count, instead of all.  of_failures: with the handlers
    of `_FAILURES`.
    """
    if suffix != ".py":
        return "\n".join(line for line in text.splitlines() if not _NO_CODE.match(line))
    tree = ast.parse(text)
    tree.body = [node for node in tree.body if getattr(node, "name", "") not in shown]
    if used:
        tree.body = [node for node in tree.body if not _names(node).isdisjoint(used)]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            node.module, node.level = None, 0
            node.names = [name for name in node.names if name.asname]  # others show where used
        if isinstance(node, ast.Try) and not of_failures:
            node.handlers = [one for one in node.handlers if not _is_of_failures(one)]
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            is_text = ast.get_docstring(node, clean=False) is not None
            node.body = node.body[is_text:]
        logger = getattr(getattr(node, "func", None), "value", None)
        if isinstance(node, ast.Raise) or getattr(logger, "id", "") == "_log":
            _drop_texts(node)
    return _shape(tree)


def _is_of_failures(handler: ast.ExceptHandler) -> bool:
    """Whether it handles errors of a medium only."""
    types = getattr(handler.type, "elts", [handler.type])
    return all(getattr(one, "id", "") in _FAILURES for one in types)


def _names(node: ast.stmt) -> set[str]:
    """The names that a statement of a module defines."""
    targets = getattr(node, "targets", ())
    return {getattr(target, "id", "") for target in targets} | {getattr(node, "name", "")}


def _drop_texts(node: ast.AST) -> None:
    """Empties the texts of a message; what an f-string shows between them stays."""
    for part in ast.walk(node):
        if isinstance(part, ast.JoinedStr):
            part.values = [value for value in part.values if not isinstance(value, ast.Constant)]
        elif isinstance(part, ast.Constant) and isinstance(part.value, str):
            part.value = ""


def _shape(node: object) -> str:
    """A syntax tree as text, without empty fields, in which Python's versions differ."""
    if isinstance(node, list):
        return f"[{','.join(map(_shape, node))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = ((name, value) for name, value in ast.iter_fields(node) if value not in (None, []))
    return f"{type(node).__name__}({','.join(f'{n}={_shape(v)}' for n, v in fields)})"


def _git(root: Path, *arguments: str) -> tuple[int, str]:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=root, capture_output=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return -1, ""
    return done.returncode, done.stdout.decode(errors="replace").strip()
