"""What `tutti bench window` calculates as possible, against a search on small loads."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
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
    words = ["--layers", "4", "--slice", "4KiB", "--pages", "1", "--rounds", "2", "--warm", "0.1"]
    where = ["bench", "window", "--dir", str(tmp_path), *words, "--compute", "0.25", "4"]
    assert cli.main([*where, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [loop["factor"] for loop in result["loops"]] == [0.25, 4.0]
    assert all(loop["possible"] > 0 for loop in result["loops"])
    assert all(loop["stamped"]["median"] > 0 for loop in result["loops"])
    [note] = [line for line in window.notes_of(result) if line.startswith("1 pages")]
    assert "computations of 0.25, 4 times a layer's I/O" in note and note in window.report(result)
    assert "; by the engine's stamps of the same loads: " in note


def test_computations_follow_each_other_and_their_layers() -> None:
    ready = np.array([10, 11, 40, 41], np.uint64)
    assert window.end_ns(ready, 0) == 41
    assert window.end_ns(ready, 5) == 50  # the third layer is waited for
    assert window.end_ns(ready, 20) == 90  # only the first is


def test_the_strict_bound_has_the_bytes_of_a_slice_once() -> None:
    # A slice takes 0.1 ms, and a command alone 0.15.
    result = {"single_command_ms": 0.15}
    assert window._strict_ms({"pages": 1, "bound_ms": 0.25}, result) == pytest.approx(0.15)
    assert window._strict_ms({"pages": 4, "bound_ms": 0.55}, result) == pytest.approx(0.45)
    # A command alone is as fast as the drive: only bytes count.
    result = {"single_command_ms": 0.05}
    assert window._strict_ms({"pages": 4, "bound_ms": 0.45}, result) == pytest.approx(0.4)
    assert window._against([1.2, 1.6], 1.5) == "1.20, 1.60, **not reached**"
    assert window._against([1.2, 1.5], 1.5) == "1.20, 1.50, reached"
