"""Measures short transfers: what a call costs its caller, and how long one page takes to be stored.

The calls are made in pools in memory, so that no disk plays a part: CPU time of the thread that
calls, until the call returns, after the transfer before has ended and for loads in a row.  The puts
of one page go to a file by direct I/O, in turns with plain writes of the same bytes and one record.
Pools are opened with the defaults of `tutti.open`, where transfers pass the scheduler's queue; rows
and puts "at once" have no profile.
"""

from __future__ import annotations

import argparse
import itertools
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tutti.base.terminal import ProgressFactory, table
from tutti.base.units import GiB, MiB
from tutti.bench.environment import describe
from tutti.bench.members import beside, temporary_members
from tutti.bench.pool_file import add_place_arguments, medium_of, pool_paths, temporary_pool
from tutti.bench.shape import parse_shape
from tutti.bench.statistics import bootstrap_median, interval_text, median, ratios
from tutti.errors import ConfigError
from tutti.gio_uring.memory import HostBuffer
from tutti.profiles.at_open import AUTO
from tutti.store import ObjectStore
from tutti.transfers.store_config import StoreConfig

HEAD = ("pages", "call", "best us", "median us", "bar us", "")
#: Microseconds of the caller for each call, and how many times its bytes and a record a put takes.
BARS_US = {"put": 60.0, "match and load": 100.0, "match and load, in a row": 100.0}
RATIO = 1.5
_PAGES = (1, 4, 16)
_SHAPE, _PAGE_SHAPE = "16x128KiB", "32x256KiB"  # 2 MiB and 8 MiB
_WARM, _ROW = 10, 8
_MEMORY = Path("/dev/shm")
_RECORD_NBYTES = 4096  # the block of a record
_WAIT_S = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_place_arguments(parser)
    parser.add_argument("--calls", type=int, default=130, help="calls of each kind")
    parser.add_argument("--rounds", type=int, default=31, help="puts of one page")


def run(args: argparse.Namespace, progress: ProgressFactory) -> dict[str, Any]:
    """Measures both.  Raises ConfigError for unacceptable arguments, Unsupported for devices."""
    if min(args.calls, args.rounds) < 1:
        raise ConfigError("--calls and --rounds count from 1")
    paths = pool_paths(args, "short")
    others = beside(paths, "no-digests"), beside(paths, "at-once"), beside(paths, "plain")
    in_memory = _MEMORY if _MEMORY.is_dir() else Path(medium_of(args))
    with progress("short transfers", 2) as bar:
        calls = _calls(in_memory, args.calls)
        bar.advance(1)
        page = _one_page(paths, *others, args.rounds)
        bar.advance(1)
    return {
        "benchmark": "short",
        "bars_us": BARS_US,
        "ratio_bar": RATIO,
        "calls_on": str(in_memory),
        "calls": calls,
        "page": page,
        "members": len(paths),
        "machine": describe(medium_of(args)),
    }


def _opened(
    stack: ExitStack,
    paths: list[str],
    shape: str,
    verify: str = "always",
    profile: str | None = AUTO,
) -> ObjectStore:
    layout, config = parse_shape(shape).layout(), StoreConfig(verify=verify)
    engine = {"profile": profile}
    pool = temporary_pool(paths, layout, GiB // 2, config=config, engine=engine)
    store: ObjectStore = stack.enter_context(pool)
    return store


def _calls(folder: Path, count: int) -> list[dict[str, Any]]:
    """A row for each number of pages and call."""
    rng = np.random.default_rng(1)
    took: dict[tuple[bool, int, str], list[float]] = {}
    with ExitStack() as stack:
        made = stack.enter_context(tempfile.TemporaryDirectory(dir=folder))
        stores = [
            _opened(stack, [f"{made}/scheduled.tutti"], _SHAPE),
            _opened(stack, [f"{made}/at-once.tutti"], _SHAPE, profile=None),
        ]
        for store in stores:
            store.allocate_memory(max(_PAGES))
        for turn, n, store in itertools.product(range(-_WARM, count), _PAGES, stores):
            for call, us in _call_costs(store, n, rng).items():
                if turn >= 0:
                    took.setdefault((store is stores[0], n, call), []).append(us)
    return [
        {
            "pages": n,
            "call": call,
            "scheduled": scheduled,
            "best_us": min(us),
            "median_us": median(us),
        }
        for (scheduled, n, call), us in took.items()
    ]


def _call_costs(store: ObjectStore, n: int, rng: np.random.Generator) -> dict[str, float]:
    """Microseconds of this thread for each call; everything has ended afterwards."""
    keys, pages = rng.integers(0, 256, (n, 16), np.uint8), np.arange(n)
    clock_ns = time.thread_time_ns

    def load() -> Any:
        return store.load(keys[: store.match(keys)], pages)

    times_ns = [clock_ns()]
    put = store.put(keys, pages)
    times_ns.append(clock_ns())
    put.wait(_WAIT_S)
    times_ns.append(clock_ns())
    loads = [load()]
    times_ns.append(clock_ns())
    loads[0].wait_settled(_WAIT_S)
    times_ns.append(clock_ns())
    loads = [load() for _ in range(_ROW)]
    times_ns.append(clock_ns())
    for ticket in loads:
        ticket.wait_settled(_WAIT_S)
    took_us = np.diff(times_ns)[::2] / 1e3 / (1, 1, _ROW)
    return dict(zip(BARS_US, took_us.tolist(), strict=True))


def _one_page(
    paths: list[str], undigested: list[str], at_once: list[str], plain: list[str], rounds: int
) -> dict[str, Any]:
    """Times of a put of one page, without digests, at once, of its bytes, and of a record.

    Each is of other bytes and to a place that was not written lately; plain writes take the members
    in turn.  Nothing is deleted, as the blocks of empty groups are deallocated and the next put
    would have to allocate them again: the pools are full and evict.
    """
    rng = np.random.default_rng(2)
    nbytes, pages = parse_shape(_PAGE_SHAPE).layout().object_nbytes, max(_PAGES)
    times: dict[str, list[float]] = {"bytes": [], "record": []}

    def timed(name: str, call: Callable[[], Any]) -> None:
        began_s = time.perf_counter()
        call()
        times.setdefault(name, []).append(time.perf_counter() - began_s)

    def put(name: str, page: int) -> None:
        keys = rng.integers(0, 256, (1, 16), np.uint8)
        timed(name, lambda: pools[name].put(keys, [page]).wait(_WAIT_S))

    with ExitStack() as stack:
        source = HostBuffer(pages * nbytes).array.reshape(pages, nbytes)
        source[:] = rng.integers(0, 256, source.shape, np.uint8)
        pools = {
            "put": _opened(stack, paths, _PAGE_SHAPE),
            "put, no digests": _opened(stack, undigested, _PAGE_SHAPE, verify="off"),
            "put, at once": _opened(stack, at_once, _PAGE_SHAPE, profile=None),
        }
        for store in pools.values():
            own = store.allocate_memory(pages)
            for page in range(pages):
                own.write(page, source[page])
        record, slots = source[0, :_RECORD_NBYTES].data, pools["put"].geometry.slots
        most = -(-slots // len(plain))
        stack.enter_context(temporary_members(plain, most * nbytes + MiB))
        fds: list[int] = []
        for path in plain:
            fds.append(os.open(path, os.O_RDWR | os.O_DIRECT))
            stack.callback(os.close, fds[-1])
        for turn in range(slots + rounds):  # every place was written before it counts
            page, fd = turn % pages, fds[turn % slots % len(fds)]
            offset = turn % slots // len(fds) * nbytes
            timed("bytes", partial(os.pwrite, fd, source[page].data, offset))
            timed("record", partial(os.pwrite, fd, record, most * nbytes))
            for name in list(pools)[:: 1 if turn % 2 else -1]:
                put(name, page)
    times = {name: took_s[slots:] for name, took_s in times.items()}
    floor = [a + b for a, b in zip(times["bytes"], times["record"], strict=True)]
    return {
        "nbytes": nbytes,
        "rounds": rounds,
        "ms": {name: median(took_s) * 1e3 for name, took_s in times.items()},
        "ratios": {name: bootstrap_median(ratios(times[name], floor)).to_dict() for name in pools},
    }


def _missed(value: float, bar: float) -> str:
    return "**not reached**" if value > bar else ""


def rows_of(result: dict[str, Any]) -> list[Sequence[Any]]:
    """The table below HEAD; a median that misses its bar is marked."""
    rows: list[Sequence[Any]] = []
    for row in result["calls"]:
        bar, us = result["bars_us"][row["call"]], row["median_us"]
        best = f"{row['best_us']:.0f}"
        call = row["call"] if row.get("scheduled", True) else f"{row['call']}, at once"
        rows.append((row["pages"], call, best, f"{us:.0f}", f"{bar:g}", _missed(us, bar)))
    return rows


def notes_of(result: dict[str, Any]) -> list[str]:
    """What the table does not say: the puts of one page."""
    page, bar = result["page"], result["ratio_bar"]
    parts = ", ".join(f"{name} {ms:.2f} ms" for name, ms in page["ms"].items())
    found = [
        f"{name} {interval_text(ratio)} {_missed(ratio['median'], bar)}".strip()
        for name, ratio in page["ratios"].items()
    ]
    return [
        f"calls: CPU time of the calling thread, pages of {_SHAPE}, on {result['calls_on']}",
        f"a page of {page['nbytes'] // MiB} MiB at durability `process`, medians of"
        f" {page['rounds']}: {parts}",
        f"over plain writes of its bytes and one record (bar {bar:g}): {'; '.join(found)}",
    ]


def report(result: dict[str, Any]) -> str:
    return "\n".join([table(HEAD, [list(row) for row in rows_of(result)]), *notes_of(result)])
