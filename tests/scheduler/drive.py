"""A drive and a model on a clock of their own: the simplest that a policy can be stepped with.

Each direction is a pipe that takes one launch after another; a launch that begins while the other
direction is busy takes ``interference`` times as long.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from tutti.scheduler.event import (
    Event,
    LayersReady,
    PagesCopied,
    PagesWritten,
    Tick,
)
from tutti.scheduler.policy import Policy
from tutti.scheduler.request import Profile
from tutti.scheduler.state import Decision, State, apply, commit
from tutti.scheduler.trace import line


@dataclass(frozen=True)
class Linear:
    """A profile in which everything is proportional to its size."""

    interference: float = 2.5
    layer: float = 1000.0  # us
    decode: float = 10_000.0  # us
    read_gbps: float = 10.0
    write_gbps: float = 5.0

    def layer_us(self, new_tokens: int, prefix_tokens: int) -> float:
        return self.layer

    def decode_us(self, batch: int, context_tokens: int) -> float:
        return self.decode

    def read_us(self, nbytes: int) -> float:
        return nbytes / self.read_gbps / 1000

    def write_us(self, nbytes: int) -> float:
        return nbytes / self.write_gbps / 1000


@dataclass
class Drive:
    """Feeds events to a policy and carries out its decisions, until nothing is left to happen."""

    policy: Policy
    profile: Profile
    truth: Profile
    state: State = field(default_factory=State)
    trace: list[str] = field(default_factory=list)
    launches: list[tuple[int, str, str]] = field(default_factory=list)  # (when, direction, name)
    decisions: list[tuple[State, Decision]] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._events: list[tuple[int, int, Event]] = []
        self._count = 0
        self._busy_ns = {"read": 0, "write": 0}

    def at(self, event: Event) -> None:
        """Something will happen."""
        self._count += 1
        heapq.heappush(self._events, (event.at_ns, self._count, event))

    def run(self, steps_max: int = 20_000) -> None:
        """Until all is quiet."""
        for _ in range(steps_max):
            if not self._events:
                return
            _, _, event = heapq.heappop(self._events)
            self._take(event)
        raise AssertionError(f"not quiet after {steps_max} events")

    def _take(self, event: Event) -> None:
        self.state = apply(self.state, event, self.profile)
        decision = self.policy.decide(self.state)
        self.decisions.append((self.state, decision))
        self.state = commit(self.state, decision, self.profile)
        self.trace.append(line(event, decision))
        self.dropped += decision.drops
        loads = {load.name: load for load in self.state.loads}
        writes = {write.name: write for write in self.state.writes}
        for read in decision.reads:
            nbytes = read.layers * loads[read.name].layer_nbytes
            end_ns = self._transfer("read", read.name, self.truth.read_us(nbytes))
            self.at(LayersReady(end_ns, read.name, read.first + read.layers))
        for write in decision.writes:
            nbytes = write.pages * writes[write.name].page_nbytes
            end_ns = self._transfer("write", write.name, self.truth.write_us(nbytes))
            self.at(PagesWritten(end_ns, write.name, write.first + write.pages))
        for name in decision.copy_outs:
            self.at(PagesCopied(self.state.now_ns + 100_000, name))
        if decision.wake_ns is not None:
            self.at(Tick(decision.wake_ns))

    def _transfer(self, direction: str, name: str, us: float) -> int:
        other = "write" if direction == "read" else "read"
        now_ns = self.state.now_ns
        begin_ns = max(now_ns, self._busy_ns[direction])
        factor = self.truth.interference if self._busy_ns[other] > begin_ns else 1.0
        self._busy_ns[direction] = begin_ns + round(us * 1000 * factor)
        self.launches.append((now_ns, direction, name))
        return self._busy_ns[direction]
