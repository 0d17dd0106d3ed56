"""`tutti profile`: small grids on a real file, interruption and going on, and what is refused."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
from memory_controller import MemoryController

from tutti.base.terminal import Progress
from tutti.base.units import KiB, MiB
from tutti.bench.profile import run as profile
from tutti.errors import CapacityError, ConfigError
from tutti.machine import machine_facts
from tutti.profiles import medium_timing as profile_medium
from tutti.profiles.medium_timing import Medium
from tutti.scheduler.profile import load_profile
from tutti.scheduler.roofline import DENSE_MODELS

GRID = ("--sizes", "256KiB", "1MiB", "--slices", "64KiB", "256KiB")
DRIVE = "nvme:0000:03:00.0"
POINTS = 12  # three directions, two sizes, two slices


def options(tmp_path: Path, *more: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    profile.add_arguments(parser)
    fixed = ["--medium", str(tmp_path), "--out", str(tmp_path / "p.json"), "--repeats", "2"]
    return parser.parse_args([*fixed, "--file-size", "8MiB", *GRID, *more])


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    return profile.run(arguments, lambda label, total: Progress(label, total))


def test_a_profile_is_measured_and_loads_on_the_same_machine(tmp_path: Path) -> None:
    result = run(options(tmp_path))
    loaded = load_profile(tmp_path / "p.json")
    assert "io" not in loaded.estimated
    assert [len(result["io"][d]) for d in profile.DIRECTIONS] == [4, 4, 4]
    assert loaded.read_us(MiB) > 0
    assert loaded.interference >= 1
    assert loaded.mismatches(machine_facts(tmp_path), DENSE_MODELS["llama-3.1-8b"]) == []
    text = profile.report(result)
    assert "estimated, not measured: compute, movers" in text or "not measured: nothing" in text
    left = {path.name for path in tmp_path.iterdir()}
    assert left <= {"p.json", "p.png"}, "files of the measurement are left"


def test_an_interrupted_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = Medium.time_us, [0]

    def counted(medium: Medium, *point: Any) -> list[float]:
        calls[0] += 1
        if calls[0] == 3 * 7 + 2:  # three transfers a point: in the middle of the eighth
            raise KeyboardInterrupt
        return real(medium, *point)

    monkeypatch.setattr(Medium, "time_us", counted)
    with pytest.raises(KeyboardInterrupt):
        run(options(tmp_path))
    assert not (tmp_path / "p.json").exists()
    assert not list(tmp_path.glob("*.tutti"))
    kept = json.loads((tmp_path / "p.json.partial").read_text())["points"]
    assert len(kept) == 7
    calls[0] = 100
    result = run(options(tmp_path))
    assert calls[0] == 100 + 3 * (POINTS - 7)
    for direction in profile.DIRECTIONS:
        for nbytes, slice_nbytes, *times_us in result["io"][direction]:
            name = f"{direction}/{nbytes}/{slice_nbytes}"
            assert kept.get(name, times_us) == times_us
    assert not (tmp_path / "p.json.partial").exists()


@pytest.mark.parametrize("part", ["open_controller", "HostBuffer"])
def test_an_interrupted_start_leaves_no_file(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(profile_medium, part, interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(options(tmp_path))
    assert not list(tmp_path.iterdir())


@pytest.fixture
def drive(monkeypatch: pytest.MonkeyPatch) -> MemoryController:
    """Memory that stands in for the drive DRIVE, which is blank."""
    controller = MemoryController([32 * MiB])
    monkeypatch.setattr(profile_medium, "open_controller", lambda *_, **__: controller)
    monkeypatch.setattr(profile_medium, "label", lambda *_, **__: None)
    monkeypatch.setattr(profile_medium, "make_blank", lambda _: None)
    return controller


def test_a_drive_is_written_before_it_is_read(drive: MemoryController) -> None:
    with Medium([DRIVE], 8 * MiB, 2 * MiB) as medium:
        written = drive.medium(1).reshape(-1, 4096).any(axis=1)
        assert written[: 8 * MiB // 4096].all()
        assert not written[8 * MiB // 4096 :].any()
        assert medium.time_us("read", 2 * MiB, 64 * KiB)[0] > 0
    assert drive.is_closed


def test_a_start_that_fails_closes_the_drive(drive: MemoryController) -> None:
    with pytest.raises(CapacityError, match="no room"):
        Medium([DRIVE], 64 * MiB, 32 * MiB)
    assert drive.is_closed


@pytest.mark.parametrize("content", ["", "{", "[]", '{"key": 1, "points": {"a": 1}}'])
def test_a_torn_or_foreign_partial_is_measured_anew(tmp_path: Path, content: str) -> None:
    (tmp_path / "p.json.partial").write_text(content)
    points = profile.Points(tmp_path / "p.json.partial", {"grid": 1})
    assert points.done == {}
    points.add("read/1/2", [5.0])
    assert profile.Points(tmp_path / "p.json.partial", {"grid": 1}).done == {"read/1/2": [5.0]}
    assert profile.Points(tmp_path / "p.json.partial", {"grid": 2}).done == {}
    assert profile.Points(tmp_path / "p.json.partial", {"grid": 1}, fresh=True).done == {}


def test_a_file_of_its_own(tmp_path: Path) -> None:
    run(options(tmp_path, "--medium", str(tmp_path / "new.tutti")))
    assert not (tmp_path / "new.tutti").exists()


@pytest.mark.parametrize(
    "more",
    [
        ("--sizes", "100KiB"),
        ("--sizes", "64KiB"),
        ("--slices", "3000"),
        ("--slices", "2KiB"),
        ("--repeats", "0"),
        ("--page-tokens", "0"),
        ("--file-size", "1MiB"),
        ("--medium", "/nowhere/at/all"),
        ("--medium", "/nowhere"),
        ("--out", "/nowhere/at/all"),
    ],
)
def test_what_is_not_acceptable(tmp_path: Path, more: tuple[str, str]) -> None:
    with pytest.raises(ConfigError):
        run(options(tmp_path, *more))
    assert not list(tmp_path.glob("*.tutti"))


def test_a_file_that_is_there_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    with pytest.raises(ConfigError, match="overwrites"):
        run(options(tmp_path, "--medium", str(tmp_path / "mine")))
    assert (tmp_path / "mine").read_text() == "precious"


def test_reads_and_writes_at_once_touch_different_halves(tmp_path: Path) -> None:
    with Medium([str(tmp_path / "m")], 8 * MiB, 2 * MiB) as medium:
        before = (tmp_path / "m").read_bytes()
        assert len(medium.time_us("both", 2 * MiB, 64 * KiB)) == 2
        after = (tmp_path / "m").read_bytes()
    assert before[: 4 * MiB] == after[: 4 * MiB]
    assert before[4 * MiB :] != after[4 * MiB :]


def test_models_are_named_as_sglang_names_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    config = {"num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8}
    (tmp_path / "config.json").write_text(json.dumps({**config, "hidden_size": 4096}))
    model = run(options(tmp_path, "--model", str(tmp_path)))["model"]
    assert (model["layers"], model["kv_nbytes_per_token"]) == (36, 36 * 2 * 8 * 128 * 2)
    assert run(options(tmp_path, "--model", "meta-llama/Llama-3.1-8B"))["model"]["layers"] == 32
    with pytest.raises(ConfigError, match=r"config\.json is not in Hugging Face's local cache"):
        run(options(tmp_path, "--model", "org/unknown"))
