"""The GPU benchmarks on the stand-in, compute included: their numbers mean nothing here."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gio_uring.cuda_stand_in import StandInDriver
from gio_uring.kernel_stand_in import Kernels

from tutti.base.terminal import progress
from tutti.base.units import KiB, MiB
from tutti.bench import summary
from tutti.bench.controller_memory import MemoryController
from tutti.bench.fio import FioJob, FioResult
from tutti.bench.gpu import cases as gpu_cases
from tutti.bench.gpu import digests as gpu_digests
from tutti.bench.gpu import facts as gpu_facts
from tutti.bench.gpu import files as gpu_files
from tutti.bench.gpu import interference as gpu_beside
from tutti.bench.gpu import overlap as gpu_overlap
from tutti.bench.gpu import report as gpu_report
from tutti.bench.gpu import shards as gpu
from tutti.bench.gpu.cases import RoundPlan, Row
from tutti.bench.gpu.rig import (
    DevicePages,
    GpuUnderTest,
    LayerLoad,
    PlainCopies,
    poll_until,
    tutti_system,
)
from tutti.bench.profile import gpu as profile_gpu
from tutti.errors import ConfigError, CudaError, DeviceTimeout
from tutti.gio_uring.gpu import device_code
from tutti.gio_uring.gpu.device_code import CubinCache, Modules
from tutti.gio_uring.gpu.device_engine import KINDS
from tutti.gio_uring.gpu.engine_choice import LOAD_NBYTES


@pytest.fixture
def machine() -> Iterator[GpuUnderTest]:
    driver = StandInDriver()
    made = GpuUnderTest(driver, None)
    yield made
    made.close()
    driver.close()
    assert not driver.violations


@pytest.fixture
def plan(tmp_path: Path) -> RoundPlan:
    return RoundPlan(
        progress,
        tmp_path,
        pairs=1,
        round_s=0.0,
        batch_nbytes=4 * MiB,
        staging_nbytes=16 * MiB,
        tokens=256,
        file_nbytes=64 * MiB,
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


def fake_stream(driver: StandInDriver, handle: int) -> SimpleNamespace:
    return SimpleNamespace(cuda_stream=handle, query=lambda: driver.is_stream_done(handle))


def fake_torch(driver: StandInDriver) -> SimpleNamespace:
    """PyTorch as the benchmarks use it; its streams are the stand-in's, and nothing is computed."""

    def stream() -> SimpleNamespace:
        return fake_stream(driver, driver.create_stream())

    def make(*_: object, **__: object) -> FakeTensor:
        return FakeTensor()

    def external(handle: int, *, device: str) -> SimpleNamespace:
        assert device == f"cuda:{driver.device}"
        return fake_stream(driver, handle)

    cuda = SimpleNamespace(
        Stream=stream,
        ExternalStream=external,
        Event=FakeEvent,
        stream=lambda _: nullcontext(),
    )
    functional = SimpleNamespace(scaled_dot_product_attention=make)
    names = dict.fromkeys(("randn", "empty", "matmul", "bmm"), make)
    return SimpleNamespace(
        cuda=cuda,
        bfloat16="bf16",
        device=lambda kind, number: f"{kind}:{number}",
        nn=SimpleNamespace(functional=functional),
        __version__="none",
        **names,
    )


@pytest.fixture
def whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GpuUnderTest]:
    """A machine with kernels, PyTorch and fio, all of them stand-ins."""
    driver = StandInDriver()
    kernels = Kernels(driver, None, depth=64)
    monkeypatch.setattr(device_code, "compile_cubin", lambda *_, **__: b"\x7fELF")
    monkeypatch.setattr(gpu_overlap, "_torch", lambda: fake_torch(driver))
    monkeypatch.setattr(gpu_cases, "SLICES", (64 * KiB,))
    monkeypatch.setattr(gpu_cases, "BLOCKS", (16, 4))
    monkeypatch.setattr(gpu_beside, "ROUNDS", 2)
    monkeypatch.setattr(gpu_beside, "CALLS_MAX", 3)
    monkeypatch.setattr(gpu_beside, "_SETTLE_S", 0.0)
    monkeypatch.setattr(gpu_overlap, "_PREFIX_TOKENS", 128)

    def medium_of(sizes: Sequence[int]) -> MemoryController:
        made = MemoryController(sizes)
        kernels.medium = made.medium(1)
        return made

    def fio(job: FioJob) -> FioResult:
        return FioResult(job.io_nbytes, 1.0, 0.5, "fio-none")

    monkeypatch.setattr(gpu_cases, "MemoryController", medium_of)
    monkeypatch.setattr(gpu_files.shutil, "which", lambda _: "fio")
    monkeypatch.setattr(gpu_files, "run_fio", fio)
    monkeypatch.setattr(gpu_files, "held_hugepages", lambda *_, **__: nullcontext("/huge"))
    monkeypatch.setattr(
        gpu_files, "prepare_file", lambda path, nbytes: Path(path).write_bytes(bytes(nbytes))
    )
    made = GpuUnderTest(driver, Modules(driver, cache=CubinCache(tmp_path)))
    yield made
    made.close()
    driver.close()
    assert not driver.violations


def results(rows: list[Row]) -> list[dict[str, Any]]:
    return [gpu._run_row(row) for row in rows]


@pytest.mark.parametrize("name", gpu.CASES)
def test_every_case_runs(name: str, whole: GpuUnderTest, plan: RoundPlan, tmp_path: Path) -> None:
    content = gpu.run_case(name, whole, plan, tmp_path)
    rows = content["rows"]
    assert content["complete"], content
    assert "not_run" not in json.dumps(rows), rows
    assert len({row["name"] for row in rows}) == len(rows) > 0
    assert json.loads((tmp_path / f"{name}.json").read_text()) == content
    assert len(gpu_report.rows_of(content)) == len(rows)
    if name == "ceiling":
        assert [row["right"] for row in rows if "right" in row] == [True] * 6


def test_a_case_is_drawn_as_a_table(
    whole: GpuUnderTest, plan: RoundPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = gpu_digests.digests(whole, plan)
    broken = Row("a row that breaks", lambda: {}["nothing"])
    monkeypatch.setitem(gpu.CASES, "digests", lambda *_: [rows[0], broken])
    gpu.run_case("digests", whole, plan, tmp_path)
    page = summary.render("<!-- result: digests -->\n<!-- end -->", tmp_path)
    assert "| XXH3 on 8 blocks |" in page
    assert "Not run: a row that breaks (KeyError: 'nothing')" in page


def test_files_without_fio_have_another_bar(
    whole: GpuUnderTest, plan: RoundPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_files.shutil, "which", lambda _: None)
    rows = results(gpu_files.files(whole, plan)[:2])
    assert [row["b"]["name"] for row in rows] == ["threads", "threads"], rows
    assert all("against threads" in row["name"] for row in rows)
    assert not list(plan.folder.glob("gpu-bench*"))


def test_an_engine_that_cannot_be_closed_costs_its_row_alone(
    whole: GpuUnderTest, plan: RoundPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stuck(*_: object) -> None:
        raise DeviceTimeout("the stream did not end")

    monkeypatch.setattr(gpu_cases.DevicePages, "close", stuck)
    rows = results(gpu_cases.engine("launch", whole, plan))
    assert len(rows) == 2
    assert all("did not end" in row["not_run"] for row in rows)


def test_every_engine_brings_the_same_bytes_back(machine: GpuUnderTest, plan: RoundPlan) -> None:
    rows = gpu_cases.round_trips(machine, plan)
    assert [row.name for row in rows] == ["round trip, host, copy-batch", "round trip, host, copy"]
    assert all(row["right"] for row in results(rows))


def test_wrong_bytes_are_seen(
    machine: GpuUnderTest, plan: RoundPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_cases, "transfers", lambda *_: None)
    assert not any(row["right"] for row in results(gpu_cases.round_trips(machine, plan)))


def test_scattered_layers_have_all_tokens_and_both_bars(
    machine: GpuUnderTest, plan: RoundPlan
) -> None:
    rows = results(gpu_cases.scatter(machine, plan))
    assert {(row["fragment_nbytes"], row["bar"]) for row in rows} == {
        (size, bar) for size in (32 * KiB, 128 * KiB) for bar in ("batch", "loop")
    }
    assert {row["layer_nbytes"] for row in rows} == {plan.tokens * 4 * KiB}


def test_what_cannot_run_says_why(machine: GpuUnderTest, plan: RoundPlan, tmp_path: Path) -> None:
    content = gpu.run_case("digests", machine, plan, tmp_path)
    assert "Unsupported" in content["stopped"]
    assert gpu.cases_to_run([], tmp_path)[-1] == "digests"


def rows_of(*names: str, fail: str = "", error: Exception | None = None) -> Any:
    """A case of rows that do nothing, one of which fails."""

    def work(name: str) -> dict[str, Any]:
        if name == fail and error is not None:
            raise error
        return {"verdict": "right", "right": True}

    return lambda *_: [Row(name, partial(work, name)) for name in names]


def test_a_row_that_breaks_costs_no_other_row(
    machine: GpuUnderTest, plan: RoundPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = ZeroDivisionError("no GPU does this")
    monkeypatch.setitem(gpu.CASES, "scatter", rows_of("a", "b", "c", fail="b", error=broken))
    content = gpu.run_case("scatter", machine, plan, tmp_path)
    assert content["complete"]
    assert "no GPU does this" in content["rows"][1]["not_run"]
    assert content["rows"][1]["traceback"]
    assert content["rows"][2]["right"]


def test_what_went_wrong_first_is_told() -> None:
    def work() -> dict[str, Any]:
        try:
            raise CudaError("cuStreamQuery failed", call="cuStreamQuery", code=719)
        finally:
            raise ConfigError("regions are still registered")

    row = gpu._run_row(Row("a", work))
    assert row["not_run"].startswith("CudaError: cuStreamQuery failed, then ConfigError")
    assert row["cuda_error"] == 719


def test_a_lost_context_ends_the_process_and_the_next_one_goes_on(
    machine: GpuUnderTest, plan: RoundPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = CudaError("cuStreamQuery failed", call="cuStreamQuery", code=700)
    monkeypatch.setitem(gpu.CASES, "scatter", rows_of("a", "b", "c", fail="b", error=lost))
    content = gpu.run_case("scatter", machine, plan, tmp_path)
    assert not content["complete"]
    assert [row["name"] for row in content["rows"]] == ["a", "b"]
    content = gpu.run_case("scatter", machine, plan, tmp_path)
    assert content["complete"]
    assert [row["name"] for row in content["rows"]] == ["a", "b", "c"]
    again = gpu.run_case("scatter", machine, plan, tmp_path, commit="another")
    assert [row["name"] for row in again["rows"]] == ["a", "b"], "rows of other code do not count"


def test_no_row_begins_when_the_time_is_over(
    machine: GpuUnderTest, plan: RoundPlan, tmp_path: Path
) -> None:
    content = gpu.run_case("scatter", machine, replace(plan, until_s=0.0), tmp_path)
    assert "no time left" in content["stopped"]
    assert gpu.cases_to_run([], tmp_path) == list(gpu.CASES)


def test_a_process_that_dies_or_hangs_costs_its_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = iter([("a", -11), ("b", None), ("", 0)])

    def run(command: list[str], **_: object) -> SimpleNamespace:
        assert (command[3:5], command[-2]) == (["--here", "ceiling"], "--minutes")
        row, code = next(runs)
        content = gpu._read(tmp_path / "ceiling.json") or {"case": "ceiling", "rows": []}
        content |= {"complete": not row, "machine": {}} | ({"running": row} if row else {})
        gpu._write(content, tmp_path)
        if code is None:
            raise gpu.subprocess.TimeoutExpired(command, 1)
        return SimpleNamespace(returncode=code)

    monkeypatch.setattr(gpu.subprocess, "run", run)
    assert gpu.main(["--out", str(tmp_path), "ceiling"]) == 0
    rows = json.loads((tmp_path / "ceiling.json").read_text())["rows"]
    assert [row["name"] for row in rows] == ["a", "b"]
    assert "-11" in rows[0]["not_run"]
    assert "killed" in rows[1]["not_run"]


def test_a_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    assert gpu.cases_to_run([], tmp_path) == list(gpu.CASES)
    (tmp_path / "ceiling.json").write_text('{"complete": true}')
    (tmp_path / "scatter.json").write_text('{"complete": false, "failed": true}')
    (tmp_path / "pipeline.json").write_text('{"complete": false}')
    assert gpu.cases_to_run([], tmp_path) == [
        *(name for name in gpu.CASES if name not in ("ceiling", "scatter")),
        "scatter",
    ]
    assert gpu.cases_to_run(["ceiling"], tmp_path) == ["ceiling"]
    with pytest.raises(ConfigError, match="no case"):
        gpu.cases_to_run(["nothing"], tmp_path)


def test_what_holds_a_stream_back_is_let_go(machine: GpuUnderTest) -> None:
    gate = gpu_beside.Gate(machine.driver)
    stream = machine.driver.create_stream()
    with pytest.raises(ZeroDivisionError), gate.holds(stream):
        raise ZeroDivisionError
    poll_until(lambda: machine.driver.is_stream_done(stream), "the gate")
    with gate.holds(stream):
        assert not machine.driver.is_stream_done(stream)
    poll_until(lambda: machine.driver.is_stream_done(stream), "the gate")
    gate.close()


def test_a_driver_without_green_contexts_is_described(
    machine: GpuUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses() -> None:
        raise CudaError("cuDeviceGetDevResource failed", call="cuDeviceGetDevResource", code=801)

    monkeypatch.setattr(machine.driver, "sm_resource", refuses)
    assert "cuDeviceGetDevResource" in machine.facts["multiprocessors"]


def test_facts_say_why_they_are_not_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "not installed" in gpu_facts.describe_gpu()["not known"]
    # A driver that knows all fields but one refuses all of them at once.
    script = tmp_path / "nvidia-smi"
    script.write_text(
        "#!/bin/sh\ncase $* in *pstate*) exit 2;; *,*,*) echo 1, 2;; *) echo value;; esac\n"
    )
    script.chmod(0o755)
    found = gpu_facts.clocks()
    assert found["clocks.sm"] == "value"
    assert not {"pstate", "not known"} & found.keys()


def test_the_bars_move_the_bytes_that_the_engines_move(machine: GpuUnderTest) -> None:
    load = LayerLoad.of_nbytes(64 * KiB, MiB, layers=4)
    assert load.nbytes == MiB
    pages = DevicePages(machine.driver, load)
    copies = PlainCopies(machine.driver, pages)
    for kind in ("one", "batch", "loop"):
        for direction in ("load", "store"):
            assert copies.system(kind, direction, 1).round().gb_per_s > 0
    with machine.host_engine("copy-batch", staging_nbytes=8 * MiB) as engine:
        assert tutti_system("x", engine, pages, "load", 2).round().gb_per_s > 0
    copies.close()
    pages.close()


def test_parts_of_pages_lie_where_their_layers_do(machine: GpuUnderTest) -> None:
    pages = DevicePages(machine.driver, LayerLoad(64 * KiB, 4, layers=8))
    parts = list(gpu_overlap._parts(pages, 4))
    stride = pages.load.extents.layer_stride_nlb
    assert [list(extents.slba) for extents, _ in parts] == [
        [0],
        [2 * stride],
        [4 * stride],
        [6 * stride],
    ]
    rows = [row.tolist() for _, memory in parts for row in memory.bases]
    assert rows == pages.memory.bases.tolist()
    pages.close()


def test_a_profile_compares_all_engines_by_the_same_load(whole: GpuUnderTest) -> None:
    times = profile_gpu.engine_times(whole, LayerLoad(64 * KiB, 8, layers=2))
    assert profile_gpu._LOAD.nbytes == LOAD_NBYTES, "what the choice of an engine takes it for"
    assert set(times) == {"host", *KINDS}
    assert all(us > 0 for us in times.values())
