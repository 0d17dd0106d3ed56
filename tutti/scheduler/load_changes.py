"""Applies events about loads, and issues of their layers, to the scheduler's state."""

from __future__ import annotations

from bisect import insort
from typing import TypeVar

from tutti.scheduler.event import BatchJoined, LayersReady, LoadGone, LoadKnown
from tutti.scheduler.loads_and_writes import Load, LoadKind, Write
from tutti.scheduler.measured_speed import begin, end, given_up
from tutti.scheduler.state import Issue, State

_Entry = TypeVar("_Entry", Load, Write)


def into_order(queue: dict[str, _Entry], entry: _Entry) -> None:
    """Adds an entry that may be older than what the queue has."""
    younger = [one for one in queue.values() if one.number > entry.number]
    for one in younger:
        del queue[one.name]
    queue[entry.name] = entry
    for one in younger:
        queue[one.name] = one


def issue_read(state: State, issue: Issue) -> None:
    load = state.loads[issue.name]
    load.issued += issue.count
    if load.background:
        state.background_ns += issue.count * load.read_ns
        if load.issued == load.layers:
            del state.background[load.name]
        return
    begin(state, state.reading, state.writing, issue.count, issue.count * load.read_ns)
    if not load.running:
        state.read_ahead_nbytes += issue.count * load.ahead_nbytes
    if load.issued == load.layers:
        if load.running:
            del state.unissued[load.name]
        elif state.unread.pop(load.name, None) is not None:
            state.ahead_ns += load.layers * load.compute_ns


def load_known(state: State, event: LoadKnown) -> bool:
    """Returns whether nothing changed for the policy: a piece waits for its turn."""
    bad = event.layers < 1 or event.layer_nbytes < 1 or event.unit_layers < 1
    if bad or event.name in state.loads or event.name in state.writes:
        state.totals.ignored += 1
        return False
    estimates, layers = state.estimates, event.layers
    load = state.loads[event.name] = Load(
        event.name,
        state.numbers,
        state.now_ns,
        layers,
        event.layer_nbytes,
        event.tokens,
        event.prefix_tokens,
        event.unit_layers,
        event.batch,
        estimates.read_base_ns(layers * event.layer_nbytes, layers),
        estimates.layer_base_ns(event.tokens, event.prefix_tokens),
        event.layer_nbytes if event.kind is LoadKind.READ_AHEAD else 0,
        event.kind is LoadKind.BACKGROUND,
        event.blocks,
    )
    state.numbers += 1
    if state.step.loads and load.is_for(state.step.loads):
        load.running, load.background = True, False
        state.running[event.name] = state.unissued[event.name] = load
    elif event.asked_ns and load.ahead_nbytes and not event.at_once:
        load.asked_ns, load.alone = event.asked_ns, event.alone
        load.offer = event.asked_ns, load.number, event.name
        insort(state.offered, load.offer)
        return True
    else:
        (state.background if load.background else state.unread)[event.name] = load
    if event.at_once:
        issue_read(state, Issue(event.name, 0, layers))
    return False


def load_gone(state: State, event: LoadGone) -> bool:
    """Returns whether nothing changed for the policy: a piece had no turn yet, or it had arrived
    and no load waits that could use its staging.
    """
    load = state.loads.get(event.name)
    if load is None:
        state.totals.ignored += 1
        return False
    had_arrived = load.ready == load.layers
    if load.ready < event.layers <= load.issued:
        layers_ready(state, event)
    was_offered = load.offer is not None
    _forget_load(state, load)
    return was_offered or (load.asked_ns > 0 and had_arrived and not state.unread)


def _forget_load(state: State, load: Load) -> None:
    flying = load.issued - load.ready
    del state.loads[load.name]
    state.turns.pop(load.name, None)
    if load.background:
        state.background.pop(load.name, None)
        state.background_ns -= flying * load.read_ns
        return
    given_up(state, state.reading, state.writing, flying, flying * load.read_ns)
    if load.running:
        state.running.pop(load.name, None)
        state.unissued.pop(load.name, None)
    else:
        _not_ahead(state, load)


def _not_ahead(state: State, load: Load) -> None:
    """A load is not read ahead any more."""
    if load.offer is not None:
        state.offered.remove(load.offer)
        load.offer = None
        return
    state.read_ahead_nbytes -= load.issued * load.ahead_nbytes
    if state.unread.pop(load.name, None) is None:
        state.ahead_ns -= load.layers * load.compute_ns


def batch_joined(state: State, event: BatchJoined) -> None:
    for load in state.loads.values():
        if load.batch and load.batch == event.batch:
            load.batch = event.into
            if load.background:
                _wanted(state, load)
            if not load.running and load.is_for(state.step.loads):
                needed_now(state, load)


def _wanted(state: State, load: Load) -> None:
    """Something waits for a load of the background."""
    flying = load.issued - load.ready
    load.background = False
    state.background.pop(load.name, None)
    state.background_ns -= flying * load.read_ns
    if flying:
        begin(state, state.reading, state.writing, flying, flying * load.read_ns)
    if load.issued < load.layers:
        into_order(state.unread, load)
    else:
        state.ahead_ns += load.layers * load.compute_ns


def needed_now(state: State, load: Load) -> None:
    """The running step needs a load."""
    if load.background:
        _wanted(state, load)
    _not_ahead(state, load)
    load.running = True
    if load.ready < load.layers:
        state.running[load.name] = load
        if load.issued < load.layers:
            state.unissued[load.name] = load


def layers_ready(state: State, event: LayersReady | LoadGone) -> None:
    load = state.loads.get(event.name)
    if load is None or not load.ready < event.layers <= load.issued:
        state.totals.ignored += 1
        return
    layers = event.layers - load.ready
    load.ready = event.layers
    state.totals.read_nbytes += layers * load.layer_nbytes
    if load.background:  # its speed tells nothing, as it yields
        state.background_ns -= layers * load.read_ns
        return
    correction = state.estimates.read
    end(state, state.reading, state.writing, correction, layers, layers * load.read_ns)
    if load.ready == load.layers:
        state.turns.pop(load.name, None)
        if load.running:
            state.running.pop(load.name, None)
