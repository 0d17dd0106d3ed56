"""Figures: the CSV's form, what is computed from it, and the labels of the pictures."""

from __future__ import annotations

import argparse
import builtins
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tutti import cli
from tutti.base.terminal import progress
from tutti.bench.figures import paper
from tutti.bench.figures import run as figures
from tutti.bench.figures.cost import Prices, crossings, interval_per_million, per_million_tokens
from tutti.bench.figures.data import (
    BANDWIDTH,
    COLUMNS,
    COST,
    HIT_RATE,
    PREFIX,
    RATE,
    RESIDENCY,
    SHARE,
    STARS,
    Row,
    checked,
    read_csv,
    rows_of,
    write_csv,
)
from tutti.bench.figures.draw import by_length
from tutti.bench.plots import COLOURS, blank_figure
from tutti.errors import CapacityError, ConfigError


def ttft_result(system: str, scale: float = 1.0, **more: Any) -> dict[str, Any]:
    def row(rate: float) -> dict[str, Any]:
        mean = 100 * scale * rate
        return {
            "rate": rate,
            "ttft_ms": {"mean": mean, "low": mean - 5, "high": mean + 5, "n": 3},
            "itl_ms": None,
            "input_tokens_per_s": 900.0 * rate,
            "output_tokens_per_s": 100.0 * rate,
            "unstable": rate > 2,
            "partial": False,
        }

    rows = [row(rate) for rate in (1.0, 2.0, 3.0)]
    rows.append({"rate": 4.0, "unstable": True, "partial": True})
    return {"benchmark": "ttft", "source": "measured", "system": system, "rates": rows, **more}


def prefix_result(system: str, *ttft_ms: float, total: int = 1000) -> dict[str, Any]:
    rows = [
        {"prefix_tokens": 500 * i, "ttft_ms": {"mean": t, "low": t, "high": t, "n": 1}}
        for i, t in enumerate(ttft_ms)
    ]
    return {"benchmark": "ttft-prefix", "system": system, "total_tokens": total, "rows": rows}


def bandwidth_result(controller: str) -> dict[str, Any]:
    rows = [
        {"shape": "32x128K", "phase": phase, "batch_pages": pages, "gb_per_s": pages / 10}
        for phase in ("store", "retrieve", "mixed")
        for pages in (16, 64)
    ]
    return {"benchmark": "bandwidth", "controller": controller, "rows": rows}


def residency_result() -> dict[str, Any]:
    cells = [
        {
            "configuration": name,
            "limit": limit,
            "hit_ratio": limit,
            "read_gb_per_s": 2.0,
            "read_gb_per_s_range": [1.5, 2.5],
            "read_p99_ms": 10.0,
        }
        for name in ("direct only", "dual path")
        for limit in (0.5, 1.0)
    ]
    return {"benchmark": "residency", "cells": cells, "machine": {"commit": "0123456789ab"}}


RESULTS: dict[str, list[dict[str, Any]]] = {
    RATE: [ttft_result("a"), ttft_result("b", 2, source="simulated")],
    COST: [ttft_result("a"), ttft_result("b")],
    PREFIX: [prefix_result("a", 100, 50), prefix_result("b", 60, 55)],
    HIT_RATE: [prefix_result("a", 100, 50), prefix_result("b", 60, 60)],
    BANDWIDTH: [bandwidth_result("file"), bandwidth_result("memory")],
    RESIDENCY: [residency_result()],
}
FIGURES = Path(__file__).parents[2] / "docs" / "figures"


def made(folder: Path, kind: str, *argv: str) -> dict[str, Any]:
    paths = []
    for number, result in enumerate(RESULTS[kind]):
        paths.append(folder / f"{number}.json")
        paths[-1].write_text(json.dumps(result))
    return run(kind, *map(str, paths), "--out", str(folder / "figure"), *argv)


def run(*argv: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    figures.add_arguments(parser)
    return figures.run(parser.parse_args(argv), progress)


@pytest.mark.parametrize("kind", RESULTS)
def test_every_figure_is_drawn_again_from_its_csv(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed here")
    result = made(tmp_path, kind)
    assert result["files"] == ["figure.csv", "figure.png", "figure.svg"]
    again = run(kind, str(tmp_path / "figure.csv"), "--out", str(tmp_path / "again"))
    assert again["rows"] == result["rows"]
    assert (tmp_path / "again.csv").read_bytes() == (tmp_path / "figure.csv").read_bytes()
    assert (tmp_path / "again.png").read_bytes() == (tmp_path / "figure.png").read_bytes()
    assert (tmp_path / "figure.png").read_bytes()[1:4] == b"PNG"
    assert "wrote figure.csv" in figures.report(result)
    commits = {row["commit"] for row in read_csv(tmp_path / "figure.csv", kind)}
    assert commits == ({"0123456789ab"} if kind == RESIDENCY else {""})
    assert ("commit 0123456789ab" in picture_text(tmp_path, kind)) == (kind == RESIDENCY)


@pytest.mark.parametrize(("kind", "word"), [(RATE, "simulated"), (BANDWIDTH, "emulated")])
def test_what_is_not_measured_is_labelled(kind: str, word: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed here")
    result = made(tmp_path, kind)
    assert f"partly {word}" in picture_text(tmp_path, kind)
    assert word in figures.report(result)
    rows = [row for row in read_csv(tmp_path / "figure.csv", kind) if row["source"] == word]
    write_csv(tmp_path / "alone.csv", rows, kind)
    (tmp_path / "figure.svg").unlink()
    run(kind, str(tmp_path / "alone.csv"), "--out", str(tmp_path / "figure"))
    assert f"({word})" in picture_text(tmp_path, kind)


@pytest.mark.slow
def test_one_command_draws_the_papers_figures_from_the_committed_csvs(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed here")
    result = run("paper", str(FIGURES), "--out", str(tmp_path))
    assert set(result["sources"]) == {"measured", "simulated", *STARS}
    for one in paper.FIGURES:
        csv = tmp_path / f"{one.name}.csv"
        assert csv.read_bytes() == (FIGURES / csv.name).read_bytes()
        assert csv.with_suffix(".png").read_bytes()[1:4] == b"PNG"
        text = csv.with_suffix(".svg").read_text()
        assert re.search(r"\((simulated|measured)\)", text), "the picture says how it was made"
        assert re.search(r"commit [0-9a-f]{12}\b", text), "and from which code"
        assert "round-robin" not in text, "the router is not part of a system's name"
        committed = (FIGURES / f"{one.name}.svg").read_text()
        texts = [re.findall("<!-- (.*?) -->", svg) for svg in (text, committed)]
        assert texts[0] == texts[1] and (FIGURES / f"{one.name}.png").exists()
    (tmp_path / "tutti-fig11.csv").unlink()
    with pytest.raises(ConfigError, match=r"lacks tutti-fig11 \(.csv\); `tutti simulate --paper`"):
        run("paper", str(tmp_path), "--out", str(tmp_path))
    with pytest.raises(ConfigError, match="is not a folder"):
        run("paper", str(tmp_path / "none"), "--out", str(tmp_path))


def test_the_committed_pictures_are_of_the_committed_csvs_and_the_command() -> None:
    for one in paper.FIGURES:
        text = (FIGURES / f"{one.name}.svg").read_text()
        assert f"<!-- {one.title} (" in text, "draw it with `tutti bench figures paper`"
        commits = {row["commit"] for row in read_csv(FIGURES / f"{one.name}.csv", one.kind)} - {""}
        assert f"<!-- commit {', '.join(sorted(commits))} -->" in text


def test_stars_tell_what_was_used_to_fit(tmp_path: Path) -> None:
    """Figure 11's are hollow, Figure 12's are not, and Figure 2 has both."""
    pytest.importorskip("matplotlib", reason="matplotlib is not installed here")
    figures_of = {"tutti-fig02": SHARE, "tutti-fig11": PREFIX, "tutti-fig12": PREFIX}
    assert cli.main(["simulate", "--paper", str(tmp_path), "--only", *figures_of]) == 0
    hollow, filled = "<!-- published, used to fit -->", "<!-- published, not used to fit -->"
    for name, stars in zip(figures_of, ((True, True), (True, False), (False, True)), strict=True):
        run(figures_of[name], str(tmp_path / f"{name}.csv"), "--out", str(tmp_path / "figure"))
        text = picture_text(tmp_path, name)
        assert (hollow in text, filled in text) == stars
        edge, fill = COLOURS[3 if name == "tutti-fig11" else 0].lower(), "fill: #ffffff; stroke:"
        assert (f"{fill} {edge}" in text) == stars[0], "hollow, in the colour of its system"


def test_lines_without_a_colour_take_the_palettes() -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed here")
    canvas = blank_figure(1)
    assert canvas and canvas[1][0].plot([0, 1], [0, 1])[0].get_color() == COLOURS[0]


def test_the_measured_figure_is_of_the_measured_result(tmp_path: Path) -> None:
    """The others are simulated."""
    name = "residency.json"
    result = json.loads((FIGURES.parents[1] / "bench" / "results" / name).read_text())
    rows = checked(rows_of(result, RESIDENCY, name), RESIDENCY, name)
    write_csv(tmp_path / "again.csv", rows, RESIDENCY)
    committed = (FIGURES / "dual-blade-residency.csv").read_bytes()
    assert (tmp_path / "again.csv").read_bytes() == committed, "run `tutti bench figures residency`"


def test_batches_below_an_object_are_one_point() -> None:
    """Contexts of 16 and 64 tokens both move a page of 64."""
    rows = rows_of(bandwidth_result("file"), BANDWIDTH, "r", page_tokens=64)
    stored = [row for row in rows if row["phase"] == "store"]
    assert by_length(stored + [row | {"gb_per_s": "2.6"} for row in stored[:1]]) == [
        (1024, pytest.approx(2.1)),
        (4096, pytest.approx(6.4)),
    ]


def picture_text(folder: Path, kind: str) -> str:
    """Texts of the picture; matplotlib keeps each as a comment beside its outlines."""
    return (folder / "figure.svg").read_text()


@pytest.mark.parametrize("kind", RESULTS)
def test_without_matplotlib_the_csv_is_there(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def hidden(name: str, *rest: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", hidden)
    result = made(tmp_path, kind)
    assert result["files"] == ["figure.csv"]
    assert "matplotlib is not installed" in figures.report(result)


def test_rows_of_results() -> None:
    rows = rows_of(RESULTS[RATE][0], RATE, "r")
    assert [row["ttft_ms"] for row in rows] == ["100.0", "200.0", "300.0", ""]
    assert [row["unstable"] for row in rows] == ["no", "no", "yes", "yes"]
    rows = rows_of(bandwidth_result("memory"), BANDWIDTH, "r", page_tokens=64)
    assert {row["source"] for row in rows} == {"emulated"}
    assert [row["tokens"] for row in rows] == ["1024", "4096"] * 2
    for kind, wrong in ((RATE, prefix_result("a", 1)), (BANDWIDTH, ttft_result("a")), (COST, {})):
        with pytest.raises(ConfigError, match="has no figure"):
            rows_of(wrong, kind, "r")
    with pytest.raises(ConfigError, match="not a whole result"):
        rows_of({"benchmark": "ttft", "rates": [{}]}, RATE, "r")


def cost_row(**changes: str) -> Row:
    row = {"system": "a", "source": "measured", "rate": "1", "unstable": "no", "partial": "no"}
    row |= {"input_tokens_per_s": "900", "output_tokens_per_s": "100"}
    row |= {"tokens_low_per_s": "500", "tokens_high_per_s": "1250"}
    return row | {"gpus": "2", "dram_gb": "256", "ssd_gb": "14000"} | changes


def test_cost_of_a_million_tokens() -> None:
    prices = Prices(gpu=5.0, dram_gb=0.0088, ssd_gb=0.000082)
    per_hour = 2 * 5.0 + 256 * 0.0088 + 14000 * 0.000082
    assert prices.per_hour(cost_row()) == pytest.approx(per_hour)
    # 1000 tokens a second are 3.6 million an hour.
    assert per_million_tokens(cost_row(), prices) == pytest.approx(per_hour / 3.6)
    assert (
        per_million_tokens(cost_row(input_tokens_per_s="", output_tokens_per_s="0"), prices) is None
    )
    ends = interval_per_million(cost_row(), prices)
    assert ends == pytest.approx((per_hour / 4.5, per_hour / 1.8))
    assert interval_per_million(cost_row(tokens_low_per_s=""), prices) is None


def test_cost_comes_from_flags(tmp_path: Path) -> None:
    result = made(tmp_path, COST, "--machine", "a:2,10,100", "--gpu-price", "3.6")
    costs = {(cost["system"], cost["rate"]): cost["dollars"] for cost in result["cost"]}
    assert costs["b", 1.0] == pytest.approx(1.0)
    assert costs["a", 1.0] == pytest.approx((2 * 3.6 + 10 * 0.0088 + 100 * 0.000082) / 3.6)
    with pytest.raises(ConfigError, match="SYSTEM:GPUS"):
        made(tmp_path, COST, "--machine", "a:2")


def test_crossings() -> None:
    assert crossings([(0, 100), (100, 0)], [(0, 50), (100, 50)]) == [50]
    assert crossings([(0, 1), (10, 2)], [(0, 3), (10, 4)]) == []
    assert crossings([(0, 0), (5, 5), (10, 0)], [(0, 2), (10, 2)]) == [2, 8]
    assert crossings([(0, 0), (10, 10)], [(5, 0), (15, 15)]) == [], "only where both are known"
    assert crossings([(0, 1), (1, 1)], [(0, 1), (1, 1)]) == [], "the same curve does not cross"
    assert crossings([(0, 1)], [(5, 1)]) == [], "nowhere both"
    with pytest.raises(ConfigError, match="two values"):
        crossings([(0, 1), (0, 2)], [(0, 1), (1, 1)])


def test_the_crossing_of_hit_rates_is_reported(tmp_path: Path) -> None:
    result = made(tmp_path, HIT_RATE)
    (found,) = result["crossings"]
    assert found == {"a": "a", "b": "b", "hit_rates_percent": [pytest.approx(40.0)]}
    assert "cross at: 40.0 %" in figures.report(result)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no row"),
        ("system,source\na,measured\n", "lacks rate"),
        ("{header}\na,measured,fast,1,1,1,1,1,1,no,no,c\n", "rate is 'fast', no number"),
        ("{header}\na,measured,nan,1,1,1,1,1,1,no,no,c\n", "rate is 'nan', no number"),
        ("{header}\na,guessed,1,1,1,1,1,1,1,no,no,c\n", "source is one of"),
        ("{header}\na,measured,1\n", "lacks ttft_ms"),
        ("{header},colour\na,measured,1,1,1,1,1,1,1,no,no,c,red\n", "has colour in line 2"),
        ("{header}\na,measured,1,1,1,1,1,1,1,no,no,c,1\n", "a cell without a column"),
        ("\x00\xff", "give a CSV|no row|lacks"),
    ],
)
def test_a_csv_that_is_wrong_says_where(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_bytes(text.replace("{header}", ",".join(COLUMNS[RATE])).encode("latin-1"))
    with pytest.raises(ConfigError, match=message):
        read_csv(path, RATE)


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        (
            (*COLUMNS[RATE], "colour"),
            "colour in line 2, which no figure of rate has: it is of another",
        ),
        (COLUMNS[RATE][:-1], "lacks commit in line 2; a figure of rate needs"),
    ],
)
def test_the_command_refuses_a_csv_of_another_version(
    columns: tuple[str, ...], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, words = tmp_path / "x.csv", {"system": "a", "source": "measured"}
    cells = [words.get(name, "1") for name in columns]
    path.write_text(f"{','.join(columns)}\n{','.join(cells)}\n")
    figure = ["--out", str(tmp_path / "figure")]
    assert cli.main(["bench", "figures", RATE, str(path), *figure]) == 2
    assert says in capsys.readouterr().err
    assert not list(tmp_path.glob("figure*")), "nothing is written"


def test_files_that_are_not_there_or_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give a CSV"):
        read_csv(tmp_path / "none.csv", RATE)
    with pytest.raises(ConfigError, match="give a result"):
        run(RATE, str(tmp_path / "none.json"), "--out", str(tmp_path / "x"))
    with pytest.raises(CapacityError, match=r"/dev/full: .*; free space on this disk, or"):
        write_csv(Path("/dev/full"), checked(rows_of(ttft_result("a"), RATE, "r"), RATE, "r"), RATE)
