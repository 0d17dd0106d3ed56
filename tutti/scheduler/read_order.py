"""In which order one decision reads, where several loads wait."""

from __future__ import annotations

import math

from tutti.scheduler.loads_and_writes import Load
from tutti.scheduler.state import NOTHING, Decision, Issue, State


class ReadOrder:
    """Collects the reads of one decision.  head: the load to read ahead next, within the budget.

    Every ``add`` issues a unit at least, so the layers that wait bound how often it is called.
    Read-ahead that does not fit what is left of the budget holds back that behind it, unless it is
    larger than the whole budget and has to wait for its step.
    """

    def __init__(self, state: State, budget: int) -> None:
        self.issues: list[tuple[Load, int, int]] = []
        self._whole, self._left = budget, max(0, budget - state.read_ahead_nbytes)
        self._ahead = iter(state.unread.values())
        self._next: dict[str, int] = {}
        self.head: Load | None = None
        self._move()

    def next_layer(self, load: Load) -> int:
        """The first layer that is not issued, this decision included."""
        return self._next.get(load.name, load.issued)

    def add(self, load: Load, layers: int) -> int:
        """Issues ``layers`` layers, or as many as are left or fit, in whole units; how many."""
        first, unit = self.next_layer(load), load.unit_layers
        count = min(-(-layers // unit) * unit, load.layers - first)
        if load.ahead_nbytes and not load.running:
            fits = self._left // load.ahead_nbytes
            if fits < count:
                count = max(min(unit, load.layers - first), fits // unit * unit)
            self._left -= count * load.ahead_nbytes
        self._next[load.name] = first + count
        if self.issues and self.issues[-1][0] is load:
            _, begin, before = self.issues.pop()
            self.issues.append((load, begin, before + count))
        else:
            self.issues.append((load, first, count))
        if load is self.head:
            if first + count == load.layers:
                self._move()
            elif self._needs(load) > self._left:
                self._left = 0
                self._move()
        return count

    def to_issues(self) -> tuple[Issue, ...]:
        """The decision's reads."""
        return tuple(Issue(load.name, first, count) for load, first, count in self.issues)

    def _needs(self, load: Load) -> int:
        """Bytes of staging for the next unit."""
        return min(load.unit_layers, load.layers - self.next_layer(load)) * load.ahead_nbytes

    def _move(self) -> None:
        """Sets ``head`` to the next load that fits."""
        self.head = None
        for load in self._ahead:
            nbytes = self._needs(load)
            if nbytes <= self._left:
                self.head = load
                return
            if nbytes <= self._whole:
                self._left = 0


def begin_turn(state: State, pieces_max: int) -> bool:
    """Lets the next piece of read-ahead be issued, if fewer than ``pieces_max`` are under way and
    all of these are issued; returns whether one was let.

    The pieces of the request that asked first go first.  A piece's patience begins with its turn:
    counted from its arrival, the pieces of many requests would soon overtake the running step.
    """
    turns = state.turns
    if len(turns) >= pieces_max:
        return False
    load = state.loads[state.offered[0][2]]
    for one in turns.values():
        if load.alone or one.alone or not one.issued:
            return False
    del state.offered[0]
    load.offer = None
    load.number, load.arrived_ns = state.numbers, state.now_ns
    state.numbers += 1
    turns[load.name] = state.unread[load.name] = load
    return True


def fill(load: Load, room_ns: float, factor: float) -> int:
    """Layers of a load that fill ``room_ns``; at least one.  factor: correction of the profile."""
    one_ns = load.read_ns * factor
    if one_ns < 1.0:
        one_ns = 1.0
    return math.ceil(room_ns / one_ns) if room_ns > one_ns else 1


def background(state: State, window_ns: int) -> Decision:
    """Reads of the background, if no other load may be issued and no write waits or is in flight.

    Transfers that come later do not wait for them: they are in no pipe, and the engine issues their
    commands after all others.
    """
    factor = state.estimates.read.factor
    room_ns = window_ns - state.background_ns * factor
    busy = state.reading.flying or state.writing.flying or room_ns <= 0
    if busy or not state.background:
        return NOTHING
    load = next(iter(state.background.values()))
    layers = load.in_units(fill(load, room_ns, factor))
    return Decision((Issue(load.name, load.issued, layers),))
