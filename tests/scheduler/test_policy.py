from __future__ import annotations

from dataclasses import replace

import pytest
from scheduler.drive import Drive, Linear

from tutti.bench.slack.fixed_window import FixedWindow
from tutti.errors import ConfigError
from tutti.scheduler.baselines import ImmediatePolicy
from tutti.scheduler.estimates import Correction
from tutti.scheduler.event import (
    LayerBegan,
    LayersReady,
    LoadKnown,
    PagesWritten,
    StepBegan,
    StepEnded,
    Tick,
    WriteKnown,
    WriteStopped,
)
from tutti.scheduler.loads_and_writes import LoadKind, Phase
from tutti.scheduler.policy import Limits, SlackPolicy
from tutti.scheduler.state import Decision, Issue, State
from tutti.scheduler.state_changes import Scheduler

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


def test_a_write_that_nothing_is_in_the_way_of_is_one_issue_and_stops_for_a_load() -> None:
    alone = drive()
    alone.at(WriteKnown(0, "w", pages=40, page_nbytes=4 * MB, can_stop=True))
    alone.run()
    assert [one.writes for _, one in alone.decisions if one.writes] == [(Issue("w", 0, 40),)]
    one = drive()
    one.at(WriteKnown(0, "w", pages=40, page_nbytes=4 * MB, can_stop=True))  # 32 ms
    one.at(LoadKnown(MS, "a", layers=8, layer_nbytes=10 * MB, tokens=512, prefix_tokens=8192))
    one.run()
    stop = next(at for at, (_, decision) in enumerate(one.decisions) if decision.stops)
    assert one.decisions[stop][1].stops == ("w",)
    assert one.ready[0][1] <= 4 * MS  # behind the page that was being written
    assert one.state.totals.written_pages == 40
    assert not one.state.writes
    assert not one.state.waiting_pages


@pytest.mark.parametrize(("layer_us", "ahead"), [(100.0, 64), (5000.0, 32)])
def test_a_load_that_will_be_late_anyway_is_read_further_ahead(layer_us: float, ahead: int) -> None:
    scheduler = Scheduler(SlackPolicy(), Linear(layer=layer_us, read_gbps=10.0))
    load = LoadKnown(0, "a", layers=128, layer_nbytes=10 * MB, tokens=1, prefix_tokens=1)
    assert scheduler.take(load).reads == (Issue("a", 0, 16),)  # nothing else: idle_burst_us
    scheduler.take(StepBegan(0, Phase.PREFILL, 128, 1, 1, ("a",)))
    assert scheduler.state.loads["a"].issued == ahead


@pytest.mark.parametrize(
    ("layer_us", "ahead"),
    [
        (100.0, 64),  # late to its last layer: until late_window_us
        (1050.0, 64),  # slack comes later than that
        (1100.0, 51),  # each layer that is read gives 0.1 ms of slack; a write needs 4 ms
        (5000.0, 32),  # it has slack at once: what was issued before
    ],
)
def test_a_load_is_read_ahead_until_a_write_fits(layer_us: float, ahead: int) -> None:
    scheduler = Scheduler(SlackPolicy(), Linear(layer=layer_us, read_gbps=10.0))
    scheduler.take(StepBegan(0, Phase.PREFILL, 128, 1, 1, ("a",)))
    load = LoadKnown(0, "a", layers=128, layer_nbytes=10 * MB, tokens=1, prefix_tokens=1)
    scheduler.take(load)
    scheduler.take(WriteKnown(0, "w", pages=1, page_nbytes=5 * MB))
    assert scheduler.state.loads["a"].issued == ahead


def counts_of(one: Drive, name: str) -> list[int]:
    """Layers of each issue of a load."""
    issues = [issue for _, decision in one.decisions for issue in decision.reads]
    return [issue.count for issue in issues if issue.name == name]


def test_a_load_whose_issue_is_waited_for_is_cut_only_while_there_is_another_transfer() -> None:
    """A thread of the model waits until a layer is issued: windows of a load that competes with
    nothing would only delay it.
    """
    load = LoadKnown(MS, "a", layers=256, layer_nbytes=10 * MB, tokens=1, prefix_tokens=1)
    staged = LoadKnown(0, "s", 1, MB, 0, 0, kind=LoadKind.READ_AHEAD)  # arrives, and stays known
    for known, others, is_cut in [
        (load, [], True),
        (replace(load, blocks=True), [], False),
        (replace(load, blocks=True), [staged], False),
        (replace(load, blocks=True), [replace(load, at_ns=0, name="b")], True),
    ]:
        one = drive()
        for event in (*others, known):
            one.at(event)
        one.run()
        assert (len(counts_of(one, "a")) > 1) == is_cut
        assert sum(counts_of(one, "a")) == 256
    one = drive()
    one.at(WriteKnown(0, "w", pages=200, page_nbytes=4 * MB))
    one.at(replace(load, blocks=True))
    one.run()
    first, *_, last = counts_of(one, "a")
    last_write = max(at for at, direction, _ in one.launches if direction == "write")
    alone = [decision.reads for state, decision in one.decisions if not state.writes]
    assert first < 256
    assert [(issue.count,) for issue in alone[0]] == [(last,)], "the rest, once nothing else waits"
    assert last_write < max(at for at, direction, _ in one.launches if direction == "read")


def test_a_layer_that_began_is_no_decision_while_a_transfer_is_in_flight() -> None:
    asked: list[State] = []

    policy = SlackPolicy()

    class Asked:
        def decide(self, state: State) -> Decision:
            asked.append(state)
            return policy.decide(state)

    scheduler = Scheduler(Asked(), Linear())
    load = LoadKnown(0, "a", layers=128, layer_nbytes=10 * MB, tokens=1, prefix_tokens=1)
    scheduler.take(StepBegan(0, Phase.PREFILL, 128, 1, 1, ("a",)))
    scheduler.take(load)
    scheduler.take(LayersReady(MS, "a", 1))
    before = len(asked)
    assert before and scheduler.state.reading.flying
    scheduler.take(LayerBegan(MS, 0))
    scheduler.take(StepEnded(2 * MS))
    assert len(asked) == before
    scheduler.take(Tick(3 * MS))
    assert len(asked) == before + 1


def test_what_was_begun_once_is_neither_copied_nor_dropped() -> None:
    scheduler = Scheduler(SlackPolicy(Limits(locked_pages=40, staged_pages=0)), Linear())
    scheduler.take(WriteKnown(0, "w", pages=40, page_nbytes=4 * MB, can_stop=True))
    load = LoadKnown(MS, "a", layers=8, layer_nbytes=10 * MB, tokens=512, prefix_tokens=8192)
    assert scheduler.take(load).stops == ("w",)
    scheduler.take(WriteStopped(MS, "w", 0))
    more = scheduler.take(WriteKnown(2 * MS, "v", pages=1, page_nbytes=4 * MB))
    assert more.drops == ("v",)


@pytest.mark.parametrize("written", [40, 25])
def test_a_write_that_stopped_may_have_been_under_way(written: int) -> None:
    scheduler = Scheduler(SlackPolicy(Limits(locked_pages=40, staged_pages=0)), Linear())
    state = scheduler.state
    scheduler.take(WriteKnown(0, "w", pages=40, page_nbytes=4 * MB, can_stop=True))
    load = LoadKnown(MS, "a", layers=8, layer_nbytes=10 * MB, tokens=512, prefix_tokens=8192)
    assert scheduler.take(load).stops == ("w",)
    scheduler.take(WriteStopped(MS, "w", 20))
    decision = scheduler.take(PagesWritten(2 * MS, "w", written))
    issued = sum(issue.count for issue in decision.writes)
    assert [issue.first for issue in decision.writes] == [written] * bool(issued)
    left = 40 - written
    assert (state.writing.flying, state.waiting_pages) == (issued, left - issued)
    assert (state.totals.written_pages, state.totals.ignored) == (written, 0)
    assert ("w" in state.writes) == (left > 0)


@pytest.mark.parametrize("factor", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("layers", [1, 16])
def test_what_goes_at_once_is_what_the_policy_issues_whole(layers: int, factor: float) -> None:
    found = set()
    for nbytes in (4096, MB, 8 * MB, 20 * MB, 80 * MB, 400 * MB):
        for known in (
            LoadKnown(MS, "a", layers, nbytes // layers, 0, 0),
            WriteKnown(MS, "a", layers, nbytes // layers),
        ):
            asked = Scheduler(SlackPolicy(), Linear())
            for correction in (asked.state.estimates.read, asked.state.estimates.write):
                correction.factor = factor
            goes = SlackPolicy().goes_at_once(asked.state, known)
            decision = asked.take(known)
            issued = sum(one.count for one in (*decision.reads, *decision.writes))
            assert (issued == layers) or not goes
            found.add(goes)
            told = Scheduler(SlackPolicy(), Linear())
            assert not told.take(replace(known, at_once=True)).reads
            if goes:
                assert told.state.reading == asked.state.reading
                assert told.state.writing == asked.state.writing
                assert told.state.waits == asked.state.waits is False
    assert found == {True, False}


def drive(policy: type = SlackPolicy, truth: Linear | None = None, **limits: float) -> Drive:
    truth = truth or Linear()
    limits = {"probe_us": 1e9, **limits}
    return Drive(policy(Limits(**limits)), truth, truth)


def test_reads_and_writes_take_turns_where_they_hurt_each_other() -> None:
    one = drive()
    mixed(one)
    one.run()
    assert one.state.totals.written_pages == 40
    for state, decision in one.decisions:
        assert not (decision.reads and (state.writing.flying or decision.writes))
        assert not (decision.writes and state.reading.flying)
        assert not (decision.reads and decision.wake_ns), "the end of the reads decides"


def test_reads_and_writes_go_together_where_they_do_not() -> None:
    one = drive(truth=Linear(interference=1.0))
    mixed(one)
    one.run()
    assert any(decision.reads and state.writing.flying for state, decision in one.decisions)


def test_the_slack_of_a_load_goes_to_writes() -> None:
    # A layer computes for 2 ms and loads in 1: half of the time is slack.
    one = drive(truth=Linear(layer=2000.0), write_burst_us=1000.0)
    one.at(LoadKnown(0, "a", layers=48, layer_nbytes=10 * MB, tokens=1, prefix_tokens=1))
    one.at(StepBegan(0, Phase.PREFILL, layers=48, tokens=1, context_tokens=1, loads=("a",)))
    one.at(WriteKnown(MS, "w", pages=8, page_nbytes=MB))
    one.run()
    writes = [when for when, direction, _ in one.launches if direction == "write"]
    reads = [when for when, direction, _ in one.launches if direction == "read"]
    assert min(writes) < max(reads)
    assert one.state.totals.slack_ns > 0
    assert one.state.totals.forced_pages == 0


def test_immediate_launches_all_at_once() -> None:
    one = drive(ImmediatePolicy)
    mixed(one)
    one.run()
    issues = [issue for _, d in one.decisions for issue in (*d.writes, *d.reads)]
    assert issues == [Issue("w", 0, 40), Issue("a", 0, 8)]
    assert len({when for when, _, name in one.launches if name == "a"}) == 1


def test_fixed_writes_one_window_at_a_time() -> None:
    truth = Linear()
    one = Drive(FixedWindow(window_us=1000.0, bytes_per_s=8e9), truth, truth)
    mixed(one)
    one.run()
    writes = [when for when, direction, _ in one.launches if direction == "write"]
    assert writes == [MS * n for n in range(20)]


def busy(one: Drive) -> None:
    """Steps whose loads are always late: there is never any slack."""
    for number in range(40):
        at_ns, name = number * 10 * MS, f"r{number}"
        one.at(LoadKnown(at_ns, name, layers=2, layer_nbytes=60 * MB, tokens=1, prefix_tokens=1))
        one.at(StepBegan(at_ns, Phase.PREFILL, layers=2, tokens=1, loads=(name,)))


def test_a_step_whose_end_nobody_told_takes_no_load_along() -> None:
    one = drive(read_window_us=1000.0)
    one.at(LoadKnown(0, "first", layers=1, layer_nbytes=100 * MB, tokens=1, prefix_tokens=1))
    one.at(LoadKnown(0, "second", layers=1, layer_nbytes=MB, tokens=1, prefix_tokens=1))
    one.at(StepBegan(MS, Phase.PREFILL, layers=2, tokens=1, loads=("second",)))
    one.at(StepBegan(2 * MS, Phase.DECODE, tokens=1))
    one.run()
    assert [name for _, _, name in one.launches] == ["first", "second"]


@pytest.mark.parametrize("interference", [1.5, 2.5])
def test_an_old_write_goes_without_slack(interference: float) -> None:
    one = drive(truth=Linear(interference=interference), write_patience_us=50_000.0)
    busy(one)
    one.at(WriteKnown(MS, "w", pages=4, page_nbytes=MB))
    one.run()
    first_ns = min(when for when, direction, _ in one.launches if direction == "write")
    assert 51 * MS <= first_ns < 100 * MS
    assert one.state.totals.forced_pages >= 1


def test_a_young_write_waits_when_there_is_no_slack() -> None:
    one = drive()
    busy(one)
    one.at(WriteKnown(MS, "w", pages=4, page_nbytes=MB))
    one.run()
    first_ns = min(when for when, direction, _ in one.launches if direction == "write")
    assert first_ns > 390 * MS


def test_too_many_writes_go_without_slack() -> None:
    one = drive(locked_pages=10, staged_pages=0)
    busy(one)
    one.at(WriteKnown(MS, "w", pages=6, page_nbytes=MB))
    one.run()
    assert one.state.totals.forced_pages > 0
    assert one.state.totals.dropped_pages == 0


@pytest.mark.parametrize(("tokens", "forced"), [(512, False), (1024, True)])
def test_writes_wait_for_slack_while_the_put_that_the_step_ends_with_fits(
    tokens: int, forced: bool
) -> None:
    """The first step gives the pages per token, the second the number of pages to expect."""
    one = drive(locked_pages=60, staged_pages=0)
    one.at(StepBegan(0, Phase.PREFILL, 4, 512))
    one.at(StepEnded(4 * MS))
    one.at(WriteKnown(5 * MS, "first", pages=10, page_nbytes=MB))
    one.at(WriteKnown(60 * MS, "w", pages=15, page_nbytes=MB))
    one.at(LoadKnown(50 * MS, "a", 20, 100 * MB, tokens, 9000))
    one.at(StepBegan(51 * MS, Phase.PREFILL, 20, tokens, 9000, ("a",)))
    one.run()
    assert (one.state.totals.forced_pages > 0) == forced
    assert one.state.totals.dropped_pages == 0


def test_a_drive_whose_cache_has_ended_gets_no_more_than_it_can_take() -> None:
    correction = Correction()
    for _ in range(100):
        correction.measured(1000, 1000)
    assert (correction.slowed, correction.sustained) == (1.0, 1.0)
    for took_ns in (8000, 1000) * 9:  # outliers
        correction.measured(1000, took_ns)
        assert correction.slowed == 1.0
    for _ in range(30):
        correction.measured(1000, 4000)
    assert 3 < correction.slowed < 4 and 3.5 < correction.sustained < 4.5
    for _ in range(3000):  # it was always so slow, for all that is known
        correction.measured(1000, 4000)
    assert correction.slowed == 1.0


@pytest.mark.parametrize(("patience_us", "first"), [(1e6, "small"), (1e3, "large")])
def test_on_a_slowed_drive_the_put_that_makes_room_soonest_goes_first(
    patience_us: float, first: str
) -> None:
    """Unless the oldest has waited for long: one more of the large ones would not fit now."""
    one = drive(locked_pages=20, staged_pages=0, write_patience_us=patience_us)
    one.state.estimates.write = Correction(best=1.0, slowed=3.0, learns=False)
    one.at(LoadKnown(0, "a", 20, 100 * MB, 512, 9000))
    one.at(StepBegan(0, Phase.PREFILL, 20, 512, 9000, ("a",)))
    one.at(WriteKnown(MS, "large", pages=12, page_nbytes=MB))
    one.at(WriteKnown(MS, "small", pages=2, page_nbytes=MB))
    one.run()
    written = [issue.name for _, decision in one.decisions for issue in decision.writes]
    assert written[0] == first, written
    assert one.state.totals.written_pages == 14


def test_beyond_the_bound_the_newest_is_copied_out_then_dropped() -> None:
    one = drive(locked_pages=10, staged_pages=6)
    busy(one)
    for number in range(4):
        one.at(WriteKnown((2 + number) * MS, f"w{number}", pages=5, page_nbytes=MB))
    one.run()
    assert one.state.totals.copied_pages == 5
    assert one.dropped == ["w3"]


def test_for_a_write_that_fits_nowhere_no_other_is_copied_out() -> None:
    one = drive(locked_pages=10, staged_pages=6)
    busy(one)
    for number, pages in enumerate((5, 5, 11)):
        one.at(WriteKnown((2 + number) * MS, f"w{number}", pages=pages, page_nbytes=MB))
    one.run()
    assert one.state.totals.copied_pages == 0
    assert one.dropped == ["w2"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"locked_pages": -1},
        {"margin": 1.0},
        {"read_window_us": 0.0},
        {"forced_share": 0.0},
        {"forced_share": 0.6},
        {"write_patience_us": -1.0},
    ],
)
def test_limits_that_make_no_sense(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        Limits(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("interference", [1.0, 2.5])
def test_a_drive_that_stalls_is_not_given_more_and_more_writes(interference: float) -> None:
    """What is launched is in the way of the next read, however late its end is."""
    profile, limits = Linear(interference=interference), Limits()
    scheduler = Scheduler(SlackPolicy(limits), profile)
    event: WriteKnown | Tick = WriteKnown(0, "w", pages=2000, page_nbytes=2 * MB)
    for at in range(1, 200):  # of 1 ms each, in which nothing ends
        scheduler.take(event)
        event = Tick(at * MS)
    launched_us = scheduler.state.writing.flying_ns / 1000
    assert 0 < launched_us <= 2 * limits.idle_burst_us
