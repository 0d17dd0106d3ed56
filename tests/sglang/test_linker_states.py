"""TuttiLinker over SGLang's hybrid pools: a hit is what all of them can restore."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from linker_engine import WAIT_S, damage, in_use, kept_ahead, names, wait_for
from linker_states import KINDS, StatesRig, linear, windows

WINDOWS = {"swa": 2, "mamba": 1}


def places(rig: StatesRig, kv: range, first: int) -> dict[str, list[int]]:
    """Pages for each source: windows and states are at ``first``."""
    counts = {source: min(WINDOWS.get(source, 0), len(kv)) for source in rig.sources}
    return {
        source: list(kv) if source == "kv" else list(range(first, first + counts[source]))
        for source in rig.sources
    }


@pytest.mark.parametrize("kind", KINDS)
def test_every_pool_comes_back_byte_for_byte(tmp_path: Path, kind: str) -> None:
    with StatesRig(tmp_path, kind) as rig:
        rig.fill(1)
        stored_pools = rig.linker.stored_pools
        kv = range(1, 7)
        at = places(rig, kv, 3)
        want = {name: rig.content(name, at[s.kv_pool.source]) for name, s in stored_pools.items()}
        assert rig.linker.lookup("r", rig.transfers(names(6), None, WINDOWS)) == []
        assert rig.store(rig.transfers(names(6), at, WINDOWS))
        rig.wipe()
        found = rig.linker.lookup("r", rig.transfers(names(8), None, WINDOWS))
        assert found[-1:] == [6]
        if rig.sources == ["kv"]:
            assert found == [1, 2, 3, 4, 5, 6]
        else:
            assert found == [6], "states are there at the end alone"
        to = places(rig, range(8, 14), 7)
        before = {name: rig.content(name, [0, 1]) for name in stored_pools}
        assert rig.restore(rig.transfers(names(6), to, WINDOWS))
        for name, stored_pool in stored_pools.items():
            assert rig.content(name, to[stored_pool.kv_pool.source]) == want[name], name
            moved = stored_pool.metrics.snapshot()["moved_pages/load"]
            assert moved == len(want[name]), "each pool counts its own"
        assert {name: rig.content(name, [0, 1]) for name in stored_pools} == before


@pytest.mark.parametrize("kind", KINDS)
def test_layers_are_there_when_their_wait_returns(tmp_path: Path, kind: str) -> None:
    with StatesRig(tmp_path, kind) as rig:
        rig.fill(2)
        at, to = places(rig, range(4), 2), places(rig, range(8, 12), 6)
        assert rig.store(rig.transfers(names(4), at, WINDOWS))
        stored_pools = rig.linker.stored_pools.values()
        assert rig.linker.load("r", rig.transfers(names(4), to, WINDOWS))
        counter = rig.linker.layer_done_counter
        counter.set_consumer(rig.linker.start_layer_wise_loading())
        seen = 0
        for layer in range(counter.num_layers):
            counter.wait_until(layer)
            for stored_pool in stored_pools:
                own = stored_pool.kv_pool.layer_of.get(layer)
                if own is not None:
                    seen += 1
                    for view in stored_pool.kv_pool.views[own]:
                        source = stored_pool.kv_pool.source
                        assert (view[to[source]] == view[at[source]]).all()
        assert seen == sum(len(stored_pool.kv_pool.views) for stored_pool in stored_pools)
        assert rig.linker.finish_layer_wise_loading(counter.consumer_index)
        if rig.requests is not None:
            assert rig.requests.layer_transfer_counter is counter


def test_a_window_is_restorable_where_it_is_whole(tmp_path: Path) -> None:
    with StatesRig(tmp_path, "windows") as rig:
        rig.fill(3)
        all_of = names(10)
        for start, end in ((0, 4), (4, 9)):
            # Nodes end at 4 and 9, each with the two last pages of its window.
            count = end - start
            transfers = rig.transfers(
                all_of[start:end], {"kv": list(range(count)), "swa": [0, 1]}, WINDOWS
            )
            assert rig.store(transfers)
        look = rig.transfers(all_of, None, WINDOWS)
        assert rig.linker.lookup("r", look) == [4, 9]
        # Behind pages that SGLang has, a window may reach back into them.
        tail = rig.transfers(all_of[3:], None, WINDOWS)
        assert rig.linker.lookup("s", tail) == [1, 6]


def test_a_state_belongs_to_one_boundary(tmp_path: Path) -> None:
    with StatesRig(tmp_path, "mamba") as rig:
        rig.fill(4)
        all_of = names(9)
        for start, end, slot in ((0, 3, 1), (3, 5, 2), (5, 9, 3)):
            at = {"kv": list(range(end - start)), "mamba": [slot]}
            assert rig.store(rig.transfers(all_of[start:end], at, WINDOWS))
        assert rig.linker.lookup("r", rig.transfers(all_of, None, WINDOWS)) == [3, 5, 9]
        assert rig.linker.lookup("r", rig.transfers(all_of[:8], None, WINDOWS)) == [3, 5]
        want = rig.content("mamba", [2])
        rig.wipe()
        to = {"kv": [10, 11, 12, 13, 14], "mamba": [9]}
        assert rig.restore(rig.transfers(all_of[:5], to, WINDOWS))
        assert rig.content("mamba", [9]) == want


def test_an_offload_without_states_stores_what_there_is(tmp_path: Path) -> None:
    with StatesRig(tmp_path, "mamba") as rig:
        rig.fill(5)
        transfers = rig.transfers(names(3), {"kv": [0, 1, 2], "mamba": [1]}, WINDOWS)
        assert rig.store([t for t in transfers if t.name == "kv"])
        assert rig.linker.lookup("r", rig.transfers(names(3), None, WINDOWS)) == []
        assert rig.linker.stored_pools["kv"].store.stats()["stored"] == 3
        assert not rig.linker.offload([t for t in transfers if t.name == "mamba"])
        assert rig.linker.lookup("r", [t for t in transfers if t.name == "kv"]) == []


def test_damage_in_any_pool_fails_the_batch(tmp_path: Path) -> None:
    with StatesRig(tmp_path, "mamba") as rig:
        rig.fill(6)
        at = places(rig, range(4), 2)
        assert rig.store(rig.transfers(names(4), at, WINDOWS))
        (file,) = tmp_path.rglob("linker-mamba-*.tutti")
        damage(file, start=rig.linker.stored_pools["mamba"].store.geometry.groups_offset)
        look = rig.transfers(names(4), None, WINDOWS)
        assert rig.linker.lookup("r", look) == [4]
        assert not rig.restore(rig.transfers(names(4), places(rig, range(8, 12), 5), WINDOWS))
        wait_for(lambda: rig.linker.lookup("r", look) == [])
        assert rig.store(rig.transfers(names(4), at, WINDOWS))
        wait_for(lambda: rig.linker.lookup("r", look) == [4])


def test_small_pages_are_packed_and_a_batch_holds_what_staging_does(tmp_path: Path) -> None:
    with StatesRig(tmp_path, "sparse", load_staging="1MiB", store_staging="1MiB") as rig:
        stored_pools = rig.linker.stored_pools
        assert stored_pools["indexer"].kv_pool.packed
        assert not stored_pools["kv"].kv_pool.packed
        most = stored_pools["indexer"].loads.pages
        assert 0 < most < 12
        rig.fill(7)
        want = rig.content("indexer", range(most))
        for page in range(12):
            at = {"kv": [page]}
            assert rig.store(rig.transfers(names(12)[page : page + 1], at))
        assert rig.linker.lookup("r", rig.transfers(names(12), None))[-1] == most
        rig.wipe()
        to = {"kv": list(range(most))}
        assert rig.linker.load("a", rig.transfers(names(most), to))
        assert not rig.linker.load("b", rig.transfers(names(1), {"kv": [15]})), "the batch is full"
        index = rig.linker.start_layer_wise_loading()
        assert rig.linker.finish_layer_wise_loading(index)
        assert rig.content("indexer", range(most)) == want


@pytest.fixture
def small_staging(tmp_path: Path) -> Iterator[StatesRig]:
    """Staging for ten pages, all of which may be read ahead; the pages of the indexer need it."""
    with StatesRig(tmp_path, "sparse", load_staging="4MiB", read_ahead_share=1.0) as rig:
        assert rig.linker.stored_pools["indexer"].loads.pages == 10
        rig.fill(11)
        assert rig.store(rig.transfers(names(10), {"kv": list(range(10))}))
        assert rig.store(rig.transfers(names(4, "other"), {"kv": list(range(10, 14))}))
        yield rig


def test_a_batch_gets_the_staging_beside_a_read_ahead_that_it_shares(
    small_staging: StatesRig,
) -> None:
    """It needs two pages of the six, and the other eight do not fit into the rest."""
    rig, to = small_staging, {"kv": list(range(10))}
    indexer, want = rig.linker.stored_pools["indexer"], rig.content("indexer", range(10))
    other = [*names(2), *names(4, "other")]
    assert rig.linker.lookup("waits", rig.transfers(other))[-1] == 6
    wait_for(lambda: indexer.metrics.snapshot().get("ahead_pages") == 6)
    rig.wipe()
    assert rig.restore(rig.transfers(names(10), to))
    assert rig.content("indexer", range(10)) == want
    wait_for(lambda: in_use(indexer.loads) == 0)


def test_a_batch_waits_for_staging_that_is_still_being_read(
    small_staging: StatesRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, to = small_staging, {"kv": list(range(10))}
    indexer, want = rig.linker.stored_pools["indexer"], rig.content("indexer", range(10))
    begun, go = threading.Event(), threading.Event()
    load = indexer.store.load

    def late(*args: Any, ahead: bool = False, **how: Any) -> Any:
        if ahead:
            begun.set()
            assert go.wait(WAIT_S)
        return load(*args, ahead=ahead, **how)

    monkeypatch.setattr(indexer.store, "load", late)
    assert rig.linker.lookup("waits", rig.transfers(names(4, "other")))[-1] == 4
    assert begun.wait(WAIT_S)
    rig.wipe()
    assert rig.linker.load("r", rig.transfers(names(10), to))
    index = rig.linker.start_layer_wise_loading()
    wait_for(lambda: not kept_ahead(rig.linker.ahead))
    go.set()
    assert rig.linker.finish_layer_wise_loading(index)
    assert rig.content("indexer", range(10)) == want


def test_windows_in_staging_do_not_shorten_prefixes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load needs two pages of windows, however long its prefix is."""
    packed = functools.partial(windows, heads=1, full=range(8), swa=range(8, 16))
    monkeypatch.setitem(KINDS, "windows", (packed, *KINDS["windows"][1:]))
    with StatesRig(tmp_path, "windows", load_staging="128KiB", read_ahead_share=0.0) as rig:
        staging = {name: pool.loads.pages for name, pool in rig.linker.stored_pools.items()}
        assert staging == {"kv": 6, "swa": 2}
        rig.fill(10)
        at, to = places(rig, range(6), 2), places(rig, range(8, 14), 6)
        want = {name: rig.content(name, at[name]) for name in staging}
        assert rig.store(rig.transfers(names(6), at, WINDOWS))
        look = rig.transfers(names(6), None, WINDOWS)
        assert rig.linker.lookup("r", look) == [6]
        assert rig.restore(rig.transfers(names(6), to, WINDOWS))
        assert {name: rig.content(name, to[name]) for name in staging} == want
        assert rig.linker.load("a", rig.transfers(names(6), to, WINDOWS))
        assert rig.linker.lookup("b", look) == [], "the batch is full"
        assert not rig.linker.load("b", rig.transfers(names(6), at, WINDOWS))


def test_each_pool_has_a_file_and_survives_a_restart(tmp_path: Path) -> None:
    with StatesRig(tmp_path, "mamba-windows") as rig:
        rig.fill(8)
        at = places(rig, range(5), 2)
        want = {n: rig.content(n, at[s.kv_pool.source]) for n, s in rig.linker.stored_pools.items()}
        assert rig.store(rig.transfers(names(5), at, WINDOWS))
    files = {path.name.rsplit("-tp", 1)[0] for path in tmp_path.rglob("*.tutti")}
    assert files == {"linker-kv", "linker-swa", "linker-mamba"}
    with StatesRig(tmp_path, "mamba-windows") as rig:
        assert rig.linker.lookup("r", rig.transfers(names(5), None, WINDOWS)) == [5]
        assert rig.restore(rig.transfers(names(5), at, WINDOWS))
        assert {
            n: rig.content(n, at[s.kv_pool.source]) for n, s in rig.linker.stored_pools.items()
        } == (want)


def test_states_of_another_type_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after another SGLANG_MAMBA_CONV_DTYPE: the type of the first buffer stays."""
    for dtype, found in ((torch.bfloat16, []), (torch.float16, []), (torch.bfloat16, [4])):
        pools = functools.partial(linear, use_mla=False, conv=dtype)
        monkeypatch.setitem(KINDS, "mamba", (pools, *KINDS["mamba"][1:]))
        with StatesRig(tmp_path, "mamba") as rig:
            assert rig.linker.lookup("r", rig.transfers(names(4), None, WINDOWS)) == found, dtype
            assert rig.store(rig.transfers(names(4), places(rig, range(4), 2), WINDOWS))


def test_a_close_with_everything_under_way_leaves_nothing(tmp_path: Path) -> None:
    with StatesRig(tmp_path / "warm", "mamba-windows"):
        pass
    threads, files = set(threading.enumerate()), set(os.listdir("/proc/self/fd"))
    with StatesRig(tmp_path / "a", "mamba-windows") as rig:
        rig.fill(9)
        at = places(rig, range(6), 2)
        assert rig.store(rig.transfers(names(6), at, WINDOWS))
        look = rig.transfers(names(6), None, WINDOWS)
        assert rig.linker.lookup("waits", look) == [6]
        assert rig.linker.load("r", rig.transfers(names(6), places(rig, range(8, 14), 5), WINDOWS))
        rig.linker.start_layer_wise_loading()
        assert rig.linker.offload(rig.transfers(names(6, "late"), at, WINDOWS))
        assert rig.linker.load("q", rig.transfers(names(6), places(rig, range(8, 14), 8), WINDOWS))
        rig.linker.reset()
        assert rig.linker.start_layer_wise_loading() == -1
        assert kept_ahead(rig.linker.ahead) == rig.linker.backlog.locked == 0
        assert rig.linker.backlog.wait_quiet(0.0)
        for stored_pool in rig.linker.stored_pools.values():
            wait_for(
                lambda stored_pool=stored_pool: (
                    in_use(stored_pool.loads) == in_use(stored_pool.stores) == 0
                )
            )
            wait_for(lambda stored_pool=stored_pool: not stored_pool.store._core.index.pins.any())
        assert rig.linker.lookup("r", look) == [6], "nothing that is stored is forgotten"
        assert rig.linker.load("r", rig.transfers(names(6), places(rig, range(8, 14), 5), WINDOWS))
        rig.linker.start_layer_wise_loading()
        rig.linker.offload(rig.transfers(names(6, "last"), at, WINDOWS))
    # A thread that runs calls for the main one waits a moment for the next.
    wait_for(lambda: set(threading.enumerate()) <= threads)
    assert set(os.listdir("/proc/self/fd")) <= files
