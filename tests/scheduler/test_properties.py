"""What holds for every order of events: bounds, conservation, fairness, determinism."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler.drive import Drive, Linear

from tutti.bench.slack.fixed_window import FixedWindow
from tutti.scheduler.baselines import ImmediatePolicy
from tutti.scheduler.event import BatchJoined, LoadKnown, StepBegan, StepEnded, WriteKnown
from tutti.scheduler.loads_and_writes import LoadKind, PageLocation, Phase
from tutti.scheduler.policy import Limits, SlackPolicy
from tutti.scheduler.state import Decision, State
from tutti.scheduler.trace import replay

MS = 1_000_000
MB = 1_000_000
POLICIES: tuple[Any, ...] = (SlackPolicy, ImmediatePolicy, FixedWindow)
KINDS = (LoadKind.READ_AHEAD, LoadKind.READ_AHEAD, LoadKind.LOAD, LoadKind.BACKGROUND)

times = st.integers(0, 400).map(lambda ms: ms * MS)
loads = st.tuples(times, st.integers(1, 12), st.integers(1, 40), st.integers(1, 4), st.booleans())
writes = st.tuples(times, st.integers(1, 60), st.integers(1, 8), st.integers(1, 8), st.booleans())
decodes = st.tuples(times, st.integers(1, 30))
works = st.tuples(
    st.lists(loads, max_size=6), st.lists(writes, max_size=6), st.lists(decodes, max_size=4)
)
truths = st.builds(
    Linear,
    interference=st.sampled_from([1.0, 1.5, 2.0, 2.5, 4.0]),
    layer=st.floats(100, 5000),
    read_gbps=st.floats(1, 20),
    write_gbps=st.floats(1, 20),
)
limits_of = st.builds(
    Limits,
    locked_pages=st.integers(0, 120),
    staged_pages=st.integers(0, 60),
    read_ahead_nbytes=st.integers(0, 400).map(lambda n: n * MB),
    probe_us=st.just(1e9),
    read_patience_us=st.floats(0, 200_000),
    write_patience_us=st.floats(0, 200_000),
    forced_share=st.floats(0.05, 0.5),
)


def feed(drive: Drive, work: Any) -> None:
    """Loads that begin a step when they come, or are read ahead and never used; and writes."""
    for number, (at_ns, layers, mb, unit, used) in enumerate(work[0]):
        name, kind = f"r{number}", KINDS[number % len(KINDS)]
        known = LoadKnown(at_ns, name, layers, mb * MB, 64, 64, unit_layers=unit, kind=kind)
        known.asked_ns = at_ns + 1 if number % len(KINDS) == 1 else 0
        drive.at(known)
        if used:
            drive.at(StepBegan(at_ns + 5 * MS, Phase.PREFILL, layers, tokens=64, loads=(name,)))
    for number, (at_ns, pages, mb, unit, stop) in enumerate(work[1]):
        drive.at(WriteKnown(at_ns, f"w{number}", pages, mb * MB, unit, can_stop=stop))
    for at_ns, ms in work[2]:
        drive.at(StepBegan(at_ns, Phase.DECODE, tokens=4, context_tokens=100))
        drive.at(StepEnded(at_ns + ms * MS))


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(POLICIES), works, truths, truths, limits_of)
def test_nothing_is_lost_and_limits_hold(
    policy: Any, work: Any, truth: Linear, profile: Linear, limits: Limits
) -> None:
    drive = Drive(policy(limits), profile, truth)
    feed(drive, work)
    drive.run()
    totals = drive.state.totals
    offered = sum(pages for _, pages, *_ in work[1])
    assert totals.written_pages + totals.dropped_pages == offered
    assert not drive.state.writes
    assert not drive.state.writing.flying
    for state, decision in drive.decisions:
        assert decision.wake_ns is None or decision.wake_ns > state.now_ns
        check_launches(state, decision)
        check_limits(state, decision, limits)


def check_launches(state: State, decision: Decision) -> None:
    """In order, without gaps, of what is there; copied and dropped only what did not begin."""
    at = {load.name: load.issued for load in state.loads.values()}
    for read in decision.reads:
        assert read.first == at[read.name]
        assert read.count > 0
        at[read.name] += read.count
    assert all(at[load.name] <= load.layers for load in state.loads.values())
    at = {write.name: write.issued for write in state.writes.values()}
    for write in decision.writes:
        assert write.first == at[write.name]
        assert write.count > 0
        at[write.name] += write.count
    assert all(at[write.name] <= write.pages for write in state.writes.values())
    waiting = {
        w.name for w in state.writes.values() if w.place is PageLocation.SOURCE and not w.began
    }
    gone = Counter([*decision.copy_outs, *decision.drops])
    assert set(gone) <= waiting
    assert all(count == 1 for count in gone.values())
    assert not set(gone) & set(decision.stops)
    assert not set(gone) & {issue.name for issue in (*decision.reads, *decision.writes)}


def check_limits(state: State, decision: Decision, limits: Limits) -> None:
    gone = {*decision.copy_outs, *decision.drops}
    writes = state.writes.values()
    idle = [w for w in writes if w.place is PageLocation.SOURCE and w.name not in gone]
    locked = sum(w.pages for w in idle)
    # Only what the device works on may exceed the bound: it cannot be copied out any more.
    assert locked <= limits.locked_pages or all(w.began for w in idle)
    copied = sum(w.pages for w in writes if w.name in decision.copy_outs)
    assert state.staged_pages + copied <= limits.staged_pages or not copied
    ahead = {load.name: load.ahead_nbytes for load in state.loads.values() if not load.running}
    more = sum(r.count * ahead.get(r.name, 0) for r in decision.reads)
    assert state.read_ahead_nbytes + more <= limits.read_ahead_nbytes or not more


@settings(deadline=None, max_examples=40)
@given(works, truths, limits_of)
def test_a_load_is_overtaken_for_a_bounded_time(work: Any, truth: Linear, limits: Limits) -> None:
    """An issue of B while A could go means: B came at most the patience after A."""
    drive = Drive(SlackPolicy(limits), truth, truth)
    feed(drive, work)
    drive.run()
    patience_ns = round(limits.read_patience_us * 1000)
    for state, decision in drive.decisions:
        for read in decision.reads:
            for name in startable(state, limits):
                latest_ns = state.loads[name].arrived_ns + patience_ns
                assert state.loads[read.name].arrived_ns <= latest_ns
            load = state.loads[read.name]
            load.issued += read.count  # issues before it in this decision count
            if not load.running:
                state.read_ahead_nbytes += read.count * load.ahead_nbytes


def startable(state: State, limits: Limits) -> list[str]:
    """What may be issued now, by SlackPolicy's docstring."""
    budget = limits.read_ahead_nbytes - state.read_ahead_nbytes
    found, blocked = [], False
    for load in sorted(state.loads.values(), key=lambda one: one.number):
        if load.issued == load.layers or load.background or load.offer:
            continue
        fits = load.unit_nbytes <= budget
        if load.running or not load.ahead_nbytes or (fits and not blocked):
            found.append(load.name)
        elif load.unit_nbytes <= limits.read_ahead_nbytes:
            blocked = True
    return found


@settings(deadline=None, max_examples=40)
@given(works, st.integers(0, 3), truths, limits_of)
def test_the_background_is_read_where_nothing_else_is_to_do(
    work: Any, number: int, truth: Linear, limits: Limits
) -> None:
    """It does not count as read-ahead, goes last and in order, and is read in the end."""
    drive = Drive(SlackPolicy(limits), truth, truth)
    feed(drive, work)
    for more in range(number):
        known = LoadKnown(more * 50 * MS, f"b{more}", 4, 8 * MB, 0, 0, kind=LoadKind.BACKGROUND)
        drive.at(known)
    drive.run()
    window_ns = round(limits.read_window_us * 1000)
    for state, decision in drive.decisions:
        for read in decision.reads:
            load = state.loads[read.name]
            if load.background:
                assert decision.reads == (read,)
                assert load is next(iter(state.background.values()))
                assert not (startable(state, limits) or state.unwritten or decision.writes)
                assert not (state.reading.flying or state.writing.flying)
                unit_ns = load.unit_layers * load.read_ns * state.estimates.read.factor
                assert (
                    read.count * load.read_ns * state.estimates.read.factor <= window_ns + unit_ns
                )
        if state.background and not (state.loads.keys() - state.background.keys() or state.writes):
            assert decision.reads or state.background_ns
    assert not drive.state.background and not drive.state.background_ns
    assert all(drive.state.loads[f"b{more}"].ready == 4 for more in range(number))


@settings(deadline=None, max_examples=40)
@given(works, truths, limits_of)
def test_what_waits_for_the_background_makes_it_a_load(
    work: Any, truth: Linear, limits: Limits
) -> None:
    drive = Drive(SlackPolicy(limits), truth, truth)
    feed(drive, work)
    drive.at(LoadKnown(50 * MS, "b", 40, 8 * MB, 0, 0, batch="b", kind=LoadKind.BACKGROUND))
    drive.at(BatchJoined(51 * MS, "b", "b"))
    drive.run()
    at_once = [state for state, _ in drive.decisions if state.now_ns > 51 * MS]
    assert not any(state.loads["b"].background for state in at_once if "b" in state.loads)
    assert drive.state.loads["b"].ready == 40


@settings(deadline=None, max_examples=40)
@given(works, truths, limits_of)
def test_a_write_waits_for_a_bounded_time(work: Any, truth: Linear, limits: Limits) -> None:
    """The bound of SlackPolicy's docstring, with what a drive can take longer than expected."""
    drive = Drive(SlackPolicy(limits), truth, truth)
    feed(drive, work)
    drive.run()
    unit_reads = [unit * mb * MB for _, _, mb, unit, _ in work[0]]
    unit_writes = [unit * mb * MB for _, _, mb, unit, _ in work[1]]
    slow = truth.interference
    window_us = max(limits.read_window_us, limits.late_window_us)
    drain_us = window_us + slow * truth.read_us(max(unit_reads, default=0))
    write_us = slow * truth.write_us(max(unit_writes, default=0)) + slow * limits.write_burst_us
    units = sum(-(-pages // unit) for _, pages, _, unit, _ in work[1])
    bound_us = limits.write_patience_us + (units + 1) * (
        2 * drain_us + write_us / limits.forced_share
    )
    arrived = {f"w{number}": at_ns for number, (at_ns, *_) in enumerate(work[1])}
    for when_ns, direction, name in drive.launches:
        if direction == "write":
            assert when_ns - arrived[name] <= bound_us * 1000


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(POLICIES), works, truths, limits_of)
def test_a_trace_replays_to_the_same_bytes(
    policy: Any, work: Any, truth: Linear, limits: Limits
) -> None:
    drive = Drive(policy(limits), truth, truth)
    feed(drive, work)
    drive.run()
    assert list(replay(drive.trace, policy(limits), truth)) == drive.trace


@settings(deadline=None, max_examples=40)
@given(works, st.floats(3, 5), limits_of)  # at TURNS_FROM itself a measurement decides
def test_directions_never_mix_where_that_hurts(work: Any, factor: float, limits: Limits) -> None:
    truth = Linear(interference=factor)
    drive = Drive(SlackPolicy(limits), truth, truth)
    feed(drive, work)
    drive.run()
    for state, decision in drive.decisions:
        assert not (decision.reads and (state.writing.flying or decision.writes))
        assert not (decision.writes and state.reading.flying)
