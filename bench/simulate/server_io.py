"""The scheduler of one simulated server, and the transfers that it issues.

Policy and state are the scheduler's code, and the limits are those of a store.  A transfer is
served by the submitting thread, the server's link and the medium at the same time, and ends with
the slowest of them.  Loads of a layer-wise system arrive by layers, or units of layers, under every
policy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from tutti.bench.simulate.calibration import ServerTimes
from tutti.bench.simulate.device import READ, WRITE, Device, Line, Timeline, Writes
from tutti.profiles.at_open import store_limits
from tutti.scheduler.baselines import ImmediatePolicy
from tutti.scheduler.event import (
    Event,
    LayersReady,
    LoadGone,
    LoadKnown,
    PagesWritten,
    Tick,
    WriteKnown,
    WriteStopped,
)
from tutti.scheduler.loads_and_writes import Write, report_at
from tutti.scheduler.policy import Limits, SlackPolicy
from tutti.scheduler.state import NOTHING, Decision, Issue, Policy, Totals
from tutti.scheduler.state_changes import Scheduler


def policy_of(name: str, limits: Limits) -> Policy:
    """The policy of a system of the calibration."""
    return SlackPolicy(limits) if name == "slack" else ImmediatePolicy(limits)


class ServerIo:
    """Loads and writes of one server.

    medium: shared with other servers; None if the tier has only the link.
    arrived: called with a load's name when more of it has arrived.
    """

    def __init__(
        self,
        timeline: Timeline,
        times: ServerTimes,
        medium: Device | None,
        arrived: Callable[[str], None],
    ) -> None:
        self._timeline = timeline
        self._times = times
        self._medium = medium
        self._on_arrival = arrived
        self._link_ns = 1e9 / times.calibration.link_bytes_per_s  # of a byte
        self._latency_ns = round(times.latency_us * 1000)
        self._writes = None if medium is None else Writes(medium, self._moved)
        self._links = {READ: Line(), WRITE: Line()}
        self.thread = Line()
        self._page_nbytes = times.calibration.page_nbytes
        limits = store_limits(times, self._page_nbytes)
        limits = replace(limits, read_ahead_nbytes=times.system.read_ahead_nbytes)
        self._scheduler = Scheduler(policy_of(times.system.policy, limits), times)
        self._state = self._scheduler.state
        self._wake_ns: int | None = None
        self._stored: dict[str, Callable[[], None]] = {}
        self._least_ns: dict[str, int] = {}  # when thread and link are through with a write
        self._ready: dict[str, int] = {}
        self._begins_ns: dict[str, int] = {}  # when a load's first byte may be read
        self.offered_pages = 0
        self.backlog_pages_max = 0  # offered and not written
        self.decisions = 0

    @property
    def totals(self) -> Totals:
        """The scheduler's counters."""
        return self._state.totals

    def post(self, event: Event) -> None:
        """Passes an event to the scheduler and executes its decision."""
        self.decisions += 1
        decision = self._scheduler.take(event)
        if decision is NOTHING:
            return
        self._carry_out(decision)
        wake_ns = decision.wake_ns
        if wake_ns is not None and wake_ns > self._timeline.now_ns:
            pending = self._wake_ns is not None and self._wake_ns <= wake_ns
            if not pending:
                self._wake_ns = wake_ns
                self._timeline.at(wake_ns, lambda: self._wake(wake_ns))

    def load(self, known: LoadKnown) -> None:
        """A prefix that is to be read."""
        self._ready[known.name] = 0
        self.post(known)

    def ready_layers(self, name: str) -> int:
        """Layers of a load that arrived."""
        return self._ready[name]

    def is_issued(self, name: str) -> bool:
        """Whether anything of a load was issued."""
        load = self._state.loads.get(name)
        return load is not None and load.issued > 0

    def forget(self, name: str) -> None:
        """A load that is not needed any more."""
        del self._ready[name]
        self._begins_ns.pop(name, None)
        if name in self._state.loads:
            self.post(LoadGone(self._timeline.now_ns, name))

    def store(self, name: str, pages: int, stored: Callable[[], None]) -> None:
        """Offers pages to be written; ``stored`` is called when they are."""
        self.offered_pages += pages
        self._stored[name] = stored
        can_stop = self._writes is not None
        known = WriteKnown(self._timeline.now_ns, name, pages, self._page_nbytes, can_stop=can_stop)
        self.post(known)
        self.backlog_pages_max = max(self.backlog_pages_max, self._state.locked_pages)

    def _wake(self, when_ns: int) -> None:
        if self._wake_ns == when_ns:
            self._wake_ns = None
            self.post(Tick(when_ns))

    def _carry_out(self, decision: Decision) -> None:
        for name in decision.stops:
            self._stop(self._state.writes[name])
        for issue in decision.reads:
            self._read(issue)
        for issue in decision.writes:
            self._write(issue)

    def _read(self, issue: Issue) -> None:
        """Starts an issue, and lets it arrive in units of layers."""
        load, end = self._state.loads[issue.name], issue.first + issue.count
        now_ns, fixed_us = self._timeline.now_ns, self._times.system.fixed_us
        if fixed_us and not issue.first:
            # Before a load's first byte; the thread does nothing else meanwhile.
            self._begins_ns[issue.name] = self.thread.take(now_ns, round(fixed_us * 1000))
        at_ns = self._begins_ns.get(issue.name, now_ns)
        if at_ns > now_ns:  # layers that are issued meanwhile come behind the first
            unit, nbytes, name = load.unit_layers, load.layer_nbytes, load.name
            self._timeline.at(at_ns, lambda: self._units(name, issue.first, end, unit, nbytes))
        else:
            self._units(load.name, issue.first, end, load.unit_layers, load.layer_nbytes)

    def _units(self, name: str, first: int, end: int, unit: int, layer_nbytes: int) -> None:
        for layer in range(first, end, unit):
            ready = min(end, layer + unit)
            nbytes = (ready - layer) * layer_nbytes
            self._fetch(nbytes, self._arrived(name, ready))

    def _arrived(self, name: str, layers: int) -> Callable[[], None]:
        def arrived() -> None:
            if name in self._ready:
                # Where a write gave back its time, later layers overtake: those before are there.
                self._ready[name] = max(self._ready[name], layers)
                load = self._state.loads.get(name)
                if load is not None and layers >= report_at(load.ready, load.issued):
                    self.post(LayersReady(self._timeline.now_ns, name, layers))
                self._on_arrival(name)

        return arrived

    def _write(self, issue: Issue) -> None:
        page_nbytes = self._state.writes[issue.name].page_nbytes
        least_ns = self._submit(WRITE, issue.count * page_nbytes)
        if self._writes is None:
            end = issue.first + issue.count
            self._timeline.at(least_ns, partial(self._written, issue.name, end))
        else:
            self._least_ns[issue.name] = least_ns
            self._writes.start(issue.name, issue.first, issue.count, page_nbytes)

    def _stop(self, write: Write) -> None:
        """Thread and link have not done what the medium has not begun."""
        assert self._writes is not None, "others cannot be stopped"
        now_ns, pages = self._timeline.now_ns, self._writes.stop(write)
        thread_ns, link_ns = self._submission_ns(WRITE, (write.issued - pages) * write.page_nbytes)
        self.thread.give_back(now_ns, thread_ns)
        self._links[WRITE].give_back(now_ns, link_ns)
        self._least_ns[write.name] = now_ns
        self.post(WriteStopped(now_ns, write.name, pages))

    def _moved(self, name: str, pages: int) -> None:
        """The medium has written so many pages of a write, from the first one on."""
        at_ns = max(self._timeline.now_ns, self._least_ns[name]) + self._latency_ns
        self._timeline.at(at_ns, partial(self._written, name, pages))

    def _written(self, name: str, pages: int) -> None:
        self.post(PagesWritten(self._timeline.now_ns, name, pages))
        if name not in self._state.writes:
            self._least_ns.pop(name, None)
            self._stored.pop(name)()

    def _submit(self, direction: str, nbytes: int) -> int:
        """Through the submitting thread and the link, which serve everything in turn."""
        thread_ns, link_ns = self._submission_ns(direction, nbytes)
        now_ns = self._timeline.now_ns
        thread_ns = self.thread.take(now_ns, thread_ns)
        return max(thread_ns, self._links[direction].take(now_ns, link_ns))

    def _submission_ns(self, direction: str, nbytes: int) -> tuple[int, int]:
        """(time of the thread, time of the link) of a transfer."""
        submit_us = self._times.submit_us(nbytes, write=direction == WRITE)
        return round(submit_us * 1000), round(nbytes * self._link_ns)

    def _fetch(self, nbytes: int, done: Callable[[], None]) -> None:
        timeline, least_ns = self._timeline, self._submit(READ, nbytes)
        if self._medium is None:
            timeline.at(least_ns, done)
            return
        latency_ns = self._latency_ns
        self._medium.start(
            READ, nbytes, lambda: timeline.at(max(timeline.now_ns, least_ns) + latency_ns, done)
        )
