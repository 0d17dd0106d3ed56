"""TuttiHiCacheStorage over SGLang's real host pools, in this process."""

from __future__ import annotations

import logging
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import host_pools as hp
import pytest
import torch
from medium_damage import flip, pool_files
from sglang.srt.environ import envs
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.storage import StorageBackendFactory
from waiting import wait_until

from tutti.errors import ConfigError, DeviceTimeout, PoolInUse, TuttiError, Unsupported
from tutti.integration.sglang import adapter
from tutti.integration.sglang import hicache as module
from tutti.integration.sglang.hicache import TuttiHiCacheStorage
from tutti.integration.sglang.host import host_pools as host_memory
from tutti.integration.sglang.host import host_store
from tutti.integration.sglang.identity import ServedModel
from tutti.integration.sglang.weights import WeightsWatch


def hashes(n: int, start: int = 0) -> list[str]:
    return [f"{i:064x}" for i in range(start + 1, start + n + 1)]


def pages_of(rng: random.Random, n: int) -> list[int]:
    return rng.sample(range(hp.PAGES), n)


@pytest.mark.parametrize("layout", hp.LAYOUTS)
@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("kind", [hp.mha_pool, hp.mla_pool])
def test_pages_come_back_into_other_places(
    make: hp.Make, layout: str, page_size: int, kind: Any, seed: int
) -> None:
    rng = random.Random(seed)
    pool = kind(layout, page_size)
    storage = make(pool, is_mla_model=kind is hp.mla_pool)
    hp.fill(pool, seed)
    source = pages_of(rng, 10)
    want = [hp.page_bytes(pool, page) for page in source]
    assert storage.batch_exists(hashes(10)) == 0
    assert storage.batch_set_v1(hashes(10), hp.indices(pool, source)) == [True] * 10
    assert storage.batch_exists(hashes(12)) == 10
    hp.wipe(pool)
    target = pages_of(rng, 10)
    assert storage.batch_get_v1(hashes(10), hp.indices(pool, target)) == [True] * 10
    assert [hp.page_bytes(pool, page) for page in target] == want
    for page in set(range(hp.PAGES)) - set(target):
        assert not any(hp.page_bytes(pool, page)), "a page that was not requested was written"


@pytest.mark.parametrize("layout", hp.LAYOUTS)
def test_pages_survive_the_process(make: hp.Make, layout: str, seed: int) -> None:
    pool = hp.mha_pool(layout)
    hp.fill(pool, seed)
    want = [hp.page_bytes(pool, page) for page in range(6)]
    first = make(pool)
    assert all(first.batch_set_v1(hashes(6), hp.indices(pool, list(range(6)))))
    first.close()
    hp.wipe(pool)
    second = make(pool)
    assert second.batch_exists(hashes(6)) == 6
    assert all(second.batch_get_v1(hashes(6), hp.indices(pool, list(range(6)))))
    assert [hp.page_bytes(pool, page) for page in range(6)] == want


@pytest.mark.parametrize("layout", hp.LAYOUTS)
def test_copying_calls_and_zero_copy_hold_the_same_pages(
    make: hp.Make, layout: str, seed: int
) -> None:
    pool = hp.mha_pool(layout)
    storage = make(pool)
    hp.fill(pool, seed)
    flat = [pool.get_data_page(page * 16).clone() for page in range(4)]
    assert storage.batch_set(hashes(2), flat[:2])
    assert storage.set(hashes(4)[2], flat[2])
    assert storage.batch_set_v1(hashes(4)[3:], hp.indices(pool, [3])) == [True]
    hp.wipe(pool)
    assert storage.batch_get_v1(hashes(2), hp.indices(pool, [8, 9])) == [True, True]
    for page, want in ((8, flat[0]), (9, flat[1])):
        assert hp.page_bytes(pool, page) == bytes(want.view(torch.uint8).numpy().tobytes())
    targets = [pool.get_dummy_flat_data_page() for _ in range(5)]
    got = storage.batch_get(hashes(5), targets)
    assert got[4] is None
    for page in range(4):
        assert torch.equal(got[page].view(torch.uint8), flat[page].view(torch.uint8))
    assert storage.exists(hashes(1)[0])
    assert not storage.exists("ff" * 32)
    assert storage.get("ff" * 32, targets[0]) is None
    assert not storage.set("ee" * 32, torch.zeros(3)), "a page of the wrong size was taken"


def test_a_gap_ends_what_is_served(make: hp.Make, seed: int) -> None:
    pool = hp.mha_pool("page_first")
    storage = make(pool)
    hp.fill(pool, seed)
    keys = hashes(5)
    assert all(storage.batch_set_v1(keys[:2] + keys[3:], hp.indices(pool, [0, 1, 3, 4])))
    assert storage.batch_exists(keys) == 2
    answer = storage.batch_get_v1(keys, hp.indices(pool, [5, 6, 7, 8, 9]))
    assert answer == [True, True, False, False, False]


@pytest.mark.parametrize("verify", ["always", "off"])
def test_flipped_bits_are_a_miss_unless_nobody_looks(
    make: hp.Make, tmp_path: Path, verify: str, seed: int
) -> None:
    pool = hp.mha_pool("page_first_direct")
    storage = make(pool, options={"verify": verify})
    hp.fill(pool, seed)
    want = [hp.page_bytes(pool, page) for page in range(4)]
    assert all(storage.batch_set_v1(hashes(4), hp.indices(pool, [0, 1, 2, 3])))
    (path,) = pool_files(tmp_path)
    assert flip(path, want[1][:4096]) == 1
    hp.wipe(pool)
    answer = storage.batch_get_v1(hashes(4), hp.indices(pool, [0, 1, 2, 3]))
    got = [hp.page_bytes(pool, page) for page in range(4)]
    if verify == "off":
        assert answer == [True] * 4
        assert got[1] != want[1], "the flipped bit did not reach the engine: no teeth"
        return
    assert answer == [True, False, True, True]
    assert [got[i] for i in (0, 2, 3)] == [want[i] for i in (0, 2, 3)]
    assert storage.counters()["kv"]["corrupt_objects"] >= 1
    assert storage.batch_exists(hashes(4)) == 1, "a page that failed must not be found again"
    assert storage.batch_set_v1(hashes(4)[1:2], hp.indices(pool, [2])) == [True]
    assert storage.batch_exists(hashes(4)) == 4


def test_errors_are_answers_logged_once(
    make: hp.Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pool = hp.mha_pool("page_first")
    storage = make(pool)
    where = hp.indices(pool, [0, 1])
    store = storage._stores["kv"].store

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise OSError(5, "made up")

    for name in ("match", "put", "load", "clear", "stats"):
        monkeypatch.setattr(store, name, broken)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert storage.batch_exists(hashes(2)) == 0
            assert storage.batch_get_v1(hashes(2), where) == [False, False]
            assert storage.batch_set_v1(hashes(2), where) == [False, False]
    assert storage.clear() is False
    assert storage.get_stats() is not None
    assert storage.counters()["kv"]["errors"] > 0
    assert len([r for r in caplog.records if "made up" in r.message]) == 5, "one per kind"
    assert storage._stores["kv"].error_log.counts["look-up: OSError"] == 3
    monkeypatch.undo()
    assert all(storage.batch_set_v1(hashes(2), where)), "nothing is left broken"
    unaligned = where + 1
    assert storage.batch_get_v1(hashes(2), unaligned) == [False, False]


@pytest.mark.parametrize("what", ["load", "put"])
def test_host_pages_are_kept_while_the_device_may_use_them(
    make: hp.Make, monkeypatch: pytest.MonkeyPatch, what: str, seed: int
) -> None:
    """SGLang reuses the pages as soon as the call returns."""
    pool = hp.mha_pool("page_first")
    storage = make(pool)
    hp.fill(pool, seed)
    where = hp.indices(pool, [0, 1])
    assert all(storage.batch_set_v1(hashes(2), where))
    monkeypatch.setattr(host_store, "_HOLD_S", 0.01)
    kept = storage._stores["kv"]
    monkeypatch.setattr(kept, "_timeout_s", 0.01)
    real, start = getattr(kept.store, what), threading.Event()

    def late(*args: Any, **kwargs: Any) -> Any:
        return _Late(real(*args, **kwargs), start)

    monkeypatch.setattr(kept.store, what, late)
    answers: list[list[bool]] = []
    keys = hashes(2) if what == "load" else hashes(2, start=2)
    call = storage.batch_get_v1 if what == "load" else storage.batch_set_v1
    thread = threading.Thread(target=lambda: answers.append(call(keys, where)))
    thread.start()
    while "device holds pages" not in kept.error_log.counts and thread.is_alive():
        thread.join(0.01)
    assert not answers, "the call returned while the device held the pages"
    start.set()
    thread.join(30)
    assert answers == [[True, True]]


def test_pages_that_the_device_never_lets_go_of_end_the_process() -> None:
    script = """
from types import SimpleNamespace
from tutti.integration.sglang.host import host_store

host_store._HOLD_S, host_store._HOLD_ROUNDS = 0.01, 2
store = SimpleNamespace(_timeout_s=0.01, error_log=SimpleNamespace(add=print))
host_store.HostStore._hold(store, lambda seconds: False, "a load")
print("gave the pages back")
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60)
    assert ended.returncode == -signal.SIGKILL, ended
    assert b"a load is not over" in ended.stderr and b"gave" not in ended.stdout


class _Late:
    """A ticket whose device answers when it is told to."""

    def __init__(self, ticket: Any, go: threading.Event) -> None:
        self._ticket, self._go = ticket, go

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ticket, name)

    @property
    def done(self) -> bool:
        return self._go.is_set() and bool(self._ticket.done)

    def wait(self, timeout_s: float) -> Any:
        if not self._go.wait(timeout_s):
            raise DeviceTimeout("made up")
        return self._ticket.wait(timeout_s)

    def wait_settled(self, timeout_s: float) -> bool:
        return self._go.wait(timeout_s) and bool(self._ticket.wait_settled(timeout_s))


def test_a_closed_storage_misses(make: hp.Make) -> None:
    pool = hp.mha_pool("page_first")
    storage = make(pool)
    where = hp.indices(pool, [0])
    storage.batch_set_v1(hashes(1), where)
    storage.close()
    storage.close()
    assert storage.batch_exists(hashes(1)) == 0
    assert storage.batch_get_v1(hashes(1), where) == [False]
    assert storage.batch_set_v1(hashes(1), where) == [False]
    assert storage.batch_get(hashes(1), [torch.zeros(1)]) == [None]
    assert storage.get_stats().prefetch_pgs == []


def test_every_difference_in_identity_misses(
    make: hp.Make, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The name counts where SGLang's arguments, which other tests may have published, say no path.
    monkeypatch.setattr(adapter, "served_model", ServedModel)
    pool = hp.mha_pool("page_first")
    hp.fill(pool, seed)
    where = hp.indices(pool, [0, 1])
    assert all(make(pool).batch_set_v1(hashes(2), where))
    for changes in (
        {"model_name": "other"},
        {"options": {"weights": "v2"}},
        {"tp_rank": 1, "tp_size": 2},
        {"pp_rank": 1, "pp_size": 2},
        {"attn_cp_rank": 1, "attn_cp_size": 2},
    ):
        assert make(pool, **changes).batch_exists(hashes(2)) == 0, changes
    for other in (hp.mha_pool("page_first_direct"), hp.mha_pool("page_first", page_size=64)):
        assert make(other).batch_exists(hashes(2)) == 0
    for served in (ServedModel(path="elsewhere"), ServedModel(quantization="fp8")):
        monkeypatch.setattr(adapter, "served_model", lambda served=served: served)
        assert make(pool).batch_exists(hashes(2)) == 0, served


def test_two_servers_on_one_path_are_an_error(make: hp.Make) -> None:
    pool = hp.mha_pool("page_first")
    make(pool)
    with pytest.raises(PoolInUse):
        make(pool)


def test_refusals_say_what_to_do(make: hp.Make) -> None:
    pool = hp.mha_pool("page_first")
    with pytest.raises(ConfigError, match="did you mean 'verify'"):
        make(pool, options={"verfy": "off"})
    with pytest.raises(ConfigError, match="plugin"):
        make(pool, options={"allow_unwatched_weights": False})
    with pytest.raises(Unsupported, match="--hicache-mem-layout"):
        make(hp.mha_pool("page_head"))
    with pytest.raises(TuttiError, match="MiB"):
        make(pool, options={"capacity": "4KiB"})


def test_files_are_for_their_owner_alone(make: hp.Make, tmp_path: Path) -> None:
    make(hp.mha_pool("page_first"))
    (path,) = pool_files(tmp_path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_every_rank_writes_its_copy_of_replicated_kv(tmp_path: Path) -> None:
    changes = {"is_mla_model": True, "tp_rank": 1, "tp_size": 2}
    config = hp.config(tmp_path, **changes)
    assert not config.is_storage_writer
    storage = TuttiHiCacheStorage(config, {})
    assert config.is_storage_writer
    storage.close()


def test_a_state_pool_beside_the_kv(make: hp.Make, seed: int) -> None:
    pool, states = hp.mha_pool("page_first"), hp.mamba_pool()
    storage = make(pool)
    storage.register_mem_host_pool_v2(pool, PoolName.KV)
    storage.register_mem_host_pool_v2(states, PoolName.MAMBA)
    hp.fill(pool, seed)
    hp.fill(states, seed + 1)
    keys = hashes(6)
    assert all(storage.batch_set_v1(keys, hp.indices(pool, list(range(6)))))

    def state(of: list[str], slots: list[int]) -> PoolTransfer:
        return PoolTransfer(
            name=PoolName.MAMBA,
            keys=of,
            host_indices=torch.tensor(slots),
            hit_policy=PoolHitPolicy.TRAILING_PAGES,
        )

    want = [hp.page_bytes(states, slot) for slot in (3, 5)]
    stored = storage.batch_set_v2([state([keys[1], keys[3]], [3, 5])])
    assert stored == {PoolName.MAMBA: [True, True]}
    found = storage.batch_exists_v2(keys, [state([keys[5]], [0])])
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (4, [2, 4])
    assert found.extra_pool_hit_pages == {"kv": 6, "mamba": 4}
    hp.wipe(states)
    loaded = storage.batch_get_v2([state([keys[1], keys[3]], [7, 8])])
    assert loaded == {PoolName.MAMBA: [True, True]}
    assert [hp.page_bytes(states, slot) for slot in (7, 8)] == want
    unknown = PoolTransfer(name=PoolName.SWA, keys=keys[:1], host_indices=torch.arange(16))
    assert storage.batch_get_v2([unknown]) == {PoolName.SWA: [False]}
    assert storage.batch_exists_v2(keys, [unknown]).kv_hit_pages == 0


def test_weights_that_change_make_everything_miss(
    make: hp.Make, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    watch = WeightsWatch()
    monkeypatch.setattr(module, "WATCH", watch)
    pool = hp.mha_pool("page_first")
    storage = make(pool)
    hp.fill(pool, seed)
    where = hp.indices(pool, [0, 1])
    assert all(storage.batch_set_v1(hashes(2), where))
    watch.changed()
    assert storage.batch_exists(hashes(2)) == 0
    assert storage.batch_get_v1(hashes(2), where) == [False, False]
    assert storage.batch_set_v1(hashes(2), where) == [True, True], "SGLang would warn of it"
    watch.flushed()
    assert storage.batch_exists(hashes(2)) == 0
    assert all(storage.batch_set_v1(hashes(2), where))
    assert storage.batch_exists(hashes(2)) == 2


@pytest.mark.parametrize("how", ["advise", "collapse"])
def test_hugepages_leave_the_bytes_alone(how: str, seed: int) -> None:
    pool = hp.mha_pool("page_first", page_size=64, heads=64)
    hp.fill(pool, seed)
    before = pool.kv_buffer.clone()
    ranges = host_memory.PageFragments(pool, "kv").buffers()
    host_memory.advise_hugepages(ranges, how, threading.Event())
    assert torch.equal(pool.kv_buffer.view(torch.uint8), before.view(torch.uint8))


def test_a_pool_goes_onto_hugepages_unless_told_otherwise(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(module, "advise_hugepages", lambda _, how, __: asked.append(how))
    monkeypatch.setattr(module, "hugepage_nbytes", lambda _: len(asked) << 21)
    read_back = "tutti.gio_uring.controller_file.hugepage_nbytes"
    monkeypatch.setattr(read_back, lambda _: len(asked) << 40)
    config = hp.config(tmp_path)
    del config.extra_config["hugepages"]
    with caplog.at_level(logging.INFO):
        storage = TuttiHiCacheStorage(config, {})
        storage.register_mem_pool_host(hp.mha_pool("page_first"))
        storage.on_host_pools_registered()
        wait_until(lambda: "of the host pool on hugepages" in caplog.text)
        kv = storage._stores["kv"]
        metrics = kv.metrics.snapshot()
        wait_until(lambda: kv.store.stats()["request_nbytes_max"] >= 2 << 20)
        storage.close()
    assert asked == ["collapse"]
    assert metrics["hugepage_bytes"] == 2 << 20
    assert "2 MiB of " in caplog.text


def test_a_pool_that_is_refused_leaves_nothing_open(make: hp.Make) -> None:
    pool = hp.mha_pool("page_first")
    storage = make(pool)
    with pytest.raises(Unsupported):
        storage.register_mem_host_pool_v2(hp.mha_pool("page_head"), PoolName.DRAFT)
    make(pool)


def test_second_touch_spares_what_comes_once(make: hp.Make, seed: int) -> None:
    pool = hp.mha_pool("page_first")
    storage = make(pool, options={"second_touch": True})
    hp.fill(pool, seed)
    where = hp.indices(pool, [0, 1])
    assert storage.batch_set_v1(hashes(2), where) == [True, True]
    assert storage.batch_exists(hashes(2)) == 0
    assert storage.batch_set_v1(hashes(2), where) == [True, True]
    assert storage.batch_exists(hashes(2)) == 2
    assert storage.counters()["kv"]["declined_pages"] == 2


def test_statistics_and_clear(make: hp.Make, seed: int) -> None:
    pool = hp.mha_pool("page_first")
    storage = make(pool)
    hp.fill(pool, seed)
    where = hp.indices(pool, [0, 1, 2])
    storage.batch_set_v1(hashes(3), where)
    storage.batch_get_v1(hashes(3), where)
    stats = storage.get_stats()
    assert (stats.backup_pgs, stats.prefetch_pgs) == ([3], [3])
    assert stats.backup_bandwidth[0] > 0
    assert stats.prefetch_bandwidth[0] > 0
    assert storage.get_stats().backup_pgs == [], "samples are handed out once"
    counters = storage.counters()["kv"]
    assert counters["moved_bytes/load"] == 3 * len(hp.page_bytes(pool, 0))
    assert counters["moved_pages/store"] == 3
    assert storage.clear()
    assert storage.batch_exists(hashes(3)) == 0


def test_more_pages_than_the_pool_holds(make: hp.Make, seed: int) -> None:
    pool = hp.mha_pool("page_first")
    storage = make(pool, options={"capacity": "4MiB"})
    hp.fill(pool, seed)
    want = [hp.page_bytes(pool, page) for page in range(8)]
    for turn in range(60):
        keys = hashes(8, start=8 * turn)
        assert all(storage.batch_set_v1(keys, hp.indices(pool, list(range(8)))))
    assert storage.counters()["kv"]["evicted_objects"] > 0
    target = list(range(8, 16))
    served = 0
    for turn in range(60):
        keys = hashes(8, start=8 * turn)
        found = storage.batch_get_v1(keys, hp.indices(pool, target))
        served += sum(found)
        for i, there in enumerate(found):
            assert not there or hp.page_bytes(pool, target[i]) == want[i]
    assert served > 0


def test_sglangs_own_fault_injector(tmp_path: Path, seed: int) -> None:
    pool = hp.mha_pool("page_first")
    hp.fill(pool, seed)
    want = [hp.page_bytes(pool, page) for page in range(4)]
    with envs.SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE.override(0.4):
        storage = StorageBackendFactory.create_backend("dynamic", hp.config(tmp_path), pool)
    storage.register_mem_pool_host(pool)
    storage.on_host_pools_registered()
    outcomes = set()
    for _ in range(60):
        storage.batch_set_v1(hashes(4), hp.indices(pool, [0, 1, 2, 3]))
        found = storage.batch_exists(hashes(4))
        answer = storage.batch_get_v1(hashes(4), hp.indices(pool, [8, 9, 10, 11]))
        outcomes.add((found, tuple(answer)))
        for i, there in enumerate(answer):
            assert not there or hp.page_bytes(pool, 8 + i) == want[i]
    assert len(outcomes) > 1, "the injector did nothing"
    storage.close()
