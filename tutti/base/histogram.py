"""Durations counted by bucket, as Prometheus publishes them."""

from __future__ import annotations

import math
import threading
import time
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

#: Upper bounds of the buckets in seconds; the last bucket has none.
BOUNDS_S = (
    *(0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05),
    *(0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0),
)


class Histogram:
    """Counts durations.  Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = [0] * (len(BOUNDS_S) + 1)
        self._sum_s = 0.0

    def observe_since(self, begun_s: float) -> None:
        """Counts the time since ``begun_s`` of time.monotonic()."""
        duration_s = time.monotonic() - begun_s
        with self._lock:
            self._counts[bisect_left(BOUNDS_S, duration_s)] += 1
            self._sum_s += duration_s

    def as_dict(self) -> dict[str, Any]:
        """bounds_s: upper bounds.  counts: one per bucket, one more than bounds.  sum_s: of all."""
        with self._lock:
            return {"bounds_s": list(BOUNDS_S), "counts": list(self._counts), "sum_s": self._sum_s}


def quantile_s(counts: Sequence[int], share: float) -> float | None:
    """The upper bound of the bucket with a quantile (share: 0.99 for p99); None without counts."""
    total = sum(counts)
    if not total:
        return None
    below = 0
    for bound_s, count in zip((*BOUNDS_S, math.inf), counts, strict=True):
        below += count
        if below >= share * total:
            return bound_s
    return math.inf
