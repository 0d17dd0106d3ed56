"""What of an offload is stored, copied out, dropped or declined, and when it completes."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from linker_engine import FlatProfile, Rig, names, wait_for
from memory_controller import Faults
from test_linker_stress import stores_in_memory

from tutti.errors import DeviceTimeout
from tutti.integration.sglang import linker as linker_module
from tutti.integration.sglang.direct import backlog as backlog_module
from tutti.integration.sglang.direct import control_requests as control
from tutti.integration.sglang.direct import open_pools as open_pools_module
from tutti.integration.sglang.second_touch import around_offers
from tutti.integration.sglang.weights import WeightsWatch


def test_a_backlog_beyond_its_bound_is_copied_out_then_dropped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    slot = 3 * 2 * 4096
    with Rig(tmp_path, backlog_share=0.0, store_staging=8 * slot) as rig:
        rig.fill(5)
        want = rig.content(range(6))
        assert rig.offload(names(6), range(6))
        wait_for(lambda: rig.linker.num_completed_offloads() == 1)
        rig.wipe()  # the pages are free, and may change
        assert rig.linker.pop_completed_offload()
        assert rig.offload(names(9, "more"), range(9)), "the answer comes from the transfers alone"
        wait_for(lambda: rig.linker.num_completed_offloads() == 1)
        assert not rig.linker.pop_completed_offload(), "more than staging holds"
        assert rig.linker.metrics.snapshot()["dropped_pages"] == 9
        assert "9 pages of kv are not stored" in caplog.text
        assert "(8 pages); raise backlog_share or store_staging" in caplog.text
        assert rig.offload(names(9, "again"), range(9))
        wait_for(lambda: rig.linker.num_completed_offloads() == 1)
        assert not rig.linker.pop_completed_offload()
        assert caplog.text.count("are not stored") == 1, "repeats are summed up"
        assert rig.linker.error_log.repeats() == {"backlog: too long": 1}
        assert rig.linker.metrics.snapshot().get("errors", 0) == 0, "a bound is no error"
        wait_for(lambda: rig.lookup(names(6)) == 6)
        rig.check_restored(names(6), range(20, 26), want)


def test_what_is_stored_takes_no_room_of_new_pages(tmp_path: Path) -> None:
    """SGLang offers a prompt's loaded pages again, with the new ones behind them."""
    slot = 3 * 2 * 4096
    with Rig(tmp_path, backlog_share=0.0, store_staging=8 * slot) as rig:
        rig.fill(6)
        want = rig.content(range(16))
        assert rig.store(names(12)[6:], range(6, 12))
        assert rig.store(names(14), range(14)), "14 pages never fit, and 8 around those 6 do"
        assert rig.store(names(16), range(16)), "and 2 behind those 14"
        assert rig.store(names(16), range(16)), "nothing is left to store"
        assert "dropped_pages" not in rig.linker.metrics.snapshot()
        stats = rig.stored_pool.store.stats()
        assert (stats["stored"], stats["present"]) == (16, 0)
        assert rig.lookup(names(16)) == 16
        rig.check_restored(names(16), range(20, 36), want)


def test_second_touch_stores_what_is_offered_again(tmp_path: Path) -> None:
    with Rig(tmp_path, second_touch=True) as rig:
        rig.fill(8)
        want = rig.content(range(6))
        assert not rig.store(names(4), range(4)), "SGLang offers them again"
        assert rig.lookup(names(4)) == 0
        assert not rig.store(names(6), range(6)), "two of them came for the first time"
        assert rig.lookup(names(6)) == 4
        assert rig.store(names(6), range(6))
        assert rig.linker.metrics.snapshot()["declined_pages"] == 6
        assert rig.store(names(6), range(6)), "what is stored need not come again"
        assert rig.linker.metrics.snapshot()["declined_pages"] == 6
        assert rig.lookup(names(6)) == 6
        rig.check_restored(names(6), range(20, 26), want)


def test_a_prompt_that_never_returns_has_no_second_touch(tmp_path: Path) -> None:
    """Though SGLang offers its pages again, with the node of its answer."""
    nodes = {1: (names(4), range(4)), 2: (names(6)[4:], range(4, 6))}
    with Rig(tmp_path, second_touch=True) as rig:
        rig.fill(8)

        def offer(_: Any, chain: Sequence[int]) -> None:
            for node in chain:
                rig.store(*nodes[node])

        for chain in ([1], [1, 2]):  # after its prefill, and after its answer
            around_offers(offer, None, chain)
        assert rig.lookup(names(6)) == 0
        assert rig.linker.metrics.snapshot()["declined_pages"] == 6, "each page once"
        for chain in ([1], [2]):  # another request, whose prompt is both
            around_offers(offer, None, chain)
        assert rig.lookup(names(6)) == 6


def test_completions_wait_for_the_oldest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Rig(tmp_path, backlog_share=10 / 64, store_staging="1MiB") as rig:
        rig.fill(6)
        gate = threading.Event()
        put = rig.stored_pool.store.put

        def late_put(*args: Any, **kwargs: Any) -> Any:
            gate.wait(30)
            return put(*args, **kwargs)

        monkeypatch.setattr(rig.stored_pool.store, "put", late_put)
        rig.offload(names(10, "a"), range(10))  # locked, and held up
        rig.offload(names(4, "b"), range(10, 14))  # copied out: complete at once
        rig.offload(names(60, "c"), range(60))  # more than staging: dropped at once
        assert rig.linker.num_completed_offloads() == 0
        gate.set()
        wait_for(lambda: rig.linker.num_completed_offloads() == 3)
        assert [rig.linker.pop_completed_offload() for _ in range(3)] == [True, True, False]


def slow_down(rig: Rig, monkeypatch: pytest.MonkeyPatch, seconds: float) -> list[int]:
    """Each put takes so long, one after another.  Returns the list of their pages, which grows."""
    put, pages = rig.stored_pool.store.put, list[int]()

    def slow_put(keys: Any, *args: Any, **kwargs: Any) -> Any:
        pages.append(len(keys))
        time.sleep(seconds)
        return put(keys, *args, **kwargs)

    monkeypatch.setattr(rig.stored_pool.store, "put", slow_put)
    return pages


def release_memory(rig: Rig) -> None:
    """As SGLang's /release_memory_occupation, with the plugin: no page is in use when it unmaps."""
    used: list[int] = []
    manager = SimpleNamespace(scheduler=SimpleNamespace())
    control._release(
        lambda *_: used.append(rig.linker.backlog.locked), manager, SimpleNamespace(tags=None)
    )
    assert used == [0]


@pytest.mark.parametrize("how", ["flush", "release"])
def test_a_flush_drops_what_a_slow_medium_did_not_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    with Rig(tmp_path, backlog_share=1.0, load_timeout_s=4.0) as rig:
        rig.fill(1)
        want = rig.content(range(60))
        with monkeypatch.context() as patch:
            slow_down(rig, patch, 0.3)
            for part in range(20):
                assert rig.offload(names(3, str(part)), range(3 * part, 3 * part + 3))
            rig.linker.reset() if how == "flush" else release_memory(rig)
        assert rig.linker.backlog.locked == 0, "SGLang may use every page"
        dropped = int(rig.linker.metrics.snapshot()["dropped_pages"])
        stored = int(rig.stored_pool.store.stats()["stored"])
        assert stored > 0 and stored + dropped == 60
        assert "not stored: the SSD did not begin to store them in 2 s" in caplog.text
        if how == "release":
            assert rig.linker.num_completed_offloads() == 20
            kept = [rig.linker.pop_completed_offload() for _ in range(20)]
            assert kept == [part < stored // 3 for part in range(20)]
        rig.wipe()
        rig.check_restored(names(3, "0"), range(3), want[:3])
        assert rig.lookup(names(3, "19")) == 0
        assert rig.store(names(3, "19"), range(3)), "and what comes later is stored"
        queue = rig.linker.backlog._queue
        wait_for(lambda: not queue.state.writes and not queue.under_way)


def test_a_flush_after_new_weights_does_not_wait_for_pages_of_the_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = WeightsWatch()
    monkeypatch.setattr(linker_module, "WATCH", watch)
    with Rig(tmp_path, backlog_share=1.0) as rig:
        rig.fill(1)
        with monkeypatch.context() as patch:
            slow_down(rig, patch, 0.3)
            for part in range(20):
                assert rig.offload(names(3, str(part)), range(3 * part, 3 * part + 3))
            watch.changed()
            rig.linker.reset()
        assert rig.linker.backlog.locked == 0, "SGLang may use every page"
        assert rig.stored_pool.store.stats()["stored"] < 60
        assert "dropped_pages" not in rig.linker.metrics.snapshot(), "none is counted"
        watch.flushed()
        assert rig.store(names(3, "0"), range(3))


class PageProfile(FlatProfile):
    """A page takes longer to write than Limits.run_us, so the queue grants one at once."""

    def write_us(self, nbytes: int) -> float:
        return 600_000 * nbytes / (3 * 2 * 4096)


@pytest.mark.parametrize(("profile", "first"), [(FlatProfile(), 4), (PageProfile(), 1)])
def test_a_flush_ends_a_long_offload_between_two_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, profile: FlatProfile, first: int
) -> None:
    """A batch is shorter than it may be where the queue granted less: on a busy machine, too."""
    monkeypatch.setattr(backlog_module, "_BATCH_NBYTES", 4 * 3 * 2 * 4096)
    monkeypatch.setattr(linker_module, "served_profile", lambda *_: (profile, "given"))
    options = {"backlog_share": 1.0, "load_timeout_s": 4.0, "recompute_us_per_token": 1e6}
    with Rig(tmp_path, **options) as rig:
        rig.fill(1)
        with monkeypatch.context() as patch:
            puts = slow_down(rig, patch, 0.3)
            assert rig.offload(names(60), range(60))
            rig.linker.reset()
        assert rig.linker.backlog.locked == 0
        stored = rig.stored_pool.store.stats()["stored"]
        assert 0 < stored < 60 and stored == sum(puts)
        assert puts[0] == first and max(puts) <= 4
        assert rig.linker.metrics.snapshot()["dropped_pages"] == 60 - stored
        assert rig.lookup(names(60)) == stored
        assert rig.store(names(60), range(60))


def test_a_flush_fails_while_the_device_may_read_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_pools_module, "open_store", stores_in_memory([]))
    with Rig(tmp_path, backlog_share=1.0, load_timeout_s=0.3) as rig:
        controller = rig.stored_pool.store.controller
        controller.set_faults(Faults(stall_from=1))
        assert rig.offload(names(4), range(4))
        with pytest.raises(DeviceTimeout, match="restart the server"):
            rig.linker.reset()
        controller.recover()
        rig.linker.reset()
        assert rig.linker.backlog.locked == 0
