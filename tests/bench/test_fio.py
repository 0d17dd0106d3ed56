"""fio beside the store: its output, its hugepages, and what is left of a result when it fails."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_until

from tutti.base.units import MiB
from tutti.bench import fio
from tutti.bench.compare import run as compare
from tutti.bench.fio import FioJob, FioUnavailable, hugepages_of, parse_fio
from tutti.bench.fio import held_hugepages as held
from tutti.gio_uring.memory import HostBuffer

# The members of fio's JSON that are read, with numbers that are easy to follow.
FIO: dict[str, Any] = {
    "fio version": "fio-3.33",
    "jobs": [
        {
            "error": 0,
            "job_runtime": 2000,
            "usr_cpu": 2.5,
            "sys_cpu": 7.5,
            "read": {"io_bytes": 4_000_000_000, "runtime": 2000},
            "write": {"io_bytes": 0, "runtime": 0},
        }
    ],
}
WRITTEN = FIO["jobs"][0] | {"write": FIO["jobs"][0]["read"]}


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[int]]:
    """A stand-in for the kernel's hugepages: how many there are, and how many are free."""
    number = tmp_path / "nr_hugepages"
    number.write_text("0")
    used: dict[int, int] = {}

    def allocate(file: int, _: int, nbytes: int) -> None:
        used[file] = nbytes >> 21

    def counts() -> tuple[int, int]:
        total = int(number.read_text())
        return total - sum(used.values()), total

    real_close = os.close

    def close(file: int) -> None:
        used.pop(file, None)
        real_close(file)

    monkeypatch.setattr(fio, "_NR_HUGEPAGES", number)
    monkeypatch.setattr(fio, "_DROP_CACHES", tmp_path / "drop")
    monkeypatch.setattr(fio, "_COMPACT_MEMORY", tmp_path / "compact")
    monkeypatch.setattr(fio, "_hugepages", counts)
    monkeypatch.setattr(fio.os, "posix_fallocate", allocate)
    monkeypatch.setattr(fio.os, "close", close)
    return lambda: [counts()[1], counts()[0]]


def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """This script instead of fio, in a folder of its own."""
    (tmp_path / "fio").write_text(f"#!/bin/sh\ncd {tmp_path}\n{script}\n")
    (tmp_path / "fio").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(fio, "_TIMEOUT_S", 1)


def test_fio_is_parsed() -> None:
    result = parse_fio("note: something\n" + json.dumps(FIO), "read")
    assert (result.nbytes, result.wall_s, result.version) == (4_000_000_000, 2.0, "fio-3.33")
    assert result.gb_per_s == 2.0
    assert result.cpu_s == pytest.approx(0.2)
    assert result.cpu_s_per_gb == pytest.approx(0.05)


@pytest.mark.parametrize(
    "text", ["", "no JSON", "{}", '{"jobs": []}', '{"jobs": [{"error": "x"}]}']
)
def test_other_output_is_refused(text: str) -> None:
    with pytest.raises(FioUnavailable, match="not as expected"):
        parse_fio(text, "read")


def test_failed_jobs_are_errors() -> None:
    failed = FIO | {"jobs": [FIO["jobs"][0] | {"error": 28}]}
    with pytest.raises(FioUnavailable, match="No space left"):
        parse_fio(json.dumps(failed), "read")
    with pytest.raises(FioUnavailable, match="moved nothing"):
        parse_fio(json.dumps(FIO), "write")


def test_fio_gets_direct_io_and_the_right_memory() -> None:
    job = FioJob("f", "read", 262144, 1 << 30, 1 << 29, hugepages="/huge")
    assert {"--direct=1", "--ioengine=io_uring", "--iodepth=32"} <= set(job.command())
    assert "--iomem=mmaphuge:/huge" in job.command()
    assert "--iomem=mmap" in FioJob("f", "read", 4096, 4096, 4096).command()
    assert hugepages_of(job) == 6, "8 MiB, and fio aligns its buffers"


def test_without_fio_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(FioUnavailable, match="fio is not installed"):
        fio.run_fio(FioJob("f", "read", 4096, 4096, 4096))


def test_hugepages_are_added_only_when_allowed(system: Callable[[], list[int]]) -> None:
    job = FioJob("f", "read", MiB, 1 << 30, 1 << 30)
    with pytest.raises(FioUnavailable, match="--allow-sysctl"), held([job], allow_sysctl=False):
        pass
    assert system() == [0, 0]


def test_users_of_hugepages_give_back_their_own_alone(system: Callable[[], list[int]]) -> None:
    """The first of two to end takes none of the other's."""
    small, large = (FioJob("f", "read", MiB, 1 << 30, 1 << 30, iodepth=d) for d in (1, 32))
    first, second = held([small], allow_sysctl=True), held([large], allow_sysctl=True)
    first.__enter__()
    assert system() == [2, 0]
    with held([large], allow_sysctl=True, others_nbytes=3 << 21):
        assert system() == [2 + 18 + 3, 3]
        first.__exit__(None, None, None)
        assert system() == [18 + 3, 3]
        second.__enter__()
        assert system() == [18 + 3 + 15, 0], "the three that were free are taken first"
    assert system()[0] == 15
    second.__exit__(None, None, None)
    assert system() == [0, 0]


def test_hugepages_are_counted_by_one_process_at_a_time(
    system: Callable[[], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fio, "_LOCK_S", 0.0)
    job = FioJob("f", "read", MiB, 1 << 30, 1 << 30)
    with open(fio._NR_HUGEPAGES) as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(FioUnavailable, match="locked"), held([job], allow_sysctl=True):
            pass
    assert system() == [0, 0]


def test_a_kernel_that_adds_too_few_has_them_back(
    system: Callable[[], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = fio._hugepages
    monkeypatch.setattr(fio, "_hugepages", lambda: (min(real()[0], 2), real()[1]))
    job = FioJob("f", "read", MiB, 1 << 30, 1 << 30)
    with pytest.raises(FioUnavailable, match="fragmented"), held([job], allow_sysctl=True):
        pass
    assert system() == [0, 0]


@pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")
def test_what_takes_every_free_hugepage_leaves_those_of_fio(tmp_path: Path) -> None:
    """As the buffers of a store that opens between the preparation and the first round do.

    One test for all jobs: side by side they would count each other's pages of the machine.
    """
    path = str(tmp_path / "file")
    fio.prepare_file(path, 8 * MiB)
    before = int(fio._NR_HUGEPAGES.read_text())
    for block_nbytes, iodepth in ((65536, 32), (MiB, 3), (8 * MiB, 1)):
        job = FioJob(path, "read", block_nbytes, 8 * MiB, 8 * MiB, iodepth=iodepth)
        try:
            with held([job], allow_sysctl=True, others_nbytes=2 << 21) as memory:
                taken = [HostBuffer(1 << 21) for _ in range(fio._hugepages()[0])]
                huge = replace(job, hugepages=memory)
                assert [fio.run_fio(huge).nbytes for _ in range(2)] == [8 * MiB] * 2
                assert os.stat(memory).st_size == hugepages_of(job) << 21, "fio asked for more"
                taken.clear()
        except FioUnavailable as error:
            if "fio failed" in str(error):
                raise
            pytest.skip(str(error))
    assert int(fio._NR_HUGEPAGES.read_text()) == before


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("kill -9 $$", "signal 9"),
        ("exit 3", "exit code 3"),
        ("echo no space >&2; exit 1", "no space"),
        ("sleep 1000 & echo $! > pid; wait", "did not end in 1 s"),
    ],
)
def test_a_fio_that_dies_or_hangs_says_why_and_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, reason: str
) -> None:
    stand_in(tmp_path, monkeypatch, script)
    with pytest.raises(FioUnavailable, match=reason):
        fio.run_fio(FioJob("f", "read", 4096, 4096, 4096))
    if (tmp_path / "pid").exists():
        child = Path("/proc", (tmp_path / "pid").read_text().strip(), "stat")
        wait_until(
            lambda: not child.exists() or child.read_text().split()[2] == "Z",
            "a child of fio is left",
        )


def test_rows_stay_when_fio_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the command line: the bound of `files` dies after the first round."""
    stand_in(tmp_path, monkeypatch, "case $* in *rw=read*) exit 1;; esac; cat written")
    (tmp_path / "written").write_text(json.dumps(FIO | {"jobs": [WRITTEN]}))
    cell = "retrieve, direct, batches of 8 MiB"
    small = ["--size", "256MiB", "--seconds", "0.01", "--pairs", "1", "--only", cell]
    assert compare.main(["files", "--dir", str(tmp_path), "--out", str(tmp_path), *small]) == 0
    found = json.loads((tmp_path / "files.json").read_text())["cells"]
    assert "exit code 1" in found[cell]["bound"]["not_measured"]
    assert found[cell]["speed_ratio"]["median"] > 0
    assert "not measured: fio failed" in found[cell]["bar"]
    assert found[f"{cell}, all on hugepages"]["of"] == "fio"


@pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")
def test_fio_runs(tmp_path: Path) -> None:
    path = tmp_path / "file"
    fio.prepare_file(str(path), 4 << 20)
    result = fio.run_fio(FioJob(str(path), "read", 65536, 4 << 20, 2 << 20))
    assert result.nbytes == 2 << 20
    assert path.stat().st_size == 4 << 20
