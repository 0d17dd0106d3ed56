"""Measures the gain from service threads and digest workers, on drives simulated in memory.

Jobs without data give the cost of a command; copies give the rate of verified and unverified
loads, with one drive, with one and a digest worker, and with two drives of a service thread each.
In the same rounds loads that copy nothing give the digests alone: of as much memory, which bounds
what a second drive can gain on this machine, and of two slices that stay in the caches.  And two
threads without an engine, of which one copies and the other digests as much, bound how fast a
verified load can be beside an unverified one.
"""

from __future__ import annotations

import argparse
import contextlib
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
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
from tutti.gio_uring.iocb import Extents, PagedMemory
from tutti.gio_uring.memory import HostBuffer
from tutti.gio_uring.nvme_spec import OPCODE_READ, OPCODE_WRITE
from tutti.native import address, lib

HEAD = ("work", "drives", "workers", "unverified GB/s", "verified GB/s", "over one drive's")
_LBA_NBYTES = 4 * KiB
_TIMEOUT_S = 60.0
_VERIFIED_BAR = 0.97  # of an unverified load, while a core is free
_SLICE_NBYTES = 256 * KiB
_COMMAND_LAYERS, _COMMAND_PAGES = 64, 4096
#: Work, with layers and pages, drives and digest workers; the first row of a work is compared with.
_COPIES, _DIGESTS, _CACHED = ("copies", 16, 64), ("digests alone", 16, 64), ("in caches", 512, 2)
_WORKS = (_COPIES, _DIGESTS, _CACHED)
_ROWS = (*((work, (drives, 0)) for work in _WORKS for drives in (1, 2)), (_COPIES, (1, 1)))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=15, help="rounds per row")


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
                span, digest_workers=workers, command_nbytes_max=min(MiB, 4 * slice_nbytes)
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
            self.nbytes, self.digests = layers * pages * slice_nbytes, (pages, layers)
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


class _Bound:
    """Copies of as many slices as a load has, alone and while another thread digests them."""

    def __init__(self) -> None:
        _, layers, pages = _COPIES
        self.nbytes = layers * pages * _SLICE_NBYTES
        self._source, self._target = HostBuffer(self.nbytes), HostBuffer(self.nbytes)
        self._source.array[:] = 7
        self._target.array[:] = 7
        starts = np.arange(layers * pages, dtype=np.uint64) * np.uint64(_SLICE_NBYTES)
        self._addresses = np.uint64(self._target.address) + starts
        self._sizes = np.full(len(starts), _SLICE_NBYTES, np.uint64)

    def copies_s(self) -> float:
        """Seconds of the copies."""
        began_s = time.perf_counter()
        self._copy()
        return time.perf_counter() - began_s

    def both_s(self) -> float:
        """Until the copies have ended, and the digests of another thread."""
        other = threading.Thread(target=self._digest, daemon=True)
        began_s = time.perf_counter()
        other.start()
        self._copy()
        other.join(_TIMEOUT_S)
        return time.perf_counter() - began_s

    def _copy(self) -> None:
        sources, targets = (
            buffer.array.reshape(-1, _SLICE_NBYTES) for buffer in (self._source, self._target)
        )
        for source, target in zip(sources, targets, strict=True):
            target[:] = source

    def _digest(self) -> None:
        library = lib()
        where, nbytes = address(self._addresses), address(self._sizes)
        library.tutti_xxh3_64_isa(library.tutti_isa_best(), where, nbytes, len(self._sizes))


def run(args: argparse.Namespace, progress: ProgressFactory) -> dict[str, Any]:
    """Commands without data, then loads of every shape in turns.  Raises ConfigError."""
    if args.rounds < 3:
        raise ConfigError("--rounds counts from 3")
    with progress("threads", args.rounds * (1 + len(_ROWS))) as bar:
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


def _loads(rounds: int, advance: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """A row for each shape, and the bound of verified loads."""
    with ExitStack() as stack:
        rigs, bound = [], _Bound()
        alone: list[float] = []
        both: list[float] = []
        for work, shape in _ROWS:
            mode = "copy" if work is _COPIES else "zero_copy"
            rigs.append(_Rig(shape, mode, *work[1:], _SLICE_NBYTES))
        digests: list[U64] = [np.zeros(rig.digests, np.uint64) for rig in rigs]
        for rig, expected in zip(rigs, digests, strict=True):
            stack.callback(rig.close)
            rig.seconds(OPCODE_WRITE, expected)
        plain: list[list[float]] = [[] for _ in rigs]
        verified: list[list[float]] = [[] for _ in rigs]
        for turn in range(rounds):
            for i in range(len(rigs)) if turn % 2 else reversed(range(len(rigs))):
                gigabytes = rigs[i].nbytes / 1e9
                plain[i].append(gigabytes / rigs[i].seconds(OPCODE_READ))
                verified[i].append(gigabytes / rigs[i].seconds(OPCODE_READ, digests[i]))
                advance()
            alone.append(bound.nbytes / 1e9 / bound.copies_s())
            both.append(bound.nbytes / 1e9 / bound.both_s())
    works = [work for work, _ in _ROWS]
    first = [verified[works.index(work)] for work in works]
    rows = [
        {
            "work": work[0],
            "drives": drives,
            "digest_workers": workers,
            "unverified_gb_per_s": bootstrap_median(plain[i]).to_dict(),
            "verified_gb_per_s": bootstrap_median(verified[i]).to_dict(),
            "verified_over_first": bootstrap_median(ratios(verified[i], first[i])).to_dict(),
            "verified_over_unverified": bootstrap_median(ratios(verified[i], plain[i])).to_dict(),
        }
        for i, (work, (drives, workers)) in enumerate(_ROWS)
    ]
    return rows, {
        "copies_gb_per_s": bootstrap_median(alone).to_dict(),
        "beside_digests_gb_per_s": bootstrap_median(both).to_dict(),
        "beside_over_alone": bootstrap_median(ratios(both, alone)).to_dict(),
    }


def rows_of(result: dict[str, Any]) -> list[Sequence[Any]]:
    """What a table shows of the loads."""
    return [
        (
            row.get("work", "copies"),
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
    verified = [
        f"with a worker, verified over unverified (bar {_VERIFIED_BAR:g}): "
        f"{interval_text(beside['verified_over_unverified'], 2)}"
    ]
    if "bound" in result:
        bound = result["bound"]
        verified[0] += (
            "; without an engine, copies beside a thread that digests as much over copies alone"
            f" ({bound['copies_gb_per_s']['median']:.2f} GB/s): "
            f"{interval_text(bound['beside_over_alone'], 2)}"
        )
    return [
        *verified,
        f"commands without data through jobs: {commands:.2f} million/s a thread, "
        f"{result['cpu_ns_per_command']:.0f} ns of CPU each",
        "emulated: copies from memory of this process, one service thread per drive",
    ]


def report(result: dict[str, Any]) -> str:
    return "\n".join([table(list(HEAD), [list(row) for row in rows_of(result)]), *notes_of(result)])
