"""Compares the store with fio, with itself, and with a file per object; one case at a time.

    python -m tutti.bench.compare.run bandwidth-fio --dir DIR --pairs 7

Every comparison alternates its two systems (bench/compare/paired.py). Both move the same bytes in a
round, by direct I/O, on files of the same size on the same file system that were written in full
before. The result of a case goes to OUT/CASE.json together with a description of the machine.
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
from tutti.bench.plots import plot_compare
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
    option("--size", "4GiB", "size of pools and of fio's file (default: %(default)s)")
    option("--seconds", 2.0, "length of a round (default: %(default)s)")
    option("--prefix-pages", 1024, "pages of a long prefix (%(default)s)")
    option("--prefix-shape", "16x128KiB", "shape of its pages (default: %(default)s)")
    option("--churn", 10.0, "bytes stored over capacity (%(default)s)")
    option("--records", 1_000_000, "records to recover (default: %(default)s)")
    option(
        "--memory",
        ["huge", "ordinary"],
        "kinds of pages for the buffers of both systems",
        ("huge", "ordinary"),
    )
    option("--only TEXT", "", "measure only cells whose name contains this")
    option(
        "--allow-sysctl",
        False,
        "reserve the hugepages that fio needs (vm.nr_hugepages), and release them",
    )
    option("--seed", 1, "(default: %(default)s)")


def setup_of(args: argparse.Namespace) -> Setup:
    """What every case needs to know."""
    return Setup(
        directories=tuple(map(Path, args.dir)),
        pairs=args.pairs,
        size_nbytes=parse_nbytes(args.size),
        round_s=args.seconds,
        prefix_pages=args.prefix_pages,
        prefix_shape=args.prefix_shape,
        churn=args.churn,
        records=args.records,
        memory=tuple(args.memory),
        only=args.only,
        allow_sysctl=args.allow_sysctl,
        seed=args.seed,
        progress=progress,
    )


def run_case(name: str, setup: Setup) -> dict[str, Any]:
    """Measures one case: its cells by name, or why they could not be measured."""
    return {
        "benchmark": "compare",
        "case": name,
        "question": CASES[name].__doc__,
        "cells": CASES[name](setup),
        "size_nbytes": setup.size_nbytes,
        "members": len(setup.directories),
        "machine": describe(setup.directory),
    }


def report(result: dict[str, Any]) -> str:
    headers = ["cell", "a", "GB/s", "b", "GB/s", "a/b speed", "b/b speed", "a-b CPU-s/GB"]
    rows, notes = [], []
    for name, cell in result["cells"].items():
        if "speed_ratio" not in cell:
            notes += [f"{name}: {json.dumps(cell, indent=2)}"]
            continue
        notes += [f"{name}: {cell['bar']}"] if "bar" in cell else []
        noise = cell.get("noise")
        rows.append(
            [
                name,
                cell["a"]["name"],
                round(cell["a"]["median_gb_per_s"], 2),
                cell["b"]["name"],
                round(cell["b"]["median_gb_per_s"], 2),
                interval_text(cell["speed_ratio"]),
                interval_text(noise["speed_ratio"]) if noise else "",
                interval_text(cell["cpu_difference_s_per_gb"]),
            ]
        )
    lines = [f"{result['case']}: {result['question']}"]
    notes += members_note(result)
    return "\n".join(lines + ([table(headers, rows)] if rows else []) + notes)


def members_note(result: dict[str, Any]) -> list[str]:
    """That a pool had several members, and what it is compared with had one folder."""
    members = result.get("members", 1)
    return [f"Tutti: {members} members; all else in the first folder"] if members > 1 else []


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the cases that are named; 0 when all were measured."""
    parser = argparse.ArgumentParser(prog="tutti.bench.compare.run", description=__doc__)
    add_arguments(parser)
    args = parser.parse_args(argv)
    out = Path(args.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name in CASES if "all" in args.cases else args.cases:
            result = run_case(name, setup_of(args))
            (out / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
            plot_compare(result, out / f"{name}.png")
            print(report(result), flush=True)
    except TuttiError as error:
        print(f"tutti.bench.compare.run: {error}", file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
