"""Events as JSON lines: exact, and strict about what is read."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduler.drive import Linear

from tutti.errors import ConfigError
from tutti.scheduler import event as events
from tutti.scheduler.event import (
    BatchJoined,
    LayerBegan,
    LayersReady,
    LoadGone,
    LoadKnown,
    PagesCopied,
    PagesWritten,
    StepBegan,
    StepEnded,
    Tick,
    WriteGone,
    WriteKnown,
    from_json,
    to_json,
)
from tutti.scheduler.policy import SlackPolicy
from tutti.scheduler.request import Phase
from tutti.scheduler.state import State, apply
from tutti.scheduler.trace import replay

ns = st.integers(0, 2**62)
count = st.integers(0, 2**40)
name = st.text(max_size=8)
all_events = st.one_of(
    st.builds(Tick, ns),
    st.builds(LoadKnown, ns, name, count, count, count, count, count, name),
    st.builds(LoadGone, ns, name),
    st.builds(BatchJoined, ns, name, name),
    st.builds(LayersReady, ns, name, count),
    st.builds(WriteKnown, ns, name, count, count, count),
    st.builds(PagesWritten, ns, name, count),
    st.builds(WriteGone, ns, name),
    st.builds(PagesCopied, ns, name),
    st.builds(
        StepBegan, ns, st.sampled_from(Phase), count, count, count, st.lists(name).map(tuple)
    ),
    st.builds(LayerBegan, ns, count, count),
    st.builds(StepEnded, ns),
)


@given(all_events)
def test_every_event_survives_as_a_line(event: events.Event) -> None:
    line = to_json(event)
    assert "\n" not in line
    assert from_json(line) == event


@given(st.lists(all_events, max_size=12))
def test_no_order_of_events_breaks_the_state(happened: list[events.Event]) -> None:
    """What makes no sense is counted and changes nothing."""
    state, policy = State(), SlackPolicy(Linear())
    for event in happened:
        state = apply(state, event, Linear())
        policy.decide(state)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "[]",
        "{}",
        '{"event":"Nothing"}',
        '{"event":"Tick"}',
        '{"event":"Tick","at_ns":-1}',
        '{"event":"Tick","at_ns":1.5}',
        '{"event":"Tick","at_ns":1,"more":2}',
        '{"event":"StepBegan","at_ns":1,"phase":"sleep"}',
    ],
)
def test_what_is_no_event(line: str) -> None:
    with pytest.raises(ConfigError, match="record the trace again"):
        from_json(line)


def test_a_trace_that_is_none() -> None:
    with pytest.raises(ConfigError, match="no line of a trace"):
        list(replay(["nonsense"], SlackPolicy(Linear()), Linear()))
