"""The loads of one SGLang batch, which linker.py starts layer by layer.

Each key is read once, also if several pages need it: into staging, from where the thread that waits
for a layer copies it to these pages. Keys that were read ahead are in staging already. Loads that
do not fit into staging are read directly into SGLang's pages, and so is everything that was not
read ahead if these are in GPU memory: its streams wait.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tutti.base.arrays import Keys
from tutti.base.process import Owned
from tutti.errors import DeviceTimeout, MediumError
from tutti.integration.sglang.direct.gpu_copies import Gpu
from tutti.integration.sglang.direct.kv_pools import Pages
from tutti.integration.sglang.direct.read_ahead import ReadAhead
from tutti.integration.sglang.direct.reads import Read
from tutti.integration.sglang.direct.staging_copy import Copy, Fence, PoolReadPlan, StagingCopier
from tutti.integration.sglang.direct.stored_pool import StoredPool


@dataclass(frozen=True)
class QueuedLoad:
    """One request's load from one pool: keys (n, 16), and SGLang's slots of n pages."""

    stored_pool: StoredPool
    keys: Keys
    slots: torch.Tensor


def plan_loads(
    stored_pool: StoredPool, keys: Keys, pages: Pages, ahead: ReadAhead, batch: str, until_s: float
) -> PoolReadPlan:
    """Plans to read each key at most once: not if it is staged, into staging if the rest fits, else
    into the first page that needs it.

    keys (n, 16), pages (n,): the loads of all requests of a batch from one pool.  batch: its name.
    Raises DeviceTimeout if staging is needed and not released until until_s (time.monotonic()).
    """
    names: dict[bytes, int] = {}
    row_of = np.array([names.setdefault(key.tobytes(), len(names)) for key in keys], np.int64)
    _, first = np.unique(row_of, return_index=True)
    taken = ahead.take(stored_pool, list(names))
    copies = _copies_of_staged(taken, row_of, pages)
    reads = list({id(read): read for read, _ in taken.values()}.values())
    rest = np.array([row for row in range(len(names)) if row not in taken], np.int64)
    if not rest.size:
        return PoolReadPlan([], reads, copies)
    staging = None
    if not stored_pool.reads_directly:
        ahead.make_room(stored_pool, rest.size)
        # What was dropped may still be being read; other pools can do without staging.
        left_s = until_s - time.monotonic() if stored_pool.memory is None else 0.0
        staging = stored_pool.loads.allocate(rest.size, left_s)
    place = np.full(len(names), -1, np.int64)
    wanted = np.isin(row_of, rest)
    if staging is not None and stored_pool.loads.memory is not None:
        place[rest] = staging
        read = Read(stored_pool, keys[first[rest]], staging, staged=True, batch=batch)
        copies.append(Copy(read, place[row_of[wanted]], pages[wanted]))
    elif stored_pool.memory is None:
        for held in reads:
            ahead.release(held)
        raise DeviceTimeout(
            f"{rest.size} pages of pool {stored_pool.name} need staging, and only "
            f"{stored_pool.loads.free} are free: the device still uses the others"
        )
    else:
        place[rest] = pages[first[rest]]
        wanted[first] = False
        read = Read(stored_pool, keys[first[rest]], place[rest], staged=False, batch=batch)
        if wanted.any():
            copies.append(Copy(read, place[row_of[wanted]], pages[wanted]))
    return PoolReadPlan([read], reads, copies)


def _copies_of_staged(
    taken: dict[int, tuple[Read, int]], row_of: Pages, pages: Pages
) -> list[Copy]:
    by_read: dict[int, tuple[Read, list[int], list[int]]] = {}
    for at, row in enumerate(row_of.tolist() if taken else ()):
        found = taken.get(row)
        if found is not None:
            read, place = found
            _, rows, targets = by_read.setdefault(id(read), (read, [], []))
            rows.append(int(read.pages[place]))
            targets.append(int(pages[at]))
    return [
        Copy(read, np.array(rows, np.int64), np.array(targets, np.int64))
        for read, rows, targets in by_read.values()
    ]


class LoadBatch(Owned):
    """The load of one batch.  Thread-safe; in host memory the waiting thread copies from staging.

    queued: the loads of all requests and pools.  layers: number of the model's transfer layers.
    rids: the requests; nothing is kept for them after the start.
    name: names the batch's reads for the step that computes it.
    fence: events on SGLang's device that must have happened before its pages are written.
    timeout_s: limit for the last layer, from now on.
    gpu: the GPU with SGLang's pages; None for host memory.
    """

    def __init__(
        self,
        queued: Sequence[QueuedLoad],
        layers: int,
        *,
        rids: Sequence[str] = (),
        name: str = "",
        ahead: ReadAhead,
        fence: Fence,
        timeout_s: float,
        gpu: Gpu | None = None,
    ) -> None:
        self.queued = queued
        self.error: BaseException | None = None
        self.waited_s = 0.0
        self.rids = rids
        self._name = name
        self._ahead = ahead
        self._fence = fence
        self._deadline_s = time.monotonic() + timeout_s
        self._lock = threading.Lock()
        self._started = threading.Event()
        self._planning = threading.Lock()
        self._abandoned = False
        self._plans: list[PoolReadPlan] = []
        self._ready = 0
        self._layers = layers
        self._ended = False
        self._gpu = gpu
        self._copier = None if gpu is None else StagingCopier(gpu, layers, name)

    def moved(self) -> list[tuple[StoredPool, int, int, float]]:
        """(pool, distinct pages loaded, bytes read for this batch alone, and a share of the time in
        proportion to these) for each pool.
        """
        found, whole = [], self.nbytes
        for plan in self._plans:
            rows = [copy.rows for copy in plan.copies if copy.read not in plan.fresh]
            pages = sum(len(read.keys) for read in plan.fresh)
            pages += sum(np.unique(taken).size for taken in rows)
            nbytes = sum(read.nbytes for read in plan.fresh)
            part_s = self.took_s * (nbytes / whole if whole else 1 / len(self._plans))
            found.append(((*plan.fresh, *plan.ahead)[0].stored_pool, pages, nbytes, part_s))
        return found

    @property
    def nbytes(self) -> int:
        """Bytes read from the medium for this batch alone."""
        return sum(read.nbytes for plan in self._plans for read in plan.fresh)

    @property
    def ahead_nbytes(self) -> int:
        """Bytes of the reads ahead that this batch uses."""
        return sum(read.nbytes for plan in self._plans for read in plan.ahead)

    def start(self) -> None:
        """Submits the reads; called on a thread that may block."""
        try:
            for wanted in self._wanted():
                with self._planning:
                    if self._abandoned:
                        break
                    plan = plan_loads(*wanted, self._ahead, self._name, self._deadline_s)
                    self._plans.append(plan)
                self._ahead.join(plan.ahead, self._name)
                for read in plan.fresh:
                    read.start()
            if self._copier is not None and not self._abandoned:
                self._copier.copy_layer(self._plans, self._deadline_s)
        except Exception as error:
            self.error = error
        finally:
            if self._copier is not None:
                self._copier.end()
            for rid in self.rids:
                self._ahead.forget(rid)
            self._started.set()

    def _wanted(self) -> list[tuple[StoredPool, Keys, Pages]]:
        """The loads by pool; returns when pages may be written, or on a GPU, writes are ordered."""
        if self._gpu is None:
            self._fence.wait(self._deadline_s)
            return _by_stored_pool(self.queued)
        self._fence.wait_slots(self._deadline_s)
        wanted = _by_stored_pool(self.queued)
        self._gpu.follow(self._fence.events)
        if self._copier is not None:
            self._copier.watch(self._fence, self._deadline_s)
        return wanted

    def wait_layer(self, layer: int) -> None:
        """Waits until the layer is in SGLang's pages, or ``error`` is set.

        On a GPU, makes the caller's stream wait for it.
        """
        if self._copier is not None:
            self._order(layer, self._copier)
            return
        if layer < self._ready:
            return
        with self._lock:
            began_s = time.monotonic()
            try:
                for due in range(self._ready, min(layer + 1, self._layers)):
                    if self.error is not None:
                        break
                    self._copy_from_staging(due)
                    self._ready = due + 1
            except Exception as error:
                self.error = error
            self.waited_s += time.monotonic() - began_s

    def _order(self, layer: int, copier: StagingCopier) -> None:
        began_s = time.monotonic()
        try:
            if not copier.order(layer, self._deadline_s):
                raise DeviceTimeout("the load did not start before its deadline")
        except Exception as error:
            self.error = self.error or error
        self.waited_s += time.monotonic() - began_s

    @property
    def bubble_s(self) -> float:
        """Seconds that the forward's thread, and its stream, waited for layers."""
        return self.waited_s + (0.0 if self._copier is None else self._copier.waited_s)

    @property
    def took_s(self) -> float:
        """Duration in seconds: the waits; or, where streams wait, from the first read to the end of
        the last read and of the copies, without the time that copies waited for the batch before.
        """
        fresh = [read for plan in self._plans for read in plan.fresh]
        if self._copier is None or not fresh:
            return self.waited_s
        began_s = min(read.began_s for read in fresh)
        copied_s = self._copier.ended_s - max(began_s, self._copier.free_s)
        return max(copied_s, max(read.ended_s for read in fresh) - began_s)

    def end(self) -> bool:
        """Waits for all layers and releases staging; returns whether every page is right.

        Raises DeviceTimeout when the device may still write into SGLang's pages.
        """
        self.wait_layer(self._layers - 1)
        with self._lock:
            if self._ended:
                return self.error is None
            self._ended = True
        with self._planning:
            self._abandoned = True  # nothing more is planned
        if isinstance(self.error, MediumError):
            # Damaged objects are removed when their reads end: a retry must not find them.
            for read in [read for plan in self._plans for read in (*plan.ahead, *plan.fresh)]:
                read.wait_over(self._deadline_s)
        left = time.monotonic() + max(1.0, self._deadline_s - time.monotonic())
        safe = self._copier is None or self._copier.wait_over(left)
        for plan in self._plans if safe else ():
            for read in plan.ahead:
                self._ahead.release(read)
            for read in plan.fresh:
                if read.staged:
                    read.retire()
                else:
                    safe = read.wait_over(left) and safe
                    if safe and self._copier is not None:
                        self.error = self.error or read.outcome()
        if not safe:
            raise DeviceTimeout(
                "the device may still write pages of this load, and SGLang would use them "
                "for other requests; restart the server, with a larger load_staging if this recurs"
            )
        return self.error is None

    def _copy_from_staging(self, layer: int) -> None:
        if not self._started.wait(max(0.0, self._deadline_s - time.monotonic())):
            raise DeviceTimeout("the load did not start before its deadline")
        if self.error is not None:
            return
        for plan in self._plans:
            for read in plan.fresh:
                own = read.stored_pool.kv_pool.layer_of.get(layer)
                if own is not None:
                    read.wait_layer(own, self._deadline_s)
            for copy in plan.copies:
                stored_pool = copy.read.stored_pool
                own = stored_pool.kv_pool.layer_of.get(layer)
                if own is not None:
                    copy.read.wait_layer(own, self._deadline_s)
                    source = (
                        stored_pool.loads.views if copy.read.staged else stored_pool.kv_pool.views
                    )
                    stored_pool.copy_from_staging(own, source, copy.rows, copy.targets)


def _by_stored_pool(queued: Sequence[QueuedLoad]) -> list[tuple[StoredPool, Keys, Pages]]:
    """The loads of a batch by pool.  Waits for SGLang's device.

    Raises ConfigError for slots that are not whole pages, before anything is moved.
    """
    grouped: dict[str, list[QueuedLoad]] = {}
    for load in queued:
        grouped.setdefault(load.stored_pool.name, []).append(load)
    wanted = []
    for loads in grouped.values():
        stored_pool = loads[0].stored_pool
        keys = np.concatenate([load.keys for load in loads])
        pages = [stored_pool.page_numbers(load.slots, len(load.keys)) for load in loads]
        wanted.append((stored_pool, keys, np.concatenate(pages)))
    return wanted


class LayerCounter:
    """Blocks the forward until its next layer has arrived; on a GPU its stream waits.

    A failure is not raised in the forward: `finish` reports it, and SGLang aborts the batch.
    began: called with every layer that the forward waited for, and the seconds.
    """

    def __init__(
        self, num_layers: int, began: Callable[[int, float], object] | None = None
    ) -> None:
        self.num_layers = num_layers
        self._began = began
        self.consumer_index = -1
        self._producer_index = -1
        self._batches: dict[int, LoadBatch] = {}

    @property
    def next_index(self) -> int:
        """The index that the next ``add`` returns."""
        return self._producer_index + 1

    def add(self, batch: LoadBatch) -> int:
        """Adds and selects a batch; returns the index by which its forward refers to it.

        Its forward is the next one.  SGLang 0.5.23 does not select it for an embedding model.
        """
        self._producer_index += 1
        self._batches[self._producer_index] = batch
        self.consumer_index = self._producer_index
        return self._producer_index

    def set_consumer(self, index: int) -> None:
        """Selects the batch of the next waits; -1 for none."""
        self.consumer_index = index

    def wait_until(self, layer: int) -> None:
        """Waits until the layer is in SGLang's pages or has failed.  Idempotent."""
        batch = self._batches.get(self.consumer_index)
        waited_s = 0.0
        if batch is not None:
            waited_s = -batch.waited_s
            batch.wait_layer(layer)
            waited_s += batch.waited_s
        if self._began is not None:
            self._began(layer, waited_s)

    def finish(self, index: int) -> LoadBatch | None:
        """Removes and returns a batch."""
        return self._batches.pop(index, None)

    def reset(self, end: Callable[[LoadBatch], object]) -> None:
        """Forgets all batches, ending each."""
        batches, self._batches = self._batches, {}
        for batch in batches.values():
            end(batch)
        self._producer_index = self.consumer_index = -1
