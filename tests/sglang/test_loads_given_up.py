"""Loads that the store cannot start: who may use their pages, and that service goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import host_pools as hp
import numpy as np
import pytest
from linker_engine import Rig, ahead_pages, in_use, kept_ahead, names, wait_for

from tutti.errors import DeviceTimeout, PagesInUse
from tutti.integration.sglang.direct.staging_pages import StagingPages
from tutti.integration.sglang.host import host_store
from tutti.store import ObjectStore

LATE = DeviceTimeout("made up: no staging came free, nothing was begun")


def raising(error: BaseException, times: int = 1 << 30) -> Callable[..., Any]:
    left = [error] * min(times, 1 << 10)

    def load(*_: Any, **__: Any) -> Any:
        raise left.pop()

    return load


def held(until: threading.Event) -> PagesInUse:
    return PagesInUse("made up: given up, and on its way", until.wait)


def test_hicache_keeps_host_pages_that_a_device_may_still_write(
    make: hp.Make, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    pool = hp.mha_pool("page_first")
    storage = make(pool)
    hp.fill(pool, seed)
    where, hashes = hp.indices(pool, [0, 1]), ["01" * 32, "02" * 32]
    assert all(storage.batch_set_v1(hashes, where))
    kept = storage._stores["kv"]
    monkeypatch.setattr(host_store, "_HOLD_S", 0.01)
    monkeypatch.setattr(kept, "_timeout_s", 0.01)
    go = threading.Event()
    monkeypatch.setattr(kept.store, "load", raising(held(go)))
    answers: list[list[bool]] = []
    thread = threading.Thread(target=lambda: answers.append(storage.batch_get_v1(hashes, where)))
    thread.start()
    wait_for(lambda: "device holds pages" in kept.error_log.counts)
    assert not answers, "the call returned while the device held the pages"
    go.set()
    thread.join(30)
    assert answers == [[False, False]]
    monkeypatch.setattr(kept.store, "load", raising(LATE))
    assert storage.batch_get_v1(hashes, where) == [False, False], "nothing was begun: a miss"


@pytest.mark.parametrize("staging", ["2MiB", "1KiB"])
def test_a_load_that_did_not_begin_costs_its_batch_alone(
    tmp_path: Path, staging: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither staging nor SGLang's pages are lost, and the scheduler goes on."""
    with Rig(tmp_path, load_staging=staging, load_timeout_s=0.05, read_ahead_share=0.0) as rig:
        want = rig.stored(4)
        with monkeypatch.context() as patch:
            patch.setattr(rig.stored_pool.store, "load", raising(LATE))
            assert not rig.restore(names(4), range(4, 8))
        assert in_use(rig.stored_pool.loads) == 0
        monkeypatch.setattr(rig.linker, "_timeout_s", 30.0)
        rig.check_restored(names(4), range(4, 8), want)


@pytest.mark.parametrize("staging", ["2MiB", "1KiB"])
def test_pages_of_a_load_given_up_come_back_when_the_device_lets_go(
    tmp_path: Path, staging: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Rig(tmp_path, load_staging=staging, load_timeout_s=0.05, read_ahead_share=0.0) as rig:
        rig.stored(4)
        go = threading.Event()
        monkeypatch.setattr(rig.stored_pool.store, "load", raising(held(go)))
        if staging == "1KiB":  # into SGLang's own pages
            with pytest.raises(DeviceTimeout, match="restart the server"):
                rig.restore(names(4), range(4, 8))
            go.set()
            assert not rig.restore(names(4), range(4, 8))
            return
        assert not rig.restore(names(4), range(4, 8))
        assert in_use(rig.stored_pool.loads) == 4
        go.set()
        assert in_use(rig.stored_pool.loads) == 0


def test_a_probe_that_cannot_begin_leaves_its_memory_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or reads would stay closed for good after a medium that was away for a while."""
    with Rig(tmp_path, breaker_pause_s=0.02) as rig:
        rig.stored(4)
        go = threading.Event()
        with monkeypatch.context() as patch:
            for error in (LATE, held(go)):
                patch.setattr(rig.stored_pool.store, "load", raising(error))
                seen = rig.linker.error_log.counts.get(f"probe: {type(error).__name__}", 0)
                for _ in range(4):
                    rig.stored_pool.reads.failure()
                wait_for(lambda: _probed(rig, error) > seen)  # noqa: B023
        assert not rig.stored_pool.reads.closed
        go.set()
        wait_for(lambda: rig.stored_pool.reads.closed)


def _probed(rig: Rig, error: BaseException) -> int:
    return int(rig.linker.error_log.counts.get(f"probe: {type(error).__name__}", 0))


def test_a_page_is_never_free_twice(tmp_path: Path) -> None:
    """Even where the owner of that knowledge fails to report that the device is done."""
    with Rig(tmp_path) as rig:
        staging = StagingPages(rig.stored_pool.store, 4 * rig.stored_pool.page_nbytes)
        one, other = staging.allocate(1), staging.allocate(1)
        assert one is not None and other is not None
        staging.retire(one, lambda: True)
        answers: list[Callable[[], bool]] = [lambda: 1 // 0 > 0, lambda: True]
        staging.retire(other, lambda: answers.pop(0)())
        with pytest.raises(ZeroDivisionError):
            staging.allocate(4)
        taken = staging.allocate(4)
        assert taken is not None and np.unique(taken).size == 4
        assert staging.free == 0


def test_read_ahead_goes_on_after_a_read_that_went_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Rig(tmp_path) as rig:
        rig.stored(8)
        worth = rig.linker.ahead._measured

        def broken(*_: Any) -> None:
            raise RuntimeError("made up")

        monkeypatch.setattr(rig.linker.ahead, "_measured", broken)
        assert rig.lookup(names(4), "one") == 4
        wait_for(lambda: "read-ahead: RuntimeError" in rig.linker.error_log.counts)
        wait_for(lambda: not kept_ahead(rig.linker.ahead) and not in_use(rig.stored_pool.loads))
        monkeypatch.setattr(rig.linker.ahead, "_measured", worth)
        before = ahead_pages(rig.linker)
        assert rig.lookup(names(8)[4:], "two") == 4
        wait_for(lambda: ahead_pages(rig.linker) == before + 4)


def test_reads_come_back_while_objects_are_still_proven(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which takes as long as reading a large pool does."""
    calls: list[int] = []

    def prove(self: ObjectStore, objects: int) -> int:
        calls.append(objects)
        return objects

    monkeypatch.setattr(ObjectStore, "prove", prove)
    with Rig(tmp_path, breaker_pause_s=0.02) as rig:
        rig.stored(4)
        for _ in range(3):
            rig.stored_pool.reads.failure()
        assert not rig.stored_pool.reads.closed
        wait_for(lambda: rig.stored_pool.reads.closed)
        before = len(calls)
        wait_for(lambda: len(calls) > before)


def test_a_storage_closes_while_its_pool_recovers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    real = ObjectStore.wait_recovered

    def recovering(self: ObjectStore, timeout_s: float = 600.0) -> None:
        if threading.current_thread().name != "tutti-maintenance":
            return real(self, timeout_s)
        waits.append(timeout_s)
        raise DeviceTimeout("made up: still recovering")

    monkeypatch.setattr(ObjectStore, "wait_recovered", recovering)
    with Rig(tmp_path) as rig:
        wait_for(lambda: len(waits) > 0)
        assert not rig.linker.error_log.counts
    assert max(waits) == 0.0, "the thread does not hear that it is to end"
