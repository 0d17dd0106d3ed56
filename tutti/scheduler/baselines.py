"""The policy without a profile, which `SlackPolicy` is compared with."""

from __future__ import annotations

from tutti.scheduler.policy import Limits
from tutti.scheduler.room import overflow
from tutti.scheduler.state import NOTHING, Decision, Issue, State


class ImmediatePolicy:
    """Issues everything at once, reads with writes.  Memory is as bounded as with SlackPolicy."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()

    def decide(self, state: State) -> Decision:
        copy_outs, drops = overflow(state, self.limits)
        gone = {*copy_outs, *drops}
        writes = tuple(
            Issue(write.name, write.issued, write.pages - write.issued)
            for write in state.unwritten.values()
            if write.name not in gone
        )
        reads = all_reads(state, self.limits)
        if reads or writes or gone:
            return Decision(reads, writes, copy_outs, drops)
        return NOTHING


def all_reads(state: State, limits: Limits) -> tuple[Issue, ...]:
    """Every load in full, in order of arrival, read-ahead within its budget."""
    issues = [
        Issue(load.name, load.issued, load.layers - load.issued)
        for load in (*state.running.values(), *state.background.values())
        if load.issued < load.layers
    ]
    budget = max(0, limits.read_ahead_nbytes - state.read_ahead_nbytes)
    for load in state.unread.values():
        left = load.layers - load.issued
        layers = min(left, budget // load.ahead_nbytes) if load.ahead_nbytes else left
        if layers < left:
            layers -= layers % load.unit_layers
        budget -= layers * load.ahead_nbytes
        if layers:
            issues.append(Issue(load.name, load.issued, layers))
    return tuple(issues)
