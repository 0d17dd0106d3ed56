"""Medians and intervals."""

from __future__ import annotations

import numpy as np
import pytest

from tutti.bench.statistics import bootstrap_median, median, percentile, ratios
from tutti.errors import ConfigError


def test_medians_and_percentiles() -> None:
    assert median([3.0, 1.0, 2.0]) == 2.0
    assert percentile([0.0, 10.0], 25) == 2.5
    assert median([]) == 0.0


def test_an_interval_holds_its_median_and_is_repeatable() -> None:
    values = [1.0, 1.1, 0.9, 1.2, 1.05, 0.95, 5.0]
    interval = bootstrap_median(values, seed=3)
    assert interval == bootstrap_median(values, seed=3)
    assert min(values) <= interval.low <= interval.median <= interval.high <= max(values)
    assert interval.median == 1.05
    assert interval.to_dict().keys() == {"median", "low", "high"}
    assert bootstrap_median([2.0] * 7).low == 2.0


def test_intervals_cover_the_true_median_as_often_as_they_say(seed: int) -> None:
    rng = np.random.default_rng(seed)
    covered = 0
    for _ in range(200):
        interval = bootstrap_median(rng.normal(size=15).tolist())
        covered += interval.low <= 0 <= interval.high
    assert covered >= 170  # 95 % of 200 are 190; 170 is 10 standard deviations away


def test_nothing_has_no_interval() -> None:
    with pytest.raises(ConfigError, match="no measurements"):
        bootstrap_median([])


def test_ratios_of_pairs() -> None:
    assert ratios([2.0, 3.0, 1.0], [1.0, 2.0, 0.0]) == [2.0, 1.5]
