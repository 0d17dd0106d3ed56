"""Reuses CUDA events, because creating one takes longer than recording it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from tutti.gio_uring.gpu.driver import Driver

#: Created at the start: in a driver a creation may wait for work on the streams.
EVENTS = 256


class EventPool:
    """Events of one driver, initially `EVENTS`.  Thread-safe and reentrant."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._free = deque(driver.create_event() for _ in range(EVENTS))

    def acquire(self, count: int, into: list[int]) -> None:
        """Fills ``into`` up to ``count`` unused events; creates missing ones."""
        while len(into) < count:  # bounded by count
            try:
                into.append(self._free.popleft())
            except IndexError:
                into.append(self._driver.create_event())

    def release(self, events: Iterable[int]) -> None:
        """Returns events that have happened, or that nothing waits for."""
        self._free.extend(events)

    def close(self) -> None:
        """Destroys the events that were released; others may be released meanwhile."""
        while self._free:  # bounded by the events
            self._driver.destroy_event(self._free.pop())
