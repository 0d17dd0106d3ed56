"""One direction of a GPU engine: its streams, its staging and a queue of transfers.

Transfers are enqueued one after another; their layers alternate between the streams.  Layer l is on
the same stream for all transfers, so that two transfers write it in order.  A submitter enqueues
the first layers of its transfer; a thread of the queue enqueues the others.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from tutti.base.arrays import U64
from tutti.base.process import Owned
from tutti.base.units import format_nbytes
from tutti.errors import CapacityError, ConfigError, DeviceTimeout, TuttiError
from tutti.gio_uring.controller import NativeController
from tutti.gio_uring.gpu.driver import Driver
from tutti.gio_uring.gpu.events import EventPool
from tutti.gio_uring.gpu.pinned_memory import (
    ALIGNMENT,
    LeaseOwner,
    PinnedStaging,
    retain_until_exit,
)
from tutti.gio_uring.layer_words import LayerWords

_LOOK_S = 0.00005
_LOOK_MOST_S = 0.0005
#: One transfer may use 1/_SHARE of the staging, or more if one page of a layer needs more.
_SHARE = 2
#: Cells of a transfer whose layers exceed half its share: two are copied while two are read.
_CELLS = 4
#: Layers that a submitter enqueues itself.
FIRST_LAYERS = 2
#: Most driver calls on the stream after a wait for the medium.  A full stream blocks the calls of
#: every thread.
CALLS_MAX = 768

_log = logging.getLogger(__name__)


def wait_until(is_done: Callable[[], bool], timeout_s: float) -> bool:
    """Polls with exponential backoff.  False after the timeout."""
    deadline = time.monotonic() + timeout_s
    pause_s = _LOOK_S
    while not is_done():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LOOK_MOST_S)
    return True


@dataclass(frozen=True)
class StagedLayers:
    """Staging of pages [first, last) of a transfer: its words, and the places of its layers.

    starts: uint64 (layers,), host address of slice 0 of each layer.  window: number of places;
    layer l + window reuses that of layer l.
    """

    words: LayerWords
    window: int
    starts: U64
    to_device: int  # added to host addresses, gives device addresses
    first: int = 0
    last: int = 0

    @property
    def device_words(self) -> int:
        """Device address of the words."""
        return self.words.address + self.to_device

    @property
    def device_starts(self) -> U64:
        """`starts` as device addresses."""
        return self.starts + np.uint64(self.to_device)


@dataclass(frozen=True)
class Needed:
    """Staging that a transfer needs.  stride: bytes from slice to slice, a multiple of the LBA."""

    layers: int
    pages: int
    stride: int
    lba_nbytes: int

    def head_nbytes(self, chunks: int = 1) -> int:
        """Bytes of the words of all chunks, with room for the alignment of slices."""
        return chunks * LayerWords.nbytes_of(self.layers) + self.lba_nbytes

    def staging_nbytes(self, layers: int) -> int:
        """Bytes of staging in which two such transfers have places for `layers` layers each."""
        layers_nbytes = min(layers, self.layers) * self.pages * self.stride
        return _SHARE * -(-(self.head_nbytes() + layers_nbytes) // ALIGNMENT) * ALIGNMENT

    def layers_in(self, nbytes: int) -> int:
        """Number of layers, of all pages, that fit into `nbytes`; at least 1."""
        fitting = (nbytes - self.head_nbytes()) // max(1, self.pages * self.stride)
        return min(self.layers, max(1, fitting))


@dataclass(frozen=True)
class Cells:
    """Staging of a transfer whose layers go through it one after another, each in chunks.

    Chunk c of layer l has number v = l * chunks + c, and uses cell v % cells.  So staging holds
    a few layers of many pages: all chunks of a layer precede the next layer.
    """

    chunks: list[StagedLayers]
    cells: int

    @property
    def layers(self) -> int:
        """Number of layers of the transfer."""
        return self.chunks[0].words.layers

    def granted(self, chunk: int) -> int:
        """Number of layers of a chunk whose cells are free initially."""
        return len(range(chunk, min(self.cells, self.layers * len(self.chunks)), len(self.chunks)))

    def next_user(self, layer: int, chunk: int) -> tuple[int, int] | None:
        """(chunk, layer) that uses this one's cell next; None if there is none."""
        number = layer * len(self.chunks) + chunk + self.cells
        after, its_chunk = divmod(number, len(self.chunks))
        return (its_chunk, after) if after < self.layers else None


class Feed(Protocol):
    """An item of the queue."""

    def put_next(self, parts: int) -> bool:
        """Enqueues its next parts, at least one and at most ``parts``, under the queue's lock;
        returns whether none is left.
        """

    def is_far_ahead(self) -> bool:
        """Whether the next part must wait, because of the calls that are enqueued after a wait."""


class _Follow:
    """A wait for another stream, queued between transfers."""

    def __init__(self, queue: StreamQueue, event: int) -> None:
        self._queue, self._event = queue, event

    def put_next(self, parts: int) -> bool:
        with self._queue.driver.together():
            for stream in self._queue.streams if self._queue.failure is None else ():
                self._queue.driver.stream_wait_event(stream, self._event)
        self._queue.events.release([self._event])
        return True

    def is_far_ahead(self) -> bool:
        return False


class StreamQueue(Owned):
    """One direction: streams, their staging, and the transfers that are enqueued one after another.

    streams: the streams to use, or the number of streams to create.
    """

    def __init__(
        self,
        driver: Driver,
        controller: NativeController,
        nbytes: int,
        streams: Sequence[int] | int,
    ) -> None:
        if isinstance(streams, Sequence) and not all(streams):
            raise ConfigError(
                "the default stream cannot take batches of copies and waits for other streams; "
                "create a stream for the engine"
            )
        self.driver = driver
        self._own_streams: list[int] = []
        with ExitStack() as undo:
            if isinstance(streams, int):
                for _ in range(streams):
                    self._own_streams.append(driver.create_stream(-1))
                    undo.callback(driver.destroy_stream, self._own_streams[-1])
                streams = self._own_streams
            self.streams = streams
            self.staging = PinnedStaging(driver, controller, nbytes)
            undo.callback(self.staging.close)
            self.events = EventPool(driver)
            undo.pop_all()
        self.lock = threading.Lock()  # so that transfers do not interleave
        self._feeds: deque[Feed] = deque()  # the first one is being enqueued
        #: Why the streams are lost, or do not follow another stream; nothing is enqueued then.
        self.failure: TuttiError | None = None
        self._watched: list[tuple[Callable[[], bool], Callable[[], object]]] = []
        self._feeder: threading.Thread | None = None
        self.first_layers = FIRST_LAYERS
        self.layers = 0  # enqueued since the queue was opened

    @property
    def stream(self) -> int:
        """The first stream."""
        return self.streams[0]

    def stream_of(self, layer: int) -> int:
        """The stream of a layer, the same for all transfers."""
        return self.streams[layer % len(self.streams)]

    def are_streams_done(self) -> bool:
        """Whether the streams are idle."""
        return all(self.driver.is_stream_done(stream) for stream in self.streams)

    def follow(self, stream: int) -> None:
        """Orders transfers queued from now on after the work that is on `stream` now."""
        with self.lock:
            events: list[int] = []
            self.events.acquire(1, events)
            self.driver.record_event(events[0], stream)
            self._feed(_Follow(self, events[0]), 1)

    def feed(self, transfer: Feed, parts: int) -> None:
        """Enqueues `parts` parts of a transfer, unless others wait; a thread enqueues the rest."""
        with self.lock:
            self._feed(transfer, parts)

    def _feed(self, transfer: Feed, parts: int) -> None:
        is_next = parts and not self._feeds and not transfer.is_far_ahead()
        if is_next and transfer.put_next(parts):
            return
        self._feeds.append(transfer)
        self._start()

    def watch(self, is_over: Callable[[], bool], then: Callable[[], object]) -> None:
        """Calls `then` on the queue's thread once `is_over()`, which must not block."""
        with self.lock:
            self.add_watch(is_over, then)

    def add_watch(self, is_over: Callable[[], bool], then: Callable[[], object]) -> None:
        """As `watch`, for a caller that has the lock."""
        self._watched.append((is_over, then))
        self._start()

    def _start(self) -> None:
        if self._feeder is None:
            self._feeder = threading.Thread(target=self._run, name="tutti-feed", daemon=True)
            self._feeder.start()

    def _run(self) -> None:
        """Enqueues waiting transfers and calls back for watched ones, until there are none."""
        is_over = False
        while not is_over:  # bounded by what is fed and watched
            rests = False
            with self.lock:
                ended = [watched for watched in self._watched if watched[0]()]
                if self._feeds:
                    rests = self._step(self._feeds[0])
                elif len(self._watched) > len(ended):
                    rests = True
                elif not ended:
                    self._feeder, is_over = None, True
            for watched in ended:
                watched[1]()
                with self.lock:  # only now, because is_idle checks it
                    if watched in self._watched:
                        self._watched.remove(watched)
            if rests:
                time.sleep(_LOOK_MOST_S)

    def _step(self, first: Feed) -> bool:
        """Enqueues the next parts of the first item; returns whether they have to wait.

        After a failure nothing more is enqueued, and its waiters get the error.
        """
        is_lost = is_over = self.failure is not None
        try:
            if not is_lost and first.is_far_ahead():
                return True
            is_over = first.put_next(CALLS_MAX)
        except TuttiError as error:
            _log.exception("the streams are lost, or one could not be ordered behind another")
            self.failure = error
        if is_over:
            self._feeds.popleft()
        return False

    def is_idle(self) -> bool:
        """Whether the streams are idle, and nothing is queued or watched."""
        return not (self._feeds or self._watched) and self.are_streams_done()

    def stage(self, needed: Needed, timeout_s: float, owner: LeaseOwner) -> StagedLayers:
        """Staging for all pages of a transfer: for all layers, or as many as fit into its share.

        Raises CapacityError if one layer does not fit, DeviceTimeout if none becomes free.
        """
        share = self.staging.nbytes // _SHARE
        return self._cells(needed, 1, needed.layers_in(share), timeout_s, owner).chunks[0]

    def stage_reads(self, needed: Needed, timeout_s: float, owner: LeaseOwner) -> Cells:
        """As `stage`, for any number of pages: layers are split into chunks if two do not fit.

        Raises CapacityError if one page of a layer does not fit, DeviceTimeout if none becomes
        free.
        """
        share = self.staging.nbytes // _SHARE
        cells = needed.layers_in(share)
        if cells >= min(2, needed.layers) or needed.pages <= 1:
            return self._cells(needed, 1, cells, timeout_s, owner)
        most = max(1, (share - needed.head_nbytes()) // _CELLS // needed.stride)
        chunks = -(-needed.pages // most)
        size = -(-needed.pages // chunks) * needed.stride
        cells = max(1, (share - needed.head_nbytes(chunks)) // size)
        return self._cells(needed, chunks, cells, timeout_s, owner)

    def stage_writes(self, needed: Needed, timeout_s: float, owner: LeaseOwner) -> Cells:
        """Like `stage`, with space for every layer if the whole staging is large enough."""
        cells = needed.layers_in(self.staging.nbytes)
        return self._cells(needed, 1, cells, timeout_s, owner)

    def check_page(self, needed: Needed) -> None:
        """Raises CapacityError if not even one page of a layer fits."""
        nbytes = needed.head_nbytes() + needed.stride
        if nbytes > self.staging.nbytes:
            raise CapacityError(
                f"a page of one layer needs {format_nbytes(nbytes)} of the GPU engine's staging, "
                f"which has {format_nbytes(self.staging.nbytes)}; give it more (gpu_staging of the "
                "linker, staging_nbytes of an engine)"
            )

    def pages_max(self, needed: Needed) -> int:
        """Number of pages whose layers all fit into a transfer's share of staging; at least 1."""
        share = self.staging.nbytes // _SHARE - needed.head_nbytes()
        return max(1, share // (needed.layers * needed.stride))

    def _cells(
        self, needed: Needed, chunks: int, cells: int, timeout_s: float, owner: LeaseOwner
    ) -> Cells:
        pages, layers, lba_nbytes = needed.pages, needed.layers, needed.lba_nbytes
        size = -(-pages // chunks) * needed.stride
        nbytes = needed.head_nbytes(chunks) + cells * size
        lease = self.staging.arena.lease(nbytes, timeout_s, owner)
        words_nbytes = LayerWords.nbytes_of(layers)
        base = lease.address + chunks * words_nbytes
        base += -base % lba_nbytes
        pinned = self.staging.pinned
        to_device = pinned.device_address - pinned.address
        numbers = np.arange(layers, dtype=np.uint64) * np.uint64(chunks)
        made = []
        for c in range(chunks):
            words = LayerWords(lease.address + c * words_nbytes, layers)
            words.clear()
            place = (numbers + np.uint64(c)) % np.uint64(cells)
            starts = np.uint64(base) + place * np.uint64(size)
            first, last = c * pages // chunks, (c + 1) * pages // chunks
            made.append(StagedLayers(words, cells, starts, to_device, first, last))
        return Cells(made, cells)

    def close(self, timeout_s: float) -> None:
        """Waits for the streams and frees everything; if they do not end, raises DeviceTimeout."""
        is_over = False
        try:
            is_over = wait_until(self.is_idle, timeout_s)
        finally:  # also when the context is lost, or the wait is interrupted
            if not is_over:
                self._watched.clear()
                retain_until_exit(self)
        if not is_over:
            raise DeviceTimeout(
                f"a stream of the GPU did not end within {timeout_s:g} s; its staging stays "
                "reserved until the process ends"
            )
        self.staging.close()
        self.events.close()
        for stream in self._own_streams:
            self.driver.destroy_stream(stream)
