"""Measures the engine's part of a store's loads: no index, scheduler or tickets, one job per load.

After each load of the store, the same locations are read again through another engine over the same
files.  So the store's loads are not disturbed, and the engine alone profits from warm caches.  A
third of the loads is verified like those of the store, a third is not, and for the last third one
job reads 64 objects, without digests.  The differences show the cost of digests, and the cost of
submission, sleep and wake-up per load.
"""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np
import xxhash

from tutti.base.arrays import U64, Keys
from tutti.bench.meter import Meter
from tutti.bench.prepared_read import PreparedRead
from tutti.errors import MediumError
from tutti.gio_uring.controller_file import FileController
from tutti.gio_uring.engine import Engine
from tutti.memory.host_memory import HostMemory
from tutti.store import ObjectStore

_MANY = 64
KINDS = ("engine alone", "engine, no digests", f"engine, {_MANY} a job")
VERIFIED, UNVERIFIED, MANY = KINDS
_WAIT_S = 120.0


class EngineAlone:
    """Reads the objects again that a store has loaded into the first pages of `loaded`.

    paths: the files of the store's pool.  meters: one per KINDS.
    """

    def __init__(
        self,
        store: ObjectStore,
        paths: list[str],
        loaded: HostMemory,
        *,
        executor: str,
        hugepages: bool,
    ) -> None:
        self.meters = {kind: Meter() for kind in KINDS}
        self._core = store._core  # no public interface has the slots of keys
        self._loaded = loaded
        memory = HostMemory.allocate(store.layout, max(loaded.pages, _MANY), hugepages=hugepages)
        self._memory = memory.memory
        self._pages = self._memory.check_pages(np.arange(memory.pages))
        self._gathered = np.zeros(0, np.int64)
        self._turn = 0
        with ExitStack() as undo:
            lba_nbytes = store.geometry.lba_nbytes
            controller = FileController(paths, lba_nbytes=lba_nbytes, executor=executor)
            undo.enter_context(controller)
            self._engine = Engine(controller, window_nbytes=store.config.window_nbytes)
            undo.callback(self._engine.close)
            for region in controller.register_all(memory.buffers):
                undo.callback(region.close)
            controller.read_page_sizes()
            self.close = undo.pop_all().close

    def again(self, keys: Keys) -> None:
        """Reads the objects of keys (n, 16), which must be in the pool, if it is their turn.

        Raises MediumError if the bytes differ from those that the store has loaded.
        """
        kind = KINDS[self._turn % len(KINDS)]
        self._turn += 1
        slots = self._core.index.find(keys)
        if kind == MANY:
            slots = np.append(self._gathered, slots)
            self._gathered = slots[_MANY:] if slots.size >= _MANY else slots
            if slots.size < _MANY:
                return
            slots = slots[:_MANY]
        digests = self._digests(len(keys)) if kind == VERIFIED else None
        what = self._core.extents(slots), self._pages[: slots.size], self._memory
        read = PreparedRead(self._engine, *what, timeout_s=_WAIT_S, digests=digests)
        with self.meters[kind].operation():
            job, submit = read.open()
            self._engine.check_started(job, submit())
            released = job.wait_released(_WAIT_S)
        if not released or job.report().status:
            raise MediumError("the engine alone read other bytes than the store, or none")
        self.meters[kind].nbytes += slots.size * self._loaded.layout.object_nbytes

    def _digests(self, n: int) -> U64:
        """Digests of the first n pages, shape (n, layers)."""
        layout, segment = self._loaded.layout, self._loaded.segment
        found = np.zeros((n, layout.layers), np.uint64)
        for page, layer in np.ndindex(found.shape):
            parts = [segment(page, layer, k).data for k in range(len(layout.segments))]
            found[page, layer] = xxhash.xxh3_64_intdigest(b"".join(parts))
        return found
