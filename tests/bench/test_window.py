"""The groupings that `tutti bench window` calculates, against all of them on small loads."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from tutti import cli
from tutti.bench import window


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
@pytest.mark.parametrize("first_max_ms", [2.6, 100.0])
def test_the_best_groupings_are_those_of_a_search_without_shortcuts(
    group_ms: float, layer_ms: float, compute_ms: float, first_max_ms: float
) -> None:
    layers = 6
    best = [float("inf")] * layers
    for sizes in every_grouping(layers):
        arrived_ms = computed_ms = 0.0
        for size in sizes:
            arrived_ms += group_ms + size * layer_ms
            computed_ms = max(computed_ms, arrived_ms) + size * compute_ms
        first_ms = group_ms + sizes[0] * layer_ms
        over = computed_ms / (max(arrived_ms, layers * compute_ms) + first_ms)
        if first_ms <= first_max_ms:
            best[len(sizes) - 1] = min(best[len(sizes) - 1], over)
    found = window.groupings(layers, group_ms, layer_ms, compute_ms, first_max_ms)
    assert [over for _, over in found] == pytest.approx(best)
    assert found[0][0] == 1.0 and found[1][0] == pytest.approx(
        (group_ms + 6 * layer_ms) / (2 * group_ms + 6 * layer_ms)
    )


def test_known_groupings() -> None:
    # Without a pause, one layer at a time waits for the first alone, at the full rate.
    assert window.groupings(4, 0.0, 1.0, 1.0, 1.0)[3] == (1.0, pytest.approx(1.0))
    # Two layers and a pause of 1: together at 3, computed at 5; apart at 2 and 4, computed at 5.
    assert window.groupings(2, 1.0, 1.0, 1.0, 9.0) == [
        (1.0, pytest.approx(5 / 6)),
        (0.75, pytest.approx(5 / 6)),
    ]
    # Together, the first layer is late.
    assert window.groupings(2, 1.0, 1.0, 1.0, 2.0)[0] == (1.0, float("inf"))


def test_the_command_says_which_bars_exclude_each_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--layers", "4", "--slice", "4KiB", "--pages", "1", "--rounds", "2", "--warm", "0.1"]
    factors = ["0.25", "4"]
    where = ["bench", "window", "--dir", str(tmp_path), *words, "--compute", *factors]
    assert cli.main([*where, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [one["factor"] for one in result["groupings"]] == [0.25, 4.0]
    [note] = [line for line in window.notes_of(result) if line.startswith("calculated")]
    assert "where a layer computes 0.25, 4 times its I/O" in note and note in window.report(result)


def test_pauses_make_the_bars_of_rate_and_of_waiting_exclude_each_other() -> None:
    times = {"median": 5.707}
    row = {"pages": 1, "window": "fixed", "whole_ms": times, "bound_ms": 0.479}
    loops = [{"pages": 1, "factor": factor} for factor in (0.25, 1.0, 4.0)]
    result = {"rows": [row], "loops": loops, "layers": 32, "single_command_ms": 0.321}
    for one in window.groupings_of(result):
        assert one["over_bound"] > window.LOOP_BAR and one["rate"] < window.RATE_BAR
    # A command alone that takes no longer than one more layer: no pause, and both are reached.
    row["bound_ms"] = 2 * 5.707 / 32
    for one in window.groupings_of(result | {"single_command_ms": 5.707 / 32}):
        assert one["over_bound"] <= 1.0 + 1e-9 and one["rate"] == 1.0
    assert window.groupings_of(result | {"rows": []}) == []
