"""`tutti bench decisions`: the events of a pool, decided again, and a simulated server."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from tutti import cli
from tutti.bench.slack import decisions


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "decisions", "--dir", str(tmp_path), "--json"]
    words += ["--requests", "12", "--rounds", "1", "--repeats", "1"]
    assert cli.main(words) == 0
    result = json.loads(capsys.readouterr().out)
    pool = result["cells"]["a pool on a file"]
    # A round: four of 16 layers are told, and two steps begin and end.
    assert pool["events_a_request"] > 4 + 4
    assert set(result["cells"]) > {"simulated server, chat", "simulated server, agents"}
    for cell in result["cells"].values():
        assert 0 < cell["decisions_a_request"] <= cell["events_a_request"]
        assert cell["decision_us"] > 0 and cell["request_ms"] > 0
    assert not list(tmp_path.iterdir()), "the pool is removed"


@pytest.mark.parametrize(("kind", "most"), [("agents", 18), ("chat", 11), ("documents", 14)])
def test_a_request_takes_few_decisions(kind: str, most: int) -> None:
    args = argparse.Namespace(requests=40, seed=1)
    timed = decisions._simulated(kind, args)
    assert not timed.state.writes
    assert timed.asked <= most * args.requests


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
