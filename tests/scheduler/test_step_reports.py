"""What a scheduler is told of a model: few events, and nothing that layers waited is lost."""

from __future__ import annotations

import pytest

from tutti.scheduler.event import LayerBegan, StepBegan, StepEnded
from tutti.scheduler.loads_and_writes import Phase
from tutti.scheduler.step_reports import StepReports


@pytest.mark.parametrize(("layers", "most"), [(1, 1), (4, 4), (7, 7), (32, 4), (33, 4), (80, 4)])
def test_a_prefill_is_told_in_parts_with_all_that_it_waited(layers: int, most: int) -> None:
    reports = StepReports()
    begun = StepBegan(0, Phase.PREFILL, layers=layers)
    assert reports.began(begun, waits=True) is begun
    told = [reports.layer_began(LayerBegan(at, at, waited_ns=at + 1)) for at in range(layers)]
    found = [event for event in told if event is not None]
    assert 0 < len(found) <= most
    ended = reports.ended(StepEnded(layers))
    assert ended is not None
    waited_ns = sum(event.waited_ns for event in found) + ended.waited_ns
    assert waited_ns == sum(range(1, layers + 1))


def test_layers_that_are_not_asked_for_do_not_silence_the_others() -> None:
    """A hybrid model has KV in some layers only."""
    reports = StepReports()
    reports.began(StepBegan(0, Phase.PREFILL, layers=32), waits=True)
    told = [reports.layer_began(LayerBegan(at, at)) for at in range(0, 32, 4)]
    assert [event.layer for event in told if event is not None] == [8, 16, 24]


def decode_steps(reports: StepReports, count: int, *, waits: bool) -> int:
    """How many of them were told."""
    told = 0
    for at in range(count):
        begun = reports.began(StepBegan(at, Phase.DECODE, tokens=1), waits)
        ended = reports.ended(StepEnded(at + 1))
        assert (begun is None) == (ended is None), "a step is told from end to end"
        told += begun is not None
    return told


def test_decode_steps_are_told_while_something_waits_and_now_and_then() -> None:
    reports = StepReports()
    reports.began(StepBegan(0, Phase.PREFILL, layers=4), waits=False)
    reports.ended(StepEnded(1))
    assert decode_steps(reports, 1, waits=False) == 1, "the first"
    assert decode_steps(reports, 64, waits=False) == 4
    assert decode_steps(reports, 5, waits=True) == 5
