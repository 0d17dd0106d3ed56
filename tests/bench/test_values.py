"""Numbers in the text of pages, which the summary takes from results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tutti.bench.many_drives import tables
from tutti.bench.summary import render
from tutti.errors import ConfigError


def test_numbers_in_the_text_come_from_results(tmp_path: Path) -> None:
    rows = [
        {"call": "a", "on": "file", "us": 7.0},
        {"call": "load plan", "on": "file", "us": 1234.56},
        {"call": "load plan", "on": "drive", "us": 8.0},
        {"call": "load plan, again", "on": "drive", "us": 6.0},
    ]
    result = {"rows": rows, "s": [3, 1]}
    (tmp_path / "agent.json").write_text(json.dumps(result))
    page = "<!-- value: agent {} -->9<!-- end --> us"
    paths = ("rows/load plan/us", "rows/a/us", "rows/load plan, drive/us", "s", "rows/*, file/us")
    paths += ("rows/load plan, again; drive/us",)
    shown = [render(page.format(path), tmp_path).split("-->")[1].split("<")[0] for path in paths]
    assert shown == ["1,230", "7.00", "8.00", "2.00", "7.00 to 1,230", "6.00"]
    for path in ("rows/b/us", "rows/a, drive/us"):
        with pytest.raises(ConfigError, match=f"agent.json has no {path}"):
            render(page.format(path), tmp_path)


def test_marks_show_intervals_ranges_and_whether_goals_are_reached(tmp_path: Path) -> None:
    def cell(median: float, low: float, high: float) -> dict[str, object]:
        return {"ratio": {"median": median, "low": low, "high": high}}

    cells = {"a, huge": cell(1.234, 1.1, 1.3), "b, huge": cell(1, 0.9, 1.1), "c": cell(0.8, 0, 0.9)}
    result = {"cells": cells | {"skipped": {"why": "no fio"}}}
    (tmp_path / "agent.json").write_text(json.dumps(result))
    for mark, shown in {
        "value: agent cells/a, huge/ratio": "1.23 [1.10, 1.30]",
        "value: agent cells/*/ratio": "0.800 to 1.23",
        "value: agent cells/*, huge/ratio": "1 to 1.23",
        "bar: agent cells/a, huge/ratio at least 1.1": "reached",
        "bar: agent cells/a, huge/ratio at most 1.05": "**not reached**",
        "bar: agent cells/b, huge/ratio at least 1": "not resolved",
        "bar: agent cells/b, huge/ratio/median at least 1": "reached",
        "bar: agent cells/*, huge/ratio at least 0.9": "reached in both",
        "bar: agent cells/*/ratio at least 1": (
            "reached in 1, not resolved in 1, **not reached** in 1 of 3"
        ),
    }.items():
        assert (
            render(f"<!-- {mark} -->?<!-- end -->", tmp_path)
            == f"<!-- {mark} -->{shown}<!-- end -->"
        )
    with pytest.raises(ConfigError, match="no cells/d"):
        render("<!-- bar: agent cells/d/ratio at most 1 -->?<!-- end -->", tmp_path)


def test_the_model_of_many_drives_comes_from_results(tmp_path: Path) -> None:
    def cells(**costs: float) -> dict[str, object]:
        named = {name: {"a": {"median_cpu_s_per_gb": cost}} for name, cost in costs.items()}
        return {"cells": named}

    def reads(shape: str, huge: float, ordinary: float) -> dict[str, object]:
        pages = {"huge": huge, "ordinary": ordinary}
        return cells(**{f"retrieve {shape}, {name} pages": cost for name, cost in pages.items()})

    results = {
        "threads": {"cpu_ns_per_command": 100.0},
        "digest": cells(**{"1 GiB": 0.08}),
        "bandwidth-fio": reads("32x256KiB", 0.02, 0.1),
        "cpu-fio": reads("1x256KiB", 0.02, 0.2),
    }
    text = tables(results.__getitem__)
    assert "| engine, 0.100 us per command | 0.001 cores | 0.022 cores |" in text
    assert "| digests, 0.080 CPU-s/GB | 1.16 cores, by workers |" in text
    assert "| 14.5 GB/s | 9.8 GB/s: one thread does the work of 1.47 cores |" in text
    assert "| service threads (cores in use) | 4 (1.2) | 8 (2.3) |" in text
    assert "reaches 10.0 or 5.0 GB/s" in text
    for name, result in results.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(result))
    page = "<!-- model: many drives -->\nold\n<!-- end -->\n"
    assert render(page, tmp_path) == page.replace("old\n", f"\n{text}\n\n")
