"""Cases of the comparison by the command line: the default against files, and several folders."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from tutti.bench.compare import cases, systems
from tutti.bench.compare import run as compare
from tutti.bench.fio import FioJob, FioResult, FioUnavailable
from tutti.bench.pool_workload import PoolWorkload
from tutti.bench.summary import render


def test_a_case_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cases, "held_hugepages", lambda *_, **__: refused())
    out = tmp_path / "results"
    cell = "store, direct, batches of 8 MiB"
    small = ["--size", "256MiB", "--seconds", "0.01", "--pairs", "1", "--only", cell]
    status = compare.main(["files", "--dir", str(tmp_path), "--out", str(out), *small])
    assert status == 0
    text = (out / "files.json").read_text()
    result = json.loads(text)
    assert list(result["cells"]) == [cell, f"{cell}, all on hugepages"]
    assert result["cells"][cell]["pairs"] == 1
    assert result["cells"][cell]["a"]["facts"]["scheduled"], "as tutti.open gives it"
    assert result["cells"][f"{cell}, all on hugepages"] == {
        "not_measured": "none held",
        "of": "fio",
    }
    assert str(tmp_path) not in text
    out_text = capsys.readouterr().out
    assert "files, direct" in out_text
    if shutil.which("fio"):
        bound = result["cells"][cell]["bound"]
        assert bound["facts"]["engine_memory_nbytes"] == 32 << 20
        assert bound["facts"]["nbytes"] == result["cells"][cell]["a"]["facts"]["nbytes"]
        assert "fio write with as much memory" in out_text
    assert sorted(p.name for p in tmp_path.iterdir()) == ["results"], "files were left behind"


@contextmanager
def refused() -> Iterator[None]:
    raise FioUnavailable("none held")
    yield


def test_files_and_fio_on_hugepages_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[FioJob] = []

    def run_fio(job: FioJob) -> FioResult:
        jobs.append(job)
        return FioResult(job.io_nbytes, 1.0, 0.5, "fio-none")

    monkeypatch.setattr(cases, "held_hugepages", lambda *_, **__: nullcontext("/huge"))
    monkeypatch.setattr(cases.shutil, "which", lambda _: "fio")
    monkeypatch.setattr(systems, "run_fio", run_fio)
    monkeypatch.setattr(systems, "prepare_file", lambda path, _: Path(path).touch())
    cell = "retrieve, direct, batches of 8 MiB, all on hugepages"
    small = ["--size", "256MiB", "--seconds", "0.01", "--pairs", "1", "--only", cell]
    assert compare.main(["files", "--dir", str(tmp_path), "--out", str(tmp_path), *small]) == 0
    found = json.loads((tmp_path / "files.json").read_text())["cells"][cell]
    backings = {found[side]["facts"]["backing"] for side in ("a", "b")}
    assert backings <= {"thp", "hugetlb"}, "the second is what another test's pool may leave free"
    kinds = {(job.hugepages, job.iodepth, job.block_nbytes) for job in jobs}
    assert kinds == {("/huge", 16, 2 << 20)}, "32 MiB, as Tutti's longest requests"
    assert found["b"]["facts"]["engine_memory_nbytes"] == 32 << 20
    assert "bar 1.5" not in found["bar"], "the bar is that of files on ordinary pages"


@pytest.mark.parametrize(
    ("case", "only", "least", "most"),
    [
        ("bandwidth-fio", "store 64x128KiB", 0.7, 1.0),
        ("bandwidth-fio", "retrieve 64x128KiB", 0.7, 1.0),
        ("layerwise-fio", "fio's 8 MiB", 0.0, 0.5),  # a prefix of 16 MiB
    ],
)
def test_fio_uses_the_place_of_the_objects_in_the_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, only: str, least: float, most: float
) -> None:
    def run_fio(job: FioJob) -> FioResult:
        assert Path(job.path).name == "compare.tutti"
        pool_nbytes = Path(job.path).stat().st_size
        assert job.offset_nbytes + job.size_nbytes <= pool_nbytes, "fio would make the pool longer"
        assert job.offset_nbytes >= 1 << 20, "superblock and records are not overwritten"
        assert least < job.size_nbytes / pool_nbytes <= most
        jobs.append(job)
        return FioResult(job.io_nbytes, 1.0, 0.5, "fio-none")

    jobs: list[FioJob] = []
    for module in (cases, systems):
        monkeypatch.setattr(module, "run_fio", run_fio)
    small = ["--size", "256MiB", "--seconds", "0.01", "--pairs", "1", "--prefix-pages", "8"]
    small += ["--memory", "ordinary", "--only", only, "--out", str(tmp_path)]
    assert compare.main([case, "--dir", str(tmp_path), *small]) == 0
    (cell,) = json.loads((tmp_path / f"{case}.json").read_text())["cells"].values()
    assert cell["a"]["facts"]["nbytes"] == cell["b"]["facts"]["nbytes"]
    assert f"--offset={jobs[-1].offset_nbytes}" in jobs[-1].command()
    assert [file.name for file in tmp_path.iterdir()] == [f"{case}.json"]


def pools_made(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """A list to which the paths of every pool that is made from now on are added."""
    made: list[list[str]] = []
    make = systems.temporary_pool

    def pool_of(paths: list[str], *rest: Any, **more: Any) -> Any:
        made.append(paths)
        return make(paths, *rest, **more)

    monkeypatch.setattr(systems, "temporary_pool", pool_of)
    return made


def test_the_pool_that_files_are_compared_with_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cases, "held_hugepages", lambda *_, **__: refused())
    monkeypatch.setattr(cases.shutil, "which", lambda _: None)
    made = pools_made(monkeypatch)
    small = ["--size", "256MiB", "--seconds", "0.01", "--pairs", "2"]
    small += ["--only", "retrieve, direct, batches of 8 MiB", "--out", str(tmp_path)]
    assert compare.main(["files", "--dir", str(tmp_path), *small]) == 0
    assert len(made) == 2
    assert [file.name for file in tmp_path.iterdir()] == ["files.json"]


def test_pools_have_a_member_in_each_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = pools_made(monkeypatch)
    folders = [tmp_path / name for name in ("left", "right", "out")]
    for folder in folders:
        folder.mkdir()
    small = ["--size", "128MiB", "--seconds", "0.01", "--pairs", "1"]
    small += ["--only", "retrieve 64x128KiB"]
    places = ["--dir", *map(str, folders[:2]), "--out", str(folders[2])]
    assert compare.main(["cpu-verify", *places, *small]) == 0
    result = json.loads((folders[2] / "cpu-verify.json").read_text())
    (cell,) = result["cells"].values()
    assert cell["a"]["facts"]["members"] == result["members"] == 2
    assert [cell[side]["facts"]["verify"] for side in "ab"] == ["always", "off"]
    assert len(made) == 1, "both systems have the same place on the disk"
    assert "2 members; all else in the first folder" in capsys.readouterr().out
    page = "<!-- result: cpu-verify -->\n<!-- end -->"
    assert "2 members" in render(page, folders[2])
    assert not any(any(folder.iterdir()) for folder in folders[:2])


def test_each_of_two_pools_is_churned_and_fresh_in_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    churned: list[PoolWorkload] = []
    real = cases.churn

    def churn(workload: PoolWorkload, nbytes: int, **more: Any) -> None:
        churned.append(workload)
        real(workload, nbytes // 10, **more)

    monkeypatch.setattr(cases, "churn", churn)
    small = ["--size", "64MiB", "--seconds", "0.01", "--pairs", "2", "--prefix-pages", "8"]
    assert compare.main(["churned", "--dir", str(tmp_path), "--out", str(tmp_path), *small]) == 0
    assert len(churned) == len(set(map(id, churned))) == 2
    cell = json.loads((tmp_path / "churned.json").read_text())["cells"]["churned"]
    assert len(cell["a"]["gb_per_s"]) == len(cell["b"]["gb_per_s"]) == 2
