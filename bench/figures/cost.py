"""Computes values of figures from their rows: costs of tokens, and crossings of curves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from tutti.bench.figures.data import Row, number_of, value
from tutti.errors import ConfigError


@dataclass(frozen=True)
class Prices:
    """Dollars per hour of a GPU, and of a gigabyte (10^9 bytes) of DRAM and of SSD."""

    gpu: float
    dram_gb: float
    ssd_gb: float

    def per_hour(self, row: Row) -> float:
        """Dollars per hour of a row's machine."""
        prices = {"gpus": self.gpu, "dram_gb": self.dram_gb, "ssd_gb": self.ssd_gb}
        return sum(price * value(row, column) for column, price in prices.items())


def per_million_tokens(row: Row, prices: Prices) -> float | None:
    """Dollars per 10^6 tokens, prompts and answers together; None if nothing was served.

    As in section 4.3 of the Tutti paper (arXiv 2605.03375), without wear of the SSDs.
    """
    tokens_per_s = (number_of(row, "input_tokens_per_s") or 0.0) + (
        number_of(row, "output_tokens_per_s") or 0.0
    )
    return _dollars(row, prices, tokens_per_s) if tokens_per_s else None


def interval_per_million(row: Row, prices: Prices) -> tuple[float, float] | None:
    """The interval of `per_million_tokens`, if the row has intervals of its tokens."""
    low, high = (number_of(row, f"tokens_{end}_per_s") for end in ("low", "high"))
    return (_dollars(row, prices, high), _dollars(row, prices, low)) if low and high else None


def _dollars(row: Row, prices: Prices, tokens_per_s: float) -> float:
    return 1e6 * prices.per_hour(row) / (3600 * tokens_per_s)


def crossings(a: Sequence[tuple[float, float]], b: Sequence[tuple[float, float]]) -> list[float]:
    """x of the crossings of two piecewise linear curves, within the range that both cover.

    Points are (x, y).  Touching counts as crossing, coinciding does not.
    Raises ConfigError for two values at one x.
    """
    first, second = sorted(a), sorted(b)
    for curve in (first, second):
        if len({x for x, _ in curve}) < len(curve):
            raise ConfigError("a curve has two values at one place; keep one row for each")
    low = max(first[0][0], second[0][0])
    high = min(first[-1][0], second[-1][0])
    places = sorted({x for x, _ in (*first, *second) if low <= x <= high})
    gaps = [(x, _at(first, x) - _at(second, x)) for x in places]
    found = [x for x, gap in gaps if gap == 0]
    for (x0, gap0), (x1, gap1) in pairwise(gaps):
        if gap0 * gap1 < 0:
            found.append(x0 + (x1 - x0) * gap0 / (gap0 - gap1))
    return sorted(found) if any(gap for _, gap in gaps) else []


def _at(curve: Sequence[tuple[float, float]], x: float) -> float:
    for (x0, y0), (x1, y1) in pairwise(curve):
        if x0 <= x <= x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return curve[-1][1] if x >= curve[-1][0] else curve[0][1]
