"""`tutti bench agent`: look-ups and plans over the socket, beside the same in one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tutti import cli
from tutti.bench import agent


def test_both_sides_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--dir", str(tmp_path), "--rounds", "3", "--pages", "16", "--batch", "4"]
    assert cli.main(["bench", "agent", *words, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    both, alone = result["rows"][:4], result["rows"][4:]
    calls = ["look-up", "load plan", "put plan", "look-up of no key"]
    assert [row["call"] for row in both] == calls
    assert all(row["agent_us"]["median"] > 0 < row["in_process_us"]["median"] for row in both)
    assert [row["call"] for row in alone][:2] == ["echo, after a pause", "echo, again"]
    assert all(row["agent_us"]["median"] > 0 for row in alone)
    assert not any({"in_process_us", "bar_us"} & set(row) for row in alone)
    assert "plans of 4 pages" in agent.report(result)
    assert not list(tmp_path.iterdir())


def test_what_misses_its_bar_is_marked(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [agent._row("put plan", [at_us] * 3, [100.0] * 3) for at_us in (149.0, 151.0)]
    assert [cells[-1] for cells in agent.rows_of({"rows": rows})] == ["", "not reached"]
    assert cli.main(["bench", "agent", "--rounds", "0"]) != 0
    assert "rounds" in capsys.readouterr().err
