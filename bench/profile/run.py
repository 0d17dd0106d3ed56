"""Measures a profile for the scheduler: the medium here, compute on a GPU or by a roofline.

Reads and writes are measured separately and at the same time; what the roofline gives is marked as
estimated.  Measured points are kept next to the result until the profile is complete, so that an
interrupted run continues where it stopped.  docs/profile.md describes the JSON.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from tutti.base.terminal import ProgressFactory, table
from tutti.base.units import format_nbytes, parse_nbytes
from tutti.bench.environment import describe
from tutti.bench.profile import gpu as profile_gpu
from tutti.bench.profile.plot import plot_profile
from tutti.bench.statistics import median
from tutti.bench.writable import check_writable, options
from tutti.errors import ConfigError
from tutti.model_config import model_layout
from tutti.pool.places import is_device
from tutti.profiles.at_open import model_like
from tutti.profiles.medium_timing import Medium
from tutti.scheduler.profile import KIND, SCHEMA, TableProfile, estimated_compute, estimated_movers
from tutti.scheduler.roofline import DENSE_MODELS, GPUS, GpuRoofline, ModelShape
from tutti.scheduler.sm_share import choose_partition

DIRECTIONS = ("read", "write", "both")
_SIZES = ("1MiB", "4MiB", "16MiB", "64MiB", "256MiB")
_SLICES = ("64KiB", "256KiB", "1MiB")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    option = options(parser)
    what = "directories, new files *.tutti or blank devices on the medium; test data is removed"
    what += " afterwards (default: the current directory)"
    option("--medium", ["."], what)
    option("--force SERIAL", [], "overwrite this drive", action="append")
    option("--out", "profile.json", "file for the profile")
    what = "model to estimate for: a folder, a name in Hugging Face's local cache, or one of "
    what += f"{', '.join(sorted(DENSE_MODELS))}; of others the estimate scales with the layers"
    option("--model", "llama-3.1-8b", what)
    option("--gpu", "H100", "GPU to estimate for", sorted(GPUS))
    option("--page-tokens", 64, "tokens per page")
    option("--sizes", _SIZES, "bytes of one transfer")
    option("--slices", _SLICES, "contiguous pieces of a transfer in memory")
    option("--repeats", 5, "measurements per point")
    option("--file-size", "1GiB", "size of the test file, written once before measuring")
    option("--fresh", False, "discard an interrupted run")


def run(args: argparse.Namespace, progress: ProgressFactory) -> dict[str, Any]:
    """Measures missing points, and writes the profile and its picture.

    Raises ConfigError for sizes that do not fit together, and errors of the medium.
    """
    sizes, slices = _grid(args)
    model, gpu = _model(args.model), GPUS[args.gpu]
    found = [_medium_path(medium, i) for i, medium in enumerate(args.medium)]
    paths, directory = [path for path, _ in found], found[0][1]
    if not Path(args.out).absolute().parent.is_dir():
        raise ConfigError(f"the folder of {args.out} does not exist; make it, or name another")
    check_writable(Path(args.out))
    beside = [Path(f"{args.out}{suffix}") for suffix in (".partial", ".new")]
    check_writable(Path(args.out).with_suffix(".png"), *beside)
    machine = describe(directory)
    points = Points(
        Path(f"{args.out}.partial"),
        {
            "machine": {k: v for k, v in machine.items() if k not in ("command", "commit")},
            "grid": [sizes, slices, args.repeats, args.file_size],
        },
        fresh=args.fresh,
    )
    io = _measure_io(paths, sizes, slices, args, points, progress)
    document = {
        "benchmark": "profile",
        "kind": KIND,
        "schema": SCHEMA,
        "machine": machine,
        "model": model.to_dict(),
        "gpu": gpu.name,
        "slice_nbytes": model.slice_nbytes_per_token * args.page_tokens,
        **io,
        **_gpu_halves(model, gpu),
    }
    TableProfile(document)  # raises if it could not be loaded
    _replace(Path(args.out), document)
    plot_profile(document, Path(args.out).with_suffix(".png"))
    points.forget()
    return {"out": args.out, **document}


HEAD = ("bytes", "slice", "read GB/s", "write GB/s", "read during write", "write during read")


def rows_of(result: dict[str, Any]) -> list[list[str]]:
    rows = []
    for row in zip(*(result["io"][d] for d in DIRECTIONS), strict=True):
        nbytes, slice_nbytes, read_us = row[0]
        write_us, (both_read_us, both_write_us) = row[1][2], row[2][2:]
        speeds = [nbytes / us / 1e3 for us in (read_us, write_us, both_read_us, both_write_us)]
        rows.append(
            [format_nbytes(nbytes), format_nbytes(slice_nbytes), *(f"{v:.2f}" for v in speeds)]
        )
    return rows


def notes_of(result: dict[str, Any]) -> list[str]:
    """Conclusions from the profile, and which parts are estimates."""
    profile = TableProfile(result)
    partition = choose_partition(
        profile.mover_points, profile.read_gb_per_s, sms=GPUS[result["gpu"]].sms
    )
    return [
        f"interference {profile.interference:.2f}; a read takes {profile.read_us(1):.0f} us at"
        f" least; by estimate {partition.sms} SMs of an {result['gpu']} keep up with"
        f" {profile.read_gb_per_s:.2f} GB/s",
        f"estimated, not measured: {', '.join(profile.estimated) or 'nothing'}",
    ]


def report(result: dict[str, Any]) -> str:
    return "\n".join(
        [table(HEAD, rows_of(result)), *notes_of(result), f"profile in {result['out']}"]
    )


class Points:
    """Points measured so far, in a file next to the result.

    key: everything that points depend on; points with another key are dropped.
    """

    def __init__(self, path: Path, key: dict[str, Any], *, fresh: bool = False) -> None:
        self._path = path
        self._key = json.loads(json.dumps(key))
        self.done: dict[str, list[float]] = {}
        if not fresh:
            self._resume()

    def _resume(self) -> None:
        try:
            kept = json.loads(self._path.read_text())
            points = kept["points"] if kept["key"] == self._key else {}
            for name, times_us in points.items():
                self.done[str(name)] = [float(us) for us in times_us]
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            self.done = {}  # damaged or missing: measured again

    def add(self, name: str, times_us: list[float]) -> None:
        """Stores a point on disk."""
        self.done[name] = times_us
        _replace(self._path, {"key": self._key, "points": self.done})

    def forget(self) -> None:
        """Removes the file, when the profile is complete."""
        self._path.unlink(missing_ok=True)


def _measure_io(
    paths: list[str],
    sizes: list[int],
    slices: list[int],
    args: argparse.Namespace,
    points: Points,
    progress: ProgressFactory,
) -> dict[str, Any]:
    grid = [(d, n, s) for d in DIRECTIONS for s in slices for n in sizes]
    wanted = [point for point in grid if "/".join(map(str, point)) not in points.done]
    facts: dict[str, Any] = {}
    if wanted:
        with (
            Medium(paths, parse_nbytes(args.file_size), max(sizes), args.force) as medium,
            progress("profile of the medium", len(wanted)) as bar,
        ):
            facts = medium.facts
            for direction, nbytes, slice_nbytes in wanted:
                medium.time_us(direction, nbytes, slice_nbytes)  # warm-up
                runs = [
                    medium.time_us(direction, nbytes, slice_nbytes) for _ in range(args.repeats)
                ]
                middle = [median(times) for times in zip(*runs, strict=True)]
                points.add(f"{direction}/{nbytes}/{slice_nbytes}", middle)
                bar.advance(1)
    rows: dict[str, list[list[float]]] = {d: [] for d in DIRECTIONS}
    for direction, nbytes, slice_nbytes in grid:
        times = points.done[f"{direction}/{nbytes}/{slice_nbytes}"]
        rows[direction].append([nbytes, slice_nbytes, *times])
    return {"medium": facts, "io": {"estimated": False, **rows}}


def _model(name: str) -> ModelShape:
    known = DENSE_MODELS.get(name.rsplit("/", 1)[-1].lower())
    if known is not None:
        return known
    layout = model_layout(name, 1, "bfloat16")
    if layout is None:
        raise ConfigError(
            f"the dimensions of {name} are not known: its config.json is not in Hugging Face's "
            f"local cache; name its folder, or one of {', '.join(sorted(DENSE_MODELS))}"
        )
    return model_like(name, layout.layers, layout.object_nbytes)


def _gpu_halves(model: ModelShape, gpu: GpuRoofline) -> dict[str, Any]:
    """Compute and movers: measured if there is a GPU, else estimated."""
    measured = profile_gpu.measure(model)
    if measured is not None:
        return measured
    return {"compute": estimated_compute(model, gpu), "movers": estimated_movers(gpu)}


def _grid(args: argparse.Namespace) -> tuple[list[int], list[int]]:
    sizes = sorted({parse_nbytes(size) for size in args.sizes})
    slices = sorted({parse_nbytes(size) for size in args.slices})
    if any(n < slices[-1] or n % s for n in sizes for s in slices):
        raise ConfigError("every size is a multiple of every slice; choose powers of two")
    if any(s < 4096 or s & (s - 1) for s in slices):
        raise ConfigError("slices are powers of two from 4 KiB on")
    if args.repeats < 1 or args.page_tokens < 1:
        raise ConfigError("--repeats and --page-tokens count from 1")
    return sizes, slices


def _medium_path(medium: str, place: int) -> tuple[str, str]:
    """(file to make, its directory); for a device, the device twice."""
    if is_device(medium):
        return medium, medium
    if os.path.isdir(medium):
        return str(Path(medium) / f"profile-{os.getpid()}-{place}.tutti"), medium
    if os.path.lexists(medium):
        raise ConfigError(
            f"{medium} exists, and measuring overwrites; name a directory or new file"
        )
    if not medium.endswith(".tutti"):  # a misspelt folder would measure its parent's disk
        raise ConfigError(f"{medium} is not a folder; make it first, or name a new file *.tutti")
    directory = str(Path(medium).absolute().parent)
    if not os.path.isdir(directory):
        raise ConfigError(f"the directory of {medium} does not exist; make it first")
    return medium, directory


def _replace(path: Path, content: dict[str, Any]) -> None:
    """Replaces a file atomically."""
    beside = path.with_name(path.name + ".new")
    beside.write_text(json.dumps(content) + "\n")
    os.replace(beside, path)
