"""The residency planner: Algorithm 1 with its knob, and how the plan follows the free memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tutti.base.units import GiB, MiB
from tutti.errors import ConfigError
from tutti.scheduler import residency_policy
from tutti.scheduler.residency_policy import (
    Governor,
    Look,
    plan_groups,
)


def test_groups_are_taken_whole_and_in_order() -> None:
    assert plan_groups([10] * 5, 29).tolist() == [True, True, False, False, False]
    assert plan_groups([10] * 5, 30).tolist() == [True, True, True, False, False]
    # Nothing behind the first that does not fit, or small late groups would leave holes.
    assert plan_groups([10, 30, 5], 20).tolist() == [True, False, False]


def test_the_hottest_go_first() -> None:
    assert plan_groups([10] * 4, 20, heat=[1, 9, 1, 5]).tolist() == [False, True, False, True]
    assert plan_groups([10] * 4, 20, heat=[3, 3, 3, 3]).tolist() == [True, True, False, False]


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        (([1, -1], 5), {}),
        (([[1]], 5), {}),
        (([1], -1), {}),
        (([1], 5), {"share": 1.01}),
        (([1], 5), {"share": -0.1}),
        (([1], 5), {"share": float("nan")}),
        (([1, 2], 5), {"heat": [1]}),
        (([1], 5), {"heat": [float("nan")]}),
    ],
)
def test_bad_plans_are_refused(arguments: tuple[list[int], int], options: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        plan_groups(*arguments, **options)  # type: ignore[arg-type]


sizes = st.lists(st.integers(0, 1000), max_size=40)


@given(sizes, st.integers(0, 20_000), st.floats(0, 1), st.randoms(use_true_random=False))
def test_a_plan_keeps_to_the_knob_and_wastes_less_than_a_group(
    group_nbytes: list[int], budget: int, share: float, random: object
) -> None:
    heat = random.sample(range(len(group_nbytes)), len(group_nbytes))  # type: ignore[attr-defined]
    chosen = plan_groups(group_nbytes, budget, share=share, heat=heat)
    taken = int(np.asarray(group_nbytes, np.int64)[chosen].sum())
    assert taken <= share * budget
    left = [(-h, n) for h, n, c in zip(heat, group_nbytes, chosen, strict=True) if not c]
    if left:
        assert taken + min(left)[1] > int(share * budget), "the next group would have fitted"
        coldest = min((h for h, c in zip(heat, chosen, strict=True) if c), default=len(heat))
        assert coldest >= -min(left)[0]


@given(sizes, st.integers(0, 20_000), st.floats(0, 1), st.floats(0, 1))
def test_a_higher_knob_never_takes_a_group_away(
    group_nbytes: list[int], budget: int, a: float, b: float
) -> None:
    less = plan_groups(group_nbytes, budget, share=min(a, b))
    more = plan_groups(group_nbytes, budget, share=max(a, b))
    assert not (less & ~more).any()


def look(now_s: float, free: int, planned: int, *, stall: float = 0.0, moved: int = GiB) -> Look:
    """At a pool of 1000 groups of a byte each."""
    return Look(now_s, free, planned, 1000, 1, moved, stall)


def test_a_plan_shrinks_at_once_and_grows_after_a_calm() -> None:
    governor = Governor(share=0.5, calm_s=1.0)
    assert governor.target(look(0.0, 100, 80)) == 50
    assert governor.target(look(0.1, 200, 50)) == 50
    assert governor.target(look(1.0, 200, 50)) == 50
    assert governor.target(look(1.2, 200, 50)) == 100
    assert governor.target(look(1.3, 0, 100)) == 0


def test_a_small_gain_is_not_worth_a_change() -> None:
    governor = Governor(share=1.0, calm_s=0.0)
    assert governor.target(look(0.0, 110, 100)) == 100
    assert governor.target(look(0.0, 120, 100)) == 120


def test_a_plan_never_exceeds_the_pool() -> None:
    assert Governor(share=1.0, calm_s=0.0).target(look(0.0, 5000, 100)) == 1000


def test_a_calm_that_is_interrupted_begins_anew() -> None:
    governor = Governor(share=1.0, calm_s=1.0)
    assert governor.target(look(0.0, 200, 100)) == 100
    assert governor.target(look(0.5, 100, 100)) == 100
    assert governor.target(look(1.1, 200, 100)) == 100
    assert governor.target(look(0.2, 200, 100)) == 100  # the clock jumped back
    assert governor.target(look(1.3, 200, 100)) == 200


def test_tasks_that_wait_for_memory_take_a_quarter_and_a_few_stop_the_growth() -> None:
    governor = Governor(share=1.0, calm_s=0.0)
    assert governor.target(look(0.0, 1000, 400, stall=0.3)) == 300
    assert governor.target(look(0.1, 1000, 300, stall=0.1)) == 300
    assert governor.target(look(0.2, 1000, 300)) == 1000


def test_a_plan_is_ahead_of_memory_that_falls_evenly() -> None:
    governor = Governor(share=1.0)
    assert governor.target(look(0.0, 1000, 900)) == 900
    assert governor.target(look(0.1, 950, 900)) == 900
    assert governor.target(look(0.2, 900, 900)) == 850
    assert governor.target(look(0.3, 850, 850)) == 800
    assert governor.target(look(0.4, 850, 800)) == 800
    assert governor.target(look(0.5, 200, 800)) == 200  # a jump says nothing about what follows
    assert governor.target(look(0.6, 1000, 200)) == 200


def test_a_growth_is_a_part_of_what_moves_and_more_with_hits() -> None:
    governor = Governor(share=1.0, calm_s=0.0)
    assert governor.target(Look(0.0, 1000 * MiB, 0, 1000 * MiB, MiB, 80 * MiB)) == 2 * MiB
    of_two = Look(0.1, 1000 * MiB, 2 * MiB, 1000 * MiB, MiB, 20 * MiB)
    assert governor.target(of_two) == 2 * MiB
    # What is left over is not lost.
    assert governor.target(replace(of_two, now_s=0.2)) == 3 * MiB
    assert Governor(share=1.0, calm_s=0.0).target(look(0.0, 1000, 500, moved=80)) == 512


def test_an_idle_pool_fills_the_page_cache_slowly() -> None:
    governor, planned = Governor(share=1.0, calm_s=0.0), 0
    for tick in range(101):
        idle = Look(tick / 10, GiB, planned, GiB, MiB)
        planned = governor.target(idle)
    assert 310 * MiB <= planned <= 320 * MiB  # ten seconds
    # A clock that jumped ahead is worth a second of growth at most.
    assert governor.target(Look(1e6, GiB, planned, GiB, MiB)) - planned <= 33 * MiB


def test_a_trickle_slows_growth_by_no_more_than_it_moves() -> None:
    governor, planned = Governor(share=1.0, calm_s=0.0), 0
    for tick in range(101):
        planned = governor.target(Look(tick / 10, GiB, planned, GiB, MiB, MiB))
    assert 210 * MiB <= planned <= 220 * MiB  # ten seconds, of 32 MiB less 10 MiB each


@pytest.mark.parametrize("period_s", [0.5, 2.0, 4.0])
def test_a_limit_that_swings_is_followed_a_bounded_number_of_times(period_s: float) -> None:
    governor, planned, growths = Governor(share=1.0), 1000, 0
    for tick in range(6000):
        now_s = tick / 10
        free = 1000 if (now_s % period_s) < period_s / 2 else 200
        target = governor.target(look(now_s, free, planned))
        growths += target > planned
        planned = target
    # Ten minutes: the calm doubles after each growth that was taken back.
    assert growths <= 8
    assert planned == 200


def least_of_direct(seconds: float, direct: float, enters: float, hits: float) -> float:
    """The least speed in a second, over that of direct I/O, of a pool that is read in a circle
    while the limit goes from a fifth of it to all and back; GB/s by direct I/O, through the page
    cache the first time, and from it.
    """
    groups, group = 80, 6_400_000
    governor, place = Governor(share=0.9), 0
    planned = filled = int(0.18 * groups)
    moved, at_s = [0.0], [0.0]
    now_s = spare_s = 0.0
    while now_s < seconds:
        now_s += 0.1
        spare_s += 0.1
        before = moved[-1]
        while spare_s > 0:
            if place < min(filled, planned):
                speed = hits
            elif place < planned:
                speed, filled = enters, place + 1
            else:
                speed = direct
            spare_s -= group / speed / 1e9
            moved.append(moved[-1] + group)
            at_s.append(now_s - spare_s)
            place = (place + 1) % groups
        limit = int((0.2 + 0.8 * (1 - abs(2 * now_s / seconds - 1))) * groups * group)
        now = Look(now_s, limit, planned * group, groups * group, group, int(moved[-1] - before))
        planned = governor.target(now) // group
        filled = min(filled, planned)
    starts = np.arange(0, seconds - 1, 0.05)
    speeds = np.interp(starts + 1, at_s, moved) - np.interp(starts, at_s, moved)
    return float(speeds.min() / 1e9 / direct)


@pytest.mark.parametrize("seconds", [3.0, 5.0, 20.0, 60.0])
@pytest.mark.parametrize(("direct", "enters"), [(1.55, 0.7), (1.3, 0.5), (2.2, 0.9), (6.0, 2.0)])
def test_a_growing_limit_costs_at_most_a_twentieth_of_direct_io(
    seconds: float, direct: float, enters: float
) -> None:
    assert least_of_direct(seconds, direct, enters, 4 * direct) >= 0.95


def test_without_the_brake_it_costs_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residency_policy, "_ENTER_SHARE", 1.0)
    assert least_of_direct(5.0, 1.3, 0.5, 5.2) < 0.95
