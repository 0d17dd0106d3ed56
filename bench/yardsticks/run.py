"""MLPerf Storage's KV-cache benchmark on Tutti, on its own backend, and on comparable files.

    python -m tutti.bench.yardsticks.run --kv-cache FOLDER --dir /mnt/nvme --out result.json

FOLDER is kv_cache_benchmark of a checkout of mlcommons/storage; docs/benchmarks.md has the commands
that fetch it.  Rounds alternate: `tutti`, `tutti-at-once` (puts do not yield to loads), `shipped`
(the benchmark's files through the page cache) and `direct` (files by O_DIRECT, with the same
durability and transfer memory as Tutti).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tutti.base.terminal import ProgressFactory, table
from tutti.base.units import GiB, format_nbytes, parse_nbytes
from tutti.bench.environment import describe
from tutti.bench.meter import in_turn
from tutti.bench.residency.control_group import memory_group
from tutti.bench.statistics import bootstrap_median, interval_text, median, ratios
from tutti.bench.writable import check_writable, options
from tutti.bench.yardsticks.round import SYSTEMS, RoundPlan
from tutti.errors import ConfigError, DeviceTimeout, MediumError, TuttiError, Unsupported

URL = "https://github.com/mlcommons/storage"
#: Revisions whose package kv_cache this was run with, by git's name of that folder's tree.
REVISIONS = {"23f1bdc9255a776b2c874406c4d2df072b62664e": "284ce72d486cecdc2f6ab4ac0a2364f733d0b8c3"}
_START_TIMEOUT_S = 180.0
_SETTINGS = ("seconds", "rounds", "model", "users", "seed", "capacity", "durability")
_METRICS = (
    *("cached_tokens_per_s", "read_gb_per_s", "write_gb_per_s", "read_p95_ms", "write_p95_ms"),
)
_TOTALS = ("requests", "hits", "reads", "misses", "errors", "wrong")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    option = options(parser)
    option("--kv-cache", None, "folder kv_cache_benchmark of a checkout", required=True)
    option("--dir", ".", "folder for the entries (%(default)s)")
    option("--seconds", 8, "length of a round (%(default)s)")
    option("--rounds", 4, "rounds per system (%(default)s)")
    option("--model", "tiny-1b", "model of the benchmark (%(default)s)")
    option("--users", 4, "users in the workload (%(default)s)")
    option("--seed", 42, "seed of the workload (%(default)s)")
    option("--capacity", "1GiB", "bytes of entries kept (%(default)s)")
    option("--memory", "6GiB", "limit of a round's process (%(default)s)")
    what = "durability of tutti and direct; the own backend always flushes (%(default)s)"
    option("--durability", "flush", what, ("process", "flush"))
    option("--out", None, "also write the result to this file (JSON)", Path)


def revision_of(folder: str) -> dict[str, str]:
    """Revision of the benchmark in a folder.  Raises ConfigError for an unknown one."""
    package = Path(folder) / "kv_cache"
    if not package.is_dir():
        raise ConfigError(
            f"{folder} has no package kv_cache; name the folder kv_cache_benchmark of {URL} at"
            f" {next(iter(REVISIONS.values()))[:12]}"
        )
    tree = _tree(package)
    if tree not in REVISIONS:
        raise ConfigError(
            f"kv_cache in {folder} is another version (git tree {tree[:12]}); check out"
            f" {next(iter(REVISIONS.values()))[:12]} of {URL}"
        )
    return {"url": URL, "revision": REVISIONS[tree], "tree": tree}


def _tree(package: Path) -> str:
    """Git's tree id of a folder of sources (git-hash-object(1), git-mktree(1))."""
    rows = b""
    for file in sorted(package.glob("*.py")):
        mode = b"100755" if file.stat().st_mode & 0o100 else b"100644"
        rows += mode + b" " + file.name.encode() + b"\0" + _git_hash(b"blob", file.read_bytes())
    return _git_hash(b"tree", rows).hex()


def _git_hash(kind: bytes, content: bytes) -> bytes:
    return hashlib.sha1(kind + b" %d\0" % len(content) + content, usedforsecurity=False).digest()


def run(args: argparse.Namespace, progress: ProgressFactory) -> dict[str, Any]:
    """Measures, and returns the result for JSON.  Raises TuttiError."""
    if args.rounds < 1 or args.seconds < 1 or args.users < 1:
        raise ConfigError("give at least one round, one second and one user")
    if not Path(args.dir).is_dir():
        raise ConfigError(f"{args.dir} is not a directory; make it, or name another with --dir")
    yardstick = revision_of(args.kv_cache)
    memory_nbytes = parse_nbytes(args.memory)
    rounds: dict[str, list[dict[str, Any]]] = {system: [] for system in SYSTEMS}
    with ExitStack() as stack, progress("KV-cache benchmark", args.rounds * len(SYSTEMS)) as bar:
        members_file, limit = _limit_memory(stack, memory_nbytes)
        for number in range(args.rounds):
            for system in in_turn(SYSTEMS, number):
                rounds[system].append(_round(args, system, members_file))
                bar.advance(1)
    return {
        "benchmark": "kv_cache",
        "yardstick": yardstick,
        "settings": {name: getattr(args, name) for name in _SETTINGS},
        "memory_limit": limit,
        "systems": {system: _system(found) for system, found in rounds.items()},
        "ratios": {name: _ratios(rounds, name) for name in _METRICS},
        "wrong": sum(one["wrong"] for found in rounds.values() for one in found),
        "machine": describe(args.dir),
    }


def _limit_memory(stack: ExitStack, nbytes: int) -> tuple[str, str]:
    """(members file of the limiting control group, description of the limit)."""
    try:
        group = stack.enter_context(memory_group("kv-cache"))
    except Unsupported as error:
        return "", f"none: {error}"
    group.limit(nbytes)
    return group.members_file, format_nbytes(nbytes)


def _round(args: argparse.Namespace, system: str, members_file: str) -> dict[str, Any]:
    """Numbers of one round; latencies and throughputs are the benchmark's own."""
    capacity_nbytes = parse_nbytes(args.capacity)
    with tempfile.TemporaryDirectory(prefix="tutti-kv-cache-", dir=args.dir) as folder:
        plan = RoundPlan(
            system=system,
            checkout=str(Path(args.kv_cache).resolve()),
            folder=folder,
            durability=args.durability,
            capacity_nbytes=capacity_nbytes,
            arguments=[
                *("--model", args.model, "--num-users", str(args.users)),
                *("--duration", str(args.seconds), "--seed", str(args.seed)),
                *("--gpu-mem-gb", "0", "--cpu-mem-gb", "0", "--generation-mode", "none"),
                *("--storage-capacity-gb", str(capacity_nbytes / GiB), "--log-level", "ERROR"),
            ],
            members_file=members_file,
        )
        done = _in_process(plan, args.seconds + _START_TIMEOUT_S)
    summary = done["summary"]
    if not summary:
        raise MediumError(f"{system}: no request ended in {args.seconds} s; give more --seconds")
    stats, elapsed_s = summary["cache_stats"], summary["elapsed_time"]
    return {
        "cached_tokens_per_s": stats["storage_tokens_processed"] / elapsed_s,
        "read_gb_per_s": stats["tier_storage_kv_bytes_read_gb"] * GiB / 1e9 / elapsed_s,
        "write_gb_per_s": stats["tier_storage_kv_bytes_written_gb"] * GiB / 1e9 / elapsed_s,
        "read_p95_ms": stats.get("storage_read_p95_ms", 0.0),
        "write_p95_ms": stats.get("storage_write_p95_ms", 0.0),
        "requests": summary["total_requests"],
        "hits": stats["cache_hits"],
        **done["counts"],
        **{name: done[name] for name in ("wall_s", "cpu_s", "peak_memory_nbytes")},
    }


def _in_process(plan: RoundPlan, timeout_s: float) -> dict[str, Any]:
    try:
        done = subprocess.run(
            [sys.executable, "-m", "tutti.bench.yardsticks.round"],
            input=json.dumps(asdict(plan)),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise DeviceTimeout(f"{plan.system}: a round took more than {timeout_s:g} s") from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        raise MediumError(f"{plan.system}: the round ended with {done.returncode}: {last}")
    found: dict[str, Any] = json.loads(Path(plan.folder, "round.json").read_text())
    return found


def _system(found: list[dict[str, Any]]) -> dict[str, Any]:
    medians = {name: median([one[name] for one in found]) for name in _METRICS}
    totals = {name: sum(one[name] for one in found) for name in _TOTALS}
    return {"medians": medians, "totals": totals, "rounds": found}


def _ratios(rounds: dict[str, list[dict[str, Any]]], name: str) -> dict[str, Any]:
    own = [one[name] for one in rounds["tutti"]]
    others = {system: [one[name] for one in rounds[system]] for system in SYSTEMS[1:]}
    pairs = {system: ratios(own, found) for system, found in others.items()}
    return {system: bootstrap_median(found).to_dict() for system, found in pairs.items() if found}


HEAD = (
    *("backend", "cached tokens/s", "read GB/s", "write GB/s", "read P95 ms", "write P95 ms"),
    *("hits", "reads", "misses", "errors", "wrong"),
)


def rows_of(result: dict[str, Any]) -> list[list[str]]:
    """The table below HEAD: medians of rounds, and counts of all rounds."""
    rows = []
    for system, found in result["systems"].items():
        one, totals = found["medians"], found["totals"]
        rows.append(
            [
                system,
                f"{one['cached_tokens_per_s']:.0f}",
                *(f"{one[name]:.2f}" for name in ("read_gb_per_s", "write_gb_per_s")),
                *(f"{one[name]:.0f}" for name in ("read_p95_ms", "write_p95_ms")),
                *(str(totals[name]) for name in ("hits", "reads", "misses", "errors", "wrong")),
            ]
        )
    return rows


def notes_of(result: dict[str, Any]) -> list[str]:
    settings = ", ".join(f"{name} {value}" for name, value in result["settings"].items())
    yardstick = result["yardstick"]
    lines = [f"{settings}; memory limit {result['memory_limit']}"]
    for name, found in result["ratios"].items():
        against = ", ".join(f"{system} {interval_text(one, 2)}" for system, one in found.items())
        lines.append(f"{name.replace('_', ' ')}, tutti divided by: {against}")
    for system, found in result["systems"].items():
        cpu_s = median([one["cpu_s"] for one in found["rounds"]])
        memory = max(one["peak_memory_nbytes"] for one in found["rounds"])
        lines.append(f"{system}: {cpu_s:.1f} CPU-s a round, at most {format_nbytes(memory)}")
    return [*lines, f"{yardstick['url']} at {yardstick['revision'][:12]}"]


def report(result: dict[str, Any]) -> str:
    return "\n".join([table(HEAD, rows_of(result)), *notes_of(result)])


def main(argv: list[str] | None = None) -> int:
    from tutti.base.terminal import progress

    parser = argparse.ArgumentParser(prog="tutti.bench.yardsticks.run", description=__doc__)
    add_arguments(parser)
    args = parser.parse_args(argv)
    try:
        if args.out:
            check_writable(args.out)
        result = run(args, progress)
        if args.out:
            args.out.write_text(json.dumps(result, indent=1) + "\n")
        print(report(result))
    except TuttiError as error:
        print(f"tutti.bench.yardsticks.run: {error}", file=sys.stderr)
        return 3
    return 1 if result["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
