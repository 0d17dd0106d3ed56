"""Expected times: corrections stay within bounds, absurd profiles are refused."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduler.drive import Linear

from tutti.errors import ConfigError
from tutti.scheduler.estimates import Correction, Estimates, is_worth_loading
from tutti.scheduler.event import (
    BatchJoined,
    Event,
    LayerBegan,
    LayersReady,
    LoadGone,
    LoadKnown,
    PagesWritten,
    StepBegan,
    StepEnded,
    Tick,
    WriteKnown,
    WriteStopped,
)
from tutti.scheduler.loads_and_writes import Phase
from tutti.scheduler.state import Decision, Issue, State
from tutti.scheduler.state_changes import apply, commit

MS = 1_000_000


@given(st.lists(st.tuples(st.integers(-10, 10**12), st.integers(-(10**13), 10**13)), max_size=30))
def test_a_factor_stays_within_its_bounds(measurements: list[tuple[int, int]]) -> None:
    correction = Correction()
    for expected_ns, measured_ns in measurements:
        correction.measured(expected_ns, measured_ns)
        assert 1 / 8 <= correction.factor <= 8


def test_a_factor_follows_small_errors_slowly() -> None:
    correction = Correction()
    correction.measured(100, 120)
    assert 1.0 < correction.factor < 1.1
    for _ in range(50):
        correction.measured(100, 120)
    assert correction.factor == pytest.approx(1.2, abs=0.01)


def test_contradictions_in_a_row_start_anew() -> None:
    correction = Correction()
    for count in range(4):
        assert correction.factor < 2.9, count
        correction.measured(100, 300)
    assert (correction.factor, correction.contradictions) == (3.0, 0)


def test_one_outlier_does_not() -> None:
    correction = Correction()
    for measured_ns in (1000, 100, 100):
        correction.measured(100, measured_ns)
    assert correction.factor < 2.5


@pytest.mark.parametrize("absurd_ns", [0, -5, 10**15])
def test_absurd_measurements_are_left_out(absurd_ns: int) -> None:
    correction = Correction(1.5)
    assert not correction.measured(100, absurd_ns)
    assert correction == Correction(1.5)


@pytest.mark.parametrize("us", [-1.0, math.nan, math.inf])
def test_absurd_profiles_are_refused(us: float) -> None:
    estimates = Estimates(Linear(layer=us, decode=us))
    with pytest.raises(ConfigError, match="measure it again"):
        estimates.layer_ns(1, 1)
    with pytest.raises(ConfigError, match="measure it again"):
        estimates.decode_base_ns(1, 1)
    with pytest.raises(ConfigError, match="interference"):
        _ = Estimates(Linear(interference=us)).interference


def test_corrections_apply_to_their_kind_only() -> None:
    estimates = Estimates(Linear())
    before = estimates.layer_ns(1, 1), estimates.read_ns(10**6)
    estimates.read.measured(100, 130)
    assert estimates.layer_ns(1, 1) == before[0]
    assert estimates.read_ns(10**6) > before[1]


def taken(profile: Linear, *happened: Event) -> State:
    state = State(profile)
    for event in happened:
        apply(state, event)
    return state


def test_layers_that_take_longer_correct_the_profile() -> None:
    layers = [LayerBegan(n * 1_300_000 + 5000, n, waited_ns=5000) for n in range(1, 8)]
    state = taken(Linear(layer=1000.0), StepBegan(0, Phase.PREFILL, layers=8, tokens=1), *layers)
    assert 1.1 < state.estimates.layer.factor < 1.35
    assert state.totals.bubble_ns == 7 * 5000
    assert state.totals.error_ns > 0


@pytest.mark.parametrize("joins_before", [True, False])
def test_what_is_read_ahead_is_needed_by_the_step_that_takes_it(joins_before: bool) -> None:
    known = [LoadKnown(0, name, 8, 10**6, 0, 0, 8, f"ahead {name}") for name in ("1", "2")]
    events: list[Event] = [
        BatchJoined(MS, "ahead 1", "7"),
        BatchJoined(MS, "ahead 3", "7"),  # it has arrived before
        StepBegan(MS, Phase.PREFILL, layers=8, tokens=1, loads=("7",)),
    ]
    state = taken(Linear(), *known, *(events if joins_before else reversed(events)))
    assert [load.running for load in state.loads.values()] == [True, False]
    assert [*state.running] == ["1"] and [*state.unread] == ["2"]
    assert state.totals.ignored == 0


@pytest.mark.parametrize("known_before", [True, False])
def test_a_load_is_needed_by_the_step_that_names_its_batch(known_before: bool) -> None:
    loads = [
        LoadKnown(0, name, 8, 10**6, 0, 0, 8, batch) for name, batch in (("1", "7"), ("2", "8"))
    ]
    began = StepBegan(MS, Phase.PREFILL, layers=8, tokens=1, loads=("7",))
    events: list[Event] = [*loads, began] if known_before else [began, *loads]
    state = taken(Linear(layer=1000.0), *events)
    assert [load.running for load in state.loads.values()] == [True, False]
    apply(state, StepEnded(20 * MS))
    assert not state.running and [*state.unread] == ["1", "2"], "the end of neither was reported"


def test_a_load_that_its_step_has_used_leaves() -> None:
    load = LoadKnown(0, "1", 8, 10**6, 0, 0)
    state = taken(Linear(), load, StepBegan(MS, Phase.PREFILL, layers=8, tokens=1, loads=("1",)))
    commit(state, Decision(reads=(Issue("1", 0, 8),)))
    apply(state, LayersReady(19 * MS, "1", 8))
    assert not state.running and [*state.loads] == ["1"]
    apply(state, StepEnded(20 * MS))
    assert not state.loads and not state.read_ahead_nbytes


def test_time_does_not_go_back() -> None:
    assert taken(Linear(), Tick(5 * MS), Tick(MS)).now_ns == 5 * MS


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
    known = [WriteKnown(0, name, pages=2, page_nbytes=1_000_000) for name in ("v", "w")]
    state = taken(Linear(write_gbps=1.0), *known)
    commit(state, Decision(writes=(Issue("v", 0, 2), Issue("w", 0, 2))))
    for name in ("v", "w"):
        apply(state, PagesWritten(4 * MS, name, 2))
    assert state.totals.measurements == 1
    assert state.totals.error_ns == 0
    assert state.estimates.write.factor == 1.0


def test_a_slow_drive_is_learnt() -> None:
    state = State(Linear(write_gbps=1.0))
    for number in range(8):
        at_ns, name = number * 10 * MS, f"w{number}"
        apply(state, WriteKnown(at_ns, name, pages=2, page_nbytes=1_000_000))
        commit(state, Decision(writes=(Issue(name, 0, 2),)))
        apply(state, PagesWritten(at_ns + 6 * MS, name, 2))
    assert state.estimates.write.factor == pytest.approx(3.0, rel=0.1)


def pairs(turns: int, read_nbytes: int, write_nbytes: int, write_end_ns: int) -> State:
    """A read that ends after 30 ms and a write, begun together, again and again."""
    state = State(Linear(interference=1.5, read_gbps=1.0, write_gbps=1.0))
    for number in range(turns):
        at_ns, read, write = number * 50 * MS, f"r{number}", f"w{number}"
        apply(state, LoadKnown(at_ns, read, 1, read_nbytes, 0, 0))
        apply(state, WriteKnown(at_ns, write, pages=1, page_nbytes=write_nbytes))
        commit(state, Decision(reads=(Issue(read, 0, 1),), writes=(Issue(write, 0, 1),)))
        apply(state, LayersReady(at_ns + 30 * MS, read, 1))
        apply(state, PagesWritten(at_ns + write_end_ns, write, 1))
        apply(state, LoadGone(at_ns + write_end_ns, read))
    return state


def test_the_interference_is_learnt_from_transfers_that_overlap() -> None:
    """A read of 10 ms takes 30 during a write; what the write took alone teaches nothing new."""
    state = pairs(20, 10_000_000, 20_000_000, 40 * MS)
    assert state.estimates.interference == pytest.approx(3.0, rel=0.05)
    assert state.estimates.read.factor == state.estimates.write.factor == 1.0


def test_what_flew_when_a_write_stopped_tells_nothing() -> None:
    """A write of 80 ms that stops after 50, with 60 of it begun, did not take 10 ms for those."""
    state = State(Linear(write_gbps=1.0))
    for number in range(12):
        at_ns, name = number * 100 * MS, f"w{number}"
        apply(state, WriteKnown(at_ns, name, pages=8, page_nbytes=10_000_000, can_stop=True))
        commit(state, Decision(writes=(Issue(name, 0, 8),)))
        apply(state, WriteStopped(at_ns + 50 * MS, name, 6))
        apply(state, PagesWritten(at_ns + 60 * MS, name, 6))
        commit(state, Decision(writes=(Issue(name, 6, 2),)))
        apply(state, PagesWritten(at_ns + 80 * MS, name, 8))
    assert state.totals.measurements == 12
    assert state.estimates.write.factor == 1.0


def test_what_ends_right_after_a_measurement_tells_nothing() -> None:
    """Writes of 10 ms that fly together end together: the second did not take a tenth of one."""
    state = State(Linear(write_gbps=1.0))
    for number in range(12):
        at_ns, names = number * 50 * MS, (f"v{number}", f"w{number}")
        for name in names:
            apply(state, WriteKnown(at_ns, name, pages=1, page_nbytes=10_000_000))
        commit(state, Decision(writes=tuple(Issue(name, 0, 1) for name in names)))
        apply(state, PagesWritten(at_ns + 20 * MS, names[0], 1))
        apply(state, PagesWritten(at_ns + 20 * MS + MS // 10, names[1], 1))
        assert state.estimates.write.factor >= 1.0


def test_writes_that_reads_overtake_are_not_interference() -> None:
    """A write of 10 ms beside reads of 20 took 31: its device served the reads first."""
    state = pairs(12, 20_000_000, 10_000_000, 31 * MS)
    assert state.estimates.interference == pytest.approx(1.5, rel=0.05)


def test_nothing_is_half_known_of_a_write_that_a_bad_profile_refuses() -> None:
    profile = Linear()
    state = State(profile)
    object.__setattr__(profile, "interference", math.nan)
    with pytest.raises(ConfigError, match="interference is nan"):
        apply(state, WriteKnown(0, "w", pages=1, page_nbytes=1))
    assert not state.writes and not state.waiting_pages
    object.__setattr__(profile, "interference", 2.0)
    apply(state, WriteKnown(0, "w", pages=1, page_nbytes=1))
    assert state.waiting_pages == 1 and state.estimates.interference == 2.0
