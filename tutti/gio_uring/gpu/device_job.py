"""One transfer of an engine whose kernels submit the commands."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from tutti.base.arrays import U32
from tutti.base.callbacks import Guard
from tutti.base.process import Owned, finalize
from tutti.errors import ConfigError, TuttiError
from tutti.gio_uring.gpu.launcher import KernelWork
from tutti.gio_uring.gpu.moved_job import interrupted
from tutti.gio_uring.gpu.stream_queue import StreamQueue, wait_until
from tutti.gio_uring.nvme_spec import STATUS_CANCELLED
from tutti.gio_uring.transfer import TIMEOUT_S

#: Longest time from a job's final word to its status; the engine's thread polls much more often.
_SETTLE_S = 5.0

_log = logging.getLogger(__name__)


class JobQueue(Protocol):
    """The part of an engine that its jobs use."""

    stream_queue: StreamQueue
    guard: Guard

    def enqueue(self, job: DeviceJob) -> None:
        """Enqueues a job on the stream."""

    def ended(self, job: DeviceJob) -> None:
        """Announces that no kernel rings for the job any more."""

    def keep(self, job: DeviceJob) -> None:
        """Keeps the job's memory until the controller was reset, and refuses new jobs."""


class DeviceJob(Owned):
    """A job whose commands a kernel submits; a `Transfer`, and a `HeldTransfer`.

    page_status: final once the job is done, or the event of its last layer has happened.
    held_s: its layers wait for `grant`, at most so long; None: all are granted.
    granted, launched: layers whose kernels may be enqueued, and those whose kernels were.
    """

    def __init__(
        self,
        queue: JobQueue,
        work: KernelWork,
        pages: int,
        on_released: Callable[[Any], None] | None,
        held_s: float | None = None,
    ) -> None:
        self.work = work
        self.granted, self.launched = work.layers if held_s is None else 0, 0
        self._held_until_s = time.monotonic() + (held_s or 0.0)
        self._ready = 0  # layers that were seen to have arrived
        self._awaited: tuple[int, Callable[[], None] | None] = 0, None
        self.is_begun = False  # kernels may have seen it
        self._page_status: U32 = np.zeros(pages, np.uint32)
        self._queue = queue
        self._on_released = on_released
        self._lock = threading.Lock()
        self._is_taken = False  # kernels are being enqueued, or it was cancelled before
        self._events: list[int] = []
        self._finished = threading.Event()
        self._changed = threading.Condition()  # layers were launched, or never will be
        self._failure: TuttiError | None = None
        self._is_kept = False  # a device may still use its memory
        finalize(self, queue.stream_queue.events.release, self._events).atexit = False

    @property
    def page_status(self) -> U32:
        """uint32 (pages,), 0 or the first NVMe status that a page met."""
        if not self._finished.is_set() and self.work.staged.words.moved:
            self._finished.wait(_SETTLE_S)  # the stream has finished; the engine's thread follows
        return self._page_status

    @property
    def done(self) -> bool:
        """Whether every layer was moved or failed."""
        return self._finished.is_set()

    @property
    def _is_released(self) -> bool:
        return self._finished.is_set() and not self._is_kept

    @property
    def is_moved(self) -> bool:
        """Whether the stream has ended all of it, and threads that order streams know its end."""
        return self.launched == self.work.layers and self.work.staged.words.moved > 0

    def is_free(self) -> bool:
        """Whether staging and tables may be used again."""
        if self._is_released and self._failure is not None:  # the tables may still be copied
            stream_queue = self._queue.stream_queue
            return stream_queue.driver.is_stream_done(stream_queue.stream)
        return self._is_released

    def acquire_events(self) -> list[int]:
        """Acquires an event per layer; the finalizer releases them."""
        self._queue.stream_queue.events.acquire(self.work.layers, self._events)
        return self._events

    @property
    def layers_ready(self) -> int:
        """Number of layers that were moved or failed, from the first on."""
        words = self.work.staged.words
        if self._finished.is_set():  # the words may be another job's
            return words.layers
        ready = self._ready
        while ready < words.layers and words.is_ready(ready):
            ready += 1
        self._ready = ready
        return ready

    def grant(self, layers: int, report_at: int, on_ready: Callable[[], None] | None) -> None:
        """See `Job.grant`.  Makes no CUDA call: the stream queue's thread launches the layers."""
        with self._lock:
            self.granted = max(self.granted, layers)
            self._awaited = report_at, on_ready

    def release_hold(self) -> None:
        """Grants all layers."""
        with self._lock:
            self.granted = self.work.layers

    def is_due(self) -> bool:
        """Whether layers are to be launched now, or never will be."""
        if time.monotonic() > self._held_until_s:
            self.release_hold()
        return self.granted > self.launched or self.done

    def report_ready(self) -> None:
        """Calls back if the layers that the last `grant` named are there."""
        with self._lock:
            report_at, on_ready = self._awaited
            if on_ready is None or self.layers_ready < report_at:
                return
            self._awaited = 0, None
        self._queue.guard.call("a completion callback", on_ready)

    def was_launched(self, layers: int) -> None:
        """Wakes those who wait until so many layers are on the stream."""
        with self._changed:
            self.launched = layers
            self._changed.notify_all()

    def enqueue(self) -> None:
        """Has the granted layers enqueued on the stream, and later the others.

        After a CUDA error, kernels may be queued without an event after them, with commands that
        cannot be recalled: the job fails, and its memory is kept until the controller was reset.
        The caller does the same after an interruption.
        """
        try:
            self._queue.enqueue(self)
        except TuttiError as error:
            self.fail(error)

    def abandon(self) -> None:
        """Cleans up after an interrupted `submit`; no callback runs."""
        self._on_released = None
        self._end(interrupted())

    def fail(self, error: Exception) -> None:
        """Fails a job whose kernels could not be enqueued."""
        _log.error("a transfer could not be put on the GPU's stream", exc_info=error)
        self._end(error if isinstance(error, TuttiError) else interrupted())

    def _end(self, error: TuttiError) -> None:
        self.finish(STATUS_CANCELLED, is_kept=self.is_begun, failure=error)

    def take(self) -> bool:
        """Decides between the first launch and `cancel`: whether the caller is the first."""
        with self._lock:
            is_mine, self._is_taken = not self._is_taken, True
            return is_mine

    def finish(
        self, status: int | U32, *, is_kept: bool, failure: TuttiError | None = None
    ) -> None:
        """Ends the job; the first call sets its outcome.

        is_kept: a device may still use the job's memory.  failure: the error for waiters.
        """
        with self._lock:
            if self._finished.is_set():
                return
            self._page_status[:] = status
            self._failure = failure
            if failure is not None:  # under the lock: the words of an ended job may be another's
                self.work.staged.words.abort(STATUS_CANCELLED)
            self._is_kept = is_kept
            self._queue.ended(self)
            if is_kept:
                self._queue.keep(self)
            self._finished.set()
        with self._changed:
            self._changed.notify_all()
        if not is_kept:
            self._tell()

    def release(self) -> None:
        """Releases kept memory, after the controller was reset; no kernel may run."""
        self._is_kept = False
        self._tell()

    def _tell(self) -> None:
        callback, self._on_released = self._on_released, None
        if callback is not None:
            self._queue.guard.call("a completion callback", callback, self)

    def wait_layers(self, layers: int, timeout_s: float) -> bool:
        """Waits until `layers` layers were moved or failed.  False after the timeout.

        Raises CudaError if not all of them could be enqueued.
        """
        deadline = time.monotonic() + timeout_s
        words = self.work.staged.words
        is_there = wait_until(lambda: self.done or words.is_ready(layers - 1), timeout_s)
        if self._failure is not None:
            raise self._failure
        is_good = not any(words.status(layer) for layer in range(layers))
        # The failed pages are known only at the end.
        left_s = max(0.0, deadline - time.monotonic())
        return is_there and (is_good or self._finished.wait(left_s))

    def order_stream(self, stream: int, layers: int) -> None:
        """Makes `stream` wait, on the GPU, until `layers` layers were moved or failed.

        Blocks until the job's gate is open and the layers are granted, because they are enqueued
        only then.
        """
        held_s = self._held_until_s - time.monotonic() + _SETTLE_S
        with self._changed:
            self._changed.wait_for(
                lambda: self.launched >= layers or self.done,
                max(TIMEOUT_S, self.work.timeout_s, held_s),
            )
        if self._failure is not None or self.launched < layers:
            raise ConfigError("the transfer was cancelled or its gate stays closed; start it again")
        self._queue.stream_queue.driver.stream_wait_event(stream, self._events[layers - 1])

    def wait_released(self, timeout_s: float) -> bool:
        """Waits until no device uses its memory.  False after the timeout, or if a device may use
        it until the engine is closed.
        """
        return self._finished.wait(timeout_s) and self._is_released

    def open_gate(self) -> None:
        """Starts the job; its digests are filled now."""
        try:
            self.enqueue()
        except BaseException:
            self._end(interrupted())
            raise

    def cancel(self) -> None:
        """Ends a job of which nothing was launched; else the rest is read without waiting for
        grants, as its words, tables and status are complete only then.
        """
        if self.take():
            self.finish(STATUS_CANCELLED, is_kept=False)
        self.release_hold()
