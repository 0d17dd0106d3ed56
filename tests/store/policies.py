"""Policies for tests, which ask for little and always for the same."""

from __future__ import annotations

from tutti.scheduler.policy import Limits
from tutti.scheduler.state import Decision, Issue, State


class Never:
    """A policy that launches nothing."""

    def __init__(self, limits: Limits) -> None: ...

    def decide(self, state: State) -> Decision:
        return Decision()


class OneByOne(Never):
    """A policy that launches a page of each write when it is asked, and no load."""

    def decide(self, state: State) -> Decision:
        waiting = state.unwritten.values()
        return Decision(writes=tuple(Issue(w.name, w.issued, 1) for w in waiting))


class WritesOnly(Never):
    """A policy that issues no load."""

    def decide(self, state: State) -> Decision:
        waiting = state.unwritten.values()
        return Decision(writes=tuple(Issue(w.name, w.issued, w.pages - w.issued) for w in waiting))


class LayerByLayer(WritesOnly):
    """A policy that issues one layer of each load when it is asked, once those before arrived."""

    def decide(self, state: State) -> Decision:
        idle = [load for load in state.unread.values() if load.issued == load.ready]
        reads = tuple(Issue(load.name, load.issued, 1) for load in idle)
        return Decision(reads, super().decide(state).writes)


class DropsLong(Never):
    """A policy that launches single pages, and gives up the other writes when it is told to."""

    drops = False

    def decide(self, state: State) -> Decision:
        waiting = state.unwritten.values()
        writes = tuple(Issue(w.name, 0, 1) for w in waiting if w.pages == 1)
        long = tuple(w.name for w in waiting if w.pages > 1)
        return Decision(writes=writes, drops=long if self.drops else ())
