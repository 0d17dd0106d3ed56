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
    bound["beside_over_alone"] = {"median": 0.7, "low": 0.6, "high": 0.8}
    note = threads.notes_of(result)[0]
    assert "(bar 0.97): " in note and note.endswith("GB/s): 0.70 [0.60, 0.80]")
    assert note in threads.report(result)


def test_too_few_rounds_are_refused() -> None:
    assert cli.main(["bench", "threads", "--rounds", "2"]) == 2
