"""Policies: from a state to a decision, without memory of their own.

`SlackPolicy` is the one to use.  `baselines.py` has those that it is compared with.

Code that every decision runs compares instead of calling min() or max(), which take four times as
long.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from tutti.errors import ConfigError
from tutti.scheduler.estimates import TURNS_FROM, Correction
from tutti.scheduler.event import LoadKnown, WriteKnown
from tutti.scheduler.loads_and_writes import Load, Phase, Write
from tutti.scheduler.read_order import ReadOrder, background, fill
from tutti.scheduler.room import overflow, pressure_of
from tutti.scheduler.state import NOTHING, PIECES_MAX, Decision, Issue, State
from tutti.scheduler.write_order import fewest_left_first, first_write, writes_for

#: Slack is computed over so many loads, those that are due first.
_DUES_MAX = 8
#: Longest pause of writes on a drive that slowed down under them, whatever was measured.
_PAUSE_MAX_NS = 5_000_000_000
#: Pages: more than any memory has.
UNBOUNDED = 1 << 40


@dataclass(frozen=True)
class Limits:
    """What a policy may use.

    locked_pages: pages of the server that may wait to be written; the rest is copied to staging.
    staged_pages: pages of staging for those; beyond, writes are dropped.
    read_ahead_nbytes: staging for read-ahead whose step did not begin.
    pieces_max: pieces of read-ahead that are under way at once.
    read_window_us: reads are issued so far ahead of the device, and no further: what is issued
        cannot be overtaken.
    late_window_us: likewise, of a load of the running step while nothing can go between its reads:
        there is too little slack for the writes that wait, or it will be late to its last layer in
        any case.  Each window costs a decision.
    write_burst_us: writes are issued in bursts of this length while loads wait.
    idle_burst_us: likewise while none is known, of writes that cannot be stopped; a new load may
        have to wait for two of them.  Reads of the only transfer are issued as far ahead.
    run_us: likewise, of writes that stop when a load comes.
    slowed_run_us: likewise, on a drive that slows down under them: a smaller put that comes
        meanwhile has to wait for them.
    margin: share of the time until a deadline that is kept as a reserve.
    read_patience_us: a load is overtaken only by loads that came within this time after it.
    write_patience_us: a write that waited longer goes without slack, in ``forced_share`` of the
        device's time and bursts of ``idle_burst_us``.
    pressing_pages: waiting pages at which writes get all of the device's time; from half of them on
        they get a share.  None: they get all of it when an expected put would not fit in time, as a
        dropped page costs more than a bubble.
    probe_us: where reads and writes take turns, they go together once in this time, to measure what
        that costs.
    Counts must be Python's integers: the compiled module refuses those of numpy with a TypeError.
    Raises ConfigError for values out of range.
    """

    locked_pages: int = 4096
    staged_pages: int = 4096
    read_ahead_nbytes: int = 4 << 30
    pieces_max: int = PIECES_MAX
    read_window_us: float = 4_000.0
    late_window_us: float = 64_000.0
    write_burst_us: float = 4_000.0
    idle_burst_us: float = 16_000.0
    run_us: float = 500_000.0
    slowed_run_us: float = 128_000.0
    margin: float = 0.02
    read_patience_us: float = 2_000_000.0
    write_patience_us: float = 20_000_000.0
    forced_share: float = 0.125
    pressing_pages: int | None = None
    probe_us: float = 10_000_000.0

    def __post_init__(self) -> None:
        counts = (self.locked_pages, self.staged_pages, self.read_ahead_nbytes)
        times = (self.read_patience_us, self.write_patience_us, self.probe_us)
        if min(counts) < 0 or min(times) < 0 or not 0 <= self.margin < 1:
            raise ConfigError("limits must not be negative, and margin must be from 0 to below 1")
        if self.pieces_max < 1:
            raise ConfigError("pieces_max must be at least 1")
        windows = (self.read_window_us, self.late_window_us, self.run_us, self.slowed_run_us)
        if min(*windows, self.write_burst_us, self.idle_burst_us) <= 0:
            raise ConfigError("*_window_us, *run_us and *_burst_us must be above 0")
        if self.pressing_pages is not None and self.pressing_pages < 1:
            raise ConfigError("pressing_pages must be at least 1, or None")
        if not 0 < self.forced_share <= 0.5:
            raise ConfigError("forced_share must be above 0 and at most 0.5")


class SlackPolicy:
    """Reads by deadline; writes into slack, then decode steps and idle time.

    * Reads: the layer that is needed first goes first, in windows of layers.  A load's deadline
      lies at most ``read_patience_us`` after its arrival, so a load that may be issued (its step
      began, or it fits into the read-ahead budget behind the more urgent ones) is overtaken only
      by loads that came at most that much later.  Loads of the background go where nothing else
      waits or flies, and may wait for long: a store reads them after a time-out all the same.
    * Writes: as many as fit between now and the tightest deadline.  Where interference doubles the
      time of a transfer or worse, both directions take turns; else writes go together with reads.
    * Pressure: writes get device time without slack where an expected put would not fit; see
      `room.py`.
    * Order of writes: the oldest first.  On a drive that slowed down under them, those with the
      fewest pages left go first, with slack, without it and where no load waits, until the oldest
      waited for ``write_patience_us``: each makes room only once it is whole.
    * Starvation: a write older than ``write_patience_us`` goes all the same, one unit each time,
      in ``forced_share`` of the device's time.  So a write that has k units before it and in it is
      issued within ``write_patience_us + k * (drain + unit / forced_share)``, where ``drain`` is
      the time of the reads in flight (the longest window and one unit at most).
    """

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self._window_ns = round(self.limits.read_window_us * 1000)
        self._late_window_ns = round(self.limits.late_window_us * 1000)
        self._burst_ns = round(self.limits.write_burst_us * 1000)
        self._idle_burst_ns = round(self.limits.idle_burst_us * 1000)
        self._run_ns = round(self.limits.run_us * 1000)
        self._slowed_run_ns = round(self.limits.slowed_run_us * 1000)
        self._read_patience_ns = round(self.limits.read_patience_us * 1000)
        self._write_patience_ns = round(self.limits.write_patience_us * 1000)
        self._pause_max_ns = min(self._write_patience_ns, _PAUSE_MAX_NS)
        self._probe_ns = round(self.limits.probe_us * 1000)
        self._read_ahead = self.limits.read_ahead_nbytes
        self._margin = self.limits.margin

    def goes_at_once(self, state: State, known: LoadKnown | WriteKnown) -> bool:
        """Whether a transfer is issued whole if nothing else is under way; see Dispatcher.alone.

        It is so short that ``decide`` would do the same.
        """
        estimates = state.estimates
        if isinstance(known, LoadKnown):
            layers = known.layers
            ns = layers * estimates.read_base_ns(layers * known.layer_nbytes, layers)
            return ns * estimates.read.factor <= self._idle_burst_ns
        ns = known.pages * estimates.write_base_ns(known.page_nbytes)
        return ns * estimates.write.factor <= self._ahead_ns(estimates.write, known.can_stop)

    def decide(self, state: State) -> Decision:
        copy_outs, drops = overflow(state, self.limits) if state.writes else ((), ())
        gone = copy_outs + drops
        has_loads = state.running or state.unread
        if has_loads and state.running_on:
            plan = Decision(stops=tuple(state.running_on))
        elif not state.unwritten:
            plan = self._without_writes(state) if has_loads else NOTHING
            if plan is NOTHING:
                plan = background(state, self._window_ns)
        elif has_loads:
            plan = self._with_writes(state, gone)
        else:
            plan = self._writes_alone(state, gone)
        if gone:
            plan = replace(plan, copy_outs=copy_outs, drops=drops)
        return plan

    def _without_writes(self, state: State) -> Decision:
        """Decides where loads wait and no writes; some writes may still be in flight."""
        if state.writing.flying and self._takes_turns(state):
            return NOTHING
        reads = self._reads(state, self._late_window_ns)
        return Decision(reads) if reads else NOTHING

    def _writes_alone(self, state: State, gone: tuple[str, ...]) -> Decision:
        """Decides where no load waits.  Keeps two bursts in flight, so the device is never idle."""
        write, unwritten = state.estimates.write, self._in_order(state)
        factor = write.factor
        burst_ns = self._ahead_ns(write, next(iter(unwritten.values())).can_stop)
        if state.writing.flying_ns * factor > burst_ns:
            return NOTHING
        if state.reading.flying and self._takes_turns(state):
            return NOTHING  # reads in flight were issued ahead; their end decides
        writes = writes_for(unwritten, burst_ns / factor, gone)
        return Decision((), writes) if writes else NOTHING

    def _ahead_ns(self, write: Correction, can_stop: bool) -> int:
        """How far ahead writes are issued while no load waits."""
        if not can_stop:
            return self._idle_burst_ns
        return self._slowed_run_ns if write.slowed > 1 else self._run_ns

    def _with_writes(self, state: State, gone: tuple[str, ...]) -> Decision:
        """Decides where loads and writes wait."""
        oldest = (
            first_write(state.unwritten, gone) if gone else next(iter(state.unwritten.values()))
        )
        if oldest is None:
            return self._without_writes(state)
        turns = self._takes_turns(state)
        writing, factor = state.writing, state.estimates.write.factor
        # Delay of reads, in ns, for each ns of writes.
        cost = 1.0 if turns else state.estimates.interference - 1
        left_ns, least_ns = 0, self._burst_ns  # slack that is worth a pause
        if writing.flying:  # less where the device writes already
            left_ns, least_ns = writing.left_ns(state.now_ns, factor), least_ns // 4
        unit_ns = round(oldest.unit * oldest.write_ns * factor)
        needed_ns = cost * (left_ns + (unit_ns if unit_ns > least_ns else least_ns))
        slack_ns = self._slack_ns(state, needed_ns)
        if slack_ns is not None and slack_ns < needed_ns:
            return self._without_slack(state, oldest, gone, turns, needed_ns)
        if turns and state.reading.flying:
            return NOTHING  # reads pause until the device is idle; their end decides
        budget_ns = self._burst_ns
        if slack_ns is not None and cost > 0:
            budget_ns = min(budget_ns, int(slack_ns / cost) - left_ns)
        writes = self._burst(state, budget_ns, gone)
        return Decision(() if turns else self._reads(state), writes)

    def _without_slack(
        self, state: State, oldest: Write, gone: tuple[str, ...], turns: bool, needed_ns: float
    ) -> Decision:
        """Decides where the slack is too small: reads, and writes that are old or too many."""
        now_ns, chance_ns = state.now_ns, state.forced_until_ns
        if chance_ns > now_ns and state.estimates.write.slowed > 1:
            return self._until(state, chance_ns, turns, needed_ns)  # whatever the pressure
        pressure = pressure_of(state, self.limits)
        if pressure <= 0:  # writes that wait may go without slack once the oldest is too old
            chance_ns = max(chance_ns, oldest.arrived_ns + self._write_patience_ns)
        budget_ns, share = self._forced(state, oldest, pressure)
        if pressure > 0 and state.estimates.write.slowed > 1:  # after a pause
            pause_ns = min(self._pause_max_ns, round(self._idle_burst_ns * (1 / share - 1)))
            chance_ns = state.writing.moved_ns + pause_ns
        if chance_ns > now_ns and share < 1:
            return self._until(state, chance_ns, turns, needed_ns)
        if turns and state.reading.flying:
            return NOTHING  # as with slack
        writes = self._burst(state, budget_ns, gone)
        reads = () if turns else self._reads(state)
        took_ns = sum(issue.count * state.writes[issue.name].write_ns for issue in writes)
        gap_ns = round(took_ns * state.estimates.write.factor / share)
        if state.estimates.write.slowed > 1:
            gap_ns = min(self._pause_max_ns, gap_ns)
        wake_ns = now_ns + gap_ns if writes else None
        return Decision(reads, writes, wake_ns=wake_ns, forced=bool(writes), forced_gap_ns=gap_ns)

    def _until(self, state: State, chance_ns: int, turns: bool, needed_ns: float) -> Decision:
        """Decides where no write may go before a moment: reads only."""
        reads: tuple[Issue, ...] = ()
        if not (turns and state.writing.flying):
            reads = self._reads(state, chance_ns - state.now_ns, needed_ns)
        if turns and (reads or state.reading.flying):
            return Decision(reads) if reads else NOTHING  # their end decides
        return Decision(reads, wake_ns=chance_ns)

    def _takes_turns(self, state: State) -> bool:
        is_known = state.now_ns - state.both_measured_ns < self._probe_ns
        return is_known and state.estimates.interference >= TURNS_FROM

    def _forced(self, state: State, oldest: Write, pressure: float) -> tuple[int, float]:
        """(device time, share) of writes without slack: because they are old, or too many."""
        write, least = state.estimates.write, self.limits.forced_share
        unit_ns = max(1, round(oldest.unit * oldest.write_ns * write.factor))
        if pressure > 0:
            share = min(1.0, max(pressure, least) / write.slowed)
            burst_ns = self._burst_ns if share < 1 else self._idle_burst_ns  # no read goes between
            if write.slowed > 1:  # at its best the drive writes what the pause made room for
                burst_ns = round(self._idle_burst_ns * write.factor / write.best)
            return max(unit_ns, burst_ns), share
        return max(unit_ns, self._idle_burst_ns), least

    def _in_order(self, state: State) -> dict[str, Write]:
        """The writes that may be issued, in the order in which they go."""
        unwritten = state.unwritten
        if len(unwritten) == 1 or state.estimates.write.slowed <= 1:
            return unwritten
        too_old_ns = next(iter(unwritten.values())).arrived_ns + self._write_patience_ns
        return fewest_left_first(unwritten) if state.now_ns < too_old_ns else unwritten

    def _burst(self, state: State, budget_ns: int, gone: tuple[str, ...]) -> tuple[Issue, ...]:
        """Writes that take so long, one unit at least; none while the device has enough of them.

        A device that stalls is not given more and more.
        """
        estimates = state.estimates
        left_ns = state.writing.left_ns(state.now_ns, estimates.write.factor)
        flying_ns = state.writing.flying_ns * estimates.write.factor
        if left_ns > self._burst_ns // 2 or flying_ns > self._burst_ns:
            return ()
        return writes_for(self._in_order(state), budget_ns / estimates.write.factor, gone)

    def _slack_ns(self, state: State, needed_ns: float) -> int | None:
        """How long the device may do something else before a layer is late; None: no limit.

        Every load is checked at its next and at its last layer: in between the time that is needed
        grows evenly, like the deadlines.  Negative when a layer will be late anyway.  Loads of the
        running step are due by its layers; the others are assumed to run one after another in order
        of arrival, once the step has ended.  needed_ns: the search ends once slack is less.
        """
        step, layer = state.step, state.estimates.layer.factor
        read = state.estimates.read.factor
        free_ns = state.now_ns + state.reading.left_ns(state.now_ns, read)
        least_ns, before_ns, room = math.inf, 0.0, _DUES_MAX
        layer_ns = step.expected_ns * layer
        first_ns = step.layer_ns - step.layer * layer_ns - free_ns
        for load in state.running.values():
            if load.issued > load.ready and first_ns + (load.issued - 1) * layer_ns < needed_ns:
                return -1  # a layer in flight will be late
            spare_ns, before_ns = self._spare_ns(load, first_ns, layer_ns, read, before_ns)
            if spare_ns < least_ns:
                least_ns = spare_ns
            room -= 1
        if least_ns < needed_ns or not state.unread:
            return None if least_ns == math.inf else round(least_ns)
        start_ns = step_end_ns(state) + state.ahead_ns * layer - free_ns
        budget, patience_ns = self._read_ahead - state.read_ahead_nbytes, self._read_patience_ns
        for load in state.unread.values():
            if room <= 0 or least_ns < needed_ns:
                break
            if load.ahead_nbytes:
                if budget < load.unit_nbytes:
                    budget = 0  # it holds back the read-ahead behind it
                    continue
                budget -= (load.layers - load.issued) * load.ahead_nbytes
            layer_ns = load.compute_ns * layer
            first_ns = load.arrived_ns + patience_ns - load.issued * layer_ns - free_ns
            if first_ns > start_ns:
                first_ns = start_ns
            spare_ns, before_ns = self._spare_ns(load, first_ns, layer_ns, read, before_ns)
            if spare_ns < least_ns:
                least_ns = spare_ns
            start_ns += load.layers * layer_ns
            room -= 1
        return None if least_ns == math.inf else round(least_ns)

    def _spare_ns(
        self, load: Load, first_ns: float, layer_ns: float, read: float, before_ns: float
    ) -> tuple[float, float]:
        """(slack of a load, time of all reads up to its last) from when the device is free.

        first_ns, layer_ns: when its first layer is needed, and how much later each other.  read:
        correction of the profile.  before_ns: time of reads that go before.
        """
        issued, margin = load.issued, self._margin
        next_ns = first_ns + issued * layer_ns
        least_ns = next_ns - layer_ns if issued > load.ready else math.inf
        left = load.layers - issued
        if left:
            one_ns = load.read_ns * read
            spare_ns = next_ns - before_ns - one_ns - (margin * next_ns if next_ns > 0 else 0.0)
            if spare_ns < least_ns:
                least_ns = spare_ns
            before_ns += left * one_ns
            last_ns = next_ns + (left - 1) * layer_ns
            spare_ns = last_ns - before_ns - (margin * last_ns if last_ns > 0 else 0.0)
            if spare_ns < least_ns:
                least_ns = spare_ns
        return least_ns, before_ns

    def _is_alone(self, state: State, load: Load) -> bool:
        """Whether no other transfer is under way or could be; the background does not count."""
        if state.writes or state.reading.flying != load.issued - load.ready:
            return False
        left_nbytes = self._read_ahead - state.read_ahead_nbytes
        others = (one for one in state.unread.values() if one is not load)
        return all(one.unit_nbytes > left_nbytes for one in others)

    def _reads(
        self, state: State, free_ns: int = 0, needed_ns: float = math.inf
    ) -> tuple[Issue, ...]:
        """Reads by deadline, until the window is full.

        free_ns: time in which no write may go without slack.  needed_ns: slack that a write needs.
        """
        factor = state.estimates.read.factor
        unissued, unread, only = state.unissued, state.unread, None
        has_one = len(unissued) + len(unread) <= 1  # nothing to compare
        if has_one or len(unissued) == 1:
            only = next(iter((unissued or unread).values()), None)
            if only is not None and only.blocks and self._is_alone(state, only):
                return (Issue(only.name, only.issued, only.layers - only.issued),)
        is_alone = len(state.loads) == 1 and not state.writes
        window_ns = float(self._idle_burst_ns if is_alone else self._window_ns)
        flying_ns = state.reading.flying_ns * factor
        if free_ns > window_ns and free_ns > flying_ns and len(state.unissued) <= 1:
            uncut_ns = self._uncut_ns(state, flying_ns, needed_ns)
            if uncut_ns > window_ns:
                window_ns = uncut_ns if uncut_ns < free_ns else free_ns
        room_ns = window_ns - flying_ns
        if room_ns <= 0 and state.reading.flying > 1:
            return ()
        if has_one:
            if only is None:
                return ()
            count = only.in_units(fill(only, room_ns, factor))
            left_nbytes = self._read_ahead - state.read_ahead_nbytes
            takes_none = only.running or not only.ahead_nbytes
            if takes_none or count * only.ahead_nbytes <= left_nbytes:
                return (Issue(only.name, only.issued, count),)
        if len(unissued) <= 1:
            first = self._urgent(state, room_ns)
            if first is not None:
                return (first,)
        running = list(unissued.values())
        queue = ReadOrder(state, self._read_ahead)
        patience_ns = self._read_patience_ns
        step_ns = state.step.expected_ns * state.estimates.layer.factor
        base_ns = state.step.layer_ns - state.step.layer * step_ns
        while room_ns > 0 or not (queue.issues or state.reading.flying > 1):  # ends: see ReadOrder
            load, least_ns = queue.head, math.inf
            if load is not None:
                least_ns = float(load.arrived_ns + patience_ns)
            for one in running:
                due_ns = base_ns + queue.next_layer(one) * step_ns
                latest_ns = one.arrived_ns + patience_ns
                due_ns = min(max(due_ns, one.arrived_ns), latest_ns)
                if due_ns < least_ns or (due_ns == least_ns and load is queue.head):
                    load, least_ns = one, due_ns
            if load is None:
                break
            one_ns = max(1.0, load.read_ns * factor)
            layers = max(1, math.ceil(room_ns / one_ns))
            if load.running and len(running) > 1:
                layers = 1  # the same layer of all is needed together
            room_ns -= one_ns * queue.add(load, layers)
            if load.running and queue.next_layer(load) == load.layers:
                running.remove(load)
        return queue.to_issues()

    def _uncut_ns(self, state: State, flying_ns: float, needed_ns: float) -> float:
        """How far ahead the load that is due first is read, as no write goes between its layers.

        Shorter windows would only cost decisions.  They end where slack begins that a write needs;
        if none waits, at two ``idle_burst_us``, unless the load will be late to its last layer.
        """
        if not state.unissued:  # all are read ahead, and another may be needed first
            return self._idle_burst_ns if needed_ns == math.inf else 0.0
        load = next(iter(state.unissued.values()))
        step, estimates = state.step, state.estimates
        one_ns = load.read_ns * estimates.read.factor
        layer_ns = step.expected_ns * estimates.layer.factor
        free_ns = state.now_ns + state.reading.left_ns(state.now_ns, estimates.read.factor)
        first_ns, left = step.layer_ns - step.layer * layer_ns - free_ns, load.layers - load.issued
        last_ns = first_ns + (load.layers - 1) * layer_ns - left * one_ns
        if needed_ns == math.inf and last_ns >= 0:
            return 2 * self._idle_burst_ns
        # The slack of its next layer grows with each that is read; all other slack stays.
        next_ns, more_ns = first_ns + (load.issued - 1) * layer_ns, layer_ns - one_ns
        if next_ns < needed_ns <= last_ns and more_ns > 0:
            layers = math.ceil((needed_ns - next_ns) / more_ns)
            if layers < left:
                left = layers
        uncut_ns = flying_ns + left * one_ns
        return uncut_ns if uncut_ns < self._late_window_ns else self._late_window_ns

    def _urgent(self, state: State, room_ns: float) -> Issue | None:
        """Reads of the most urgent load, if they fill the window; None if all loads must be
        compared.  For at most one load of the running step.
        """
        load = next(iter(state.unread.values()))
        for one in state.unissued.values():
            step_ns = state.step.expected_ns * state.estimates.layer.factor
            due_ns = state.step.layer_ns + (one.issued - state.step.layer) * step_ns
            latest_ns = load.arrived_ns + self._read_patience_ns
            if due_ns >= latest_ns or one.arrived_ns >= latest_ns:
                return None
            load = one
        layers = fill(load, room_ns, state.estimates.read.factor)
        if layers > load.layers - load.issued:
            return None
        count = load.in_units(layers)
        if (
            not load.running
            and count * load.ahead_nbytes > self._read_ahead - state.read_ahead_nbytes
        ):
            return None
        return Issue(load.name, load.issued, count)


def step_end_ns(state: State) -> float:
    """When the running step should end; now at the earliest."""
    step, estimates = state.step, state.estimates
    if step.phase is Phase.DECODE:
        end_ns = step.began_ns + step.expected_ns * estimates.decode.factor
    else:
        left_ns = (step.layers - step.layer) * step.expected_ns * estimates.layer.factor
        end_ns = step.layer_ns + left_ns
    return end_ns if end_ns > state.now_ns else state.now_ns
