"""Limits the bytes that puts may write a day, against the wear of the drive."""

from __future__ import annotations

import time
from collections.abc import Callable

_DAY_S = 86_400.0
#: Of a day's budget, what may be written at once after a time without puts.
_BURST = 1 / 24


class WriteBudget:
    """Grants objects as a token bucket does.  Not thread-safe: the store holds a lock around it.

    nbytes_per_day: None for no limit.  object_nbytes: what one object costs, its record included.
    A bucket holds the budget of an hour, and one object at least; it is full at first.
    """

    def __init__(
        self,
        nbytes_per_day: int | None,
        object_nbytes: int,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._per_s = None if nbytes_per_day is None else nbytes_per_day / object_nbytes / _DAY_S
        self._most = max(1.0, (self._per_s or 0.0) * _DAY_S * _BURST)
        self._left, self._since_s = self._most, clock()

    def allowed(self, objects: int) -> int:
        """How many of so many objects may be written now."""
        if self._per_s is None:
            return objects
        now_s = self._clock()
        earned = max(0.0, now_s - self._since_s) * self._per_s
        self._left, self._since_s = min(self._most, self._left + earned), now_s
        return min(objects, int(self._left))

    def take(self, objects: int) -> None:
        """Counts objects as written, at most as many as ``allowed`` said."""
        self._left -= objects
