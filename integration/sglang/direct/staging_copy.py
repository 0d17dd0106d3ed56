"""Copies the layers of one batch into pages in GPU memory.

The loader's thread enqueues everything on the GPU's `copy_stream`: for each layer the waits for its
reads, the copies from staging and to repeated pages, and an event. The consumer of a layer makes
its own stream wait for the event, and blocks only until the event was enqueued.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from tutti.errors import CudaError, DeviceTimeout
from tutti.gio_uring.gpu.stream_queue import wait_until
from tutti.integration.sglang.direct.gpu_copies import Gpu
from tutti.integration.sglang.direct.kv_pools import Pages
from tutti.integration.sglang.direct.reads import Read


class Fence:
    """Events recorded on SGLang's streams; none on a CPU.

    The events are those of SGLang's `record_offload_ready`: one on the scheduler's stream, which
    computed the slots, and one on the forward's, which may still use the pages.
    """

    def __init__(self, events: Sequence[Any] = ()) -> None:
        self.events = list(events)

    def wait(self, deadline_s: float) -> None:
        """Waits for all events.  Raises DeviceTimeout at the deadline (time.monotonic())."""
        for event in self.events:
            if not wait_until(event.query, max(0.0, deadline_s - time.monotonic())):
                raise DeviceTimeout(
                    "SGLang's device did not finish its work in time; nothing was moved"
                )

    def wait_slots(self, deadline_s: float) -> None:
        """Waits for the first event only: the slots are known then."""
        Fence(self.events[:1]).wait(deadline_s)


@dataclass(frozen=True)
class Copy:
    """Rows (m,), page numbers in a read's memory, to copy to SGLang's pages (m,)."""

    read: Read
    rows: Pages
    targets: Pages


@dataclass(frozen=True)
class PoolReadPlan:
    """The reads for one pool: fresh ones, ones that were read ahead, and the copies of both."""

    fresh: Sequence[Read]
    ahead: Sequence[Read]
    copies: Sequence[Copy]


class StagingCopier:
    """One batch's work on the stream.  layers: number of the model's transfer layers.

    name: of the batch.  waited_s: seconds that the forward's stream was seen to wait.
    free_s, ended_s: time.monotonic() when the previous batch did not use the pages any more, and
    when the stream had finished; 0 if not seen.  A thread polls for these.
    """

    def __init__(self, gpu: Gpu, layers: int, name: str = "") -> None:
        self._gpu = gpu
        self._events: list[int] = []  # one per layer, and one after all
        gpu.events.acquire(layers + 1, self._events)
        self._changed = threading.Condition()
        self._enqueued = 0  # layers that were enqueued completely
        self._over = False  # nothing more will be enqueued
        self._is_marked = False
        self._layers = layers
        self._looking = threading.Lock()  # for the last event, which is reused once released
        self._name = name
        self._marks = gpu.marks.take(layers)
        self.free_s = self.ended_s = self.waited_s = 0.0

    def watch(self, fence: Fence, deadline_s: float) -> None:
        """Starts to poll for the times; fence: of the pages."""
        work = partial(self._watch, fence, deadline_s)
        threading.Thread(target=work, name="tutti-staging-copy", daemon=True).start()

    def _watch(self, fence: Fence, deadline_s: float) -> None:
        try:
            fence.wait(deadline_s)
            self.free_s = time.monotonic()
            left_s = max(0.0, deadline_s - time.monotonic())
            wait_until(self._look, left_s)
        except (CudaError, DeviceTimeout):
            return  # the thread that ends the batch reports this error

    def _look(self) -> bool:
        """Reports layers that the forward has begun; returns whether all waits have ended."""
        marks = self._marks
        for layer, waited_s in marks.look() if marks is not None else ():
            self.waited_s += waited_s
            self._gpu.began(self._name, layer, waited_s)
        return self._over and self._is_through() and (marks is None or marks.is_through)

    def copy_layer(self, plans: Sequence[PoolReadPlan], deadline_s: float) -> None:
        """Enqueues all layers; the reads must have been started.  Waits for reads ahead."""
        for layer in range(self._layers):
            for plan in plans:
                self._order(plan, layer)
                self._copy(plan, layer, deadline_s)
            self._gpu.driver.record_event(self._events[layer], self._gpu.copy_stream)
            with self._changed:
                self._enqueued = layer + 1
                self._changed.notify_all()

    def _order(self, plan: PoolReadPlan, layer: int) -> None:
        for read in plan.fresh:
            own = read.stored_pool.kv_pool.layer_of.get(layer)
            if own is not None and not read.staged:
                read.order_stream(self._gpu.copy_stream, own)

    def _copy(self, plan: PoolReadPlan, layer: int, deadline_s: float) -> None:
        for copy in plan.copies:
            read = copy.read
            own = read.stored_pool.kv_pool.layer_of.get(layer)
            if own is not None:
                if read.staged:
                    read.wait_layer(own, deadline_s)
                read.stored_pool.copy_layer(own, copy.rows, copy.targets, staged=read.staged)

    def end(self) -> None:
        """Records the last event on the stream, and wakes all waiters."""
        with suppress(CudaError):  # the state of the whole stream is used instead
            self._gpu.driver.record_event(self._events[-1], self._gpu.copy_stream)
            self._is_marked = True
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def order(self, layer: int, deadline_s: float) -> bool:
        """Makes the caller's stream wait for a layer; False at the deadline.

        The stream also continues after a failed layer: the batch reports that at its end.
        """
        gpu, stream, marks = self._gpu, self._gpu.streams.current(), self._marks
        if marks is not None and not (self._enqueued > layer or self._over):
            marks.begin(layer, stream)  # while the caller waits here, the stream may run dry
        try:
            with self._changed:
                left_s = max(0.0, deadline_s - time.monotonic())
                in_time = self._changed.wait_for(
                    lambda: self._enqueued > layer or self._over, left_s
                )
                is_enqueued = self._enqueued > layer
        except BaseException:  # interrupted: the mark gets its end, or its words stay in use
            if marks is not None:
                marks.around(layer, stream, lambda: None)
            raise

        def wait() -> None:
            if is_enqueued:
                gpu.driver.stream_wait_event(stream, self._events[layer])

        if marks is None:
            wait()
        else:
            marks.around(layer, stream, wait)
        return in_time

    def wait_over(self, deadline_s: float) -> bool:
        """Waits until the stream has finished the batch; False at the deadline."""
        if not self._wait_stream(deadline_s):
            return False
        self._gpu.events.release(self._events)
        if self._marks is not None:
            self._marks.is_released = True
        return True

    def _wait_stream(self, deadline_s: float) -> bool:
        with self._changed:
            left_s = max(0.0, deadline_s - time.monotonic())
            if not self._changed.wait_for(lambda: self._over, left_s):
                return False
        return wait_until(self._is_through, max(0.0, deadline_s - time.monotonic()))

    def _is_through(self) -> bool:
        gpu = self._gpu
        with self._looking:
            if self.ended_s:
                return True
            if self._is_marked:
                through = gpu.driver.is_event_done(self._events[-1])
            else:
                through = gpu.driver.is_stream_done(gpu.copy_stream)
            if through:
                self.ended_s = time.monotonic()
            return through
