"""Loading and moving overlapped in two ways, with a copy in memory in the place of a GPU's DMA.

Without a GPU the second half of the pipeline is a stand-in: the CPU copies what arrived to another
place.  Which way is better is therefore this machine's answer, not a GPU's.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from typing import Any

from tutti.bench.workload import WAIT_S, Loaded, Workload
from tutti.gio_uring.memory import HostBuffer
from tutti.scheduler.pipeline import Overlap, PipelineChooser

_ITERATIONS = 4  # a warm-up, two trials, and one with what was chosen


class HostMover:
    """Copies what a load brought, layer by layer, from load memory to a place of its own."""

    def __init__(self, workload: Workload) -> None:
        """The workload's load memory holds two batches."""
        assert workload.load_pages >= 2 * workload.batch_pages, "one moves while one arrives"
        self._workload = workload
        self._target = HostBuffer(workload.batch_pages * workload.object_nbytes)
        self._target.array[:] = 0

    def run(self, batches: Sequence[int], overlap: Overlap) -> float:
        """Loads and moves all batches; the seconds that took."""
        begin_s = time.perf_counter()
        if overlap is Overlap.INTRA:
            for batch in batches:
                self._move(self._workload.load([batch], 0))
        else:
            arriving: Loaded | None = None
            for i, batch in enumerate(batches):
                following = self._workload.load([batch], i % 2 * self._workload.batch_pages)
                if arriving is not None:
                    self._move(arriving)
                arriving = following
            if arriving is not None:
                self._move(arriving)
        return time.perf_counter() - begin_s

    def _move(self, loaded: Loaded) -> None:
        """Each layer as soon as it is ready; a transfer that ended before moves at once."""
        memory, at = self._workload.pool.memory, self._target.address
        first, count = int(loaded.pages[0]), loaded.pages.size
        for layer, bases in enumerate(memory.bases.tolist()):
            loaded.ticket.wait_layer(layer, WAIT_S)
            for base, stride in zip(bases, memory.stride_nbytes, strict=True):
                ctypes.memmove(at, base + first * stride, count * stride)
                at += count * stride
        loaded.ticket.wait(WAIT_S)


def choose(mover: HostMover, paths: dict[str, list[int]], batch_nbytes: int) -> dict[str, Any]:
    """Tries both ways on each path and returns the one used from then on, with GB/s of each.

    paths: batches by the name of their path.
    """
    chooser = PipelineChooser()
    found: dict[str, Any] = {}
    for path, batches in paths.items():
        if not batches:
            continue
        nbytes = len(batches) * batch_nbytes
        for _ in range(_ITERATIONS):
            elapsed_s = mover.run(batches, chooser.next(path))
            chooser.record(path, nbytes, elapsed_s * 1e6)
        chosen = chooser.decided(path)
        assert chosen is not None, "a monotonic clock does not jump"
        found[path] = {
            **{f"{way.value}_gb_per_s": r / 1e3 for way, r in chooser.rates(path).items()},
            "chosen": chosen.value,
            "then_gb_per_s": nbytes / elapsed_s / 1e9,
            "mover": "copy in host memory (stand-in)",
        }
    return found
