"""Times concurrent work on a GPU, without the influence of the Python interpreter."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tutti.bench.gpu.rig import DevicePages, poll_until, stream_of_transfers
from tutti.errors import DeviceTimeout
from tutti.gio_uring.gpu.driver import Driver
from tutti.gio_uring.gpu.pinned_memory import PinnedMemory
from tutti.gio_uring.memory import HostBuffer

ROUNDS = 12
#: GPU time of a round, and most calls in it: a stream holds about a thousand.
ROUND_S = 0.04
CALLS_MAX = 200
#: Time of loads before concurrent work is timed.
_SETTLE_S = 0.03
_LOADS_MAX = 100_000


class Gate:
    """Blocks a stream until a whole round is enqueued, so that the interpreter is not timed.

    It opens by itself after some seconds, so that every wait is bounded.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._pinned = PinnedMemory(driver, HostBuffer(4096, hugepages=False))
        self._word = self._pinned.buffer.array[:4].view(np.uint32)
        self._count = 0
        self._streams: set[int] = set()

    @contextmanager
    def holds(self, stream: int) -> Iterator[None]:
        """Work that is enqueued on the stream within begins at the end of the block."""
        self._count += 1
        self._streams.add(stream)
        late = threading.Timer(5.0, self._open)
        late.start()
        try:
            self._driver.wait_value(stream, self._pinned.device_address, self._count)
            yield
        finally:
            is_late = bool(self._word[0] >= self._count)
            late.cancel()
            self._open()
        if is_late:
            raise DeviceTimeout("a round could not be enqueued within 5 s; is the GPU stuck?")

    def _open(self) -> None:
        self._word[0] = self._count

    def close(self) -> None:
        """Unpins the word once no stream waits for it."""
        for stream in self._streams:
            poll_until(lambda stream=stream: self._driver.is_stream_done(stream), "a stream")  # type: ignore[misc]
        self._pinned.close()


@dataclass
class Stopwatch:
    """Times calls of a kernel on a stream, by GPU events."""

    torch: Any
    gate: Gate
    kernel: Callable[[], object]
    calls: int = 3

    def warm_up(self, streams: list[Any]) -> None:
        """Lets libraries allocate and load on every stream, then chooses the calls per round."""
        for stream in streams:
            with self.torch.cuda.stream(stream):
                for _ in range(3):
                    self.kernel()
            poll_until(stream.query, "a kernel")
        each_ms = min(self.ms(stream) for stream in streams) / self.calls
        self.calls = max(3, min(CALLS_MAX, int(ROUND_S * 1e3 / each_ms)))

    def ms(self, stream: Any) -> float:
        """GPU time of the calls."""
        begin, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        with self.torch.cuda.stream(stream), self.gate.holds(stream.cuda_stream):
            begin.record()
            for _ in range(self.calls):
                self.kernel()
            end.record()
        # With pauses, because another thread may need the GIL.
        poll_until(end.query, "a kernel")
        return float(begin.elapsed_time(end))


@dataclass
class Loads:
    """The loads that ran during other work."""

    nbytes: int
    ended_s: list[float] = field(default_factory=list)  # of time.perf_counter()

    def gb_per_s(self) -> float:
        """Speed between the ends of the first and the last load; 0 if there were none."""
        if len(self.ended_s) < 2:
            return 0.0
        return (len(self.ended_s) - 1) * self.nbytes / (self.ended_s[-1] - self.ended_s[0]) / 1e9


@contextmanager
def loads_beside(submitter: Any, pages: DevicePages) -> Iterator[Loads]:
    """Loads repeatedly on a thread of its own, two at a time, until the block ends."""
    stop = threading.Event()
    loads = Loads(pages.load.nbytes)
    errors: list[BaseException] = []

    def work() -> None:
        running = stream_of_transfers(submitter, pages, "load", _LOADS_MAX)
        try:
            for ended_s in running:
                loads.ended_s.append(ended_s)
                if stop.is_set():
                    break
            running.close()  # waits for loads in flight
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    time.sleep(_SETTLE_S)
    try:
        yield loads
    finally:
        stop.set()
        thread.join(60)
        if thread.is_alive():
            errors.append(DeviceTimeout("a load did not end in 60 s; is the GPU stuck?"))
    if errors:
        raise errors[0]
