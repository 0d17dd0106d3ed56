"""The residency planner: the budget from what the kernel says, and Algorithm 1 with its knob."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tutti.base.units import GiB, MiB
from tutti.errors import ConfigError, Unsupported
from tutti.scheduler import residency_policy
from tutti.scheduler.residency_policy import (
    Governor,
    Look,
    MemoryFacts,
    plan_groups,
    read_memory,
    read_stall_us,
)


def machine(root: Path, available_kib: int = 8 * 1024 * 1024) -> Path:
    """A root with /proc, without control groups."""
    own = root / "proc/self"
    own.mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 9 kB\nMemAvailable: {available_kib} kB\n")
    (own / "mountinfo").write_text("22 1 8:1 / / rw - ext4 disk rw\n")
    (own / "cgroup").write_text("0::/\n")
    return root


def add_group(root: Path, path: str, version: int, limit: str, stat: str) -> None:
    folder = root / "sys/fs/cgroup" / path
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ("memory.max" if version == 2 else "memory.limit_in_bytes")).write_text(limit + "\n")
    (folder / "memory.stat").write_text(stat)


def mount(root: Path, version: int, mounted: str = "/") -> None:
    kind = "cgroup2 none rw" if version == 2 else "cgroup none rw,memory"
    with (root / "proc/self/mountinfo").open("a") as file:
        file.write(f"30 22 0:26 {mounted} /sys/fs/cgroup rw - {kind}\n")


def test_without_control_groups_the_machine_counts(tmp_path: Path) -> None:
    facts = read_memory(machine(tmp_path))
    assert facts == MemoryFacts(8 * GiB)
    assert facts.free_nbytes == 8 * GiB


def test_version_2_counts_anon_and_shmem_of_the_tightest_group(tmp_path: Path) -> None:
    root = machine(tmp_path)
    mount(root, 2)
    (root / "proc/self/cgroup").write_text("0::/outer/inner\n")
    add_group(root, "", 2, "max", "")
    add_group(root, "outer", 2, str(2 * GiB), f"anon {GiB}\nshmem {512 * MiB}\nfile 5\n")
    add_group(root, "outer/inner", 2, str(1 * GiB), f"anon {100 * MiB}\nshmem 0\n")
    facts = read_memory(root)
    assert facts.free_nbytes == 512 * MiB  # of the outer one, which is tighter
    assert "version 2" in facts.source


def test_version_1_beside_an_empty_version_2(tmp_path: Path) -> None:
    """A hybrid hierarchy: memory is limited by version 1 alone."""
    root = machine(tmp_path)
    mount(root, 1)
    (root / "proc/self/cgroup").write_text("4:cpu,memory:/job\n0::/elsewhere\n")
    add_group(root, "", 1, "9223372036854771712", "total_rss 1\n")
    stat = f"cache 7\nrss 1\nshmem 1\ntotal_rss {300 * MiB}\ntotal_shmem {20 * MiB}\n"
    add_group(root, "job", 1, str(GiB), stat)
    facts = read_memory(root)
    assert (facts.limit_nbytes, facts.anon_nbytes, facts.shmem_nbytes) == (
        GiB,
        300 * MiB,
        20 * MiB,
    )
    assert facts.free_nbytes == GiB - 320 * MiB


def test_a_container_sees_its_own_group_as_the_root(tmp_path: Path) -> None:
    root = machine(tmp_path)
    mount(root, 2, "/docker/abc")
    (root / "proc/self/cgroup").write_text("0::/docker/abc\n")
    add_group(root, "", 2, str(GiB), "anon 0\n")
    assert read_memory(root).free_nbytes == GiB


def test_a_limit_above_what_is_available_changes_nothing(tmp_path: Path) -> None:
    root = machine(tmp_path, available_kib=1024)
    mount(root, 2)
    add_group(root, "", 2, str(64 * GiB), "anon 5\n")
    assert read_memory(root).free_nbytes == MiB


def test_more_used_than_allowed_leaves_nothing() -> None:
    assert MemoryFacts(GiB, GiB, anon_nbytes=GiB, shmem_nbytes=1).free_nbytes == 0


@pytest.mark.parametrize("limit", ["", "garbage", "-5", "max\n"])
def test_a_limit_that_cannot_be_read_is_none(tmp_path: Path, limit: str) -> None:
    root = machine(tmp_path)
    mount(root, 2)
    add_group(root, "", 2, limit, "anon 5\n")
    assert read_memory(root).limit_nbytes is None


def test_no_proc_is_said(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="mount /proc"):
        read_memory(tmp_path)


@pytest.mark.skipif(not os.path.exists("/proc/meminfo"), reason="no /proc")
def test_this_machine_answers() -> None:
    assert read_memory().free_nbytes > 0


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
    assert governor.target(look(0.0, 1000, 0, moved=80)) == 2
    assert governor.target(look(0.1, 1000, 2, moved=20)) == 2
    assert governor.target(look(0.2, 1000, 2, moved=20)) == 3  # what is left over is not lost
    assert Governor(share=1.0, calm_s=0.0).target(look(0.0, 1000, 500, moved=80)) == 512


def test_an_idle_pool_fills_the_page_cache_slowly() -> None:
    governor, planned = Governor(share=1.0, calm_s=0.0), 0
    for tick in range(101):
        idle = Look(tick / 10, GiB, planned, GiB, MiB)
        planned = governor.target(idle)
    assert 310 * MiB <= planned <= 320 * MiB  # ten seconds
    # A clock that jumped ahead is worth a second of growth at most.
    assert governor.target(Look(1e6, GiB, planned, GiB, MiB)) - planned <= 33 * MiB


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


def test_pressure_is_that_of_the_group_or_of_the_machine(tmp_path: Path) -> None:
    root = machine(tmp_path)
    assert read_stall_us(root) is None
    (root / "proc/pressure").mkdir(parents=True)
    (root / "proc/pressure/memory").write_text("some avg10=0.00 total=7\nfull avg10=0.0 total=3\n")
    assert read_stall_us(root) == 7
    mount(root, 2)
    add_group(root, ".", 2, "max", "")
    (root / "proc/self/cgroup").write_text("0::/\n")
    (root / "sys/fs/cgroup/memory.pressure").write_text("some avg10=1.00 total=11\nnonsense\n")
    assert read_stall_us(root) == 11
    (root / "sys/fs/cgroup/memory.pressure").write_text("some avg10=1.00 total=\n")
    assert read_stall_us(root) == 7
