"""Alternates a store's loads with other reads of the same bytes into the same memory.

Physical pages of two processes differ in speed, as do locations on a disk.  Here both are the same,
so that a ratio depends only on the software.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count
from os import preadv
from typing import Any, NamedTuple

import numpy as np

from tutti.base.arrays import Keys
from tutti.bench.statistics import interval_text
from tutti.errors import MediumError
from tutti.gio_uring.engine import PRIORITY_LOAD
from tutti.gio_uring.nvme_spec import OPCODE_READ
from tutti.memory.host_memory import HostMemory
from tutti.store import ObjectStore

LOAD, UNVERIFIED = "loads", "unverified loads"
RAW = ("raw reads, four threads", "raw reads, engine alone")
WAYS = (LOAD, UNVERIFIED, *RAW)
LOAD_BAR = 1.05  # times the best peer's loads
_VERIFY_BAR = 0.97  # verified loads, of unverified ones
_RAW_BAR = 0.97  # of raw reads: what the engine may lose for them to be a bound
_THREADS = 4
_WAIT_S = 120.0


class Kept(NamedTuple):
    """Location of a peer's batch: its first page, and the keys of its pages."""

    store: ObjectStore
    memory: HostMemory
    keys: Keys


def ways_of(kept: Kept, load: Callable[[], None]) -> dict[str, Callable[[], None]]:
    """Functions for WAYS to read the batch that `load` loads, fully prepared."""
    core = kept.store._core
    pages = np.arange(len(kept.keys), dtype=np.uint32)
    with core.lock:
        slots = core.index.find(kept.keys)
    extents, memory = core.extents(slots), kept.memory
    pieces = _pieces(kept, extents)

    def unverified() -> None:
        config = core.config
        core.config = replace(config, verify="off")
        try:
            load()
        finally:
            core.config = config

    def read(piece: tuple[int, list[Any], int]) -> None:
        if preadv(*piece) != sum(view.nbytes for view in piece[1]):
            raise MediumError("a raw read ended before its last byte; is the pool's file whole?")

    def by_threads() -> None:
        with ThreadPoolExecutor(_THREADS) as threads:
            list(threads.map(read, pieces))

    def by_engine() -> None:
        job = kept.store.engine.submit(
            OPCODE_READ, extents, pages, memory.memory, priority=PRIORITY_LOAD
        )
        if not job.wait_layers(memory.layout.layers, _WAIT_S) or job.page_status.any():
            raise MediumError("the engine's own reads failed; see the kernel's log")

    return dict(zip(WAYS, (load, unverified, by_threads, by_engine), strict=True))


def _pieces(kept: Kept, extents: Any) -> list[tuple[int, list[Any], int]]:
    """Arguments of preadv(2) for each page, or for each layer if layers are not adjacent."""
    store, memory, numbers = kept.store, kept.memory, count()
    controller: Any = store.controller  # of files
    segments, pieces = range(len(memory.layout.segments)), []
    for slba, nsid, slots in zip(extents.slba, extents.nsid, extents.count, strict=True):
        for i in range(slots):
            page = next(numbers)
            for layer in range(memory.layout.layers):
                block = slba + i * extents.slice_nlb + layer * extents.layer_stride_nlb
                views = [memory.segment(page, layer, k) for k in segments]
                offset = int(block) * store.engine.lba_nbytes
                pieces.append((controller.members[int(nsid) - 1].fd, views, offset))
    return pieces


def notes_of(ways: dict[str, Any], best: float | None) -> list[str]:
    """Notes on the ways.  best: Tutti's load rate over the best other backend's, if any."""
    over = {name: of["base_over_this_speed"] for name, of in ways.items() if name != LOAD}
    raw = min((over[name] for name in RAW), key=lambda of: float(of["median"]))
    verified = over[UNVERIFIED]
    engine = over[RAW[0]]["median"] / over[RAW[1]]["median"]
    loads = f"loads have {interval_text(raw, 2)} of the speed of the faster raw reads of the same"
    loads += " bytes into the same memory"
    if raw["low"] >= _RAW_BAR:
        loads += f"; they lose at most {1 - _RAW_BAR:.0%}, so none is {LOAD_BAR} times as fast as a"
        loads += " backend that reads as fast as these"
    elif raw["high"] < 1:
        loads += ": the raw reads are faster, and part of the difference is lost in "
        is_engine = engine < _RAW_BAR
        loads += "Tutti's engine" if is_engine else "Tutti's digests, look-up and queue, or SGLang"
    if best is not None:
        loads += f"; beside the best other backend they have {best:.2f}, the bar is {LOAD_BAR}"
    reached = "reached" if verified["median"] >= _VERIFY_BAR else "**not reached**"
    digests = ways[UNVERIFIED]["base_minus_this_cpu_s_per_gb"]
    return [
        f"{loads}; the engine alone has {engine:.2f} of the four threads",
        f"verified loads have {interval_text(verified, 2)} of unverified ones in the same memory"
        f" (bar {_VERIFY_BAR}: {reached}), and cost {interval_text(digests)} CPU-s/GB more",
    ]
