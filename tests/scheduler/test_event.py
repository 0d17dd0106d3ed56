"""Events as JSON lines: exact, and strict about what is read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler.drive import Linear, same, snapshot

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
    SpaceKnown,
    StepBegan,
    StepEnded,
    Tick,
    WriteGone,
    WriteKnown,
    from_json,
    to_json,
)
from tutti.scheduler.loads_and_writes import Load, LoadKind, PageLocation, Phase
from tutti.scheduler.policy import SlackPolicy
from tutti.scheduler.read_order import begin_turn
from tutti.scheduler.state import State
from tutti.scheduler.state_changes import apply, commit
from tutti.scheduler.trace import replay


def events_of(
    ns: st.SearchStrategy[int], count: st.SearchStrategy[int], name: st.SearchStrategy[str]
) -> st.SearchStrategy[events.Event]:
    return st.one_of(
        st.builds(Tick, ns),
        st.builds(
            LoadKnown,
            *(ns, name, count, count, count, count, count, name),
            st.sampled_from(LoadKind),
            asked_ns=ns | st.just(0),
            alone=st.booleans(),
        ),
        st.builds(LoadGone, ns, name),
        st.builds(BatchJoined, ns, name, name),
        st.builds(LayersReady, ns, name, count),
        st.builds(SpaceKnown, ns, name, count, count),
        st.builds(WriteKnown, ns, name, count, count, count, name | st.just("")),
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
    loads, writes = state.loads, state.writes
    match event:
        case LoadKnown():
            numbers = (event.layers, event.layer_nbytes, event.unit_layers)
            return event.name not in {*loads, *writes} and min(numbers) > 0
        case WriteKnown():
            numbers = (event.pages, event.page_nbytes, event.unit_pages)
            return (
                event.space in state.spaces
                and event.name not in {*loads, *writes}
                and min(numbers) > 0
            )
        case LoadGone():
            return event.name in loads
        case WriteGone():
            return event.name in writes
        case LayersReady():
            load = loads.get(event.name)
            return load is not None and load.ready < event.layers <= load.issued
        case PagesWritten():
            write = writes.get(event.name)
            return write is not None and write.written < event.pages <= write.may_be_written
        case PagesCopied():
            return event.name in writes and writes[event.name].place is PageLocation.COPYING
        case LayerBegan():
            step = state.step
            return step.phase is Phase.PREFILL and step.layer <= event.layer < step.layers
    return True


@settings(max_examples=200)
@given(st.lists(all_events, max_size=12) | st.lists(near_events, min_size=20, max_size=40))
def test_no_order_of_events_breaks_the_state(happened: list[events.Event]) -> None:
    """What makes no sense is counted and changes nothing."""
    state, policy = State(Linear()), SlackPolicy()
    for event in happened:
        before = snapshot(state)
        apply(state, event)
        assert state.now_ns == max(before.now_ns, event.at_ns)
        counted, more = asdict(before.totals), asdict(state.totals)
        assert all(more[name] >= counted[name] for name in counted)
        check_sums(state)
        if not makes_sense(before, event):
            before.now_ns = state.now_ns
            before.totals.ignored += 1
            assert same(state, before)
        elif not isinstance(event, LayersReady | PagesWritten | LayerBegan | StepEnded):
            # Of these the measurement alone may make no sense.
            assert state.totals.ignored == before.totals.ignored
        if state.offered:
            begin_turn(state, 2)
        commit(state, policy.decide(state))
        check_sums(state)


def check_sums(state: State) -> None:
    """What the state counts as it changes is what its loads and writes add up to."""
    loads, writes = state.loads.values(), state.writes.values()
    for name, space in state.spaces.items():
        held = [w for w in writes if w.space == name]
        assert space.source == sum(w.pages for w in held if w.place is PageLocation.SOURCE)
        assert space.copying == sum(w.pages for w in held if w.place is PageLocation.COPYING)
        assert space.staged == sum(w.pages for w in held if w.place is not PageLocation.SOURCE)
    ahead = [load for load in loads if not (load.running or load.background)]
    assert state.read_ahead_nbytes == sum(x.issued * x.ahead_nbytes for x in ahead)
    assert state.waiting_pages == sum(w.pages - w.issued for w in writes)
    background, loads = split(loads)
    assert list(state.background.values()) == [x for x in background if x.issued < x.layers]
    assert state.background_ns == sum((x.issued - x.ready) * x.read_ns for x in background)
    assert not any(x.running or x.ahead_nbytes for x in background)
    assert state.reading.flying == sum(x.issued - x.ready for x in loads)
    assert state.writing.flying == sum(w.issued - w.written for w in writes)
    assert state.reading.flying_ns == sum((x.issued - x.ready) * x.read_ns for x in loads)
    assert state.writing.flying_ns == sum((w.issued - w.written) * w.write_ns for w in writes)
    check_pieces(state, ahead)
    full = [x for x in ahead if x.issued == x.layers]
    assert state.ahead_ns == sum(x.layers * x.compute_ns for x in full)
    assert {*state.running} == {x.name for x in loads if x.running and x.ready < x.layers}
    may_go = [w for w in writes if w.issued < w.pages and w.place is not PageLocation.COPYING]
    assert list(state.unwritten.values()) == may_go


def check_pieces(state: State, ahead: list[Load]) -> None:
    offered = [x for x in ahead if x.offer is not None]
    assert state.offered == sorted(x.offer for x in offered if x.offer)
    assert not any(x.issued or x.running or not x.asked_ns for x in offered)
    unread = [x for x in ahead if x.issued < x.layers and x not in offered]
    assert list(state.unread.values()) == sorted(unread, key=lambda x: x.number)
    for name, load in state.turns.items():
        assert state.loads[name] is load and load.asked_ns and load.offer is None
        assert load.ready < load.layers


def split(loads: Iterable[Load]) -> tuple[list[Load], list[Load]]:
    """(those of the background, others)"""
    found = list(loads)
    return [x for x in found if x.background], [x for x in found if not x.background]


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
        '{"event":"WriteKnown","at_ns":1,"name":"w","pages":1,"page_nbytes":1,"kind":"load"}',
    ],
)
def test_what_is_no_event(line: str) -> None:
    with pytest.raises(ConfigError, match="record the trace again"):
        from_json(line)


def test_a_trace_that_is_none() -> None:
    with pytest.raises(ConfigError, match="not a line of a trace"):
        list(replay(["nonsense"], SlackPolicy(), Linear()))
