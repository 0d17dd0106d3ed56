"""Virtual time, and a drive or a link in it that several servers share.

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
from tutti.scheduler.loads_and_writes import Write

READ, WRITE = "read", "write"


class Timeline:
    """Virtual time in nanoseconds.  Events at the same time happen in order of insertion."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.events = 0
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._count = 0

    def at(self, when_ns: int, what: Callable[[], None]) -> None:
        """Calls ``what`` at a time, at once when it has passed."""
        self._count += 1
        if when_ns < self.now_ns:
            when_ns = self.now_ns
        heapq.heappush(self._heap, (when_ns, self._count, what))

    def run(self, events_max: int) -> None:
        """Runs until no event is left.  Raises DeviceTimeout after ``events_max`` events."""
        heap = self._heap
        while heap:  # bounded by events_max
            self.now_ns, _, what = heapq.heappop(heap)
            self.events += 1
            if self.events > events_max:
                raise DeviceTimeout(
                    f"the simulation does not end within {events_max} events; report this"
                )
            what()


class DeviceTransfer:
    """A running or queued transfer.  done: called when its last byte was moved."""

    __slots__ = ("done", "nbytes")

    def __init__(self, nbytes: int, done: Callable[[], None]) -> None:
        self.nbytes, self.done = nbytes, done


class _Channel:
    """One direction."""

    def __init__(self, bytes_per_ns: float) -> None:
        self.bytes_per_ns = bytes_per_ns
        self.waiting: deque[DeviceTransfer] = deque()
        self.left = 0.0  # of the first one
        self.moved_nbytes = 0
        self.busy_ns = 0
        self.version = 0


class Device:
    """Two directions, each first come first served."""

    def __init__(
        self, timeline: Timeline, read_bytes_per_s: float, write_bytes_per_s: float, slower: float
    ) -> None:
        self._timeline = timeline
        self._read, self._write = (
            _Channel(read_bytes_per_s / 1e9),
            _Channel(write_bytes_per_s / 1e9),
        )
        self._slower = max(1.0, slower)
        self._since_ns = 0

    def start(self, direction: str, nbytes: int, done: Callable[[], None]) -> DeviceTransfer:
        """Queues a transfer; ``done`` is called when its last byte was moved."""
        channel, other = self._read, self._write
        if direction == WRITE:
            channel, other = other, channel
        transfer = DeviceTransfer(nbytes, done)
        if channel.waiting:
            channel.waiting.append(transfer)
            return transfer
        self._settle()
        channel.waiting.append(transfer)
        channel.left = float(nbytes)
        self._plan(channel)
        if other.waiting:
            self._plan(other)
        return transfer

    def cut(self, direction: str, transfer: DeviceTransfer, unit: int) -> int:
        """Removes the part of a transfer that was not begun; returns the bytes that are left of it.

        Bytes are moved in whole units.  A transfer with nothing left never calls ``done``.
        """
        channel = self._lane(direction)
        if transfer not in channel.waiting:
            return transfer.nbytes
        if transfer is not channel.waiting[0]:
            channel.waiting.remove(transfer)
            return 0
        self._settle()
        moved = transfer.nbytes - channel.left
        nbytes = min(transfer.nbytes, max(1, -int(-moved // unit)) * unit)
        channel.left -= transfer.nbytes - nbytes
        transfer.nbytes = nbytes
        self._plan(channel)
        return nbytes

    def change(self, write_bytes_per_s: float, slower: float) -> None:
        """Changes the write bandwidth and the interference from now on."""
        self._settle()
        self._write.bytes_per_ns = write_bytes_per_s / 1e9
        self._slower = max(1.0, slower)
        for channel in (self._read, self._write):
            if channel.waiting:
                self._plan(channel)

    def moved_nbytes(self, direction: str) -> float:
        """Bytes moved so far, including those of running transfers."""
        self._settle()
        channel = self._lane(direction)
        begun_nbytes = channel.waiting[0].nbytes - channel.left if channel.waiting else 0.0
        return channel.moved_nbytes + begun_nbytes

    def busy_s(self, direction: str) -> float:
        """Seconds in which there was work."""
        self._settle()
        return self._lane(direction).busy_ns / 1e9

    def _lane(self, direction: str) -> _Channel:
        return self._write if direction == WRITE else self._read

    def _rate(self, channel: _Channel) -> float:
        both = self._read.waiting and self._write.waiting
        return channel.bytes_per_ns / self._slower if both else channel.bytes_per_ns

    def _settle(self) -> None:
        """Counts what was moved since the last change."""
        elapsed_ns = self._timeline.now_ns - self._since_ns
        if elapsed_ns:
            for channel in (self._read, self._write):
                if channel.waiting:
                    channel.left -= elapsed_ns * self._rate(channel)
                    channel.busy_ns += elapsed_ns
            self._since_ns = self._timeline.now_ns

    def _plan(self, channel: _Channel) -> None:
        """Schedules the end of a direction's first transfer, under the current conditions."""
        channel.version += 1
        after_ns = max(0, -int(-channel.left // self._rate(channel)))
        ends_ns = self._timeline.now_ns + after_ns
        self._timeline.at(ends_ns, partial(self._end, channel, channel.version))

    def _end(self, channel: _Channel, version: int) -> None:
        if version != channel.version:
            return  # something changed meanwhile
        self._settle()
        ended = channel.waiting.popleft()
        channel.moved_nbytes += ended.nbytes
        if channel.waiting:
            channel.left = float(channel.waiting[0].nbytes)
            self._plan(channel)
        else:
            other = self._read if channel is self._write else self._write
            if other.waiting:
                self._plan(other)
        ended.done()


class Writes:
    """Writes of pages, by name; pages that were not begun can be withdrawn.

    ended: called with a write's name and the number of its pages written, from the first one on.
    """

    def __init__(self, device: Device, ended: Callable[[str, int], None]) -> None:
        self._device, self._ended = device, ended
        self._flying: dict[str, deque[tuple[int, DeviceTransfer]]] = {}

    def start(self, name: str, first: int, pages: int, page_nbytes: int) -> None:
        """Starts to write pages from ``first`` on, after earlier writes."""
        ended = partial(self._end, name, page_nbytes)
        transfer = self._device.start(WRITE, pages * page_nbytes, ended)
        self._flying.setdefault(name, deque()).append((first, transfer))

    def stop(self, write: Write) -> int:
        """Withdraws pages that were not begun; returns the number of those that were."""
        begun, flying = write.issued, self._flying.get(write.name)
        while flying:  # each turn takes one off, or is the last
            begun, transfer = flying[-1]
            nbytes = self._device.cut(WRITE, transfer, write.page_nbytes)
            if nbytes:
                return begun + nbytes // write.page_nbytes
            flying.pop()
        return begun

    def _end(self, name: str, page_nbytes: int) -> None:
        flying = self._flying[name]
        first, transfer = flying.popleft()
        if not flying:
            del self._flying[name]
        self._ended(name, first + transfer.nbytes // page_nbytes)


class Line:
    """Serves one transfer after another at a constant speed: a link or a thread."""

    def __init__(self) -> None:
        self.free_ns = 0
        self.busy_ns = 0

    def take(self, now_ns: int, duration_ns: int) -> int:
        """Adds work; returns its end."""
        if self.free_ns < now_ns:
            self.free_ns = now_ns
        self.free_ns += duration_ns
        self.busy_ns += duration_ns
        return self.free_ns

    def give_back(self, now_ns: int, duration_ns: int) -> None:
        """Removes work that was added."""
        taken_ns = min(duration_ns, max(0, self.free_ns - now_ns))
        self.free_ns -= taken_ns
        self.busy_ns -= taken_ns
