"""Whether measurements reach a goal."""

from __future__ import annotations

from collections.abc import Mapping

REACHED, NOT_REACHED, NOT_RESOLVED = "reached", "**not reached**", "not resolved"


def exactly(number: float) -> dict[str, float]:
    """The interval of a number without an uncertainty."""
    return {"median": number, "low": number, "high": number}


def verdict(interval: Mapping[str, float], bar: float, *, is_least: bool = False) -> str:
    """Whether a goal is reached, or is not, by the whole interval; else it is not resolved.

    is_least: the goal is at least the bar, else at most.
    """
    low, high = interval["low"], interval["high"]
    worst, best = (low, high) if is_least else (-high, -low)
    bar = bar if is_least else -bar
    return REACHED if worst >= bar else NOT_RESOLVED if best >= bar else NOT_REACHED
