"""Numbers in the text of pages, which the summary takes from results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tutti.bench.summary import render
from tutti.errors import ConfigError


def test_numbers_in_the_text_come_from_results(tmp_path: Path) -> None:
    result = {"rows": [{"call": "a", "us": 7.0}, {"call": "load plan", "us": 1234.56}], "s": [3, 1]}
    (tmp_path / "agent.json").write_text(json.dumps(result))
    page = "<!-- value: agent {} -->9<!-- end --> us"
    shown = [
        render(page.format(path), tmp_path) for path in ("rows/load plan/us", "rows/a/us", "s")
    ]
    assert [text.split("-->")[1].split("<")[0] for text in shown] == ["1,230", "7.00", "2.00"]
    with pytest.raises(ConfigError, match=r"agent.json has no rows/b/us"):
        render(page.format("rows/b/us"), tmp_path)
