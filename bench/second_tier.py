"""Fetching through the second tier against Mooncake's own batch get, in turns, on the same values.

Then local loads while the tier has nothing to do, asks for pages that no node has, and fetches; and
without this tier, while a process reads the same values by Mooncake, or the pool stores as many.

The tier's time runs from a look-up's miss until the pages are verified and stored in the pool; that
of Mooncake until they are in memory, in one batch.  Then in turn, what bounds any tier that keeps
what it fetches: the same batch get while the pool stores as many pages that it has in memory, until
both are over; and gets of an eighth each, of which one thread hashes and writes the last while the
next is under way.  A cluster must run already.
"""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from tutti.arguments import natural, nbytes, positive
from tutti.base.arrays import Keys
from tutti.base.terminal import ProgressFactory, table
from tutti.base.units import GiB
from tutti.bench.environment import describe
from tutti.bench.pool_file import temporary_pool
from tutti.bench.statistics import bootstrap_median, interval_text, median, percentile, ratios
from tutti.cluster.remote_store import RemoteConfig
from tutti.cluster.second_tier import Tier
from tutti.cluster.worker import NICE, TRAILER_NBYTES
from tutti.errors import DeviceTimeout, Unsupported
from tutti.medium.layout import KVLayout
from tutti.memory.host_memory import HostMemory
from tutti.store import ObjectStore
from tutti.transfers.tickets import PutTicket

_LAYERS = 16
_WAIT_S = 60.0
_POLL_S = 0.001
_LOADS, _LOAD_PAGES = 200, 4
_PARTS = 8
#: What is timed, in the order of a round, and the tier's ratio to it.
_CALLS = {
    "tier_gb_per_s": "",
    "mooncake_gb_per_s": "ratio",
    "mooncake_and_store_gb_per_s": "ratio_to_mooncake_and_store",
    "mooncake_and_write_gb_per_s": "ratio_to_mooncake_and_write",
}
#: What happens beside local loads.
_BESIDE = ("idle", "asking", "fetching", "mooncake", "storing")


def _until(done: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + _WAIT_S
    while not done():
        if time.monotonic() > deadline_s:
            raise DeviceTimeout(f"{what} took longer than {_WAIT_S:g} s")
        time.sleep(_POLL_S)


class Fetcher:
    """A pool with a second tier that has its pages."""

    def __init__(self, store: ObjectStore, config: RemoteConfig, keys: Keys) -> None:
        self.store, self.tier, self.keys = store, Tier(store, config), keys

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
        before = self._counts()["fetched"]
        start_s = time.monotonic()
        self.tier.missed(self.keys)
        _until(lambda: bool(self._counts()["fetched"] >= before + len(self.keys)), "fetching")
        return time.monotonic() - start_s

    def store_beside(self, memory: HostMemory, work: Callable[[], object]) -> float:
        """Seconds of storing as many pages from memory, beside work, until both are over."""
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
    """Loads of pages that the pool has, in turns with and without work for its tier.

    reader: a process that reads the tier's values, and stores nothing.
    """

    def __init__(self, fetcher: Fetcher, reader: Reader, rng: np.random.Generator) -> None:
        self._fetcher, self._reader, self._rng = fetcher, reader, rng
        self._store = fetcher.store
        self._keys = rng.integers(0, 256, (_LOAD_PAGES, 16), np.uint8)
        self._memory = self._store.allocate_memory(_LOAD_PAGES)
        self._other = self._store.allocate_memory(len(fetcher.keys))
        self._put: PutTicket | None = None
        self.p99_ms: dict[str, list[float]] = {name: [] for name in _BESIDE}

    def measure(self) -> None:
        """One round of each."""
        pages = range(_LOAD_PAGES)
        for name, times in self.p99_ms.items():
            self._store.clear(deallocate=False)
            self._store.put(self._keys, pages, memory=self._memory).wait(_WAIT_S)
            taken = []
            self._reader.go(name == "mooncake")
            for _ in range(_LOADS):
                self._work(name)
                start_s = time.monotonic()
                self._store.load(self._keys, pages, memory=self._memory).wait(_WAIT_S)
                taken.append((time.monotonic() - start_s) * 1000)
            times.append(percentile(taken, 99))
            self._reader.go(False)
            _until(self._is_idle, "the tier's work")

    def _work(self, name: str) -> None:
        """What a look-up beside the load gives the tier to do."""
        if name == "asking":
            self._fetcher.tier.missed(self._rng.integers(0, 256, (_LOAD_PAGES, 16), np.uint8))
        elif name == "fetching" and self._is_idle():
            self._fetcher.tier.missed(self._fetcher.keys)
        elif name == "storing" and self._is_idle():
            keys = self._rng.integers(0, 256, self._fetcher.keys.shape, np.uint8)
            self._put = self._store.put(keys, range(len(keys)), memory=self._other)

    def _is_idle(self) -> bool:
        with self._fetcher.tier._changed:
            return not self._fetcher.tier._fetching and (self._put is None or self._put.done)


class Direct:
    """A client of Mooncake that reads the same values into registered memory."""

    def __init__(self, config: RemoteConfig, names: Sequence[str], nbytes: int) -> None:
        from tutti.cluster.mooncake import MooncakeStore

        self._names, self._nbytes = names, nbytes
        self._memory = np.zeros(nbytes * len(names), np.uint8)
        base = int(self._memory.ctypes.data)
        self._addresses = [base + i * nbytes for i in range(len(names))]
        self._store = MooncakeStore(config.options, base, self._memory.nbytes)

    def get_s(self) -> float:
        """Seconds of one batch get."""
        start_s = time.monotonic()
        self._get(0, len(self._names))
        return time.monotonic() - start_s

    def keep_s(self, path: Path) -> float:
        """Seconds of gets in parts; a thread hashes and writes each while the next is read."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        base, step = self._addresses[0], -(-len(self._names) // _PARTS)

        def keep(first: int, last: int) -> None:
            part = self._memory[first * self._nbytes : last * self._nbytes]
            for start in range(0, part.size, self._nbytes):
                xxhash.xxh3_128(part.data[start : start + self._nbytes]).digest()
            os.pwrite(fd, part.data, self._addresses[first] - base)

        try:
            start_s = time.monotonic()
            with ThreadPoolExecutor(1) as thread:
                kept = []
                for first in range(0, len(self._names), step):
                    last = min(first + step, len(self._names))
                    self._get(first, last)
                    kept.append(thread.submit(keep, first, last))
                for part in kept:
                    part.result(_WAIT_S)
            os.fdatasync(fd)
            return time.monotonic() - start_s
        finally:
            os.close(fd)
            path.unlink()

    def _get(self, first: int, last: int) -> None:
        names, addresses = self._names[first:last], self._addresses[first:last]
        if any(self._store.get(names, addresses, self._nbytes)):
            raise DeviceTimeout("Mooncake did not deliver all values; give its servers more memory")


class Reader:
    """A process, as nice as the tier's, that reads values by Mooncake's batch get when told."""

    def __init__(self, config: RemoteConfig, names: Sequence[str], nbytes: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._may, self._rests = context.Event(), context.Event()
        arguments = (config, names, nbytes, self._may, self._rests)
        context.Process(target=_read, args=arguments, daemon=True).start()
        self.go(False)

    def go(self, reads: bool) -> None:
        """Reads from now on, or has ended reading on return."""
        if reads:
            self._rests.clear()
            self._may.set()
            return
        self._may.clear()
        if not self._rests.wait(_WAIT_S):
            raise DeviceTimeout("the process that reads from Mooncake does not; is it set up?")


def _read(config: RemoteConfig, names: Sequence[str], nbytes: int, may: Any, rests: Any) -> None:
    os.nice(NICE)
    direct = Direct(config, names, nbytes)
    direct.get_s()  # opens connections
    parent = multiprocessing.parent_process()
    while parent is not None and parent.is_alive():
        rests.set()
        if may.wait(1.0):
            while may.is_set():  # bounded by go()
                direct.get_s()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `tutti bench second-tier`."""
    parser.add_argument(
        "--remote", required=True, metavar="mooncake://HOST:PORT", help="the cluster's store"
    )
    parser.add_argument("--dir", type=Path, default=".", help="folder for the pool")
    parser.add_argument("--pages", type=positive, default=128, help="pages of 1 MiB")
    parser.add_argument("--rounds", type=positive, default=15, help="measurements of each kind")
    parser.add_argument("--capacity", type=nbytes, default=GiB, help="size of the pool")
    parser.add_argument(
        "--seed",
        type=natural,
        default=1,
        help="seed of the data; give each run on a cluster another",
    )


def run(args: argparse.Namespace, progress: ProgressFactory) -> dict[str, Any]:
    """All rounds, and what they were run on.

    Raises ConfigError for an address that is none, Unsupported without Mooncake's client.
    """
    config = RemoteConfig.parse(args.remote)
    if importlib.util.find_spec("mooncake") is None:
        raise Unsupported("this bench needs Mooncake's client: pip install 'tutti-kv[cluster]'")
    layout = KVLayout.mha(
        layers=_LAYERS, kv_heads=8, head_dim=128, page_size=16, dtype="bfloat16", model="bench"
    )
    keys = np.random.default_rng(args.seed).integers(0, 256, (args.pages, 16), np.uint8)
    rates: dict[str, list[float]] = {name: [] for name in _CALLS}
    gigabytes = args.pages * layout.object_nbytes / 1e9
    with (
        temporary_pool([str(args.dir / "second-tier.tutti")], layout, args.capacity) as pool,
        progress("second tier", 2 * args.rounds + 1) as bar,
    ):
        fetcher = Fetcher(pool, config, keys)
        try:
            fetcher.publish(args.seed)
            prefix = f"tutti/{config.namespace}/{layout.fingerprint.hex()}/"
            names = [prefix + key.tobytes().hex() for key in keys]
            direct = Direct(config, names, layout.object_nbytes + TRAILER_NBYTES)
            memory = pool.allocate_memory(args.pages)
            both = partial(fetcher.store_beside, memory, direct.get_s)
            keep = partial(direct.keep_s, args.dir / "second-tier.kept")
            calls: Sequence[Callable[[], float]] = (fetcher.fetch_s, direct.get_s, both, keep)
            for number in range(args.rounds + 1):
                for call, found in zip(calls, rates.values(), strict=True):
                    seconds = call()
                    if number:  # the first round opens connections
                        found.append(gigabytes / seconds)
                bar.advance(1)
            pool.unregister(memory)
            reader = Reader(config, names, layout.object_nbytes + TRAILER_NBYTES)
            local = Local(fetcher, reader, np.random.default_rng(args.seed + 1))
            for _ in range(args.rounds):
                local.measure()
                bar.advance(1)
        finally:
            fetcher.tier.close()
    return {
        "benchmark": "second_tier",
        "machine": describe(args.dir),
        "pages": args.pages,
        "page_nbytes": layout.object_nbytes,
        **rates,
        **{
            ratio: bootstrap_median(ratios(rates["tier_gb_per_s"], rates[name])).to_dict()
            for name, ratio in _CALLS.items()
            if ratio
        },
        "bar": 0.9,
        "local_p99_ms": local.p99_ms,
        "local_p99_ratio": {
            name: bootstrap_median(ratios(local.p99_ms[name], local.p99_ms["idle"])).to_dict()
            for name in _BESIDE[1:]
        },
        "local_bar": 1.1,
    }


def report(result: dict[str, Any]) -> str:
    """For people."""
    rates = [
        (name.removesuffix("_gb_per_s"), f"{median(result[name]):.2f}", interval_text(found))
        for name, ratio in _CALLS.items()
        for found in [result[ratio] if ratio else None]
    ]
    local = [
        (name, f"{median(times):.2f}", interval_text(result["local_p99_ratio"].get(name)))
        for name, times in result["local_p99_ms"].items()
    ]
    return "\n".join(
        [
            table(("fetching", "GB/s", f"tier over it (bar {result['bar']:g})"), rates),
            "",
            table(("loads beside", "p99 ms", f"of idle (bar {result['local_bar']:g})"), local),
        ]
    )
