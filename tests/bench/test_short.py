"""`tutti bench short`: what short transfers cost, and the time of one page's put."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from tutti import cli
from tutti.bench import short


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "short", "--dir", str(tmp_path), "--json", "--calls", "2", "--rounds", "3"]
    assert cli.main(words) == 0
    result = json.loads(capsys.readouterr().out)
    calls = {(row["pages"], row["call"], row["scheduled"]) for row in result["calls"]}
    controls = {(0, call, True) for call in short.CONTROLS}
    assert calls == controls | set(itertools.product((1, 4, 16), short.CALLS, (True, False)))
    rows = short.rows_of(result)
    assert {f"{call}, at once" for call in short.CALLS} < {row[1] for row in rows}
    assert [row[:2] for row in rows[-2:]] == [("", call) for call in short.CONTROLS]
    assert {row[1] for row in rows if row[4] == ""} == set(short.CONTROLS)
    assert all(0 < row["best_us"] <= row["median_us"] for row in result["calls"])
    page = result["page"]
    assert page["nbytes"] == 8 << 20 and page["rounds"] == 3
    assert set(page["ratios"]) == {"put", "put, no digests", "put, at once"}
    assert all(ms > 0 for ms in page["ms"].values())
    assert not list(tmp_path.iterdir()), "the pools and the file are removed"


def test_what_misses_a_bar_says_so() -> None:
    row = {"pages": 1, "call": "put", "scheduled": True, "best_us": 20.0}
    page = {"nbytes": 8 << 20, "rounds": 3, "in_turns": True, "ms": {"put": 6.0}}
    result = {
        "bars_us": short.BARS_US,
        "ratio_bar": short.RATIO,
        "calls_on": "memory",
        "calls": [row | {"median_us": 60.0}, row | {"median_us": 61.0}],
        "page": page | {"ratios": {"put": {"median": 1.6, "low": 1.4, "high": 1.7}}},
    }
    within, missed = short.rows_of(result)
    assert within[-1] == "" and missed[-1] == "**not reached**"
    assert short.notes_of(result)[-1].endswith("put 1.600 [1.400, 1.700] **not reached**")


@pytest.mark.parametrize("words", [["--dir", "/none"], ["--calls", "0"], ["--rounds", "0"]])
def test_unacceptable_arguments(words: list[str], tmp_path: Path) -> None:
    assert cli.main(["bench", "short", "--dir", str(tmp_path), *words]) == 2


def test_the_chain_of_functions_has_code_for_each() -> None:
    chain = short._chain()
    functions = chain.__globals__
    assert len({id(functions[f"f{i}"].__code__) for i in range(60)}) == 60
    assert short._frames_cost(chain)[short.FRAMES] > 0
