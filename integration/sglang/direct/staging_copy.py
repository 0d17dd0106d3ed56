"""The layers of one batch on their way into pages in GPU memory.

The loader's thread enqueues everything on the GPU's `copy_stream`: for each layer the waits for its
reads, the copies from staging and to further slots, and an event. The consumer of a layer makes its
own stream wait for the event, and blocks only until the event was enqueued.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tutti.errors import CudaError, DeviceTimeout
from tutti.gio_uring.gpu.stream_queue import wait_until
from tutti.integration.sglang.direct.gpu_copies import Gpu
from tutti.integration.sglang.direct.kv_pools import Pages
from tutti.integration.sglang.direct.reads import Read


class Fence:
    """Events recorded on SGLang's streams.  On the CPU they have always happened.

    The events are those of SGLang's `record_offload_ready`: one on the scheduler's stream, which
    computed the slots, and one on the forward's, which may still use the pages.
    """

    def __init__(self, events: Sequence[Any] = ()) -> None:
        self.events = list(events)

    def wait(self, deadline_s: float) -> None:
        """Returns when all have happened.  Raises DeviceTimeout at the deadline (monotonic)."""
        self._wait(self.events, deadline_s)

    def wait_slots(self, deadline_s: float) -> None:
        """As `wait`, for the first event alone: then the slots are known."""
        self._wait(self.events[:1], deadline_s)

    @staticmethod
    def _wait(events: Sequence[Any], deadline_s: float) -> None:
        for event in events:
            if not wait_until(event.query, max(0.0, deadline_s - time.monotonic())):
                raise DeviceTimeout(
                    "SGLang's device did not finish its work in time; nothing was moved"
                )


@dataclass(frozen=True)
class Copy:
    """Rows (m,) of a read, as pages of its memory, that go to SGLang's pages (m,)."""

    read: Read
    rows: Pages
    targets: Pages


@dataclass(frozen=True)
class PoolReadPlan:
    """What to read for one pool, what was read ahead, and where it all goes."""

    fresh: Sequence[Read]
    ahead: Sequence[Read]
    copies: Sequence[Copy]


class StagingCopier:
    """What one batch has on the stream.  layers: transfer layers of the model.

    name: of the batch.  waited_s: how long the forward's stream waited, as far as that was seen.
    free_s, ended_s: monotonic; when the previous batch was done with the pages, and when the stream
    was through.  0 for what was not seen.  A thread polls, as no other thread waits for a GPU.
    """

    def __init__(self, gpu: Gpu, layers: int, name: str = "") -> None:
        self._gpu = gpu
        self._events: list[int] = []  # by layer, and the last one: after all, or what failed
        gpu.events.acquire(layers + 1, self._events)
        self._changed = threading.Condition()
        self._enqueued = 0  # layers that were enqueued in full
        self._over = False  # nothing more will be
        self._is_marked = False
        self._layers = layers
        self._looking = threading.Lock()  # at the last event, which is another's once given back
        self._name = name
        self._marks = gpu.marks(layers)
        self.free_s = self.ended_s = self.waited_s = 0.0

    def watch(self, fence: Fence, deadline_s: float) -> None:
        """Notes the times; the fence is that of the pages."""
        work = partial(self._watch, fence, deadline_s)
        threading.Thread(target=work, name="tutti-staging-copy", daemon=True).start()

    def _watch(self, fence: Fence, deadline_s: float) -> None:
        try:
            fence.wait(deadline_s)
            self.free_s = time.monotonic()
            left_s = max(0.0, deadline_s - time.monotonic())
            wait_until(self._look, left_s)
        except (CudaError, DeviceTimeout):
            return  # the thread that ends the batch gets the same error

    def _look(self) -> bool:
        """Reports layers that the forward has begun; whether nothing more is waited for."""
        marks = self._marks
        for layer, waited_s in marks.look() if marks is not None else ():
            self.waited_s += waited_s
            self._gpu.began(self._name, layer, waited_s)
        return self._over and self._is_through() and (marks is None or marks.is_through)

    def copy_layer(self, plans: Sequence[PoolReadPlan], deadline_s: float) -> None:
        """Enqueues all layers; the reads are started.  Waits for what was read ahead."""
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
        """Marks the end on the stream, and wakes all waiters."""
        try:
            self._gpu.driver.record_event(self._events[-1], self._gpu.copy_stream)
            self._is_marked = True
        except CudaError:
            self._is_marked = False  # then the whole stream tells
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def order(self, layer: int, deadline_s: float) -> bool:
        """Lets the caller's stream wait for a layer; False at the deadline.

        It also goes on after a layer that failed: the batch raises at its end.
        """
        with self._changed:
            left_s = max(0.0, deadline_s - time.monotonic())
            if not self._changed.wait_for(lambda: self._enqueued > layer or self._over, left_s):
                return False
            is_enqueued = self._enqueued > layer
        if is_enqueued:
            gpu, stream = self._gpu, self._gpu.streams.current()
            wait = partial(gpu.driver.stream_wait_event, stream, self._events[layer])
            if self._marks is None:
                wait()
            else:
                self._marks.around(layer, stream, wait)
        return True

    def wait_over(self, deadline_s: float) -> bool:
        """Waits until the stream is through with the batch; whether it is."""
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
