"""Medians and intervals."""

from __future__ import annotations

import numpy as np
import pytest

from tutti.bench.statistics import bootstrap_median, median, percentile, queue_grows, ratios
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


def test_intervals_cover_the_true_median_as_often_as_they_say(rng: np.random.Generator) -> None:
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


def test_a_queue_that_returns_does_not_grow() -> None:
    came = list(range(80))
    assert not queue_grows(came, [at + 0.5 for at in came])
    assert not queue_grows(came, [at + 15.5 for at in came]), "slow, and level"
    assert queue_grows(came, [1.5 * at + 1 for at in came])
    # A burst that is worked off is not growth, and neither is one at the end.
    assert not queue_grows([0.0] * 40 + came[:40], [at / 2 for at in range(80)])
    assert not queue_grows(came[:7], [1e9] * 7), "too few to tell"
