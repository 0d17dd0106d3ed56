"""Compares the engine's command window with a fixed one: arrival of a load's layers, and cost.

Loads of a few sizes go through the engine and files, each to an engine with the window that is
found while it runs and to one with a fixed window of 32 commands, in turns. A second part consumes
layer after layer with a computation between them that takes a multiple of the layer's I/O time.
From the engine's stamps of the same loads it calculates when the last computation would have ended
if the consumer had not had to be woken.
Pages lie on the members in turn, so a load of several pages reads all members.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np

from tutti.base.arrays import U64
from tutti.base.terminal import ProgressFactory, table
from tutti.base.units import KiB, MiB, format_nbytes, parse_nbytes
from tutti.bench.environment import describe
from tutti.bench.members import temporary_members
from tutti.bench.pool_file import add_place_arguments, medium_of, pool_paths
from tutti.bench.statistics import bootstrap_median, median
from tutti.errors import CapacityError, ConfigError, MediumError, Unsupported
from tutti.gio_uring.controller_file import FileController
from tutti.gio_uring.engine import PRIORITY_LOAD, PRIORITY_STORE, Engine
from tutti.gio_uring.file_member import FileMember
from tutti.gio_uring.iocb import Extents, PagedMemory
from tutti.gio_uring.memory import HostBuffer
from tutti.gio_uring.named_drive import is_drive
from tutti.gio_uring.nvme_spec import OPCODE_READ, OPCODE_WRITE

HEAD = ("pages", "window", "first layer, ms", "bound, ms", "whole load, ms", "GB/s")
COMMAND_NBYTES = MiB
FIXED_COMMANDS = 32
FIRST_BAR, RATE_BAR, LOOP_BAR = 1.5, 0.97, 1.05
_GROUP = 64
_GROUPS = 4
_LBA_NBYTES = 4 * KiB
_TIMEOUT_S = 60.0
_SHORT_PAGES = 4  # loads of so few take less time, and vary more
_LATE_NS = 100_000  # about how much later than asked a sleep ends: this much is spent awake


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_place_arguments(parser)
    parser.add_argument("--layers", type=int, default=32, help="layers of a page")
    parser.add_argument("--slice", default="256KiB", help="bytes of a page in one layer")
    parser.add_argument(
        "--pages", nargs="+", type=int, default=[1, 4, 16, 64], help="pages per load"
    )
    parser.add_argument("--rounds", type=int, default=9, help="measurements per number of pages")
    parser.add_argument(
        "--warm",
        type=float,
        default=5.0,
        help="seconds of loads before measuring, in which the window adapts",
    )
    parser.add_argument(
        "--compute",
        nargs="*",
        type=float,
        default=[0.25, 0.5, 1.0, 2.0, 4.0],
        help="computation time per layer, as a multiple of the time to load one",
    )


@dataclass(frozen=True)
class LoadTimes:
    """Milliseconds from submission to the first layer, the last one, and its computation.

    stamped_ms: to the computation, if each layer was there when the engine says.
    """

    first_ms: float
    whole_ms: float
    computed_ms: float
    stamped_ms: float


class Reader:
    """An engine of its own, which loads pages from the shared members into memory of its own."""

    def __init__(
        self, members: Sequence[FileMember], layers: int, slice_nbytes: int, window: int | None
    ) -> None:
        self._layers, self._slice_nlb = layers, slice_nbytes // _LBA_NBYTES
        self._members, self._slots = len(members), slots_of(len(members))
        with ExitStack() as undo:
            controller = undo.enter_context(FileController(members, lba_nbytes=_LBA_NBYTES))
            self.engine = Engine(
                controller, window_nbytes=window, command_nbytes_max=COMMAND_NBYTES
            )
            undo.callback(self.engine.close)
            buffer = HostBuffer(layers * _GROUP * slice_nbytes)
            buffer.array[:] = 1
            undo.callback(controller.register(buffer).close)
            starts = np.arange(layers, dtype=np.uint64) * np.uint64(_GROUP * slice_nbytes)
            bases = (np.uint64(buffer.address) + starts)[:, None]
            self._memory = PagedMemory(bases, (slice_nbytes,), (slice_nbytes,), _GROUP, buffer)
            self.close = undo.pop_all().close

    def move(
        self, opcode: int, group: int, first: int, pages: int, compute_ms: float = 0
    ) -> LoadTimes:
        """Moves `pages` slots of a group, and computes with each layer for `compute_ms`.

        A computation begins when its layer is there and the one before has ended, as on a GPU: no
        late end of a sleep delays one.  A layer that was waited for is there when the wait returns.
        """
        # Page i of a group is on member i % members; the first page on each, and their number.
        heads = first + np.arange(min(self._members, pages))
        counts = -(-(first + pages - heads) // self._members)
        slots = group * self._layers * self._slots + heads // self._members
        extents = Extents(
            slots * self._slice_nlb,
            1 + heads % self._members,
            counts,
            self._slice_nlb,
            self._slots * self._slice_nlb,
        )
        ready: U64 = np.zeros(self._layers, np.uint64)
        job = self.engine.submit(
            opcode,
            extents,
            self._memory.check_pages(np.arange(pages)),
            self._memory,
            priority=PRIORITY_LOAD if opcode == OPCODE_READ else PRIORITY_STORE,
            layer_ns=ready,
        )
        computed_ns, compute_ns = 0, int(compute_ms * 1e6)
        for layer in range(self._layers if compute_ms else 0):
            was_ready = int(ready[layer])
            job.wait_layers(layer + 1, _TIMEOUT_S)
            begun_ns = max(was_ready or time.monotonic_ns(), computed_ns)
            computed_ns = begun_ns + compute_ns
            if (left_ns := computed_ns - time.monotonic_ns()) > _LATE_NS:
                time.sleep((left_ns - _LATE_NS) / 1e9)
            while time.monotonic_ns() < computed_ns:  # bounded by _LATE_NS
                pass
        if not job.wait_released(_TIMEOUT_S) or (report := job.report()).status:
            raise MediumError("a transfer failed or took a minute; look at the kernel's log")
        begin_ns = int(report.submitted_ns)
        times_ns = int(ready[0]), int(ready[-1]), computed_ns, end_ns(ready, compute_ns)
        return LoadTimes(*(max(0, at_ns - begin_ns) / 1e6 for at_ns in times_ns))


def end_ns(ready: U64, compute_ns: int) -> int:
    """When the last layer has been computed: each begins when it and the one before are ready."""
    left = np.arange(len(ready), 0, -1)
    return int((ready.astype(np.int64) + left * compute_ns).max())


def slots_of(members: int) -> int:
    """Pages of a group on each member."""
    return -(-_GROUP // members)


def member_nbytes(members: int, layers: int, slice_nbytes: int) -> int:
    """What all groups take on each member."""
    return _GROUPS * layers * slots_of(members) * slice_nbytes


def run(args: argparse.Namespace, progress: ProgressFactory) -> dict[str, Any]:
    """Loads of every size in turns, and loops that compute between layers.

    Raises ConfigError for unacceptable numbers, Unsupported for drives of vfio, PoolExists for what
    is there already, CapacityError for small devices, MediumError when a transfer fails.
    """
    places = pool_paths(args, "window")
    if any(map(is_drive, places)):
        raise Unsupported("two engines need each member, and vfio has a drive for one; give files")
    slice_nbytes = parse_nbytes(args.slice)
    if slice_nbytes % _LBA_NBYTES or not 0 < max(args.pages) <= _GROUP or min(args.pages) < 1:
        raise ConfigError(f"use slices of whole 4 KiB blocks, and 1 to {_GROUP} pages")
    if min(args.layers, args.rounds) < 1 or any(factor <= 0 for factor in args.compute):
        raise ConfigError("--layers and --rounds count from 1; factors of --compute are above 0")
    nbytes = member_nbytes(len(places), args.layers, slice_nbytes)
    with ExitStack() as stack:
        stack.enter_context(temporary_members(places, nbytes, force=args.force))
        members = []
        for place in places:
            members.append(FileMember(place, lock=True))
            stack.callback(members[-1].close)
            if (has := members[-1].nbytes) < nbytes:
                raise CapacityError(
                    f"{place} has {format_nbytes(has)}, not {format_nbytes(nbytes)}; give a larger"
                    " one, fewer --layers or a shorter --slice"
                )
        readers = {}
        for name, window in (("found", None), ("fixed", FIXED_COMMANDS * COMMAND_NBYTES)):
            readers[name] = Reader(members, args.layers, slice_nbytes, window)
            stack.callback(readers[name].close)
        bench = _Bench(readers, args, slice_nbytes)
        bench.fill()
        with progress("window", len(args.pages) * (1 + len(args.compute))) as bar:
            bench.warm_up()
            rows = []
            for pages in args.pages:
                rows += bench.loads(pages)
                bar.advance(1)
            loops = []
            for pages in args.pages:
                for factor in args.compute:
                    loops.append(bench.loop(pages, factor))
                    bar.advance(1)
        windows = {name: _window_of(reader) for name, reader in readers.items()}
    return {
        "benchmark": "window",
        "source": "measured",
        "rows": rows,
        "loops": loops,
        "windows": windows,
        "single_command_ms": bench.single_ms,
        "layers": args.layers,
        "slice_nbytes": slice_nbytes,
        "rounds": args.rounds,
        "members": len(places),
        "machine": describe(medium_of(args)),
    }


def _window_of(reader: Reader) -> dict[str, Any]:
    """Of all service threads, one for each drive: sums, and the longest latency."""
    drives = reader.engine.windows()
    return {
        "window_nbytes": sum(int(drive.window_nbytes[0]) for drive in drives),
        "rate_gb_per_s": sum(drive.rate[0] for drive in drives) / 1e9,
        "latency_us": max(drive.latency_ns[0] for drive in drives) / 1e3,
        "samples": sum(int(drive.samples[0]) for drive in drives),
    }


class _Bench:
    """The rounds over the members."""

    def __init__(
        self, readers: dict[str, Reader], args: argparse.Namespace, slice_nbytes: int
    ) -> None:
        self._readers, self._args, self._slice_nbytes = readers, args, slice_nbytes
        self._rng = np.random.default_rng(1)
        self._rate = 0.0  # bytes per ms of the fixed window's largest load
        self.single_ms = 0.0

    def fill(self) -> None:
        """Writes all groups once, so that no read meets an unwritten extent."""
        for group in range(_GROUPS):
            self._readers["fixed"].move(OPCODE_WRITE, group, 0, _GROUP)

    def warm_up(self) -> None:
        """Lets the window be found, by loads of all sizes."""
        until = time.monotonic() + self._args.warm
        while time.monotonic() < until:  # bounded by --warm
            for pages in self._args.pages:
                self._load("found", pages)
        largest = max(self._args.pages)
        whole = [self._load("fixed", largest).whole_ms for _ in range(3)]
        self._rate = largest * self._args.layers * self._slice_nbytes / median(whole)

    def _load(self, name: str, pages: int, compute_ms: float = 0) -> LoadTimes:
        group = int(self._rng.integers(_GROUPS))
        first = int(self._rng.integers(_GROUP - pages + 1))
        return self._readers[name].move(OPCODE_READ, group, first, pages, compute_ms)

    def loads(self, pages: int) -> list[dict[str, Any]]:
        """A row for each window."""
        found: dict[str, list[LoadTimes]] = {name: [] for name in self._readers}
        for turn in range(self._args.rounds):
            names = list(self._readers)
            for name in names if turn % 2 else reversed(names):
                found[name].append(self._load(name, pages))
        if not self.single_ms:
            self.single_ms = self._single_command_ms()
        layer_nbytes = pages * self._slice_nbytes
        bound_ms = layer_nbytes / self._rate + self.single_ms
        rows = []
        for name, loads in found.items():
            against = [b.whole_ms / a.whole_ms for a, b in zip(loads, found["fixed"], strict=True)]
            rows.append(
                {
                    "pages": pages,
                    "window": name,
                    "first_ms": bootstrap_median([one.first_ms for one in loads]).to_dict(),
                    "whole_ms": bootstrap_median([one.whole_ms for one in loads]).to_dict(),
                    "bound_ms": bound_ms,
                    "first_over_bound": median([one.first_ms for one in loads]) / bound_ms,
                    "rate_over_fixed": bootstrap_median(against).to_dict(),
                    "gb_per_s": layer_nbytes
                    * self._args.layers
                    / median([one.whole_ms for one in loads])
                    / 1e6,
                }
            )
        return rows

    def _single_command_ms(self) -> float:
        """One slice of one layer with nothing else in flight."""
        reader = self._readers["found"]
        engine = reader.engine
        extents = Extents([0], [1], [1], self._slice_nbytes // _LBA_NBYTES)
        memory = reader._memory
        one = PagedMemory(
            memory.bases[:1], memory.stride_nbytes, memory.segment_nbytes, memory.pages
        )
        took = []
        for _ in range(21):
            job = engine.submit(OPCODE_READ, extents, one.check_pages([0]), one)
            job.wait_released(_TIMEOUT_S)
            report = job.report()
            took.append((report.done_ns - report.submitted_ns) / 1e6)
        return median(took)

    def loop(self, pages: int, factor: float) -> dict[str, Any]:
        """Waiting in all against max(I/O, computation) + the first layer."""
        layer_ms = pages * self._slice_nbytes / self._rate
        layers = self._args.layers
        compute_ms = layers * factor * layer_ms
        # A group's own time is what a command alone takes beyond its bytes.
        group_ms = max(0.0, self.single_ms - self._slice_nbytes / self._rate)
        totals: dict[str, list[float]] = {name: [] for name in self._readers}
        over: list[float] = []
        stamped: list[float] = []
        possible: list[float] = []
        rounds = self._args.rounds
        for _ in range(3 * rounds if pages <= _SHORT_PAGES else max(3, rounds // 3)):
            plain = self._load("found", pages)
            bound_ms = max(plain.whole_ms, compute_ms) + plain.first_ms
            loads = {name: self._load(name, pages, factor * layer_ms) for name in self._readers}
            for name, load in loads.items():
                totals[name].append(load.computed_ms)
            over.append(loads["found"].computed_ms / bound_ms)
            stamped.append(loads["found"].stamped_ms / bound_ms)
            possible.append(least_ms(layers, group_ms, layer_ms, factor * layer_ms) / bound_ms)
        return {
            "pages": pages,
            "factor": factor,
            "layers": layers,
            "total_ms": {name: median(times) for name, times in totals.items()},
            "over_bound": bootstrap_median(over).to_dict(),
            "stamped": bootstrap_median(stamped).to_dict(),  # over the same bound
            "possible": median(possible),  # of over_bound
        }


def least_ms(layers: int, group_ms: float, layer_ms: float, compute_ms: float) -> float:
    """The time of a loop over all layers, with the best of all ways to load them in groups.

    A group of b layers takes group_ms + b * layer_ms and is there as a whole, then the next begins;
    each layer computes for compute_ms.
    """
    count = np.arange(layers + 1)
    later = np.where(count[:, None] > count, (count[:, None] - count) * compute_ms, np.inf)
    # done_ms[n]: when n layers have computed, at best, the last of them in this group.
    done_ms = np.where(count == 0, 0.0, np.inf)
    best = np.inf
    for groups in range(1, layers + 1):
        arrived_ms = groups * group_ms + count * layer_ms
        done_ms = (np.maximum(done_ms, arrived_ms[:, None]) + later).min(axis=1)
        best = min(best, float(done_ms[layers]))
    return best


def rows_of(result: dict[str, Any]) -> list[Sequence[Any]]:
    """What a table shows of the loads."""
    return [
        (
            row["pages"],
            row["window"],
            round(row["first_ms"]["median"], 2),
            round(row["bound_ms"], 2),
            round(row["whole_ms"]["median"], 1),
            round(row["gb_per_s"], 2),
        )
        for row in result["rows"]
    ]


def notes_of(result: dict[str, Any]) -> list[str]:
    found = [row for row in result["rows"] if row["window"] == "found"]
    firsts = [row["first_over_bound"] for row in found]
    strict = [row["first_ms"]["median"] / _strict_ms(row, result) for row in found]
    rates = ", ".join(f"{row['rate_over_fixed']['median']:.2f}" for row in found)
    notes = [
        f"first layer over its bytes and the whole of a command alone (bar {FIRST_BAR}):"
        f" {_against(firsts, FIRST_BAR)}",
        "over its bytes and what a command alone takes beyond its own, so that none counts twice"
        f" (bar {FIRST_BAR}): {_against(strict, FIRST_BAR)}",
        f"rate of the whole load over the fixed window's (bar {RATE_BAR}): {rates}; calculated, "
        f"where the first layer costs this drive's pause once: {_most_rates(result)}",
    ]
    if result["loops"]:
        worst = max(result["loops"], key=lambda loop: float(loop["over_bound"]["median"]))
        notes.append(
            f"layer by layer, the worst total over max(I/O, computation) + first layer (bar "
            f"{LOOP_BAR}): {worst['over_bound']['median']:.2f}, at {worst['pages']} pages and a "
            f"computation of {worst['factor']:g} times a layer's I/O"
        )
        for pages in sorted({loop["pages"] for loop in result["loops"]}):
            loops = [loop for loop in result["loops"] if loop["pages"] == pages]
            factors = ", ".join(f"{loop['factor']:g}" for loop in loops)
            reached = ", ".join(f"{loop['over_bound']['median']:.2f}" for loop in loops)
            possible = ", ".join(f"{loop['possible']:.2f}" for loop in loops)
            stamps = [f"{one['median']:.2f}" for loop in loops if (one := loop.get("stamped"))]
            stamped = f"; by the engine's stamps of the same loads: {', '.join(stamps)}"
            notes.append(
                f"{pages} pages, computations of {factors} times a layer's I/O: {reached}"
                f"{stamped if stamps else ''}; calculated, the best of all groups of whole layers, "
                f"with this drive's pause for each: {possible}"
            )
    window = result["windows"]["found"]["window_nbytes"] / MiB
    return [
        *notes,
        f"window at the end: {window:.1f} MiB; fixed: {FIXED_COMMANDS} commands of 1 MiB",
    ]


def _strict_ms(row: dict[str, Any], result: dict[str, Any]) -> float:
    """The bound of a first layer in which no slice is transferred twice."""
    single_ms = result["single_command_ms"]
    slice_ms = (row["bound_ms"] - single_ms) / row["pages"]
    return float(row["bound_ms"] - min(slice_ms, single_ms))


def _against(found: Sequence[float], bar: float) -> str:
    numbers = ", ".join(f"{ratio:.2f}" for ratio in found)
    return f"{numbers}, {'**not reached**' if max(found) > bar else 'reached'}"


def _most_rates(result: dict[str, Any]) -> str:
    fixed = [row for row in result["rows"] if row["window"] == "fixed"]
    command_ms = result["slice_nbytes"] / fixed[-1]["gb_per_s"] / 1e6
    pause_ms = max(0.0, result["single_command_ms"] - command_ms)
    whole_ms = [row["whole_ms"]["median"] for row in fixed]
    return ", ".join(f"{ms / (ms + pause_ms):.2f}" for ms in whole_ms)


def report(result: dict[str, Any]) -> str:
    return "\n".join([table(list(HEAD), [list(row) for row in rows_of(result)]), *notes_of(result)])
