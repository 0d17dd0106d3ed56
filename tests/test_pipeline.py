"""The choice between two overlaps: by measurements alone."""

from __future__ import annotations

import itertools

import pytest

from tutti.base.pipeline import TRIALS, Overlap, PipelineChooser

INTRA, CROSS = Overlap.INTRA, Overlap.CROSS


def chosen(intra_s: float, cross_s: float, gain: float) -> Overlap:
    chooser, order = PipelineChooser(gain), []
    for _ in range(1 + 2 * TRIALS):
        assert not chooser.is_decided
        order.append(chooser.overlap)
        chooser.observe(order[-1], 100, intra_s if order[-1] is INTRA else cross_s)
    assert order == [INTRA] * (1 + TRIALS) + [CROSS] * TRIALS
    assert chooser.is_decided
    assert chooser.stats()["overlap"] == chooser.overlap.value
    return chooser.overlap


@pytest.mark.parametrize(("intra_s", "cross_s"), [*itertools.product([0.5, 1, 2, 9], repeat=2)])
@pytest.mark.parametrize("gain", [1.0, 2.0])
def test_cross_has_to_be_faster_by_the_gain(intra_s: float, cross_s: float, gain: float) -> None:
    assert chosen(intra_s, cross_s, gain) is (CROSS if cross_s * gain < intra_s else INTRA)


def test_what_means_nothing_is_no_trial_and_the_warm_up_does_not_count() -> None:
    chooser = PipelineChooser(1.0)
    for nbytes, seconds in ((0, 1.0), (1, 0.0), (1, -1.0), (1, float("inf")), (1, float("nan"))):
        assert chooser.observe(INTRA, nbytes, seconds) is INTRA
    chooser.observe(INTRA, 1, 1000.0)
    for way in (INTRA, CROSS):
        for _ in range(TRIALS + 3):  # what is still under way when all trials are there
            chooser.observe(way, 1, 1.0 if way is INTRA else 1.1)
    assert chooser.is_decided
    assert chooser.overlap is INTRA
