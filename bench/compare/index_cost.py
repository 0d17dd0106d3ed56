"""Measures the index: memory per object, recovery after a crash, and CPU time per prompt.

The CPU time is that of one thread, which hashes the prompt's tokens, looks all of its pages up and
inserts them, in an index that is full except for these pages.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from tutti import store as object_store
from tutti.arguments import PAGE_SIZE
from tutti.base.units import KiB, MiB
from tutti.bench.pool_workload import Limit, PoolWorkload
from tutti.bench.shape import KvPageShape
from tutti.bench.statistics import median
from tutti.errors import DeviceTimeout, MediumError
from tutti.gio_uring.memory import HostBuffer
from tutti.medium.geometry import RECORD_NBYTES, Geometry
from tutti.medium.keys import KEY_NBYTES, chain_keys
from tutti.placement.index import Index, SlotState

#: The smallest object that the format accepts, so that the pool is little more than its records.
SHAPE = KvPageShape(1, 16 * KiB)

CONTEXTS = (128 * KiB, 256 * KiB, 512 * KiB, MiB)  # tokens

_BATCH_PAGES = 1024
_WRITE_TIMEOUT_S = 1800
_UNLOCK_TIMEOUT_S = 30
_READ_NBYTES = MiB
_THREADS = 8


def measure(directory: str, records: int) -> dict[str, Any]:
    """Fills a pool, kills the process, and measures the recovery and a clean open.

    records: number of objects.  `minus_read_s` is the recovery's time minus the time to read the
    same bytes.  Raises MediumError if acknowledged objects are lost.
    """
    path = Path(directory) / "recovery.tutti"
    try:
        geometry = _make_pool(path, records)
        read_s = _read_time(path, geometry)
        crashed = _open(path, records)
        clean = _open(path, records)
        table_nbytes = geometry.slots * RECORD_NBYTES
    finally:
        path.unlink(missing_ok=True)
    return {
        "records": records,
        "table_nbytes": table_nbytes,
        "index_nbytes_per_object": crashed["index_nbytes_per_object"],
        "after_a_crash": crashed,
        "after_a_clean_close": clean,
        "read_s": read_s,
        "minus_read_s": max(0.0, crashed["open_s"] - read_s),
    }


def latency(records: int, pairs: int, seed: int) -> dict[str, Any]:
    """Medians for prompts of 128K to 1M tokens, a cell each, in an index of ``records`` objects.

    Raises MediumError if a look-up does not find inserted pages.
    """
    rng = np.random.default_rng(seed)
    index = Index(records + CONTEXTS[-1] // PAGE_SIZE, seed=seed)
    others = rng.integers(0, 256, (records, KEY_NBYTES), np.uint8)
    index.insert(np.arange(records), others, 0, 0, state=SlotState.READY)
    cells = {}
    for tokens in CONTEXTS:
        rounds: list[tuple[float, ...]] = []
        for _ in range(pairs + 1):  # the first one warms up
            ids = rng.integers(0, 128_000, tokens, np.uint32)
            slots = np.arange(records, records + tokens // PAGE_SIZE)
            marks = [time.perf_counter()]
            keys = chain_keys(SHAPE.layout().fingerprint, ids, PAGE_SIZE)
            marks.append(time.perf_counter())
            index.insert(slots, keys, 0, np.arange(len(slots)), state=SlotState.READY)
            marks.append(time.perf_counter())
            found = index.match(keys)
            marks.append(time.perf_counter())
            if not np.array_equal(found, slots):
                raise MediumError(f"{len(found)} of {len(slots)} pages were found; report this")
            index.remove(slots, SlotState.FREE)
            rounds.append(tuple(1e3 * (b - a) for a, b in pairwise(marks)))
        parts = zip(("hash", "insert", "lookup"), zip(*rounds[1:], strict=True), strict=True)
        cell = {f"{name}_ms": median(found_ms) for name, found_ms in parts}
        cells[f"{tokens // 1024}K tokens"] = {"pages": len(slots), **cell}
    return cells


def fill_and_vanish(path: str, records: int) -> None:
    """Puts ``records`` objects into a pool and ends the process without closing it."""
    store = object_store.open(path, verify="always", profile=None)
    workload = PoolWorkload(store, batch_pages=_BATCH_PAGES, inflight=4, load_pages=1)
    workload.store_phase(Limit(None, records * SHAPE.object_nbytes))
    os._exit(0)


def _make_pool(path: Path, records: int) -> Geometry:
    # One batch more, and the store's reserve.
    slots = (records + 2 * _BATCH_PAGES) * 65 // 64
    per_slot = SHAPE.object_nbytes + RECORD_NBYTES + 64
    capacity_nbytes = slots * per_slot + 64 * MiB
    geometry = object_store.format(str(path), SHAPE.layout(), capacity_nbytes)
    code = "import sys; from tutti.bench.compare.index_cost import fill_and_vanish as f\n"
    code += "f(sys.argv[1], int(sys.argv[2]))"
    command = [sys.executable, "-P", "-c", code, str(path), str(records)]
    subprocess.run(command, timeout=_WRITE_TIMEOUT_S, check=True)
    _wait_unlocked(path)
    return geometry


def _wait_unlocked(path: Path) -> None:
    """Waits until the kernel has ended a dead process's io_uring, which keeps the file's lock for a
    moment after the process.
    """
    deadline_s = time.monotonic() + _UNLOCK_TIMEOUT_S
    with open(path, "rb") as file:
        while time.monotonic() < deadline_s:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                time.sleep(0.01)
    raise DeviceTimeout(f"the pool is still locked {_UNLOCK_TIMEOUT_S} s after its process ended")


def _open(path: Path, records: int) -> dict[str, Any]:
    cpu_s, begin_s = time.process_time(), time.perf_counter()
    with object_store.open(str(path), verify="always", profile=None) as store:
        store.wait_recovered()
        open_s, cpu_s = time.perf_counter() - begin_s, time.process_time() - cpu_s
        stats = store.stats()
        found = int(stats["slots"]["ready"] + stats["slots"]["unproven"])
    if found < records:
        raise MediumError(f"{found} of {records} objects were found again; the pool lost some")
    return {
        "open_s": open_s,
        "cpu_s": cpu_s,
        "objects": found,
        "index_nbytes_per_object": stats["index_nbytes_per_object"],
    }


def _read_time(path: Path, geometry: Geometry) -> float:
    """Seconds to read the slot table by direct I/O, 1 MiB at a time, on several threads."""
    buffers = [HostBuffer(_READ_NBYTES) for _ in range(_THREADS)]
    end = geometry.table_offset + geometry.slots * RECORD_NBYTES
    offsets = np.arange(geometry.table_offset, end, _READ_NBYTES)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)

    def read(thread: int) -> None:
        for offset in offsets[thread::_THREADS].tolist():
            os.preadv(descriptor, [buffers[thread].array.data], offset)

    try:
        begin_s = time.perf_counter()
        with ThreadPoolExecutor(_THREADS) as threads:
            for future in [threads.submit(read, thread) for thread in range(_THREADS)]:
                future.result(timeout=_WRITE_TIMEOUT_S)
        return time.perf_counter() - begin_s
    finally:
        os.close(descriptor)
