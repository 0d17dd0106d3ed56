"""The one stateful loop: events in, launches out.

    dispatcher = Dispatcher(SlackPolicy(profile), profile, launcher)
    dispatcher.start()
    dispatcher.post(WriteKnown(dispatcher.now_ns(), "7", pages=64, page_nbytes=8 << 20))

The code that issues transfers implements `TransferIssuer` and posts their outcome.  The dispatcher
knows neither the store nor the device.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

from tutti.callbacks import Guard
from tutti.clock import Clock, SystemClock
from tutti.errors import ConfigError
from tutti.process import Owned
from tutti.scheduler.event import Event, LoadGone, Tick, WriteGone
from tutti.scheduler.policy import ImmediatePolicy, Limits, Policy, SlackPolicy
from tutti.scheduler.request import Profile
from tutti.scheduler.state import Decision, ReadLaunch, State, WriteLaunch, apply, commit

#: The loop looks at the clock at least so often.
_NAP_S = 0.5

DecisionHook = Callable[[Event, Decision], None]


class TransferIssuer(Protocol):
    """Starts transfers, without waiting for them; their ends are posted as events."""

    def read(self, launch: ReadLaunch) -> None:
        """Layers of a load; then LayersReady, or LoadGone."""

    def write(self, launch: WriteLaunch) -> None:
        """Pages of a write; then PagesWritten, or WriteGone."""

    def copy_out(self, name: str) -> None:
        """A write's pages to staging; then PagesCopied, or WriteGone."""

    def drop(self, name: str) -> None:
        """A write is given up: nothing of it was launched."""


_POOL_LIMITS = Limits(staged_pages=0)
_UNBOUNDED_NBYTES = 1 << 62


@dataclass(frozen=True)
class Schedule:
    """What a pool needs to schedule its puts and loads.

    profile: of this machine, model and medium.  limits: a pool has no staging, so they have no
    staged pages; loads go to pages that are there, so read_ahead_nbytes does not count.
    policy: by default SlackPolicy.
    """

    profile: Profile
    limits: Limits = _POOL_LIMITS
    policy: Callable[[Profile, Limits], Policy] = SlackPolicy
    record: DecisionHook | None = None

    def __post_init__(self) -> None:
        if self.limits.staged_pages:
            raise ConfigError("a pool has no staging to copy pages to; use limits without it")


class Dispatcher(Owned):
    """Runs a policy.  Thread-safe: any thread may post, one thread decides and launches.

    record: gets every event with the decision that followed, for a trace that replays.
    A profile that says something absurd ends slack, not service: from then on everything goes at
    once, and the log says so.
    """

    def __init__(
        self,
        policy: Policy,
        profile: Profile,
        launcher: TransferIssuer,
        *,
        clock: Clock | None = None,
        limits: Limits | None = None,
        record: DecisionHook | None = None,
        guard: Guard | None = None,
    ) -> None:
        self._policy = policy
        self._profile = profile
        self._limits = limits or Limits()
        self._launcher = launcher
        self._clock = clock or SystemClock()
        self._record = record
        self._guard = guard or Guard()  # policy, profile, recorder and launcher are the user's
        self._changed = threading.Condition()
        self._events: deque[Event] = deque()
        self._pumping = threading.Lock()
        self._state = State()
        self._wake_ns: int | None = None
        self._stopping = False
        self._thread: threading.Thread | None = None

    @classmethod
    def of(cls, schedule: Schedule, launcher: TransferIssuer, guard: Guard) -> Dispatcher:
        """The dispatcher of a pool."""
        limits = replace(schedule.limits, read_ahead_nbytes=_UNBOUNDED_NBYTES)
        return cls(
            schedule.policy(schedule.profile, limits),
            schedule.profile,
            launcher,
            limits=limits,
            record=schedule.record,
            guard=guard,
        )

    @property
    def state(self) -> State:
        """The state after the last decision: a snapshot that does not change."""
        return self._state

    def now_ns(self) -> int:
        """The time that events are stamped with."""
        return self._clock.now_ns()

    def post(self, event: Event) -> None:
        """Takes an event; never waits for a launch."""
        with self._changed:
            self._events.append(event)
            self._changed.notify_all()

    def run_due(self) -> int | None:
        """Takes the events that were posted, decides and launches; when to call again, if ever.

        For who has a clock or a loop of his own; otherwise see ``start``.  Launches that post
        events are answered within the call.
        """
        with self._pumping:
            event = self._next(Tick(self._clock.now_ns()))
            while event is not None:  # bounded: by what is posted
                self._take(event)
                event = self._next(None)
            return self._wake_ns

    def expedite(self) -> None:
        """From now on everything goes at once."""
        with self._pumping:
            self._policy = ImmediatePolicy(self._profile, self._limits)
        self.post(Tick(self.now_ns()))

    def start(self) -> None:
        """Runs the loop in a thread of its own, until ``stop``."""
        assert self._thread is None, "started once"
        self._thread = threading.Thread(target=self._run, name="tutti-scheduler", daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> bool:
        """Ends the thread; whether it did.  What was launched goes on."""
        with self._changed:
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
        state = self._state
        totals = state.totals
        corrections = asdict(state.corrections)
        return {
            **asdict(totals),
            "prediction_error": totals.error_ns / totals.expected_ns if totals.expected_ns else 0.0,
            "locked_pages": state.locked_pages,
            "staged_pages": state.staged_pages,
            "loads_waiting": len(state.loads),
            "writes_waiting": len(state.writes),
            **{f"{kind}_factor": corrections[kind]["factor"] for kind in corrections},
        }

    def _next(self, otherwise: Event | None) -> Event | None:
        with self._changed:
            return self._events.popleft() if self._events else otherwise

    def _take(self, event: Event) -> None:
        try:
            decision = self._decide(event)
        except BaseException as error:
            # A load that waits for its launch must not pay for a profile, or for a bug of a policy.
            self._guard.caught("the scheduler's policy (all launches are immediate now)", error)
            decision = self._decide_plainly(event)
        self._wake_ns = decision.wake_ns
        if self._record is not None:
            what = "the scheduler's recorder (it is not called again)"
            if not self._guard.call(what, self._record, event, decision):
                self._record = None
        self._launch(decision)

    def _decide_plainly(self, event: Event) -> Decision:
        """Without profile and policy; an event that is no use even so changes nothing."""
        self._profile = _Unknown()
        self._policy = ImmediatePolicy(self._profile, self._limits)
        try:
            return self._decide(event)
        except BaseException as error:
            self._guard.caught(f"event {event} of the scheduler", error)
            return Decision()

    def _decide(self, event: Event) -> Decision:
        state = apply(self._state, event, self._profile)
        decision = self._policy.decide(state)
        if not isinstance(decision, Decision):
            raise TypeError(f"the policy returned {decision!r}; a Decision is needed")
        self._state = commit(state, decision, self._profile)
        return decision

    def _launch(self, decision: Decision) -> None:
        for name in decision.drops:
            self._try(self._launcher.drop, name, None)
        for name in decision.copy_outs:
            self._try(self._launcher.copy_out, name, WriteGone(self.now_ns(), name))
        for read in decision.reads:
            self._try(self._launcher.read, read, LoadGone(self.now_ns(), read.name))
        for write in decision.writes:
            self._try(self._launcher.write, write, WriteGone(self.now_ns(), write.name))

    def _try(self, launch: Callable[[Any], None], what: Any, failed: Event | None) -> None:
        """The loop must live; what could not be launched is gone."""
        if not self._guard.call(f"the launch of {what}", launch, what) and failed is not None:
            self.post(failed)

    def _run(self) -> None:
        while not self._stopping:  # bounded by stop()
            wake_ns = self.run_due()
            nap_s = _NAP_S
            if wake_ns is not None:
                nap_s = min(nap_s, max(0.0, (wake_ns - self._clock.now_ns()) / 1e9))
            with self._changed:
                self._changed.wait_for(lambda: bool(self._events) or self._stopping, nap_s)


class _Unknown:
    """The profile of who knows nothing: everything takes no time."""

    interference = 1.0

    def layer_us(self, new_tokens: int, prefix_tokens: int) -> float:
        return 0.0

    def decode_us(self, batch: int, context_tokens: int) -> float:
        return 0.0

    def read_us(self, nbytes: int) -> float:
        return 0.0

    def write_us(self, nbytes: int) -> float:
        return 0.0
