"""The GPU benchmarks that need no compute, on the stand-in: their numbers mean nothing here."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gio_uring.cuda_stand_in import StandInDriver

from tutti.bench import gpu, gpu_cases
from tutti.bench.gpu_cases import Plan
from tutti.bench.gpu_rig import DevicePages, Load, Machine, PlainCopies, tutti_system
from tutti.errors import ConfigError
from tutti.gio_uring.gpu_modules import KERNELS
from tutti.terminal import progress
from tutti.units import KiB, MiB


@pytest.fixture
def machine() -> Iterator[Machine]:
    driver = StandInDriver()
    made = Machine(driver, None)
    yield made
    made.close()
    driver.close()
    assert not driver.violations


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return Plan(
        progress,
        tmp_path,
        pairs=1,
        batch_nbytes=4 * MiB,
        round_nbytes=8 * MiB,
        file_nbytes=16 * MiB,
        staging_nbytes=16 * MiB,
    )


def test_every_engine_brings_the_same_bytes_back(machine: Machine, plan: Plan) -> None:
    found = gpu_cases.round_trip(machine, plan)
    assert found["right"], found
    assert set(found["verdicts"]) == {"host copy-batch", "host copy"}


def test_wrong_bytes_are_seen(
    machine: Machine, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_cases, "transfers", lambda *_: None)
    assert not gpu_cases.round_trip(machine, plan)["right"]


def test_a_case_writes_its_result_with_a_label(
    machine: Machine, plan: Plan, tmp_path: Path
) -> None:
    gpu.run_case("ceiling", machine, plan, tmp_path / "out", label="stand-in")
    content = json.loads((tmp_path / "out/ceiling.json").read_text())
    assert content["label"] == "stand-in"
    rows = content["result"]["rows"]
    assert len(rows) == 6
    assert all(row["speed_ratio"]["median"] > 0 for row in rows)
    assert not [p for p in (tmp_path / "out").iterdir() if p.name.startswith(".")]


def test_scattered_copies_have_both_bars(machine: Machine, plan: Plan) -> None:
    rows: list[dict[str, Any]] = gpu_cases.scatter(machine, plan)["rows"]
    assert {(row["fragment_nbytes"], row["bar"]) for row in rows} == {
        (size, bar) for size in (32 * KiB, 128 * KiB) for bar in ("batch", "loop")
    }


def test_what_cannot_run_says_why(machine: Machine, plan: Plan, tmp_path: Path) -> None:
    content = gpu.run_case("digests", machine, plan, tmp_path)
    assert "Unsupported" in content["result"]["not_run"]


def test_a_case_that_breaks_is_written_down(
    machine: Machine, plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(*_: object) -> dict[str, Any]:
        raise ZeroDivisionError("no GPU does this")

    monkeypatch.setitem(gpu.CASES, "scatter", breaks)
    content = gpu.run_case("scatter", machine, plan, tmp_path)
    assert "no GPU does this" in content["result"]["not_run"]
    assert content["result"]["traceback"]


def test_a_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    assert gpu.cases_to_run([], tmp_path) == list(gpu.CASES)
    (tmp_path / "ceiling.json").write_text('{"result": {}}')
    (tmp_path / "scatter.json").write_text('{"result": {"not_run": "why"}}')
    assert gpu.cases_to_run([], tmp_path) == [*list(gpu.CASES)[2:], "scatter"]
    assert gpu.cases_to_run(["ceiling"], tmp_path) == ["ceiling"]
    with pytest.raises(ConfigError, match="no case"):
        gpu.cases_to_run(["nothing"], tmp_path)


def test_the_bars_move_the_bytes_that_the_engines_move(machine: Machine) -> None:
    load = Load.of_nbytes(64 * KiB, MiB, layers=4)
    assert load.nbytes == MiB
    pages = DevicePages(machine.driver, load)
    copies = PlainCopies(machine.driver, pages)
    for kind in ("one", "batch", "loop"):
        for direction in ("load", "store"):
            assert copies.system(kind, direction, 1).round().gb_per_s > 0
    with machine.host_engine("copy-batch", staging_nbytes=8 * MiB) as (engine, _):
        assert tutti_system("x", engine, pages, "load", 2).round().gb_per_s > 0
    copies.close()
    pages.close()
    assert "gio_move" in KERNELS
