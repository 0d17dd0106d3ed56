"""The one stateful loop: events in, launches out.

    dispatcher = Dispatcher.join(schedule, guard)
    prefix = dispatcher.attach(issuer)
    dispatcher.post(WriteKnown(dispatcher.now_ns(), f"{prefix}7", pages=64, page_nbytes=8 << 20))

The stores of a process that have a drive in common share one dispatcher and its queue.  The code
that issues their transfers implements `TransferIssuer` and posts their outcome.  The dispatcher
knows neither the store nor the device.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from tutti.base.callbacks import Guard
from tutti.base.clock import Clock, SystemClock
from tutti.base.interrupts import is_main_thread, uninterrupted
from tutti.base.process import Owned
from tutti.base.threads import start_thread
from tutti.errors import ConfigError
from tutti.scheduler.baselines import ImmediatePolicy
from tutti.scheduler.estimates import ABSURD_NS, Estimates
from tutti.scheduler.event import (
    Event,
    LoadGone,
    LoadKnown,
    PagesWritten,
    Tick,
    WriteGone,
    WriteKnown,
)
from tutti.scheduler.loads_and_writes import Profile
from tutti.scheduler.policy import Limits, SlackPolicy
from tutti.scheduler.state import NOTHING, Decision, Issue, Policy, State
from tutti.scheduler.state_changes import Scheduler

#: The loop reads the clock at least so often.
_NAP_S = 0.5
#: So many events of `note` may wait for the loop.
_ENDS_MAX = 16
_JUMPED = "the clock jumped by %d s, or this process stood still; no measure of it is used"

_log = logging.getLogger(__name__)

DecisionHook = Callable[[Event, Decision], None]


class LoadIssuer(Protocol):
    """Starts loads, without waiting for them; their ends are posted as events."""

    def read(self, launch: Issue) -> None:
        """Starts to read layers of a load; LayersReady or LoadGone is posted afterwards."""


class WriteIssuer(Protocol):
    """Starts writes, without waiting for them; their ends are posted as events."""

    def write(self, launch: Issue) -> None:
        """Starts to write pages of a write; PagesWritten or WriteGone is posted afterwards."""

    def copy_out(self, name: str) -> None:
        """Starts to copy a write's pages to staging; then PagesCopied or WriteGone is posted."""

    def drop(self, name: str) -> None:
        """Drops a write of which nothing was launched."""

    def stop_write(self, name: str) -> None:
        """Begins no more commands of a write that can stop; then WriteStopped is posted."""


#: The part that announces transfers also carries out the decisions on them.
TransferIssuer = LoadIssuer | WriteIssuer

#: The source of a profile that the caller passed.
GIVEN = "given"
_POOL_LIMITS = Limits(staged_pages=0)

_shared: list[Dispatcher] = []  # in the order in which they began
_joining = threading.Lock()


def _forget_shared() -> None:
    """Runs in a forked child, which has none of the threads."""
    global _joining
    _joining = threading.Lock()
    _shared.clear()


os.register_at_fork(after_in_child=_forget_shared)


@dataclass(frozen=True)
class Schedule:
    """What a pool needs to schedule its puts and loads.  Raises ConfigError for staged pages.

    profile: of this machine, model and medium.  limits: must have no staged pages, because a pool
    has no staging.  policy: makes the policy from the limits.  record: called with every event and
    the decision after it.  source: where the profile came from, for `stats`.
    media: names of the pool's drives, if they are known.  Pools with a drive in common share one
    queue, which uses the schedule of the first; so do pools that are opened with the same Schedule.
    A pool on drives of two queues joins the older one.
    puts: False if puts of the pool were decided on before, so that the queue starts them at once.
    """

    profile: Profile
    limits: Limits = _POOL_LIMITS
    policy: Callable[[Limits], Policy] = SlackPolicy
    record: DecisionHook | None = None
    source: str = GIVEN
    media: tuple[str, ...] = ()
    puts: bool = True

    def __post_init__(self) -> None:
        if self.limits.staged_pages:
            raise ConfigError("a pool has no staging to copy pages to; use limits without it")


class Dispatcher(Owned):
    """Runs a policy.  Thread-safe: any thread may post; one at a time decides and launches.

    under_way: transfers that are not over by the events added so far, with the pages of writes.
    now_ns: the clock of events, monotonic.
    record: called with every event and the decision after it, for a trace that can be replayed.
    After an error of the profile or the policy everything is issued at once, and the log says so.
    """

    def __init__(
        self,
        policy: Policy,
        profile: Profile,
        issuer: TransferIssuer | None = None,
        *,
        clock: Clock | None = None,
        limits: Limits | None = None,
        record: DecisionHook | None = None,
        guard: Guard | None = None,
    ) -> None:
        self._scheduler = Scheduler(policy, profile)
        self._limits = limits or Limits()
        self._issuers = {} if issuer is None else {"": issuer}  # by the prefix of their names
        self._prefixes = itertools.count(1)
        self._users = 0
        self._media: frozenset[str] = frozenset()
        self._schedule: Schedule | None = None
        self.now_ns = (clock or SystemClock()).now_ns
        self._record = record
        self._guard = guard or Guard()  # policy, profile, recorder and launcher are the user's
        self._lock = threading.RLock()  # used itself: Ctrl-C in Condition.__enter__ keeps it locked
        self._changed = threading.Condition(self._lock)
        self._events: deque[Event] = deque()
        self.under_way: dict[str, int] = {}
        self._pumping = threading.Lock()
        self._wake_ns: int | None = None
        self._sleeps_until_ns = 0  # the loop, at the latest; under the lock
        self._stopping = False
        self._thread: threading.Thread | None = None

    @classmethod
    def join(cls, schedule: Schedule, guard: Guard) -> Dispatcher:
        """The dispatcher of a schedule in this process; it runs until all who joined ``leave``."""
        with _joining:
            media = frozenset(schedule.media)
            shared = (one for one in _shared if one._schedule is schedule or one._media & media)
            found = next(shared, None)
            if found is None:
                limits, record = schedule.limits, schedule.record
                policy = schedule.policy(limits)
                found = cls(policy, schedule.profile, limits=limits, record=record, guard=guard)
                found._schedule = schedule
                found.start()
                _shared.append(found)
            found._media |= media
            found._users += 1
        return found

    def leave(self) -> None:
        """Ends the use of a dispatcher by one that joined; the last one stops it."""
        with _joining:
            self._users -= 1
            if self._users > 0:
                return
            if self in _shared:  # not in a forked child
                _shared.remove(self)
        self.stop()

    def attach(self, issuer: TransferIssuer) -> str:
        """Has ``issuer`` carry out decisions on names that begin with the returned prefix."""
        with self._lock:
            prefix = f"{next(self._prefixes)}:"
            self._issuers[prefix[:-1]] = issuer
        return prefix

    def detach(self, prefix: str) -> None:
        """Undoes ``attach``: forgets all transfers whose names begin with this prefix."""
        now_ns = self.now_ns()
        with self._lock:
            self._issuers.pop(prefix[:-1], None)
            for name, pages in list(self.under_way.items()):
                if name.startswith(prefix):
                    self.add(WriteGone(now_ns, name) if pages else LoadGone(now_ns, name))

    @property
    def state(self) -> State:
        """The scheduler's state, which changes with the next decision; only to be read."""
        return self._scheduler.state

    def is_issued(self, name: str) -> bool:
        """Whether a load of this name was announced, and some of it is issued."""
        load = self.state.loads.get(name)
        return load is not None and load.issued > 0

    def post(self, event: Event) -> None:
        """Adds an event and decides; see ``decide``."""
        self.add(event)
        self.decide()

    def add(self, event: Event) -> None:
        """Adds an event for the next ``decide``; for callers that hold locks."""
        with self._lock:
            self._events.append(event)
            match event:
                case PagesWritten():
                    if self.under_way.get(event.name) == event.pages:
                        del self.under_way[event.name]
                case LoadGone() | WriteGone():
                    self.under_way.pop(event.name, None)
                case LoadKnown():
                    self.under_way[event.name] = 0
                case WriteKnown():
                    self.under_way[event.name] = event.pages

    def alone(self, known: LoadKnown | WriteKnown, over: int = 0) -> bool:
        """Adds an event if its transfer is the only one and may start at once; whether it did.

        Then the caller starts it without a decision, as nothing else waits for one.  over: number
        of transfers that have ended, and whose end was not added yet.
        """
        policy: Any = self._scheduler.policy
        with self._lock:
            if self.under_way and len(self.under_way) > over:
                return False
            try:
                known.at_once = policy.goes_at_once(self._scheduler.state, known)
            except Exception:  # no such method, or a wrong profile, which the decision reports
                return False
            if known.at_once:
                self.under_way[known.name] = known.pages if type(known) is WriteKnown else 0
                self._events.append(known)
            return known.at_once

    def note(self, event: Event | None = None) -> None:
        """Adds an event, such as the end of a transfer or a step of the model.  Decides only if
        something waits for a decision, or if many events wait; otherwise the loop takes it later.
        """
        if event is not None:
            self.add(event)
        if self._scheduler.state.waits or len(self._events) > _ENDS_MAX:
            self.decide()

    def decide(self) -> None:
        """Takes the added events and decides, unless another thread does so now.

        A decision on the caller's thread saves a switch of threads.  The main thread leaves it to
        the loop: a signal handler that raises there would leave the state half changed.
        """
        if self._thread is None:
            return  # see run_due
        if not is_main_thread():
            while self._events and self._pumping.acquire(blocking=False):
                try:  # bounded: by what is posted
                    self._pump(None)
                finally:
                    self._pumping.release()
        with self._lock:
            wake_ns = self._wake_ns
            if self._events or (wake_ns is not None and wake_ns < self._sleeps_until_ns):
                self._changed.notify_all()

    def run_due(self) -> int | None:
        """Takes the events that were added, decides and launches.  Returns when to call again, in
        ns of ``now_ns``, or None.

        For callers with their own clock or loop; otherwise see ``start``.  Events that launches
        post are taken within the call.
        """
        with self._pumping:
            self._pump(Tick(self.now_ns()))
            return self._wake_ns

    def start(self) -> None:
        """Runs the loop in a thread of its own, until ``stop``."""
        assert self._thread is None, "started once"
        self._thread = threading.Thread(target=self._run, name="tutti-scheduler", daemon=True)
        start_thread(self._thread)

    def stop(self, timeout_s: float = 10.0) -> bool:
        """Ends the thread; False if it did not end in time.  Launched transfers go on."""
        with self._lock:
            self._stopping = True
            self._changed.notify_all()
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def counters(self) -> dict[str, Any]:
        """Totals so far; see state.Totals.  Also what waits, the corrections of the profile, and
        prediction_error, the mean error of expected times relative to them.
        """
        if self._events:
            uninterrupted()(self.decide)()  # of transfers that have ended
        state = self._scheduler.state
        totals, factors = state.totals, state.estimates.factors()
        return {
            **asdict(totals),
            "prediction_error": totals.error_ns / totals.expected_ns if totals.expected_ns else 0.0,
            "locked_pages": state.locked_pages,
            "staged_pages": state.staged_pages,
            "loads_waiting": len(state.loads),
            "writes_waiting": len(state.writes),
            **{f"{kind}_factor": factor for kind, factor in factors.items()},
        }

    def _pump(self, otherwise: Event | None) -> None:
        """Takes what was posted, or ``otherwise`` where that is nothing."""
        events = self._events
        event = events.popleft() if events else otherwise
        while event is not None:  # bounded: by what is posted
            self._take(event)
            event = events.popleft() if events else None

    def _take(self, event: Event) -> None:
        try:
            decision = self._scheduler.take(event)
        except BaseException as error:
            # After a wrong profile or a bug of a policy, transfers go on without an order.
            self._guard.caught("the scheduler's policy (all launches are immediate now)", error)
            decision = self._take_plainly(event)
        self._wake_ns = decision.wake_ns
        if self._record is not None:
            what = "the scheduler's recorder (it is not called again)"
            if not self._guard.call(what, self._record, event, decision):
                self._record = None
        if decision is not NOTHING:
            self._launch(decision)

    def _take_plainly(self, event: Event) -> Decision:
        """Takes an event without profile and policy; one that still raises changes nothing."""
        try:
            state = self._scheduler.state
            state.estimates = Estimates(Unknown())
            self._scheduler.policy = ImmediatePolicy(self._limits)
            return self._scheduler.take(event)
        except BaseException as error:
            self._guard.caught(f"event {event} of the scheduler", error)
            return NOTHING

    def _launch(self, decision: Decision) -> None:
        for name in decision.stops:
            self._try("stop_write", name, name, None)
        for name in decision.drops:
            self.under_way.pop(name, None)
            self._try("drop", name, name, None)
        for name in decision.copy_outs:
            self._try("copy_out", name, name, WriteGone(self.now_ns(), name))
        for read in decision.reads:
            self._try("read", read.name, read, LoadGone(self.now_ns(), read.name))
        for write in decision.writes:
            self._try("write", write.name, write, WriteGone(self.now_ns(), write.name))
        # A burst was issued, and another may follow; or a piece, and the next may have its turn.
        if decision.writes or (decision.reads and self._scheduler.state.offered):
            self.add(Tick(self.now_ns()))

    def _try(self, method: str, name: str, what: Any, failed: Event | None) -> None:
        """Launches; no error ends the loop, but a transfer that cannot be launched is gone."""
        issuer = self._issuers.get(name.partition(":")[0] if ":" in name else "")
        # None for a transfer that was announced after its issuer's `detach`.
        is_launched = issuer is not None and self._guard.call(
            f"the launch of {name}", getattr(issuer, method), what
        )
        if not is_launched and failed is not None:
            self.post(failed)

    def _run(self) -> None:
        told, last_ns = False, self.now_ns()
        while not self._stopping:  # bounded by stop()
            self.run_due()
            with self._lock:
                now_ns = self.now_ns()
                if not told and abs(now_ns - last_ns) > ABSURD_NS:
                    told = True
                    _log.warning(_JUMPED, (now_ns - last_ns) / 1e9)
                last_ns = now_ns
                until_ns = now_ns + round(_NAP_S * 1e9)
                if self._wake_ns is not None:
                    until_ns = max(now_ns, min(until_ns, self._wake_ns))
                self._sleeps_until_ns = until_ns
                if not (self._events or self._stopping):
                    self._changed.wait((until_ns - now_ns) / 1e9)
                self._sleeps_until_ns = 0


class Unknown:
    """The profile in place of one that raised: everything takes no time."""

    interference = 1.0

    def layer_us(self, new_tokens: int, prefix_tokens: int) -> float:
        return 0.0

    def decode_us(self, batch: int, context_tokens: int) -> float:
        return 0.0

    def read_us(self, nbytes: int) -> float:
        return 0.0

    write_us = read_us
