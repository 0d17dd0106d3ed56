"""Expected times: corrections stay within bounds, absurd profiles are refused."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduler.drive import Linear

from tutti.errors import ConfigError
from tutti.scheduler.event import (
    BatchJoined,
    Event,
    LayerBegan,
    LayersReady,
    LoadKnown,
    PagesWritten,
    StepBegan,
    StepEnded,
    Tick,
    WriteKnown,
)
from tutti.scheduler.policy import Limits, deadlines
from tutti.scheduler.request import Phase
from tutti.scheduler.slack import Correction, Corrections, Estimates, is_worth_loading
from tutti.scheduler.state import Decision, ReadLaunch, State, WriteLaunch, apply, commit

MS = 1_000_000


@given(st.lists(st.tuples(st.integers(-10, 10**12), st.integers(-(10**13), 10**13)), max_size=30))
def test_a_factor_stays_within_its_bounds(measurements: list[tuple[int, int]]) -> None:
    correction = Correction()
    for expected_ns, measured_ns in measurements:
        correction = correction.after(expected_ns, measured_ns)
        assert 0.25 <= correction.factor <= 4


def test_a_factor_follows_small_errors_slowly() -> None:
    correction = Correction().after(100, 120)
    assert 1.0 < correction.factor < 1.1
    for _ in range(50):
        correction = correction.after(100, 120)
    assert correction.factor == pytest.approx(1.2, abs=0.01)


def test_contradictions_in_a_row_start_anew() -> None:
    correction = Correction()
    for count in range(4):
        assert correction.factor < 2.9, count
        correction = correction.after(100, 300)
    assert correction == Correction(3.0)


def test_one_outlier_does_not() -> None:
    correction = Correction().after(100, 1000).after(100, 100).after(100, 100)
    assert correction.factor < 2


@pytest.mark.parametrize("absurd_ns", [0, -5, 10**15])
def test_absurd_measurements_are_left_out(absurd_ns: int) -> None:
    assert Correction(1.5).after(100, absurd_ns) == Correction(1.5)


@pytest.mark.parametrize("us", [-1.0, math.nan, math.inf])
def test_absurd_profiles_are_refused(us: float) -> None:
    estimates = Estimates(Linear(layer=us, decode=us))
    with pytest.raises(ConfigError, match="measure it again"):
        estimates.layer_ns(1, 1)
    with pytest.raises(ConfigError, match="measure it again"):
        estimates.decode_ns(1, 1)
    with pytest.raises(ConfigError, match="interference"):
        _ = Estimates(Linear(interference=us)).interference


def test_corrections_apply_to_their_kind_only() -> None:
    corrections = Corrections().measured("read", 100, 130)
    assert corrections.read.factor > 1
    assert Estimates(Linear(), corrections).layer_ns(1, 1) == Estimates(Linear()).layer_ns(1, 1)
    assert Estimates(Linear(), corrections).read_ns(10**6) > Estimates(Linear()).read_ns(10**6)


def test_layers_that_take_longer_correct_the_profile() -> None:
    truth = Linear(layer=1000.0)
    state = apply(State(), StepBegan(0, Phase.PREFILL, layers=8, tokens=1), truth)
    for layer in range(1, 8):
        state = apply(state, LayerBegan(layer * 1_300_000 + 5000, layer, waited_ns=5000), truth)
    assert 1.1 < state.corrections.layer.factor < 1.35
    assert state.totals.bubble_ns == 7 * 5000
    assert state.totals.error_ns > 0


@pytest.mark.parametrize("joins_before", [True, False])
def test_what_is_read_ahead_is_needed_by_the_step_that_takes_it(joins_before: bool) -> None:
    truth = Linear(layer=1000.0)
    state = State()
    for name in ("1", "2"):
        known = LoadKnown(0, name, 8, 10**6, 0, 0, 8, f"ahead {name}")
        state = apply(state, known, truth)
    events: list[Event] = [
        BatchJoined(MS, "ahead 1", "7"),
        BatchJoined(MS, "ahead 3", "7"),  # it has arrived before
        StepBegan(MS, Phase.PREFILL, layers=8, tokens=1, loads=("7",)),
    ]
    for event in events if joins_before else reversed(events):
        state = apply(state, event, truth)
    assert [load.step for load in state.loads] == [state.step.number, None]
    assert state.totals.ignored == 0


@pytest.mark.parametrize("known_before", [True, False])
def test_a_load_is_needed_by_the_step_that_names_its_batch(known_before: bool) -> None:
    truth = Linear(layer=1000.0)
    loads = [
        LoadKnown(0, name, 8, 10**6, 0, 0, 8, batch) for name, batch in (("1", "7"), ("2", "8"))
    ]
    began = StepBegan(MS, Phase.PREFILL, layers=8, tokens=1, loads=("7",))
    events: list[Event] = [*loads, began] if known_before else [began, *loads]
    state = State()
    for event in events:
        state = apply(state, event, truth)
    assert [load.step for load in state.loads] == [state.step.number, None]
    for layer in range(3):
        state = apply(state, LayerBegan((2 + 5 * layer) * MS, layer), truth)
        estimates = Estimates(truth, state.corrections)
        running, waiting = deadlines(state, estimates, Limits())
        assert running.load.name == "1"
        assert running.deadline_ns(layer) == state.now_ns, "it is needed now"
        assert running.layer_ns == estimates.layer_ns(1, 0)
        assert waiting.first_ns == running.deadline_ns(8), "when the step is over"
    over = apply(state, StepEnded(20 * MS), truth)
    assert [load.step for load in over.loads] == [None, None], "of neither the end was reported"
    state = commit(state, Decision(reads=(ReadLaunch("1", 0, 8),)), truth)
    state = apply(state, LayersReady(19 * MS, "1", 8), truth)
    state = apply(state, StepEnded(20 * MS), truth)
    assert [load.name for load in state.loads] == ["2"]


def test_time_does_not_go_back() -> None:
    state = apply(State(now_ns=5 * MS), Tick(MS), Linear())
    assert state.now_ns == 5 * MS


def test_break_even() -> None:
    fast, slow = Estimates(Linear(read_gbps=10)), Estimates(Linear(read_gbps=0.001))
    work = {"layers": 4, "new_tokens": 10, "hit_tokens": 1000, "nbytes": 10**6}

    class ByTokens(Linear):
        def layer_us(self, new_tokens: int, prefix_tokens: int) -> float:
            return float(new_tokens)

    assert is_worth_loading(Estimates(ByTokens(read_gbps=10)), **work)
    assert not is_worth_loading(Estimates(ByTokens(read_gbps=0.001)), **work)
    # Where a layer costs the same with and without the hit, loading never pays.
    assert not is_worth_loading(fast, **work)
    assert not is_worth_loading(slow, **work)
    assert not is_worth_loading(fast, **{**work, "hit_tokens": 0})


def test_ends_that_come_in_bunches_are_one_measurement() -> None:
    """Two writes of 2 ms each that end together after 4 took as long as expected."""
    profile = Linear(write_gbps=1.0)
    state = State()
    for name in ("v", "w"):
        state = apply(state, WriteKnown(0, name, pages=2, page_nbytes=1_000_000), profile)
    launches = (WriteLaunch("v", 0, 2), WriteLaunch("w", 0, 2))
    state = commit(state, Decision(writes=launches), profile)
    for name in ("v", "w"):
        state = apply(state, PagesWritten(4 * MS, name, 2), profile)
    assert state.totals.measurements == 1
    assert state.totals.error_ns == 0
    assert state.corrections.write.factor == 1.0


def test_a_slow_drive_is_learnt() -> None:
    profile, state = Linear(write_gbps=1.0), State()
    for number in range(8):
        at_ns, name = number * 10 * MS, f"w{number}"
        state = apply(state, WriteKnown(at_ns, name, pages=2, page_nbytes=1_000_000), profile)
        state = commit(state, Decision(writes=(WriteLaunch(name, 0, 2),)), profile)
        state = apply(state, PagesWritten(at_ns + 6 * MS, name, 2), profile)
    assert state.corrections.write.factor == pytest.approx(3.0, rel=0.1)
