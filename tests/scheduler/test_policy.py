from __future__ import annotations

from scheduler.drive import Drive, Linear

from tutti.scheduler.event import LoadKnown, StepBegan, StepEnded, WriteKnown
from tutti.scheduler.policy import FixedWindow, ImmediatePolicy, Limits, SlackPolicy
from tutti.scheduler.request import Phase
from tutti.scheduler.trace import replay

MS = 1_000_000
MB = 1_000_000


def mixed(drive: Drive) -> None:
    """A write is under way when a load comes whose step begins at once."""
    drive.at(WriteKnown(0, "w", pages=40, page_nbytes=4 * MB))  # 32 ms
    drive.at(LoadKnown(MS, "a", layers=8, layer_nbytes=10 * MB, tokens=512, prefix_tokens=8192))
    drive.at(
        StepBegan(2 * MS, Phase.PREFILL, layers=8, tokens=512, context_tokens=8192, loads=("a",))
    )
    drive.at(StepEnded(60 * MS))


def drive(policy: type = SlackPolicy, truth: Linear | None = None, **limits: float) -> Drive:
    truth = truth or Linear()
    return Drive(policy(truth, Limits(**limits)), truth, truth)


def test_reads_and_writes_take_turns_where_they_hurt_each_other() -> None:
    one = drive()
    mixed(one)
    one.run()
    assert one.state.totals.written_pages == 40
    for state, decision in one.decisions:
        assert not (decision.reads and (state.writes_fly or decision.writes))
        assert not (decision.writes and state.reads_fly)


def test_reads_and_writes_go_together_where_they_do_not() -> None:
    one = drive(truth=Linear(interference=1.0))
    mixed(one)
    one.run()
    assert any(decision.writes and state.reads_fly for state, decision in one.decisions)


def test_the_slack_of_a_load_goes_to_writes() -> None:
    # A layer computes for 2 ms and loads in 1: half of the time is slack.
    one = drive(truth=Linear(layer=2000.0))
    mixed(one)
    one.run()
    assert one.state.totals.slack_ns > 0


def test_immediate_launches_all_at_once() -> None:
    one = drive(ImmediatePolicy)
    mixed(one)
    one.run()
    assert [name for _, _, name in one.launches] == ["w", "a"]


def test_fixed_writes_one_window_at_a_time() -> None:
    truth = Linear()
    one = Drive(FixedWindow(truth, window_us=1000.0, bytes_per_s=8e9), truth, truth)
    mixed(one)
    one.run()
    writes = [when for when, direction, _ in one.launches if direction == "write"]
    assert writes == [MS * n for n in range(20)]


def test_a_trace_replays_to_the_same_bytes() -> None:
    one = drive()
    mixed(one)
    one.run()
    assert list(replay(one.trace, SlackPolicy(one.profile, Limits()), one.profile)) == one.trace
