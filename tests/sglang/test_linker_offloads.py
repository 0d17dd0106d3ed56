"""What of an offload is stored, copied out, dropped or declined, and when it completes."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from linker_engine import Rig, names, wait_for

pytestmark = pytest.mark.sglang


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
        assert rig.restore(names(6), range(20, 26))
        assert rig.content(range(20, 26)) == want


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
        assert rig.restore(names(16), range(20, 36))
        assert rig.content(range(20, 36)) == want


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
        assert rig.restore(names(6), range(20, 26))
        assert rig.content(range(20, 26)) == want


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
