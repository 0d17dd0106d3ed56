"""Compares the store with fio, with itself, and with a file per object; one case at a time.

    python -m tutti.bench.compare.run bandwidth-fio --dir DIR --pairs 7

Every comparison alternates its two systems (bench/compare/paired.py). In a round both move the same
number of bytes, by direct I/O, in files that were written completely before; fio in the pool's own
file, as places of a disk differ in speed. OUT/CASE.json gets the result, with the machine's data.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tutti.base.terminal import progress, table
from tutti.base.units import parse_nbytes
from tutti.bench.compare.cases import CASES, Setup
from tutti.bench.compare.paired import PAIRS_MIN
from tutti.bench.environment import describe
from tutti.bench.statistics import interval_text
from tutti.bench.writable import options
from tutti.errors import TuttiError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = "\n".join(f"  {name:<20} {case.__doc__}" for name, case in CASES.items())
    parser.epilog = f"cases:\n{names}"
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    option = options(parser)
    option("cases", None, None, [*CASES, "all"], nargs="+", metavar="CASE")
    option("--dir", ["."], "folders: Tutti's pools have a file in each, all else is in the first")
    option("--out", "bench/results", "folder for the results (default: %(default)s)")
    option("--pairs", PAIRS_MIN, "rounds (%(default)s)")
    option("--size", "4GiB", "size of pools and of fio's files (default: %(default)s)")
    option("--seconds", 2.0, "length of a round (default: %(default)s)")
    option("--prefix-pages", 1024, "pages of a long prefix (%(default)s)")
    option("--records", 1_000_000, "records to recover (default: %(default)s)")
    what = "kinds of pages for the buffers of both systems"
    option("--memory", ["huge", "ordinary"], what, ("huge", "ordinary"))
    option("--only TEXT", "", "measure only cells whose name contains this")
    what = "reserve the hugepages that fio needs (vm.nr_hugepages), and release them"
    option("--allow-sysctl", False, what)
    option("--seed", 1, "(default: %(default)s)")


def setup_of(args: argparse.Namespace) -> Setup:
    names = ("pairs", "prefix_pages", "records", "only", "allow_sysctl", "seed")
    return Setup(
        directories=tuple(map(Path, args.dir)),
        size_nbytes=parse_nbytes(args.size),
        round_s=args.seconds,
        memory=tuple(args.memory),
        progress=progress,
        **{name: getattr(args, name) for name in names},
    )


def run_case(name: str, setup: Setup) -> dict[str, Any]:
    """Measures one case; cells by name, or the reason why they could not be measured."""
    return {
        "benchmark": "compare",
        "case": name,
        "question": CASES[name].__doc__,
        "cells": CASES[name](setup),
        "size_nbytes": setup.size_nbytes,
        "members": len(setup.directories),
        "machine": describe(setup.directory),
    }


HEAD = (
    *("cell", "a GB/s", "b GB/s", "a/b speed", "b/b speed (noise)"),
    *("a CPU-s/GB", "b CPU-s/GB", "a/b CPU", "a-b CPU-s/GB"),
)


def rows_of(result: dict[str, Any]) -> list[list[str]]:
    """The table below HEAD: cells that compare two systems."""
    return [
        [
            name,
            *(f"{side['name']} {side['median_gb_per_s']:.2f}" for side in (cell["a"], cell["b"])),
            interval_text(cell["speed_ratio"]),
            interval_text(cell["noise"]["speed_ratio"]) if "noise" in cell else "",
            *(f"{side['median_cpu_s_per_gb']:.3f}" for side in (cell["a"], cell["b"])),
            *(interval_text(cell[what]) for what in ("cpu_ratio", "cpu_difference_s_per_gb")),
        ]
        for name, cell in result["cells"].items()
        if "speed_ratio" in cell
    ]


def notes_of(result: dict[str, Any]) -> list[str]:
    """Notes: other cells, bars, and whether a pool had several members but its rival one folder."""
    shown = {name: cell.get("bar") if "speed_ratio" in cell else _plain(cell)
             for name, cell in result["cells"].items()}  # fmt: skip
    members = result.get("members", 1)
    notes = [f"Tutti: {members} members; all else in the first folder"] if members > 1 else []
    return [*(f"{name}: {text}" for name, text in shown.items() if text), *notes]


def _plain(facts: dict[str, Any]) -> str:
    words = []
    for name, value in facts.items():
        if isinstance(value, dict):
            words.append(f"{name} ({_plain(value)})")
        else:
            words.append(f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}")
    return ", ".join(words).replace("_", " ")


def report(result: dict[str, Any]) -> str:
    rows = rows_of(result)
    tables = [table(HEAD, rows)] if rows else []
    return "\n".join([f"{result['case']}: {result['question']}", *tables, *notes_of(result)])


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the given cases; returns 0 if all were measured."""
    parser = argparse.ArgumentParser(prog="tutti.bench.compare.run", description=__doc__)
    add_arguments(parser)
    args = parser.parse_args(argv)
    out = Path(args.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name in CASES if "all" in args.cases else args.cases:
            result = run_case(name, setup_of(args))
            (out / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
            print(report(result), flush=True)
    except TuttiError as error:
        print(f"tutti.bench.compare.run: {error}", file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
