"""Policies: from a state to a decision, without memory of their own.

`SlackPolicy` is the one to use.  `ImmediatePolicy` issues everything at once, and `FixedWindow`
writes so much in every window of time; they are what `SlackPolicy` is compared with.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

from tutti.errors import ConfigError
from tutti.scheduler.request import Load, PageLocation, Phase, Profile, Step, Write
from tutti.scheduler.slack import Estimates
from tutti.scheduler.state import Decision, ReadLaunch, State, WriteLaunch


@dataclass(frozen=True)
class Limits:
    """What a policy may use.

    locked_pages: engine pages that may wait to be written; beyond, they are copied out.
    staged_pages: pages of staging for those; beyond, writes are dropped.
    read_ahead_nbytes: staging for loads whose step did not begin.
    read_window_us: reads are launched so far ahead of the device, and no further: what is launched
        cannot be overtaken.
    write_burst_us: as much is written at once, and a new read may have to wait for it.
    quantum_us: a shorter slack is not worth a pause between reads.
    margin: part of the time until a deadline that is not planned with.
    read_patience_us: a load is overtaken only by loads that came within this time after it.
    write_patience_us: a write that waited longer goes without slack, in ``forced_share`` of the
        device's time.
    pressure: from this part of locked_pages and staged_pages on writes go before reads, until
        fewer wait: what is dropped costs more than a bubble.
    Raises ConfigError for what makes no sense.
    """

    locked_pages: int = 4096
    staged_pages: int = 4096
    read_ahead_nbytes: int = 4 << 30
    read_window_us: float = 4_000.0
    write_burst_us: float = 4_000.0
    quantum_us: float = 1_000.0
    margin: float = 0.02
    read_patience_us: float = 2_000_000.0
    write_patience_us: float = 5_000_000.0
    forced_share: float = 0.125
    pressure: float = 0.5

    def __post_init__(self) -> None:
        counts = (self.locked_pages, self.staged_pages, self.read_ahead_nbytes)
        times = (self.read_patience_us, self.write_patience_us, self.quantum_us)
        if min(counts) < 0 or min(times) < 0 or not 0 <= self.margin < 1:
            raise ConfigError("limits of the scheduler are not negative, and the margin is below 1")
        if min(self.read_window_us, self.write_burst_us) <= 0:
            raise ConfigError("read_window_us and write_burst_us are above 0")
        if not (0 < self.forced_share <= 0.5 and 0 < self.pressure <= 1):
            raise ConfigError("forced_share lies in (0, 0.5] and pressure in (0, 1]")


class Policy(Protocol):
    """Decides what to launch.  The same state always gives the same decision."""

    def decide(self, state: State) -> Decision:
        """What to do now."""


@dataclass(frozen=True, slots=True)
class Due:
    """A load and when its layers are needed: layer k at ``first_ns + k * layer_ns``.

    eligible: it may be launched now.
    """

    load: Load
    first_ns: int
    layer_ns: int
    eligible: bool

    def deadline_ns(self, layer: int) -> int:
        """When a layer is needed."""
        return self.first_ns + layer * self.layer_ns


class SlackPolicy:
    """Reads by deadline; writes into slack, then decode steps and idle time.

    * Reads: the layer that is needed first goes first.  A load's deadline lies at most
      ``read_patience_us`` after its arrival, so a load that may be launched (its step began, or
      it fits into the read-ahead budget behind the more urgent ones) is overtaken only by loads
      that came at most that much later.
    * Writes: as many as fit between now and the tightest deadline.  Where interference doubles the
      time of a transfer or worse, both directions take turns; else writes go beside reads.
    * Starvation: a write older than ``write_patience_us`` goes all the same, one unit each time,
      in ``forced_share`` of the device's time.  So a write that has k units before it and in it is
      launched within ``write_patience_us + k * (drain + unit / forced_share)``, where ``drain`` is
      the time of the reads in flight (``read_window_us`` and one unit at most).
    """

    def __init__(self, profile: Profile, limits: Limits | None = None) -> None:
        self.profile = profile
        self.limits = limits or Limits()

    def decide(self, state: State) -> Decision:
        """See Policy."""
        estimates = Estimates(self.profile, state.corrections)
        copy_outs, drops = overflow(state, self.limits)
        waiting = [
            w for w in state.writes if w.waits and w.name not in drops and w.name not in copy_outs
        ]
        dues = deadlines(state, estimates, self.limits)
        plan = _Plan(state, estimates, self.limits, dues, waiting)
        decision = plan.take_turns() if estimates.interference >= 2 else plan.side_by_side()
        wake_ns = decision.wake_ns
        if wake_ns is not None and wake_ns <= state.now_ns:
            wake_ns = None  # what was expected by now did not end: its end decides
        return replace(decision, copy_outs=copy_outs, drops=drops, wake_ns=wake_ns)


class ImmediatePolicy:
    """Launches whatever it can, at once: no order, no slack.  Memory is as bounded as ever."""

    def __init__(self, profile: Profile, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()

    def decide(self, state: State) -> Decision:
        """See Policy."""
        copy_outs, drops = overflow(state, self.limits)
        gone = {*copy_outs, *drops}
        writes = tuple(
            WriteLaunch(w.name, w.issued, w.pages - w.issued)
            for w in state.writes
            if w.waits and w.name not in gone
        )
        return Decision(_all_reads(state, self.limits), writes, copy_outs, drops)


class FixedWindow:
    """Writes what a constant bandwidth moves in a constant window of time; reads go at once.

    window_us: between launches of writes.  bytes_per_s: what the device is taken to write.
    """

    def __init__(
        self,
        profile: Profile,
        limits: Limits | None = None,
        *,
        window_us: float = 10_000.0,
        bytes_per_s: float = 10 * 2**30,
    ) -> None:
        self.limits = limits or Limits()
        self._window_ns = round(window_us * 1000)
        self._nbytes = round(window_us * 1e-6 * bytes_per_s)

    def decide(self, state: State) -> Decision:
        """See Policy."""
        copy_outs, drops = overflow(state, self.limits)
        gone = {*copy_outs, *drops}
        waiting = [w for w in state.writes if w.waits and w.name not in gone]
        reads = _all_reads(state, self.limits)
        last_ns = state.write_launched_ns
        if waiting and last_ns is not None and state.now_ns < last_ns + self._window_ns:
            return Decision(reads, (), copy_outs, drops, wake_ns=last_ns + self._window_ns)
        left = self._nbytes
        writes: list[WriteLaunch] = []
        for write in waiting:
            pages = _whole_units(write, left // write.page_nbytes)
            if not pages:
                pages = 0 if writes else write.unit
            if pages:
                writes.append(WriteLaunch(write.name, write.issued, pages))
            left -= pages * write.page_nbytes
            if pages < write.pages - write.issued:
                break
        wake_ns = state.now_ns + self._window_ns if writes else None
        return Decision(reads, tuple(writes), copy_outs, drops, wake_ns=wake_ns)


def overflow(state: State, limits: Limits) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(copy_outs, drops) that keep locked pages within bounds; the newest writes go first.

    Only what was not launched at all can go.  Pages that are being copied count as gone.
    """
    locked = sum(w.pages for w in state.writes if w.place is PageLocation.SOURCE)
    staged = state.staged_pages
    copy_outs, drops = [], []
    for write in reversed(state.writes):
        if locked <= limits.locked_pages:
            break
        if write.place is not PageLocation.SOURCE or write.issued:
            continue
        locked -= write.pages
        if staged + write.pages <= limits.staged_pages:
            staged += write.pages
            copy_outs.append(write.name)
        else:
            drops.append(write.name)
    return tuple(copy_outs), tuple(drops)


def deadlines(state: State, estimates: Estimates, limits: Limits) -> list[Due]:
    """When each load that has not all arrived is needed, the most urgent first.

    Loads of the running step by where its layers are.  The others are taken to run one after
    another in order of arrival, once the step has ended.
    """
    step = state.step
    start_ns = max(state.now_ns, step_end_ns(state, estimates))
    patience_ns = round(limits.read_patience_us * 1000)
    budget = limits.read_ahead_nbytes - state.read_ahead_nbytes
    running_ns = _step_layer_ns(step, estimates)
    found = []
    for load in state.loads:
        if load.step == step.number and step.phase is Phase.PREFILL:
            first_ns, layer_ns = step.layer_ns - step.layer * running_ns, running_ns
            eligible = True
        else:
            layer_ns = estimates.layer_ns(load.tokens, load.prefix_tokens)
            first_ns = start_ns
            start_ns += load.layers * layer_ns
            eligible = (load.unit_end - load.issued) * load.layer_nbytes <= budget
        if load.ready < load.layers:
            latest_ns = load.arrived_ns + patience_ns
            late_ns = first_ns + load.issued * layer_ns - latest_ns
            found.append(Due(load, first_ns - max(0, late_ns), layer_ns, eligible))
    found.sort(key=lambda due: (due.deadline_ns(due.load.issued), due.load.number))
    return found


def step_end_ns(state: State, estimates: Estimates) -> int:
    """When the running step should end; now, when none runs."""
    step = state.step
    if step.phase is Phase.DECODE:
        return step.began_ns + estimates.decode_ns(step.tokens, step.context_tokens)
    if step.phase is Phase.PREFILL:
        left = step.layers - step.layer
        return step.layer_ns + left * _step_layer_ns(step, estimates)
    return state.now_ns


def slack_ns(state: State, estimates: Estimates, dues: list[Due], margin: float) -> int | None:
    """How long the device may do something else before a layer is late; None: as long as it likes.

    Every load is checked at its next and at its last layer: in between the time that is needed
    grows evenly, like the deadlines.  Negative when a layer will be late anyway.
    """
    free_ns = max(state.now_ns, state.reading.ends_ns, state.writing.ends_ns)
    least = None
    before_ns = 0  # reads of more urgent loads
    for due in dues:
        load = due.load
        if load.issued > load.ready:
            spare_ns = due.deadline_ns(load.issued - 1) - state.reading.ends_ns
            least = spare_ns if least is None else min(least, spare_ns)
        if load.issued == load.layers:
            continue
        one_ns = estimates.read_ns(load.layer_nbytes)
        total_ns = (load.layers - load.issued) * one_ns
        for layer, needed_ns in ((load.issued, one_ns), (load.layers - 1, total_ns)):
            left_ns = due.deadline_ns(layer) - free_ns
            spare_ns = left_ns - before_ns - needed_ns - round(margin * max(0, left_ns))
            least = spare_ns if least is None else min(least, spare_ns)
        before_ns += total_ns
    return least


class _Plan:
    """One decision of SlackPolicy in the making."""

    def __init__(
        self,
        state: State,
        estimates: Estimates,
        limits: Limits,
        dues: list[Due],
        waiting: list[Write],
    ) -> None:
        self._state = state
        self._estimates = estimates
        self._limits = limits
        self._dues = dues
        self._waiting = waiting
        # A load outside of the budget does not use the device, whatever its deadline.
        wanted = [due for due in dues if due.eligible]
        self._reads_wait = any(due.load.issued < due.load.layers for due in wanted)
        self._slack_ns = slack_ns(state, estimates, wanted, limits.margin)

    def take_turns(self) -> Decision:
        """Reads or writes, never both."""
        state = self._state
        if state.writes_fly:
            return self._write_on() if not self._reads_wait else Decision()
        forced, share = self._forced()
        writes = bool(self._waiting) and (forced > 0 or self._has_room(1.0))
        if state.reads_fly:
            # Reads pause so that the writes find the device idle.
            return Decision(wake_ns=state.reading.ends_ns) if writes else self._read()
        if not writes:
            return self._read()
        return self._write(forced, share) if forced else self._write_into_slack(1.0)

    def side_by_side(self) -> Decision:
        """Writes beside reads, as far as reads have time for it."""
        reads = self._read()
        cost = max(0.0, self._estimates.interference - 1)
        if not self._waiting:
            return reads
        forced, share = self._forced()
        if self._state.writes_fly:
            writes = self._write_on() if self._has_room(cost) else Decision()
        elif self._has_room(cost):
            writes = self._write_into_slack(cost)
        else:
            writes = self._write(forced, share) if forced else Decision()
        wakes = [d.wake_ns for d in (reads, writes) if d.wake_ns is not None]
        return replace(writes, reads=reads.reads, wake_ns=min(wakes, default=None))

    def _has_room(self, cost: float) -> bool:
        """Whether slack is worth a pause.  cost: of a nanosecond of writes to the reads."""
        if self._slack_ns is None:
            return True
        unit_ns = self._unit_ns()
        wanted_ns = max(unit_ns, round(self._limits.quantum_us * 1000))
        return self._slack_ns >= cost * wanted_ns

    def _unit_ns(self) -> int:
        write = self._waiting[0]
        return self._estimates.write_ns(write.unit * write.page_nbytes)

    def _forced(self) -> tuple[int, float]:
        """(pages, share of time) to write without slack: because they are old, or too many."""
        state, limits = self._state, self._limits
        if not self._waiting or state.now_ns < state.forced_until_ns:
            return 0, 1.0
        oldest = self._waiting[0]
        room = limits.pressure * (limits.locked_pages + limits.staged_pages)
        if sum(w.pages for w in state.writes) > room:
            page_ns = max(1, self._estimates.write_ns(oldest.page_nbytes))
            burst = round(limits.write_burst_us * 1000) // page_ns
            return max(oldest.unit, _whole_units(oldest, burst)), 1.0
        if state.now_ns >= oldest.arrived_ns + round(limits.write_patience_us * 1000):
            return oldest.unit, limits.forced_share
        return 0, 1.0

    def _write(self, pages: int, share: float) -> Decision:
        """The oldest write's next pages, slack or not."""
        oldest = self._waiting[0]
        launch_ns = self._estimates.write_ns(pages * oldest.page_nbytes)
        return Decision(
            writes=(WriteLaunch(oldest.name, oldest.issued, pages),),
            forced=True,
            forced_gap_ns=round(launch_ns / share),
            wake_ns=self._state.now_ns + round(launch_ns / share),
        )

    def _write_into_slack(self, cost: float) -> Decision:
        budget_ns = round(self._limits.write_burst_us * 1000)
        if self._slack_ns is not None and cost > 0:
            budget_ns = min(budget_ns, int(self._slack_ns / cost))
        return self._write_for(budget_ns)

    def _write_on(self) -> Decision:
        """Keeps the device writing: the next burst before the last has ended."""
        if not self._waiting:
            return Decision()
        burst_ns = round(self._limits.write_burst_us * 1000)
        next_ns = self._state.writing.ends_ns - burst_ns // 2
        if self._state.now_ns < next_ns:
            return Decision(wake_ns=next_ns)
        flying_nbytes = sum(write.flying_nbytes for write in self._state.writes)
        if self._estimates.write_ns(flying_nbytes) > max(burst_ns, self._unit_ns()):
            return Decision()  # late: an end decides, or a drive that stalls gets more and more
        return self._write_for(burst_ns // 2)

    def _write_for(self, budget_ns: int) -> Decision:
        """Writes that take so long, one unit at least, the oldest first."""
        launches: list[WriteLaunch] = []
        left_ns = budget_ns
        for write in self._waiting:
            page_ns = max(1, self._estimates.write_ns(write.page_nbytes))
            pages = _whole_units(write, left_ns // page_ns)
            if not pages and not launches:
                pages = write.unit
            if pages:
                launches.append(WriteLaunch(write.name, write.issued, pages))
            left_ns -= pages * page_ns
            if pages < write.pages - write.issued:
                break
        return Decision(
            writes=tuple(launches), wake_ns=self._state.writing.ends_ns if not launches else None
        )

    def _read(self) -> Decision:
        """Units of reads by deadline, until enough are in flight."""
        state = self._state
        window_ns = round(self._limits.read_window_us * 1000)
        ends_ns = max(state.now_ns, state.reading.ends_ns)
        launches: list[ReadLaunch] = []
        for due in _by_deadline(self._dues, self._limits.read_ahead_nbytes, state):
            if ends_ns - state.now_ns >= window_ns:
                return Decision(tuple(launches), wake_ns=ends_ns - window_ns)
            load = due.load
            layers = load.unit_end - load.issued
            launches.append(ReadLaunch(load.name, load.issued, layers))
            ends_ns += self._estimates.read_ns(layers * load.layer_nbytes)
        return Decision(tuple(launches), wake_ns=self._next_chance_ns())

    def _next_chance_ns(self) -> int | None:
        """When writes that wait now may be old enough to go without slack."""
        if not self._waiting:
            return None
        oldest_ns = self._waiting[0].arrived_ns + round(self._limits.write_patience_us * 1000)
        at_ns = max(oldest_ns, self._state.forced_until_ns)
        return at_ns if at_ns > self._state.now_ns else None


def _by_deadline(dues: list[Due], read_ahead_nbytes: int, state: State) -> Iterator[Due]:
    """Launches in their order, one unit each; loads as they are after the launches before.

    A load that does not fit into what is left of the read-ahead budget holds back those behind it
    that need it too, unless it is larger than the whole budget and has to wait for its step.
    """
    step = state.step.number
    budget = read_ahead_nbytes - state.read_ahead_nbytes
    left = [due for due in dues if due.load.issued < due.load.layers]
    while left:  # bounded: every turn launches a unit or takes a load out
        due = min(left, key=lambda d: (d.deadline_ns(d.load.issued), d.load.number))
        load, at = due.load, left.index(due)
        ahead = load.step != step
        nbytes = (load.unit_end - load.issued) * load.layer_nbytes
        if ahead and nbytes > budget:
            hopeless = nbytes > read_ahead_nbytes
            left = [d for d in left if d.load.step == step or (hopeless and d is not due)]
            continue
        yield due
        budget -= nbytes if ahead else 0
        after = replace(load, issued=load.unit_end)
        if after.issued < after.layers:
            left[at] = replace(due, load=after)
        else:
            del left[at]


def _all_reads(state: State, limits: Limits) -> tuple[ReadLaunch, ...]:
    """Every load in full, in order of arrival, within the read-ahead budget."""
    budget = max(0, limits.read_ahead_nbytes - state.read_ahead_nbytes)
    launches = []
    for load in state.loads:
        layers = load.layers - load.issued
        if load.step is None:
            layers = min(layers, budget // load.layer_nbytes)
            layers -= layers % load.unit_layers if layers < load.layers - load.issued else 0
            budget -= layers * load.layer_nbytes
        if layers:
            launches.append(ReadLaunch(load.name, load.issued, layers))
    return tuple(launches)


def _step_layer_ns(step: Step, estimates: Estimates) -> int:
    if step.phase is not Phase.PREFILL:
        return 0
    return estimates.layer_ns(step.tokens, step.context_tokens)


def _whole_units(write: Write, pages: int) -> int:
    """The most pages, up to so many, that are a launch; 0 when none is."""
    left = write.pages - write.issued
    if pages >= left:
        return left
    return max(0, pages - pages % write.unit_pages)
