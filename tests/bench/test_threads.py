"""`tutti bench threads`: gains of threads beside what the memory of the machine allows."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest

from tutti import cli
from tutti.base.interrupts import is_main_thread
from tutti.base.units import KiB, MiB
from tutti.bench import threads
from tutti.commands.bench import report_of
from tutti.gio_uring.job import Job


def test_verified_loads_are_shown_beside_their_bound(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "_COMMAND_PAGES", 64)
    submit, on_main = threads._Rig._submit, set[bool]()

    def watched(rig: threads._Rig, *args: Any) -> Job:
        on_main.add(is_main_thread())
        return submit(rig, *args)

    monkeypatch.setattr(threads._Rig, "_submit", watched)
    assert cli.main(["bench", "threads", "--json", "--rounds", "3"]) == 0
    assert on_main == {False}, "as in a server"
    result = json.loads(capsys.readouterr().out)
    bound = result["bound"]
    assert bound["behind_over_alone"]["median"] > 0 < bound["copies_gb_per_s"]["median"]
    interval = {"median": 0.7, "low": 0.6, "high": 0.8}
    bound["behind_over_alone"] = interval
    result["rows"][2]["verified_over_unverified"] = {"median": 0.7, "low": 0.69, "high": 0.71}
    beside, offloaded, scales = threads.notes_of(result)[:3]
    assert "(bar 0.97): 0.70 [0.69, 0.71], NOT REACHED, nor by pinned threads" in beside
    assert beside.endswith("GB/s): 0.70 [0.60, 0.80]")
    assert "(bar 1.7): copies " in scales and ", in caches " in scales
    assert beside in report_of(threads, result) and scales in report_of(threads, result)
    (worker,) = (row for row in result["rows"] if row["digest_workers"])
    assert 0 <= worker["digests_offloaded"] <= worker["verified_commands"] == 3 * 2 * 4 * 16 * 16
    assert f"{worker['digests_offloaded']} of 6144 commands" in offloaded
    assert [(row["work"], row["nbytes"]) for row in bound["pinned"]] == [
        ("copies", 128 * MiB),
        ("digests alone", 128 * MiB),
        ("in caches", 256 * KiB),
        ("in caches", 8 * KiB),
    ]
    assert all(row["one_nbytes"] == 2 * row["nbytes"] for row in bound["pinned"])
    assert all(row["one_gb_per_s"]["median"] > 0 for row in bound["pinned"])
    assert all(row["two_over_one_by_cpu_time"]["low"] > 0 for row in bound["pinned"])
    assert len(bound["stolen_cores"]) == 3


def test_calls_of_a_work_have_the_same_middle_in_time() -> None:
    made: list[str] = []

    def call(name: str, took_s: float) -> float:
        made.append(name)
        return took_s

    rates = threads._rates({"a": lambda: call("a", 1.0), "b": lambda: call("b", 0.5)})
    assert made == ["a", "b", "b", "a"]
    assert rates["b"] == 2 * rates["a"] == 2 * threads._GIGABYTES


def test_pinned_threads_do_as_much_as_a_load(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned = threads._Pinned()
    target = pinned._target
    target.array[:] = 0
    parts = [pinned.share(threads._COPIES, 256 * MiB, who, 2) for who in range(2)]
    assert pinned.shared_seconds("a", *parts) > 0 < pinned.cpu_s["a"][0]
    assert target.array.min() == target.array.max() == 7, "of both halves"
    copy, hashed = partial(pinned.copy, range(0, 256 * MiB, MiB), pinned.copied.put), list[int]()
    monkeypatch.setattr(threads, "_digest", lambda where, sizes: hashed.append(int(sizes.sum())))
    for slices in (0, 4):
        assert pinned.seconds("b", copy, partial(pinned.follow, slices)) > 0
        assert pinned.copied.empty()
    assert hashed == 256 * [0] + 256 * [MiB], "as often, of no bytes and of all"
    for who in range(2):
        where, sizes = pinned.share(threads._CACHED, 16 * KiB, who, 2).args  # type: ignore[attr-defined]
        assert set(where) == {target.address + who * 8 * KiB} and sizes.sum() == 256 * MiB
    where, sizes = pinned.share(threads._DIGESTS, 256 * MiB, 0, 1).args  # type: ignore[attr-defined]
    assert len(set(where)) == 1024 and set(sizes) == {256 * KiB}
    pinned.close()


def span(low: float, high: float) -> dict[str, float]:
    return {"median": (low + high) / 2, "low": low, "high": high}


@pytest.mark.parametrize(
    ("gained", "by_time", "by_cpu_time", "said"),
    [
        (span(1.7, 1.9), span(1.2, 1.3), span(1.2, 1.3), "two drives: reached"),
        (span(1.6, 1.9), span(1.2, 1.3), span(1.2, 1.3), "NOT RESOLVED"),
        (span(1.4, 1.6), span(1.8, 2.0), span(1.9, 2.0), "the engine is to blame"),
        (span(1.4, 1.6), span(1.6, 1.8), span(1.9, 2.0), "not resolved whether"),
        (span(1.4, 1.6), span(1.3, 1.5), span(1.6, 2.0), "not resolved whether"),
        (span(1.4, 1.6), span(1.3, 1.5), span(1.9, 2.0), "had to wait too"),
        (span(1.4, 1.6), span(1.3, 1.5), span(1.4, 1.6), "nor by pinned threads"),
        (span(1.4, 1.5), span(1.2, 1.3), span(1.3, 1.4), "no limit is known"),
    ],
)
def test_what_keeps_two_drives_below_the_bar(
    gained: dict[str, float], by_time: dict[str, float], by_cpu_time: dict[str, float], said: str
) -> None:
    row = {"work": "in caches", "verified_over_first": gained}
    control = {"two_over_one": by_time, "two_over_one_by_cpu_time": by_cpu_time}
    worse = {"two_over_one": span(1, 1), "two_over_one_by_cpu_time": span(1, 1)}
    controls = [{"work": "in caches", **one} for one in (worse, control)]
    (line,) = threads._verdicts([row], [*controls, {"work": "copies"}])
    assert said in line


def test_too_few_rounds_are_refused() -> None:
    assert cli.main(["bench", "threads", "--rounds", "2"]) == 2
