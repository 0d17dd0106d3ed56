"""Compares a store's adaptive window with a fixed one: arrival of a load's layers, and cost.

Three pools with the same pages are opened as `tutti.open` does by default, so loads are verified:
one with the adaptive window, two with a fixed window of 32 commands.  The second of these shows the
noise.  They load in a random order, and wait for the first and the last layer.  After each third of
the rounds the pools are made again in another order, because on some disks a file's place decides
more than the window.  In the same rounds the drive is read in a fourth pool, without the store and
verification: all layers of a load at once, and the first layer before all others, which shows the
cost of an early first layer.
In a second part each layer is followed by a computation that takes a multiple of the layer's I/O
time.  In its rounds the drive also reads one layer alone, after an idle time and right after
another one: the difference is the pause that each group of layers costs.
No load is started by the main thread, as in `bench short`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from tutti.base.interrupts import uninterrupted
from tutti.base.terminal import ProgressFactory
from tutti.base.units import KiB, MiB, parse_nbytes
from tutti.bench.environment import describe
from tutti.bench.goals import REACHED, verdict
from tutti.bench.members import beside, refuse
from tutti.bench.pool_file import add_place_arguments, medium_of, pool_paths, temporary_pool
from tutti.bench.shape import KvPageShape
from tutti.bench.statistics import bootstrap_median, interval_text, median, ratios
from tutti.bench.writable import options
from tutti.errors import CapacityError, ConfigError, MediumError
from tutti.gio_uring.engine import PRIORITY_LOAD
from tutti.gio_uring.iocb import Extents
from tutti.gio_uring.nvme_spec import OPCODE_READ
from tutti.profiles.at_open import AUTO
from tutti.store import ObjectStore
from tutti.transfers.store_config import StoreConfig

HEAD = ("pages", "window", "first layer, ms", "bound, ms", "whole load, ms", "GB/s")
COMMAND_NBYTES = MiB
FIXED_COMMANDS = 32
FIRST_BAR, RATE_BAR, LOOP_BAR = 1.5, 0.97, 1.05
FOUND, FIXED, AGAIN = "found", "fixed", "fixed again"
_DRIVE = "drive"  # a pool whose drive is read without the store
_GROUP = 64
_GROUPS = 2
_ORDERS = 3  # of the pools
_BLOCK_NBYTES = 4 * KiB
_TIMEOUT_S = 60.0
_SHORT_PAGES, _SHORT_TIMES = 4, 3  # loads up to this size are short and vary more: repeated
_LATE_NS = 100_000  # a sleep ends about this late, so the last part of a wait is a busy loop


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_place_arguments(parser)
    option = options(parser)
    option("--layers", 32, "layers of a page")
    option("--slice", "256KiB", "bytes of a page in one layer")
    option("--pages", [1, 4, 16, 64], "pages per load")
    option("--rounds", 36, "measurements per number of pages")
    option("--warm", 5.0, "seconds of loads before measuring, in which the window adapts")
    what = "computation time per layer, as a multiple of the time to load one"
    option("--compute", [0.25, 0.5, 1.0, 2.0, 4.0], what, nargs="*")


@dataclass(frozen=True)
class LoadTimes:
    """Milliseconds from the call of `load` to its return, the first layer, the last layer, and the
    end of its computation.
    """

    called_ms: float
    first_ms: float
    whole_ms: float
    computed_ms: float


class Reader:
    """A store with all pages, and memory for the longest load."""

    def __init__(self, store: ObjectStore) -> None:
        self.store = store
        rng = np.random.default_rng(2)
        self._keys = rng.integers(0, 256, (_GROUPS, _GROUP, 16), np.uint8)
        self._memory = store.allocate_memory(_GROUP)
        content = rng.bytes(store.layout.object_nbytes)
        for page in range(_GROUP):
            self._memory.write(page, content)
        for keys in self._keys:
            if store.put(keys, np.arange(_GROUP)).wait(_TIMEOUT_S).stored < _GROUP:
                raise CapacityError("the pages do not fit their pool; give longer slices")

    @uninterrupted()  # on a thread, as in a server
    def load(self, group: int, first: int, pages: int, compute_ms: float = 0) -> LoadTimes:
        """Loads `pages` of a group, and computes with each layer for `compute_ms`, if given.

        A computation begins when its layer has arrived and the previous one has ended, as on a GPU:
        a sleep that ends late delays none.  A layer's arrival is the time when its wait returned.
        """
        layers, numbers = self.store.layout.layers, np.arange(pages)
        keys = self._keys[group, first : first + pages]
        begun_ns = time.monotonic_ns()
        ticket = self.store.load(keys, numbers)
        times_ns = [time.monotonic_ns()]
        computed_ns, compute_ns = 0, int(compute_ms * 1e6)
        for layer in range(layers) if compute_ms else (0, layers - 1):
            was_ready = computed_ns and ticket._progress.layers_ready > layer
            ticket.wait_layer(layer, _TIMEOUT_S)
            times_ns.append(time.monotonic_ns())
            computed_ns = (computed_ns if was_ready else times_ns[-1]) + compute_ns
            if (left_ns := computed_ns - time.monotonic_ns()) > _LATE_NS:
                time.sleep((left_ns - _LATE_NS) / 1e9)
            while time.monotonic_ns() < computed_ns:  # bounded by _LATE_NS
                pass
        ticket.wait_settled(_TIMEOUT_S)
        ends_ns = *times_ns[:2], times_ns[-1], computed_ns
        return LoadTimes(*((at_ns - begun_ns) / 1e6 for at_ns in ends_ns))

    def drive_ms(self, group: int, first: int, pages: int, layers: int) -> float:
        """Milliseconds that the drive alone takes for the first layers of as many pages.

        They are contiguous on each member, unlike the pool's pages, and read in members' order.
        """
        members, engine = self.store.members.count, self.store.engine
        heads = first + np.arange(min(members, pages))
        slice_nlb = self.store.layout.slice_nbytes // engine.lba_nbytes
        slots = -(-_GROUP // members)  # of each member
        extents = Extents(
            (group * self.store.layout.layers * slots + heads // members) * slice_nlb,
            1 + heads % members,
            -(-(first + pages - heads) // members),
            slice_nlb,
            slots * slice_nlb,
        )
        memory = self._memory.memory
        memory = replace(memory, bases=memory.bases[:layers])
        numbers = memory.check_pages(np.arange(pages))
        job = engine.submit(OPCODE_READ, extents, numbers, memory, priority=PRIORITY_LOAD)
        if not job.wait_released(_TIMEOUT_S) or (report := job.report()).status:
            raise MediumError("a transfer failed or took a minute; look at the kernel's log")
        return int(report.done_ns - report.submitted_ns) / 1e6


def run(args: argparse.Namespace, progress: ProgressFactory) -> dict[str, Any]:
    """Loads of every size in turns, and loops that compute between layers.

    Raises ConfigError for unacceptable numbers, Unsupported for devices, PoolExists for what is
    there already, CapacityError for a full disk, MediumError when a transfer fails.
    """
    places = pool_paths(args, "window")
    refuse(places, "four pools take turns, and a device holds one; give folders")
    slice_nbytes = parse_nbytes(args.slice)
    if slice_nbytes % _BLOCK_NBYTES or not 0 < max(args.pages) <= _GROUP or min(args.pages) < 1:
        raise ConfigError(f"use slices of whole 4 KiB blocks, and 1 to {_GROUP} pages")
    if min(args.layers, args.rounds) < 1 or any(factor <= 0 for factor in args.compute):
        raise ConfigError("--layers and --rounds count from 1; factors of --compute are above 0")
    shape = KvPageShape(args.layers, slice_nbytes)
    nbytes = _GROUPS * _GROUP * shape.object_nbytes
    capacity_nbytes = nbytes + nbytes // 16 + 32 * MiB * len(places)  # a 64th is kept free

    def pool_of(name: str) -> AbstractContextManager[ObjectStore]:
        window = None if name == FOUND else FIXED_COMMANDS * COMMAND_NBYTES
        return temporary_pool(
            beside(places, name.replace(" ", "-")),
            shape.layout(),
            capacity_nbytes,
            config=StoreConfig(window_nbytes=window),
            prewrite=True,
            engine={"profile": AUTO},
        )

    bench = _Bench(args, slice_nbytes)
    with progress("window", args.rounds + len(args.pages) * len(args.compute)) as bar:
        for order in range(_ORDERS):
            is_last = order == _ORDERS - 1
            names = np.roll((FOUND, FIXED, AGAIN, _DRIVE), order).tolist()
            with ExitStack() as stack:
                readers = {name: Reader(stack.enter_context(pool_of(name))) for name in names}
                bench.warm_up(readers)
                for _ in range(order, args.rounds, _ORDERS):
                    bench.round()
                    bar.advance(1)
                loops = []
                for pages, factor in product(args.pages, args.compute if is_last else ()):
                    loops.append(bench.loop(pages, factor))
                    bar.advance(1)
                windows = {name: _window_of(readers[name]) for name in (FOUND, FIXED, AGAIN)}
                verify = readers[FOUND].store.config.verify
    return {
        "benchmark": "window",
        "source": "measured",
        "rows": [row for pages in args.pages for row in bench.rows(pages)],
        "loops": loops,
        "drive": [bench.drive(pages) for pages in args.pages],
        "drive_gb_per_s": bench.rate() / 1e6,
        "single_command_ms": bench.single_ms,
        "windows": windows,
        "verify": verify,
        "layers": args.layers,
        "slice_nbytes": slice_nbytes,
        "rounds": args.rounds,
        "members": len(places),
        "machine": describe(medium_of(args)),
    }


def _window_of(reader: Reader) -> dict[str, Any]:
    """Facts of all service threads (one per drive): sums, and the longest latency."""
    drives = reader.store.engine.windows()
    return {
        "window_nbytes": sum(int(drive.window_nbytes[0]) for drive in drives),
        "rate_gb_per_s": sum(drive.rate[0] for drive in drives) / 1e9,
        "latency_us": max(drive.latency_ns[0] for drive in drives) / 1e3,
        "samples": sum(int(drive.samples[0]) for drive in drives),
    }


class _Bench:
    """The rounds over the pools."""

    def __init__(self, args: argparse.Namespace, slice_nbytes: int) -> None:
        self._args, self._slice_nbytes = args, slice_nbytes
        self._readers: dict[str, Reader] = {}
        self._rng = np.random.default_rng(1)
        self._loads: dict[tuple[int, str], list[LoadTimes]] = {}
        #: Drive's milliseconds for (all layers, the first, the others), by number of pages.
        self._drive: dict[int, list[tuple[float, float, float]]] = {}
        self._single: list[float] = []

    @property
    def single_ms(self) -> float:
        """Time of a command of one slice with nothing else in flight."""
        return median(self._single)

    def rate(self, places: int = 1) -> float:
        """Bytes per millisecond of the drive's longest reads; of several places, in the last."""
        pages, reads = max(self._drive.items())
        whole_ms = median([whole for whole, _, _ in reads[-(len(reads) // places) :]])
        return float(pages * self._slice_nbytes * self._args.layers / whole_ms)

    def warm_up(self, readers: dict[str, Reader]) -> None:
        """Loads all sizes from new pools for --warm seconds, until the window has adapted."""
        self._readers = readers
        until = time.monotonic() + self._args.warm
        while time.monotonic() < until:  # bounded by --warm
            for pages in self._args.pages:
                self._load(FOUND, pages)

    def _place(self, pages: int) -> tuple[int, int, int]:
        group = int(self._rng.integers(_GROUPS))
        return group, int(self._rng.integers(_GROUP - pages + 1)), pages

    def _load(self, name: str, pages: int, compute_ms: float = 0) -> LoadTimes:
        return self._readers[name].load(*self._place(pages), compute_ms)

    def _drive_ms(self, pages: int, layers: int = 1) -> float:
        return self._readers[_DRIVE].drive_ms(*self._place(pages), layers)

    def round(self) -> None:
        """Loads of every size and pool, and the same from the drive alone."""
        for pages in self._args.pages:
            for _ in range(_SHORT_TIMES if pages <= _SHORT_PAGES else 1):
                for name in map(str, self._rng.permutation(list(self._readers))):
                    if name != _DRIVE:
                        times = self._load(name, pages)
                        self._loads.setdefault((pages, name), []).append(times)
                        continue
                    whole_ms = self._drive_ms(pages, self._args.layers)
                    first_ms = self._drive_ms(pages)
                    others_ms = self._drive_ms(pages, max(1, self._args.layers - 1))
                    taken = whole_ms, first_ms, others_ms
                    self._drive.setdefault(pages, []).append(taken)
                    self._single.append(self._drive_ms(1))

    def rows(self, pages: int) -> list[dict[str, Any]]:
        """A row for each pool."""
        layer_nbytes = pages * self._slice_nbytes
        rows = []
        for name in (FOUND, FIXED, AGAIN):
            loads = self._loads[pages, name]
            whole_ms = [one.whole_ms for one in loads]
            fixed_ms = [one.whole_ms for one in self._loads[pages, FIXED]]
            rows.append(
                {
                    "pages": pages,
                    "window": name,
                    "called_ms": median([one.called_ms for one in loads]),
                    "first_ms": bootstrap_median([one.first_ms for one in loads]).to_dict(),
                    "whole_ms": bootstrap_median(whole_ms).to_dict(),
                    "bound_ms": layer_nbytes / self.rate() + self.single_ms,
                    "rate_over_fixed": bootstrap_median(ratios(fixed_ms, whole_ms)).to_dict(),
                    "gb_per_s": layer_nbytes * self._args.layers / median(whole_ms) / 1e6,
                }
            )
        return rows

    def drive(self, pages: int) -> dict[str, Any]:
        """The drive alone: its rate with the first layer read before the others, over its rate with
        all at once; and the first layer's time.
        """
        over = [whole / (first + others) for whole, first, others in self._drive[pages]]
        first_ms = bootstrap_median([first for _, first, _ in self._drive[pages]])
        return {
            "pages": pages,
            "first_ms": first_ms.to_dict(),
            "in_two_over_whole": bootstrap_median(over).to_dict(),
        }

    def loop(self, pages: int, factor: float) -> dict[str, Any]:
        """Compares the total time with max(I/O, computation) + the first layer."""
        layer_ms = pages * self._slice_nbytes / self.rate(_ORDERS)  # as the pauses below
        layers = self._args.layers
        compute_ms = factor * layer_ms
        bounds_ms: list[float] = []
        totals_ms: list[float] = []
        alone_ms: dict[str, list[float]] = {"idle": [], "in_a_row": []}
        rounds = self._args.rounds
        for _ in range(_SHORT_TIMES * rounds if pages <= _SHORT_PAGES else max(3, rounds // 3)):
            plain = self._load(FOUND, pages)
            bounds_ms.append(max(plain.whole_ms, layers * compute_ms) + plain.first_ms)
            totals_ms.append(self._load(FOUND, pages, compute_ms).computed_ms)
            time.sleep(compute_ms / 1e3)
            for times_ms in alone_ms.values():
                times_ms.append(self._drive_ms(pages))
        # A group's own time is what a layer alone takes beyond its bytes.
        pauses_ms = {name: max(0.0, median(ms) - layer_ms) for name, ms in alone_ms.items()}
        return {
            "pages": pages,
            "factor": factor,
            "layers": layers,
            "total_ms": median(totals_ms),
            "over_bound": bootstrap_median(ratios(totals_ms, bounds_ms)).to_dict(),
            "pause_ms": pauses_ms,
            "possible": {  # of over_bound
                name: least_ms(layers, pause_ms, layer_ms, compute_ms) / median(bounds_ms)
                for name, pause_ms in pauses_ms.items()
            },
        }


def least_ms(layers: int, group_ms: float, layer_ms: float, compute_ms: float) -> float:
    """The time of a loop over all layers, with the best of all ways to load them in groups.

    A group of b layers takes group_ms + b * layer_ms and arrives as a whole; then the next begins.
    Each layer computes for compute_ms.
    """
    count = np.arange(layers + 1)
    later = np.where(count[:, None] > count, (count[:, None] - count) * compute_ms, np.inf)
    # done_ms[n]: earliest end of the computation of n layers, the last of them in this group.
    done_ms = np.where(count == 0, 0.0, np.inf)
    best = np.inf
    for groups in range(1, layers + 1):
        arrived_ms = groups * group_ms + count * layer_ms
        done_ms = (np.maximum(done_ms, arrived_ms[:, None]) + later).min(axis=1)
        best = min(best, float(done_ms[layers]))
    return best


def rows_of(result: dict[str, Any]) -> list[Sequence[Any]]:
    """Rows of the table of loads."""
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
    found, again = ([r for r in result["rows"] if r["window"] == name] for name in (FOUND, AGAIN))
    bounds = [row["bound_ms"] for row in found]
    firsts = [_over(row["first_ms"], bound) for row, bound in zip(found, bounds, strict=True)]
    strict = [_over(row["first_ms"], _strict_ms(row, result)) for row in found]
    rates = [row["rate_over_fixed"] for row in found]
    alone = ", ".join(
        f"{one['first_ms']['median'] / bound:.2f}"
        for one, bound in zip(result["drive"], bounds, strict=True)
    )
    in_two = [one["in_two_over_whole"] for one in result["drive"]]
    notes = [
        f"first layer over its bytes and the whole of a command alone (bar {FIRST_BAR}):"
        f" {_against(firsts, FIRST_BAR)}",
        "over its bytes and what a command alone takes beyond its own, so that none counts twice"
        f" (bar {FIRST_BAR}): {_against(strict, FIRST_BAR)}",
        "a first layer from the drive without a store and verification, over the first of these"
        f" bounds: {alone}; the call of `load`, in ms:"
        f" {', '.join(str(round(row['called_ms'], 2)) for row in found)}",
        f"rate of the whole load over the fixed window's (bar {RATE_BAR}):"
        f" {_against(rates, RATE_BAR, is_least=True)}",
        "the same of a second pool with the fixed window, the noise:"
        f" {', '.join(interval_text(row['rate_over_fixed'], 2) for row in again)}",
        "the same of the drive without a store and verification, where the first layer is read"
        f" before all others are, over all at once: {_against(in_two, RATE_BAR, is_least=True)}",
    ]
    if result["loops"]:
        over = [loop["over_bound"] for loop in result["loops"]]
        verdicts = [verdict(one, LOOP_BAR) for one in over]
        counts = ", ".join(f"{verdicts.count(word)} {word}" for word in dict.fromkeys(verdicts))
        notes.append(
            f"layer by layer, the total over max(I/O, computation) + first layer (bar {LOOP_BAR}):"
            f" {counts}; at most {max(one['median'] for one in over):.2f}"
        )
        cases = [
            f"{loop['pages']} pages at {loop['factor']:g}, {_reach(loop)}"
            for loop, judged in zip(result["loops"], verdicts, strict=True)
            if judged != REACHED
        ]
        if cases:
            notes.append(f"what is not reached or not resolved: {'; '.join(cases)}")
        for pages in sorted({loop["pages"] for loop in result["loops"]}):
            loops = [loop for loop in result["loops"] if loop["pages"] == pages]
            factors = ", ".join(f"{loop['factor']:g}" for loop in loops)
            row, idle = (
                ", ".join(f"{loop['possible'][name]:.2f}" for loop in loops)
                for name in ("in_a_row", "idle")
            )
            notes.append(
                f"{pages} pages, computations of {factors} times a layer's I/O:"
                f" {_against([loop['over_bound'] for loop in loops], LOOP_BAR)}; calculated, the"
                " best of groups of whole layers that are read one after another, with the pause of"
                f" a layer right after another: {row}; after an idle time as long as a"
                f" computation: {idle}"
            )
    window = result["windows"][FOUND]["window_nbytes"] / MiB
    return [
        *notes,
        f"window at the end: {window:.1f} MiB; fixed: {FIXED_COMMANDS} commands of 1 MiB",
    ]


def _strict_ms(row: dict[str, Any], result: dict[str, Any]) -> float:
    """The bound of a first layer in which no slice is transferred twice."""
    single_ms = result["single_command_ms"]
    slice_ms = (row["bound_ms"] - single_ms) / row["pages"]
    return float(row["bound_ms"] - min(slice_ms, single_ms))


def _over(interval: Mapping[str, float], divisor: float) -> dict[str, float]:
    return {name: value / divisor for name, value in interval.items()}


def _reach(loop: Mapping[str, Any]) -> str:
    """Whether the pauses of the drive alone exclude the bar of a loop."""
    is_out = min(loop["possible"].values()) > LOOP_BAR
    return "proven out of reach" if is_out else "not proven out of reach"


def _against(found: Sequence[Mapping[str, float]], bar: float, *, is_least: bool = False) -> str:
    return ", ".join(
        f"{interval_text(one, 2)} {verdict(one, bar, is_least=is_least)}" for one in found
    )
