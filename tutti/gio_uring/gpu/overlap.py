"""Chooses when reads are copied out of staging: INTRA, layer by layer, or CROSS, all at the end.

With INTRA a layer is copied while later ones arrive, so the model gets its first layer early.
CROSS is faster if driver calls cost more than the bytes that they move: it needs one call for all
layers.  Both are tried for each path and size of transfers.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from tutti.base.pipeline import Overlap, PipelineChooser
from tutti.base.process import Owned
from tutti.base.units import format_nbytes
from tutti.errors import TuttiError
from tutti.gio_uring.controller import NativeController
from tutti.gio_uring.gpu.moved_job import MovedJob, Route
from tutti.gio_uring.gpu.stream_queue import CALLS_MAX, StreamQueue
from tutti.gio_uring.iocb import Extents
from tutti.gio_uring.transfer import TransferOptions

#: CROSS must be this many times as fast.  With INTRA a model computes layer l while later layers
#: arrive: a load of T seconds and a computation of C take max(T, C).  With CROSS, a load of T'
#: takes T' + C.  So CROSS gains at most T - T' (C = 0) and loses at most T' (C >= T); these are
#: equal at T' = T / 2.
GAIN = 2.0


class _Trial:
    """Measures one read, on the queue's thread: from its start, or from the end of the read before.

    If both have ended at the first poll, the second one's start is unknown: nothing is measured.
    """

    def __init__(self, moved: MovedJob, before: MovedJob | None, began_s: float) -> None:
        self._moved, self._before = moved, before
        self._began_s = began_s
        self.seconds = 0.0

    def is_over(self) -> bool:
        try:
            if self._before is not None:
                if not self._before.done:
                    return False
                self._before, self._began_s = None, max(self._began_s, time.monotonic())
                if self._moved.done:
                    return True
            if not self._moved.done:
                return False
            if not self._moved.page_status.any():
                self.seconds = time.monotonic() - self._began_s
        except TuttiError:  # the waiters of the read get it
            pass
        return True


def _is_over(moved: MovedJob) -> bool:
    try:
        return moved.done
    except TuttiError:  # the waiters of the read get it
        return True


class Overlaps(Owned):
    """The choices for one engine's reads.  Thread-safe."""

    def __init__(self, queue: StreamQueue, controller: NativeController) -> None:
        self._queue, self._controller = queue, controller
        self._lock = threading.Lock()
        self._choosers: dict[tuple[str, int], PipelineChooser] = {}
        self._path_changes = 0
        self._last: weakref.ref[MovedJob] | None = None

    def choose(
        self, route: Route, extents: Extents, layer_nbytes: int, options: TransferOptions
    ) -> tuple[Route, Callable[[MovedJob], object]]:
        """The route of a transfer, and a function to call once its queue has the transfer.

        INTRA for writes, for reads with `held`, and for reads that cannot be copied as a whole:
        not all layers fit into the staging, or too many calls would follow one wait.
        """
        if not route.is_read:
            return route, lambda moved: None
        cells, began_s = route.cells, time.monotonic()
        has_places = (
            not options.get("held") and len(cells.chunks) == 1 and cells.cells >= cells.layers
        )
        are_few = cells.layers * (route.copies[0].calls + 1) <= CALLS_MAX
        if not (has_places and are_few and cells.layers >= max(2, len(self._queue.streams))):
            return route, self._follow
        nbytes = cells.layers * layer_nbytes
        path = self._controller.path_of(extents.nsid, extents.slba)
        with self._lock:
            if self._path_changes != self._controller.path_changes:
                self._path_changes = self._controller.path_changes
                self._choosers.clear()
            key = path, nbytes.bit_length()
            chooser = self._choosers.setdefault(key, PipelineChooser(GAIN))
            last = None if self._last is None else self._last()
        is_next = last is None or chooser.is_decided or _is_over(last)
        route = replace(route, overlap=chooser.overlap)
        return route, partial(self._watch, chooser, nbytes, began_s, last if is_next else None)

    def _follow(self, moved: MovedJob) -> MovedJob | None:
        """Records the read that the queue got last; returns the one before."""
        with self._lock:
            before = None if self._last is None else self._last()
            self._last = weakref.ref(moved)
        return before

    def _watch(
        self,
        chooser: PipelineChooser,
        nbytes: int,
        began_s: float,
        over: MovedJob | None,
        moved: MovedJob,
    ) -> None:
        """Measures a read while its chooser has trials left.

        over: a read that had ended when this one began.
        """
        before = self._follow(moved)
        if chooser.is_decided:
            return
        trial = _Trial(moved, None if before is over else before, began_s)

        def ended() -> None:
            with self._lock:
                chooser.observe(moved.overlap, nbytes, trial.seconds)

        self._queue.watch(trial.is_over, ended)

    def stats(self) -> dict[str, object]:
        """The choice for each path and size of transfers, and the GB/s of its trials."""
        with self._lock:
            choosers = dict(self._choosers)
        return {
            f"{path}, up to {format_nbytes(1 << bits)}": chooser.stats()
            for (path, bits), chooser in sorted(choosers.items())
        }

    @property
    def cross(self) -> int:
        """Number of paths and sizes for which CROSS was chosen."""
        with self._lock:
            decided = [chooser for chooser in self._choosers.values() if chooser.is_decided]
        return sum(chooser.overlap is Overlap.CROSS for chooser in decided)
