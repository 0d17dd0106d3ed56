"""`tutti demo`: the same bytes through Tutti, a file per page and fio, in about a minute."""

from __future__ import annotations

import argparse
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from tutti.arguments import options
from tutti.base.terminal import progress
from tutti.base.units import MiB, format_nbytes
from tutti.commands.bench import bench_module
from tutti.commands.outcome import EXIT_FAILED, EXIT_OK, CommandResult
from tutti.errors import CapacityError, ConfigError, system_message

_DESCRIPTION = """\
Stores and loads the same pages with Tutti, with one file per page and with fio, and draws the
speeds. Then replays a synthetic trace with real data and checks every byte. All files are removed
at the end, except results.json and results.svg in the folder --dir."""
_EXAMPLE = """\
example:
  tutti demo --dir .tutti-demo
  tutti demo --dir /mnt/nvme/demo --quick --json

It runs on ordinary files (tier T0) and uses neither a GPU nor a raw NVMe drive; the numbers
are those of this disk and file system. `tutti bench peers` measures longer and includes SGLang's
own backends."""
_LABEL = """\
Ordinary files on this machine's disk: neither a GPU nor a raw NVMe drive is used.
Stores end with the bytes on the disk; loads begin with nothing of the files in the page cache.
A file per page: four threads with direct I/O, nothing verified."""
_NAMES = {"store": "Tutti, verified", "file-per-page": "a file per page", "fio": "fio, unverified"}
_DISK_SHARE = 3  # at most a third of the free space is used
_POOLS = "demo-pools"  # below --dir; it is the demo's own and removed with all it holds


@dataclass(frozen=True)
class _Size:
    """Size of a demo.  page_tokens: of an 8B model, 128 KiB each.  launches: per system."""

    page_tokens: int
    rounds: int
    replay_nbytes: int
    requests: int
    launches: int

    @property
    def needs_nbytes(self) -> int:
        """Space for Tutti's pool (3.5 batches of 128 pages), the files (three) and fio's (two)."""
        return max(9 * 128 * self.page_tokens * MiB // 8, self.replay_nbytes)


_FULL = _Size(16, 5, 512 * MiB, 800, launches=3)
_QUICK = _Size(4, 1, 128 * MiB, 100, launches=1)


def add_demo(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = _DESCRIPTION, _EXAMPLE
    option = options(parser)
    option("--dir", ".tutti-demo", "folder for pools and results, created if missing")
    option("--quick", False, "a few seconds with small pools")
    parser.set_defaults(run=run_demo)


def run_demo(args: argparse.Namespace) -> CommandResult:
    """Measures, replays, cleans up, and keeps the results."""
    folder = Path(args.dir)
    if not folder.parent.is_dir():
        raise ConfigError(f"{folder.parent} is not a folder; create it, or pass another --dir")
    try:
        folder.mkdir(exist_ok=True)
    except FileExistsError as error:
        raise ConfigError(f"{folder} is not a folder; pass another with --dir") from error
    pools = folder / _POOLS
    shutil.rmtree(pools, ignore_errors=True)  # of a demo that was killed
    size = _affordable(folder, [_QUICK] if args.quick else [_FULL, _QUICK])
    busy = os.getloadavg()[0]
    place = ["--dir", str(pools)]
    compared = ["--peers", *_NAMES, "--batches", "2", "--rounds", str(size.rounds)]
    compared += ["--page-tokens", str(size.page_tokens), "--launches", str(size.launches)]
    limits = ["--capacity", str(size.replay_nbytes), "--requests", str(size.requests)]
    pools.mkdir()
    try:
        peers = _run(bench_module("peers.run"), [*place, *compared])
        replayed = _run(bench_module("replay"), [*place, *limits])
    finally:
        shutil.rmtree(pools, ignore_errors=True)
    result = {
        "what": "file-backed controller (tier T0) on this machine's disk",
        "peers": peers,
        "replay": replayed,
        "wrong": int(replayed["wrong"]),
    }
    (cell,) = peers["cells"].values()
    chart = str(bench_module("charts").bars_text(_charts(cell)))
    skipped = [f"not compared: {name} ({why})" for name, why in peers["skipped"].items()]
    parts = [_LABEL, chart, *skipped, _sentences(cell, replayed), *_noise(busy)]
    parts.append(_keep(result, folder))
    return CommandResult(result, "\n\n".join(parts), EXIT_FAILED if result["wrong"] else EXIT_OK)


def _affordable(folder: Path, sizes: list[_Size]) -> _Size:
    """The first size that fits.  Raises CapacityError when none does."""
    free_nbytes = shutil.disk_usage(folder).free
    for size in sizes:
        if size.needs_nbytes * _DISK_SHARE <= free_nbytes:
            return size
    raise CapacityError(
        f"{folder} has {format_nbytes(free_nbytes)} free, but the demo needs "
        f"{format_nbytes(sizes[-1].needs_nbytes * _DISK_SHARE)}; pass another --dir"
    )


def _run(module: ModuleType, argv: list[str]) -> dict[str, Any]:
    """Runs a bench as its own command would."""
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    return dict(module.run(parser.parse_args(argv), progress))


def _speeds(cell: dict[str, Any], phase: str) -> list[tuple[str, float]]:
    """GB/s of each peer that ran, Tutti's first."""
    return [
        (label, cell["peers"][name][phase]["median_gb_per_s"])
        for name, label in _NAMES.items()
        if name in cell["peers"]
    ]


def _charts(cell: dict[str, Any]) -> list[Any]:
    bars = bench_module("charts").Bars
    heading = f"load, pages of {format_nbytes(cell['page_nbytes'])}, GB/s"
    return [bars(heading, _speeds(cell, "load")), bars("store, GB/s", _speeds(cell, "store"))]


def _sentences(cell: dict[str, Any], replayed: dict[str, Any]) -> str:
    """What was found, in words."""
    peers, phases = cell["peers"], ("load", "store")
    speeds = {phase: [gb for _, gb in _speeds(cell, phase)] for phase in phases}
    ratio = {phase: mine / files for phase, (mine, files, *_) in speeds.items()}
    mine_ms, files_ms = (peers[name]["exists"]["median_ms"] for name in ("store", "file-per-page"))
    loaded = sum(run["loaded_pages"] for run in replayed["runs"])
    verdict = f"{replayed['wrong']} WERE WRONG" if replayed["wrong"] else "every byte was correct"
    return (
        f"On this disk Tutti loads {ratio['load']:.1f} times and stores {ratio['store']:.1f} times "
        f"as fast as a file per page,\nand looks up a prompt of {peers['store']['exists']['pages']}"
        f" pages {files_ms / mine_ms:.0f} times as fast ({mine_ms:.2f} ms).\n"
        f"Replaying {replayed['requests']} requests loaded {loaded} pages; {verdict}."
    )


def _noise(load: float) -> list[str]:
    """load: average number of running threads before the demo."""
    text = f"Other programs kept this machine busy (load {load:.1f}): ratios differ on an idle one."
    return [text] if load >= (os.cpu_count() or 1) / 2 else []


def _keep(result: dict[str, Any], folder: Path) -> str:
    """Writes and draws the results; returns where they are, or why they could not be written."""
    try:
        (folder / "results.json").write_text(json.dumps(result, indent=2) + "\n")
        (cell,) = result["peers"]["cells"].values()
        title = "The same pages on this machine's disk"
        svg = bench_module("charts").bars_svg(title, _charts(cell))
        (folder / "results.svg").write_text(svg)
    except OSError as error:
        return f"not kept: {system_message(error)}"
    return f"kept: {folder / 'results.json'}, {folder / 'results.svg'}"
