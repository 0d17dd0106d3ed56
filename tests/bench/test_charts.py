"""Bars that need no package, the picture of the README, and pictures by matplotlib."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tutti.bench import summary
from tutti.bench.charts import Bars, bars_svg, bars_text
from tutti.bench.plots import COLOURS, plot_paths

ROOT = Path(__file__).parents[2]
CHARTS = [Bars("load, GB/s", [("ours", 2.0), ("theirs <&>", 1.0)]), Bars("none", [("x", 0.0)])]


def test_the_longest_bar_is_twice_the_half_one() -> None:
    lines = bars_text(CHARTS).splitlines()
    assert lines[1].count("█") == 2 * lines[2].count("█")
    assert lines[1].endswith("2.00")
    assert max(map(len, lines)) <= 80


def test_the_svg_is_xml_and_its_bars_have_the_lengths() -> None:
    root = ElementTree.fromstring(bars_svg("title & more", CHARTS))
    bars = [node for node in root.iter() if node.tag.endswith("rect") and "x" in node.attrib]
    assert float(bars[0].attrib["width"]) == 2 * float(bars[1].attrib["width"])
    assert len(bars) == 3


def test_the_readmes_picture_is_drawn_from_the_result(tmp_path: Path) -> None:
    results, page = tmp_path / "bench/results", tmp_path / "docs/results.md"
    for folder in (results, page.parent):
        folder.mkdir(parents=True)
    page.write_text("")
    shutil.copy(ROOT / "bench/results/peers.json", results)
    assert summary.main([str(page), str(results)]) == 0
    drawn = (results / "peers.svg").read_text()
    assert (ROOT / "bench/results/peers.svg").read_text() == drawn
    commit = json.loads((results / "peers.json").read_text())["machine"]["commit"]
    assert f"(measured, commit {commit})" in drawn


def test_pictures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    both = [{"path": path, "block_nbytes": n} for path in ("a", "b") for n in (4096, 65536)]
    measured = {"direction": "read", "place": "", "depth": 1, "gb_per_s": 1.0, "p99_us": 1.0}
    assert plot_paths({"rows": [one | measured for one in both]}, tmp_path / "paths.svg")
    drawn = set(re.findall(r"stroke: (#\w{6})", (tmp_path / "paths.svg").read_text()))
    assert drawn >= {colour.lower() for colour in COLOURS[:2]} and "#1f77b4" not in drawn


def test_without_matplotlib_there_is_no_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    assert not plot_paths({"rows": []}, tmp_path / "paths.png")
