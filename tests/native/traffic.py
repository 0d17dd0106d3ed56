"""Traffic of eight threads through the Python API: a program, to be run over a library that was
built with a sanitizer.

    python traffic.py KIND FOLDER SEED ROUNDS [TOKENS]

KIND: "uring" and "threads" are pools in two files with that executor and two service threads,
"vfio" is a pool on two drives that are made of software behind the vfio controller. TOKENS of a
page: 16; with 512, several threads hash what one command has moved. Every round
opens the pool, and each thread puts, looks up, loads and compares objects whose content follows
from their keys, while others clear; then the pool is closed under the last of them. It ends with 0
when no byte was wrong.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from software_drive import SoftwareDrive

import tutti
from tutti.bench.controller_memory import MemoryController
from tutti.errors import CapacityError, KeyMissing, MediumError, PoolClosed
from tutti.gio_uring.controller_span import SpanController
from tutti.medium.geometry import Geometry
from tutti.medium.layout import KVLayout
from tutti.memory.host_memory import HostMemory
from tutti.pool.block_io import opened_io
from tutti.pool.members import Members
from tutti.store import ObjectStore
from tutti.transfers.store_config import StoreConfig
from tutti.transfers.tickets import LoadTicket

TOKENS = int(sys.argv[5]) if len(sys.argv) > 5 else 16
LAYOUT = KVLayout.mha(
    layers=4, kv_heads=2, head_dim=64, page_size=TOKENS, dtype="bfloat16", model="test-model"
)
GEOMETRY = Geometry(
    layers=LAYOUT.layers, segments=LAYOUT.segments, lba_nbytes=4096, group_slots=4, groups=16
)
THREADS = 8
STEPS = 12
PAGES = 8  # of one thread
KEYS = 48  # that one thread knows
TIMEOUT_S = 60.0


class Rounds:
    """Opens a pool again and again and drives it from all threads."""

    def __init__(self, opening: Callable[[], ObjectStore], seed: int) -> None:
        self._opening = opening
        self._seed = seed
        self.errors: list[str] = []
        self._tickets: list[LoadTicket] = []  # of the round
        self.counts = {"put": 0, "load": 0, "cleared": 0, "reset": 0, "failed": 0}

    def run(self, rounds: int) -> None:
        for number in range(rounds):
            store = self._opening()
            self._tickets.clear()
            pool = store.allocate_memory(THREADS * PAGES)
            threads = [
                threading.Thread(target=self._work, args=(store, pool, number, i))
                for i in range(THREADS)
            ]
            for thread in threads:
                thread.start()
            # The last thread finds the pool closed now and then.
            for thread in threads[: THREADS - number % 2]:
                thread.join(TIMEOUT_S)
            store.close(TIMEOUT_S)
            for thread in threads:
                thread.join(TIMEOUT_S)
                if thread.is_alive():
                    self.errors.append("a thread hangs")
            for ticket in self._tickets:  # whose engine and controller are gone
                ticket.cancel(TIMEOUT_S)

    def _work(self, store: ObjectStore, pool: HostMemory, number: int, index: int) -> None:
        rng = np.random.default_rng((self._seed, number, index))
        keys = np.random.default_rng((self._seed, index)).integers(
            0, 256, (KEYS, 16), dtype=np.uint8
        )
        first = index * PAGES
        try:
            for step in range(STEPS):
                rows = np.sort(rng.permutation(KEYS)[: int(rng.integers(1, PAGES))])
                pages = first + np.arange(rows.size)
                work = self._put if rng.random() < 0.5 else self._load
                try:
                    work(store, pool, keys[rows], pages)
                except MediumError:  # of a reset
                    self.counts["failed"] += 1
                if index == 0 and step % 5 == 4:
                    store.clear(deallocate=bool(step % 2))
                    self.counts["cleared"] += 1
                if index == 0 and step % 5 == 2:  # never during a clear, which it would break
                    self._reset(store)
                store.stats()
        except PoolClosed:
            return
        except Exception as error:
            self.errors.append(f"thread {index}: {error!r}")

    def _reset(self, store: ObjectStore) -> None:
        if isinstance(store.controller, SpanController):
            drive = store.controller.drives[self.counts["reset"] % 2]
            assert isinstance(drive, SoftwareDrive)
            drive.reset_beside()
            self.counts["reset"] += 1

    def _put(self, store: ObjectStore, pool: HostMemory, keys: Any, pages: Any) -> None:
        for key, page in zip(keys, pages.tolist(), strict=True):
            pool.write(page, content_of(key))
        with contextlib.suppress(CapacityError):
            self.counts["put"] += store.put(keys, pages).wait(TIMEOUT_S).stored

    def _load(self, store: ObjectStore, pool: HostMemory, keys: Any, pages: Any) -> None:
        there = np.flatnonzero(store.present(keys))
        if not there.size:
            return
        try:
            ticket = store.load(keys[there], pages[there])
        except KeyMissing:
            return  # cleared meanwhile
        try:
            for layer in range(LAYOUT.layers):
                ticket.wait_layer(layer, TIMEOUT_S)
        finally:
            ticket.wait_settled(TIMEOUT_S)  # the pages of a load that failed are the drive's
        for key, page in zip(keys[there], pages[there].tolist(), strict=True):
            if pool.read(page) != content_of(key):
                self.errors.append(f"key {bytes(key).hex()} serves other bytes")
        self.counts["load"] += there.size
        self._tickets.append(ticket)


def content_of(key: Any) -> bytes:
    whole = np.frombuffer(bytes(key), np.uint64)
    rng = np.random.default_rng(whole.tolist())
    return rng.bytes(LAYOUT.object_nbytes)


def file_opening(folder: Path, executor: str) -> Callable[[], ObjectStore]:
    paths = [folder / f"pool-{executor}-{i}" for i in range(2)]
    config = StoreConfig(service_threads=len(paths), verify="always")
    capacity = f"{max(24, TOKENS // 4)}MiB"
    return lambda: tutti.open(
        paths, layout=LAYOUT, capacity=capacity, executor=executor, config=config
    )


def vfio_opening() -> Callable[[], ObjectStore]:
    nbytes = -(-GEOMETRY.member_nbytes // (1 << 20)) << 20
    names = ["left", "right"]
    with MemoryController([nbytes] * len(names)) as medium:
        with opened_io(medium) as (engine, io):
            Members.format(io, engine, names, LAYOUT, GEOMETRY)
        images = [medium.medium(nsid).copy() for nsid in (1, 2)]

    def opening() -> ObjectStore:
        span = SpanController([SoftwareDrive(image) for image in images])
        config = StoreConfig(timeout_s=TIMEOUT_S, verify="always")
        return ObjectStore(span, names, config=config)

    return opening


def main(kind: str, folder: str, seed: str, rounds: str, _: str = "") -> int:
    opening = vfio_opening() if kind == "vfio" else file_opening(Path(folder), kind)
    work = Rounds(opening, int(seed))
    work.run(int(rounds))
    print(work.counts, *work.errors, sep="\n")
    return 1 if work.errors or not work.counts["load"] else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
