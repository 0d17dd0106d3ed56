"""Workload of the bandwidth benchmarks on an open pool: bounded batches of stamped pages.

Pages that are put keep their content, so that only keys change from batch to batch and only the
store is timed; an object has the content of its source page. Pages are loaded into other memory,
and a sample of them is checked outside of the timed part.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from tutti.base.arrays import Keys
from tutti.base.interrupts import uninterrupted
from tutti.bench.meter import Meter
from tutti.bench.stamps import DeviceStamps, Stamps, numbered_keys
from tutti.errors import CapacityError, DeviceTimeout
from tutti.memory.device_memory import DeviceMemory
from tutti.memory.host_memory import HostMemory
from tutti.store import ObjectStore
from tutti.transfers.tickets import LoadTicket, PutTicket

WAIT_S = 120.0

#: Pages of one chain: a prompt of 64K tokens in pages of 64.
CHAIN_PAGES = 1024

T = TypeVar("T")

Pages = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Limit:
    """The end of a phase: after a number of seconds or of bytes, whichever is given."""

    seconds: float | None = 2.0
    nbytes: int | None = None

    def reached(self, seconds: float, nbytes: int) -> bool:
        """Whether no further batch should begin."""
        if self.nbytes is not None:
            return nbytes >= self.nbytes
        return self.seconds is not None and seconds >= self.seconds


@dataclass(frozen=True)
class PendingLoad:
    """A load and the expected content of its pages."""

    ticket: LoadTicket
    pages: Pages
    contents: Pages


class PoolWorkload:
    """An open pool, registered memory for a bounded number of batches, and batches by number.

    batch_pages: objects per put or load.  inflight: batches in flight.
    load_pages: pages of memory for loads, at least batch_pages * inflight.
    memory: registered pages for puts and loads, instead of new host memory.
    memory_pages: use only this many pages for puts, and as many for loads, repeatedly.  Then many
    objects are loaded into each page, like blocks in a benchmark with few buffers; loads are not
    checked, and verification must be off.
    """

    def __init__(
        self,
        store: ObjectStore,
        *,
        batch_pages: int,
        inflight: int,
        load_pages: int,
        hugepages: bool = True,
        memory_pages: int | None = None,
        memory: HostMemory | None = None,
        seed: int = 0,
    ) -> None:
        self.store = store
        self.batch_pages = batch_pages
        self.inflight = inflight
        self.is_checked = memory_pages is None
        assert self.is_checked or store.config.verify == "off", "pages are overwritten"
        self.source_pages = memory_pages or batch_pages * inflight
        self.load_pages = memory_pages or max(load_pages, self.source_pages)
        self.object_nbytes = store.layout.object_nbytes
        pages = self.source_pages + self.load_pages
        self.memory = memory or store.allocate_memory(pages, hugepages=hugepages)
        assert pages <= self.memory.pages, "the memory that was given is too small"
        self.stamps: Stamps | DeviceStamps
        if isinstance(self.memory, DeviceMemory):
            self.stamps = DeviceStamps(self.memory)
        else:
            self.stamps = Stamps(self.memory)
        self.wrong = 0
        self.batches = 0  # put so far
        self._rng = np.random.default_rng(seed)
        sources = np.arange(self.source_pages)
        self.stamps.fill(sources, numbered_keys(sources))
        # Touches the memory, which would otherwise happen in the first timed load.
        self.stamps.fill(
            np.arange(self.source_pages, pages), numbered_keys(np.zeros(self.load_pages))
        )

    @property
    def backing(self) -> str:
        """Actual page kind of the registered memory: "hugetlb", "thp", "pages", or "gpu"."""
        return str(self.memory.owner.backing)

    def keys(self, batch: int) -> Keys:
        """The keys of a batch, uint8 (batch_pages, 16)."""
        return numbered_keys(np.arange(batch * self.batch_pages, (batch + 1) * self.batch_pages))

    def put(self) -> PutTicket:
        """Starts to put the next batch, which continues the chain of the one before."""
        batch = self.batches
        self.batches += 1
        first = batch % self.inflight * self.batch_pages
        pages = np.arange(first, first + self.batch_pages) % self.source_pages
        place = batch % max(1, CHAIN_PAGES // self.batch_pages)
        parent = self.keys(batch - 1)[-1].tobytes() if place else None
        depth = place * self.batch_pages
        return self.store.put(self.keys(batch), pages, parent=parent, depth=depth)

    def resident(self) -> list[int]:
        """Numbers of the batches that are completely in the pool, ascending."""
        room = self.store.stats()["capacity_objects"] // self.batch_pages + 1
        first = max(0, self.batches - room)
        every = range(first, self.batches)
        return [b for b in every if self.store.match(self.keys(b)) == self.batch_pages]

    def load(self, batches: list[int], place: int) -> PendingLoad:
        """Starts to load batches as one prefix, into the load memory from page `place` on."""
        keys = np.concatenate([self.keys(batch) for batch in batches])
        pages = self.source_pages + (place + np.arange(len(keys))) % self.load_pages
        inside = np.arange(self.batch_pages)
        contents = [b % self.inflight * self.batch_pages + inside for b in batches]
        return PendingLoad(self.store.load(keys, pages), pages, np.concatenate(contents))

    @uninterrupted()  # on a thread, as in a server
    def store_phase(self, limit: Limit) -> dict[str, Any]:
        """Puts new batches, several at once; evicts once the pool is full."""
        meter = Meter()
        before = self.store.stats()
        self._puts(meter, limit)
        return self._result(meter, before)

    def fill(self, objects: int) -> None:
        """Puts at least this many objects, untimed."""
        self._puts(Meter(), Limit(None, objects * self.object_nbytes))

    def fill_half(self) -> None:
        """Puts as many objects as fill half of the pool."""
        self.fill(self.store.stats()["capacity_objects"] // 2)

    def prefix(self, pages: int) -> list[int]:
        """The newest resident batches, in order of their puts: about `pages` pages, at least one
        batch, at most what fits into load memory.
        """
        batches = self.resident()
        if not batches:
            raise CapacityError("the pool holds no whole batch; raise --capacity or lower --batch")
        if self.is_checked:
            pages = min(pages, self.load_pages)
        return batches[-max(1, pages // self.batch_pages) :]

    @uninterrupted()
    def retrieve_phase(self, limit: Limit) -> dict[str, Any]:
        """Looks up and loads resident batches in random order, several at once."""
        meter = Meter()
        order = self._shuffled(self.resident())
        before = self.store.stats()
        last = self._loads(meter, limit, order)
        self._check(last)
        return self._result(meter, before)

    def mixed_phase(self, limit: Limit) -> dict[str, Any]:
        """Stores and retrieves on a thread each, until the limit is reached for both."""
        writes, reads, both = Meter(), Meter(), Meter()
        resident = self.resident()
        # The newest quarter: reads keep it recent, so the puts evict other objects.
        order = self._shuffled(resident[-max(1, len(resident) // 4) :])
        before = self.store.stats()
        with both.timed(), ThreadPoolExecutor(2) as threads:
            writer = threads.submit(self._puts, writes, limit)
            last = threads.submit(self._loads, reads, limit, order).result(timeout=WAIT_S * 2)
            writer.result(timeout=WAIT_S * 2)
        self._check(last)
        both.nbytes = writes.nbytes + reads.nbytes
        both.latencies_s = writes.latencies_s + reads.latencies_s
        return {
            **self._result(both, before),
            "store_gb_per_s": writes.gb_per_s,
            "retrieve_gb_per_s": reads.gb_per_s,
        }

    @uninterrupted()
    def layerwise_phase(self, limit: Limit, batches: list[int]) -> dict[str, Any]:
        """Loads one long prefix repeatedly, and waits for layer after layer.

        Latencies are those of the first layer.
        """
        meter = Meter()
        before = self.store.stats()
        last: list[PendingLoad] = []
        keys = np.concatenate([self.keys(batch) for batch in batches])
        while not limit.reached(meter.wall_s, meter.nbytes):
            with meter.timed():
                begin_s = time.perf_counter()
                self.store.match(keys)
                loaded = self.load(batches, 0)
                for layer in range(self.store.layout.layers):
                    loaded.ticket.wait_layer(layer, WAIT_S)
                    if layer == 0:
                        meter.latencies_s.append(time.perf_counter() - begin_s)
            meter.nbytes += loaded.pages.size * self.object_nbytes
            last = [loaded]
        self._check(last)
        return {**self._result(meter, before), "prefix_pages": last[0].pages.size if last else 0}

    def phases(
        self, limit: Limit, prefix_pages: int = 0, prefix: list[int] | None = None
    ) -> dict[str, Callable[[], dict[str, Any]]]:
        """The phases by name; layerwise: of a prefix, by default the newest pages."""
        return {
            "store": lambda: self.store_phase(limit),
            "retrieve": lambda: self.retrieve_phase(limit),
            "mixed": lambda: self.mixed_phase(limit),
            "layerwise": lambda: self.layerwise_phase(limit, prefix or self.prefix(prefix_pages)),
        }

    def _puts(self, meter: Meter, limit: Limit) -> None:
        def finish(ticket: PutTicket) -> int:
            result = ticket.wait(WAIT_S)
            if result.stored == 0:
                raise CapacityError(
                    "a batch was dropped whole: the pool is too small for what is in flight; "
                    "raise --capacity or lower --batch and --inflight"
                )
            return result.stored

        self._pipeline(meter, limit, self.put, finish)

    def _loads(self, meter: Meter, limit: Limit, order: list[int]) -> list[PendingLoad]:
        """Returns the loads whose pages were not overwritten by later loads."""
        last: deque[PendingLoad] = deque(maxlen=self.inflight)
        started = itertools.count()
        turn = itertools.cycle(order)

        def issue() -> PendingLoad:
            place = next(started) % self.inflight * self.batch_pages
            for _ in order:
                batch = next(turn)
                if self.store.match(self.keys(batch)) == self.batch_pages:
                    return self.load([batch], place)
            raise CapacityError("nothing that is read stays in the pool; raise --capacity")

        def finish(loaded: PendingLoad) -> int:
            loaded.ticket.wait(WAIT_S)
            last.append(loaded)
            return int(loaded.pages.size)

        self._pipeline(meter, limit, issue, finish)
        return list(last)

    def _pipeline(
        self, meter: Meter, limit: Limit, issue: Callable[[], T], finish: Callable[[T], int]
    ) -> None:
        """Keeps `inflight` batches under way until the limit, and waits for all of them."""
        waiting: deque[tuple[T, float]] = deque()
        issued_nbytes = 0

        def finish_oldest() -> None:
            ticket, issued_s = waiting.popleft()
            meter.nbytes += finish(ticket) * self.object_nbytes
            meter.latencies_s.append(time.perf_counter() - issued_s)

        with meter.timed():
            begin_s = time.perf_counter()
            while not limit.reached(time.perf_counter() - begin_s, issued_nbytes):
                if len(waiting) == self.inflight:
                    finish_oldest()
                issued_s = time.perf_counter()
                waiting.append((issue(), issued_s))
                issued_nbytes += self.batch_pages * self.object_nbytes
            while waiting:
                finish_oldest()

    def _check(self, loads: list[PendingLoad]) -> None:
        """Counts pages whose content differs from their source page's."""
        for loaded in loads if self.is_checked else ():
            if not loaded.ticket.wait_settled(WAIT_S):
                raise DeviceTimeout("a load does not settle; look at the kernel's log")
            wrong = self.stamps.wrong(loaded.pages, numbered_keys(loaded.contents))
            self.wrong += int(np.count_nonzero(wrong))

    def _shuffled(self, batches: list[int]) -> list[int]:
        if not batches:
            raise CapacityError("the pool holds no whole batch; raise --capacity or lower --batch")
        return [int(b) for b in self._rng.permutation(batches)]

    def _result(self, meter: Meter, before: dict[str, Any]) -> dict[str, Any]:
        after = self.store.stats()
        moved = {name: after[name] - before[name] for name in ("commands", "loaded", "load_runs")}
        runs = moved["load_runs"]
        return {
            **meter.to_dict(),
            "commands": moved["commands"],
            "mean_run_length": moved["loaded"] / runs if runs else 0.0,
            "evicted": after["evicted"] - before["evicted"],
        }
