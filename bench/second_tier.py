"""Compares fetches of the second tier with Mooncake's own batch get of the same values.

Also measures local loads while the tier is idle, asks for pages that no node has, and fetches; and
without the tier, while a process reads the same values by Mooncake, or the pool stores as many.

The tier's time runs from a look-up's miss until the pages are verified and stored in the pool.
Mooncake's time runs until they are in memory, in one batch, in a process with the same nice values.
Two more calls bound any tier that stores its fetches: the same batch get while the pool stores as
many pages from memory, until both have ended; and, without Tutti, gets of an eighth each, where a
thread hashes each part and writes it in one call with direct I/O while the next one is read.  The
order of calls rotates with the rounds.

CPU time is measured, too, with that of the cluster's processes on this machine.  The keys per
second that the master answers (batch exists) are measured separately.  Without ``--remote`` a
cluster is started here; every run stores new pages in the cluster.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tutti.arguments import natural, nbytes, positive
from tutti.base.arrays import Keys
from tutti.base.interrupts import uninterrupted
from tutti.base.terminal import ProgressFactory, table
from tutti.base.units import GiB, format_nbytes
from tutti.bench.environment import describe
from tutti.bench.meter import in_turn
from tutti.bench.mooncake_cluster import CPU, CpuTime, own_cluster
from tutti.bench.mooncake_reader import ASKED, Reader
from tutti.bench.pool_file import add_place_arguments, medium_of, pool_paths, temporary_pool
from tutti.bench.statistics import bootstrap_median, interval_text, median, percentile, ratios
from tutti.bench.writable import options
from tutti.cluster.remote_process import name_prefix
from tutti.cluster.remote_store import RemoteConfig
from tutti.cluster.second_tier import Tier
from tutti.cluster.worker import trailer_nbytes
from tutti.errors import ConfigError, DeviceTimeout, Unsupported
from tutti.medium.layout import KVLayout
from tutti.memory.host_memory import HostMemory
from tutti.store import ObjectStore
from tutti.transfers.tickets import PutTicket

HEAD = ("fetching by", "GB/s", "tier over it", "bar", "CPU s/GB")
_LAYERS = 16
_SEGMENT_NBYTES_MIN = 64 << 20
_WAIT_S = 60.0
_POLL_S = 0.001
_LOADS, _LOAD_PAGES = 500, 4  # enough for several waits of the tier
_FETCHES = ("tier", "mooncake")
_KEEPING = ("mooncake_and_store", "mooncake_and_write")
#: Concurrent work of local loads; "again" is also idle, and shows the noise.
_BESIDE = ("idle", "again", "asking", "fetching", "mooncake", "storing")


def _until(done: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + _WAIT_S
    while not done():
        if time.monotonic() > deadline_s:
            raise DeviceTimeout(f"{what} took longer than {_WAIT_S:g} s")
        time.sleep(_POLL_S)


class Fetcher:
    """A pool, and a second tier that has its pages."""

    def __init__(self, store: ObjectStore, config: RemoteConfig, keys: Keys) -> None:
        self.store, self.config, self.keys = store, config, keys
        self.tier = Tier(store, config)

    def publish(self, seed: int) -> None:
        """Stores the pages, and waits until the remote store has them."""
        memory = self.store.allocate_memory(len(self.keys))
        rng = np.random.default_rng(seed)
        for page in range(len(self.keys)):
            memory.write(page, rng.bytes(self.store.layout.object_nbytes))
        self.store.put(self.keys, range(len(self.keys)), memory=memory).wait(_WAIT_S)
        self.store.unregister(memory)

        def published() -> bool:
            if not self._counts()["queued_nbytes"]:
                self.tier.used(self.keys)
            return bool(self._counts()["replicated"] >= len(self.keys))

        _until(published, "replication")

    def fetch_s(self) -> float:
        """Seconds of fetching all pages into the empty pool."""
        self.store.clear(deallocate=False)
        counts = self.tier._counts  # without the lock and the copy of stats()
        all_fetched = counts["fetched"] + len(self.keys)
        start_s = time.monotonic()
        self.tier.missed(self.keys)
        _until(lambda: counts["fetched"] >= all_fetched, "fetching")
        return time.monotonic() - start_s

    @property
    def worker(self) -> int:
        """The process that reads for the tier."""
        process = self.tier._remote._process
        assert process is not None
        return process.pid

    def store_beside(self, memory: HostMemory, work: Callable[[], object]) -> float:
        """Seconds of storing as many pages from memory, during work, until both have ended."""
        self.store.clear(deallocate=False)
        start_s = time.monotonic()
        ticket = self.store.put(self.keys, range(len(self.keys)), memory=memory)
        work()
        ticket.wait(_WAIT_S)
        return time.monotonic() - start_s

    def _counts(self) -> dict[str, Any]:
        counts: dict[str, Any] = self.tier.stats()["remote"]
        return counts


class Local:
    """Loads of stored pages, alternately with and without work for the tier.

    reader: a process that reads the tier's values but does not store them.
    """

    def __init__(self, fetcher: Fetcher, reader: Reader, rng: np.random.Generator) -> None:
        self._fetcher, self._reader, self._rng = fetcher, reader, rng
        self._store = fetcher.store
        self._keys = rng.integers(0, 256, (_LOAD_PAGES, 16), np.uint8)
        self._pages = range(_LOAD_PAGES)
        self._memory = self._store.allocate_memory(_LOAD_PAGES)
        self._other = self._store.allocate_memory(len(fetcher.keys))
        self._put: PutTicket | None = None
        self.p99_ms: dict[str, list[float]] = {name: [] for name in _BESIDE}
        self.fetched_gb_per_s: list[float] = []  # during the loads

    @uninterrupted()  # on a thread, as in a server
    def measure(self) -> None:
        """One round of each, in random order."""
        for name in self._rng.permutation(_BESIDE):
            self._refill()
            taken = []
            self._reader.go(name == "mooncake")
            before, begun_s = self._fetched(), time.monotonic()
            for _ in range(_LOADS):
                self._work(name)
                start_s = time.monotonic()
                self._store.load(self._keys, self._pages, memory=self._memory).wait(_WAIT_S)
                taken.append((time.monotonic() - start_s) * 1000)
            self.p99_ms[name].append(percentile(taken, 99))
            if name == "fetching":
                gigabytes = (self._fetched() - before) * self._store.layout.object_nbytes / 1e9
                self.fetched_gb_per_s.append(gigabytes / (time.monotonic() - begun_s))
            self._reader.go(False)
            _until(self._is_idle, "the tier's work")

    def _fetched(self) -> int:
        return self._fetcher.tier._counts["fetched"]

    def _refill(self) -> None:
        """Empties the pool and stores the pages to load; the first load is not timed."""
        self._store.clear(deallocate=False)
        self._store.put(self._keys, self._pages, memory=self._memory).wait(_WAIT_S)
        self._store.load(self._keys, self._pages, memory=self._memory).wait(_WAIT_S)

    def _work(self, name: str) -> None:
        """Gives work to the tier, as a look-up during the load would."""
        if name == "asking":
            self._fetcher.tier.missed(self._rng.integers(0, 256, (_LOAD_PAGES, 16), np.uint8))
        elif name == "fetching" and self._is_idle():
            self._refill()
            self._fetcher.tier.missed(self._fetcher.keys)
        elif name == "storing" and self._is_idle():
            keys = self._rng.integers(0, 256, self._fetcher.keys.shape, np.uint8)
            self._put = self._store.put(keys, range(len(keys)), memory=self._other)

    def _is_idle(self) -> bool:
        with self._fetcher.tier._changed:
            return not self._fetcher.tier._fetching and (self._put is None or self._put.done)


def _measure(
    calls: Mapping[str, tuple[Callable[[], float], CpuTime]],
    rounds: int,
    advance: Callable[[int], object],
) -> tuple[dict[str, list[float]], dict[str, list[NDArray[np.float64]]]]:
    """Seconds of each call in each round, and CPU seconds."""
    names = list(calls)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    cpu: dict[str, list[NDArray[np.float64]]] = {name: [] for name in names}
    for number in range(rounds + 1):
        for name in in_turn(names, number):
            call, counter = calls[name]
            before = counter.read()
            taken_s = call()
            if number:  # the first round opens connections
                seconds[name].append(taken_s)
                cpu[name].append(counter.read() - before)
        advance(1)
    return seconds, cpu


def _throughput(seconds: Mapping[str, list[float]], gigabytes: float) -> dict[str, Any]:
    rates = {name: [gigabytes / s for s in taken] for name, taken in seconds.items()}

    def ratio_to(name: str, of: str = "tier") -> dict[str, float]:
        return bootstrap_median(ratios(rates[of], rates[name])).to_dict()

    return {
        **{f"{name}_gb_per_s": values for name, values in rates.items()},
        "ratio": ratio_to("mooncake"),
        **{f"ratio_to_{name}": ratio_to(name) for name in _KEEPING},
        "bounds": {name: ratio_to("mooncake", name) for name in _KEEPING},
        "bar": 0.9,
    }


def _cpu(cpu: Mapping[str, list[NDArray[np.float64]]], gigabytes: float) -> dict[str, Any]:
    """CPU seconds per GB (medians), and the ratio of the tier without the caller's busy-waiting.

    cpu_bound_gb_per_s: speed if all cores did nothing else.  cpu_ratio_bound: the ratio of a tier
    that only has the measured costs of its digests and puts.
    """
    per_gb = {name: np.median(np.array(rows), axis=0) / gigabytes for name, rows in cpu.items()}
    busy = {name: [row.sum() - row[CPU.index("caller")] for row in cpu[name]] for name in cpu}
    cores = len(os.sched_getaffinity(0))
    get_s = float(np.median(busy["mooncake"])) / gigabytes
    landing_s = float(per_gb["digests"].sum() + per_gb["store"].sum())
    bound = {name: cores * gigabytes / float(np.median(busy[name])) for name in _FETCHES}
    return {
        "cpu_s_per_gb": {
            name: dict(zip(CPU, map(float, row), strict=True)) for name, row in per_gb.items()
        },
        "cpu_ratio": bootstrap_median(ratios(busy["mooncake"], busy["tier"])).to_dict(),
        "cpu_ratio_bound": get_s / (get_s + landing_s),
        "cores": cores,
        "cpu_bound_gb_per_s": bound,
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    option = options(parser)
    option("--remote mooncake://HOST:PORT", None, "a cluster that runs (default: an own one)")
    add_place_arguments(parser)
    option("--pages", 128, "pages of 1 MiB", positive)
    option("--rounds", 15, "measurements of each kind", positive)
    option("--capacity", GiB, "size of the pool", nbytes)
    option("--seed", 1, "seed of the data; give each run on a cluster another", natural)


def run(args: argparse.Namespace, progress: ProgressFactory) -> dict[str, Any]:
    """Runs all rounds; the result for JSON.

    Raises ConfigError for a wrong address and if the first place is not a folder, Unsupported
    without Mooncake's client.
    """
    start_s = time.monotonic()
    remote = args.remote and RemoteConfig.parse(args.remote)
    if importlib.util.find_spec("mooncake") is None:
        raise Unsupported(
            "this bench needs Mooncake's client; in a clone of this project:"
            " pip install -e '.[cluster]'"
        )
    layout = KVLayout.mha(
        layers=_LAYERS, kv_heads=8, head_dim=128, page_size=16, dtype="bfloat16", model="bench"
    )
    keys = np.random.default_rng(args.seed).integers(0, 256, (args.pages, 16), np.uint8)
    paths = pool_paths(args, "second-tier")
    if not os.path.isdir(medium_of(args)):
        raise ConfigError("second-tier also writes a file beside the pool; name a folder first")
    with ExitStack() as stack:
        pool = stack.enter_context(temporary_pool(paths, layout, args.capacity, force=args.force))
        bar = stack.enter_context(progress("second tier", 2 * args.rounds + 1))
        if not remote:
            nbytes = max(_SEGMENT_NBYTES_MIN, 2 * args.pages * layout.object_nbytes)
            remote = RemoteConfig.parse(stack.enter_context(own_cluster(nbytes)))
        fetcher = Fetcher(pool, remote, keys)
        stack.callback(fetcher.tier.close)
        fetcher.publish(args.seed)
        names = [name_prefix(remote, layout) + key.tobytes().hex() for key in keys]
        reader = Reader(remote, names, layout.object_nbytes + trailer_nbytes(_LAYERS))
        stack.callback(reader.close)
        measured = _fetched(fetcher, reader, args, bar.advance)
        rates = [ASKED / reader.call("exists_s") for _ in range(args.rounds)]
        local = Local(fetcher, reader, np.random.default_rng(args.seed + 1))
        for _ in range(args.rounds):
            local.measure()
            bar.advance(1)
    return {
        "benchmark": "second_tier",
        "members": len(paths),
        "machine": describe(medium_of(args)),
        "pages": args.pages,
        "page_nbytes": layout.object_nbytes,
        "took_s": time.monotonic() - start_s,
        **measured,
        "exists_keys_per_call": ASKED,
        "exists_keys_per_s": rates,
        "local_p99_ms": local.p99_ms,
        "local_p99_ratio": {
            name: bootstrap_median(ratios(local.p99_ms[name], local.p99_ms["idle"])).to_dict()
            for name in _BESIDE[1:]
        },
        "local_fetched_gb_per_s": local.fetched_gb_per_s,
        "local_bar": 1.1,
    }


def _fetched(
    fetcher: Fetcher, reader: Reader, args: argparse.Namespace, advance: Callable[[int], object]
) -> dict[str, Any]:
    """Throughput and CPU time."""
    pool, get = fetcher.store, partial(reader.call, "get_s")
    memory = pool.allocate_memory(args.pages)
    cpu = CpuTime(fetcher.config, reader.pid)
    path = Path(medium_of(args)) / "second-tier.kept"
    seconds, spent = _measure(
        {
            "tier": (fetcher.fetch_s, CpuTime(fetcher.config, fetcher.worker)),
            "mooncake": (get, cpu),
            "mooncake_and_store": (partial(fetcher.store_beside, memory, get), cpu),
            "mooncake_and_write": (partial(reader.call, "keep_s", path), cpu),
            "store": (partial(fetcher.store_beside, memory, lambda: None), cpu),
            "digests": (partial(reader.call, "digests_s"), cpu),
        },
        args.rounds,
        advance,
    )
    pool.unregister(memory)
    gigabytes = args.pages * pool.layout.object_nbytes / 1e9
    return {**_throughput(seconds, gigabytes), **_cpu(spent, gigabytes)}


def rows_of(result: dict[str, Any]) -> list[list[object]]:
    ratio = {"tier": None, "mooncake": result["ratio"]}
    rates: list[list[object]] = [
        [
            name,
            f"{median(result[f'{name}_gb_per_s']):.2f}",
            interval_text(ratio.get(name, result.get(f"ratio_to_{name}"))),
            f"{result['bar']:g}" if name == "mooncake" else "",
            f"{sum(cpu.values()) - cpu['caller']:.2f}",
        ]
        for name, cpu in result["cpu_s_per_gb"].items()
    ]
    if result["ratio"]["median"] < result["bar"]:
        rates[1][3] = f"{result['bar']:g}, not reached"
    return rates


def notes_of(result: dict[str, Any]) -> list[str]:
    bar, ratio = result["local_bar"], result["local_p99_ratio"]
    local = [
        f"{name} {median(times):.2f} ms"
        + (f", {interval_text(ratio[name])} times idle" if name in ratio else "")
        for name, times in result["local_p99_ms"].items()
    ]
    bounds = [
        f"{name} has {interval_text(ratio)} of Mooncake's batch get alone, and bounds a tier"
        for name, ratio in result["bounds"].items()
    ]
    missed = "reached" if ratio["fetching"]["median"] <= bar else "**not reached**"
    return [
        f"{result['pages']} pages of {format_nbytes(result['page_nbytes'])},"
        f" {len(result['tier_gb_per_s'])} rounds; CPU time is without the loop of the thread that"
        " waits for Mooncake",
        *bounds,
        f"CPU time of Mooncake's get over the tier's: {interval_text(result['cpu_ratio'])}; of a"
        " tier whose digests and puts cost what they cost alone, and which costs nothing else:"
        f" {result['cpu_ratio_bound']:.2f}",
        f"p99 of local loads, beside: {'; '.join(local)} (again: idle as well, which shows the"
        f" noise). Bar for fetching: {bar:g}, {missed}",
        f"beside the loads the tier fetched {median(result['local_fetched_gb_per_s']):.3f} GB/s",
        f"Mooncake's master answers {median(result['exists_keys_per_s']):,.0f} keys a second"
        f" (batch exists of {result['exists_keys_per_call']}, one client)",
    ]


def report(result: dict[str, Any]) -> str:
    return "\n\n".join([table(HEAD, rows_of(result)), *notes_of(result)])
