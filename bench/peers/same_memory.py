"""Alternates a store's transfers with others of as many bytes, from and into the same memory.

Physical pages of two processes differ in speed, as do locations on a disk.  Here both are the same,
but for reads of a file per page, so that a ratio depends only on the software.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from fcntl import F_SETFL, fcntl
from functools import partial
from os import O_DIRECT, preadv, pwritev, sync
from time import thread_time_ns
from typing import IO, Any, NamedTuple

import numpy as np

from tutti.base.arrays import Keys
from tutti.base.units import MiB
from tutti.bench.statistics import Interval, bootstrap_median, interval_text, ratios
from tutti.errors import MediumError
from tutti.gio_uring.engine import DIGEST_NONE, PRIORITY_LOAD
from tutti.gio_uring.nvme_spec import OPCODE_READ
from tutti.memory.host_memory import HostMemory
from tutti.native import address, lib
from tutti.placement.index import MISSING
from tutti.store import ObjectStore

LOAD, STORE = "loads", "stores"
UNVERIFIED = {LOAD: "unverified loads", STORE: "unverified stores"}
RAW = ("raw reads, four threads", "raw reads, engine alone")
FILES = "raw reads, a file per page"
#: Digests by one thread, of at most 1 MiB at a time: of what it just read, and of what lies there.
HASHED = {LOAD: "raw reads and digests, one thread", STORE: "digests alone, one thread"}
#: Each way, and the one that it is compared with.
WAYS = dict.fromkeys((LOAD, UNVERIFIED[LOAD], *RAW, FILES, HASHED[LOAD]), LOAD)
WAYS |= dict.fromkeys((STORE, UNVERIFIED[STORE], HASHED[STORE]), STORE)
LOAD_BAR = 1.05  # times the best peer's loads
_VERIFY_BAR = 0.97  # verified loads and stores, of unverified ones
_RAW_BAR = 0.97  # of raw reads: what the engine may lose for them to be a bound
CPU_BAR = 0.03  # CPU-s/GB more than the backend that takes least
_THREADS = 4
_WAIT_S = 120.0

#: HASHED return CPU seconds of digests.
Call = Callable[[], float | None]
#: Results by system or way.
_Found = dict[str, dict[str, Any]]
#: Arguments of preadv(2) and pwritev(2).
_Piece = tuple[int, list[Any], int]


class Kept(NamedTuple):
    """Location of a peer's batch: its first page, and the keys of its pages."""

    store: ObjectStore
    memory: HostMemory
    keys: Keys


@contextmanager
def unverified(store: ObjectStore) -> Iterator[None]:
    """Meanwhile a store that verifies does not.  Nothing may be in flight at the two ends."""
    core, puts = store._core, store._writer._quick._put.data
    config, digest = core.config, puts.digest
    core.config, puts.digest = replace(config, verify="off"), DIGEST_NONE
    try:
        yield
    finally:
        core.config, puts.digest = config, digest


def ways_of(kept: Kept, load: Call, store: Call, files: list[IO[bytes]]) -> dict[str, Call]:
    """Functions for WAYS, fully prepared.  kept: the batch that `load` loads; the memory has its
    bytes now, which are written to `files`, a page to each.
    """
    core, memory = kept.store._core, kept.memory
    numbers = np.arange(len(kept.keys), dtype=np.uint32)
    with core.lock:
        slots = core.index.find(kept.keys)
    extents = core.extents(slots)

    def by_engine() -> None:
        job = kept.store.engine.submit(
            OPCODE_READ, extents, numbers, memory.memory, priority=PRIORITY_LOAD
        )
        if not job.wait_layers(memory.layout.layers, _WAIT_S) or job.page_status.any():
            raise MediumError("the engine's own reads failed; see the kernel's log")

    pieces = _pieces(kept, extents)
    written = _written(pieces, memory.layout.layers, files)
    cut = _cut(pieces)
    return {
        LOAD: load,
        UNVERIFIED[LOAD]: unverified(kept.store)(load),
        RAW[0]: partial(_each, _THREADS, pieces, preadv),
        RAW[1]: by_engine,
        # NIXL, too, gives the kernel all requests of a batch at once.
        FILES: partial(_each, len(written), written, preadv),
        HASHED[LOAD]: partial(_hashed, cut, preadv),
        STORE: store,
        UNVERIFIED[STORE]: unverified(kept.store)(store),
        HASHED[STORE]: partial(_hashed, cut, lambda _, views, __: views[0].nbytes),
    }


def discard(kept: Kept) -> None:
    """Frees the slots of a batch.  Unlike `delete` this leaves no hole in the pool's file, which
    would make the next store slower.  Raises MediumError if a page of the batch is not stored.
    """
    with kept.store._core.lock:
        slots = np.sort(kept.store._core.index.find(kept.keys))
        if slots[0] == MISSING:
            raise MediumError("a page was not stored; is the pool too small?")
        kept.store._reclaimer.discard(slots)


def _each(threads: int, pieces: list[_Piece], call: Callable[..., int]) -> None:
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(partial(_transfer, call), pieces))


def _transfer(call: Callable[..., int], piece: _Piece) -> None:
    if call(*piece) != sum(view.nbytes for view in piece[1]):
        raise MediumError("a raw transfer ended before its last byte; is the disk full?")


def _pieces(kept: Kept, extents: Any) -> list[_Piece]:
    """The pages in the pool's files; if layers are not adjacent, each layer of a page."""
    store, memory = kept.store, kept.memory
    controller: Any = store.controller  # of files
    layers, segments = memory.layout.layers, range(len(memory.layout.segments))
    pieces: list[_Piece] = []
    for slba, nsid, slots in zip(extents.slba, extents.nsid, extents.count, strict=True):
        for i, layer in np.ndindex(int(slots), layers):
            block = slba + i * extents.slice_nlb + layer * extents.layer_stride_nlb
            views = [memory.segment(len(pieces) // layers, layer, k) for k in segments]
            offset = int(block) * store.engine.lba_nbytes
            pieces.append((controller.members[int(nsid) - 1].fd, views, offset))
    return pieces


def _cut(pieces: list[_Piece]) -> list[_Piece]:
    """The same bytes in pieces of one buffer, of at most 1 MiB."""
    cut: list[_Piece] = []
    for file, views, offset in pieces:
        for view in views:
            cut += [(file, [view[i : i + MiB]], offset + i) for i in range(0, view.nbytes, MiB)]
            offset += view.nbytes
    return cut


def _hashed(pieces: list[_Piece], call: Callable[..., int]) -> float:
    """Transfers and digests piece after piece; returns the CPU seconds of digests.

    A call that hashes nothing is timed just before each digest, and is subtracted from it.
    """
    digest = partial(lib().tutti_xxh3_64_isa, lib().tutti_isa_best())
    spent_ns = 0
    for piece in pieces:
        (view,) = piece[1]
        given = np.array([address(view), view.nbytes], np.uint64)
        where, nbytes = address(given), address(given) + given.itemsize
        _transfer(call, piece)
        digest(where, nbytes, 0)  # the first call is slower
        at_ns = thread_time_ns()
        digest(where, nbytes, 0)
        empty_ns = thread_time_ns()
        digest(where, nbytes, 1)
        spent_ns += thread_time_ns() - empty_ns - (empty_ns - at_ns)
    return spent_ns / 1e9


def _written(pieces: list[_Piece], layers: int, files: list[IO[bytes]]) -> list[_Piece]:
    """The same pages in a file each, written with the bytes in memory."""
    written: list[_Piece] = []
    for page, file in enumerate(files):
        fcntl(file, F_SETFL, O_DIRECT)
        views = [view for piece in pieces[page * layers :][:layers] for view in piece[1]]
        written.append((file.fileno(), views, 0))
    _each(_THREADS, written, pwritev)
    sync()
    return written


def notes_of(ways: dict[str, Any], best: float | None) -> list[str]:
    """Notes on the ways, of which older results lack some.  best: Tutti's load rate over the best
    other backend's, if any.
    """
    over = {name: of.get("base_over_this_speed") for name, of in ways.items()}
    fastest = min(RAW, key=lambda name: float(over[name]["median"]))
    raw, engine = over[fastest], over[RAW[0]]["median"] / over[RAW[1]]["median"]
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
    notes = [f"{loads}; the engine alone has {engine:.2f} of the four threads"]
    if FILES in ways:
        most = bootstrap_median(ratios(ways[fastest]["gb_per_s"], ways[FILES]["gb_per_s"]))
        files = f"the faster raw reads have {interval_text(most.to_dict(), 2)} of the speed of raw"
        files += " reads of a file per page"
        if most.high < LOAD_BAR:
            files += f", so no loads from Tutti's file are {LOAD_BAR} times as fast as a backend"
            files += " that reads such files as fast"
        notes.append(files)
    for base, name in UNVERIFIED.items():
        if name in ways:
            reached = "reached" if over[name]["median"] >= _VERIFY_BAR else "**not reached**"
            digests = interval_text(ways[name]["base_minus_this_cpu_s_per_gb"])
            notes.append(
                f"verified {base} have {interval_text(over[name], 2)} of unverified ones in the"
                f" same memory (bar {_VERIFY_BAR}: {reached}), and cost {digests} CPU-s/GB more"
            )
    return notes


def cpu_notes_of(base: str, ways: _Found, backends: _Found, fio: _Found) -> list[str]:
    """Whether digests put the goal for CPU time out of reach.  base: LOAD or STORE.

    backends, fio: peers in that direction, without Tutti's.  Older results lack HASHED.
    """
    if HASHED[base] not in ways or not backends:
        return []
    bare = {name: of for name, of in ways.items() if WAYS[name] == base}
    own = bootstrap_median(bare.pop(base)["cpu_s_per_gb"])
    digest = bootstrap_median(bare.pop(HASHED[base])["digest_cpu_s_per_gb"])
    (cheapest, transfer), (best, bar) = _least(bare | fio | backends), _least(backends)
    low, high = digest.low + transfer.low, digest.high + transfer.high
    said = "NOT RESOLVED whether the sum of both exceeds it"
    if low > bar.high + CPU_BAR and own.low >= low:
        said = "the sum of both exceeds it, so it is out of reach of XXH3-64 and transfers that"
        said += " cost as much; other digests and cheaper transfers were not measured"
    elif min(high, own.high) < bar.low + CPU_BAR or own.high < low:
        said = f"this shows no limit (the sum of both is {low:.3f} to {high:.3f})"
    parts = [interval_text(of.to_dict()) for of in (own, digest, transfer, bar)]
    return [
        f"CPU-s/GB of verified {base}: {parts[0]}; digests by one thread in the same memory,"
        f" {parts[1]}; the cheapest transfers without them ({cheapest}) {parts[2]};"
        f" bar {CPU_BAR} above {best}'s {parts[3]}: {said}"
    ]


def _least(found: _Found) -> tuple[str, Interval]:
    """Name and CPU-s/GB of what takes least."""
    cpus = {name: bootstrap_median(of["cpu_s_per_gb"]) for name, of in found.items()}
    return min(cpus.items(), key=lambda one: one[1].median)
