"""The scheduler's state, and how events and decisions change it: pure functions.

    state = apply(state, event, profile)
    decision = policy.decide(state)
    state = commit(state, decision, profile)

The same events give the same states and decisions, wherever they come from: a dispatcher, a trace,
or a simulator with a clock of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from tutti.scheduler.event import (
    BatchJoined,
    Event,
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
)
from tutti.scheduler.request import Load, PageLocation, Phase, Profile, Step, Write
from tutti.scheduler.slack import Corrections, Estimates

#: A report may lie this far behind what was launched with it.
_FORWARD_NS = 600 * 10**9
#: Transfers are measured over so long at least, unless the device has nothing more to do.
_MEASURED_NS = 5_000_000


@dataclass(frozen=True, slots=True)
class ReadLaunch:
    """Read the layers [first, first + layers) of a load."""

    name: str
    first: int
    layers: int


@dataclass(frozen=True, slots=True)
class WriteLaunch:
    """Write the pages [first, first + pages) of a write, from where they are now."""

    name: str
    first: int
    pages: int


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do now, in this order.

    copy_outs: writes whose pages go to staging.  drops: writes that are given up.
    wake_ns: when to decide again if nothing happens before; None for never.
    forced: the writes go although there is no slack for them; forced_gap_ns: until others may.
    """

    reads: tuple[ReadLaunch, ...] = ()
    writes: tuple[WriteLaunch, ...] = ()
    copy_outs: tuple[str, ...] = ()
    drops: tuple[str, ...] = ()
    wake_ns: int | None = None
    forced: bool = False
    forced_gap_ns: int = 0


@dataclass(frozen=True, slots=True)
class Totals:
    """Counters since the start.

    bubble_ns: layers waited for their loads.  slack_ns: device time of writes that went beside or
    between reads, into slack.  written, deferred, forced, copied, dropped, failed: pages; deferred
    are those that were launched later than they came, forced those that went without slack.
    error_ns, expected_ns: sum of |measured - expected| and of expected times of all measurements;
    their quotient is the prediction error.  ignored: events that make no sense any more.
    """

    bubble_ns: int = 0
    slack_ns: int = 0
    read_nbytes: int = 0
    written_pages: int = 0
    deferred_pages: int = 0
    forced_pages: int = 0
    copied_pages: int = 0
    dropped_pages: int = 0
    failed_pages: int = 0
    error_ns: int = 0
    expected_ns: int = 0
    measurements: int = 0
    ignored: int = 0


@dataclass(frozen=True, slots=True)
class Pipe:
    """One direction of the device.

    ends_ns: when what was launched is expected to have ended.  since_ns: when the measurement that
    runs now began, with nothing of it in flight or with the end of the one before.  done_ns: what
    the profile expects for all that ended since then; ends may come in bunches, their sum counts.
    alone: the other direction was idle since then.
    """

    ends_ns: int = 0
    since_ns: int = 0
    done_ns: int = 0
    alone: bool = True


@dataclass(frozen=True, slots=True)
class State:
    """Everything that a decision may depend on.  ``loads`` and ``writes`` in order of arrival."""

    now_ns: int = 0
    numbers: int = 0  # of loads, writes and steps that came so far
    step: Step = field(default_factory=Step)
    loads: tuple[Load, ...] = ()
    writes: tuple[Write, ...] = ()
    reading: Pipe = field(default_factory=Pipe)
    writing: Pipe = field(default_factory=Pipe)
    write_launched_ns: int | None = None  # the last launch of writes
    forced_until_ns: int = 0  # the next writes without slack come no sooner
    corrections: Corrections = field(default_factory=Corrections)
    totals: Totals = field(default_factory=Totals)

    @property
    def reads_fly(self) -> bool:
        """Whether the device reads."""
        return any(load.issued > load.ready for load in self.loads)

    @property
    def writes_fly(self) -> bool:
        """Whether the device writes."""
        return any(write.issued > write.written for write in self.writes)

    @property
    def locked_pages(self) -> int:
        """Pages that the engine cannot reuse."""
        return sum(w.pages for w in self.writes if w.place is not PageLocation.STAGED)

    @property
    def staged_pages(self) -> int:
        """Pages of staging in use, those on their way there included."""
        return sum(w.pages for w in self.writes if w.place is not PageLocation.SOURCE)

    @property
    def read_ahead_nbytes(self) -> int:
        """Launched for steps that did not begin."""
        return sum(x.issued * x.layer_nbytes for x in self.loads if x.step is None)


def apply(state: State, event: Event, profile: Profile) -> State:
    """The state after an event.

    Time never goes back: an event that is older than the state happened now.  An event about what
    is not there (any more) changes nothing but the count of such events.
    """
    now_ns = max(state.now_ns, event.at_ns)
    return _APPLY[type(event)](replace(state, now_ns=now_ns), event, profile)


def commit(state: State, decision: Decision, profile: Profile) -> State:
    """The state after everything in a decision was launched."""
    estimates = Estimates(profile, state.corrections)
    state = _leave(state, decision)
    if decision.reads:
        state = _launch_reads(state, decision, estimates)
    if decision.writes:
        state = _launch_writes(state, decision, estimates)
    return state


def _leave(state: State, decision: Decision) -> State:
    """Carries out copies and drops."""
    if not (decision.copy_outs or decision.drops):
        return state
    totals, kept = state.totals, []
    for write in state.writes:
        if write.name in decision.drops:
            totals = replace(totals, dropped_pages=totals.dropped_pages + write.pages)
            continue
        if write.name in decision.copy_outs:
            totals = replace(totals, copied_pages=totals.copied_pages + write.pages)
            write = replace(write, place=PageLocation.COPYING)
        kept.append(write)
    return replace(state, writes=tuple(kept), totals=totals)


def _launch_reads(state: State, decision: Decision, estimates: Estimates) -> State:
    issued: dict[str, int] = {}
    for launch in decision.reads:
        issued[launch.name] = launch.first + launch.layers
    expected_ns, loads = 0, []
    for load in state.loads:
        end = issued.get(load.name, load.issued)
        expected_ns += estimates.read_ns((end - load.issued) * load.layer_nbytes)
        loads.append(replace(load, issued=end) if end != load.issued else load)
    pipe = _launched(state.reading, state.now_ns, expected_ns, state.reads_fly, state.writes_fly)
    writing = replace(state.writing, alone=state.writing.alone and not state.writes_fly)
    return replace(state, loads=tuple(loads), reading=pipe, writing=writing)


def _launch_writes(state: State, decision: Decision, estimates: Estimates) -> State:
    issued = {launch.name: launch.first + launch.pages for launch in decision.writes}
    expected_ns, pages, late, writes = 0, 0, 0, []
    for write in state.writes:
        end = issued.get(write.name, write.issued)
        expected_ns += estimates.write_ns((end - write.issued) * write.page_nbytes)
        pages += end - write.issued
        late += (end - write.issued) * (write.arrived_ns < state.now_ns)
        writes.append(replace(write, issued=end) if end != write.issued else write)
    state = _count(state, deferred_pages=late)
    forced_until_ns = state.forced_until_ns
    if decision.forced:
        state = _count(state, forced_pages=pages)
        forced_until_ns = state.now_ns + decision.forced_gap_ns
    elif any(load.ready < load.layers for load in state.loads):
        state = _count(state, slack_ns=expected_ns)
    pipe = _launched(state.writing, state.now_ns, expected_ns, state.writes_fly, state.reads_fly)
    reading = replace(state.reading, alone=state.reading.alone and not state.reads_fly)
    return replace(
        state,
        writes=tuple(writes),
        writing=pipe,
        reading=reading,
        write_launched_ns=state.now_ns,
        forced_until_ns=forced_until_ns,
    )


def _launched(pipe: Pipe, now_ns: int, expected_ns: int, flies: bool, other_flies: bool) -> Pipe:
    if not flies:
        return Pipe(now_ns + expected_ns, now_ns, 0, not other_flies)
    return replace(pipe, ends_ns=max(now_ns, pipe.ends_ns) + expected_ns)


def _tick(state: State, event: Tick, profile: Profile) -> State:
    return state


def _ignore(state: State) -> State:
    return _count(state, ignored=1)


def _count(state: State, **more: int) -> State:
    counted = {name: getattr(state.totals, name) + n for name, n in more.items()}
    return replace(state, totals=replace(state.totals, **counted))


def _measured(state: State, kind: str, base_ns: int, expected_ns: int, measured_ns: int) -> State:
    """base_ns: by the profile alone; expected_ns: with what was learnt so far."""
    corrections = state.corrections.measured(kind, base_ns, measured_ns)
    if measured_ns <= 0 or measured_ns >= _FORWARD_NS:
        return _ignore(state)
    state = _count(
        state, error_ns=abs(measured_ns - expected_ns), expected_ns=expected_ns, measurements=1
    )
    return replace(state, corrections=corrections)


def _load_known(state: State, event: LoadKnown, profile: Profile) -> State:
    bad = event.layers < 1 or event.layer_nbytes < 1 or event.unit_layers < 1
    if bad or _find_load(state, event.name) is not None:
        return _ignore(state)
    load = Load(
        name=event.name,
        number=state.numbers,
        arrived_ns=state.now_ns,
        layers=event.layers,
        layer_nbytes=event.layer_nbytes,
        tokens=event.tokens,
        prefix_tokens=event.prefix_tokens,
        unit_layers=event.unit_layers,
        batch=event.batch,
    )
    if load.is_for(state.step.loads):
        load = replace(load, step=state.step.number)
    return replace(state, numbers=state.numbers + 1, loads=(*state.loads, load))


def _load_gone(state: State, event: LoadGone, profile: Profile) -> State:
    kept = tuple(load for load in state.loads if load.name != event.name)
    if len(kept) == len(state.loads):
        return _ignore(state)
    return _quiet(replace(state, loads=kept))


def _batch_joined(state: State, event: BatchJoined, profile: Profile) -> State:
    loads = []
    for load in state.loads:
        if load.batch and load.batch == event.batch:
            load = replace(load, batch=event.into)
            if load.is_for(state.step.loads):
                load = replace(load, step=state.step.number)
        loads.append(load)
    return replace(state, loads=tuple(loads))


def _layers_ready(state: State, event: LayersReady, profile: Profile) -> State:
    load = _find_load(state, event.name)
    if load is None or not load.ready < event.layers <= load.issued:
        return _ignore(state)
    nbytes = (event.layers - load.ready) * load.layer_nbytes
    loads = tuple(replace(x, ready=event.layers) if x is load else x for x in state.loads)
    state = _count(replace(state, loads=loads), read_nbytes=nbytes)
    base_ns = Estimates(profile).read_ns(nbytes)
    pipe, state = _ended(state, "read", state.reading, base_ns, state.reads_fly, state.writes_fly)
    return _quiet(replace(state, reading=pipe))


def _write_known(state: State, event: WriteKnown, profile: Profile) -> State:
    bad = event.pages < 1 or event.page_nbytes < 1 or event.unit_pages < 1
    if bad or any(write.name == event.name for write in state.writes):
        return _ignore(state)
    write = Write(
        name=event.name,
        number=state.numbers,
        arrived_ns=state.now_ns,
        pages=event.pages,
        page_nbytes=event.page_nbytes,
        unit_pages=event.unit_pages,
    )
    return replace(state, numbers=state.numbers + 1, writes=(*state.writes, write))


def _pages_written(state: State, event: PagesWritten, profile: Profile) -> State:
    write = _find_write(state, event.name)
    if write is None or not write.written < event.pages <= write.issued:
        return _ignore(state)
    pages = event.pages - write.written
    done = event.pages == write.pages
    writes = tuple(
        replace(x, written=event.pages) if x is write else x
        for x in state.writes
        if not (done and x is write)
    )
    failed = min(event.failed, pages)
    state = replace(state, writes=writes)
    state = _count(state, written_pages=pages - failed, failed_pages=failed)
    base_ns = Estimates(profile).write_ns(pages * write.page_nbytes)
    pipe, state = _ended(state, "write", state.writing, base_ns, state.writes_fly, state.reads_fly)
    return _quiet(replace(state, writing=pipe))


def _ended(
    state: State, kind: str, pipe: Pipe, base_ns: int, flies: bool, other_flies: bool
) -> tuple[Pipe, State]:
    """One launch ended.  Measures what ended since the last measurement, once that is enough."""
    done_ns = pipe.done_ns + base_ns
    if flies and state.now_ns - pipe.since_ns < _MEASURED_NS:
        return replace(pipe, done_ns=done_ns), state
    if pipe.alone:
        correction = getattr(state.corrections, kind)
        expected_ns = round(done_ns * correction.factor)
        state = _measured(state, kind, done_ns, expected_ns, state.now_ns - pipe.since_ns)
    return replace(pipe, since_ns=state.now_ns, done_ns=0, alone=not other_flies), state


def _write_gone(state: State, event: WriteGone, profile: Profile) -> State:
    write = _find_write(state, event.name)
    if write is None:
        return _ignore(state)
    state = replace(state, writes=tuple(x for x in state.writes if x is not write))
    return _quiet(_count(state, failed_pages=write.pages - write.written))


def _pages_copied(state: State, event: PagesCopied, profile: Profile) -> State:
    write = _find_write(state, event.name)
    if write is None or write.place is not PageLocation.COPYING:
        return _ignore(state)
    staged = replace(write, place=PageLocation.STAGED)
    return replace(state, writes=tuple(staged if x is write else x for x in state.writes))


def _step_began(state: State, event: StepBegan, profile: Profile) -> State:
    number = state.numbers
    step = Step(
        number=number,
        phase=event.phase,
        began_ns=state.now_ns,
        layers=event.layers,
        layer=0,
        layer_ns=state.now_ns,
        tokens=event.tokens,
        context_tokens=event.context_tokens,
        loads=event.loads,
    )
    loads = tuple(
        replace(load, step=number) if load.is_for(event.loads) else load
        for load in _left_by_step(state)
    )
    return _quiet(replace(state, step=step, numbers=number + 1, loads=loads))


def _left_by_step(state: State) -> tuple[Load, ...]:
    """The loads without those that the step, which is over, has used.

    What has not arrived has still to be reported: it was given up, or the report comes late.
    """
    return tuple(
        replace(load, step=None) if load.step == state.step.number else load
        for load in state.loads
        if load.step != state.step.number or load.ready < load.layers
    )


def _layer_began(state: State, event: LayerBegan, profile: Profile) -> State:
    step = state.step
    if step.phase is not Phase.PREFILL or not step.layer <= event.layer < step.layers:
        return _ignore(state)
    state = _count(state, bubble_ns=event.waited_ns)
    if event.layer > step.layer:
        state = _layers_computed(state, event.layer - step.layer, event.waited_ns, profile)
    step = replace(step, layer=event.layer, layer_ns=state.now_ns)
    return replace(state, step=step)


def _layers_computed(state: State, layers: int, waited_ns: int, profile: Profile) -> State:
    """So many layers of the step were computed since the last report."""
    step = state.step
    base_ns = Estimates(profile).layer_ns(step.tokens, step.context_tokens)
    expected_ns = Estimates(profile, state.corrections).layer_ns(step.tokens, step.context_tokens)
    measured_ns = state.now_ns - step.layer_ns - waited_ns
    return _measured(state, "layer", layers * base_ns, layers * expected_ns, measured_ns)


def _step_ended(state: State, event: StepEnded, profile: Profile) -> State:
    step = state.step
    if step.phase is Phase.DECODE:
        base_ns = Estimates(profile).decode_ns(step.tokens, step.context_tokens)
        expected = Estimates(profile, state.corrections)
        expected_ns = expected.decode_ns(step.tokens, step.context_tokens)
        state = _measured(state, "decode", base_ns, expected_ns, state.now_ns - step.began_ns)
    elif step.phase is Phase.PREFILL and step.layer:
        # Without reports of layers nobody knows how much of the step was waiting.
        state = _layers_computed(state, step.layers - step.layer, 0, profile)
    idle = Step(number=state.numbers, began_ns=state.now_ns, layer_ns=state.now_ns)
    loads = _left_by_step(state)
    return _quiet(replace(state, step=idle, numbers=state.numbers + 1, loads=loads))


def _quiet(state: State) -> State:
    """A direction in which nothing flies has ended, whatever was expected."""
    now_ns = state.now_ns
    if not state.reads_fly and state.reading.ends_ns > now_ns:
        state = replace(state, reading=replace(state.reading, ends_ns=now_ns))
    if not state.writes_fly and state.writing.ends_ns > now_ns:
        state = replace(state, writing=replace(state.writing, ends_ns=now_ns))
    return state


def _find_load(state: State, name: str) -> Load | None:
    return next((load for load in state.loads if load.name == name), None)


def _find_write(state: State, name: str) -> Write | None:
    return next((write for write in state.writes if write.name == name), None)


_APPLY: dict[type[Any], Callable[[State, Any, Profile], State]] = {
    Tick: _tick,
    LoadKnown: _load_known,
    LoadGone: _load_gone,
    BatchJoined: _batch_joined,
    LayersReady: _layers_ready,
    WriteKnown: _write_known,
    PagesWritten: _pages_written,
    WriteGone: _write_gone,
    PagesCopied: _pages_copied,
    StepBegan: _step_began,
    LayerBegan: _layer_began,
    StepEnded: _step_ended,
}
