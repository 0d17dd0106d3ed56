"""The GPU benchmarks on the stand-in, compute included: their numbers mean nothing here."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gio_uring.cuda_stand_in import StandInDriver
from gio_uring.kernel_stand_in import Kernels

from tutti.bench import gpu, gpu_cases, gpu_overlap
from tutti.bench.fio import FioJob, FioResult
from tutti.bench.gpu_cases import Plan
from tutti.bench.gpu_rig import DevicePages, Load, Machine, PlainCopies, tutti_system
from tutti.errors import ConfigError, DeviceTimeout
from tutti.gio_uring import gpu_modules
from tutti.gio_uring.controller_memory import MemoryController
from tutti.gio_uring.gpu_modules import KERNELS, CubinCache, Modules
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
        file_nbytes=32 * MiB,
        staging_nbytes=16 * MiB,
    )


class FakeTensor:
    """Whatever is done to it, it stays what it is."""

    def __mul__(self, other: float) -> FakeTensor:
        return self

    def __getitem__(self, place: object) -> FakeTensor:
        return self


class FakeEvent:
    def __init__(self, **_: object) -> None:
        self.recorded = False

    def record(self) -> None:
        self.recorded = True

    def query(self) -> bool:
        return self.recorded

    def elapsed_time(self, other: FakeEvent) -> float:
        assert self.recorded
        assert other.recorded
        return 1.0


def fake_torch(driver: StandInDriver) -> SimpleNamespace:
    """PyTorch as the benchmarks use it; its streams are the stand-in's, and nothing is computed."""

    class Stream:
        def __init__(self) -> None:
            self.cuda_stream = driver.create_stream()

        def query(self) -> bool:
            return driver.is_stream_done(self.cuda_stream)

    def make(*_: object, **__: object) -> FakeTensor:
        return FakeTensor()

    cuda = SimpleNamespace(Stream=Stream, Event=FakeEvent, stream=lambda _: nullcontext())
    functional = SimpleNamespace(scaled_dot_product_attention=make)
    names = dict.fromkeys(("randn", "empty", "matmul", "bmm"), make)
    return SimpleNamespace(
        cuda=cuda, bfloat16="bf16", nn=SimpleNamespace(functional=functional), **names
    )


@pytest.fixture
def whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """A machine with kernels, PyTorch and fio, all of them stand-ins."""
    driver = StandInDriver()
    kernels = Kernels(driver, None, depth=64)
    monkeypatch.setattr(gpu_modules, "compile_cubin", lambda *_, **__: b"\x7fELF")
    monkeypatch.setattr(gpu_overlap, "_torch", lambda: fake_torch(driver))
    monkeypatch.setattr(gpu_overlap, "torch_stream", lambda *_: None)
    monkeypatch.setattr(gpu_overlap, "_ROUNDS", 2)
    monkeypatch.setattr(gpu_overlap, "_BESIDE", 1)
    monkeypatch.setattr(gpu_overlap, "_PREFIX_TOKENS", 128)

    def medium_of(sizes: Sequence[int]) -> MemoryController:
        made = MemoryController(sizes)
        kernels.medium = made.medium(1)
        return made

    def fio(job: FioJob) -> FioResult:
        return FioResult(job.io_nbytes, 1.0, 0.5, "fio-none")

    monkeypatch.setattr(gpu_cases, "MemoryController", medium_of)
    monkeypatch.setattr(gpu_cases, "run_fio", fio)
    monkeypatch.setattr(
        gpu_cases, "prepare_file", lambda path, nbytes: Path(path).write_bytes(bytes(nbytes))
    )
    made = Machine(driver, Modules(driver, cache=CubinCache(tmp_path)))
    yield made
    made.close()
    driver.close()
    assert not driver.violations


@pytest.mark.parametrize("name", gpu.CASES)
def test_every_case_runs(name: str, whole: Machine, plan: Plan, tmp_path: Path) -> None:
    content = gpu.run_case(name, whole, plan, tmp_path, label="stand-in")
    result = content["result"]
    assert "not_run" not in json.dumps(result), result
    assert result["rows"]
    if name == "ceiling":
        assert result["round_trip"]["right"], result
        assert len(result["round_trip"]["verdicts"]) == 6


def test_an_engine_that_cannot_be_closed_costs_its_row_alone(
    whole: Machine, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stuck(*_: object) -> None:
        raise DeviceTimeout("the stream did not end")

    monkeypatch.setattr(gpu_cases.DevicePages, "close", stuck)
    rows = gpu_cases.engine("launch", whole, plan)["rows"]
    assert len(rows) == 6
    assert all("did not end" in row["not_run"] for row in rows)


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
