"""Compares four ways to use the page cache when memory is short: hit ratio, GB/s, p99.

The experiment of the Dual-Blade paper (arXiv 2604.26557), scaled to the machine: a working set W
of KV objects is written once, as a prefill does, then read as a whole again and again, as decoding
with offloaded KV does, while a control group limits memory to a share of W.  The hit ratio is the
share of each batch that mincore(2) finds in the page cache just before it is read.

The page cache is charged to the control group; the benchmark's own memory is not.  Needs root.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tutti import store as object_store
from tutti.arguments import positive
from tutti.base.terminal import ProgressFactory, table
from tutti.base.units import MiB, format_nbytes, parse_nbytes
from tutti.bench.environment import describe
from tutti.bench.figures.data import RESIDENCY
from tutti.bench.figures.data import rows_of as figure_rows
from tutti.bench.figures.run import write_figure
from tutti.bench.members import refuse
from tutti.bench.meter import in_turn
from tutti.bench.pool_file import pool_paths
from tutti.bench.residency import moving
from tutti.bench.residency.cell import CONFIGURATIONS
from tutti.bench.residency.control_group import memory_group
from tutti.bench.shape import parse_shape
from tutti.bench.statistics import median
from tutti.bench.writable import check_writable, options
from tutti.errors import CapacityError, ConfigError, MediumError, PoolExists, Unsupported
from tutti.gio_uring.file_member import FileMember

_CELL_TIMEOUT_S = 900.0
#: Share of a limit for cached bytes.  The rest is the kernel's metadata: a buffer head of 104 bytes
#: per 4096 bytes on ext4, and index nodes, 2.7 % together.
_SHARE = 0.965


def add_arguments(parser: argparse.ArgumentParser) -> None:
    option = options(parser)
    option("--dir", ".", "directory for the pool's file")
    option("--working-set", "1GiB", "bytes of the working set, W")
    what = "memory limits as fractions of the working set"
    option("--limits", [0.2, 0.4, 0.6, 0.8, 1.0, 1.2], what)
    what = "ways to measure: " + ", ".join(CONFIGURATIONS) + " (default: all)"
    option("--only NAME", list(CONFIGURATIONS), what, CONFIGURATIONS)
    option("--shape", "4x256KiB", "shape of an object")
    option("--batch", "32MiB", "bytes per put or load")
    option("--rounds", 4, "times that the working set is read")
    option("--share", _SHARE, "share of free memory that the page cache may use")
    what = "measure under a memory limit that changes each half second, slowly, or in steps of "
    what += "four seconds (default: all)"
    option("--moving", None, what, moving.COURSES, nargs="*")
    option("--seconds", 10, "seconds per changing limit", positive)
    what = "simulate the changing limits, which only the monitor sees; needs no control group"
    option("--pretend", False, what)
    option("--out", None, "also write the JSON to this file, and a chart next to it")
    parser.set_defaults(path=None)


def run(args: argparse.Namespace, progress: ProgressFactory) -> dict[str, Any]:
    """Measures every configuration at every limit, each in its own process and control group.

    Raises ConfigError for sizes that do not fit together, Unsupported without control groups or
    direct I/O, MediumError if a cell fails.
    """
    cell = _common(args)
    refuse([args.dir], "a pool on a device has no page cache to compare with; give a folder")
    (path,) = pool_paths(args, "residency")
    if Path(path).exists():
        raise PoolExists(f"{path} exists; a benchmark overwrites nothing: move it away")
    if args.out:
        out = Path(args.out)
        check_writable(out)
        check_writable(*(out.with_suffix(suffix) for suffix in (".csv", ".png", ".svg")))
    if args.moving is not None:
        return _run_moving(args, {**cell, "path": path}, progress)
    cells = []
    with progress("residency", len(args.limits) * len(args.only)) as bar:
        for turn, limit in enumerate(args.limits):
            for configuration in in_turn(args.only, turn):
                cells.append(_run_cell({**cell, "path": path}, configuration, limit))
                bar.advance(1)
    cells.sort(key=lambda c: (args.limits.index(c["limit"]), args.only.index(c["configuration"])))
    result = {
        "benchmark": "residency",
        "cells": cells,
        "wrong": sum(c["wrong"] for c in cells),
        **{name: cell[name] for name in ("working_set_nbytes", "shape", "share", "batch_nbytes")},
        "machine": describe(args.dir),
    }
    if args.out:
        _write(result, Path(args.out))
    return result


def _run_moving(
    args: argparse.Namespace, cell: dict[str, Any], progress: ProgressFactory
) -> dict[str, Any]:
    """Runs all configurations in rounds, each round in a rotated order."""
    cells = []
    courses = itertools.product(args.moving or moving.COURSES, range(args.rounds))
    runs = [
        (course, number, configuration)
        for turn, (course, number) in enumerate(courses)
        for configuration in in_turn(moving.CONFIGURATIONS, turn)
    ]
    with progress("residency", len(runs)) as bar:
        for course, _, configuration in runs:
            seconds = moving.seconds_of(course, args.seconds)
            given = {**cell, "course": course, "seconds": seconds}
            cells.append(_run_cell(given, configuration, moving.HIGH, pretend=args.pretend))
            bar.advance(1)
    result = {
        "benchmark": "residency-moving",
        "rows": moving.judge(cells, args.seconds),
        "rounds": args.rounds,
        "seconds": args.seconds,
        "limit": "pretended to the monitor alone" if args.pretend else "of a control group",
        "cells": cells,
        "wrong": sum(c["wrong"] for c in cells),
        **{name: cell[name] for name in ("working_set_nbytes", "shape", "share", "batch_nbytes")},
        "machine": describe(args.dir),
    }
    if args.out:
        Path(args.out).write_text(json.dumps(result) + "\n")
    return result


HEAD = (
    *("limit / W", "configuration", "hit ratio", "read GB/s", "[min, max]", "p99 ms"),
    *("CPU-s/GB", "write GB/s"),
)


def rows_of(result: dict[str, Any]) -> list[list[str]]:
    rows = []
    for cell in result["cells"]:
        low, high = cell["read_gb_per_s_range"]
        rows.append(
            [
                f"{cell['limit']:.2f}",
                cell["configuration"],
                f"{cell['hit_ratio']:.3f}",
                f"{cell['read_gb_per_s']:.2f}",
                f"[{low:.2f}, {high:.2f}]",
                f"{cell['read_p99_ms']:.1f}",
                f"{cell['read_cpu_s_per_gb']:.2f}",
                f"{cell['write']['gb_per_s']:.2f}",
            ]
        )
    return rows


def notes_of(result: dict[str, Any]) -> list[str]:
    rounds = result["cells"][0]["rounds"]
    return [
        f"W {format_nbytes(result['working_set_nbytes'])}; medians of the last"
        f" {len(rounds) - 1} of {len(rounds)} rounds; control groups, version"
        f" {result['cells'][0]['control_group_version']}",
        _fresh_text(result["cells"]),
    ]


def report(result: dict[str, Any]) -> str:
    if "rows" in result:
        lines = [table(moving.HEAD, moving.rows_of(result)), *moving.notes_of(result)]
    else:
        lines = [table(HEAD, rows_of(result)), *notes_of(result)]
    if result["wrong"]:
        lines.append(f"WRONG BYTES in {result['wrong']} pages")
    return "\n".join(lines)


def _fresh_text(cells: list[dict[str, Any]]) -> str:
    speeds = [cell["fresh_gb_per_s"] for cell in cells]
    return (
        f"memory that was free came at {min(speeds):.2f} to {max(speeds):.2f} GB/s; it was taken"
        " before each measurement, so this is not in the table"
    )


def _common(args: argparse.Namespace) -> dict[str, Any]:
    shape = parse_shape(args.shape)
    working_set, batch = parse_nbytes(args.working_set), parse_nbytes(args.batch)
    batch_pages = batch // shape.object_nbytes
    if batch_pages < 1 or not working_set or working_set % (batch_pages * shape.object_nbytes):
        step = format_nbytes(max(1, batch_pages) * shape.object_nbytes)
        raise ConfigError(
            f"--working-set {args.working_set} is not a multiple of {step}, the objects of a"
            f" --batch of {args.batch}; choose one"
        )
    least = 2 if args.moving is None else 1
    if args.rounds < least or not all(0 < limit <= 16 for limit in args.limits):
        raise ConfigError("at least two --rounds, the first warms up; limits are shares of W")
    return {
        "shape": args.shape,
        "working_set_nbytes": working_set,
        "batch_pages": batch_pages,
        "batch_nbytes": batch_pages * shape.object_nbytes,
        "batches": working_set // (batch_pages * shape.object_nbytes),
        "rounds": args.rounds,
        "share": args.share,
    }


def _check_direct(path: str) -> None:
    member = FileMember(path)
    try:
        if not member.direct:
            raise Unsupported(
                f"{path} has one path only: {member.buffered_reason}; use a directory on a disk"
            )
    finally:
        member.close()


def _run_cell(
    cell: dict[str, Any], configuration: str, limit: float, *, pretend: bool = False
) -> dict[str, Any]:
    """Runs a cell in a new pool, which is a tenth larger than W, so that nothing is evicted."""
    capacity_nbytes = cell["working_set_nbytes"] * 11 // 10 + 64 * MiB
    layout = parse_shape(cell["shape"]).layout()
    try:
        object_store.format([cell["path"]], layout, capacity_nbytes, prewrite=True)
        _check_direct(cell["path"])
        if pretend:
            with TemporaryDirectory(prefix="tutti-limit-") as folder:
                files = {"limit_file": folder, "members_file": f"{folder}/procs"}
                measured = _measure({**cell, **files}, configuration, limit)
            return {"configuration": configuration, "course": cell["course"], **measured}
        with memory_group("residency") as group:
            group.limit(int(limit * cell["working_set_nbytes"]))
            files = {"limit_file": group.limit_file, "members_file": group.members_file}
            begin_s = time.perf_counter()
            measured = _measure({**cell, **files}, configuration, limit)
            facts = _steady(measured["rounds"][1:]) if "rounds" in measured else {}
            return {
                "configuration": configuration,
                "limit": limit,
                **({"course": cell["course"]} if "course" in cell else {}),
                **facts,
                **measured,
                "cell_s": time.perf_counter() - begin_s,
                "charged_cache_nbytes": group.cached_nbytes(),
                "control_group_version": group.version,
            }
    finally:
        Path(cell["path"]).unlink(missing_ok=True)


def _measure(cell: dict[str, Any], configuration: str, limit: float) -> dict[str, Any]:
    """Runs the process of a cell; returns its result."""
    limit_nbytes = int(limit * cell["working_set_nbytes"])
    done = subprocess.run(
        [sys.executable, "-m", "tutti.bench.residency.cell"],
        input=json.dumps({**cell, "configuration": configuration, "limit_nbytes": limit_nbytes}),
        capture_output=True,
        text=True,
        timeout=_CELL_TIMEOUT_S,
    )
    if done.returncode < 0:
        raise CapacityError(
            f"{configuration} with {limit:g} W was killed, as out of memory in"
            f" {format_nbytes(limit_nbytes)}; give a larger --working-set, or higher --limits"
        )
    if done.returncode != 0:
        raise MediumError(f"{configuration} with {limit:g} W failed: {done.stderr.strip()[-500:]}")
    measured: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return measured


def _steady(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the rounds without the first one, which finds pages left by the writes."""
    speeds = [r["gb_per_s"] for r in rounds]
    return {
        "hit_ratio": median([r["hit_ratio"] for r in rounds]),
        "read_gb_per_s": median(speeds),
        "read_gb_per_s_range": [min(speeds), max(speeds)],
        "read_p99_ms": median([r["p99_ms"] for r in rounds]),
        "read_cpu_s_per_gb": median([r["cpu_s_per_gb"] for r in rounds]),
    }


def _write(result: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(result, indent=1) + "\n")
    write_figure(RESIDENCY, figure_rows(result, RESIDENCY, path.name), path.with_suffix(""))
