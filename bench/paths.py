"""Measures drives by every path: block size by depth, latencies up to p99.99, CPU, descriptors.

Native code issues random commands of one size, with a fixed number in flight, and times each one.
Percentiles are of all rounds together, and given only if at least one command lies beyond them.
The submitter spins on a core of its own; the reported CPU time is that of all other threads: the
executing thread, the kernel's workers and the executor's threads.

Paths: "threads" (pread and pwrite with O_DIRECT), "uring" (io_uring with O_DIRECT), "page-cache"
(io_uring without O_DIRECT, everything in memory), "passthrough" (/dev/ngXnY), "vfio" (nvme:...).
"""

from __future__ import annotations

import argparse
import ctypes
import json
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tutti.arguments import positive
from tutti.base.terminal import ProgressFactory, table
from tutti.base.units import KiB, MiB, format_nbytes, parse_nbytes
from tutti.bench.controller_memory import MemoryController
from tutti.bench.environment import describe
from tutti.bench.members import temporary_members
from tutti.bench.plots import plot_paths
from tutti.bench.pool_file import add_place_arguments, medium_of, pool_paths
from tutti.bench.statistics import median
from tutti.bench.writable import check_writable, options
from tutti.errors import ConfigError, DeviceTimeout
from tutti.gio_uring import _native
from tutti.gio_uring.controller import NativeController
from tutti.gio_uring.controller_file import FileController, RequestLimits
from tutti.gio_uring.drives.generic_device import is_generic
from tutti.gio_uring.engine import Engine
from tutti.gio_uring.file_member import FileMember
from tutti.gio_uring.iocb import Extents, flat_memory
from tutti.gio_uring.memory import HostBuffer
from tutti.gio_uring.named_drive import is_drive
from tutti.gio_uring.nvme_spec import OPCODE_READ, OPCODE_WRITE
from tutti.native import members
from tutti.pool.member_controller import open_controller

FILE_PATHS = ("threads", "uring", "page-cache")
PERCENTS = {"p50_us": 50, "p99_us": 99, "p99_9_us": 99.9, "p99_99_us": 99.99}
_OPCODES = {"read": OPCODE_READ, "write": OPCODE_WRITE}
_QUEUE_DEPTH = 256
_RESET_S = 30.0
#: NVM Express base specification 2.0, 4.1.1 and 4.1.2: a PRP entry, and an SGL descriptor.
_PRP_NBYTES, _SGL_NBYTES, _PRP_PAGE_NBYTES = 8, 16, 4096
_FRAGMENTS = (4 * KiB, 16 * KiB, 64 * KiB, 256 * KiB)


class PathLoadStruct(ctypes.LittleEndianStructure):
    """`gio::PathLoad`."""

    _fields_ = (
        *members(ctypes.c_uint64, "commands address seed latencies_ns"),
        *members(ctypes.c_uint32, "depth nlb opcode reserved"),
    )


@dataclass(frozen=True)
class Cell:
    """A combination of parameters.  place: name of the place if there are several, else ""."""

    place: str
    path: str
    direction: str
    block_nbytes: int
    depth: int


@dataclass(frozen=True)
class Measured:
    """One run of a cell: means, and the times of all commands."""

    means: dict[str, float]
    latencies_ns: npt.NDArray[np.uint64]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_place_arguments(parser)
    option = options(parser)
    option("--blocks", ["4KiB", "64KiB", "512KiB"], "bytes per command")
    option("--depths", [1, 4, 16, 64], "commands in flight", positive)
    option("--directions", list(_OPCODES), "what to measure (default: both)", _OPCODES)
    option("--paths", list(FILE_PATHS), "ways to reach a file (default: all)", FILE_PATHS)
    what = "bytes to move per combination and round (%(default)s: in three rounds 10,000 commands"
    what += " of 64 KiB, as p99.99 needs, and 1,000 of 512 KiB, as p99.9 needs)"
    option("--moved", "224MiB", what)
    option("--commands", 20000, "most commands per combination and round", positive)
    option("--rounds", 3, "measurements per combination", positive)
    option("--size", "512MiB", "size of the file")
    option("--out", None, "also write the JSON to this file, and a chart next to it", Path)


def run(args: argparse.Namespace, progress: ProgressFactory) -> dict[str, Any]:
    """Measures every cell in interleaved rounds; removes files and blanks devices afterwards.

    Raises ConfigError for sizes that do not fit together, PoolExists for a device with content, and
    errors of files and devices.
    """
    blocks = [parse_nbytes(block) for block in args.blocks]
    if any(block % 4096 or not 4096 <= block <= MiB for block in blocks):
        raise ConfigError("--blocks are multiples of 4 KiB up to 1 MiB")
    if max(args.depths) >= _QUEUE_DEPTH:
        raise ConfigError(f"--depths are below {_QUEUE_DEPTH}")
    places = _named(pool_paths(args, "paths"), args.path or args.dir)
    if args.out is not None:
        check_writable(args.out)
        check_writable(args.out.with_suffix(".png"))
    cells = [
        Cell(name, path, direction, block, depth)
        for name, place in places.items()
        for path in _paths_of(place, args.paths)
        for direction in args.directions
        for block in blocks
        for depth in args.depths
    ]
    found: dict[Cell, list[Measured]] = {cell: [] for cell in cells}
    members = list(places.values())
    with (
        temporary_members(members, parse_nbytes(args.size), prewrite=True, force=args.force),
        progress("paths", len(cells) * args.rounds) as bar,
    ):
        for number in range(args.rounds):
            for cell in cells:
                moved = parse_nbytes(args.moved) // cell.block_nbytes
                commands = min(args.commands, max(64, moved))
                found[cell].append(measure(places[cell.place], cell, commands, seed=number))
                bar.advance(1)
    result = {
        "benchmark": "paths",
        "rounds": args.rounds,
        "rows": [_row(cell, runs) for cell, runs in found.items()],
        "descriptors": descriptors(),
        "machine": describe(medium_of(args)),
    }
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
        plot_paths(result, args.out.with_suffix(".png"))
    return result


HEAD = ["path", "", "block", "depth", "GB/s", "commands/s", *PERCENTS, "CPU us/command"]


def rows_of(result: dict[str, Any]) -> list[list[Any]]:
    """The table below HEAD: medians of the rounds, percentiles of all of them."""
    return [
        [
            f"{row['path']}, {row['place']}" if row.get("place") else row["path"],
            *(row["direction"], format_nbytes(row["block_nbytes"]), row["depth"]),
            *(round(row["gb_per_s"], 3), round(row["commands_per_s"])),
            *("-" if row[name] is None else round(row[name]) for name in PERCENTS),
            round(row["cpu_us_per_command"], 1),
        ]
        for row in result["rows"]
    ]


def notes_of(result: dict[str, Any]) -> list[str]:
    """The descriptor lists of 64 MiB: commands are counted, bytes computed by a formula."""
    return [
        f"64 MiB in fragments of {format_nbytes(row['fragment_nbytes'])}: {row['sgl_commands']}"
        f" commands by SGL (computed: {row['sgl_nbytes']} bytes of lists), {row['prp_commands']} by"
        f" PRP (computed: {row['prp_nbytes']})"
        for row in result["descriptors"]
    ]


def report(result: dict[str, Any]) -> str:
    return "\n".join([table(HEAD, rows_of(result)), "", *notes_of(result)])


def measure(place: str, cell: Cell, commands: int, *, seed: int) -> Measured:
    """One run of one cell.  Raises DeviceTimeout when commands do not end."""
    block_nbytes, depth = cell.block_nbytes, cell.depth
    with _controller(place, cell.path) as controller, ExitStack() as undo:
        buffer = HostBuffer(depth * block_nbytes)
        undo.callback(controller.register(buffer).close)
        queue_pair = controller.create_queue_pair(_QUEUE_DEPTH)
        undo.callback(queue_pair.close)
        latencies, seconds = np.zeros(commands, np.uint64), ctypes.c_double()
        load = PathLoadStruct(
            commands=commands,
            address=buffer.address,
            seed=seed,
            latencies_ns=latencies.ctypes.data,
            depth=depth,
            nlb=block_nbytes // controller.info.lba_nbytes,
            opcode=_OPCODES[cell.direction],
        )
        controller.expect_rings(True)  # the submitter does not wake sleeping threads
        undo.callback(controller.expect_rings, False)
        cpu_s = time.process_time() - time.thread_time()
        result = _native.lib().gio_path_bench(
            controller.handle, queue_pair.struct_address, ctypes.byref(load), ctypes.byref(seconds)
        )
        cpu_s = time.process_time() - time.thread_time() - cpu_s
        if result < 0:
            controller.reset(_RESET_S)
        _native.check(result, "commands did not end well", "check the drive", DeviceTimeout)
    means = {
        "gb_per_s": commands * block_nbytes / seconds.value / 1e9,
        "commands_per_s": commands / seconds.value,
        "cpu_us_per_command": cpu_s / commands * 1e6,
    }
    return Measured(means, latencies)


def descriptors() -> list[dict[str, int]]:
    """Commands of the engine and bytes of their lists, for 64 MiB by SGL and by PRP.

    Source of the formulas: NVM Express base specification 2.0, 4.1.1 and 4.1.2. A command has a
    descriptor for each fragment, or an entry for each page of 4 KiB, the first one in the command.
    """
    rows = []
    for fragment in _FRAGMENTS:
        row = {"fragment_nbytes": fragment}
        for name, use_sgl in (("sgl", True), ("prp", False)):
            commands = _commands(fragment, use_sgl)
            row[f"{name}_commands"] = commands
            if use_sgl:
                row["sgl_nbytes"] = 64 * MiB // fragment * _SGL_NBYTES
            else:
                row["prp_nbytes"] = (64 * MiB // _PRP_PAGE_NBYTES - commands) * _PRP_NBYTES
        rows.append(row)
    return rows


def _commands(fragment: int, use_sgl: bool) -> int:
    """Number of commands that the engine makes for 64 MiB in scattered fragments of one run."""
    slices = 64 * MiB // fragment
    with MemoryController([64 * MiB], mode="zero_copy") as controller, ExitStack() as undo:
        buffer = HostBuffer(64 * MiB)
        undo.callback(controller.register(buffer).close)
        engine = Engine(controller, use_sgl=use_sgl)
        undo.callback(engine.close)
        memory = flat_memory(buffer.address, fragment, slices, buffer)
        pages = np.random.default_rng(1).permutation(slices).astype(np.uint32)
        before = int(engine.stats().commands)
        extents = Extents([0], [1], [slices], fragment // controller.info.lba_nbytes)
        job = engine.submit(OPCODE_READ, extents, pages, memory, timeout_s=_RESET_S)
        if not job.wait_released(_RESET_S):
            raise DeviceTimeout("the controller in memory does not answer; repeat the benchmark")
        return int(engine.stats().commands) - before


def _row(cell: Cell, runs: list[Measured]) -> dict[str, Any]:
    pooled = np.concatenate([run.latencies_ns for run in runs])
    return {
        **asdict(cell),
        **{name: median([run.means[name] for run in runs]) for name in runs[0].means},
        "samples": len(pooled),
        **{name: _latency_us(pooled, percent) for name, percent in PERCENTS.items()},
        "runs": [round(run.means["gb_per_s"], 4) for run in runs],
    }


def _latency_us(latencies_ns: npt.NDArray[np.uint64], percent: float) -> float | None:
    """A percentile; None if too few commands were timed, so that it would be the maximum."""
    if len(latencies_ns) < round(100 / (100 - percent)):
        return None
    return float(np.percentile(latencies_ns, percent)) / 1e3


def _named(places: list[str], given: list[str]) -> dict[str, str]:
    """Names of places: their last path component, with a number if it is ambiguous."""
    if len(places) == 1:
        return {"": places[0]}
    parts = [Path(one).name for one in given]
    names = parts if len(set(parts)) == len(parts) else [f"{i} {x}" for i, x in enumerate(parts)]
    return dict(zip(names, places, strict=True))


def _paths_of(place: str, wanted: list[str]) -> list[str]:
    if is_drive(place):
        return ["vfio"]
    if is_generic(place):
        return ["passthrough"]
    return wanted


@contextmanager
def _controller(place: str, path: str) -> Iterator[NativeController]:
    if path in ("passthrough", "vfio"):
        with open_controller([place]) as controller:
            yield controller
        return
    member = FileMember(place, direct=path != "page-cache", lock=True)
    try:
        if path == "page-cache":
            with Path(place).open("rb") as file:
                while file.read(8 * MiB):  # bounded by the file
                    pass
        executor = "threads" if path == "threads" else "uring"
        with FileController(
            [member], executor=executor, limits=RequestLimits(threads=8)
        ) as controller:
            yield controller
    finally:
        member.close()
