"""Chooses the number of SMs for I/O kernels: the fewest that keep up with the medium.

A partition is not a reservation: kernels of the primary context still run on its SMs unless compute
has the complementary partition.  The caller knows into which partitions a GPU can be split.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from tutti.errors import ConfigError, Unsupported

#: Of cuDevSmResourceSplitByCount on compute capability 9.0: partitions of 8, 16, ... SMs.
HOPPER_STEP = 8


@dataclass(frozen=True)
class Partition:
    """The SMs for I/O kernels.  keeps_up: whether they move as much as the medium delivers."""

    sms: int
    mover_gb_per_s: float
    keeps_up: bool


def choose_partition(
    points: Sequence[tuple[int, float]],
    medium_gb_per_s: float,
    *,
    sms: int,
    least: int = HOPPER_STEP,
    step: int = HOPPER_STEP,
    share_max: float = 0.5,
) -> Partition:
    """The smallest partition whose mover keeps up with the medium, or the best that is allowed.

    points: measured or estimated (SMs, GB/s) of the mover; between them it is interpolated, more
    SMs never count for less, and beyond the last one they add nothing.  sms: of the GPU.  least,
    step: sizes that the GPU can be split into.  share_max: of the GPU that I/O may have.
    Where even that is too slow the partition is the smallest with the same bandwidth.
    Raises ConfigError for points that mean nothing, Unsupported for a GPU without a partition.
    """
    curve = _curve(points)
    if not (math.isfinite(medium_gb_per_s) and medium_gb_per_s >= 0):
        raise ConfigError(f"the medium moves {medium_gb_per_s} GB/s; measure it first")
    if least < 1 or step < 1 or not 0 < share_max <= 1:
        raise ConfigError(f"least {least}, step {step} or share_max {share_max} is out of range")
    sizes = range(least, math.floor(sms * share_max) + 1, step)
    if not sizes:
        raise Unsupported(
            f"a GPU of {sms} SMs has no partition of {least} in {share_max:.0%} of it; use the"
            " copy engine"
        )
    best = _at(curve, sizes[-1])
    goal = min(best, medium_gb_per_s)
    chosen = next(size for size in sizes if _at(curve, size) >= goal)
    reached = _at(curve, chosen)
    return Partition(chosen, reached, reached >= medium_gb_per_s)


def _curve(points: Sequence[tuple[int, float]]) -> list[tuple[float, float]]:
    """Sorted, from (0, 0) on, and never falling."""
    curve = [(0.0, 0.0)]
    for sms, rate in sorted(points):
        if sms < 1 or not (math.isfinite(rate) and rate >= 0):
            raise ConfigError(f"a mover with {sms} SMs and {rate} GB/s; measure it again")
        if sms == curve[-1][0]:
            raise ConfigError(f"two points for {sms} SMs; pass one")
        curve.append((float(sms), max(rate, curve[-1][1])))
    if len(curve) == 1:
        raise ConfigError("no points of the mover; run `tutti profile`")
    return curve


def _at(curve: list[tuple[float, float]], sms: float) -> float:
    for (x0, y0), (x1, y1) in itertools.pairwise(curve):
        if sms <= x1:
            return y0 + (y1 - y0) * (sms - x0) / (x1 - x0)
    return curve[-1][1]
