"""Numbers in the text of pages, which the summary takes from results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tutti.bench.summary import render
from tutti.errors import ConfigError


def test_numbers_in_the_text_come_from_results(tmp_path: Path) -> None:
    rows = [
        {"call": "a", "on": "file", "us": 7.0},
        {"call": "load plan", "on": "file", "us": 1234.56},
        {"call": "load plan", "on": "drive", "us": 8.0},
    ]
    result = {"rows": rows, "s": [3, 1]}
    (tmp_path / "agent.json").write_text(json.dumps(result))
    page = "<!-- value: agent {} -->9<!-- end --> us"
    paths = ("rows/load plan/us", "rows/a/us", "rows/load plan, drive/us", "s")
    shown = [render(page.format(path), tmp_path).split("-->")[1].split("<")[0] for path in paths]
    assert shown == ["1,230", "7.00", "8.00", "2.00"]
    for path in ("rows/b/us", "rows/a, drive/us"):
        with pytest.raises(ConfigError, match=f"agent.json has no {path}"):
            render(page.format(path), tmp_path)
