"""The adaptive pipeline: one warm-up, one trial each, then the better one, for each path."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tutti.scheduler.pipeline import Overlap, PipelineChooser

INTRA, CROSS = Overlap.INTRA, Overlap.CROSS


def trial(chooser: PipelineChooser, path: str, times_us: list[float]) -> list[Overlap]:
    announced = []
    for time_us in times_us:
        announced.append(chooser.next(path))
        chooser.record(path, 1000, time_us)
    return announced


@pytest.mark.parametrize(
    ("times_us", "better"),
    [([1, 20, 10], CROSS), ([99, 10, 20], INTRA), ([1, 20, 20], INTRA)],
)
def test_the_better_trial_wins_and_the_warm_up_does_not_count(
    times_us: list[float], better: Overlap
) -> None:
    chooser = PipelineChooser()
    assert chooser.decided("direct") is None
    assert trial(chooser, "direct", times_us) == [INTRA, INTRA, CROSS]
    assert chooser.decided("direct") is better
    assert trial(chooser, "direct", [1e6, 1e-6, 5]) == [better] * 3


def test_paths_are_chosen_apart() -> None:
    chooser = PipelineChooser()
    trial(chooser, "direct", [5, 9, 1])
    assert chooser.decided("buffered") is None
    trial(chooser, "buffered", [5, 1, 9])
    assert (chooser.decided("direct"), chooser.decided("buffered")) == (CROSS, INTRA)
    chooser.reset("direct")
    assert chooser.decided("direct") is None
    assert chooser.decided("buffered") is INTRA


@pytest.mark.parametrize("bad_us", [0.0, -5.0, math.nan, math.inf])
def test_a_clock_that_jumps_repeats_the_trial(bad_us: float) -> None:
    chooser = PipelineChooser()
    assert trial(chooser, "direct", [5, bad_us, 9, bad_us, 1]) == [
        *(INTRA, INTRA, INTRA),
        *(CROSS, CROSS),
    ]
    assert chooser.decided("direct") is CROSS
    chooser.reset("direct")
    chooser.record("direct", 0, 5)
    assert chooser.rates("direct") == {}


@given(st.lists(st.floats(allow_nan=True), max_size=12))
def test_it_decides_after_three_measurements_that_mean_something(times_us: list[float]) -> None:
    chooser = PipelineChooser()
    trial(chooser, "direct", times_us)
    good = [t for t in times_us if 0 < t < math.inf]
    assert (chooser.decided("direct") is not None) == (len(good) >= 3)
    if len(good) >= 3:
        rates = chooser.rates("direct")
        assert chooser.decided("direct") is max(rates, key=lambda o: rates[o]) or (
            rates[INTRA] == rates[CROSS]
        )
