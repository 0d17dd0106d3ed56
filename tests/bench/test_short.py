"""`tutti bench short`: what short transfers cost, and the time of one page's put."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from tutti import cli
from tutti.bench import short


def test_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(short, "_WARM", 1)
    made: list[str] = []
    make = short.temporary_pool

    def pool_of(paths: list[str], *rest: Any, **more: Any) -> Any:
        made.append(paths[0].removeprefix(f"{tmp_path}/short.tutti."))
        return make(paths, *rest, **more)

    monkeypatch.setattr(short, "temporary_pool", pool_of)
    words = ["bench", "short", "--dir", str(tmp_path), "--json", "--calls", "2", "--rounds", "3"]
    assert cli.main([*words, "--capacity", "256MiB"]) == 0
    assert made[:3] == ["put", "put-no digests", "put-at once"]
    assert made[3:9] == [*made[1:3], *made[:1], *made[2:3], *made[:2]], "in three orders"
    result = json.loads(capsys.readouterr().out)
    calls = {(row["pages"], row["call"], row["scheduled"]) for row in result["calls"]}
    of_pages = (*short.CALLS, *short.MODELS)
    expected = set(itertools.product((1, 4, 16), of_pages, (True, False)))
    assert calls == expected | {(0, short.NATIVE, True)}
    rows = short.rows_of(result)
    assert {f"{call}, at once" for call in of_pages} < {row[1] for row in rows}
    assert rows[-1][:2] == ("", short.NATIVE)
    assert {row[1].removesuffix(", at once") for row in rows if row[4] == ""} == {
        *short.MODELS,
        short.NATIVE,
    }
    assert set(result["steps"]) == set(short.MODELS)
    bounds = [note for note in short.notes_of(result) if "model and native call together" in note]
    assert len(bounds) == 2 and "functions" in bounds[0] and "locks" in bounds[1]
    assert all(0 < row["best_us"] <= row["median_us"] for row in result["calls"])
    page = result["page"]
    assert page["nbytes"] == 8 << 20 and page["rounds"] == 3
    assert set(page["ratios"]) == {"put", "put, no digests", "put, at once"}
    assert all(ms > 0 for ms in page["ms"].values())
    assert not list(tmp_path.iterdir()), "the pools and the file are removed"


def test_what_misses_a_bar_says_so() -> None:
    row = {"pages": 1, "call": "put", "scheduled": True, "best_us": 20.0}
    rows = [row | {"median_us": 60.0}, row | {"median_us": 61.0}]
    within, missed = short.rows_of({"bars_us": short.BARS_US, "calls": rows})
    assert within[-1] == "" and missed[-1] == "**not reached**"


@pytest.mark.parametrize("words", [["--dir", "/none"], ["--calls", "0"], ["--rounds", "0"]])
def test_unacceptable_arguments(words: list[str], tmp_path: Path) -> None:
    assert cli.main(["bench", "short", "--dir", str(tmp_path), *words]) == 2


@pytest.mark.parametrize(
    ("us", "verdict"),
    [(10.0, "does not show"), (50.0, "so many steps in Python do not reach it"), (41.0, "where")],
)
def test_what_the_controls_bound(us: float, verdict: str) -> None:
    row = {"scheduled": True, "best_us": 1.0}
    rows = [
        row | {"pages": n, "call": model, "median_us": us - (us == 41.0 and n == 1)}
        for n in (1, 4, 16)
        for model in short.MODELS
    ]
    rows += [row | {"pages": 0, "call": short.NATIVE, "median_us": 20.0}]
    rows += [rows[0] | {"scheduled": False, "median_us": 500.0}]
    steps = {model: [["C calls", 3], ["functions", 7]] for model in short.MODELS}
    page = {"nbytes": 8 << 20, "rounds": 3, "in_turns": True, "ms": {}}
    page["ratios"] = {"put": {"median": 1.6, "low": 1.4, "high": 1.7}}
    result = {"calls": rows, "bars_us": short.BARS_US, "steps": steps, "page": page}
    notes = short.notes_of(result | {"ratio_bar": 1.5, "calls_on": "memory"})
    note = notes[4]
    assert notes[-1].endswith("put 1.600 [1.400, 1.700] **not reached**")
    assert note.startswith("put, 3 C calls, 7 functions for one page") and verdict in note
