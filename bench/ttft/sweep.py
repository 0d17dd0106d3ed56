"""Chooses the rates to measure: a sweep, or a bisection for the highest rate within a condition."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tutti.bench.ttft.metrics import mean_interval

Point = dict[str, Any]
#: Measures a rate with one seed.
Measure = Callable[[float, int], Point]
#: Whether all seeds of a rate together meet the condition.
Condition = Callable[[Sequence[Point]], bool]

ATTAINMENT_MIN = 0.9
#: With a finer tolerance, rates rounded to four digits would repeat.
_TOLERANCE_MIN = 0.01


class Stopped(Exception):
    """A measurement ended early.  point: its partial result.  reason: the cause."""

    def __init__(self, point: Point, reason: str, *, interrupted: bool = False) -> None:
        super().__init__(reason)
        self.point = point
        self.interrupted = interrupted


@dataclass
class Sweep:
    """Points by rate, measured once each, with the same seeds.

    Points are kept as they end, so that an interruption does not lose them.
    """

    measure: Measure
    seeds: Sequence[int]
    points: list[Point] = field(default_factory=list)

    def at(self, rate: float) -> list[Point]:
        """Points of all seeds of a rate; measures those that are missing."""
        known = {(point["rate"], point["seed"]): point for point in self.points}
        found = []
        for seed in self.seeds:
            point = known.get((rate, seed))
            if point is None:
                point = self._measure(rate, seed)
            found.append(point)
        return found

    def _measure(self, rate: float, seed: int) -> Point:
        """Measures a point and keeps it, also if partial."""
        try:
            point = {"rate": rate, "seed": seed, **self.measure(rate, seed)}
        except Stopped as stopped:
            self.points.append({"rate": rate, "seed": seed, **stopped.point})
            raise
        self.points.append(point)
        return point

    def max_rate(self, condition: Condition, *, tolerance: float, rate_max: float) -> Point:
        """The highest rate that meets the condition, and the lowest higher one that failed.

        Starts from the measured rates, doubles until one fails, and bisects (geometric mean) until
        the ratio of both is below 1 + tolerance.  `at_least`: no rate up to `rate_max` failed.
        `rate` is None if even about a sixteenth of the lowest given rate fails.
        """
        tolerance, rate_max = max(tolerance, _TOLERANCE_MIN), _rounded(rate_max)
        rates = sorted({point["rate"] for point in self.points})
        passed = [rate for rate in rates if condition(self.at(rate))]
        failed = [rate for rate in rates if rate not in passed]
        high = min(failed, default=None)
        low = max((rate for rate in passed if high is None or rate < high), default=None)
        floor = rates[0] / 16
        while low is None and high is not None and high > floor:
            low, high = self._probe(high / 2, condition, low, high)
        while high is None and low is not None and low < rate_max:
            low, high = self._probe(min(2 * low, rate_max), condition, low, high)
        while low is not None and high is not None and high / low > 1 + tolerance:
            low, high = self._probe((low * high) ** 0.5, condition, low, high)
        return {"rate": low, "fails_at": high, "at_least": high is None}

    def _probe(
        self, rate: float, condition: Condition, low: float | None, high: float | None
    ) -> tuple[float | None, float | None]:
        rate = _rounded(rate)
        return (rate, high) if condition(self.at(rate)) else (low, rate)


def _rounded(rate: float) -> float:
    """The rate, rounded to four digits."""
    return float(f"{rate:.4g}")


def mean_ttft_within(limit_ms: float) -> Condition:
    """Mean TTFT over seeds is at most `limit_ms`; no failure, partial point or growing queue."""

    def holds(points: Sequence[Point]) -> bool:
        if not _usable(points) or any(point["failed"] for point in points):
            return False
        means: list[float] = [point["ttft_ms"]["mean"] for point in points]
        return sum(means) / len(means) <= limit_ms

    return holds


def attained(slo: str) -> Condition:
    """On average over seeds, a share of at least ATTAINMENT_MIN of sent requests met the SLO."""

    def holds(points: Sequence[Point]) -> bool:
        shares: list[float] = [point["slo"][slo]["attainment"] for point in points]
        return _usable(points) and sum(shares) / len(shares) >= ATTAINMENT_MIN

    return holds


def by_rate(points: Sequence[Point]) -> list[Point]:
    """One row per rate, sorted: means over seeds with their 95 % intervals."""
    rows = []
    for rate in sorted({point["rate"] for point in points}):
        of_rate = [p for p in points if p["rate"] == rate]
        whole = [p for p in of_rate if p["ttft_ms"] is not None]
        row: Point = {
            "rate": rate,
            "seeds": len(of_rate),
            "requests": sum(p["requests"] for p in of_rate),
            "failed": sum(p["failed"] for p in of_rate),
            "partial": any(p["partial"] for p in of_rate),
            "unstable": any(p["unstable"] for p in of_rate),
        }
        if whole:
            row |= _row_of_means(whole)
        rows.append(row)
    return rows


def _row_of_means(points: Sequence[Point]) -> Point:
    row: Point = {
        "ttft_ms": mean_interval([p["ttft_ms"]["mean"] for p in points]),
        "ttft_p99_ms": mean_interval([p["ttft_ms"]["p99"] for p in points]),
    }
    for name in ("itl_ms", "tpot_ms"):
        with_gaps = [p[name]["mean"] for p in points if p[name] is not None]
        row[name] = mean_interval(with_gaps) if with_gaps else None
    hits = [p["cached"]["hit_rate"] for p in points if p["cached"]["hit_rate"] is not None]
    row["hit_rate"] = mean_interval(hits)["mean"] if hits else None
    for name in ("input_tokens_per_s", "output_tokens_per_s", "request_throughput"):
        row[name] = mean_interval([p[name] for p in points])["mean"]
    row["slo"] = {
        slo: {
            what: mean_interval([p["slo"][slo][what] for p in points])
            for what in ("goodput", "attainment")
        }
        for slo in points[0]["slo"]
    }
    return row


def _usable(points: Sequence[Point]) -> bool:
    return all(
        point["ttft_ms"] is not None and not point["partial"] and not point["unstable"]
        for point in points
    )
