"""Virtual time, and servers on it: a drive or a link that several engines share.

A fluid model: each direction serves one transfer after another at its bandwidth, and both are
slower by the interference while both have work.  It moves no bytes; the drive of
`tutti bench slack` does, command by command, and a test compares the two.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from functools import partial

from tutti.errors import DeviceTimeout

READ, WRITE = "read", "write"


class Timeline:
    """Virtual time in nanoseconds.  What was put in first happens first at equal times."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.events = 0
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._count = 0

    def at(self, when_ns: int, what: Callable[[], None]) -> None:
        """Calls ``what`` at a time, at once when it has passed."""
        self._count += 1
        heapq.heappush(self._heap, (max(when_ns, self.now_ns), self._count, what))

    def run(self, events_max: int) -> None:
        """Until nothing is left to happen.  Raises DeviceTimeout after so many events."""
        heap = self._heap
        while heap:  # bounded by events_max
            self.now_ns, _, what = heapq.heappop(heap)
            self.events += 1
            if self.events > events_max:
                raise DeviceTimeout(
                    f"the simulation does not end within {events_max} events; report this"
                )
            what()


class _Channel:
    """One direction."""

    def __init__(self, bytes_per_ns: float) -> None:
        self.bytes_per_ns = bytes_per_ns
        self.waiting: deque[tuple[int, Callable[[], None]]] = deque()
        self.left = 0.0  # of the first one
        self.moved_nbytes = 0
        self.busy_ns = 0


class Device:
    """Two directions, each first come first served."""

    def __init__(
        self, timeline: Timeline, read_bytes_per_s: float, write_bytes_per_s: float, slower: float
    ) -> None:
        self._timeline = timeline
        self._channels = {
            READ: _Channel(read_bytes_per_s / 1e9),
            WRITE: _Channel(write_bytes_per_s / 1e9),
        }
        self._slower = max(1.0, slower)
        self._since_ns = 0
        self._version = 0

    def start(self, direction: str, nbytes: int, done: Callable[[], None]) -> None:
        """Queues a transfer; ``done`` is called when its last byte was moved."""
        self._settle()
        channel = self._channels[direction]
        channel.waiting.append((nbytes, done))
        if len(channel.waiting) == 1:
            channel.left = float(nbytes)
            self._plan()

    def moved_nbytes(self, direction: str) -> int:
        """Of transfers that ended."""
        return self._channels[direction].moved_nbytes

    def busy_s(self, direction: str) -> float:
        """How long there was work."""
        self._settle()
        return self._channels[direction].busy_ns / 1e9

    def _rate(self, channel: _Channel) -> float:
        both = all(other.waiting for other in self._channels.values())
        return channel.bytes_per_ns / (self._slower if both else 1.0)

    def _settle(self) -> None:
        """Counts what was moved since the last change."""
        elapsed_ns = self._timeline.now_ns - self._since_ns
        if elapsed_ns:
            for channel in self._channels.values():
                if channel.waiting:
                    channel.left -= elapsed_ns * self._rate(channel)
                    channel.busy_ns += elapsed_ns
            self._since_ns = self._timeline.now_ns

    def _plan(self) -> None:
        """When each direction's first transfer ends, as things stand."""
        self._version += 1
        version = self._version
        for channel in self._channels.values():
            if channel.waiting:
                after_ns = max(0, -int(-channel.left // self._rate(channel)))
                ends_ns = self._timeline.now_ns + after_ns
                self._timeline.at(ends_ns, partial(self._end, channel, version))

    def _end(self, channel: _Channel, version: int) -> None:
        if version != self._version:
            return  # something changed meanwhile
        self._settle()
        nbytes, done = channel.waiting.popleft()
        channel.moved_nbytes += nbytes
        channel.left = float(channel.waiting[0][0]) if channel.waiting else 0.0
        self._plan()
        done()


class Thread:
    """Submits one transfer after another."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._free_ns = 0
        self.busy_ns = 0

    def start(self, duration_us: float, done: Callable[[], None]) -> None:
        """Calls ``done`` when so much work is through, after what came before."""
        duration_ns = round(duration_us * 1000)
        self._free_ns = max(self._free_ns, self._timeline.now_ns) + duration_ns
        self.busy_ns += duration_ns
        self._timeline.at(self._free_ns, done)


class Join:
    """Calls ``done`` when all of so many parts have ended."""

    def __init__(self, parts: int, done: Callable[[], None]) -> None:
        self._left = parts
        self._done = done

    def __call__(self) -> None:
        self._left -= 1
        if not self._left:
            self._done()
