"""Interpolation of measured times: never falling where more work cannot take less time."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence

from tutti.errors import ProfileError

#: A single measurement of an hour means a defect, not a slow machine.
VALUE_US_MAX = 3600e6


class Curve:
    """Time over an amount: piecewise linear between points, never falling.

    Below the first point it is that point's time, and 0 for nothing; beyond the last it grows in
    proportion.
    """

    def __init__(self, points: Iterable[tuple[float, float]]) -> None:
        """points: (amount > 0, microseconds > 0), at least one, each amount once."""
        ordered = sorted(points)
        self.amounts = [amount for amount, _ in ordered]
        self.times_us: list[float] = []
        for _, time_us in ordered:
            least_us = self.times_us[-1] if self.times_us else 0.0
            self.times_us.append(max(time_us, least_us))

    def at(self, amount: float) -> float:
        """Microseconds for an amount."""
        if amount <= 0:
            return 0.0
        above = bisect.bisect_left(self.amounts, amount)
        if above == len(self.amounts):
            return self.times_us[-1] * amount / self.amounts[-1]
        if above == 0:
            return self.times_us[0]
        x0, x1 = self.amounts[above - 1], self.amounts[above]
        y0, y1 = self.times_us[above - 1], self.times_us[above]
        return y0 + (y1 - y0) * (amount - x0) / (x1 - x0)


class Family:
    """Curves for several values of a second parameter, blended linearly between two of them.

    rising: more of the parameter takes no less time, as a longer prefix does; beyond the last
    curve times grow in proportion.  Otherwise the nearest curve counts outside, as for slice sizes.
    """

    def __init__(self, curves: Sequence[tuple[float, Curve]], *, rising: bool) -> None:
        ordered = sorted(curves, key=lambda pair: pair[0])
        self.parameters = [parameter for parameter, _ in ordered]
        self.curves: list[Curve] = []
        for _, curve in ordered:
            if rising and self.curves:
                lower = self.curves[-1]
                pairs = zip(curve.amounts, curve.times_us, strict=True)
                curve = Curve((x, max(us, lower.at(x))) for x, us in pairs)
            self.curves.append(curve)
        self._rising = rising

    @classmethod
    def from_rows(cls, name: str, rows: object, *, rising: bool) -> Family:
        """From rows of (amount, parameter, microseconds, ...), one for every pair of the grid.

        Raises ProfileError for anything else.
        """
        table = check_rows(name, rows, 2)
        amounts = sorted({row[0] for row in table})
        parameters = sorted({row[1] for row in table})
        times = {(row[0], row[1]): row[2] for row in table}
        if len(times) != len(table):
            raise ProfileError(f"{name} has a point twice; run `tutti profile` again")
        missing = [(x, y) for y in parameters for x in amounts if (x, y) not in times]
        if missing:
            raise ProfileError(
                f"{name} lacks {len(missing)} of {len(amounts) * len(parameters)} points, the first"
                f" {missing[0]}; run `tutti profile` again to complete it"
            )
        curves = [(y, Curve((x, times[x, y]) for x in amounts)) for y in parameters]
        return cls(curves, rising=rising)

    def at(self, amount: float, parameter: float) -> float:
        """Microseconds."""
        above = bisect.bisect_left(self.parameters, parameter)
        if above == len(self.parameters):
            time_us = self.curves[-1].at(amount)
            last = self.parameters[-1]
            return time_us * parameter / last if self._rising and last > 0 else time_us
        if above == 0:
            return self.curves[0].at(amount)
        y0, y1 = self.parameters[above - 1], self.parameters[above]
        low_us, high_us = self.curves[above - 1].at(amount), self.curves[above].at(amount)
        return low_us + (high_us - low_us) * (parameter - y0) / (y1 - y0)


def check_rows(name: str, rows: object, columns_after: int) -> list[list[float]]:
    """Rows of plain numbers: an amount above 0, a parameter from 0, then times that can be.

    columns_after: the last column that must be there.  Raises ProfileError.
    """
    if not isinstance(rows, list) or not rows:
        raise ProfileError(f"{name} has no points; run `tutti profile` again")
    for row in rows:
        is_row = isinstance(row, list) and len(row) > columns_after
        if not is_row or not all(_is_number(value) for value in row):
            raise ProfileError(f"{name} has the row {row!r}; rows must be numbers, one per column")
        if row[0] <= 0 or row[1] < 0:
            raise ProfileError(f"{name} has a point at {row[:2]}; amounts must be above 0")
        for value in row[2:]:
            if not 0 < value <= VALUE_US_MAX:
                raise ProfileError(
                    f"{name} has {value} us at {row[:2]}; times must be above 0, at most an hour"
                )
    return rows


def _is_number(value: object) -> bool:
    # False for NaN, the infinities, and integers that no float holds.
    return type(value) in (int, float) and -1e18 < value < 1e18  # type: ignore[operator]
