"""`tutti bench threads`: gains of threads beside what the memory of the machine allows."""

from __future__ import annotations

import json

import pytest

from tutti import cli
from tutti.bench import threads


def test_verified_loads_are_shown_beside_their_bound(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "_COMMAND_PAGES", 64)
    assert cli.main(["bench", "threads", "--json", "--rounds", "3"]) == 0
    result = json.loads(capsys.readouterr().out)
    bound = result["bound"]
    assert bound["beside_digests_gb_per_s"]["median"] > 0 < bound["copies_gb_per_s"]["median"]
    interval = {"median": 0.7, "low": 0.6, "high": 0.8}
    bound["beside_over_alone"] = bound["threads"][-1]["two_over_one"] = interval
    beside, offloaded, scales = threads.notes_of(result)[:3]
    assert "(bar 0.97): " in beside and beside.endswith("GB/s): 0.70 [0.60, 0.80]")
    assert "(bar 1.7): copies " in scales and scales.endswith(", in caches 0.70 [0.60, 0.80]")
    assert beside in threads.report(result) and scales in threads.report(result)
    (worker,) = (row for row in result["rows"] if row["digest_workers"])
    assert 0 <= worker["digests_offloaded"] <= worker["verified_commands"] == 3 * 2 * 16 * 16
    assert f"{worker['digests_offloaded']} of 1536 commands" in offloaded
    works = ["copies", "digests alone", "in caches"]
    assert [row["work"] for row in bound["threads"]] == works
    assert all(row["one_gb_per_s"]["median"] > 0 for row in bound["threads"])


def test_calls_of_a_work_have_the_same_middle_in_time() -> None:
    made: list[str] = []

    def call(name: str, took_s: float) -> float:
        made.append(name)
        return took_s

    rates = threads._rates({"a": lambda: call("a", 1.0), "b": lambda: call("b", 0.5)})
    assert made == ["a", "b", "b", "a"]
    assert rates["b"] == 2 * rates["a"] == 2 * threads._GIGABYTES


def test_plain_threads_share_all_slices() -> None:
    plain = threads._Threads()
    plain._target.array[:] = 0
    assert plain.seconds(*plain.shares(threads._COPIES, 2)) > 0
    assert plain._target.array.min() == plain._target.array.max() == 7


def test_too_few_rounds_are_refused() -> None:
    assert cli.main(["bench", "threads", "--rounds", "2"]) == 2
