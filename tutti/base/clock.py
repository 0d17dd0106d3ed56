"""Time as a parameter, so that policies and tests do not depend on the machine's own."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """What may be asked about time."""

    def now_ns(self) -> int:
        """Monotonic time in nanoseconds; only differences mean anything."""

    def unix_ns(self) -> int:
        """Wall time in nanoseconds since 1970, for stamps on the medium and in reports."""

    def sleep(self, duration_s: float) -> None:
        """Return after `duration_s` seconds of this clock."""


class SystemClock:
    """The machine's clocks."""

    now_ns = staticmethod(time.monotonic_ns)  # no function of Python: it is part of every transfer

    def unix_ns(self) -> int:
        return time.time_ns()

    def sleep(self, duration_s: float) -> None:
        time.sleep(duration_s)
