"""Pieces of read-ahead take turns: by the age of their requests, and so many at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pytest
from scheduler.drive import Drive, Linear

from tutti.bench.simulate.hardware import drive_names, machine
from tutti.bench.slack.server import LayeredServer, Noise
from tutti.bench.slack.workload import generate
from tutti.errors import ConfigError
from tutti.scheduler import room
from tutti.scheduler.baselines import ImmediatePolicy
from tutti.scheduler.event import (
    BatchJoined,
    Event,
    LayersReady,
    LoadGone,
    LoadKnown,
    PagesWritten,
    StepBegan,
    Tick,
    WriteKnown,
)
from tutti.scheduler.loads_and_writes import LoadKind, Phase, Profile
from tutti.scheduler.policy import Limits, SlackPolicy
from tutti.scheduler.state import PIECES_MAX, Decision, Policy, State
from tutti.scheduler.state_changes import Scheduler
from tutti.scheduler.trace import line, replay

MS = 1_000_000
MB = 1_000_000
LAYERS = 4
POLICIES: list[Callable[[Limits], Policy]] = [SlackPolicy, ImmediatePolicy]


class Asked:
    """Passes decisions on, and counts how often it is asked; it has no limits of its own."""

    def __init__(self, policy: Policy) -> None:
        self._policy, self.count = policy, 0

    def decide(self, state: State) -> Decision:
        self.count += 1
        return self._policy.decide(state)


def piece(name: str, asked_ms: int, at_ns: int = 100 * MS, *, alone: bool = False) -> LoadKnown:
    """A piece of a request that is known since ``asked_ms``; it is read in 1.6 ms."""
    return LoadKnown(
        at_ns,
        name,
        LAYERS,
        4 * MB,
        0,
        0,
        unit_layers=LAYERS,
        batch=name,
        kind=LoadKind.READ_AHEAD,
        asked_ns=asked_ms * MS,
        alone=alone,
    )


def reads(scheduler: Scheduler, *events: Event) -> list[str]:
    """Names that are read after these events."""
    return [issue.name for event in events for issue in scheduler.take(event).reads]


def arrived(name: str, at_ns: int = 101 * MS) -> LayersReady:
    return LayersReady(at_ns, name, LAYERS)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_request_that_asked_first_is_read_first(policy: Callable[[Limits], Policy]) -> None:
    scheduler = Scheduler(policy(Limits(pieces_max=1)), Linear())
    assert reads(scheduler, piece("c1", 30), piece("b1", 20), piece("a1", 10)) == ["c1"]
    assert reads(scheduler, arrived("c1")) == ["a1"]
    assert reads(scheduler, piece("a2", 10), arrived("a1")) == ["a2"], "before the first of b"
    assert reads(scheduler, piece("c2", 30), arrived("a2")) == ["b1"]
    assert reads(scheduler, arrived("b1")) == ["c2"]
    assert reads(scheduler, arrived("c2")) == []
    assert not scheduler.state.turns and not scheduler.state.offered


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("most", [1, 2, 3])
def test_so_many_pieces_are_under_way(policy: Callable[[Limits], Policy], most: int) -> None:
    scheduler = Scheduler(policy(Limits(pieces_max=most)), Linear())
    names = [f"{number}" for number in range(6)]
    begun = reads(scheduler, *(piece(name, 10) for name in names))
    assert begun == names[:most]
    for number, name in enumerate(names):
        begun += reads(scheduler, arrived(name))
        assert begun == names[: number + 1 + most]


def test_a_piece_that_is_better_read_alone_has_no_other_beside_it() -> None:
    scheduler = Scheduler(SlackPolicy(Limits(pieces_max=2)), Linear())
    assert reads(scheduler, piece("a", 10), piece("b", 10, alone=True), piece("c", 10)) == ["a"]
    assert reads(scheduler, arrived("a"), Tick(101 * MS)) == ["b"], "c is not beside it"
    assert reads(scheduler, arrived("b")) == ["c"]
    assert reads(scheduler, piece("d", 10)) == ["d"]


@pytest.mark.parametrize("was_issued", [False, True])
def test_a_piece_that_is_withdrawn_leaves_its_turn_to_the_next(was_issued: bool) -> None:
    scheduler = Scheduler(SlackPolicy(Limits(pieces_max=1)), Linear())
    assert reads(scheduler, piece("a", 10), piece("b", 20), piece("c", 30)) == ["a"]
    gone = LoadGone(101 * MS, "a" if was_issued else "b")
    assert reads(scheduler, gone) == (["b"] if was_issued else [])
    assert reads(scheduler, arrived("b" if was_issued else "a", 103 * MS)) == ["c"]
    assert not scheduler.state.offered
    assert scheduler.state.totals.ignored == 0


def test_a_policy_without_limits_has_the_default() -> None:
    scheduler = Scheduler(Asked(ImmediatePolicy()), Linear())
    assert len(reads(scheduler, *(piece(f"{number}", 10) for number in range(9)))) == PIECES_MAX
    with pytest.raises(ConfigError, match="pieces_max"):
        Limits(pieces_max=0)


def test_a_long_wait_for_the_turn_takes_nothing_from_the_running_step() -> None:
    """The piece was offered long ago.  Its patience begins with its turn."""
    scheduler = Scheduler(SlackPolicy(Limits(pieces_max=1)), Linear())
    late_ns = 100 * MS + 60_000 * MS
    assert reads(scheduler, piece("a", 10), piece("b", 20)) == ["a"]
    load = LoadKnown(late_ns, "load", 64, 20 * MB, 64, 64, batch="batch")
    step = StepBegan(late_ns, Phase.PREFILL, 64, 64, 64, ("batch",))
    assert set(reads(scheduler, step, load, arrived("a", late_ns))) == {"load"}
    assert "b" in scheduler.state.unread, "it has its turn"
    for layers in range(1, 40):
        known = scheduler.state.loads["load"]
        late_ns += MS
        if known.ready < layers <= known.issued:
            assert "b" not in reads(scheduler, LayersReady(late_ns, "load", layers))
    assert scheduler.state.loads["load"].ready > 30


def test_a_piece_costs_one_decision_while_writes_wait() -> None:
    """Its announcement and its end change nothing that can be issued."""
    asked = Asked(SlackPolicy())
    scheduler, count = Scheduler(asked, Linear(interference=1.5)), 20
    events: list[Event] = [StepBegan(1, Phase.PREFILL, 64, 64, 64, ("none",))]
    events += [WriteKnown(1, f"w{number}", 64, 4 * MB) for number in range(4)]
    for event in events:
        scheduler.take(event)
    begun = [PagesWritten(2, one.name, one.issued) for one in scheduler.state.writes.values()]
    offered = [piece(f"{number}", 10) for number in range(PIECES_MAX + 1)]
    assert reads(scheduler, *offered, begun[0]) == ["0", "1"]
    before, read = asked.count, list[str]()
    for number in range(count):
        at_ns = (101 + number) * MS
        read += reads(scheduler, arrived(f"{number}", at_ns), piece(f"{number + 3}", 10, at_ns))
    for number in range(count):
        scheduler.take(LoadGone(200 * MS, f"{number}"))
    assert read == [f"{number + 2}" for number in range(count)]
    assert scheduler.state.unwritten and asked.count - before == count


def test_what_changes_nothing_keeps_the_time_of_the_next_decision() -> None:
    """Else a write that may go at this time would wait for another event."""
    asked = Asked(SlackPolicy())
    scheduler = Scheduler(asked, Linear(interference=1.5))
    scheduler.take(StepBegan(0, Phase.PREFILL, 64, 64, 64, ("load",)))
    scheduler.take(LoadKnown(0, "load", 64, 40 * MB, 64, 64))
    scheduler.take(WriteKnown(1, "w", 64, 4 * MB))
    first, count = scheduler.take(piece("a", 10, 2)), asked.count
    again = scheduler.take(piece("b", 10, 3))
    assert asked.count == count and again == Decision(wake_ns=first.wake_ns)
    assert first.wake_ns is not None
    scheduler.take(piece("c", 10, first.wake_ns))
    assert asked.count == count + 1, "the time has come"


def test_the_turns_of_a_trace_are_those_of_its_replay() -> None:
    drive = Drive(SlackPolicy(Limits(pieces_max=2)), Linear(), Linear())
    for number in range(12):
        drive.at(piece(f"{number}", 1 + number % 3, number * MS // 4))
        drive.at(WriteKnown(number * MS, f"w{number}", 8, 4 * MB))
    drive.at(BatchJoined(2 * MS, "3", "batch"))
    drive.at(StepBegan(3 * MS, Phase.PREFILL, 8, 64, 64, ("batch",)))
    drive.run()
    assert not drive.state.offered and not drive.state.turns and not drive.state.unread
    assert list(replay(drive.trace, SlackPolicy(Limits(pieces_max=2)), Linear())) == drive.trace
    others = [one.replace('"asked_ns":3000000', '"asked_ns":1') for one in drive.trace]
    again = list(replay(others, SlackPolicy(Limits(pieces_max=2)), Linear()))
    assert again != others, "the age of the requests decided"


class Recorded:
    """A scheduler whose events and decisions are kept."""

    def __init__(self, policy: Policy, profile: Profile) -> None:
        self._scheduler = Scheduler(policy, profile)
        self.policy, self.state = policy, self._scheduler.state
        self.lines: list[str] = []

    def take(self, event: Event) -> Decision:
        decision = self._scheduler.take(event)
        self.lines.append(line(event, decision))
        return decision


def simulated(limits: Limits, seed: int) -> list[str]:
    """Every event and decision of a simulated server, which announces each load as a whole."""
    truth, policy = machine(drive_names()[0], "H100"), SlackPolicy(limits)
    requests = generate("agents", truth, 20, seed)
    server = LayeredServer(truth, requests, policy, truth, noise=Noise(), seed=seed)
    recorded = Recorded(policy, truth)
    server.scheduler = cast(Scheduler, recorded)
    server.run()
    return recorded.lines


def test_whole_loads_take_no_turns(seed: int) -> None:
    """Bit for bit the same decisions, however many pieces may be under way."""
    one = simulated(Limits(pieces_max=1), seed)
    assert '"kind":"read_ahead"' in "".join(one) and one == simulated(Limits(pieces_max=9), seed)


def test_a_piece_that_is_gone_as_it_arrives_lets_a_write_go() -> None:
    """Reads and writes take turns, so the write waited for the piece in flight."""
    scheduler = Scheduler(SlackPolicy(), Linear(interference=4.0))
    assert reads(scheduler, piece("a", 10)) == ["a"]
    write = WriteKnown(100 * MS, "w", pages=1, page_nbytes=4 * MB)
    assert not scheduler.take(write).writes
    assert scheduler.take(LoadGone(101 * MS, "a", layers=LAYERS)).writes


def test_pieces_that_wait_for_their_turn_hide_no_prefill() -> None:
    """Room is kept for the puts of the next eight prefills; a piece is not one."""

    others = [piece(f"p{i}", 10 + i, 1) for i in range(12)]
    load = LoadKnown(2, "l", 32, MB, 4096, 1024)
    scheduler = Scheduler(SlackPolicy(), Linear())
    scheduler.take(StepBegan(0, Phase.PREFILL, 32, 1024, 0))
    scheduler.take(WriteKnown(0, "w", pages=32, page_nbytes=4 * MB))
    for event in (*others, load):
        scheduler.take(event)
    state = scheduler.state
    state.prefill_tokens = 1024
    space = state.spaces[""]
    expected = [pages for pages, _ in room._expected(state, space, 0)]
    assert len(state.offered) > 8
    assert any(expected[1:]), "the put of the prefill that has its load announced"
