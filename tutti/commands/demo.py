"""`tutti demo`: the store measured on this machine's disk, in about a minute."""

from __future__ import annotations

import argparse
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from tutti.arguments import nbytes
from tutti.commands.bench import bench_module
from tutti.commands.outcome import EXIT_FAILED, EXIT_OK, Outcome
from tutti.errors import CapacityError, ConfigError, Unsupported, system_message
from tutti.terminal import progress
from tutti.units import GiB, MiB, format_nbytes

_DESCRIPTION = """\
Makes pools in files below a folder and shows what the store does on this machine's disk: bandwidth
for objects of several shapes, then a replay of a synthetic trace with real bytes, every one of them
checked. The pools are removed at the end; results.json and, with matplotlib, results.png stay."""
_EXAMPLE = """\
example:
  tutti demo --dir .tutti-demo
  tutti demo --dir /mnt/nvme/demo --quick --json

It runs on ordinary files (tier T0) and uses neither a GPU nor a raw NVMe drive; the numbers
are those of this disk and file system."""
_LABEL = (
    "Ordinary files (tier T0) on this machine's disk and file system: neither a GPU nor a raw\n"
    "NVMe drive is used, and the CPU executes the commands."
)

_DISK_SHARE = 3  # the pool takes at most a third of what is free
_LEAST_NBYTES = 256 * MiB
_POOLS = "demo-pools"  # below --dir; it is the demo's own and removed with all it holds


@dataclass(frozen=True)
class _Size:
    """How much a demo does; `shapes` are layers x slice."""

    capacity_nbytes: int
    phase_s: float
    shapes: tuple[str, ...]
    replay_capacity_nbytes: int
    requests: int


#: 8 MiB objects are pages of 64 tokens of an 8B model, 256 KiB ones the smallest that pay.
_FULL = _Size(2 * GiB, 3.0, ("32x256KiB", "64x128KiB", "8x32KiB"), 512 * MiB, 800)
_QUICK = _Size(512 * MiB, 0.3, ("32x256KiB", "8x32KiB"), 128 * MiB, 100)


def add_demo(parser: argparse.ArgumentParser) -> None:
    """Describes `tutti demo`."""
    parser.description, parser.epilog = _DESCRIPTION, _EXAMPLE
    parser.add_argument(
        "--dir",
        default=".tutti-demo",
        help="folder for pools and results, made if missing (default: %(default)s)",
    )
    parser.add_argument("--quick", action="store_true", help="a few seconds with small pools")
    parser.add_argument(
        "--capacity",
        type=nbytes,
        metavar="SIZE",
        help="size of each pool (default 2GiB, with --quick 512MiB)",
    )
    parser.set_defaults(run=run_demo)


def run_demo(args: argparse.Namespace) -> Outcome:
    """Measures, replays, cleans up, and keeps the results."""
    folder = Path(args.dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise ConfigError(f"{folder} is not a folder; pass another with --dir") from error
    size = _QUICK if args.quick else _FULL
    wanted_nbytes = args.capacity or size.capacity_nbytes
    pools = folder / _POOLS
    shutil.rmtree(pools, ignore_errors=True)  # of a demo that was killed
    capacity_nbytes = _affordable(folder, wanted_nbytes)
    pools.mkdir()
    try:
        bandwidth = bench_module("bandwidth")
        replay = bench_module("replay")
        measured = _run(bandwidth, _bandwidth_arguments(size, pools, capacity_nbytes))
        replayed = _run(replay, _replay_arguments(size, pools, capacity_nbytes))
    finally:
        shutil.rmtree(pools, ignore_errors=True)
    result = {
        "what": "file-backed controller (tier T0) on this machine's disk",
        "capacity_nbytes": capacity_nbytes,
        "bandwidth": measured,
        "replay": replayed,
        "wrong": int(measured["wrong"]) + int(replayed["wrong"]),
    }
    kept = _keep(result, folder)
    parts = [_LABEL]
    if capacity_nbytes < wanted_nbytes:
        have, want = format_nbytes(capacity_nbytes), format_nbytes(wanted_nbytes)
        parts.append(f"The disk has little space: pools of {have} instead of {want}.")
    parts += ["Bandwidth", bandwidth.report(measured), "Replay of a synthetic trace"]
    parts += [replay.report(replayed), kept]
    exit_code = EXIT_FAILED if result["wrong"] else EXIT_OK
    return Outcome(result, "\n\n".join(parts), exit_code)


def _affordable(folder: Path, wanted_nbytes: int) -> int:
    """The capacity of a pool, as wanted or what fits.  Raises CapacityError for too little."""
    free_nbytes = shutil.disk_usage(folder).free
    capacity_nbytes = min(wanted_nbytes, free_nbytes // _DISK_SHARE // MiB * MiB)
    if capacity_nbytes < min(wanted_nbytes, _LEAST_NBYTES):
        raise CapacityError(
            f"{folder} has {format_nbytes(free_nbytes)} free, which is less than three "
            f"times the smallest pool of {format_nbytes(_LEAST_NBYTES)}; pass another --dir"
        )
    return capacity_nbytes


def _bandwidth_arguments(size: _Size, pools: Path, capacity_nbytes: int) -> list[str]:
    return [
        *("--dir", str(pools), "--capacity", str(capacity_nbytes)),
        *("--shapes", *size.shapes, "--phases", "store", "retrieve", "mixed"),
        *("--seconds", str(size.phase_s)),
    ]


def _replay_arguments(size: _Size, pools: Path, capacity_nbytes: int) -> list[str]:
    capacity_nbytes = min(size.replay_capacity_nbytes, capacity_nbytes)
    return [
        *("--dir", str(pools), "--capacity", str(capacity_nbytes)),
        *("--requests", str(size.requests)),
    ]


def _run(module: ModuleType, argv: list[str]) -> dict[str, Any]:
    """Runs a bench as its own command would."""
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    result: dict[str, Any] = module.run(parser.parse_args(argv), progress)
    return result


def _keep(result: dict[str, Any], folder: Path) -> str:
    """Writes the results and draws them; what became of it.  They are printed in any case."""
    try:
        (folder / "results.json").write_text(json.dumps(result, indent=2) + "\n")
        return f"kept: {folder / 'results.json'}\n{_plot(result, folder / 'results.png')}"
    except OSError as error:
        return f"not kept: {system_message(error)}"


def _plot(result: dict[str, Any], path: Path) -> str:
    """Draws the results where matplotlib is installed; what became of it."""
    try:
        drawn = bench_module("plots").plot_demo(result, path)
    except Unsupported as error:
        return f"no plot: {error}"
    if not drawn:
        return "no plot: matplotlib is not installed (pip install matplotlib)"
    return f"kept: {path}"
