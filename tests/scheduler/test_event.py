"""Events as JSON lines: exact, and strict about what is read."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
from hypothesis import given, settings
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
from tutti.scheduler.request import PageLocation, Phase
from tutti.scheduler.state import State, apply, commit
from tutti.scheduler.trace import replay


def events_of(
    ns: st.SearchStrategy[int], count: st.SearchStrategy[int], name: st.SearchStrategy[str]
) -> st.SearchStrategy[events.Event]:
    return st.one_of(
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


all_events = events_of(st.integers(0, 2**62), st.integers(0, 2**40), st.text(max_size=8))
#: About so few things that one event follows another.
near_events = events_of(st.integers(0, 10**8), st.integers(0, 4), st.sampled_from(["one", "other"]))


@given(all_events)
def test_every_event_survives_as_a_line(event: events.Event) -> None:
    line = to_json(event)
    assert "\n" not in line
    assert from_json(line) == event


def makes_sense(state: State, event: events.Event) -> bool:
    """Whether it is about what is there, in the order in which things happen."""
    loads = {load.name: load for load in state.loads}
    writes = {write.name: write for write in state.writes}
    match event:
        case LoadKnown():
            numbers = (event.layers, event.layer_nbytes, event.unit_layers)
            return event.name not in loads and min(numbers) > 0
        case WriteKnown():
            numbers = (event.pages, event.page_nbytes, event.unit_pages)
            return event.name not in writes and min(numbers) > 0
        case LoadGone():
            return event.name in loads
        case WriteGone():
            return event.name in writes
        case LayersReady():
            load = loads.get(event.name)
            return load is not None and load.ready < event.layers <= load.issued
        case PagesWritten():
            write = writes.get(event.name)
            return write is not None and write.written < event.pages <= write.issued
        case PagesCopied():
            return event.name in writes and writes[event.name].place is PageLocation.COPYING
        case LayerBegan():
            step = state.step
            return step.phase is Phase.PREFILL and step.layer <= event.layer < step.layers
    return True


@settings(max_examples=300)
@given(st.lists(all_events, max_size=12) | st.lists(near_events, min_size=20, max_size=40))
def test_no_order_of_events_breaks_the_state(happened: list[events.Event]) -> None:
    """What makes no sense is counted and changes nothing."""
    state, policy = State(), SlackPolicy(Linear())
    for event in happened:
        before, state = state, apply(state, event, Linear())
        assert state.now_ns == max(before.now_ns, event.at_ns)
        counted, more = asdict(before.totals), asdict(state.totals)
        assert all(more[name] >= counted[name] for name in counted)
        assert state.locked_pages >= 0 and state.staged_pages >= 0
        if not makes_sense(before, event):
            ignored = replace(before.totals, ignored=before.totals.ignored + 1)
            assert state == replace(before, now_ns=state.now_ns, totals=ignored)
        elif not isinstance(event, LayersReady | PagesWritten | LayerBegan | StepEnded):
            # Of these the measurement alone may make no sense.
            assert state.totals.ignored == before.totals.ignored
        state = commit(state, policy.decide(state), Linear())


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
