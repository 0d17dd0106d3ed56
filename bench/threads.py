"""Measures the gain from service threads and digest workers, on drives simulated in memory.

Jobs without data give the cost of a command.  Copies give the rate of verified and unverified
loads, four in flight: with one drive, with two drives of one service thread each, and with one
drive and a digest worker.  Loads that copy nothing give the cost of digests alone, over as much
memory and over two slices that stay in the caches.  No load is started by the main thread, as in
`bench short`: its calls are made by another thread, and wait while service threads hash on all
processors.  As controls, threads without an engine, pinned to one processor each, start together
and make the same native calls; two share the memory of one, as service threads do.  Two over one is
what a second processor gains on this machine, in wall time and in CPU time; it is no limit where an
engine gains more.  As the control of the worker, one thread copies and hands each command's bytes
to another one, which digests them, or none of them.  That is what digests on one processor cost
copies on the other, but not the cost of handing over.  The calls of a work are made forwards and
then backwards, so that their times have the same middle, whatever else the machine does.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import itertools
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np

from tutti.base.arrays import U64
from tutti.base.interrupts import uninterrupted
from tutti.base.terminal import ProgressFactory
from tutti.base.units import KiB, MiB, format_nbytes
from tutti.bench.controller_memory import MemoryController
from tutti.bench.environment import describe
from tutti.bench.statistics import bootstrap_median, interval_text, median, ratios
from tutti.errors import ConfigError, MediumError
from tutti.gio_uring.controller_span import SpanController
from tutti.gio_uring.engine import PRIORITY_LOAD, Engine
from tutti.gio_uring.engine_structs import EngineStats
from tutti.gio_uring.iocb import Extents, PagedMemory
from tutti.gio_uring.job import Job
from tutti.gio_uring.memory import HostBuffer
from tutti.gio_uring.nvme_spec import OPCODE_READ, OPCODE_WRITE
from tutti.native import address, lib

HEAD = ("work", "drives", "workers", "unverified GB/s", "verified GB/s", "over one drive's")
_LBA_NBYTES = 4 * KiB
_TIMEOUT_S = 60.0
_VERIFIED_BAR = 0.97  # verified over unverified rate, while a core is free
_DRIVES_BAR = 1.7  # rate of verified loads with two drives over one
_SLICE_NBYTES = 256 * KiB
_COMMAND_LAYERS, _COMMAND_PAGES = 64, 4096
_Work = tuple[str, int, int]  # with layers and pages; all works have as many bytes
_COPIES, _DIGESTS, _CACHED = ("copies", 16, 64), ("digests alone", 16, 64), ("in caches", 512, 2)
_WORKS = (_COPIES, _DIGESTS, _CACHED)
_SLICES = _COPIES[1] * _COPIES[2]
_GIGABYTES = _SLICES * _SLICE_NBYTES / 1e9
#: (drives, digest workers) by work; the first is the baseline.
_SHAPES = {_COPIES: ((1, 0), (2, 0), (1, 1)), _DIGESTS: ((1, 0), (2, 0)), _CACHED: ((1, 0), (2, 0))}
_ROWS = tuple((work, shape) for work in _WORKS for shape in _SHAPES[work])
_COMMAND_SLICES = 4
_COMMAND_NBYTES = _COMMAND_SLICES * _SLICE_NBYTES
_STARTS = np.arange(_COMMAND_SLICES, dtype=np.uint64) * np.uint64(_SLICE_NBYTES)
_SIZES = np.full(_COMMAND_SLICES, _SLICE_NBYTES, np.uint64)
_JOBS = 4  # loads in flight together, so that a service thread starts once for several
#: Works of pinned threads: (the work that they do, bytes of memory of all together).
_CONTROLS = ((_COPIES, 256 * MiB), (_DIGESTS, 256 * MiB), (_CACHED, 512 * KiB), (_CACHED, 16 * KiB))
_WALL, _CPU = "two_over_one", "two_over_one_by_cpu_time"
#: Functions that return seconds, by the measured work.
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
            self.cpu_s: list[float] = []
            self.close = undo.pop_all().close

    @uninterrupted()  # on a thread, as in a server
    def seconds(self, opcode: int, digests: U64 | None = None, jobs: int = 1) -> float:
        """Seconds a job, from the first submission to the last end of jobs in flight together.

        With digests, also records their CPU time.
        """
        before = self.engine.stats()
        submitted = [self._submit(opcode, digests) for _ in range(jobs)]
        reports = [job.report() for job in submitted if job.wait_released(_TIMEOUT_S)]
        if len(reports) < jobs or any(report.status for report in reports):
            raise MediumError("a transfer in memory failed; look at the log")
        if digests is not None:
            cpu_ns = int(self.engine.stats().thread_cpu_ns - before.thread_cpu_ns)
            self.cpu_s.append(cpu_ns / 1e9)
        ended_ns = max(int(report.done_ns) for report in reports)
        return (ended_ns - int(reports[0].submitted_ns)) / 1e9 / jobs

    def _submit(self, opcode: int, digests: U64 | None) -> Job:
        return self.engine.submit(
            opcode,
            self._extents,
            self._pages,
            self._memory,
            priority=PRIORITY_LOAD,
            digests=digests,
            compare=opcode == OPCODE_READ,
        )


class _Pinned:
    """Long-lived threads without an engine, each with its own processor."""

    def __init__(self) -> None:
        cpus = sorted(os.sched_getaffinity(0))
        self._threads = [
            ThreadPoolExecutor(1, "pinned", os.sched_setaffinity, (0, {cpu}))
            for cpu in (cpus[0], cpus[-1])
        ]
        self._turns = itertools.cycle(self._threads)  # a thread alone is on each in turn
        self._source, self._target = (HostBuffer(_SLICES * _SLICE_NBYTES) for _ in range(2))
        self._source.array[:] = self._target.array[:] = 7
        self.copied: SimpleQueue[int] = SimpleQueue()
        self.cpu_s: dict[Any, list[float]] = {}

    def close(self) -> None:
        for thread in self._threads:
            thread.shutdown()

    def seconds(self, name: Any, *parts: Callable[[], None]) -> float:
        """Seconds from the start of the first part to the end of the last one."""
        barrier = threading.Barrier(len(parts))

        def timed(part: Callable[[], None]) -> tuple[float, float, float]:
            barrier.wait(_TIMEOUT_S)
            began_s, cpu_s = time.perf_counter(), time.thread_time()
            part()
            return began_s, time.perf_counter(), time.thread_time() - cpu_s

        threads = self._threads if len(parts) > 1 else [next(self._turns)]
        waiting = [one.submit(timed, part) for one, part in zip(threads, parts, strict=True)]
        began_s, ended_s, cpu_s = zip(*(one.result(_TIMEOUT_S) for one in waiting), strict=True)
        self.cpu_s.setdefault(name, []).append(sum(cpu_s))
        return float(max(ended_s) - min(began_s))

    def shared_seconds(self, name: Any, *parts: Callable[[], None]) -> float:
        """Seconds per load's bytes, if each part processes that many."""
        return self.seconds(name, *parts) / len(parts)

    def share(self, work: _Work, nbytes: int, who: int, threads: int) -> Callable[[], None]:
        """A function that processes as many bytes as a load has, by repeating over its part of
        `nbytes` of memory, which threads divide equally.
        """
        size = _COMMAND_NBYTES if work is _COPIES else min(nbytes // 2, _SLICE_NBYTES)
        count, part = _SLICES * _SLICE_NBYTES // size, nbytes // threads
        starts = np.arange(count, dtype=np.uint64) * np.uint64(size) % np.uint64(part)
        starts += np.uint64(who * part)
        if work is _COPIES:
            return partial(self.copy, starts.tolist(), _digest_command)
        where = np.uint64(self._target.address) + starts
        return partial(_digest, where, np.full(count, size, np.uint64))

    def copy(self, starts: Sequence[int], then: Callable[[int], object]) -> None:
        """Copies in units of a command's slices, as an engine does; `then` gets their addresses."""
        source, target = self._source.address, self._target.address
        for start in starts:
            ctypes.memmove(target + start, source + start, _COMMAND_NBYTES)
            then(target + start)

    def follow(self, slices: int) -> None:
        """Digests so many slices of each command of a load, as soon as they are copied."""
        for _ in range(_SLICES // _COMMAND_SLICES):
            _digest_command(self.copied.get(timeout=_TIMEOUT_S), slices)


def _digest_command(start: int, slices: int = _COMMAND_SLICES) -> None:
    """Digests slices of a command, which follow each other."""
    _digest(_STARTS[:slices] + np.uint64(start), _SIZES[:slices])


def _digest(where: U64, sizes: U64) -> None:
    library = lib()
    isa = library.tutti_isa_best()
    library.tutti_xxh3_64_isa(isa, address(where), address(sizes), len(where))


def _stolen_s() -> float:
    """Time of all processors that the hypervisor gave to others, since the machine started."""
    cpu = Path("/proc/stat").read_text().split("\n", 1)[0]  # proc(5): "cpu", 7 others, steal
    return int(cpu.split()[8]) / os.sysconf("SC_CLK_TCK")


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
    """A row for each shape, and the controls without an engine."""
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
            rig.cpu_s.clear()
            calls[work][row, "unverified"] = partial(rig.seconds, OPCODE_READ, None, _JOBS)
            calls[work][row, "verified"] = partial(rig.seconds, OPCODE_READ, digests, _JOBS)
        pinned = _Pinned()
        stack.callback(pinned.close)
        for control in _CONTROLS:
            for count in (1, 2):
                name = control, count
                parts = [pinned.share(*control, who, count) for who in range(count)]
                calls[control[0]][name] = partial(pinned.shared_seconds, name, *parts)
        starts = range(0, _SLICES * _SLICE_NBYTES, _COMMAND_NBYTES)
        copy = partial(pinned.copy, starts, pinned.copied.put)
        for kind, slices in (("copies", 0), ("behind", _COMMAND_SLICES)):
            follow = partial(pinned.follow, slices)
            calls[_COPIES][kind] = partial(pinned.seconds, kind, copy, follow)
        rates: dict[Any, list[float]] = {}
        stolen: list[float] = []
        before = {row: rig.engine.stats() for row, rig in rigs.items()}
        for _ in range(rounds):
            began_s, stolen_s = time.perf_counter(), _stolen_s()
            for one in calls.values():
                for name, rate in _rates(one).items():
                    rates.setdefault(name, []).append(rate)
            stolen.append((_stolen_s() - stolen_s) / (time.perf_counter() - began_s))
            advance()
        rows = [_row(row, rates, before[row], rigs) for row in rigs]
    return rows, {
        "copies_gb_per_s": bootstrap_median(rates["copies"]).to_dict(),
        "behind_over_alone": bootstrap_median(ratios(rates["behind"], rates["copies"])).to_dict(),
        "pinned": [_control(control, rates, pinned.cpu_s) for control in _CONTROLS],
        "stolen_cores": stolen,
    }


def _rates(calls: _Calls) -> dict[Any, float]:
    """GB/s of calls that are made in their order and then backwards."""
    seconds = dict.fromkeys(calls, 0.0)
    for name in (*calls, *reversed(calls)):
        seconds[name] += calls[name]()
    return {name: 2 * _GIGABYTES / took_s for name, took_s in seconds.items()}


def _control(
    control: tuple[_Work, int], rates: dict[Any, list[float]], cpu_s: dict[Any, list[float]]
) -> dict[str, Any]:
    """Gain of a second pinned thread in wall time, and in CPU time, which excludes waiting."""
    one, two = (control, 1), (control, 2)
    by_cpu = [4 * ratio for ratio in ratios(_rounds(cpu_s[one]), _rounds(cpu_s[two]))]
    return {
        "work": control[0][0],
        "one_nbytes": control[1],
        "nbytes": control[1] // 2,
        "one_gb_per_s": bootstrap_median(rates[one]).to_dict(),
        _WALL: bootstrap_median(ratios(rates[two], rates[one])).to_dict(),
        _CPU: bootstrap_median(by_cpu).to_dict(),
    }


def _rounds(values: list[float]) -> list[float]:
    """Sums of the two calls of each round."""
    sums: list[float] = np.array(values).reshape(-1, 2).sum(axis=1).tolist()
    return sums


def _row(
    row: Any, rates: dict[Any, list[float]], before: EngineStats, rigs: dict[Any, _Rig]
) -> dict[str, Any]:
    work, (drives, workers) = row
    rig, first_rig = rigs[row], rigs[work, _SHAPES[work][0]]
    after = rig.engine.stats()
    by_cpu = [2 * one for one in ratios(_rounds(first_rig.cpu_s), _rounds(rig.cpu_s))]
    plain, verified = rates[row, "unverified"], rates[row, "verified"]
    first = rates[(work, _SHAPES[work][0]), "verified"]
    return {
        "work": work[0],
        "drives": drives,
        "digest_workers": workers,
        "unverified_gb_per_s": bootstrap_median(plain).to_dict(),
        "verified_gb_per_s": bootstrap_median(verified).to_dict(),
        "verified_over_first": bootstrap_median(ratios(verified, first)).to_dict(),
        **({_CPU: bootstrap_median(by_cpu).to_dict()} if drives == 2 else {}),
        "verified_over_unverified": bootstrap_median(ratios(verified, plain)).to_dict(),
        # Of the commands of verified loads; unverified loads have as many.
        "digests_offloaded": int(after.digests_offloaded - before.digests_offloaded),
        "verified_commands": int(after.commands - before.commands) // 2,
    }


def rows_of(result: dict[str, Any]) -> list[Sequence[Any]]:
    """Rows of the table of loads."""
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
    gained = beside["verified_over_unverified"]
    worker = f"with a worker, verified over unverified (bar {_VERIFIED_BAR:g}): "
    worker += interval_text(gained, 2)
    behind = bound["behind_over_alone"]
    ends = behind["low"], behind["high"]
    worker += f", {_verdict(gained, _VERIFIED_BAR, ends, ends)}; without an engine, copies"
    worker += " whose bytes another thread digests over copies that are handed over as often"
    worker += f" ({bound['copies_gb_per_s']['median']:.2f} GB/s): {interval_text(behind, 2)}"
    two = [row for row in result["rows"] if row["drives"] == 2]
    scales = ", ".join(_scale(row["work"], row["verified_over_first"]) for row in two)
    return [
        worker,
        f"the worker hashed for {beside['digests_offloaded']} of"
        f" {beside['verified_commands']} commands, the service thread for the others",
        f"verified loads, two drives over one (bar {_DRIVES_BAR:g}): {scales}",
        "the same by the CPU time of the service threads, so without the time in which they"
        f" wait: {', '.join(_scale(row['work'], row[_CPU]) for row in two)}",
        *map(_control_text, bound["pinned"]),
        *_verdicts(two, bound["pinned"]),
        f"cores that the hypervisor gave to others: {median(bound['stolen_cores']):.3f} in the"
        f" median of the rounds, at most {max(bound['stolen_cores']):.3f}",
        f"commands without data through jobs: {commands:.2f} million/s a thread, "
        f"{result['cpu_ns_per_command']:.0f} ns of CPU each",
        "emulated: copies from memory of this process, one service thread per drive",
    ]


def _scale(name: str, interval: dict[str, float]) -> str:
    return f"{name} {interval_text(interval, 2)}"


def _control_text(control: dict[str, Any]) -> str:
    each, one = format_nbytes(control["nbytes"]), format_nbytes(control["one_nbytes"])
    return (
        f"without an engine, {control['work']}, {each} for each of two pinned threads over one with"
        f" {one}"
        f" ({control['one_gb_per_s']['median']:.1f} GB/s):"
        f" {interval_text(control[_WALL], 2)}; by CPU time {interval_text(control[_CPU], 2)}"
    )


def _verdicts(rows: list[dict[str, Any]], controls: list[dict[str, Any]]) -> list[str]:
    """For each work: whether its interval reached the bar, or what its best controls did."""
    lines = []
    for row in rows:
        of_work = [control for control in controls if control["work"] == row["work"]]
        wall, cpu = (
            [max(control[name][end] for control in of_work) for end in ("low", "high")]
            for name in (_WALL, _CPU)
        )
        said = _verdict(row["verified_over_first"], _DRIVES_BAR, wall, cpu)
        lines.append(f"{row['work']}, {_DRIVES_BAR:g} times with two drives: {said}")
    return lines


def _verdict(
    gained: dict[str, float], bar: float, wall: Sequence[float], cpu: Sequence[float]
) -> str:
    """wall, cpu: low and high ends of what pinned threads gain."""
    if gained["low"] >= bar:
        return "reached"
    if gained["high"] >= bar:
        return "NOT RESOLVED: the bar is within the interval"
    if gained["low"] > wall[1]:
        return "NOT REACHED; no limit is known: the engine did better than pinned threads"
    if wall[0] >= bar:
        return "NOT REACHED, and the engine is to blame: pinned threads reach it"
    if wall[1] >= bar or cpu[0] < bar <= cpu[1]:
        return "NOT REACHED; not resolved whether pinned threads reach it"
    if cpu[0] >= bar:
        return "NOT REACHED: pinned threads had to wait too, whatever for"
    return "NOT REACHED, nor by pinned threads without an engine on this machine"
