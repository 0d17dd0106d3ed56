"""`tutti bench peers`: what is asked of a peer, what is counted, and what stops it."""

from __future__ import annotations

import argparse
import json
import mmap
import subprocess
import sys
import threading
import time
from contextlib import closing, nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_until

from tutti.base.terminal import progress
from tutti.base.units import MiB
from tutti.bench.fio import FioJob, FioResult, FioUnavailable
from tutti.bench.peers import fio_peers
from tutti.bench.peers import hicache as peer_hicache
from tutti.bench.peers import lmcache as peer_lmcache
from tutti.bench.peers import run as peers
from tutti.bench.peers.hicache import HiCachePeer, align_next_mapping
from tutti.bench.peers.lmcache import LMCachePeer
from tutti.bench.peers.peer import BATCH_PAGES, PeerPlan
from tutti.bench.peers.plain import FilesPeer, StorePeer
from tutti.bench.peers.process import PeerProcess, _sglang_backend, make_peer
from tutti.bench.peers.same_memory import LOAD, RAW, STORE, UNVERIFIED, WAYS
from tutti.bench.summary import render
from tutti.errors import ChecksumMismatch, ConfigError, MediumError, Unsupported
from tutti.gio_uring.memory import HUGEPAGE_NBYTES, address_of
from tutti.gio_uring.probe import probe_memory
from tutti.integration.sglang.host.host_pools import COLLAPSING

TOKENS, BATCHES = 1, 2  # pages of 128 KiB, batches of 16 MiB


def plan_in(folder: Path) -> PeerPlan:
    return PeerPlan(str(folder), TOKENS, "page_first", BATCHES)


def arguments(folder: Path, *words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    peers.add_arguments(parser)
    small = ["--page-tokens", str(TOKENS), "--batches", str(BATCHES), "--rounds", "2"]
    small += ["--launches", "1"]
    return parser.parse_args(["--dir", str(folder), *small, *words])


@pytest.mark.parametrize("kind", [StorePeer, FilesPeer, LMCachePeer])
def test_a_peer_loads_what_it_stored_and_says_what_it_cost(tmp_path: Path, kind: Any) -> None:
    if kind is LMCachePeer and (why := peer_lmcache.missing()):
        pytest.skip(why)
    plan = plan_in(tmp_path)
    peer = kind(plan)
    process = PeerProcess(peer, plan)
    with closing(peer):
        for batch in range(BATCHES):
            stored = process.answer("store", [batch])
            assert stored["nbytes"] == BATCH_PAGES * plan.page_nbytes
            assert stored["wall_s"] > 0
        assert process.answer("load", [0])["nbytes"] == plan.batch_nbytes
        assert process.answer("exists", [1, 0])["pages"] == 2 * BATCH_PAGES
        assert process.answer("exists", [0, 7])["pages"] == BATCH_PAGES
        pages = process.answer("pages", [])
        assert pages["nbytes"] >= plan.batch_nbytes and pages["hugepage_nbytes"] == 0
        with pytest.raises(ConfigError, match="is not a command"):
            process.answer("erase", [0])


@pytest.mark.parametrize("how", ["collapse", "thp"])
def test_all_peers_get_the_same_large_pages(tmp_path: Path, how: str) -> None:
    words = ["--peers", "store", "file-per-page", "--host-pages", how]
    result = peers.run(arguments(tmp_path, *words), progress)
    assert result["host_pages"] == how
    (cell,) = result["cells"].values()
    got = [pages for facts in cell["peers"].values() for pages in facts["host_pages"]]
    shares = [pages["hugepage_nbytes"] / pages["nbytes"] for pages in got]
    if not probe_memory().collapse_refusal:
        assert min(shares) > 0
    assert f" {shares[0]:.0%}" in peers.report(result)


def test_fio_is_one_more_reader_and_raw_reads_are_the_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs: list[FioJob] = []

    def run_fio(job: FioJob) -> FioResult:
        jobs.append(job)
        return FioResult(job.io_nbytes, 1e-9, 0.5, "fio-none")  # faster than anything

    monkeypatch.setattr(peers, "_BASE", "store")
    monkeypatch.setattr(fio_peers, "run_fio", run_fio)
    monkeypatch.setattr(fio_peers, "prepare_file", lambda *_: None)
    monkeypatch.setattr(fio_peers.shutil, "which", lambda _: "fio")
    monkeypatch.setattr(fio_peers, "held_hugepages", lambda *_, **__: nullcontext("/huge"))
    asked: list[tuple[str, str, tuple[int, ...]]] = []
    ask = peers.PeerClient.ask

    def noted(peer: peers.PeerClient, command: str, *batches: int) -> dict[str, Any]:
        asked.append((peer.name, command, batches))
        return ask(peer, command, *batches)

    monkeypatch.setattr(peers.PeerClient, "ask", noted)
    words = ["--peers", "store", "file-per-page", "fio-hugepages", "fio-hugepages-4-pages"]
    words += ["--launches", "2"]
    result = peers.run(arguments(tmp_path, *words), progress)
    (cell,) = result["cells"].values()
    shapes = {(job.block_nbytes, job.iodepth, job.hugepages) for job in jobs}
    assert shapes == {(MiB, 32, "/huge"), (cell["page_nbytes"], 4, "/huge")}
    assert [len(cell["peers"][name]["host_pages"]) for name in ("store", "file-per-page")] == [2, 2]
    assert set(cell["same_memory"]) == set(WAYS)
    for name, facts in cell["same_memory"].items():
        assert len(facts["gb_per_s"]) == 12, "two for each of three peers, in two launches"
        assert len(facts.get("base_over_this_speed_of_launches", "12")) == 2
        assert ("base_over_this_speed" in facts) is (name not in (LOAD, STORE))
        phase = "store" if WAYS[name] == STORE else "load"
        assert [f"same memory: {name}", phase] in [row[:2] for row in peers.rows_of(cell)]
    after = [later[:2] for (_, command, _), later in pairwise(asked) if command == "ways"]
    assert after == [("store", "store")] * 6, "the slots that they left free are taken"
    notes = peers.notes_of(cell)
    assert len(notes) == 6 and all(note in peers.report(result) for note in notes)
    older = (LOAD, UNVERIFIED[LOAD], *RAW)
    cell["same_memory"] = {name: cell["same_memory"][name] for name in older}
    assert len(peers.notes_of(cell)) == 2 and peers.report(result), "of an older result"
    pages = {(row[0], row[1]): row[-1] for row in peers.rows_of(cell)}
    assert pages["fio-hugepages", "load"] == "hugetlbfs"
    assert pages["store", "store"] == pages["store", "load"] != ""
    del cell["same_memory"]
    assert not peers.notes_of(cell), "of one without hicache-tutti"
    assert "same memory" not in peers.report(result)


def test_a_fio_that_fails_between_rounds_costs_its_row_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = iter(range(100))

    def run_fio(job: FioJob) -> FioResult:
        if next(runs) > 13:  # in the second launch, after its first batches
            raise FioUnavailable("fio failed: killed")
        return FioResult(job.io_nbytes, 1.0, 0.5, "fio-none")

    monkeypatch.setattr(peers, "_BASE", "store")
    monkeypatch.setattr(fio_peers, "run_fio", run_fio)
    monkeypatch.setattr(fio_peers, "prepare_file", lambda *_: None)
    monkeypatch.setattr(fio_peers.shutil, "which", lambda _: "fio")
    result = peers.run(arguments(tmp_path, "--peers", "store", "fio", "--launches", "2"), progress)
    assert next(runs) == 15, "no launch after the one that failed"
    (cell,) = result["cells"].values()
    assert list(cell["peers"]) == ["store"]
    assert "killed" in result["skipped"]["fio"] and "skipped: fio" in peers.report(result)


def test_the_ways_go_on_when_a_peer_has_failed_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_fio(_: FioJob) -> FioResult:
        raise FioUnavailable("fio failed: killed")

    monkeypatch.setattr(peers, "_BASE", "store")
    monkeypatch.setattr(fio_peers, "run_fio", run_fio)
    monkeypatch.setattr(fio_peers, "prepare_file", lambda *_: None)
    monkeypatch.setattr(fio_peers.shutil, "which", lambda _: "fio")
    words = ["--peers", "store", "fio", "file-per-page", "--launches", "2"]
    (cell,) = peers.run(arguments(tmp_path, *words), progress)["cells"].values()
    assert all(len(facts["gb_per_s"]) == 8 for facts in cell["same_memory"].values())


def test_fio_without_hugepages_is_skipped_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fio_peers.shutil, "which", lambda _: "fio")

    def refuse(*_: Any, allow_sysctl: bool) -> Any:
        raise Unsupported(f"no hugepages, {allow_sysctl}")

    monkeypatch.setattr(fio_peers, "held_hugepages", refuse)
    args = arguments(tmp_path, "--peers", "fio-hugepages", "--allow-sysctl")
    with pytest.raises(ConfigError, match=r"fio-hugepages.*no hugepages, True"):
        peers.run(args, progress)


def test_a_peer_is_measured_once_its_memory_was_collapsed() -> None:
    done = threading.Event()

    def collapse() -> None:
        time.sleep(0.1)
        done.set()

    peer = object.__new__(HiCachePeer)
    peer._attach = threading.Thread(target=collapse, name=COLLAPSING, daemon=True).start
    peer.open()
    assert done.is_set()


def test_the_next_mapping_begins_at_a_large_page() -> None:
    nbytes = 64 << 20
    with mmap.mmap(-1, nbytes + mmap.PAGESIZE):  # what comes below it is shifted
        align_next_mapping(nbytes)
        with mmap.mmap(-1, nbytes, flags=mmap.MAP_SHARED) as shared:
            assert address_of(shared)[0] % HUGEPAGE_NBYTES == 0


def test_sglangs_memory_is_asked_for_by_its_own_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, str] = {}

    def start(*_: Any, env: dict[str, str], **more: Any) -> None:
        given.update(env)
        raise MediumError("started")

    monkeypatch.setattr(peers.subprocess, "Popen", start)
    for how in ("thp", "collapse"):
        given.clear()
        with pytest.raises(MediumError, match="started"):
            peers.PeerClient("hicache-nixl", replace(plan_in(tmp_path), host_pages=how))
        assert (given.get(peers.PARALLEL_ALLOCATION) == "2") is (how == "thp")


def test_wrong_bytes_end_the_measurement(tmp_path: Path) -> None:
    plan = plan_in(tmp_path)
    peer = FilesPeer(plan)
    process = PeerProcess(peer, plan)
    process.answer("store", [0])
    (tmp_path / "000000-005").write_bytes(bytes(plan.page_nbytes))
    with pytest.raises(ChecksumMismatch, match="1 pages of batch 0"):
        process.answer("load", [0])
    peer.close()


def test_a_run_compares_what_is_there_and_names_what_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []
    client = peers.PeerClient

    def start(name: str, plan: PeerPlan) -> Any:
        started.append(name)
        return client(name, plan)

    monkeypatch.setattr(peers, "PeerClient", start)
    monkeypatch.setattr(peer_hicache, "missing", lambda backend: f"no {backend} today")
    monkeypatch.setattr(peers, "_BASE", "store")
    words = ["--peers", "store", "file-per-page", "hicache-nixl", "--rounds", "1"]
    words += ["--launches", "2"]
    result = peers.run(arguments(tmp_path, *words), progress)
    assert started == ["store", "file-per-page", "file-per-page", "store"], "each is first once"
    assert result["skipped"] == {"hicache-nixl": "no nixl today"}
    (cell,) = result["cells"].values()
    assert set(cell["peers"]) == {"store", "file-per-page"}
    for facts in cell["peers"].values():
        assert facts["exists"]["pages"] == 1024
        for phase in peers.PHASES:
            assert len(facts[phase]["gb_per_s"]) == 2
            assert facts[phase]["median_gb_per_s"] > 0
    for phase in peers.PHASES:
        assert len(cell["peers"]["file-per-page"][phase]["base_over_this_speed_of_launches"]) == 2
    assert "no nixl today" in peers.report(result)
    assert not list(tmp_path.iterdir()), "files were left behind"
    (tmp_path / "peers.json").write_text(json.dumps(result))
    page = render("<!-- result: peers -->\n<!-- end -->", tmp_path)
    assert "| file-per-page | load |" in page


def test_tuttis_pools_have_a_member_in_each_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [tmp_path / name for name in ("left", "right")]
    for folder in folders:
        folder.mkdir()
    there: set[tuple[str, ...]] = set()
    rounds = peers._rounds

    def watched(*given: Any) -> None:
        rounds(*given)
        there.add(
            tuple(sorted(f.relative_to(tmp_path).parts[0] for f in tmp_path.rglob("*.tutti")))
        )

    monkeypatch.setattr(peers, "_BASE", "store")
    monkeypatch.setattr(peers, "_rounds", watched)
    args = arguments(tmp_path, "--peers", "store", "file-per-page")
    args.dir = [str(folder) for folder in folders]
    result = peers.run(args, progress)
    assert there == {("left", "right")}
    assert result["members"] == 2
    assert "2 members; all else in the first folder" in peers.report(result)
    assert not any(any(folder.iterdir()) for folder in folders)


def test_sglangs_storage_is_given_all_folders(tmp_path: Path) -> None:
    plan = plan_in(tmp_path)
    assert _sglang_backend("hicache-tutti", plan)[1]["path"] == str(tmp_path)
    several = replace(plan, others=("b",))
    assert _sglang_backend("hicache-tutti", several)[1]["path"] == [str(tmp_path), "b"]


def test_nothing_to_run_and_bad_numbers_are_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_hicache, "missing", lambda backend: "gone")
    with pytest.raises(ConfigError, match="no peer can run"):
        peers.run(arguments(tmp_path, "--peers", "hicache-file"), progress)
    with pytest.raises(ConfigError, match="at least one round"):
        peers.run(arguments(tmp_path, "--rounds", "0"), progress)
    with pytest.raises(ConfigError, match="one launch"):
        peers.run(arguments(tmp_path, "--launches", "0"), progress)
    with pytest.raises(ConfigError, match="is not a directory"):
        peers.run(arguments(tmp_path / "nowhere"), progress)
    with pytest.raises(ConfigError, match="is not a peer"):
        make_peer("tape", plan_in(tmp_path))


def test_a_peer_that_fails_is_named_with_its_reason(tmp_path: Path) -> None:
    worker = peers.PeerClient("store", plan_in(tmp_path))
    try:
        with pytest.raises(MediumError, match=r"store failed: .*not in the pool"):
            worker.ask("load", 3)
    finally:
        worker.end()


def test_sigterm_takes_the_data_away(tmp_path: Path) -> None:
    """A killed run must not leave gigabytes on the user's disk."""
    words = ["bench", "peers", "--peers", "file-per-page", "--rounds", "100000"]
    command = [sys.executable, "-m", "tutti.cli", *words, "--dir", str(tmp_path)]
    process = subprocess.Popen([*command, "--page-tokens", "1"], stderr=subprocess.DEVNULL)
    try:
        data = "tutti-peers-*/*/*"
        wait_until(lambda: list(tmp_path.glob(data)) or process.poll() is not None)
        process.terminate()
        assert process.wait(60) == 143
    finally:
        process.kill()
        process.wait(60)
    assert not list(tmp_path.iterdir())
