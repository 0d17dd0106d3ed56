"""How a simulated drive changes during a run of `tutti bench slack`; its profile stays the same."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from tutti.bench.simulate.device import WRITE, Device, Timeline
from tutti.bench.simulate.hardware import Drive

_STEP_NS = 20_000_000


@dataclass(frozen=True)
class Conditions:
    """drift: the interference goes from the first value to the second and back in ``period_s``.

    cache_nbytes: so much is written at the drive's speed, then ``exhausted`` times as fast, until
    the drive has emptied its cache, which it does at that speed while nothing is written to it.
    0: the cache never ends.
    """

    drive: Drive
    drift: tuple[float, float] | None = None
    period_s: float = 8.0
    cache_nbytes: float = 0.0
    exhausted: float = 0.25

    def interference(self, now_ns: int) -> float:
        """At a moment."""
        if self.drift is None:
            return self.drive.interference
        low, high = self.drift
        phase = 2 * math.pi * now_ns / 1e9 / self.period_s
        return low + (high - low) * (1 - math.cos(phase)) / 2

    def follow(self, timeline: Timeline, device: Device, is_busy: Callable[[], bool]) -> None:
        """Changes a device as time passes, while there is work."""
        filled = moved = 0.0

        def step() -> None:
            nonlocal filled, moved
            write = self.drive.write_bytes_per_s
            more = device.moved_nbytes(WRITE) - moved
            moved += more
            filled = max(0.0, filled + more - self.exhausted * write * _STEP_NS / 1e9)
            if self.cache_nbytes and filled >= self.cache_nbytes:
                write *= self.exhausted
                filled = min(filled, self.cache_nbytes * 1.05)
            device.change(write, self.interference(timeline.now_ns))
            if is_busy():
                timeline.at(timeline.now_ns + _STEP_NS, step)

        step()
