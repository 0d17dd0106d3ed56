"""`tutti bench paths` over a file and over a loop device."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from loop_devices import loop_devices

from tutti import cli
from tutti.base.units import KiB, MiB
from tutti.bench import paths
from tutti.bench.summary import render

SMALL = ["bench", "paths", "--size", "8MiB", "--moved", "256KiB", "--rounds", "2"]
SMALL += ["--blocks", "4KiB", "64KiB", "--depths", "1", "8"]


def run(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, list[dict[str, object]]]:
    capsys.readouterr()
    assert cli.main([*SMALL, *words, "--json"]) == 0
    found: dict[str, list[dict[str, object]]] = json.loads(capsys.readouterr().out)
    return found


def test_every_cell_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out" / "paths.json"
    out.parent.mkdir()
    (tmp_path / "medium").mkdir()
    result = run(capsys, "--dir", str(tmp_path / "medium"), "--out", str(out))
    rows = result["rows"]
    assert json.loads(out.read_text()) == result
    cells = {
        tuple(row[name] for name in ("path", "direction", "block_nbytes", "depth")) for row in rows
    }
    assert cells == {
        (path, direction, block, depth)
        for path in paths.FILE_PATHS
        for direction in ("read", "write")
        for block in (4 * KiB, 64 * KiB)
        for depth in (1, 8)
    }
    for row in rows:
        assert 0 < row["p50_us"] <= row["p99_us"]  # type: ignore[operator]
        assert row["samples"] == 128, "of both rounds"
        assert row["p99_9_us"] is row["p99_99_us"] is None, "too few commands"
        assert row["gb_per_s"] > 0  # type: ignore[operator]
        assert len(row["runs"]) == 2  # type: ignore[arg-type]
    assert not any((tmp_path / "medium").iterdir())
    page = render("<!-- result: paths -->\n<!-- end -->\n", out.parent)
    assert ("](../bench/results/paths.png)" in page) == out.with_suffix(".png").exists()
    assert "| page-cache | write | 64 KiB | 8 |" in page and "| - | - |" in page
    assert "commands by SGL (computed: " in page


@pytest.mark.parametrize(("commands", "given"), [(999, 0), (1000, 1), (9999, 1), (10_000, 2)])
def test_percentiles_have_commands_beyond_them(commands: int, given: int) -> None:
    cell = paths.Cell("", "uring", "read", 4096, 1)
    rounds = np.array_split(np.arange(1, commands + 1, dtype=np.uint64) * 1000, 3)
    row = paths._row(cell, [paths.Measured({"gb_per_s": 1.0}, one) for one in rounds])
    high = [row[name] for name in ("p99_9_us", "p99_99_us") if row[name] is not None]
    assert len(high) == given
    assert all(commands * 0.99 < one <= commands for one in high)
    assert row["p50_us"] == pytest.approx((commands + 1) / 2)


def test_several_places(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [tmp_path / "x" / "a", tmp_path / "x" / "b", tmp_path / "y" / "a"]
    for folder in folders:
        folder.mkdir(parents=True)
    words = ("--paths", "uring", "--directions", "read", "--dir", *map(str, folders))
    assert {row["place"] for row in run(capsys, *words)["rows"]} == {"0 a", "1 b", "2 a"}
    result = run(capsys, *words[:4], "--dir", *map(str, folders[:2]), "--out", str(tmp_path / "o"))
    assert [row["place"] for row in result["rows"]] == ["a"] * 4 + ["b"] * 4
    assert "uring, b" in paths.report(result)
    assert not any(path.is_file() for folder in folders for path in folder.iterdir())


def test_what_is_written_is_random_places_of_the_file(tmp_path: Path) -> None:
    """Reads change nothing; writes go to many places, and nothing is written past the end."""
    path = tmp_path / "medium"
    path.write_bytes(b"\x55" * 4 * MiB)
    before = path.read_bytes()
    paths.measure(str(path), paths.Cell("", "uring", "read", 4096, 4), 64, seed=1)
    assert path.read_bytes() == before
    paths.measure(str(path), paths.Cell("", "threads", "write", 4096, 4), 64, seed=1)
    after = path.read_bytes()
    changed = [i for i in range(1024) if after[i * 4096] != 0x55]
    assert len(after) == len(before)
    assert 32 < len(changed) <= 64


@pytest.mark.parametrize("cause", [KeyboardInterrupt(), RuntimeError("the cause")])
def test_an_interrupted_measurement_shows_its_cause(
    cause: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "medium"
    path.write_bytes(bytes(MiB))
    cell = paths.Cell("", "uring", "read", 4096, 4)

    def fail() -> float:
        raise cause

    with monkeypatch.context() as patched:
        patched.setattr(paths.time, "thread_time", fail)
        with pytest.raises(type(cause)) as caught:
            paths.measure(str(path), cell, 64, seed=1)
    assert caught.value is cause
    assert paths.measure(str(path), cell, 64, seed=1).means["gb_per_s"] > 0, "the file is released"


def test_a_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with loop_devices(tmp_path) as loop:
        device = loop()
        words = ("--path", device, "--paths", "uring")
        assert len(run(capsys, *words)["rows"]) == 8
        assert len(run(capsys, *words)["rows"]) == 8, "it is blank again"
        with Path(device).open("r+b") as file:
            file.write(b"XFSB")
        assert cli.main([*SMALL, *words]) == 3


@pytest.mark.parametrize("wrong", ["--blocks 1KiB", "--blocks 2MiB", "--depths 256", "--depths 0"])
def test_what_is_not_acceptable(
    wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main([*SMALL, *wrong.split()]) == 2
    assert not any(tmp_path.iterdir())


def test_descriptors_by_the_specification() -> None:
    by_fragment = {row["fragment_nbytes"]: row for row in paths.descriptors()}
    small, large = by_fragment[4 * KiB], by_fragment[256 * KiB]
    assert small["sgl_nbytes"] == 16 * 16384
    assert large["sgl_nbytes"] == 16 * 256
    assert small["prp_nbytes"] == 8 * (16384 - small["prp_commands"])
    assert large["sgl_commands"] == 64
