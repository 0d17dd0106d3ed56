"""A drive and a model on a clock of their own: the simplest that a policy can be stepped with.

Each direction is a pipe that takes one launch after another; a launch that begins while the other
direction is busy takes ``interference`` times as long.  Reads end layer by layer.
"""

from __future__ import annotations

import copy
import heapq
import math
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from typing import Any

from tutti.scheduler.estimates import Correction, Estimates
from tutti.scheduler.event import (
    Event,
    LayersReady,
    PagesCopied,
    PagesWritten,
    Tick,
    WriteStopped,
)
from tutti.scheduler.loads_and_writes import Load, Profile, Write
from tutti.scheduler.state import Decision, Policy, State
from tutti.scheduler.state_changes import Scheduler
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


def snapshot(state: State) -> State:
    """A copy that later events do not change; deepcopy takes a hundred times as long."""
    found = _copy(state)
    entries = {id(one): _copy(one) for one in (*state.loads.values(), *state.writes.values())}
    for name, value in _attributes(state).items():
        if name == "spaces":
            found.spaces = {key: _copy(one) for key, one in value.items()}
        elif isinstance(value, dict):
            setattr(found, name, {key: entries[id(one)] for key, one in value.items()})
        elif not isinstance(value, int | None):
            setattr(found, name, _copy(value))
    for name, value in _attributes(found.estimates).items():
        if isinstance(value, Correction):
            setattr(found.estimates, name, _copy(value))
    return found


def _attributes(one: Any) -> dict[str, Any]:
    """Of an object whose class may be compiled: then it has neither a dictionary nor slots."""
    names = getattr(one, "__mypyc_attrs__", None) or getattr(one, "__slots__", None) or vars(one)
    return {name: getattr(one, name) for name in names}


def _copy(one: Any) -> Any:
    """`copy.copy`, of an object whose class may be compiled too."""
    if not hasattr(one, "__mypyc_attrs__"):
        return copy.copy(one)
    if is_dataclass(one):
        return replace(one)
    found = type(one)(Linear())
    for name, value in _attributes(one).items():
        setattr(found, name, value)
    return found


def same(one: State, other: State) -> bool:
    """Whether two states are equal in everything that a decision may depend on."""
    return _plain(one) == _plain(other)


def _plain(value: object) -> object:
    if isinstance(value, State | Estimates):
        return {name: _plain(one) for name, one in _attributes(value).items() if name not in _ASKED}
    if isinstance(value, Load | Write):
        return asdict(value)
    if isinstance(value, dict):
        return [(name, _plain(one)) for name, one in value.items()]
    return value


#: What an Estimates remembers of its profile.
_ASKED = ("_profile", "_bases", "_interference")


class Watched:
    """A policy of which every decision is kept, with the state that it was made on."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.decisions: list[tuple[State, Decision]] = []

    def decide(self, state: State) -> Decision:
        before = snapshot(state)
        decision = self.policy.decide(state)
        assert same(state, before), "a policy only reads the state"
        self.decisions.append((before, decision))
        return decision


@dataclass
class Drive:
    """Feeds events to a policy and carries out its decisions, until nothing is left to happen."""

    policy: Policy
    profile: Profile
    truth: Profile
    state: State = field(init=False)
    trace: list[str] = field(default_factory=list)
    launches: list[tuple[int, str, str]] = field(default_factory=list)  # (when, direction, name)
    decisions: list[tuple[State, Decision]] = field(init=False)
    dropped: list[str] = field(default_factory=list)
    ready: list[tuple[str, int]] = field(default_factory=list)  # layers, by the end of their read

    def __post_init__(self) -> None:
        watched = Watched(self.policy)
        self._scheduler = Scheduler(watched, self.profile)
        self.state, self.decisions = self._scheduler.state, watched.decisions
        self._events: list[tuple[int, int, Event]] = []
        self._count = 0
        self._wake_ns: int | None = None  # the last decision's, as in the dispatcher
        self._busy_ns = {"read": 0, "write": 0}
        self._writing: list[tuple[str, int, int, int, int]] = []  # name, first, pages, begin, end

    def at(self, event: Event) -> None:
        """Something will happen."""
        self._count += 1
        heapq.heappush(self._events, (event.at_ns, self._count, event))

    def run(self, steps_max: int = 20_000) -> None:
        """Until all is quiet."""
        for _ in range(steps_max):
            next_ns = self._events[0][0] if self._events else math.inf
            if self._wake_ns is not None and self._wake_ns < next_ns:
                self._take(Tick(self._wake_ns))
            elif self._events:
                self._take(heapq.heappop(self._events)[2])
            else:
                return
        raise AssertionError(f"not quiet after {steps_max} events")

    def _take(self, event: Event) -> None:
        decision = self._scheduler.take(event)
        self._wake_ns = decision.wake_ns
        self.trace.append(line(event, decision))
        self.dropped += decision.drops
        for name in decision.stops:
            self._stop(name)
        for read in decision.reads:
            nbytes = self.state.loads[read.name].layer_nbytes
            for layer in range(read.first, read.first + read.count):
                end_ns = self._transfer("read", read.name, self.truth.read_us(nbytes))
                self.at(LayersReady(end_ns, read.name, layer + 1))
                self.ready.append((read.name, end_ns))
        for write in decision.writes:
            nbytes = write.count * self.state.writes[write.name].page_nbytes
            begin_ns = max(self.state.now_ns, self._busy_ns["write"])
            end_ns = self._transfer("write", write.name, self.truth.write_us(nbytes))
            self._writing.append((write.name, write.first, write.count, begin_ns, end_ns))
            self.at(PagesWritten(end_ns, write.name, write.first + write.count))
        for name in decision.copy_outs:
            self.at(PagesCopied(self.state.now_ns + 100_000, name))

    def _stop(self, name: str) -> None:
        """Pages of which the drive has not begun are given back; the page that is written ends."""
        now_ns, pages = self.state.now_ns, self.state.writes[name].issued
        for flying in [one for one in self._writing if one[0] == name and one[4] > now_ns]:
            _, first, count, begin_ns, end_ns = flying
            self._events = [
                one for one in self._events if one[2] != PagesWritten(end_ns, name, first + count)
            ]
            heapq.heapify(self._events)
            self._writing.remove(flying)
            part = (now_ns - begin_ns) / (end_ns - begin_ns)
            kept = math.ceil(count * part) if part >= 0 else 0
            pages = min(pages, first + kept)
            if kept:
                end_ns = begin_ns + math.ceil((end_ns - begin_ns) * kept / count)
                self._writing.append((name, first, kept, begin_ns, end_ns))
                self.at(PagesWritten(end_ns, name, first + kept))
        self._busy_ns["write"] = max((one[4] for one in self._writing), default=0)
        self._take(WriteStopped(now_ns, name, pages))

    def _transfer(self, direction: str, name: str, us: float) -> int:
        other = "write" if direction == "read" else "read"
        now_ns = self.state.now_ns
        begin_ns = max(now_ns, self._busy_ns[direction])
        factor = self.truth.interference if self._busy_ns[other] > begin_ns else 1.0
        self._busy_ns[direction] = begin_ns + round(us * 1000 * factor)
        self.launches.append((now_ns, direction, name))
        return self._busy_ns[direction]
