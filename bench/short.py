"""Measures short transfers: the cost of a call to its caller, and the time to store one page.

Calls use pools in memory, so that no disk is involved: CPU time of the calling thread until the
call returns, after the end of the transfer before, and in succession.  In the same random order,
controls without a bar measure the least possible cost: one native call that submits a command and
wakes the service thread, and models of the Python code of the calls (bench/path_model.py).  A call
and its model run together; alternately the first of the two, which is measured, is the call or the
model, so that both find the same caches.
Puts of one page go to a file or a device by direct I/O, as do plain writes of the same bytes and
one record: alternately, or one after the other on devices, which have room for one pool.
No call is made on the main thread, as in a server: a call there, which Ctrl-C may interrupt, is
executed by another thread, whose CPU time would not be counted.
Pools are opened with the defaults of `tutti.open`, with the scheduler's queue; rows and puts "at
once" have no profile.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tutti import arguments
from tutti.base.terminal import ProgressFactory
from tutti.base.units import GiB, MiB
from tutti.bench.environment import describe
from tutti.bench.members import beside, refuse, temporary_members
from tutti.bench.meter import in_turn
from tutti.bench.path_model import Frame, build, record
from tutti.bench.pool_file import add_place_arguments, medium_of, pool_paths, temporary_pool
from tutti.bench.prepared_read import PreparedRead
from tutti.bench.shape import parse_shape
from tutti.bench.statistics import bootstrap_median, interval_text, median, ratios
from tutti.bench.writable import options
from tutti.errors import ConfigError
from tutti.gio_uring.controller_file import FileController
from tutti.gio_uring.drives.generic_device import is_generic
from tutti.gio_uring.engine import Engine
from tutti.gio_uring.iocb import Extents, flat_memory
from tutti.gio_uring.memory import Bytes, HostBuffer
from tutti.gio_uring.named_drive import is_drive
from tutti.pool.places import is_device
from tutti.profiles.at_open import AUTO
from tutti.store import ObjectStore
from tutti.transfers.store_config import StoreConfig

HEAD = ("pages", "call", "best us", "median us", "bar us", "")
#: Calls whose microseconds for the caller are measured.
CALLS = ("put", "match and load", "match and load, in a row", "put, in a row")
BARS_US = dict(zip(CALLS, (60.0, 100.0, 100.0, 60.0), strict=True))
NATIVE = "one native call"  # of no pages
MODELS = ("put, model", "match and load, model")
RATIO = 1.5
_PAGES = (1, 4, 16)
_SHAPE, _PAGE_SHAPE = "16x128KiB", "32x256KiB"  # 2 MiB and 8 MiB
_WARM, _ROW, _PUT_ROW = 10, 8, 4
_ORDERS = 3  # of the files for puts of one page
_CALLS_NBYTES = 2 * GiB + 64 * MiB  # the reserve, a 64th, has room for a put's pages
_MEMORY = Path("/dev/shm")
_BLOCK_NBYTES = 4096  # of a record, too
_WAIT_S, _LIMIT_S = 60.0, 3600.0  # for a transfer, and for all of them
#: Pools that take puts of one page, by options.
_PUTS: dict[str, dict[str, Any]] = {
    "put": {},
    "put, no digests": {"verify": "off"},
    "put, at once": {"profile": None},
}
_PLAIN = "plain"
#: Prepares a turn's call, which is timed.
_Prepare = Callable[[int], Callable[[], object]]
_Calls = dict[str, _Prepare]
#: Number of steps of a model, by kind.
_Steps = dict[str, list[tuple[str, int]]]
#: Returns microseconds by call, or of the models.
_Measure = Callable[[bool], dict[str, float]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_place_arguments(parser)
    option = options(parser)
    option("--calls", 80, "calls of each kind")
    option("--rounds", 31, "puts of one page")
    option("--capacity", GiB // 2, "size of each pool", arguments.nbytes)


def run(args: argparse.Namespace, progress: ProgressFactory) -> dict[str, Any]:
    """Measures both.  Raises ConfigError for unacceptable arguments, Unsupported for drives whose
    blocks cannot be written by pwrite(2).
    """
    if min(args.calls, args.rounds) < 1:
        raise ConfigError("--calls and --rounds count from 1")
    paths = pool_paths(args, "short")
    why = "plain writes, which puts are compared with, take a folder or a block device"
    refuse(paths, why, lambda path: is_drive(path) or is_generic(path))
    in_memory = _MEMORY if _MEMORY.is_dir() else Path(medium_of(args))
    with progress("short transfers", 2) as bar, ThreadPoolExecutor(1) as thread:
        # First, because the place may be refused: it may be in use, or have content.
        puts = thread.submit(_one_page, paths, args.rounds, args.capacity, args.force)
        page = puts.result(_LIMIT_S)
        bar.advance(1)
        calls, steps = thread.submit(_calls, in_memory, args.calls).result(_LIMIT_S)
        bar.advance(1)
    return {
        "benchmark": "short",
        "bars_us": BARS_US,
        "ratio_bar": RATIO,
        "calls_on": str(in_memory),
        "calls": calls,
        "steps": steps,
        "page": page,
        "members": len(paths),
        "machine": describe(medium_of(args)),
    }


def _opened(
    stack: ExitStack,
    paths: list[str],
    shape: str,
    capacity_nbytes: int = GiB // 2,
    force: Sequence[str] = (),
    verify: str = "always",
    profile: str | None = AUTO,
) -> ObjectStore:
    layout, config = parse_shape(shape).layout(), StoreConfig(verify=verify)
    engine = {"profile": profile}
    pool = temporary_pool(paths, layout, capacity_nbytes, config=config, engine=engine, force=force)
    store: ObjectStore = stack.enter_context(pool)
    return store


def _calls(folder: Path, count: int) -> tuple[list[dict[str, Any]], _Steps]:
    """A row for each number of pages and call, and the steps of the models."""
    rng = np.random.default_rng(1)
    took: dict[tuple[bool, int, str], list[float]] = {}
    with ExitStack() as stack:
        made = stack.enter_context(tempfile.TemporaryDirectory(dir=folder))
        stores = [
            _opened(stack, [f"{made}/scheduled.tutti"], _SHAPE, _CALLS_NBYTES),
            _opened(stack, [f"{made}/at-once.tutti"], _SHAPE, _CALLS_NBYTES, profile=None),
        ]
        for store in stores:
            store.allocate_memory(max(_PAGES))
        cases: list[tuple[int, bool, _Measure]] = []
        steps: _Steps = {}
        for n, store in itertools.product(_PAGES, stores):
            trees = dict(zip(MODELS, _recorded(store, n, rng), strict=True))
            steps = steps or {model: sorted(tree.total().items()) for model, tree in trees.items()}
            models = [build(tree) for tree in trees.values()]
            measure = partial(_call_costs, store, models, n, rng)
            cases.append((n, store is stores[0], measure))
        native = _NativeCall(stack, Path(made) / "native")
        cases.append((0, True, lambda _: native.cost()))
        for turn in range(-_WARM, 2 * count):
            for i in rng.permutation(len(cases)):  # earlier calls leave caches cold
                n, scheduled, measure = cases[i]
                for call, us in measure(turn % 2 == 1).items():
                    if turn >= 0:
                        took.setdefault((scheduled, n, call), []).append(us)
    rows = [
        {
            "pages": n,
            "call": call,
            "scheduled": scheduled,
            "best_us": min(us),
            "median_us": median(us),
        }
        for (scheduled, n, call), us in sorted(took.items(), key=lambda case: _place(*case[0]))
    ]
    return rows, steps


def _place(scheduled: bool, n: int, call: str) -> tuple[bool, int, bool, int]:
    order = (CALLS[0], MODELS[0], CALLS[1], MODELS[1], *CALLS[2:], NATIVE)
    return not n, n, not scheduled, order.index(call)


def _recorded(store: ObjectStore, n: int, rng: np.random.Generator) -> list[Frame]:
    """Records the Python code of a put, and of a match with a load."""
    first, keys = rng.integers(0, 256, (2, n, 16), np.uint8)
    pages = np.arange(n)
    store.put(first, pages).wait(_WAIT_S)  # for work that is done only once

    def load() -> Any:
        return store.load(keys[: store.match(keys)], pages)

    trees = []
    for call in (partial(store.put, keys, pages), load):
        tree, ticket = record(call)
        ticket.wait(_WAIT_S)
        trees.append(tree)
    return trees


def _call_costs(
    store: ObjectStore,
    models: Sequence[Callable[[], object]],
    n: int,
    rng: np.random.Generator,
    modelled: bool,
) -> dict[str, float]:
    """Microseconds of this thread for each call, or for the models; waits for all transfers."""
    pages, clock_ns = np.arange(n), time.thread_time_ns

    def first_of(real: Callable[[], Any], model: Callable[[], object]) -> tuple[Any, float]:
        """Makes both calls; the ticket of the real one, and the microseconds of the first."""
        calls = (model, real) if modelled else (real, model)
        began_ns = clock_ns()
        result = calls[0]()
        took_ns = clock_ns() - began_ns
        return (result, calls[1]())[modelled], took_ns / 1e3

    def put() -> tuple[Bytes, float]:
        """Puts new keys and waits; the keys, and the put's microseconds."""
        keys = rng.integers(0, 256, (n, 16), np.uint8)
        ticket, us = first_of(partial(store.put, keys, pages), models[0])
        ticket.wait(_WAIT_S)
        return keys, us

    def load() -> Any:
        return store.load(keys[: store.match(keys)], pages)

    keys, put_us = put()
    ticket, load_us = first_of(load, models[1])
    ticket.wait_settled(_WAIT_S)
    began_ns = clock_ns()
    loads = [load() for _ in range(_ROW)]
    loads_us = (clock_ns() - began_ns) / 1e3
    for ticket in loads:
        ticket.wait_settled(_WAIT_S)
    put()  # warms the caches after loads
    puts_us = sum(put()[1] for _ in range(_PUT_ROW))
    if modelled:
        return dict(zip(MODELS, (put_us, load_us), strict=True))
    took_us = put_us, load_us, loads_us / _ROW, puts_us / _PUT_ROW
    return dict(zip(CALLS, took_us, strict=True))


class _NativeCall:
    """A call that submits a read of one block and wakes the service thread.  Its engine has its own
    file and no store.
    """

    def __init__(self, stack: ExitStack, path: Path) -> None:
        path.write_bytes(bytes(_BLOCK_NBYTES))
        controller = stack.enter_context(FileController([path], lba_nbytes=_BLOCK_NBYTES))
        self._engine = engine = Engine(controller)
        stack.callback(engine.close)
        buffer = HostBuffer(_BLOCK_NBYTES)
        stack.callback(controller.register(buffer).close)
        memory = flat_memory(buffer.address, _BLOCK_NBYTES, 1, buffer)
        where = Extents([0], [1], [1], 1), memory.check_pages([0]), memory
        self._read = PreparedRead(engine, *where, timeout_s=_WAIT_S)

    def cost(self) -> dict[str, float]:
        """Microseconds of this thread; the read has ended afterwards."""
        clock_ns = time.thread_time_ns
        job, submit = self._read.open()
        began_ns = clock_ns()
        result = submit()
        took_ns = clock_ns() - began_ns
        self._engine.check_started(job, result)
        job.wait_released(_WAIT_S)
        return {NATIVE: took_ns / 1e3}


def _one_page(
    paths: list[str], rounds: int, capacity_nbytes: int, force: list[str]
) -> dict[str, Any]:
    """Times of a put of one page (also without digests, and at once), and of plain writes of its
    bytes and of a record.

    They alternate, in files that are made again in another order after each third of the rounds, as
    places of a disk differ in speed; on devices, which have room for one pool, they run one after
    the other.  Each has other bytes and a place that was not written lately.  Nothing is deleted,
    because blocks of empty groups are deallocated, and the next put would allocate them again:
    pools are full and evict.
    """
    rng = np.random.default_rng(2)
    nbytes, pages = parse_shape(_PAGE_SHAPE).layout().object_nbytes, max(_PAGES)
    source = HostBuffer(pages * nbytes).array.reshape(pages, nbytes)
    source[:] = rng.integers(0, 256, source.shape, np.uint8)
    alone, names, slots = any(map(is_device, paths)), [*_PUTS, _PLAIN], 0
    times_s: dict[str, list[float]] = {}
    parts = [[name] for name in names] if alone else [in_turn(names, i) for i in range(_ORDERS)]
    for part, at_a_time in enumerate(parts):
        counted = rounds if alone else len(range(part, rounds, _ORDERS))
        with ExitStack() as stack:
            calls: _Calls = {}
            for name in at_a_time:
                where = paths if alone else beside(paths, name.replace(", ", "-"))
                if name == _PLAIN:
                    calls |= _plain_writes(stack, where, source, slots, force)
                    continue
                store = _opened(stack, where, _PAGE_SHAPE, capacity_nbytes, force, **_PUTS[name])
                slots = store.geometry.slots
                calls[name] = _puts(store, source, rng)
            for turn in range(slots + counted):  # counts only after every place was written
                for name in list(calls)[:: 1 if turn % 2 else -1]:
                    call = calls[name](turn)
                    began_s = time.perf_counter()
                    call()
                    if turn >= slots:
                        times_s.setdefault(name, []).append(time.perf_counter() - began_s)
    floor_s = [a + b for a, b in zip(times_s["bytes"], times_s["record"], strict=True)]
    return {
        "nbytes": nbytes,
        "rounds": rounds,
        "in_turns": not alone,
        "ms": {name: median(took_s) * 1e3 for name, took_s in times_s.items()},
        "ratios": {n: bootstrap_median(ratios(times_s[n], floor_s)).to_dict() for n in _PUTS},
    }


def _puts(store: ObjectStore, source: Bytes, rng: np.random.Generator) -> _Prepare:
    own = store.allocate_memory(len(source))
    for page in range(len(source)):
        own.write(page, source[page])

    def prepare(turn: int) -> Callable[[], object]:
        keys, pages = rng.integers(0, 256, (1, 16), np.uint8), [turn % len(source)]
        return lambda: store.put(keys, pages).wait(_WAIT_S)

    return prepare


def _plain_writes(
    stack: ExitStack, paths: list[str], source: Bytes, slots: int, force: list[str]
) -> _Calls:
    """Plain writes of a page, and of a record after all pages; members alternate."""
    nbytes, most = source.shape[1], -(-slots // len(paths))
    stack.enter_context(temporary_members(paths, most * nbytes + MiB, force=force))
    fds: list[int] = []
    for path in paths:
        fds.append(os.open(path, os.O_RDWR | os.O_DIRECT))
        stack.callback(os.close, fds[-1])

    def write(turn: int, content: memoryview, offset: int) -> Callable[[], object]:
        return partial(os.pwrite, fds[turn % slots % len(fds)], content, offset)

    def page(turn: int) -> Callable[[], object]:
        content = source[turn % len(source)].data
        return write(turn, content, turn % slots // len(fds) * nbytes)

    record = source[0, :_BLOCK_NBYTES].data
    return {"bytes": page, "record": lambda turn: write(turn, record, most * nbytes)}


def _missed(value: float, bar: float) -> str:
    return "**not reached**" if value > bar else ""


def rows_of(result: dict[str, Any]) -> list[Sequence[Any]]:
    """The table below HEAD; a median that misses its bar is marked."""
    rows: list[Sequence[Any]] = []
    for row in result["calls"]:
        bar, us = result["bars_us"].get(row["call"], math.inf), row["median_us"]
        call = row["call"] if row["scheduled"] else f"{row['call']}, at once"
        cells = row["pages"] or "", call, f"{row['best_us']:.0f}", f"{us:.0f}"
        rows.append((*cells, "" if bar == math.inf else f"{bar:g}", _missed(us, bar)))
    return rows


def notes_of(result: dict[str, Any]) -> list[str]:
    """Notes below the table, about puts of one page."""
    page, bar = result["page"], result["ratio_bar"]
    parts = ", ".join(f"{name} {ms:.2f} ms" for name, ms in page["ms"].items())
    found = [
        f"{name} {interval_text(ratio)} {_missed(ratio['median'], bar)}".strip()
        for name, ratio in page["ratios"].items()
    ]
    turns = "" if page["in_turns"] else ", one kind after the other"
    return [
        f"calls: CPU time of the calling thread, pages of {_SHAPE}, on {result['calls_on']}",
        "puts in a row: each after the end of the one before",
        "one native call: submits a read of one block and wakes a service thread, in the same"
        " random order",
        *bounds_of(result),
        f"a page of {page['nbytes'] // MiB} MiB at durability `process`, medians of"
        f" {page['rounds']}{turns}: {parts}",
        f"over plain writes of its bytes and one record (bar {bar:g}): {'; '.join(found)}",
    ]


def bounds_of(result: dict[str, Any]) -> list[str]:
    """Notes on the bars from the models."""
    notes = [
        "model: as many steps of the interpreter as the call takes, each of the cheapest kind, and"
        " nothing native; in turns with its call"
    ]
    rows = [row for row in result["calls"] if row["scheduled"]]
    us = {(row["pages"], row["call"]): row["median_us"] for row in rows}
    for call, model in zip(CALLS[: len(MODELS)], MODELS, strict=True):
        steps = ", ".join(f"{n} {kind}" for kind, n in result["steps"][model])
        sums, bar = [us[n, model] + us[0, NATIVE] for n in _PAGES], result["bars_us"][call]
        verdict = "this does not show that the bar is out of reach"
        if min(sums) > bar:
            verdict = "so many steps in Python do not reach it with cold caches"
        elif max(sums) > bar:
            verdict = "not reached by so many steps in Python where it is less"
        notes.append(
            f"{call}, {steps} for one page: model and native call together"
            f" {', '.join(f'{s:.0f}' for s in sums)} us for {', '.join(map(str, _PAGES))} pages,"
            f" bar {bar:g}: {verdict}"
        )
    return notes
