"""Replays a request trace through a store with real bytes, every one of which is checked.

For each request: look up its blocks, load the prefix that hits, compare every byte with the content
derived from the key, "compute" the missing blocks and put them. Only look-ups, loads and puts are
timed. The hit rate is shown next to those of unlimited capacity, Belady's MIN and plain LRU over
single blocks for the same trace (tutti/bench/belady.py).  Requests run on a thread other than the
main one, as in a server: calls on the main thread, which Ctrl-C may interrupt, cost a switch more.
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tutti.arguments import natural, positive
from tutti.base.arrays import Keys
from tutti.base.interrupts import uninterrupted
from tutti.base.terminal import ProgressFactory, table
from tutti.base.units import MiB, format_nbytes, parse_nbytes
from tutti.bench import belady
from tutti.bench.engine_alone import MANY, UNVERIFIED, VERIFIED, EngineAlone
from tutti.bench.environment import describe
from tutti.bench.fio import FioJob, FioUnavailable, run_fio
from tutti.bench.members import refuse
from tutti.bench.meter import Meter
from tutti.bench.pool_file import (
    add_pool_arguments,
    medium_facts,
    medium_of,
    pool_paths,
    temporary_pool,
)
from tutti.bench.shape import parse_shape
from tutti.bench.stamps import Stamps
from tutti.bench.traces import BLOCK_TOKENS, SYNTHETIC, TraceRequest, block_keys, reach, requests_of
from tutti.bench.writable import options
from tutti.errors import ConfigError, DeviceTimeout, KeyMissing, MediumError
from tutti.gio_uring.file_creation import allocate_file
from tutti.placement.eviction import POLICIES
from tutti.profiles.at_open import AUTO
from tutti.store import ObjectStore
from tutti.transfers.store_config import StoreConfig

WAIT_S = 120.0
_FLOOR_NBYTES = 256 * MiB
HITS: tuple[str, ...] = ("capacity", "eviction", "objects", "token hits", "block hits", "unlimited")
HITS += ("MIN (bound)", "plain LRU", "evicted", "wrong")
SPEEDS = ("capacity", "", "GB/s", "p50 ms", "p99 ms", "CPU-s/GB", "fio's", "mean run", "bytes/byte")

GOAL = 0.6  # CPU-s/GB, of all threads

# A replay has one request in flight: more pins would only prevent evictions in a small pool.
_PIN_LOOKUPS = 1
_COUNTERS = ("eviction", "evicted", "evicted_too_early", "dropped", "mismatches", "commands")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_pool_arguments(parser)
    option = options(parser)
    option("--trace", SYNTHETIC, "Mooncake's .jsonl file, or %(default)s (the default)")
    what = "use the first N requests of the trace (default: all; synthetic: 400)"
    option("--requests", None, what, positive)
    option("--seed", 1, "seed of the synthetic trace", natural)
    option("--capacity", ["1GiB"], "sizes of the pool, one replay for each")
    what = "shape of a page's KV: layers x slice. The default is smaller than a real model's, so "
    what += "that a long trace fits on a disk"
    option("--shape", "8x32KiB", what)
    option("--page-size", BLOCK_TOKENS, f"tokens per page, a divisor of {BLOCK_TOKENS}", positive)
    what = "eviction policies, one replay for each"
    option("--eviction", [StoreConfig().eviction], what, sorted(POLICIES))
    what = "profiles as of `tutti.open`, one replay for each: auto (the default), off, or a file"
    option("--profile", [AUTO], what)
    option("--pages", 256, "pages of memory to load into", positive)
    what = "also measure what fio's direct reads and writes of objects cost, as many at a time, and"
    what += " what loads cost the engine alone"
    option("--floor", False, what)


def run(args: argparse.Namespace, progress: ProgressFactory) -> dict[str, Any]:
    """Replays the trace once per capacity; `wrong` is the total number of pages with wrong bytes.

    Raises ConfigError for a trace or numbers that are not acceptable, and what the store raises.
    """
    if BLOCK_TOKENS % args.page_size:
        raise ConfigError(f"--page-size {args.page_size} does not divide {BLOCK_TOKENS}")
    if args.floor:
        refuse([medium_of(args)], "--floor has fio write a file beside the pool; give a folder")
    requests = requests_of(args.trace, args.requests, args.seed)
    runs = [
        _replay(args, requests, capacity, eviction, profile, progress)
        for capacity in args.capacity
        for eviction in args.eviction
        for profile in args.profile
    ]
    return {
        "benchmark": "replay",
        "trace": Path(args.trace).stem,
        "requests": len(requests),
        "seed": args.seed,
        "shape": args.shape,
        "page_size": args.page_size,
        "verify": args.verify,
        "durability": args.durability,
        "runs": runs,
        "wrong": sum(run["wrong"] for run in runs),
        "machine": describe(medium_of(args)),
    }


def hit_rows(result: dict[str, Any]) -> list[list[Any]]:
    names = [f"{of}_hit_rate" for of in ("token", "block", "unlimited", "minimum", "lru")]
    rows = []
    for run in result["runs"]:
        capacity = format_nbytes(run["capacity_nbytes"])
        percents = [f"{100 * run[name]:.1f} %" for name in names]
        first = [capacity, run["eviction"], run["capacity_objects"]]
        rows.append([*first, *percents, run["evicted"], run["wrong"]])
    return rows


def speed_rows(result: dict[str, Any]) -> list[list[Any]]:
    rows = []
    for run in result["runs"]:
        capacity = format_nbytes(run["capacity_nbytes"])
        load_only, put_only = f"{run['mean_run_length']:.1f}", run["bytes_written_per_byte_stored"]
        for what, last in (("load", [load_only, ""]), ("put", ["", f"{put_only:.3f}"])):
            names = ("gb_per_s", "p50_ms", "p99_ms", "cpu_s_per_gb", "fio_cpu_s_per_gb")
            numbers = (run[what].get(name) for name in names)
            texts = ["" if number is None else f"{number:.3g}" for number in numbers]
            how = what if run.get("scheduled", True) else f"{what}, at once"
            rows.append([capacity, how, *texts, *last])
            for kind, meter in run.get("engine", {}).items() if what == "load" else ():
                texts = [f"{meter[name]:.3g}" for name in names[:-1]]
                rows.append([capacity, kind, *texts, "", "", ""])
    return rows


def report(result: dict[str, Any]) -> str:
    verdict = f"WRONG BYTES in {result['wrong']} pages" if result["wrong"] else "every byte right"
    loaded = sum(run["loaded_pages"] for run in result["runs"])
    last = f"{result['requests']} requests, {loaded} pages loaded and compared: {verdict}"
    hits, speeds = table(list(HITS), hit_rows(result)), table(list(SPEEDS), speed_rows(result))
    return "\n".join([hits, "", speeds, *notes_of(result), last])


def notes_of(result: dict[str, Any]) -> list[str]:
    """Why fio's numbers are missing, and how much of the goal the engine leaves to the store."""
    runs = result["runs"]
    found = [run["floor_not_measured"] for run in runs if "floor_not_measured" in run]
    notes = [f"fio: not measured: {found[0]}"] if found else []
    return notes + [bounds_of(run) for run in runs if run.get("engine")]


def bounds_of(run: dict[str, Any]) -> str:
    """How much of the goal the engine alone leaves, and its parts."""
    load = run["load"]
    engine, reads, many = (run["engine"][k]["cpu_s_per_gb"] for k in (VERIFIED, UNVERIFIED, MANY))
    fio = f" (fio {load['fio_cpu_s_per_gb']:.2f})" if "fio_cpu_s_per_gb" in load else ""
    left = f"leaves {GOAL - engine:.2f}" if engine < GOAL else "leaves nothing"
    return (
        f"CPU-s/GB of loads, {format_nbytes(run['capacity_nbytes'])}: the engine alone takes"
        f" {engine:.2f}, which {left} of the goal of {GOAL} to the rest of the store; that takes"
        f" {load['cpu_s_per_gb'] - engine:.2f}. Parts of the engine's: digests"
        f" {engine - reads:.2f}; the call, sleeps and wake-ups of each load, which jobs of many"
        f" objects share, {reads - many:.2f}; the reads, many by one job, {many:.2f}{fio}"
    )


class Replayer:
    """Plays requests into one store, through a bounded number of pages of memory."""

    def __init__(
        self, store: ObjectStore, *, pages: int, page_size: int, hugepages: bool = True
    ) -> None:
        self.store = store
        self.alone: EngineAlone | None = None  # repeats the loads
        self.pages_per_block = BLOCK_TOKENS // page_size
        self.memory = store.allocate_memory(pages, hugepages=hugepages)
        self._stamps = Stamps(self.memory)
        self.loads, self.puts = Meter(), Meter()
        self.tokens = self.hit_tokens = 0
        self.blocks = self.hit_blocks = 0
        self.loaded_pages = self.wrong = self.lost = 0

    @uninterrupted()
    def play(self, request: TraceRequest) -> None:
        """One request from look-up to put.  Counts wrong bytes instead of raising."""
        keys = block_keys(self.store.layout.fingerprint, request.hash_ids, self.pages_per_block)
        hits = self._load(keys, self.store.match(keys, pin=True))
        hit_blocks = hits // self.pages_per_block
        self.blocks += len(request.hash_ids)
        self.hit_blocks += hit_blocks
        self.tokens += request.input_tokens
        self.hit_tokens += reach(request, hit_blocks)
        self._put(keys, hits)

    def summary(self) -> dict[str, Any]:
        """Everything counted so far."""
        stats, engine = self.store.stats(), self.alone.meters if self.alone else {}
        return {
            "token_hit_rate": self.hit_tokens / self.tokens if self.tokens else 0.0,
            "block_hit_rate": self.hit_blocks / self.blocks if self.blocks else 0.0,
            "blocks": self.blocks,
            "load": self.loads.to_dict(),
            "put": self.puts.to_dict(),
            "loaded_pages": self.loaded_pages,
            "wrong": self.wrong,
            "lost": self.lost,
            **{name: stats[name] for name in _COUNTERS},
            "mean_run_length": stats["mean_run_length"],
            "bytes_written_per_byte_stored": stats["bytes_written_per_byte_stored"],
            "capacity_objects": stats["capacity_objects"],
            "backing": self.memory.owner.backing,
            "engine": {kind: meter.to_dict() for kind, meter in engine.items()},
        }

    def _load(self, keys: Keys, hits: int) -> int:
        """Loads and checks the prefix in windows; how many pages of it are usable."""
        for start in range(0, hits, self.memory.pages):
            window = keys[start : min(hits, start + self.memory.pages)]
            good = self._load_window(window)
            if good < len(window):
                return start + good
            if self.alone is not None:
                self.alone.again(window)
        return hits

    def _load_window(self, keys: Keys) -> int:
        """Loads some pages; how many, from the first on, have their bytes."""
        pages = np.arange(len(keys))
        good = len(keys)
        try:
            with self.loads.operation():
                ticket = self.store.load(keys, pages)
                try:
                    ticket.wait(WAIT_S)
                except MediumError as error:
                    good = min(error.pages)
        except KeyMissing:
            self.lost += len(keys)
            return 0
        if not ticket.wait_settled(WAIT_S):
            raise DeviceTimeout("a load does not settle; look at the kernel's log")
        self.loads.nbytes += good * self.store.layout.object_nbytes
        self.loaded_pages += good
        wrong = self._stamps.wrong(pages[:good], keys[:good])
        self.wrong += int(np.count_nonzero(wrong))
        return good

    def _put(self, keys: Keys, start: int) -> None:
        """Computes and puts what follows the prefix."""
        for first in range(start, len(keys), self.memory.pages):
            window = keys[first : first + self.memory.pages]
            pages = np.arange(len(window))
            self._stamps.fill(pages, window)
            parent = keys[first - 1].tobytes() if first else None
            with self.puts.operation():
                result = self.store.put(window, pages, parent=parent, depth=first).wait(WAIT_S)
            self.puts.nbytes += result.stored * self.store.layout.object_nbytes


def reference_rates(requests: list[TraceRequest], capacity_blocks: int) -> dict[str, float]:
    """Block hit rates of unlimited capacity, of MIN and of plain LRU; see tutti/bench/belady.py.

    minimum_hit_rate counts every hit of MIN, so that no store has a higher block hit rate; the
    others count the hits before a request's first miss, as a store does.
    """
    blocks = [request.hash_ids for request in requests]
    return {
        "unlimited_hit_rate": belady.unlimited(blocks).prefix_hit_rate,
        "minimum_hit_rate": belady.minimum(blocks, capacity_blocks).hit_rate,
        "lru_hit_rate": belady.least_recently_used(blocks, capacity_blocks).prefix_hit_rate,
    }


def _replay(
    args: argparse.Namespace,
    requests: list[TraceRequest],
    capacity: str,
    eviction: str,
    profile: str,
    progress: ProgressFactory,
) -> dict[str, Any]:
    capacity_nbytes = parse_nbytes(capacity)
    config = StoreConfig(
        verify=args.verify, durability=args.durability, eviction=eviction, pin_lookups=_PIN_LOOKUPS
    )
    paths = pool_paths(args, "replay")
    with (
        temporary_pool(
            paths,
            parse_shape(args.shape).layout(args.page_size),
            capacity_nbytes,
            config=config,
            engine={"executor": args.executor, "profile": profile},
            prewrite=args.prewrite,
            force=args.force,
            progress=progress,
        ) as store,
        ExitStack() as stack,
    ):
        hugepages = args.memory_pages == "huge"
        replayer = Replayer(store, pages=args.pages, page_size=args.page_size, hugepages=hugepages)
        if args.floor:
            options = {"executor": args.executor, "hugepages": hugepages}
            replayer.alone = EngineAlone(store, paths, replayer.memory, **options)
            stack.callback(replayer.alone.close)
        with progress(f"replay into {format_nbytes(capacity_nbytes)}", len(requests)) as bar:
            for request in requests:
                replayer.play(request)
                bar.advance(1)
        result = replayer.summary()
        blocks = result["capacity_objects"] // replayer.pages_per_block
        facts = {"capacity_nbytes": capacity_nbytes, **medium_facts(store)}
        facts["scheduled"] = store.scheduler is not None
        object_nbytes = store.layout.object_nbytes
    if args.floor:
        _add_floor(Path(medium_of(args), "replay-floor.fio"), result, object_nbytes)
    return {**facts, **result, **reference_rates(requests, blocks)}


def _add_floor(path: Path, result: dict[str, Any], nbytes: int) -> None:
    """CPU-s/GB of fio, which writes a file twice and then reads from it, ``nbytes`` a block."""
    try:
        allocate_file(str(path), _FLOOR_NBYTES)
        for what, direction in (("put", "write"), ("put", "write"), ("load", "randread")):
            meter = result[what]
            depth = max(1, meter["nbytes"] // nbytes // max(1, meter["operations"]))
            job = FioJob(str(path), direction, nbytes, _FLOOR_NBYTES, _FLOOR_NBYTES)
            done = run_fio(replace(job, iodepth=depth, batches=True))
            meter["fio_cpu_s_per_gb"] = done.cpu_s_per_gb
    except FioUnavailable as error:
        result["floor_not_measured"] = str(error)
    finally:
        path.unlink(missing_ok=True)
