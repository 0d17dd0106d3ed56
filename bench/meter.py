"""Wall time, CPU time and latencies of the timed parts of a benchmark, and their order."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tutti.bench.statistics import percentile


def in_turn(names: Sequence[str], turn: int) -> list[str]:
    """The names in an order that rotates with the turn: late runs find a warmer machine."""
    first = turn % max(1, len(names))
    return [*names[first:], *names[:first]]


class Meter:
    """Sums times inside of `timed`; CPU time is that of all threads of the process.

    The kernel's io_uring workers are threads of the process and count as well.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self.wall_s = 0.0
        self.cpu_s = 0.0
        self.latencies_s: list[float] = []

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Counts the time of a block."""
        cpu_s, wall_s = time.process_time(), time.perf_counter()
        try:
            yield
        finally:
            self.wall_s += time.perf_counter() - wall_s
            self.cpu_s += time.process_time() - cpu_s

    @contextmanager
    def operation(self) -> Iterator[None]:
        """Counts the time of a block, and takes it as the latency of one operation."""
        before_s = self.wall_s
        with self.timed():
            yield
        self.latencies_s.append(self.wall_s - before_s)

    @property
    def gb_per_s(self) -> float:
        """10^9 bytes a second; 0 before anything was timed."""
        return self.nbytes / self.wall_s / 1e9 if self.wall_s else 0.0

    @property
    def cpu_s_per_gb(self) -> float:
        """CPU seconds for 10^9 bytes; 0 before anything was moved."""
        return self.cpu_s / (self.nbytes / 1e9) if self.nbytes else 0.0

    def to_dict(self) -> dict[str, Any]:
        return {
            "nbytes": self.nbytes,
            "wall_s": self.wall_s,
            "gb_per_s": self.gb_per_s,
            "cpu_s_per_gb": self.cpu_s_per_gb,
            "operations": len(self.latencies_s),
            "p50_ms": percentile(self.latencies_s, 50) * 1e3,
            "p99_ms": percentile(self.latencies_s, 99) * 1e3,
        }
