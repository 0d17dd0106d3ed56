"""The loop around the policy: threads, clocks, launches that fail, profiles of no use."""

from __future__ import annotations

import math
import threading

import pytest
from manual_clock import ManualClock
from scheduler.drive import Linear
from waiting import wait_until

from tutti.base.callbacks import Guard
from tutti.scheduler.baselines import ImmediatePolicy
from tutti.scheduler.dispatcher import Dispatcher, Schedule
from tutti.scheduler.event import (
    Event,
    LayersReady,
    LoadGone,
    LoadKnown,
    PagesCopied,
    PagesWritten,
    StepBegan,
    StepEnded,
    WriteKnown,
)
from tutti.scheduler.loads_and_writes import Phase
from tutti.scheduler.policy import Limits, SlackPolicy
from tutti.scheduler.state import Decision, Issue, State
from tutti.scheduler.trace import line, replay

MB = 1_000_000
PROFILE = Linear()


class Instant:
    """Every launch ends at once."""

    def __init__(self) -> None:
        self.dispatcher: Dispatcher | None = None
        self.reads: list[Issue] = []
        self.writes: list[Issue] = []
        self.copied: list[str] = []
        self.dropped: list[str] = []
        self.fails = False

    def _post(self, event: Event) -> None:
        assert self.dispatcher is not None
        self.dispatcher.post(event)

    def read(self, launch: Issue) -> None:
        if self.fails:
            raise OSError("broken")
        self.reads.append(launch)
        assert self.dispatcher is not None
        now_ns = self.dispatcher.now_ns()
        self._post(LayersReady(now_ns, launch.name, launch.first + launch.count))

    def write(self, launch: Issue) -> None:
        if self.fails:
            raise OSError("broken")
        self.writes.append(launch)
        assert self.dispatcher is not None
        now_ns = self.dispatcher.now_ns()
        self._post(PagesWritten(now_ns, launch.name, launch.first + launch.count))

    def stop_write(self, name: str) -> None:
        raise AssertionError("nothing here can stop")

    def copy_out(self, name: str) -> None:
        self.copied.append(name)
        self._post(PagesCopied(0, name))

    def drop(self, name: str) -> None:
        self.dropped.append(name)


def dispatcher_of(
    profile: Linear = PROFILE, limits: Limits | None = None, **more: object
) -> tuple[Dispatcher, Instant]:
    launcher = Instant()
    limits = limits or Limits()
    policy = SlackPolicy(limits)
    dispatcher = Dispatcher(policy, profile, launcher, limits=limits, **more)  # type: ignore[arg-type]
    launcher.dispatcher = dispatcher
    return dispatcher, launcher


def test_everything_posted_is_launched_within_the_call() -> None:
    dispatcher, launcher = dispatcher_of(clock=ManualClock(5))
    dispatcher.post(LoadKnown(5, "a", layers=4, layer_nbytes=MB, tokens=1, prefix_tokens=1))
    dispatcher.post(WriteKnown(5, "w", pages=8, page_nbytes=MB))
    dispatcher.run_due()
    assert sum(launch.count for launch in launcher.reads) == 4
    assert sum(launch.count for launch in launcher.writes) == 8
    assert dispatcher.counters()["written_pages"] == 8
    assert dispatcher.counters()["read_nbytes"] == 4 * MB


def test_a_second_burst_goes_beside_the_first() -> None:
    dispatcher, launcher = dispatcher_of(clock=ManualClock(0))
    launcher.write = launcher.writes.append  # type: ignore[method-assign]
    dispatcher.post(WriteKnown(0, "w", pages=4_000, page_nbytes=MB))
    dispatcher.run_due()
    assert len(launcher.writes) == 2, "the device is not idle when the first one ends"
    assert launcher.writes[1].first == launcher.writes[0].count


def test_a_recorded_run_replays() -> None:
    lines: list[str] = []

    def record(event: Event, decision: Decision) -> None:
        lines.append(line(event, decision))

    clock = ManualClock(0)
    dispatcher, _ = dispatcher_of(clock=clock, record=record)
    for number in range(5):
        dispatcher.post(WriteKnown(clock.now_ns(), f"w{number}", pages=9, page_nbytes=MB))
        clock.advance(0.001)
        dispatcher.run_due()
    assert list(replay(lines, SlackPolicy(Limits()), PROFILE)) == lines


def test_launches_that_fail_are_gone_and_the_loop_lives() -> None:
    dispatcher, launcher = dispatcher_of(clock=ManualClock(0))
    launcher.fails = True
    dispatcher.post(WriteKnown(0, "w", pages=3, page_nbytes=MB))
    dispatcher.post(LoadKnown(0, "a", layers=4, layer_nbytes=MB, tokens=1, prefix_tokens=1))
    dispatcher.run_due()
    assert dispatcher.counters()["failed_pages"] == 3
    assert not dispatcher.state.loads
    launcher.fails = False
    dispatcher.post(WriteKnown(0, "v", pages=2, page_nbytes=MB))
    dispatcher.run_due()
    assert dispatcher.counters()["written_pages"] == 2


@pytest.mark.parametrize("us", [-1.0, math.nan, math.inf])
def test_a_profile_of_no_use_ends_slack_not_service(us: float) -> None:
    dispatcher, launcher = dispatcher_of(Linear(layer=us, decode=us, interference=us))
    dispatcher.post(StepBegan(0, Phase.PREFILL, layers=4, tokens=1))
    dispatcher.post(LoadKnown(0, "a", layers=4, layer_nbytes=MB, tokens=1, prefix_tokens=1))
    dispatcher.post(WriteKnown(0, "w", pages=3, page_nbytes=MB))
    dispatcher.run_due()
    assert launcher.reads == [Issue("a", 0, 4)]
    assert launcher.writes == [Issue("w", 0, 3)]


class Broken:
    def decide(self, state: State) -> Decision:
        raise ZeroDivisionError


def test_a_policy_that_breaks_ends_slack_not_service() -> None:
    launcher = Instant()
    launcher.dispatcher = Dispatcher(Broken(), PROFILE, launcher, clock=ManualClock(0))
    launcher.dispatcher.post(WriteKnown(0, "w", pages=3, page_nbytes=MB))
    launcher.dispatcher.post("nonsense")  # type: ignore[arg-type]
    launcher.dispatcher.post(WriteKnown(0, "v", pages=2, page_nbytes=MB))
    launcher.dispatcher.run_due()
    assert [launch.name for launch in launcher.writes] == ["w", "v"]


def test_a_trace_that_cannot_be_recorded_ends() -> None:
    def record(event: Event, decision: Decision) -> None:
        raise OSError("disk full")

    dispatcher, launcher = dispatcher_of(clock=ManualClock(0), record=record)
    dispatcher.post(WriteKnown(0, "w", pages=3, page_nbytes=MB))
    dispatcher.run_due()
    assert sum(launch.count for launch in launcher.writes) == 3


def test_a_clock_that_jumps_back() -> None:
    dispatcher, launcher = dispatcher_of(clock=ManualClock(10**12))
    dispatcher.run_due()
    dispatcher.post(StepBegan(5 * 10**11, Phase.DECODE, tokens=1, context_tokens=1))
    dispatcher.post(StepEnded(1))
    dispatcher.post(WriteKnown(7, "w", pages=3, page_nbytes=MB))
    dispatcher.run_due()
    assert dispatcher.state.now_ns == 10**12
    assert dispatcher.state.estimates.decode.factor == 1.0
    assert launcher.writes


def test_a_clock_that_jumps_ahead_teaches_nothing() -> None:
    dispatcher, _ = dispatcher_of(clock=ManualClock(0))
    dispatcher.post(StepBegan(0, Phase.DECODE, tokens=1, context_tokens=1))
    dispatcher.post(StepEnded(10**15))
    dispatcher.run_due()
    assert dispatcher.state.estimates.decode.factor == 1.0


def test_what_does_not_fit_is_copied_out_then_dropped() -> None:
    limits = Limits(locked_pages=0, staged_pages=4)
    dispatcher, launcher = dispatcher_of(limits=limits, clock=ManualClock(0))
    dispatcher.post(WriteKnown(0, "small", pages=4, page_nbytes=MB))
    dispatcher.post(WriteKnown(0, "large", pages=5, page_nbytes=MB))
    dispatcher.run_due()
    assert (launcher.copied, launcher.dropped) == (["small"], ["large"])
    assert dispatcher.counters()["written_pages"] == 4
    assert dispatcher.counters()["dropped_pages"] == 5
    assert not dispatcher.under_way, "or no later transfer would start at once"


def test_a_transfer_that_left_or_ended_twice_is_no_longer_under_way() -> None:
    dispatcher, _ = dispatcher_of(clock=ManualClock(0))
    prefix = dispatcher.attach(Instant())
    load, write = LoadKnown(0, f"{prefix}1", 1, MB, 0, 0), WriteKnown(0, f"{prefix}2", 2, MB)
    assert dispatcher.alone(load)
    assert not dispatcher.alone(write)
    assert dispatcher.alone(write, over=1)
    for event in (LoadGone(1, load.name), LoadGone(1, load.name), PagesWritten(1, write.name, 1)):
        dispatcher.add(event)
    assert dispatcher.under_way == {write.name: 2}
    dispatcher.detach(prefix)
    dispatcher.run_due()
    state = dispatcher.state
    assert not (dispatcher.under_way or state.loads or state.writes)


def test_many_threads_post() -> None:
    dispatcher, launcher = dispatcher_of()
    dispatcher.start()

    def work(worker: int) -> None:
        for number in range(50):
            name = f"{worker}-{number}"
            dispatcher.post(WriteKnown(dispatcher.now_ns(), name, pages=2, page_nbytes=1000))

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    wait_until(lambda: dispatcher.state.totals.written_pages >= 400)
    assert dispatcher.stop()
    assert sum(launch.count for launch in launcher.writes) == 400


def test_stores_on_one_medium_share_a_queue() -> None:
    first, second = (Schedule(PROFILE, media=("a",), source=source) for source in ("a", "b"))
    guard = Guard()
    one, other = Dispatcher.join(first, guard), Dispatcher.join(second, guard)
    elsewhere, alone = Dispatcher.join(Schedule(PROFILE, media=("b",)), guard), Schedule(PROFILE)
    mine = Dispatcher.join(alone, guard)
    assert one is other
    assert len({id(found) for found in (one, elsewhere, mine)}) == 3
    assert Dispatcher.join(alone, guard) is mine, "one Schedule, one queue"
    for dispatcher in (one, elsewhere, mine, mine):
        dispatcher.leave()
    assert Dispatcher.join(first, guard) is one, "the last one ends it"
    one.leave()
    one.leave()
    fresh = Dispatcher.join(first, guard)
    assert fresh is not one
    fresh.leave()


def test_stores_with_a_drive_in_common_share_a_queue() -> None:
    guard = Guard()

    def join(*media: str) -> Dispatcher:
        return Dispatcher.join(Schedule(PROFILE, media=media), guard)

    one, both, other, elsewhere = join("a"), join("a", "b"), join("b"), join("c")
    assert one is both is other, "through the store that is on both"
    assert elsewhere is not one
    assert join("b", "c") is one, "the older; what began apart stays apart"
    for dispatcher in (one, one, one, elsewhere):
        dispatcher.leave()
    assert join("c") is one, "while one user is left"
    one.leave()
    one.leave()
    fresh = join("c")
    assert fresh is not one
    fresh.leave()


def test_what_has_left_is_asked_for_nothing() -> None:
    dispatcher, nameless = dispatcher_of(clock=ManualClock(0))
    stays, leaves = Instant(), Instant()
    stays.dispatcher = leaves.dispatcher = dispatcher
    staying, leaving = dispatcher.attach(stays), dispatcher.attach(leaves)
    leaves.write = leaves.writes.append  # type: ignore[method-assign]
    dispatcher.post(WriteKnown(0, f"{leaving}1", pages=40, page_nbytes=900 * MB))
    dispatcher.run_due()
    assert leaves.writes, "its writes never end"
    launched = len(leaves.writes)
    dispatcher.detach(leaving)
    dispatcher.post(WriteKnown(0, f"{staying}1", pages=4, page_nbytes=MB))
    dispatcher.run_due()
    assert sum(launch.count for launch in stays.writes) == 4
    assert len(leaves.writes) == launched and not nameless.writes
    assert not dispatcher.state.writes
    dispatcher.post(WriteKnown(0, f"{leaving}2", pages=4, page_nbytes=MB))
    dispatcher.post(LoadKnown(0, f"{leaving}3", 4, MB, tokens=1, prefix_tokens=1))
    dispatcher.run_due()
    assert not dispatcher.state.writes and not dispatcher.state.loads, "announced too late"


def test_a_transfer_whose_announcement_is_being_taken_is_not_overlooked() -> None:
    taking, goes_on = threading.Event(), threading.Event()

    class Slow(Linear):
        def read_us(self, nbytes: int) -> float:
            if not taking.is_set():
                taking.set()
                goes_on.wait(10)
            return super().read_us(nbytes)

    dispatcher = Dispatcher(SlackPolicy(), Slow())
    put = WriteKnown(1, "put", pages=1, page_nbytes=4096)
    dispatcher.start()
    try:
        dispatcher.post(LoadKnown(0, "load", 1, 4096, tokens=1, prefix_tokens=1))
        assert taking.wait(10)
        assert not dispatcher.state.loads, "it is in neither the queue nor the state"
        assert not dispatcher.alone(put)
    finally:
        goes_on.set()
        dispatcher.stop()


def test_a_policy_without_goes_at_once_decides_on_every_transfer() -> None:
    dispatcher = Dispatcher(ImmediatePolicy(), PROFILE, clock=ManualClock(0))
    assert not dispatcher.alone(WriteKnown(0, "put", pages=2, page_nbytes=4096))
    assert not dispatcher.under_way


def test_transfers_that_ended_before_a_decision_are_not_under_way() -> None:
    dispatcher, _ = dispatcher_of(clock=ManualClock(0))
    for number in range(3):
        put, load = f"put {number}", f"load {number}"
        assert dispatcher.alone(WriteKnown(0, put, pages=2, page_nbytes=4096))
        assert not dispatcher.alone(LoadKnown(0, load, 1, 4096, tokens=0, prefix_tokens=0))
        dispatcher.add(PagesWritten(0, put, 1))
        assert not dispatcher.alone(LoadKnown(0, load, 1, 4096, tokens=0, prefix_tokens=0))
        dispatcher.add(PagesWritten(0, put, 2))
        assert dispatcher.alone(LoadKnown(0, load, 1, 4096, tokens=0, prefix_tokens=0))
        dispatcher.add(LoadGone(0, load, 1))
    assert not dispatcher.state.totals.written_pages, "no decision was needed"
    dispatcher.run_due()
    assert dispatcher.state.totals.written_pages == 6
    assert not (dispatcher.state.writes or dispatcher.state.loads)
