"""The ways in which `tutti bench peers` uses the same memory, and what they show."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from types import SimpleNamespace
from typing import IO, Any

import numpy as np
import pytest

from tutti.base.units import KiB, MiB
from tutti.bench.peers import same_memory
from tutti.bench.peers.peer import BATCH_PAGES, PeerPlan
from tutti.bench.peers.plain import FilesPeer, StorePeer
from tutti.bench.peers.process import PeerProcess
from tutti.bench.peers.same_memory import (
    FILES,
    HASHED,
    LOAD,
    RAW,
    STORE,
    UNVERIFIED,
    WAYS,
    ways_of,
)
from tutti.errors import ChecksumMismatch, MediumError, Unsupported

BATCHES = 2


def plan_in(folder: Path) -> PeerPlan:
    """Pages of 128 KiB, batches of 16 MiB."""
    return PeerPlan(str(folder), 1, "page_first", BATCHES)


@pytest.fixture
def files(tmp_path: Path) -> Iterator[list[IO[bytes]]]:
    """A file for each page of a batch."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(TemporaryFile(dir=tmp_path, buffering=0))
            for _ in range(BATCH_PAGES)
        ]


@pytest.mark.parametrize("way", [*RAW, FILES, HASHED[LOAD]])
def test_raw_reads_bring_the_bytes_of_a_load(
    tmp_path: Path, way: str, files: list[IO[bytes]]
) -> None:
    peer = StorePeer(replace(plan_in(tmp_path), others=(str(tmp_path / "other"),)))
    (tmp_path / "other").mkdir()
    peer.open()
    with closing(peer):
        for batch in range(BATCHES):
            peer.store(batch)
        ways = ways_of(peer.kept(0), lambda: None, lambda: None, files)
        peer.prepare_load(0)
        ways[LOAD]()
        with pytest.raises(ChecksumMismatch):
            peer.check(0)
        ways[way]()
        peer.check(0)


def test_pieces_have_at_most_1_mib_and_keep_their_places() -> None:
    views = [np.zeros(5 * MiB // 2, np.uint8), np.zeros(4 * KiB, np.uint8)]
    cut = same_memory._cut([(3, views, 8 * KiB)])
    assert [(file, view.nbytes, offset - 8 * KiB) for file, (view,), offset in cut] == [
        (3, MiB, 0),
        (3, MiB, MiB),
        (3, MiB // 2, 2 * MiB),
        (3, 4 * KiB, 5 * MiB // 2),
    ]
    assert cut[1][1][0].ctypes.data == views[0].ctypes.data + MiB


def test_a_piece_is_hashed_after_its_read_and_the_cost_of_a_call_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[Any] = []
    clock_ns = 0

    def preadv(*piece: Any) -> int:
        done.append(piece)
        return 9

    def digest(isa: int, where: int, sizes: int, count: int) -> None:
        nonlocal clock_ns
        done.append(count)
        clock_ns += 5 + 1000 * count

    library = SimpleNamespace(tutti_xxh3_64_isa=digest, tutti_isa_best=lambda: 0)
    monkeypatch.setattr(same_memory, "lib", lambda: library)
    monkeypatch.setattr(same_memory, "thread_time_ns", lambda: clock_ns)
    piece = (3, [np.zeros(9, np.uint8)], 0)
    assert same_memory._hashed([piece, piece], preadv) == 2000 / 1e9
    assert done == [piece, 0, 0, 1] * 2
    with pytest.raises(MediumError, match="ended before its last byte"):
        same_memory._hashed([piece], lambda *_: 8)


def test_a_file_per_page_is_read_with_all_requests_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: list[IO[bytes]]
) -> None:
    under_way = threading.Barrier(BATCH_PAGES)
    read: list[int] = []

    def preadv(file: int, views: list[Any], offset: int) -> int:
        under_way.wait(30)
        read.append(file)
        return os.preadv(file, views, offset)

    monkeypatch.setattr(same_memory, "preadv", preadv)
    peer = StorePeer(plan_in(tmp_path))
    peer.open()
    with closing(peer):
        peer.store(0)
        ways_of(peer.kept(0), lambda: None, lambda: None, files)[FILES]()
        assert set(read) == {file.fileno() for file in files} and len(read) == BATCH_PAGES
        assert all(fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT for file in files)
        assert {os.fstat(file).st_size for file in read} == {128 * KiB}


def test_every_way_to_use_the_same_memory_is_timed_in_random_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: list[IO[bytes]]
) -> None:
    peer = StorePeer(plan_in(tmp_path))
    process = PeerProcess(peer, plan_in(tmp_path))
    with closing(peer):
        for batch in range(BATCHES):
            process.answer("store", [batch])
        store, stored = peer.store, list[int]()
        monkeypatch.setattr(peer, "store", lambda batch: stored.append(batch) or store(batch))
        turns = process.answer("ways", [0, *range(8)])["turns"]
        assert len(stored) == 1 + 2 * 8, "the first store evicts, and is not timed"
        assert len(turns) == 8 and all(set(answer) == set(WAYS) for answer in turns)
        orders = [list(answer) for answer in turns]
        assert orders[0] != orders[1] != orders[2] and len({order[0] for order in orders}) > 2
        samples = [sample for answer in turns for sample in answer.values()]
        assert all(sample["nbytes"] == BATCH_PAGES * 128 * KiB for sample in samples)
        spent = [name for name, sample in turns[0].items() if sample["digest_cpu_s"] is not None]
        assert set(spent) == set(HASHED.values())
        assert all(0 < turns[0][name]["digest_cpu_s"] <= turns[0][name]["cpu_s"] for name in spent)
        assert process.answer("exists", [0, 1])["pages"] == BATCHES * BATCH_PAGES
        assert len(peer.kept(0).store) == BATCHES * BATCH_PAGES, "what was stored here is discarded"
        assert [path.name for path in tmp_path.iterdir()] == ["store.tutti"], "files have no name"
        core = peer.kept(0).store._core
        policies: list[str] = []
        used = (lambda: policies.append(core.config.verify), partial(peer.store, 7))
        ways = ways_of(peer.kept(0), *used, files)
        for way in (LOAD, UNVERIFIED[LOAD], LOAD):
            ways[way]()
        assert policies == ["always", "off", "always"]
        for way in (STORE, UNVERIFIED[STORE], STORE):
            ways[way]()
            has_digests = core.index.has_digests(core.index.find(peer.kept(7).keys))
            assert has_digests.all() if way == STORE else not has_digests.any()
            same_memory.discard(peer.kept(7))
        with pytest.raises(MediumError, match="a page was not stored"):
            same_memory.discard(peer.kept(7))
        monkeypatch.setattr(same_memory, "preadv", lambda *_: 0)
        with pytest.raises(MediumError, match="ended before its last byte"):
            ways_of(peer.kept(0), *used, files)[RAW[0]]()
    with pytest.raises(Unsupported, match="FilesPeer has no store"):
        FilesPeer(plan_in(tmp_path)).kept(0)


def test_what_ways_to_use_the_same_memory_show_is_said() -> None:
    def over(median: float) -> dict[str, Any]:
        interval = {"median": median, "low": median, "high": median}
        return {"base_over_this_speed": interval, "base_minus_this_cpu_s_per_gb": interval}

    ways = {LOAD: {}, UNVERIFIED[LOAD]: over(0.97), RAW[0]: over(1.1), RAW[1]: over(0.98)}
    loads, verified = same_memory.notes_of(ways, 0.98)
    assert loads.startswith("loads have 0.98 [0.98, 0.98] of the speed of the faster raw reads")
    assert "none is 1.05 times as fast as a backend that reads as fast as these" in loads
    assert "beside the best other backend they have 0.98, the bar is 1.05" in loads
    unsure = {"base_over_this_speed": {"median": 0.98, "low": 0.9, "high": 1.01}}
    loads, _ = same_memory.notes_of(ways | {RAW[1]: unsure}, 0.98)
    assert "none is" not in loads and "lost in" not in loads
    assert loads.endswith("the engine alone has 1.12 of the four threads")
    assert "bar 0.97: reached" in verified
    ways |= {UNVERIFIED[LOAD]: over(0.96), RAW[0]: over(0.96)}
    loads, verified = same_memory.notes_of(ways, None)
    assert "lost in Tutti's digests, look-up and queue" in loads
    assert "lost in Tutti's engine" in same_memory.notes_of(ways | {RAW[0]: over(0.9)}, None)[0]
    assert "bar 0.97: **not reached**" in verified
    ways |= {UNVERIFIED[STORE]: over(0.98), FILES: over(1.0) | {"gb_per_s": [1.0, 1.0, 2.0]}}
    ways[RAW[0]]["gb_per_s"] = [1.04, 1.03, 2.04]
    _, files, _, stores = same_memory.notes_of(ways, None)
    assert files.startswith("the faster raw reads have 1.03 [1.02, 1.04] of the speed of raw reads")
    assert "no loads from Tutti's file are 1.05 times as fast" in files
    assert stores.startswith("verified stores have 0.98 [0.98, 0.98] of unverified ones")
    assert "bar 0.97: reached" in stores
    ways[RAW[0]]["gb_per_s"] = [1.04, 1.03, 2.2]
    assert "no loads" not in same_memory.notes_of(ways, None)[1]


def test_what_digests_leave_of_the_goal_for_cpu_time_is_said() -> None:
    def cpu(*s_per_gb: float) -> dict[str, Any]:
        return {"cpu_s_per_gb": [*s_per_gb]}

    hashed = {HASHED[LOAD]: cpu(0.09, 0.09) | {"digest_cpu_s_per_gb": [0.045, 0.045]}}
    ways = {LOAD: cpu(0.06, 0.061), RAW[1]: cpu(0.011, 0.011)} | hashed
    backends, fio = {"a": cpu(0.012, 0.012), "b": cpu(0.03, 0.03)}, {"fio": cpu(0.007, 0.007)}
    (note,) = same_memory.cpu_notes_of(LOAD, ways, backends, fio)
    assert "digests by one thread in the same memory, 0.045 [0.045, 0.045]" in note
    assert "(fio) 0.007 [" in note and "bar 0.03 above a's 0.012 [" in note
    assert "out of reach of XXH3-64 and transfers that cost as much" in note
    (note,) = same_memory.cpu_notes_of(LOAD, ways | {LOAD: cpu(0.05, 0.051)}, backends, fio)
    assert note.endswith("this shows no limit (the sum of both is 0.052 to 0.052)")
    (note,) = same_memory.cpu_notes_of(LOAD, ways, {"b": cpu(0.03, 0.03)}, fio)
    assert "this shows no limit" in note
    (note,) = same_memory.cpu_notes_of(LOAD, ways, {"b": cpu(0.01, 0.03)}, fio)
    assert "NOT RESOLVED" in note
    (note,) = same_memory.cpu_notes_of(LOAD, ways | {LOAD: cpu(0.01, 0.06)}, {"b": cpu(0.0)}, fio)
    assert "(b) 0.000 [" in note and "NOT RESOLVED" in note, "its own may be less than the sum"
    (note,) = same_memory.cpu_notes_of(
        LOAD, ways | {LOAD: cpu(0.047, 0.053)}, {"b": cpu(0.024, 0.024)}, fio
    )
    assert "this shows no limit" in note, "the goal is reached"
    assert not same_memory.cpu_notes_of(LOAD, ways, {}, fio)
    assert not same_memory.cpu_notes_of(STORE, ways, backends, fio), "of an older result"
