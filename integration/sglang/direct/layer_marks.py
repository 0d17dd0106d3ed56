"""Measures how long the forward's stream waits for each layer of a batch.

Before and after its wait for a layer the stream writes a word in pinned memory; the thread that
polls for the batch reads these words.  The resolution is its polling interval, and no thread of the
forward waits for the GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from tutti.base.process import Owned
from tutti.gio_uring.gpu.driver import Driver
from tutti.gio_uring.gpu.pinned_memory import PinnedMemory, retain_until_exit
from tutti.gio_uring.gpu.stream_queue import wait_until
from tutti.gio_uring.memory import HostBuffer

#: Most batches with pending waits on the stream; others are not measured.
_BATCHES = 8
#: Models with more layers are not measured.
_LAYERS_MAX = 1024


class BatchMarks:
    """The words of one batch, (2, _LAYERS_MAX): whether a layer's wait has begun, and has ended."""

    def __init__(self, driver: Driver, words: npt.NDArray[np.uint32], address: int) -> None:
        self._driver = driver
        self._words = words
        self._address = address  # the device's
        self._asked: list[int] = []  # layers, in order of their waits
        self._enqueued = 0  # number of waits that were enqueued
        self._seen = 0  # number of ended waits
        self._reached_s = 0.0  # when the next wait began
        self.is_released = False
        words[:] = 0

    def begin(self, layer: int, stream: int) -> None:
        """Marks that a stream reaches a layer's first wait, which ``around`` enqueues later."""
        if layer not in self._asked:
            self._driver.write_value(stream, self._address + 4 * layer, 1)
            self._asked.append(layer)

    def around(self, layer: int, stream: int, wait: Callable[[], None]) -> None:
        """Enqueues ``wait`` for a layer on a stream, with marks if it is the layer's first wait."""
        if layer in self._asked[: self._enqueued]:
            wait()
            return
        with self._driver.together():  # after each call the thread may wait for the GIL
            self.begin(layer, stream)
            wait()
            at = self._address + 4 * layer + 4 * self._words.shape[1]
            self._driver.write_value(stream, at, 1)
        self._enqueued = len(self._asked)

    @property
    def is_through(self) -> bool:
        """Whether every wait was seen to end."""
        return self._seen == len(self._asked)

    @property
    def is_written(self) -> bool:
        """Whether the stream has written all words."""
        return bool(self._words[1, self._asked].all())

    def look(self) -> list[tuple[int, float]]:
        """(layer, seconds waited) of the waits that have ended since the last call."""
        found: list[tuple[int, float]] = []
        now_s = time.monotonic()
        while not self.is_through:  # bounded: by the layers
            layer = self._asked[self._seen]
            if not self._words[0, layer]:
                break
            self._reached_s = self._reached_s or now_s
            if not self._words[1, layer]:
                break
            found.append((layer, now_s - self._reached_s))
            self._reached_s = 0.0
            self._seen += 1
        return found


class LayerMarks(Owned):
    """Words for some batches, pinned at the start: pinning could wait for a persistent kernel."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._buffer = HostBuffer(_BATCHES * 2 * _LAYERS_MAX * 4, hugepages=False)
        self._pinned = PinnedMemory(driver, self._buffer)
        self._words = self._buffer.array.view(np.uint32).reshape(_BATCHES, 2, _LAYERS_MAX)
        self._batches: list[BatchMarks | None] = [None] * _BATCHES

    def take(self, layers: int) -> BatchMarks | None:
        """Unused words for ``layers`` layers; None if there are none, or for too many layers."""
        if layers > _LAYERS_MAX:
            return None
        for row, batch in enumerate(self._batches):
            if batch is None or (batch.is_released and batch.is_written):
                words = self._words[row]
                address = self._pinned.device_address + row * words.nbytes
                found = self._batches[row] = BatchMarks(self._driver, words, address)
                return found
        return None

    def close(self, timeout_s: float) -> None:
        """Unpins the words once no forward writes them; otherwise keeps them until exit."""
        if wait_until(lambda: all(b is None or b.is_written for b in self._batches), timeout_s):
            self._pinned.close()
        else:
            retain_until_exit(self._pinned)
