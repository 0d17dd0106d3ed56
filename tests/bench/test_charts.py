"""Bars that need no package: in a terminal, as SVG, and the picture of the README."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

from tutti.bench.charts import Bars, bars_svg, bars_text

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


def test_the_readmes_picture_is_drawn_from_the_committed_result() -> None:
    result = json.loads((ROOT / "bench/results/peers.json").read_text())
    peers = next(iter(result["cells"].values()))["peers"]  # the largest pages
    charts = [
        Bars(
            f"{phase}, GB/s",
            [(name, facts[phase]["median_gb_per_s"]) for name, facts in peers.items()],
        )
        for phase in ("load", "store")
    ]
    drawn = bars_svg("Pages of 8 MiB on a 2-core machine with one virtio disk", charts)
    assert (ROOT / "bench/results/peers.svg").read_text() == drawn
