"""One transfer of the engine `host`: native jobs over staging, and the copies on a stream."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np

from tutti.base.arrays import U32
from tutti.base.pipeline import Overlap
from tutti.base.process import Owned, finalize
from tutti.errors import ConfigError, CudaError, TuttiError
from tutti.gio_uring.gpu.mover import PreparedCopy
from tutti.gio_uring.gpu.stream_queue import CALLS_MAX, Cells, StreamQueue, wait_until
from tutti.gio_uring.gpu.verifier import Verification
from tutti.gio_uring.job import Job
from tutti.gio_uring.nvme_spec import STATUS_CANCELLED
from tutti.gio_uring.transfer import TIMEOUT_S

#: Status of pages that were not verified.
_LOST = np.uint32(STATUS_CANCELLED)

_log = logging.getLogger(__name__)


def interrupted() -> CudaError:
    """The error raised to waiters when the start of a transfer was interrupted, as by Ctrl-C."""
    return CudaError("the start of a transfer on the GPU was interrupted; start it again")


def _left_s(deadline: float) -> float:
    """Time until time.monotonic() is there; 0 afterwards."""
    return max(0.0, deadline - time.monotonic())


@dataclass(frozen=True)
class Route:
    """What the stream needs for one transfer: copies for each chunk, and the staging.

    verification: the GPU's work on digests; None if native jobs compare them, or nothing does.
    overlap: CROSS copies a read as a whole; this needs a place for each layer, and at least as many
    layers as streams.
    """

    copies: Sequence[PreparedCopy]
    cells: Cells
    is_read: bool
    verification: Verification | None = None
    overlap: Overlap = Overlap.INTRA

    @property
    def has_tables(self) -> bool:
        """Whether something is uploaded before the first layer."""
        return self.verification is not None or any(copies.has_tables for copies in self.copies)

    @property
    def calls(self) -> int:
        """Number of driver calls for one layer."""
        return sum(copies.calls + 2 for copies in self.copies) + 3


class MovedJob(Owned):
    """Jobs of the native engine over staging, one for each chunk, and the stream that moves them.

    A `Transfer`.  The stream_queue enqueues its layers, see `StreamQueue.feed`.

    read_s: returns time.monotonic() of the medium's end; copies and verification end later.
    """

    def __init__(self, stream_queue: StreamQueue, jobs: Sequence[Job], route: Route) -> None:
        self._stream_queue = stream_queue
        self._jobs = jobs
        self._route = route
        self.layers = route.cells.layers
        self.overlap = route.overlap
        self._events: list[int] = []  # one per layer, and then that of the tables
        self._enqueued = 0  # layers that were enqueued
        self._started = False  # something is on the stream
        self._sealed = False  # nothing more will be enqueued
        self._failure: TuttiError | None = None
        self._found: U32 | None = None  # the verification's statuses, once it has ended
        self._changed = threading.Condition()
        self.read_s: Callable[[], float] = lambda: 0.0
        # When this object is gone, nothing can wait for the events any more.
        finalize(self, stream_queue.events.release, self._events).atexit = False

    @property
    def page_status(self) -> U32:
        """uint32 (pages,), 0 or the first NVMe status that a page met; final once it is done."""
        status: U32 = np.concatenate([job.page_status for job in self._jobs])
        if not self.is_verified():
            return status
        assert self._found is not None, "the verification is over"
        return np.where(status == 0, self._found, status)

    def is_verified(self) -> bool:
        """Reads the outcome of the verification if it has ended; returns whether it has."""
        verification = self._route.verification
        if self._found is None and verification is not None:
            with self._changed:
                if verification.is_over:
                    self._found = verification.status()
                elif self._sealed and self._enqueued < self.layers:  # it will never end
                    self._found = np.full(sum(job.page_status.size for job in self._jobs), _LOST)
        return self._found is not None

    def is_settled(self) -> bool:
        """Whether the final status of a read that the GPU verifies is known; its queue polls it."""
        if not all(bool(job.report().released) for job in self._jobs):
            return False
        try:
            return self.is_verified() or (self._is_through() and self.is_verified())
        except TuttiError:  # the streams are lost, so is the outcome
            self._found = np.full(sum(job.page_status.size for job in self._jobs), _LOST)
            return True

    @property
    def done(self) -> bool:
        """Whether every layer was moved or failed."""
        return all(job.report().done for job in self._jobs) and self._is_through()

    @property
    def layers_ready(self) -> int:
        """Number of layers that have arrived in staging, from the first on."""
        return min(job.layers_ready for job in self._jobs)

    def grant(self, layers: int, report_at: int, on_ready: Callable[[], None] | None) -> None:
        """See `Job.grant`.  Each chunk's job calls on_ready; the last call is the decisive one."""
        for job in self._jobs:
            job.grant(layers, report_at, on_ready)

    def enqueue(self, *, now: bool) -> None:
        """Gives the transfer to the stream_queue.  A CUDA error cancels it; waiters get the error.

        now: enqueue the first layers by this thread.  False while the job's gate is closed or none
        of its layers is granted: the stream then waits for the caller, which must not make a CUDA
        call, because that may wait, after another thread's call, for the stream.
        """
        self._stream_queue.feed(self, self._stream_queue.first_layers if now else 0)

    def put_next(self, parts: int) -> bool:
        """Enqueues up to ``parts`` layers, or all if copied as a whole; whether none is left."""
        try:
            if self._stream_queue.failure is not None:
                raise self._stream_queue.failure
            if self._sealed:
                return True
            self._started = True
            events = self._stream_queue.events
            events.acquire(self.layers + self._route.has_tables, self._events)
            if self.overlap is Overlap.CROSS:
                end = self.layers
                with self._stream_queue.driver.together():
                    self._put_whole()
            else:
                end = self._enqueued + max(1, min(parts, self._room()))
                with self._stream_queue.driver.together():
                    for layer in range(self._enqueued, end):
                        self._put_layer(layer)
        except TuttiError as error:
            self._fail(error)
            return True
        self._stream_queue.layers += end - self._enqueued
        with self._changed:
            self._enqueued = end
            self._sealed = self._sealed or end == self.layers
            self._changed.notify_all()
        return self._sealed

    def _room(self) -> int:
        """Number of layers that may be enqueued now; see `is_far_ahead`."""
        left = self.layers - self._enqueued
        if self._route.is_read:
            return min(left, CALLS_MAX // self._route.calls + 1 - self._enqueued)
        return sum(1 for _ in takewhile(self._has_place, range(self._enqueued, self.layers)))

    def _has_place(self, layer: int) -> bool:
        """Whether the place of a write's layer in staging has been written to the medium."""
        chunk = self._route.cells.chunks[0]
        former = layer - chunk.window
        return former < 0 or bool(chunk.words.is_ready(former))

    def is_far_ahead(self) -> bool:
        """For a read, whether its enqueued calls reach the limit; for a write, whether the next
        layer's place is still being written to the medium.
        """
        if self._sealed or self._enqueued == self.layers:
            return False
        if not self._route.is_read:
            return not self._has_place(self._enqueued)
        behind = self._enqueued - CALLS_MAX // self._route.calls
        try:
            return behind > 0 and not self._is_moved(behind)
        except TuttiError as error:
            self._fail(error)
            return False

    def _put_layer(self, layer: int) -> None:
        queue, route = self._stream_queue, self._route
        driver, stream = queue.driver, queue.stream_of(layer)
        for number, (chunk, copies) in enumerate(
            zip(route.cells.chunks, route.copies, strict=True)
        ):
            if route.is_read:
                ready = chunk.device_words + chunk.words.ready_offset(layer)
                driver.wait_value(stream, ready, 1)
            if layer == number == 0:
                self._upload()
            copies.move(range(layer, layer + 1), stream)
            if not (number or route.is_read):
                self._put_digests(layer, stream)
            if layer and not number and len(queue.streams) > 1:  # in the order of layers
                driver.stream_wait_event(stream, self._events[layer - 1])
            if not route.is_read:
                self._put_outcome(layer, stream)  # ends before the medium gets the last layer
            told: tuple[int, int] | None = (number, layer)
            if route.is_read:
                told = route.cells.next_user(layer, number)
            if told is not None:
                driver.write_value(stream, route.cells.chunks[told[0]].device_words, told[1] + 1)
        if route.is_read:
            self._put_digests(layer, stream)
            self._put_outcome(layer, stream)
        driver.record_event(self._events[layer], stream)

    def _put_whole(self) -> None:
        """Enqueues all layers of a read on the first stream, as one batch of copies.

        The first stream waits for the others before, and they for it after: layers stay in order.
        """
        queue, (chunk,), (copies,) = (
            self._stream_queue,
            self._route.cells.chunks,
            self._route.copies,
        )
        driver, stream, end = queue.driver, queue.stream, self._events[self.layers - 1]
        for event, other in zip(self._events, queue.streams[1:], strict=False):
            driver.record_event(event, other)
            driver.stream_wait_event(stream, event)
        ready = chunk.device_words + chunk.words.ready_offset(self.layers - 1)  # published in order
        driver.wait_value(stream, ready, 1)
        self._upload()
        copies.move(range(self.layers), stream)
        for layer in range(self.layers):
            self._put_digests(layer, stream)
            self._put_outcome(layer, stream)
        driver.record_event(end, stream)
        for other in queue.streams[1:]:
            driver.stream_wait_event(other, end)

    def _event_of(self, layers: int) -> int:
        """The event that happens when the first `layers` layers were moved."""
        return self._events[(self.layers if self.overlap is Overlap.CROSS else layers) - 1]

    def _put_digests(self, layer: int, stream: int) -> None:
        if self._route.verification is not None:
            self._route.verification.put_layer(layer, stream)

    def _put_outcome(self, layer: int, stream: int) -> None:
        if self._route.verification is not None and layer + 1 == self.layers:
            self._route.verification.put_outcome(stream)

    def _upload(self) -> None:
        """Enqueues the copy of the kernels' tables, before any kernel on any stream."""
        queue = self._stream_queue
        for copies in self._route.copies:
            copies.upload(queue.stream)
        if self._route.verification is not None:
            self._route.verification.upload(queue.stream)
        if self._route.has_tables:
            queue.driver.record_event(self._events[-1], queue.stream)
            for stream in queue.streams[1:]:
                queue.driver.stream_wait_event(stream, self._events[-1])

    def _fail(self, error: TuttiError) -> None:
        """Fails the transfer, under the queue's lock, so that nothing of it is being enqueued."""
        _log.error("a transfer on the GPU's stream is cancelled", exc_info=error)
        self._failure = error  # before it is sealed: copies may have no event after them
        for job in self._jobs:
            job.cancel()
        with self._changed:
            self._sealed = True
            self._changed.notify_all()

    def abandon(self) -> None:
        """Cleans up after an interrupted `submit`, without a callback."""
        for job in self._jobs:
            job.on_released(None)
        self._interrupt()

    def _interrupt(self) -> None:
        for job in self._jobs:  # the queue's thread may wait for their words
            job.cancel()
        with self._stream_queue.lock:
            self._fail(interrupted())

    def _is_moved(self, layers: int) -> bool:
        """Whether the stream has finished the first `layers` of the enqueued layers."""
        count = min(layers, self._enqueued)
        return not count or self._stream_queue.driver.is_event_done(self._event_of(count))

    def _is_through(self) -> bool:
        """Whether the stream does not use memory of this job any more."""
        if not self._sealed:
            return False
        if self._failure is not None:  # some copies may have no event after them
            return self._stream_queue.are_streams_done()
        return self._is_moved(self._enqueued)

    def _is_put(self, layers: int) -> bool:
        return self._enqueued >= layers or self._sealed

    def wait_layers(self, layers: int, timeout_s: float) -> bool:
        """Waits until `layers` layers were moved or the job failed.  False after the timeout.

        Raises CudaError if not all of them could be enqueued.
        """
        deadline = time.monotonic() + timeout_s
        if self._failure is not None:
            raise self._failure
        if not all(job.wait_layers(layers, _left_s(deadline)) for job in self._jobs):
            return False
        with self._changed:
            if not self._changed.wait_for(lambda: self._is_put(layers), _left_s(deadline)):
                return False
        if self._failure is not None:
            raise self._failure
        if not wait_until(lambda: self._is_moved(layers), _left_s(deadline)):
            return False
        verification = self._route.verification
        if verification is None or not verification.is_wrong(layers):
            return True
        # The wrong pages are known only at the end.
        return wait_until(self.is_verified, _left_s(deadline))

    def order_stream(self, stream: int, layers: int) -> None:
        """Makes `stream` wait, on the GPU, until `layers` layers were moved or the job failed.

        Blocks only until these layers are enqueued on the queue's own streams.  `page_status` tells
        whether the job failed, once the layer's event has happened.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._is_put(layers), TIMEOUT_S)
        if self._enqueued < layers:
            raise ConfigError(
                f"the transfer was cancelled after {self._enqueued} layers; start it again"
            )
        self._stream_queue.driver.stream_wait_event(stream, self._event_of(layers))

    def wait_released(self, timeout_s: float) -> bool:
        """Waits until neither medium nor stream uses its memory.  False after the timeout."""
        deadline = time.monotonic() + timeout_s
        if not all(job.wait_released(_left_s(deadline)) for job in self._jobs):
            return False
        return wait_until(self._is_through, _left_s(deadline))

    def open_gate(self) -> None:
        """Lets the job compare its digests.  Makes no CUDA call, as the stream waits for this."""
        if self._route.verification is not None:
            self._route.verification.refresh()
        try:
            for job in self._jobs:
                job.open_gate()
        except BaseException:  # interrupted between two jobs
            self._interrupt()
            raise

    def cancel(self) -> None:
        """Issues no more commands; releases every layer that the stream waits for."""
        for job in self._jobs:
            job.cancel()
        with self._stream_queue.lock, self._changed:
            self._sealed = self._sealed or not self._started
            self._changed.notify_all()

    def is_free(self) -> bool:
        """Whether staging, words and tables may be used again."""
        is_through = all(bool(job.report().released) for job in self._jobs) and self._is_through()
        return is_through and (self._route.verification is None or self.is_verified())
