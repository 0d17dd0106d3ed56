"""Applies events and decisions to the scheduler's state.

    scheduler = Scheduler(SlackPolicy(limits), profile)
    decision = scheduler.take(event)

A scheduler reads no clock and does no I/O: the same events give the same decisions, wherever they
come from (a dispatcher, a trace, a simulator with a clock of its own).  The state is changed in
place, because a copy for each event would cost more than the decision.
"""

from __future__ import annotations

from collections.abc import Callable
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
    SpaceKnown,
    StepBegan,
    StepEnded,
    Tick,
    WriteGone,
    WriteKnown,
    WriteStopped,
)
from tutti.scheduler.load_changes import (
    batch_joined,
    into_order,
    issue_read,
    layers_ready,
    load_gone,
    load_known,
    needed_now,
)
from tutti.scheduler.loads_and_writes import PageLocation, Phase, Profile, Step, Write
from tutti.scheduler.measured_speed import begin, end, given_up, measured
from tutti.scheduler.read_order import begin_turn
from tutti.scheduler.state import NOTHING, PIECES_MAX, Decision, Issue, Policy, Space, State

#: While a transfer is in flight the policy is not asked after these, but when the transfer ends.
_LATER = (LayerBegan, StepEnded)


class Scheduler:
    """A policy and the state that it decides on."""

    def __init__(self, policy: Policy, profile: Profile) -> None:
        self.policy = policy
        self.state = State(profile)
        limits = getattr(policy, "limits", None)
        self._pieces_max: int = getattr(limits, "pieces_max", PIECES_MAX)
        self._wake_ns: int | None = None  # of the last decision

    def take(self, event: Event) -> Decision:
        """Decides what to do after an event.  The caller carries out the whole decision.

        The policy is asked only while something waits, and not after events of read-ahead that
        change nothing for it.
        """
        state, wake_ns = self.state, self._wake_ns
        is_same = apply(state, event)
        if state.offered:
            is_same = not begin_turn(state, self._pieces_max) and is_same
        if not state.waits:
            self._wake_ns = None
            return NOTHING
        if is_same and (wake_ns is None or state.now_ns < wake_ns):
            return NOTHING if wake_ns is None else Decision(wake_ns=wake_ns)
        if type(event) in _LATER and (state.reading.flying or state.writing.flying):
            return NOTHING
        decision = self.policy.decide(state)
        if not isinstance(decision, Decision):
            raise TypeError(f"the policy returned {decision!r}; a Decision is needed")
        self._wake_ns = decision.wake_ns
        if decision is NOTHING:
            return decision
        commit(state, decision)
        return decision


def apply(state: State, event: Event) -> bool:
    """Takes an event; returns whether it changed nothing that a decision depends on.

    Time never goes back: an event that is older than the state happened now.  An event about what
    is not there (any more) changes nothing but the count of such events.
    """
    if event.at_ns > state.now_ns:
        state.now_ns = event.at_ns
    return bool(_APPLY[type(event)](state, event))


def commit(state: State, decision: Decision) -> None:
    """Changes the state as if everything in a decision was carried out."""
    for name in decision.stops:
        del state.running_on[name]
    for name in decision.drops:
        write = state.writes[name]
        state.totals.dropped_pages += write.pages
        _forget_write(state, write)
    for name in decision.copy_outs:
        write = state.writes[name]
        _place(state, write, PageLocation.COPYING)
        state.totals.copied_pages += write.pages
    for issue in decision.reads:
        issue_read(state, issue)
    if decision.writes:
        expected_ns = 0
        for issue in decision.writes:
            expected_ns += _issue_write(state, issue, decision.forced)
        state.write_issued_ns = state.now_ns
        if decision.forced:
            state.forced_until_ns = state.now_ns + decision.forced_gap_ns
        elif state.running or state.unread:
            state.totals.slack_ns += round(expected_ns * state.estimates.write.factor)


def _place(state: State, write: Write, place: PageLocation | None) -> None:
    """Moves a write from its place to another; None where it leaves."""
    space = state.spaces[write.space]
    for at, pages in ((write.place, -write.pages), (place, write.pages)):
        if at is None:
            continue
        if at is PageLocation.SOURCE:
            space.source += pages
        else:
            space.staged += pages
        if at is PageLocation.COPYING:
            space.copying += pages
    if place is not None:
        write.place = place
        if place is PageLocation.COPYING:
            state.unwritten.pop(write.name, None)
        elif write.issued < write.pages:
            into_order(state.unwritten, write)


def _issue_write(state: State, issue: Issue, forced: bool) -> int:
    write, totals = state.writes[issue.name], state.totals
    expected_ns = issue.count * write.write_ns
    begin(state, state.writing, state.reading, issue.count, expected_ns)
    write.issued += issue.count
    write.began = True
    space = state.spaces[write.space]
    space.largest = max(space.largest, write.pages)
    if write.can_stop and not (state.running or state.unread):
        state.running_on[write.name] = write
    if write.arrived_ns < state.now_ns:
        totals.deferred_pages += issue.count
    if forced:
        totals.forced_pages += issue.count
    state.waiting_pages -= issue.count
    if write.issued == write.pages:
        state.unwritten.pop(write.name, None)
    return expected_ns


def _space_known(state: State, event: SpaceKnown) -> None:
    space = state.spaces.setdefault(event.name, Space())
    space.locked_max, space.staged_max = event.locked_pages, event.staged_pages


def _write_known(state: State, event: WriteKnown) -> None:
    bad = event.pages < 1 or event.page_nbytes < 1 or event.unit_pages < 1
    bad = bad or event.space not in state.spaces
    if bad or event.name in state.writes or event.name in state.loads:
        state.totals.ignored += 1
        return
    write = Write(
        event.name,
        state.numbers,
        state.now_ns,
        event.pages,
        event.page_nbytes,
        event.unit_pages,
        state.estimates.write_base_ns(event.page_nbytes),
        event.space,
        event.can_stop,
    )
    page_ns = state.estimates.sustained_ns(write.write_ns)  # may raise: before the state changes
    state.numbers += 1
    state.spaces[write.space].put(state.now_ns, write.pages, page_ns)
    state.writes[event.name] = state.unwritten[event.name] = write
    state.waiting_pages += write.pages
    if event.at_once:
        _issue_write(state, Issue(event.name, 0, event.pages), forced=False)


def _pages_written(state: State, event: PagesWritten) -> None:
    write = state.writes.get(event.name)
    if write is None or not write.written < event.pages <= write.may_be_written:
        state.totals.ignored += 1
        return
    flown = pages = event.pages - write.written
    if (late := event.pages - write.issued) > 0:
        _written_after_all(state, write, late)
        flown -= late
    write.written = event.pages
    state.totals.written_pages += pages
    if event.failed or event.there:
        failed = min(event.failed, event.pages)
        state.totals.written_pages -= failed + min(event.there, event.pages)
        state.totals.failed_pages += failed
        # The drive's speed is not learnt from what it did not write.
        unmoved = min(event.there + event.failed, flown)
        given_up(state, state.writing, state.reading, unmoved, unmoved * write.write_ns)
        flown -= unmoved
    if flown > 0:
        correction = state.estimates.write
        end(state, state.writing, state.reading, correction, flown, flown * write.write_ns)
    if write.written == write.pages:
        _forget_write(state, write)


def _written_after_all(state: State, write: Write, pages: int) -> None:
    """Pages that a write gave back when it stopped: commands that were under way wrote them."""
    write.issued += pages
    state.waiting_pages -= pages
    if write.issued == write.pages:
        state.unwritten.pop(write.name, None)


def _write_stopped(state: State, event: WriteStopped) -> None:
    write = state.writes.get(event.name)
    if write is None or not write.written <= event.pages <= write.issued:
        state.totals.ignored += 1
        return
    back = write.issued - event.pages
    if not back:
        return
    given_up(state, state.writing, state.reading, back, back * write.write_ns)
    if write.issued == write.pages:
        into_order(state.unwritten, write)
    write.issued = event.pages
    state.waiting_pages += back


def _write_gone(state: State, event: WriteGone) -> None:
    write = state.writes.get(event.name)
    if write is None:
        state.totals.ignored += 1
        return
    if not event.withdrawn:
        state.totals.failed_pages += write.pages - write.written
    _forget_write(state, write)


def _forget_write(state: State, write: Write) -> None:
    if flying := write.issued - write.written:
        given_up(state, state.writing, state.reading, flying, flying * write.write_ns)
    del state.writes[write.name]
    state.unwritten.pop(write.name, None)
    state.running_on.pop(write.name, None)
    state.waiting_pages -= write.pages - write.issued
    _place(state, write, None)


def _pages_copied(state: State, event: PagesCopied) -> None:
    write = state.writes.get(event.name)
    if write is None or write.place is not PageLocation.COPYING:
        state.totals.ignored += 1
    else:
        _place(state, write, PageLocation.STAGED)


def _step_began(state: State, event: StepBegan) -> None:
    _step_over(state)
    estimates, expected_ns = state.estimates, 0
    if event.phase is Phase.PREFILL:
        expected_ns = estimates.layer_base_ns(event.tokens, event.context_tokens)
    elif event.phase is Phase.DECODE:
        expected_ns = estimates.decode_base_ns(event.tokens, event.context_tokens)
    state.step = Step(
        state.numbers,
        event.phase,
        state.now_ns,
        event.layers,
        0,
        state.now_ns,
        event.tokens,
        event.context_tokens,
        event.loads,
        expected_ns,
    )
    state.numbers += 1
    if event.loads:
        for load in list(state.loads.values()):
            if not load.running and load.is_for(event.loads):
                needed_now(state, load)


def _step_over(state: State) -> None:
    """Removes the loads that the step has used.

    Those that have not arrived must still be reported: the step was given up, or a report is late.
    """
    if not state.step.loads:
        return
    for load in [load for load in state.loads.values() if load.running]:
        load.running = False
        if load.ready == load.layers:
            del state.loads[load.name]
            continue
        state.read_ahead_nbytes += load.issued * load.ahead_nbytes
        if load.issued < load.layers:
            into_order(state.unread, load)
        else:
            state.ahead_ns += load.layers * load.compute_ns
    state.running.clear()
    state.unissued.clear()


def _layer_began(state: State, event: LayerBegan) -> None:
    step = state.step
    if step.phase is not Phase.PREFILL or not step.layer <= event.layer < step.layers:
        state.totals.ignored += 1
        return
    state.totals.bubble_ns += event.waited_ns
    if event.layer > step.layer:
        _layers_computed(state, event.layer - step.layer, event.waited_ns)
    step.layer, step.layer_ns = event.layer, state.now_ns


def _layers_computed(state: State, layers: int, waited_ns: int) -> None:
    """So many layers of the step were computed since the last report."""
    measured_ns = state.now_ns - state.step.layer_ns - waited_ns
    measured(state, state.estimates.layer, layers * state.step.expected_ns, measured_ns)


def _step_ended(state: State, event: StepEnded) -> None:
    step = state.step
    state.prefill_tokens += step.tokens if step.phase is Phase.PREFILL else 0
    if step.phase is Phase.DECODE:
        measured(state, state.estimates.decode, step.expected_ns, state.now_ns - step.began_ns)
    elif step.phase is Phase.PREFILL and step.layer:
        # Without reports of layers the waiting within the step is not known.
        _layers_computed(state, step.layers - step.layer, event.waited_ns)
    state.totals.bubble_ns += event.waited_ns
    _step_over(state)
    state.step = Step(number=state.numbers, began_ns=state.now_ns, layer_ns=state.now_ns)
    state.numbers += 1


_APPLY: dict[type[Any], Callable[[State, Any], bool | None]] = {
    Tick: lambda state, event: None,  # only time has passed
    LoadKnown: load_known,
    LoadGone: load_gone,
    BatchJoined: batch_joined,
    LayersReady: layers_ready,
    SpaceKnown: _space_known,
    WriteKnown: _write_known,
    PagesWritten: _pages_written,
    WriteStopped: _write_stopped,
    WriteGone: _write_gone,
    PagesCopied: _pages_copied,
    StepBegan: _step_began,
    LayerBegan: _layer_began,
    StepEnded: _step_ended,
}
