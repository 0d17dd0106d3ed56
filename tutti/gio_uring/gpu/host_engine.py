"""The GPU engine `host`: the native thread submits, a stream waits and copies, no SM is used.

For each layer the mover's stream holds, enqueued beforehand and in this order:

    read    wait(layer is staged)   copies to the pages     write(moved)   record an event
    write   wait(its place is free) copies to the staging   write(moved)   record an event

The waits are `cuStreamWaitValue32` on words that the native thread stores, whatever happens: a
failed command, a deadline, a cancelled job and a closed engine all store them, with the status
beside.  So nothing that must run to let a stream go on needs a CUDA call, the GIL or a lock.
Staging that is shorter than the batch is used again layer after layer, by the word `moved`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Unpack

import numpy as np

from tutti.arrays import U32, U64
from tutti.errors import ConfigError, CudaError, DeviceTimeout, PoolClosed, TuttiError
from tutti.gio_uring.controller import NativeController
from tutti.gio_uring.engine import Engine, Extents, Job
from tutti.gio_uring.gpu.driver import Driver
from tutti.gio_uring.gpu.memory import LeaseOwner, PinnedStaging, retain_until_exit
from tutti.gio_uring.gpu.mover import CopyDescriptor, Mover, PreparedCopy, choose_mover
from tutti.gio_uring.gpu.transfer import TIMEOUT_S, Options
from tutti.gio_uring.iocb import PagedMemory
from tutti.gio_uring.layer_words import LayerWords
from tutti.gio_uring.nvme_spec import OPCODE_READ
from tutti.process import Owned, finalize
from tutti.units import MiB

STAGING_NBYTES = 256 * MiB
_LOOK_S = 0.00005
_LOOK_MOST_S = 0.0005
#: PinnedStaging that one transfer may take of the whole, unless its layers are longer.
_SHARE = 2

_log = logging.getLogger(__name__)


def wait_until(is_done: Callable[[], bool], timeout_s: float) -> bool:
    """Looks again and again, less and less often.  False after the timeout."""
    deadline = time.monotonic() + timeout_s
    pause_s = _LOOK_S
    while not is_done():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LOOK_MOST_S)
    return True


def interrupted() -> CudaError:
    """What waits for a transfer raise whose start was interrupted, by Ctrl-C for instance."""
    return CudaError("the start of a transfer on the GPU was interrupted; start it again")


@dataclass(frozen=True)
class StagedLayers:
    """Staging of one transfer: its words, then `window` of its layers, used again in turn.

    starts: uint64 (layers,), where slice 0 of each layer lies for the host.
    """

    words: LayerWords
    window: int
    starts: U64
    to_device: int  # from the host's addresses to the device's

    @property
    def device_words(self) -> int:
        """Where the device finds the words."""
        return self.words.address + self.to_device

    @property
    def device_starts(self) -> U64:
        """`starts` as the device addresses them."""
        return self.starts + np.uint64(self.to_device)


class StreamQueue(Owned):
    """One direction: a stream, its staging, and one transfer after another on it."""

    def __init__(
        self, driver: Driver, controller: NativeController, nbytes: int, stream: int | None
    ) -> None:
        if stream == 0:
            raise ConfigError(
                "the default stream cannot take batches of copies and waits for other streams; "
                "create a stream for the engine"
            )
        self.driver = driver
        self._own_stream = stream is None
        self.stream = driver.create_stream(-1) if stream is None else stream
        self.staging = PinnedStaging(driver, controller, nbytes)
        self.lock = threading.Lock()  # keeps what one transfer enqueues together
        self._events: deque[int] = deque()  # of transfers that nobody holds any more
        self._fence = driver.create_event()

    def follow(self, stream: int) -> None:
        """What comes on this stream_queue runs after all that is on `stream` by now."""
        with self.lock:
            self.driver.record_event(self._fence, stream)
            self.driver.stream_wait_event(self.stream, self._fence)

    def stage(
        self,
        layers: int,
        pages: int,
        stride: int,
        lba_nbytes: int,
        timeout_s: float,
        owner: LeaseOwner,
    ) -> StagedLayers:
        """Staging for a transfer: all of its layers, or a share's worth, in whole blocks.

        stride: from slice to slice, in bytes.  Raises CapacityError when one layer does not fit,
        DeviceTimeout when none comes free.
        """
        layer_nbytes, words_nbytes = pages * stride, LayerWords.nbytes_of(layers)
        head = words_nbytes + lba_nbytes
        share = self.staging.nbytes // _SHARE
        window = min(layers, max(1, (share - head) // max(1, layer_nbytes)))
        lease = self.staging.arena.lease(head + window * layer_nbytes, timeout_s, owner)
        words = LayerWords(lease.address, layers)
        words.clear()
        base = lease.address + words_nbytes
        base += -base % lba_nbytes
        place = np.arange(layers, dtype=np.uint64) % np.uint64(window)
        starts = np.uint64(base) + place * np.uint64(layer_nbytes)
        pinned = self.staging.pinned
        return StagedLayers(words, window, starts, pinned.device_address - pinned.address)

    def acquire_events(self, count: int, into: list[int]) -> None:
        """Adds events that nobody uses; made when there are not enough."""
        while len(into) < count:  # bounded by count
            try:
                into.append(self._events.popleft())
            except IndexError:
                into.append(self.driver.create_event())

    def release_events(self, events: list[int]) -> None:
        """Events of a transfer that ended; from any thread, also in the middle of another call."""
        self._events.extend(events)

    def close(self, timeout_s: float) -> None:
        """Waits for the stream and frees everything; DeviceTimeout keeps it all instead."""
        is_over = False
        try:
            is_over = wait_until(lambda: self.driver.is_stream_done(self.stream), timeout_s)
        finally:  # also when the context is lost, or the wait is interrupted
            if not is_over:
                retain_until_exit(self)
        if not is_over:
            raise DeviceTimeout(
                f"a stream of the GPU did not end within {timeout_s:g} s; its staging stays "
                "reserved until the process ends"
            )
        self.staging.close()
        for event in (*self._events, self._fence):
            self.driver.destroy_event(event)
        if self._own_stream:
            self.driver.destroy_stream(self.stream)


@dataclass(frozen=True)
class _Route:
    """What the stream needs to know of one transfer."""

    copies: PreparedCopy
    staged: StagedLayers
    is_read: bool


class MovedJob(Owned):
    """A job of the native engine over staging, and the stream that moves its layers."""

    def __init__(self, stream_queue: StreamQueue, job: Job, route: _Route) -> None:
        self.page_status: U32 = job.page_status
        self._stream_queue = stream_queue
        self._job = job
        self._route = route
        self._events: list[int] = []  # by layer, once enqueued
        self._enqueued = 0  # layers that the stream holds
        self._started = False  # to be put on the stream
        self._sealed = False  # nothing more will be put on it
        self._failure: TuttiError | None = None
        # Once nobody can wait for them any more.
        finalize(self, stream_queue.release_events, self._events).atexit = False

    @property
    def words(self) -> LayerWords:
        """What the engine and the stream tell each other."""
        return self._route.staged.words

    @property
    def done(self) -> bool:
        """Whether every layer is in its place or failed."""
        return bool(self._job.report().done) and self._is_through()

    def enqueue(self) -> None:
        """Puts all layers on the stream.

        A CUDA error cancels the job, so that what waits already is let go; waits raise it.
        Whoever calls does the same after an interruption.
        """
        stream_queue, layers = self._stream_queue, self.words.layers
        try:
            stream_queue.acquire_events(layers, self._events)
            with stream_queue.lock, stream_queue.driver.bound():
                self._started = not self._sealed
                for layer in range(layers if self._started else 0):
                    self._enqueue_layer(layer)
                    self._enqueued = layer + 1
            self._sealed = True
        except TuttiError as error:
            _log.exception("a transfer could not be put on the GPU's stream; it is cancelled")
            self._fail(error)

    def _fail(self, error: TuttiError) -> None:
        self._failure = error  # before it is sealed: copies may have no event behind them
        self._job.cancel()
        self._sealed = True

    def abandon(self) -> None:
        """Ends what an interrupted `submit` left; nobody is called back."""
        self._job.on_released(None)
        self._fail(interrupted())

    def _enqueue_layer(self, layer: int) -> None:
        driver, stream, route = self._stream_queue.driver, self._stream_queue.stream, self._route
        device_words = route.staged.device_words
        awaited = layer if route.is_read else layer - route.staged.window
        if awaited >= 0:
            driver.wait_value(stream, device_words + self.words.ready_offset(awaited), 1)
        route.copies.move(layer, stream)
        driver.write_value(stream, device_words, layer + 1)
        driver.record_event(self._events[layer], stream)

    def _is_moved(self, layers: int) -> bool:
        """Whether the stream is through with so many of the layers that it holds."""
        count = min(layers, self._enqueued)
        return not count or self._stream_queue.driver.is_event_done(self._events[count - 1])

    def _is_through(self) -> bool:
        """Whether the stream touches nothing of this job any more."""
        if self._failure is not None:  # some copies may have no event behind them
            return self._stream_queue.driver.is_stream_done(self._stream_queue.stream)
        return self._is_moved(self._enqueued)

    def wait_layers(self, layers: int, timeout_s: float) -> bool:
        """Waits until `layers` layers were moved or the job failed.  False after the timeout.

        Raises CudaError when the stream could not be given all of them.
        """
        if self._failure is not None:
            raise self._failure
        deadline = time.monotonic() + timeout_s
        if not self._job.wait_layers(layers, timeout_s):
            return False
        return wait_until(lambda: self._is_moved(layers), max(0.0, deadline - time.monotonic()))

    def order_stream(self, stream: int, layers: int) -> None:
        """Lets `stream` wait, on the GPU, until `layers` layers were moved or the job failed.

        Whether it failed is in `page_status` once the layer's event has happened.
        """
        if self._enqueued < layers:
            raise ConfigError(
                f"only {self._enqueued} layers of this transfer were enqueued; it was cancelled "
                "or its gate is closed, start it again"
            )
        self._stream_queue.driver.stream_wait_event(stream, self._events[layers - 1])

    def wait_released(self, timeout_s: float) -> bool:
        """Waits until neither the medium nor the stream touches memory.  False after it."""
        deadline = time.monotonic() + timeout_s
        if not self._job.wait_released(timeout_s):
            return False
        left_s = max(0.0, deadline - time.monotonic())
        return wait_until(self._is_through, left_s)

    def open_gate(self) -> None:
        """Lets the job compare its digests, and only then puts its layers on the stream: until
        the gate is open the caller's own thread is what a waiting stream would wait for.
        """
        try:
            self._job.open_gate()
            self.enqueue()
        except BaseException:  # interrupted between the two: nothing is moved, and waits say so
            self._fail(interrupted())
            raise

    def cancel(self) -> None:
        """Issues nothing more; every layer that the stream waits for is let go."""
        self._job.cancel()
        with self._stream_queue.lock:
            self._sealed = self._sealed or not self._started

    def is_free(self) -> bool:
        """Whether staging and words may be used again."""
        return self._sealed and bool(self._job.report().released) and self._is_through()


class HostEngine(Owned):
    """Moves pages of one GPU's memory through one native engine and staging of its own.

    engine: whose controller and thread do the I/O.  mover: by default the copy engines.
    load_staging_nbytes, store_staging_nbytes: pinned memory for each direction; a layer of the
    longest transfer must fit, and two should.  load_stream, store_stream: streams to use, such as
    those of a green context; by default two of its own.
    """

    name = "host"

    def __init__(
        self,
        driver: Driver,
        engine: Engine,
        *,
        mover: Mover | None = None,
        load_staging_nbytes: int = STAGING_NBYTES,
        store_staging_nbytes: int = STAGING_NBYTES,
        load_stream: int | None = None,
        store_stream: int | None = None,
    ) -> None:
        self.driver = driver
        self.engine = engine
        self.mover = mover or choose_mover(driver)
        self._closed = False
        self._loads = StreamQueue(driver, engine.controller, load_staging_nbytes, load_stream)
        try:
            self._stores = StreamQueue(
                driver, engine.controller, store_staging_nbytes, store_stream
            )
        except BaseException:
            self._loads.close(1.0)
            raise

    def follow(self, stream: int) -> None:
        """Transfers submitted from now on touch pages only after what is on `stream` by now."""
        for stream_queue in (self._loads, self._stores):
            stream_queue.follow(stream)

    def submit(
        self,
        opcode: int,
        extents: Extents,
        pages: U32,
        memory: PagedMemory,
        **options: Unpack[Options],
    ) -> MovedJob:
        """As `Engine.submit`, for pages in GPU memory.

        on_released: the medium is done with the staging; the stream may still copy out of it.
        Raises CapacityError when not even one layer fits into the staging, DeviceTimeout when none
        comes free, CudaError, and what the engine raises.
        """
        if self._closed:
            raise PoolClosed("the GPU engine is closed; attach a new one")
        is_read = opcode == OPCODE_READ
        stream_queue = self._loads if is_read else self._stores
        lba_nbytes = self.engine.lba_nbytes
        stride = extents.slice_nlb * lba_nbytes
        timeout_s = options.get("timeout_s", TIMEOUT_S)
        layers, slice_nbytes = memory.bases.shape[0], sum(memory.segment_nbytes)
        owner, job, moved = LeaseOwner(stream_queue), None, None
        try:
            staged = stream_queue.stage(layers, pages.size, stride, lba_nbytes, timeout_s, owner)
            to_engine = PagedMemory(
                staged.starts[:, None], (stride,), (slice_nbytes,), pages.size, owner
            )
            copies = self.mover.prepare(
                CopyDescriptor(pages, memory, staged.device_starts, stride, is_read, owner)
            )
            job = self.engine.submit(
                opcode,
                extents,
                np.arange(pages.size, dtype=np.uint32),
                to_engine,
                words=staged.words,
                window=staged.window if is_read else 0,
                **options,
            )
            moved = MovedJob(stream_queue, job, _Route(copies, staged, is_read))
            owner.is_free = moved.is_free
            if not options.get("gated"):
                moved.enqueue()
            return moved
        except BaseException:
            self._abandon(owner, job, moved)
            raise

    def _abandon(self, owner: LeaseOwner, job: Job | None, moved: MovedJob | None) -> None:
        """After an error, or an interruption anywhere in `submit`: Ctrl-C can strike between a
        native submission and its job.  What a device may use stays.
        """
        if moved is not None:
            moved.abandon()
            owner.is_free = moved.is_free
            return
        owner.is_free = lambda: not self.engine.is_using(owner)
        if job is not None:  # nothing of it is on the stream
            job.on_released(None)
            job.cancel()

    def wait_idle(self, timeout_s: float) -> bool:
        """Waits until nothing is on the streams.  False after the timeout."""
        return all(
            wait_until(partial(queue.driver.is_stream_done, queue.stream), timeout_s)
            for queue in (self._loads, self._stores)
        )

    def close(self, timeout_s: float = 10.0) -> None:
        """Waits for both streams and gives everything back; a second call does nothing.

        Close the native engine first: it lets go of every stream that waits.
        Raises DeviceTimeout when a stream does not end; its memory is then kept.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self._loads.close(timeout_s)
        finally:
            self._stores.close(timeout_s)
