"""`page_cache_share` through SGLang's options: groups follow the free memory, and pages stay."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import host_pools as hp
import pytest
from linker_engine import Rig, names

from store.limited_memory import machine_of, set_limit
from tutti.base.memory_pressure import read_memory
from tutti.integration.sglang.hicache import TuttiHiCacheStorage
from tutti.transfers import residency

_S = 60


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Has no free memory at first."""
    root = machine_of(tmp_path / "root", 0)
    monkeypatch.setattr(residency, "read_memory", lambda *_: read_memory(root))
    monkeypatch.setattr(residency, "read_stall_us", lambda *_: None)
    return root


def follows(store: Any, machine: Path, check: Callable[[], None]) -> None:
    """The plan goes where the limit is, while pages are served; the counters have all of it."""
    if not store.controller.direct:
        pytest.skip(f"no direct I/O here: {store.controller.members[0].buffered_reason}")
    moved, before = 0, 0
    for groups in (3, 0, 2):
        set_limit(machine, groups * store.geometry.group_nbytes)
        deadline_s = time.monotonic() + _S
        while store.stats()["page_cache_planned_nbytes"] != groups * store.geometry.group_nbytes:
            assert time.monotonic() < deadline_s, store.stats()
            check()
        moved, before = moved + abs(groups - before), groups
        assert len(store.controller.buffered) <= groups
    stats = store.stats()
    assert stats["residency_switches"] >= moved
    moved_nbytes = stats["residency_switches"] * store.geometry.group_nbytes
    assert stats["residency_moved_nbytes"] == moved_nbytes
    assert stats["residency_moving_ms"] > 0


def test_a_linkers_groups_follow_the_memory(tmp_path: Path, machine: Path) -> None:
    with Rig(tmp_path / "pools", page_cache_share=1.0, recompute_us_per_token=1e6) as rig:
        want = rig.stored(12)

        def check() -> None:
            assert rig.lookup(names(12)) == 12
            rig.check_restored(names(12), range(20, 32), want)

        store = rig.stored_pool.store
        follows(store, machine, check)
        rig.stored_pool.metrics.from_store(store.stats(), 0)
        planned = rig.stored_pool.metrics.snapshot()["page_cache_bytes"]
        assert planned == 2 * store.geometry.group_nbytes


def test_hicaches_groups_follow_the_memory(tmp_path: Path, machine: Path, seed: int) -> None:
    pool = hp.mha_pool("layer_first")
    options = {"page_cache_share": 1.0}
    storage = TuttiHiCacheStorage(hp.config(tmp_path / "pools", options=options), {})
    storage.register_mem_pool_host(pool)
    with closing(storage):
        hp.fill(pool, seed)
        want = [hp.page_bytes(pool, page) for page in range(12)]
        hashes = [f"{i:064x}" for i in range(1, 13)]
        assert all(storage.batch_set_v1(hashes, hp.indices(pool, list(range(12)))))

        def check() -> None:
            assert storage.batch_exists(hashes) == 12
            places = hp.indices(pool, list(range(12, 24)))
            assert storage.batch_get_v1(hashes, places) == [True] * 12
            assert [hp.page_bytes(pool, page) for page in range(12, 24)] == want

        store = storage._stores["kv"].store
        follows(store, machine, check)
        planned = storage.counters()["kv"]["page_cache_bytes"]
        assert planned == 2 * store.geometry.group_nbytes
