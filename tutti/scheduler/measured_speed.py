"""Learns a drive's speed, and how reads and writes slow each other, from transfers that ended."""

from __future__ import annotations

from tutti.scheduler.estimates import ABSURD_NS, Correction
from tutti.scheduler.state import Pipe, State

#: Transfers are measured over so long at least, unless the device has nothing more to do.
_MEASURED_NS = 5_000_000
#: The interference is learnt where both directions were busy for this part of a measurement.
_BOTH_SHARE = 0.5


def begin(state: State, pipe: Pipe, other: Pipe, parts: int, expected_ns: int) -> None:
    """Parts are issued into a pipe; starts a measurement if it was idle."""
    if not pipe.flying:
        if other.flying:
            state.both_since_ns = state.now_ns
        pipe.since_ns = pipe.moved_ns = state.now_ns
        pipe.done_ns, pipe.flying_ns, pipe.untold = 0, 0, 0
        pipe.both_ns, pipe.from_idle = state.both_ns, True
    pipe.flying += parts
    pipe.flying_ns += expected_ns


def end(
    state: State, pipe: Pipe, other: Pipe, correction: Correction, parts: int, base_ns: int
) -> None:
    """Parts of a direction have ended.  Measures all since the last measurement, once that is
    enough.  correction: of its speed.

    Transfers that flew together may end at nearly the same time: those that end right after a
    measurement moved during it, and tell nothing; nor do those that share the drive with reads of
    the background, which are not in the pipe.  The interference is learnt from reads alone: a
    write beside reads is also slow because they are served first.
    """
    now_ns = state.now_ns
    if other.flying:
        _count_both(state)
    pipe.flying -= parts
    pipe.flying_ns -= base_ns
    pipe.done_ns += base_ns
    pipe.moved_ns = now_ns
    took_ns = now_ns - pipe.since_ns
    if took_ns < _MEASURED_NS and pipe.flying and not pipe.untold:
        return
    both_ns = state.both_ns - pipe.both_ns
    tells = (took_ns >= _MEASURED_NS or pipe.from_idle) and not (state.background_ns or pipe.untold)
    if tells and not both_ns:
        measured(state, correction, pipe.done_ns, took_ns)
    elif tells and pipe is state.reading and both_ns >= _BOTH_SHARE * took_ns:
        _learn_interference(state, pipe.done_ns, took_ns, both_ns)
    pipe.since_ns, pipe.done_ns, pipe.both_ns = now_ns, 0, state.both_ns
    pipe.from_idle, pipe.untold = False, max(0, pipe.untold - parts)


def _count_both(state: State) -> None:
    """Both directions were busy until now."""
    state.both_ns += state.now_ns - state.both_since_ns
    state.both_since_ns = state.now_ns


def _learn_interference(state: State, base_ns: int, took_ns: int, both_ns: int) -> None:
    """Learns it from the work that was done while the other direction was busy."""
    estimates = state.estimates
    beside_ns = base_ns * estimates.read.factor - (took_ns - both_ns)
    if beside_ns > 0 and took_ns < ABSURD_NS:
        expected_ns = round(beside_ns * estimates.base_interference)
        estimates.both.measured(expected_ns, both_ns)
        state.both_measured_ns = state.now_ns


def given_up(state: State, pipe: Pipe, other: Pipe, parts: int, base_ns: int) -> None:
    """Parts that were issued will not be reported; nothing is learnt from parts in flight then."""
    if not parts:
        return
    if other.flying:
        _count_both(state)
    pipe.flying, pipe.flying_ns = pipe.flying - parts, pipe.flying_ns - base_ns
    pipe.since_ns = pipe.moved_ns = state.now_ns
    pipe.done_ns, pipe.both_ns = 0, state.both_ns
    pipe.from_idle, pipe.untold = False, pipe.flying


def measured(state: State, correction: Correction, base_ns: int, measured_ns: int) -> None:
    """Corrects by a measurement, and counts it.  base_ns: expected by the profile alone."""
    totals = state.totals
    if not 0 < measured_ns < ABSURD_NS:
        totals.ignored += 1
        return
    expected_ns = round(base_ns * correction.factor)
    totals.error_ns += abs(measured_ns - expected_ns)
    totals.expected_ns += expected_ns
    totals.measurements += 1
    correction.measured(base_ns, measured_ns)
