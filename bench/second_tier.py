"""Fetching through the second tier against Mooncake's own batch get, in turns, on the same values.

Then local loads while the tier has nothing to do, asks for pages that no node has, and fetches; and
without this tier, while a process reads the same values by Mooncake, or the pool stores as many.

The tier's time runs from a look-up's miss until the pages are verified and stored in the pool; that
of Mooncake until they are in memory, in one batch, in a process as nice as the tier's.  Then in
turn, what bounds any tier that keeps what it fetches: the same batch get while the pool stores as
many pages that it has in memory, until both are over; and gets of an eighth each, of which one
thread hashes and writes the last while the next is under way.  Each round begins with another.

CPU time of all of them is counted too, with that of the cluster's processes on this machine.  A
cluster must run already.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import multiprocessing
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from tutti.arguments import natural, nbytes, positive
from tutti.base.arrays import Keys
from tutti.base.terminal import ProgressFactory, table
from tutti.base.units import GiB
from tutti.bench.environment import describe
from tutti.bench.pool_file import temporary_pool
from tutti.bench.statistics import bootstrap_median, interval_text, median, percentile, ratios
from tutti.cluster.remote_process import name_prefix
from tutti.cluster.remote_store import RemoteConfig
from tutti.cluster.second_tier import Tier
from tutti.cluster.worker import NICE, trailer_nbytes
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
_FETCHES = ("tier", "mooncake")
_END = "end"
#: What happens beside local loads; "again" is idle too, so that it shows the noise.
_BESIDE = ("idle", "again", "asking", "fetching", "mooncake", "storing")
#: Whose CPU time is counted: the process of the pool, the thread that calls Mooncake and waits in a
#: loop without sleep, the other threads of its process, and the cluster's processes.
_CPU = ("pool", "caller", "client", "servers")


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
        self._keys, self._pages = (
            rng.integers(0, 256, (_LOAD_PAGES, 16), np.uint8),
            range(_LOAD_PAGES),
        )
        self._memory = self._store.allocate_memory(_LOAD_PAGES)
        self._other = self._store.allocate_memory(len(fetcher.keys))
        self._put: PutTicket | None = None
        self.p99_ms: dict[str, list[float]] = {name: [] for name in _BESIDE}

    def measure(self) -> None:
        """One round of each, in any order."""
        for name in self._rng.permutation(_BESIDE):
            self._refill()
            taken = []
            self._reader.go(name == "mooncake")
            for _ in range(_LOADS):
                self._work(name)
                start_s = time.monotonic()
                self._store.load(self._keys, self._pages, memory=self._memory).wait(_WAIT_S)
                taken.append((time.monotonic() - start_s) * 1000)
            self.p99_ms[name].append(percentile(taken, 99))
            self._reader.go(False)
            _until(self._is_idle, "the tier's work")

    def _refill(self) -> None:
        """The pool has the pages that are loaded, and no others; the first load is not timed."""
        self._store.clear(deallocate=False)
        self._store.put(self._keys, self._pages, memory=self._memory).wait(_WAIT_S)
        self._store.load(self._keys, self._pages, memory=self._memory).wait(_WAIT_S)

    def _work(self, name: str) -> None:
        """What a look-up beside the load gives the tier to do;"""
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

    def digests_s(self) -> float:
        """Seconds of hashing all values."""
        start_s = time.monotonic()
        self._hash(self._memory)
        return time.monotonic() - start_s

    def _hash(self, values: NDArray[np.uint8]) -> None:
        for start in range(0, values.size, self._nbytes):
            xxhash.xxh3_128(values.data[start : start + self._nbytes]).digest()

    def keep_s(self, path: Path) -> float:
        """Seconds of gets in parts; a thread hashes and writes each while the next is read."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        base, step = self._addresses[0], -(-len(self._names) // _PARTS)

        def keep(first: int, last: int) -> None:
            part = self._memory[first * self._nbytes : last * self._nbytes]
            self._hash(part)
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
    """A process, as nice as the tier's, with a Direct."""

    def __init__(self, config: RemoteConfig, names: Sequence[str], nbytes: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._peer, other = context.Pipe()
        process = context.Process(target=_read, args=(config, names, nbytes, other), daemon=True)
        process.start()
        other.close()
        assert process.pid is not None
        self.pid = process.pid
        self._reads = False
        self.call("get_s")  # opens connections

    def call(self, name: str, *arguments: object) -> float:
        """Seconds of a call of Direct."""
        self._peer.send((name, *arguments))
        if not self._peer.poll(_WAIT_S):
            raise DeviceTimeout("the process that reads from Mooncake does not; is it set up?")
        return float(self._peer.recv())

    def close(self) -> None:
        """Ends the process."""
        self._peer.send(_END)

    def go(self, reads: bool) -> None:
        """Reads from now on, or has ended reading on return."""
        if reads:
            self._peer.send(None)
        elif self._reads:
            self.call("get_s")
        self._reads = reads


def _read(config: RemoteConfig, names: Sequence[str], nbytes: int, peer: Connection) -> None:
    os.nice(NICE)
    direct = Direct(config, names, nbytes)
    with contextlib.suppress(EOFError):  # the bench has ended
        for request in iter(peer.recv, _END):
            if request is None:
                while not peer.poll():  # bounded by go()
                    direct.get_s()
            else:
                peer.send(getattr(direct, request[0])(*request[1:]))
    os._exit(0)  # Mooncake's destructors may wait for peers that have gone


class CpuTime:
    """CPU seconds of the processes that take part, see _CPU.

    client: a process whose first thread calls Mooncake.
    """

    def __init__(self, config: RemoteConfig, client: int) -> None:
        port = config.options["master_server_address"].rpartition(":")[2]
        found = [path for path in Path("/proc").glob("[0-9]*") if _serves(path, port)]
        self._servers = [int(path.name) for path in found]
        self._client = client

    def read(self) -> NDArray[np.float64]:
        """In the order of _CPU."""
        threads = _thread_seconds(self._client)
        caller = threads.pop(self._client, 0.0)
        servers = sum(sum(_thread_seconds(pid).values()) for pid in self._servers)
        return np.array([time.process_time(), caller, sum(threads.values()), servers])


def _serves(process: Path, port: str) -> bool:
    """Whether this is a master of this port, or a segment server of it."""
    try:
        words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return False  # it has ended
    ends = (f":{port}", f"--rpc_port={port}")
    return Path(words[0]).name.startswith("mooncake_") and any(w.endswith(ends) for w in words)


def _thread_seconds(pid: int) -> dict[int, float]:
    seconds = {}
    for task in Path(f"/proc/{pid}/task").glob("*"):
        with contextlib.suppress(OSError):  # it has ended
            seconds[int(task.name)] = int((task / "schedstat").read_text().split()[0]) / 1e9
    return seconds


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
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
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

    def ratio_to(name: str) -> dict[str, float]:
        return bootstrap_median(ratios(rates["tier"], rates[name])).to_dict()

    return {
        **{f"{name}_gb_per_s": values for name, values in rates.items()},
        "ratio": ratio_to("mooncake"),
        "ratio_to_mooncake_and_write": ratio_to("mooncake_and_write"),
        "ratio_to_mooncake_and_store": ratio_to("mooncake_and_store"),
        "bar": 0.9,
    }


def _cpu(cpu: Mapping[str, list[NDArray[np.float64]]], gigabytes: float) -> dict[str, Any]:
    """CPU seconds per GB (medians), and how the tier compares without those of the caller's loop.

    cpu_bound_gb_per_s: of all cores if they did nothing else.  cpu_ratio_bound: the ratio of a tier
    whose digests and puts cost what they cost alone, and which costs nothing else.
    """
    per_gb = {name: np.median(np.array(rows), axis=0) / gigabytes for name, rows in cpu.items()}
    busy = {name: [row.sum() - row[_CPU.index("caller")] for row in cpu[name]] for name in cpu}
    cores = len(os.sched_getaffinity(0))
    get_s = float(np.median(busy["mooncake"])) / gigabytes
    landing_s = float(per_gb["digests"].sum() + per_gb["store"].sum())
    bound = {name: cores * gigabytes / float(np.median(busy[name])) for name in _FETCHES}
    return {
        "cpu_s_per_gb": {
            name: dict(zip(_CPU, map(float, row), strict=True)) for name, row in per_gb.items()
        },
        "cpu_ratio": bootstrap_median(ratios(busy["mooncake"], busy["tier"])).to_dict(),
        "cpu_ratio_bound": get_s / (get_s + landing_s),
        "cores": cores,
        "cpu_bound_gb_per_s": bound,
    }


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
    start_s = time.monotonic()
    config = RemoteConfig.parse(args.remote)
    if importlib.util.find_spec("mooncake") is None:
        raise Unsupported("this bench needs Mooncake's client: pip install 'tutti-kv[cluster]'")
    layout = KVLayout.mha(
        layers=_LAYERS, kv_heads=8, head_dim=128, page_size=16, dtype="bfloat16", model="bench"
    )
    keys = np.random.default_rng(args.seed).integers(0, 256, (args.pages, 16), np.uint8)
    gigabytes = args.pages * layout.object_nbytes / 1e9
    with (
        temporary_pool([str(args.dir / "second-tier.tutti")], layout, args.capacity) as pool,
        progress("second tier", 2 * args.rounds + 1) as bar,
    ):
        fetcher = Fetcher(pool, config, keys)
        try:
            fetcher.publish(args.seed)
            prefix = name_prefix(config, layout)
            names = [prefix + key.tobytes().hex() for key in keys]
            reader = Reader(config, names, layout.object_nbytes + trailer_nbytes(_LAYERS))
            memory = pool.allocate_memory(args.pages)
            get = partial(reader.call, "get_s")
            cpu = CpuTime(config, reader.pid)
            path = args.dir / "second-tier.kept"
            seconds, spent = _measure(
                {
                    "tier": (fetcher.fetch_s, CpuTime(config, fetcher.worker)),
                    "mooncake": (get, cpu),
                    "mooncake_and_store": (partial(fetcher.store_beside, memory, get), cpu),
                    "mooncake_and_write": (partial(reader.call, "keep_s", path), cpu),
                    "store": (partial(fetcher.store_beside, memory, lambda: None), cpu),
                    "digests": (partial(reader.call, "digests_s"), cpu),
                },
                args.rounds,
                bar.advance,
            )
            pool.unregister(memory)
            local = Local(fetcher, reader, np.random.default_rng(args.seed + 1))
            for _ in range(args.rounds):
                local.measure()
                bar.advance(1)
            reader.close()
        finally:
            fetcher.tier.close()
    return {
        "benchmark": "second_tier",
        "machine": describe(args.dir),
        "pages": args.pages,
        "page_nbytes": layout.object_nbytes,
        "took_s": time.monotonic() - start_s,
        **_throughput(seconds, gigabytes),
        **_cpu(spent, gigabytes),
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
        (
            name,
            f"{median(result[f'{name}_gb_per_s']):.2f}",
            interval_text(result.get("ratio" if name == "mooncake" else f"ratio_to_{name}")),
            f"{sum(cpu.values()) - cpu['caller']:.2f}",
        )
        for name, cpu in result["cpu_s_per_gb"].items()
    ]
    local = [
        (name, f"{median(times):.2f}", interval_text(result["local_p99_ratio"].get(name)))
        for name, times in result["local_p99_ms"].items()
    ]
    return "\n".join(
        [
            table(("what", "GB/s", f"tier over it (bar {result['bar']:g})", "CPU s/GB"), rates),
            f"CPU time of Mooncake's get over the tier's: {interval_text(result['cpu_ratio'])};"
            f" bound {result['cpu_ratio_bound']:.2f}",
            "",
            table(("loads beside", "p99 ms", f"of idle (bar {result['local_bar']:g})"), local),
        ]
    )
