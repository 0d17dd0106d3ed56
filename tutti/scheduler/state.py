"""The scheduler's state and its decisions.  Events change the state in `state_changes.py`.

Decisions do not change, but they are not frozen: that makes them several times as slow.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from tutti.scheduler.estimates import Estimates
from tutti.scheduler.loads_and_writes import Load, Profile, Step, Write

#: Pieces of read-ahead under way, where a policy has no limit of its own: one is read while the
#: one before is staged.
PIECES_MAX = 2
#: Factor per put, so that the effect of a drive that hung, or of a wrong profile, fades.
_FORGETS = 0.995


@dataclass(slots=True)
class Issue:
    """Start ``count`` parts of a load or a write from ``first`` on: layers, or pages."""

    name: str
    first: int
    count: int


@dataclass(slots=True)
class Decision:
    """What to do now: stops, drops, copy_outs, reads, writes, in this order.

    stops: writes that return what was not begun; WriteStopped answers.
    drops: writes that are dropped; nothing of them was issued.
    copy_outs: writes whose pages are copied to staging.
    wake_ns: when to decide again if nothing happens before; None for never.
    forced: the writes go without slack; forced_gap_ns: time until others may do so.
    """

    reads: tuple[Issue, ...] = ()
    writes: tuple[Issue, ...] = ()
    copy_outs: tuple[str, ...] = ()
    drops: tuple[str, ...] = ()
    stops: tuple[str, ...] = ()
    wake_ns: int | None = None
    forced: bool = False
    forced_gap_ns: int = 0


NOTHING = Decision()


class Policy(Protocol):
    """Decides what to issue.  It only reads the state; the same state gives the same decision."""

    def decide(self, state: State) -> Decision:
        """What to do now."""


@dataclass(slots=True)
class Totals:
    """Counters since the start.

    bubble_ns: time that layers waited for their loads.  slack_ns: device time of writes that went
    into slack, between or during reads.  written, deferred, forced, copied, dropped, failed: pages;
    deferred are those that were issued later than they came, forced those that went without slack.
    error_ns, expected_ns: sum of |measured - expected| and of expected times of all measurements;
    their quotient is the prediction error.  ignored: events that do not fit the state, and absurd
    measurements.
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


@dataclass(slots=True)
class Pipe:
    """One direction of the device.

    flying: parts that were issued and did not end.  flying_ns: what the profile expects for them.
    since_ns: when the running measurement began: with nothing in flight, or with the end of the one
    before.  done_ns: what the profile expects for all that ended since then; ends may come in
    bunches, their sum counts.  both_ns: State.both_ns at that moment.  from_idle: it began with
    nothing in flight.
    moved_ns: when something was last issued into an idle pipe, or ended.  untold: parts that were
    in flight when others were given up; when they began to move is not known.
    """

    flying: int = 0
    flying_ns: int = 0
    since_ns: int = 0
    done_ns: int = 0
    both_ns: int = 0
    moved_ns: int = 0
    from_idle: bool = False
    untold: int = 0

    def left_ns(self, now_ns: int, factor: float) -> int:
        """Until all in flight has ended, if the device does nothing else."""
        if not self.flying:
            return 0
        left_ns = round(self.flying_ns * factor) - (now_ns - self.moved_ns)
        return left_ns if left_ns > 0 else 0


@dataclass(slots=True)
class Space:
    """Memory whose pages are stored: one of SGLang's pools, or (named "") all other memory.

    locked_max, staged_max: its limits; None for those of the policy.
    source, copying, staged: as State has them for all spaces.
    pages: of all puts so far.  largest: of a put that was issued.
    run: how many more pages the last puts had than the drive can write meanwhile; run_max: the most
    so far.  more_max: the most by which a single put raised it.  Both slowly decrease.
    put_ns: when the last put came.  page_ns: time to write a page, see Estimates.sustained_ns.
    """

    locked_max: int | None = None
    staged_max: int | None = None
    source: int = 0
    copying: int = 0
    staged: int = 0
    pages: int = 0
    largest: int = 0
    run: float = 0.0
    run_max: float = 0.0
    more_max: float = 0.0
    put_ns: int = 0
    page_ns: float = 1.0

    def put(self, now_ns: int, pages: int, page_ns: float) -> None:
        """One more put.  In ``run`` it counts at most as the largest that was issued."""
        self.source += pages
        self.pages += pages
        counted = pages if pages < self.largest else self.largest
        more = counted - (now_ns - self.put_ns) / page_ns
        self.put_ns, self.page_ns = now_ns, page_ns
        self.run = max(0.0, self.run + more)
        self.run_max = max(self.run_max * _FORGETS, self.run)
        self.more_max = max(self.more_max * _FORGETS, more)

    def puts_ahead(self, now_ns: int) -> int:
        """How many of the largest puts may come in a row: one more than were seen."""
        if self.more_max <= 0:
            return 1
        run = max(0.0, self.run - (now_ns - self.put_ns) / self.page_ns)
        return 1 + math.ceil((self.run_max - run) / self.more_max)


class State:
    """Everything that a decision may depend on.  Dictionaries are in order of arrival.

    loads, writes: all of them, by name.  running: loads of the running step that have not arrived
    in full; unissued: those of them that are not issued in full.  unread: loads to read ahead that
    are not issued in full; ahead_ns: compute time of those that are, by the profile.  background:
    loads of that kind that are not issued in full; background_ns: what the profile expects for
    their parts in flight, which are not in ``reading``, as they yield.  offered: (asked_ns, number,
    name) of the pieces of read-ahead that wait for their turn, sorted.  turns: pieces that had it
    and have not arrived; those that are not issued are in ``unread``, too.  unwritten: writes that
    may be issued.  running_on: writes that were issued while no load waited, and can be stopped.
    waiting_pages: pages of all writes that are not issued.
    spaces: by name, with pages that were not copied (source), that are on their way to staging
    (copying), and of staging in use, those on their way included (staged).
    read_ahead_nbytes: of staging, issued for steps that have not begun.
    prefill_tokens: of all prefills that ended.
    both_ns: how long both directions were busy, up to ``both_since_ns``.
    """

    def __init__(self, profile: Profile) -> None:
        self.estimates = Estimates(profile)
        self.now_ns = 0
        self.numbers = 0  # of loads, writes and steps that came so far
        self.step = Step()
        self.loads: dict[str, Load] = {}
        self.running: dict[str, Load] = {}
        self.unissued: dict[str, Load] = {}
        self.unread: dict[str, Load] = {}
        self.ahead_ns = 0
        self.offered: list[tuple[int, int, str]] = []
        self.turns: dict[str, Load] = {}
        self.background: dict[str, Load] = {}
        self.background_ns = 0
        self.writes: dict[str, Write] = {}
        self.unwritten: dict[str, Write] = {}
        self.running_on: dict[str, Write] = {}
        self.waiting_pages = 0
        self.spaces = {"": Space()}
        self.read_ahead_nbytes = 0
        self.prefill_tokens = 0
        self.reading, self.writing = Pipe(), Pipe()
        self.both_ns = self.both_since_ns = 0
        self.both_measured_ns = 0  # when the interference was last measured
        self.write_issued_ns: int | None = None
        self.forced_until_ns = 0  # the next writes without slack come no sooner
        self.totals = Totals()

    @property
    def waits(self) -> bool:
        """Whether something may be issued, or stopped: policies are asked only then."""
        if self.unwritten or self.unissued or self.unread or self.background:
            return True
        return bool(self.running_on and self.running)

    @property
    def staged_pages(self) -> int:
        """Pages of staging in use."""
        return sum(space.staged for space in self.spaces.values())

    @property
    def locked_pages(self) -> int:
        """Pages that the server cannot reuse."""
        return sum(space.source + space.copying for space in self.spaces.values())
