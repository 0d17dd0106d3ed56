"""`tutti bench decisions`: the events of a pool, decided again, and a simulated server."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from tutti import cli
from tutti.bench.simulate.hardware import machine
from tutti.bench.slack import decisions
from tutti.bench.slack import run as slack
from tutti.scheduler.policy import Limits


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "decisions", "--dir", str(tmp_path), "--json"]
    words += ["--requests", "12", "--rounds", "1", "--repeats", "1"]
    assert cli.main(words) == 0
    result = json.loads(capsys.readouterr().out)
    pool = result["cells"]["a pool on a file"]
    # A round: four of 16 layers are told, and two steps begin and end.
    assert pool["events_a_request"] > 4 + 4
    servers = ("chat", "agents, D5-P5336, little memory", "documents, D5-P5336, cache ends")
    assert set(result["cells"]) > {f"simulated server, {name}" for name in servers}
    for cell in result["cells"].values():
        assert 0 < cell["decisions_a_request"] <= cell["events_a_request"]
        assert cell["decision_us"] > 0 and cell["request_ms"] > 0
    assert not list(tmp_path.iterdir()), "the pool is removed"


@pytest.mark.parametrize(("kind", "most"), [("agents", 18), ("chat", 11), ("documents", 14)])
def test_a_request_takes_few_decisions(kind: str, most: int) -> None:
    args = argparse.Namespace(requests=40, seed=1)
    timed = decisions._simulated(*decisions._SERVERS[kind], args)
    assert not timed.state.writes
    assert timed.asked <= most * args.requests


@pytest.mark.parametrize("name", [name for name in decisions._SERVERS if "," in name])
def test_a_pressed_cell_is_that_of_bench_slack(name: str) -> None:
    kind, drive, condition = decisions._SERVERS[name]
    timed = decisions._simulated(kind, drive, condition, argparse.Namespace(requests=40, seed=1))
    limits = Limits(locked_pages=512, staged_pages=512)
    cell = slack._Cell(machine(drive, "H100"), kind, condition, limits)
    expected = cell.run("slack", cell.requests(40, 1), 1)
    totals = timed.state.totals
    assert totals.error_ns / totals.expected_ns == expected["prediction_error"]
    assert totals.forced_pages == expected["forced_pages"] > 0


def test_a_bar_can_be_missed() -> None:
    cell = {"events_a_request": 9.0, "decisions_a_request": 4.0}
    cells = {
        "fast": cell | {"decision_us": 19.0, "request_ms": 0.2},
        "slow": cell | {"decision_us": 21.0, "request_ms": 0.2},
    }
    bars = {"decision_us": decisions.DECISION_US, "request_ms": decisions.REQUEST_MS}
    fast, slow = decisions.rows_of({"cells": cells, "bars": bars})
    assert fast[-1] == "" and slow[-1] == "decision_us **not reached**"


def test_a_folder_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "decisions", "--dir", str(tmp_path / "none")]) == 2
    assert "No such file or directory; correct the path" in capsys.readouterr().err
