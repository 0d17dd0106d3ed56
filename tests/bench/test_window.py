"""What `tutti bench window` calculates as possible, against a search on small loads."""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path

import pytest

from tutti import cli
from tutti.base.units import MiB
from tutti.bench import window
from tutti.bench.goals import verdict
from tutti.commands.bench import report_of


def every_grouping(layers: int) -> list[tuple[int, ...]]:
    """All ways to write a number of layers as a sum, in order."""
    return [
        sizes
        for count in range(1, layers + 1)
        for sizes in itertools.product(range(1, layers + 1), repeat=count)
        if sum(sizes) == layers
    ]


@pytest.mark.parametrize(("group_ms", "layer_ms"), [(0.0, 1.0), (0.5, 1.0), (4.0, 1.0), (1.0, 0.0)])
@pytest.mark.parametrize("compute_ms", [0.25, 1.0, 4.0])
def test_the_best_groups_are_those_of_a_search_without_shortcuts(
    group_ms: float, layer_ms: float, compute_ms: float
) -> None:
    layers = 6
    best = float("inf")
    for sizes in every_grouping(layers):
        arrived_ms = computed_ms = 0.0
        for size in sizes:
            arrived_ms += group_ms + size * layer_ms
            computed_ms = max(computed_ms, arrived_ms) + size * compute_ms
        best = min(best, computed_ms)
    assert window.least_ms(layers, group_ms, layer_ms, compute_ms) == pytest.approx(best)


def test_known_groups() -> None:
    # Without a pause, one layer at a time waits for the first alone.
    assert window.least_ms(4, 0.0, 1.0, 1.0) == 5
    # Two layers and a pause of 1: together at 3, computed at 5; apart at 2 and 4, computed at 5.
    assert window.least_ms(2, 1.0, 1.0, 1.0) == 5


def test_the_command_says_what_is_possible(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--layers", "4", "--slice", "4KiB", "--pages", "1", "3", "--rounds", "2"]
    where = ["bench", "window", "--dir", str(tmp_path), *words, "--warm", "0.1", "--compute"]
    assert cli.main([*where, "0.25", "4", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert not any(tmp_path.iterdir())
    assert result["verify"] == "always"
    assert [row["window"] for row in result["rows"]] == ["found", "fixed", "fixed again"] * 2
    assert result["windows"]["fixed again"]["window_nbytes"] == 32 * MiB
    assert [loop["factor"] for loop in result["loops"]] == [0.25, 4.0] * 2
    assert all(min(loop["possible"].values()) > 0 for loop in result["loops"])
    text = report_of(window, result)
    assert "1 pages, computations of 0.25, 4 times a layer's I/O: " in text
    assert "; after an idle time as long as a computation: " in text
    assert window._reach({"possible": {"in_a_row": 1.06, "idle": 1.1}}) == "proven out of reach"
    assert window._reach({"possible": {"in_a_row": 1.04, "idle": 1.1}}).startswith("not proven")
    for row in result["rows"]:
        assert 0 < row["called_ms"] < row["first_ms"]["high"] <= row["whole_ms"]["high"]


def test_loops_take_the_rate_of_the_place_where_their_pauses_are_measured() -> None:
    bench = window._Bench(argparse.Namespace(layers=2), 1000)
    bench._drive = {1: [(9.0, 1.0, 1.0)], 4: [(8.0, 1.0, 1.0)] * 2 + [(4.0, 1.0, 1.0)]}
    assert bench.rate() == 1000
    assert bench.rate(3) == 2000


def test_a_bar_is_reached_by_the_whole_interval() -> None:
    ratio = {"median": 1.0, "low": 0.9, "high": 1.1}
    for bar, words in ((1.1, "reached"), (1.0, "not resolved"), (0.8, "**not reached**")):
        assert verdict(ratio, bar) == words
    for bar, words in ((0.9, "reached"), (1.0, "not resolved"), (1.2, "**not reached**")):
        assert verdict(ratio, bar, is_least=True) == words
    shown = window._against([ratio, window._over(ratio, 2)], 1.0)
    assert shown == "1.00 [0.90, 1.10] not resolved, 0.50 [0.45, 0.55] reached"


def test_the_strict_bound_has_the_bytes_of_a_slice_once() -> None:
    # A slice takes 0.1 ms, and a command alone 0.15.
    result = {"single_command_ms": 0.15}
    assert window._strict_ms({"pages": 1, "bound_ms": 0.25}, result) == pytest.approx(0.15)
    assert window._strict_ms({"pages": 4, "bound_ms": 0.55}, result) == pytest.approx(0.45)
    # A command alone is as fast as the drive: only bytes count.
    result = {"single_command_ms": 0.05}
    assert window._strict_ms({"pages": 4, "bound_ms": 0.45}, result) == pytest.approx(0.4)
