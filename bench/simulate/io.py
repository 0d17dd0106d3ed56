"""The scheduler of one simulated engine, and the transfers that it launches.

The policy and the state are the scheduler's own.  A transfer goes through the submitting thread,
the engine's link and the medium at once and ends when the slowest of them has served it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tutti.bench.simulate.calibration import ServerTimes
from tutti.bench.simulate.device import READ, WRITE, Device, Join, Thread, Timeline
from tutti.scheduler.event import (
    Event,
    LayersReady,
    LoadGone,
    LoadKnown,
    PagesCopied,
    PagesWritten,
    Tick,
    WriteKnown,
)
from tutti.scheduler.policy import ImmediatePolicy, Limits, Policy, SlackPolicy
from tutti.scheduler.request import Load
from tutti.scheduler.state import Decision, ReadLaunch, State, Totals, WriteLaunch, apply, commit


class ServerIo:
    """Loads and writes of one engine.

    medium: shared with other engines; None where the tier lies behind the link alone.
    landed: called with a load's name when more of it arrived.
    """

    def __init__(
        self,
        timeline: Timeline,
        times: ServerTimes,
        medium: Device | None,
        landed: Callable[[str], None],
    ) -> None:
        self._timeline = timeline
        self._times = times
        self._medium = medium
        self._landed = landed
        bandwidth = times.calibration.link_bytes_per_s
        self.link = Device(timeline, bandwidth, bandwidth, 1.0)
        self.thread = Thread(timeline)
        limits = Limits(read_ahead_nbytes=times.system.read_ahead_nbytes)
        kind = SlackPolicy if times.system.policy == "slack" else ImmediatePolicy
        self._policy: Policy = kind(times, limits)
        self._state = State()
        self._wake_ns: int | None = None
        self._gone: dict[str, Callable[[bool], None]] = {}
        self._ready: dict[str, int] = {}
        self.offered_pages = 0
        self.decisions = 0

    @property
    def totals(self) -> Totals:
        """The scheduler's counters."""
        return self._state.totals

    def post(self, event: Event) -> None:
        """An event for the scheduler, and what it decides."""
        self.decisions += 1
        state = apply(self._state, event, self._times)
        decision = self._policy.decide(state)
        self._state = commit(state, decision, self._times)
        self._launch(decision)
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

    def is_launched(self, name: str) -> bool:
        """Whether anything of a load was launched."""
        return any(load.name == name and load.issued for load in self._state.loads)

    def forget(self, name: str) -> None:
        """A load that nobody waits for any more."""
        del self._ready[name]
        if any(load.name == name for load in self._state.loads):
            self.post(LoadGone(self._timeline.now_ns, name))

    def store(self, name: str, pages: int, page_nbytes: int, gone: Callable[[bool], None]) -> None:
        """Offers pages to be written; ``gone`` is told when they are (True) or never will be."""
        self.offered_pages += pages
        self._gone[name] = gone
        self.post(WriteKnown(self._timeline.now_ns, name, pages, page_nbytes))

    def _wake(self, when_ns: int) -> None:
        if self._wake_ns == when_ns:
            self._wake_ns = None
            self.post(Tick(when_ns))

    def _launch(self, decision: Decision) -> None:
        for name in decision.drops:
            self._gone.pop(name)(False)
        sizes = {write.name: write for write in self._state.writes}
        for name in decision.copy_outs:
            write = sizes[name]
            nbytes = write.pages * write.page_nbytes
            self.link.start(WRITE, nbytes, partial(self._copied, name))
        loads = {load.name: load for load in self._state.loads}
        for launch in decision.reads:
            self._read(launch, loads[launch.name])
        for launched in decision.writes:
            self._write(launched, sizes[launched.name].page_nbytes)

    def _copied(self, name: str) -> None:
        self.post(PagesCopied(self._timeline.now_ns, name))

    def _read(self, launch: ReadLaunch, load: Load) -> None:
        nbytes = launch.layers * load.layer_nbytes
        submit_us = self._times.submit_us(nbytes, write=False)
        fixed_us = self._times.system.fixed_us if launch.first == 0 else 0.0

        def arrived() -> None:
            if launch.name in self._ready:
                self._ready[launch.name] = launch.first + launch.layers
                now_ns = self._timeline.now_ns
                self.post(LayersReady(now_ns, launch.name, self._ready[launch.name]))
                self._landed(launch.name)

        if fixed_us:
            self.thread.start(fixed_us, lambda: self._move(READ, nbytes, submit_us, arrived))
        else:
            self._move(READ, nbytes, submit_us, arrived)

    def _write(self, launch: WriteLaunch, page_nbytes: int) -> None:
        nbytes = launch.pages * page_nbytes
        end = launch.first + launch.pages

        def written() -> None:
            self.post(PagesWritten(self._timeline.now_ns, launch.name, end))
            if all(write.name != launch.name for write in self._state.writes):
                self._gone.pop(launch.name)(True)

        self._move(WRITE, nbytes, self._times.submit_us(nbytes, write=True), written)

    def _move(
        self, direction: str, nbytes: int, submit_us: float, done: Callable[[], None]
    ) -> None:
        latency_ns = round(self._times.latency_us * 1000)

        def through() -> None:
            if latency_ns:
                self._timeline.at(self._timeline.now_ns + latency_ns, done)
            else:
                done()

        joined = Join(2 + (self._medium is not None), through)
        self.thread.start(submit_us, joined)
        self.link.start(direction, nbytes, joined)
        if self._medium is not None:
            self._medium.start(direction, nbytes, joined)
