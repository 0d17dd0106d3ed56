"""Compares two commits: the same bench in two checkouts, in alternating rounds.

    python -m tutti.bench.compare.commits BEFORE AFTER bandwidth --dir DIR --out FILE

BEFORE and AFTER are checkouts with a `.venv` and a built native library. A round measures in a
process of each checkout, and in another one of the first: that is the noise. For `bandwidth` the
three have a pool each and measure in turns, several times; the round has their medians. Every round
has new processes and pools, because their places in memory and on the disk change the speed. Rounds
are added to those that FILE has of the same two commits.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from select import select
from typing import IO, Any

from tutti.base.terminal import progress, table
from tutti.bench.environment import describe
from tutti.bench.statistics import bootstrap_median, interval_text, median, ratios
from tutti.bench.writable import check_writable
from tutti.errors import ConfigError, MediumError, TuttiError

_ROUND_TIMEOUT_S = 300
_PASSES = 3
_RING = "bench ring --depths 64 1024 --batches 1 32 --commands 400000 --repeats 3 --json"
# The module was in another place before.
_INDEX = """
import json, sys
sys.path.insert(0, "")
try:
    from tutti.bench.compare.index_cost import measure
except ImportError:
    from tutti.bench.index_cost import measure
print(json.dumps(measure(sys.argv[1], 100_000)))
"""
#: Measures each phase on every line that it reads.
_BANDWIDTH = """
import json, sys
sys.path.insert(0, "")
from tutti.bench.pool_file import temporary_pool
from tutti.bench.shape import parse_shape
try:
    from tutti.bench import pool_workload as workload
except ImportError:
    from tutti.bench import workload  # an earlier name
Limit, Workload = workload.Limit, workload.PoolWorkload
shape = parse_shape(sys.argv[2])
pages = 2**25 // shape.object_nbytes
with temporary_pool([sys.argv[1]], shape.layout(), 3 * 2**28) as store:
    work = Workload(
        store, batch_pages=pages, inflight=4, load_pages=8 * pages, hugepages=False, seed=1
    )
    work.fill_half()
    prefix, limit = work.prefix(8 * pages), Limit(None, 2**27)
    while sys.stdin.readline():
        phases = {
            "retrieve": work.retrieve_phase(limit),
            "layerwise": work.layerwise_phase(limit, prefix),
            "store": work.store_phase(limit),
        }
        prefix = work.prefix(8 * pages)
        assert not work.wrong, "wrong bytes"
        rows = [{"shape": sys.argv[2], "phase": name, **phases[name]} for name in phases]
        print(json.dumps({"rows": rows}), flush=True)
"""
_SIDES = ("before", "after", "again")
HEAD = ("number", "before", "after", "after/before", "before/before (noise)")
#: What is compared of each row: commands and bytes in a time, CPU time, latencies.
_NUMBERS = ("commands_per_s", "cpu_ns_per_command", "gb_per_s", "cpu_s_per_gb", "p50_ms")
_INDEX_NUMBERS = ("index_nbytes_per_object", "open_s", "cpu_s")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("before", type=Path, help="checkout of the older commit")
    parser.add_argument("after", type=Path, help="checkout of the newer commit")
    parser.add_argument("bench", choices=("ring", "bandwidth", "index"))
    parser.add_argument("--dir", default=".", help="folder for the pools' files")
    parser.add_argument("--shape", default="32x256KiB", help="shape of objects")
    parser.add_argument("--rounds", type=int, default=3, help="rounds to add")
    parser.add_argument("--out", type=Path, required=True, help="file for the result (JSON)")


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """Runs the rounds and writes the result after each.

    Raises ConfigError for what is not a checkout, MediumError for a bench that fails.
    """
    commits = {"before": _commit(args.before), "after": _commit(args.after)}
    check_writable(args.out)
    rounds = _earlier(args.out, commits, args.bench)
    result: dict[str, Any] = {}
    with progress(f"{args.bench}, before and after", args.rounds) as bar:
        for number in range(args.rounds):
            turns = _SIDES if number % 2 == 0 else tuple(reversed(_SIDES))
            rounds.append(_round(args, turns))
            result = {
                "benchmark": "commits",
                "bench": args.bench,
                "commits": commits,
                "rows": [_row(name, rounds) for name in rounds[0]["before"]],
                "rounds": rounds,
                "machine": describe(args.dir),
            }
            args.out.write_text(json.dumps(result, indent=1) + "\n")  # a run may be stopped
            bar.advance(1)
    return result


def _round(args: argparse.Namespace, turns: Sequence[str]) -> dict[str, dict[str, float]]:
    checkouts = {side: args.after if side == "after" else args.before for side in turns}
    if args.bench != "bandwidth":
        found = ["-c", _INDEX, args.dir]
        if args.bench == "ring":
            found = ["-m", "tutti.cli", *_RING.split()]
        return {side: _numbers(_run(checkouts[side], found)) for side in turns}
    passes: list[dict[str, dict[str, float]]] = []
    with ExitStack() as stack:
        pipes = {side: _start(checkouts[side], side, args, stack) for side in turns}
        for _ in range(_PASSES + 1):
            passes.append({side: _numbers(_ask(*pipes[side], checkouts[side])) for side in turns})
    del passes[0]  # it warms up
    return {
        side: {name: median([each[side][name] for each in passes]) for name in passes[0][side]}
        for side in turns
    }


def _start(
    checkout: Path, side: str, args: argparse.Namespace, stack: ExitStack
) -> tuple[IO[str], IO[str]]:
    """Input and output of a process that measures bandwidth on demand."""
    pool = str(Path(args.dir).resolve() / f"{side}.tutti")
    process = subprocess.Popen(
        [str(checkout / ".venv/bin/python"), "-c", _BANDWIDTH, pool, args.shape],
        cwd=checkout,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    stack.enter_context(process)
    assert process.stdin and process.stdout, "they are pipes"
    stack.callback(_end, process.stdin)
    return process.stdin, process.stdout


def _end(to: IO[str]) -> None:
    with suppress(BrokenPipeError):  # it has ended
        to.close()


def _ask(to: IO[str], of: IO[str], checkout: Path) -> dict[str, Any]:
    try:
        to.write("\n")
        to.flush()
        line = of.readline() if select([of], [], [], _ROUND_TIMEOUT_S)[0] else ""
    except BrokenPipeError:
        line = ""
    if not line:
        raise MediumError(f"the bench ended or hangs in {checkout}; its error is above")
    result: dict[str, Any] = json.loads(line)
    return result


def rows_of(result: dict[str, Any]) -> list[list[Any]]:
    """A row of HEAD for each number that was compared."""
    return [
        [
            row["name"],
            f"{row['before']:.4g}",
            f"{row['after']:.4g}",
            interval_text(row["ratio"]),
            interval_text(row["noise"]),
        ]
        for row in result["rows"]
    ]


def notes_of(result: dict[str, Any]) -> list[str]:
    """What the table does not show."""
    commits = "before {before}, after {after}".format(**result["commits"])
    return [f"{result['bench']}: {commits}, {len(result['rounds'])} rounds"]


def _row(name: str, rounds: Sequence[dict[str, dict[str, float]]]) -> dict[str, Any]:
    before, after, again = ([measured[side][name] for measured in rounds] for side in _SIDES)
    return {
        "name": name,
        "before": median(before),
        "after": median(after),
        "ratio": _ratio(after, before),
        "noise": _ratio(again, before),
    }


def _ratio(above: Sequence[float], below: Sequence[float]) -> dict[str, float] | None:
    found = ratios(above, below)  # of what is not 0
    return bootstrap_median(found).to_dict() if found else None


def _commit(checkout: Path) -> str:
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=12"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_ROUND_TIMEOUT_S)
    if done.returncode != 0 or not (checkout / ".venv/bin/python").exists():
        raise ConfigError(f"{checkout} is not a checkout with a .venv; run `make install` there")
    return done.stdout.strip()


def _earlier(out: Path, commits: dict[str, str], bench: str) -> list[dict[str, Any]]:
    if not out.exists():
        return []
    result = json.loads(out.read_text())
    if (result["commits"], result["bench"]) != (commits, bench):
        raise ConfigError(f"{out} has another bench or other commits; name another file")
    rounds: list[dict[str, Any]] = result["rounds"]
    return rounds


def _run(checkout: Path, words: Sequence[str]) -> dict[str, Any]:
    command = [str(checkout / ".venv/bin/python"), *words]
    done = subprocess.run(
        command, cwd=checkout, capture_output=True, text=True, timeout=_ROUND_TIMEOUT_S
    )
    if done.returncode != 0:
        raise MediumError(f"the bench failed in {checkout}: {done.stderr[-500:]}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def _numbers(result: dict[str, Any]) -> dict[str, float]:
    if "rows" not in result:
        parts = ("after_a_crash", "after_a_clean_close")
        return {f"{part} {name}": result[part][name] for part in parts for name in _INDEX_NUMBERS}
    found = {}
    for row in result["rows"]:
        names = [str(row[key]) for key in ("depth", "batch", "shape", "phase") if key in row]
        for number in _NUMBERS:
            value = row.get(number)
            if value is not None:
                value = value["median"] if isinstance(value, dict) else value
                found[" ".join([*names, number])] = float(value)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; 0 when all rounds ended."""
    parser = argparse.ArgumentParser(
        prog="commits", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    args = parser.parse_args(argv)
    try:
        result = compare(args)
    except TuttiError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    print("\n".join([table(HEAD, rows_of(result)), *notes_of(result)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
