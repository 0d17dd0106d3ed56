"""Measures the gain from service threads and digest workers, on drives simulated in memory.

Jobs without data give the cost of a command; copies give the rate of verified and unverified
loads, with one drive, with two drives of a service thread each, and with one and a digest worker.
Loads that copy nothing give the digests alone: of as much memory, and of two slices that stay in
the caches.  Next to them one and two threads without an engine do the same copies and digests, so
that what a second thread gains on this machine is measured.  Two more such threads, of which one
copies and the other digests as much, bound how fast a verified load can be beside an unverified
one.  All calls of a work follow each other forwards and then backwards, so that their times have
the same middle, whatever else the machine does.
"""

from __future__ import annotations

import argparse
import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np

from tutti.base.arrays import U64
from tutti.base.terminal import ProgressFactory, table
from tutti.base.units import KiB, MiB
from tutti.bench.controller_memory import MemoryController
from tutti.bench.environment import describe
from tutti.bench.statistics import bootstrap_median, interval_text, median, ratios
from tutti.errors import ConfigError, MediumError
from tutti.gio_uring.controller_span import SpanController
from tutti.gio_uring.engine import PRIORITY_LOAD, Engine
from tutti.gio_uring.engine_structs import EngineStats
from tutti.gio_uring.iocb import Extents, PagedMemory
from tutti.gio_uring.memory import HostBuffer
from tutti.gio_uring.nvme_spec import OPCODE_READ, OPCODE_WRITE
from tutti.native import address, lib

HEAD = ("work", "drives", "workers", "unverified GB/s", "verified GB/s", "over one drive's")
_LBA_NBYTES = 4 * KiB
_TIMEOUT_S = 60.0
_VERIFIED_BAR = 0.97  # of an unverified load, while a core is free
_DRIVES_BAR = 1.7  # of one drive's verified loads, for two
_SLICE_NBYTES = 256 * KiB
_COMMAND_LAYERS, _COMMAND_PAGES = 64, 4096
_Work = tuple[str, int, int]  # with layers and pages; all works have as many bytes
_COPIES, _DIGESTS, _CACHED = ("copies", 16, 64), ("digests alone", 16, 64), ("in caches", 512, 2)
_WORKS = (_COPIES, _DIGESTS, _CACHED)
_SLICES = _COPIES[1] * _COPIES[2]
_GIGABYTES = _SLICES * _SLICE_NBYTES / 1e9
#: Drives and digest workers; the first of a work is compared with.
_SHAPES = {_COPIES: ((1, 0), (2, 0), (1, 1)), _DIGESTS: ((1, 0), (2, 0)), _CACHED: ((1, 0), (2, 0))}
_ROWS = tuple((work, shape) for work in _WORKS for shape in _SHAPES[work])
_COMMAND_SLICES = 4
#: Give seconds, by what they measure.
_Calls = dict[Any, Callable[[], float]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=31, help="rounds per row")


class _Rig:
    """An engine over drives of memory; page p lies on drive p modulo their number."""

    def __init__(
        self, shape: tuple[int, int], mode: str, layers: int, pages: int, slice_nbytes: int
    ) -> None:
        drives, workers = shape
        nlb = slice_nbytes // _LBA_NBYTES
        per_drive = -(-pages // drives)
        with ExitStack() as undo:
            nbytes = layers * per_drive * slice_nbytes
            span = SpanController([MemoryController([nbytes], mode=mode) for _ in range(drives)])
            undo.callback(span.close)
            self.engine = Engine(
                span,
                digest_workers=workers,
                command_nbytes_max=min(MiB, _COMMAND_SLICES * slice_nbytes),
            )
            undo.callback(self.engine.close)
            buffer = HostBuffer(layers * pages * slice_nbytes)
            buffer.array[:] = 7
            undo.callback(span.register(buffer).close)
            apart_nbytes = 0 if pages == _CACHED[2] else pages * slice_nbytes
            starts = np.arange(layers, dtype=np.uint64) * np.uint64(apart_nbytes)
            bases = (np.uint64(buffer.address) + starts)[:, None]
            self._memory = PagedMemory(bases, (slice_nbytes,), (slice_nbytes,), pages, buffer)
            counts = [len(range(i, pages, drives)) for i in range(drives)]
            nsids = list(range(1, drives + 1))
            self._extents = Extents([0] * drives, nsids, counts, nlb, per_drive * nlb)
            self._pages = self._memory.check_pages(np.arange(pages))
            self.digests = pages, layers
            self.close = undo.pop_all().close

    def seconds(self, opcode: int, digests: U64 | None = None) -> float:
        """From the submission of one job to its end."""
        job = self.engine.submit(
            opcode,
            self._extents,
            self._pages,
            self._memory,
            priority=PRIORITY_LOAD,
            digests=digests,
            compare=opcode == OPCODE_READ,
        )
        if not job.wait_released(_TIMEOUT_S) or (report := job.report()).status:
            raise MediumError("a transfer in memory failed; look at the log")
        return int(report.done_ns - report.submitted_ns) / 1e9


class _Threads:
    """Copies and digests of as many slices as a load has, by threads without an engine."""

    def __init__(self) -> None:
        self._source, self._target = (HostBuffer(_SLICES * _SLICE_NBYTES) for _ in range(2))
        for buffer in (self._source, self._target):
            buffer.array[:] = 7
        starts = np.arange(_SLICES, dtype=np.uint64) * np.uint64(_SLICE_NBYTES)
        self._addresses = np.uint64(self._target.address) + starts
        self._sizes = np.full(_SLICES, _SLICE_NBYTES, np.uint64)

    def seconds(self, *parts: Callable[[], None]) -> float:
        """Until all parts have ended: the first in this thread, each other in one of its own."""
        others = [threading.Thread(target=part, daemon=True) for part in parts[1:]]
        began_s = time.perf_counter()
        for other in others:
            other.start()
        parts[0]()
        for other in others:
            other.join(_TIMEOUT_S)
        return time.perf_counter() - began_s

    def shares(self, work: _Work, count: int) -> list[Callable[[], None]]:
        """A work in as many parts as there are threads, the slices dealt in turn."""
        if work is _COPIES:
            return [partial(self._copy_and_digest, i, count) for i in range(count)]
        _, layers, pages = work
        where = np.tile(self._addresses[:pages], layers) if work is _CACHED else self._addresses
        return [partial(self._digest, where[i::count].copy()) for i in range(count)]

    def copy(self) -> None:
        for i in range(_SLICES):
            self._copy(i, i + 1)

    def digest(self) -> None:
        self._digest(self._addresses)

    def _copy_and_digest(self, i: int, count: int) -> None:
        """As an engine does: as many slices at a time as a command has."""
        for command in range(i, _SLICES // _COMMAND_SLICES, count):
            first, end = command * _COMMAND_SLICES, (command + 1) * _COMMAND_SLICES
            self._copy(first, end)
            self._digest(self._addresses[first:end])

    def _copy(self, first: int, end: int) -> None:
        part = slice(first * _SLICE_NBYTES, end * _SLICE_NBYTES)
        self._target.array[part] = self._source.array[part]

    def _digest(self, where: U64) -> None:
        library, sizes = lib(), address(self._sizes)
        library.tutti_xxh3_64_isa(library.tutti_isa_best(), address(where), sizes, len(where))


def run(args: argparse.Namespace, progress: ProgressFactory) -> dict[str, Any]:
    """Commands without data, then loads of every shape in turns.  Raises ConfigError."""
    if args.rounds < 3:
        raise ConfigError("--rounds counts from 3")
    with progress("threads", 2 * args.rounds) as bar:
        commands = []
        with contextlib.closing(
            _Rig((1, 0), "zero_copy", _COMMAND_LAYERS, _COMMAND_PAGES, _LBA_NBYTES)
        ) as rig:
            rig.engine.command_nlb_max = 1
            for _ in range(args.rounds):
                commands.append(_commands(rig))
                bar.advance(1)
        rows, bound = _loads(args.rounds, lambda: bar.advance(1))
    return {
        "benchmark": "threads",
        "source": "emulated",
        "controller": "memory",
        "commands_per_s": bootstrap_median([rate for rate, _ in commands]).to_dict(),
        "cpu_ns_per_command": median([cpu_ns for _, cpu_ns in commands]),
        "rows": rows,
        "bound": bound,
        "rounds": args.rounds,
        "machine": describe(),
    }


def _commands(rig: _Rig) -> tuple[float, float]:
    """(commands per second, CPU ns per command) of one job."""
    before = rig.engine.stats()
    seconds = rig.seconds(OPCODE_READ)
    after = rig.engine.stats()
    commands = int(after.commands - before.commands)
    return commands / seconds, (after.thread_cpu_ns - before.thread_cpu_ns) / commands


def _loads(rounds: int, advance: Callable[[], None]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """A row for each shape, and what threads without an engine do."""
    with ExitStack() as stack:
        rigs: dict[Any, _Rig] = {}
        calls: dict[_Work, _Calls] = {work: {} for work in _WORKS}
        for row in _ROWS:
            work, shape = row
            mode = "copy" if work is _COPIES else "zero_copy"
            rigs[row] = rig = _Rig(shape, mode, *work[1:], _SLICE_NBYTES)
            stack.callback(rig.close)
            digests: U64 = np.zeros(rig.digests, np.uint64)
            rig.seconds(OPCODE_WRITE, digests)
            calls[work][row, "unverified"] = partial(rig.seconds, OPCODE_READ)
            calls[work][row, "verified"] = partial(rig.seconds, OPCODE_READ, digests)
        threads = _Threads()
        for work in _WORKS:
            for count in (1, 2):
                calls[work][work, count] = partial(threads.seconds, *threads.shares(work, count))
        calls[_COPIES]["copies"] = partial(threads.seconds, threads.copy)
        calls[_COPIES]["both"] = partial(threads.seconds, threads.copy, threads.digest)
        rates: dict[Any, list[float]] = {}
        before = {row: rig.engine.stats() for row, rig in rigs.items()}
        for _ in range(rounds):
            for one in calls.values():
                for name, rate in _rates(one).items():
                    rates.setdefault(name, []).append(rate)
            advance()
        rows = [_row(row, rates, before[row], rig.engine.stats()) for row, rig in rigs.items()]
    return rows, {
        "copies_gb_per_s": bootstrap_median(rates["copies"]).to_dict(),
        "beside_digests_gb_per_s": bootstrap_median(rates["both"]).to_dict(),
        "beside_over_alone": bootstrap_median(ratios(rates["both"], rates["copies"])).to_dict(),
        "threads": [
            {
                "work": work[0],
                "one_gb_per_s": bootstrap_median(rates[work, 1]).to_dict(),
                "two_over_one": bootstrap_median(ratios(rates[work, 2], rates[work, 1])).to_dict(),
            }
            for work in _WORKS
        ],
    }


def _rates(calls: _Calls) -> dict[Any, float]:
    """GB/s of calls that are made in their order and then backwards."""
    seconds = dict.fromkeys(calls, 0.0)
    for name in (*calls, *reversed(calls)):
        seconds[name] += calls[name]()
    return {name: 2 * _GIGABYTES / took_s for name, took_s in seconds.items()}


def _row(
    row: Any, rates: dict[Any, list[float]], before: EngineStats, after: EngineStats
) -> dict[str, Any]:
    work, (drives, workers) = row
    plain, verified = rates[row, "unverified"], rates[row, "verified"]
    first = rates[(work, _SHAPES[work][0]), "verified"]
    return {
        "work": work[0],
        "drives": drives,
        "digest_workers": workers,
        "unverified_gb_per_s": bootstrap_median(plain).to_dict(),
        "verified_gb_per_s": bootstrap_median(verified).to_dict(),
        "verified_over_first": bootstrap_median(ratios(verified, first)).to_dict(),
        "verified_over_unverified": bootstrap_median(ratios(verified, plain)).to_dict(),
        # Of the commands of verified loads, which are as many as those of others.
        "digests_offloaded": int(after.digests_offloaded - before.digests_offloaded),
        "verified_commands": int(after.commands - before.commands) // 2,
    }


def rows_of(result: dict[str, Any]) -> list[Sequence[Any]]:
    """What a table shows of the loads."""
    return [
        (
            row["work"],
            row["drives"],
            row["digest_workers"],
            round(row["unverified_gb_per_s"]["median"], 2),
            round(row["verified_gb_per_s"]["median"], 2),
            round(row["verified_over_first"]["median"], 2),
        )
        for row in result["rows"]
    ]


def notes_of(result: dict[str, Any]) -> list[str]:
    commands = result["commands_per_s"]["median"] / 1e6
    (beside,) = (row for row in result["rows"] if row["digest_workers"])
    bound = result["bound"]
    verified = [
        f"with a worker, verified over unverified (bar {_VERIFIED_BAR:g}): "
        f"{interval_text(beside['verified_over_unverified'], 2)}; without an engine, copies beside"
        f" a thread that digests as much over copies alone"
        f" ({bound['copies_gb_per_s']['median']:.2f} GB/s): "
        f"{interval_text(bound['beside_over_alone'], 2)}"
    ]
    if "threads" in bound:
        two = (row for row in result["rows"] if row["drives"] == 2)
        drives = ", ".join(_scale(row, "verified_over_first") for row in two)
        plain = ", ".join(_scale(row, "two_over_one") for row in bound["threads"])
        verified += [
            f"the worker hashed for {beside['digests_offloaded']} of"
            f" {beside['verified_commands']} commands, the service thread for the others",
            f"verified loads, two drives over one (bar {_DRIVES_BAR:g}): {drives}; without an"
            f" engine, two threads over one that do as much: {plain}",
        ]
    return [
        *verified,
        f"commands without data through jobs: {commands:.2f} million/s a thread, "
        f"{result['cpu_ns_per_command']:.0f} ns of CPU each",
        "emulated: copies from memory of this process, one service thread per drive",
    ]


def _scale(row: dict[str, Any], name: str) -> str:
    return f"{row['work']} {interval_text(row[name], 2)}"


def report(result: dict[str, Any]) -> str:
    return "\n".join([table(list(HEAD), [list(row) for row in rows_of(result)]), *notes_of(result)])
