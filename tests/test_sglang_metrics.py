"""Counters of the SGLang integration: what is counted, summed up in the log, and documented."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tutti.integration.sglang.metrics import LOAD, METRICS, Metrics
from tutti.integration.sglang.options import HICACHE, LINKER
from tutti.integration.sglang.server_log import ErrorLog, MinuteLog

ROOT = Path(__file__).parent.parent


def test_counts_of_several_threads_are_all_counted() -> None:
    metrics, threads, times = Metrics({"mode": LINKER, "pool": "kv", "rank": "tp0"}), 8, 2000

    def count() -> None:
        for _ in range(times):
            metrics.count("kernel_copied_pages", 2)

    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(threads) as pool:
            for counted in [pool.submit(count) for _ in range(threads)]:
                counted.result()
    finally:
        sys.setswitchinterval(interval_s)
    assert metrics.snapshot()["kernel_copied_pages"] == 2 * threads * times


STATS = {
    **dict.fromkeys(("mismatches", "evicted", "bytes_read", "bytes_written"), 0),
    **dict.fromkeys(("over_budget", "deallocated_nbytes", "written_today_nbytes"), 0),
    "bytes_written_per_byte_stored": 1.5,
    "residency_switches": 3,
    "residency_moved_nbytes": 4096,
    "residency_moving_ms": 250.0,
    "page_cache_planned_nbytes": 8192,
    "capacity_objects": 10,
    "usable_objects": 8,
    "free_objects": 5,
    "busy_objects": 2,
    "slots": {"quarantined": 1, "unproven": 3},
    "recovered": True,
    "scheduler": {"slack_ns": 5e8, "loads_waiting": 2, "writes_waiting": 4},
    "drives": [
        {
            "read_nbytes": 100 * number,
            "written_nbytes": 10 * number,
            **dict.fromkeys(("read_window_nbytes", "write_window_nbytes"), 1 << 20),
            **dict.fromkeys(("read_nbytes_per_s", "write_nbytes_per_s"), 10**9),
            **dict.fromkeys(("read_latency_us", "write_latency_us"), 250.0),
        }
        for number in (1, 2)
    ],
}


def test_the_recorder_counts_and_hands_out_samples_once() -> None:
    metrics = Metrics({"mode": HICACHE, "pool": "kv", "rank": "tp0"})
    metrics.moved(LOAD, 4, 4096, 0.5)
    metrics.count("errors")
    metrics.count("errors", 0)
    stats = {**STATS, "mismatches": 1, "evicted": 2, "bytes_read": 3, "bytes_written": 4}
    stats |= {"over_budget": 5, "deallocated_nbytes": 6, "written_today_nbytes": 7}
    for _ in range(2):
        metrics.from_store(stats, page_tokens=64)
    got = metrics.snapshot()
    assert got["moved_pages/load"] == 4
    assert (got["errors"], got["evicted_objects"], got["fullness"]) == (1, 2, 4 / 8)
    assert got["busy_objects"] == 2
    assert (got["over_budget_pages"], got["deallocated_bytes"]) == (5, 6)
    assert (got["written_today_bytes"], got["bytes_written_per_byte_stored"]) == (7, 1.5)
    assert (got["residency_switches"], got["residency_moved_bytes"]) == (3, 4096)
    assert (got["residency_moving_seconds"], got["page_cache_bytes"]) == (0.25, 8192)
    assert (got["usable_objects"], got["capacity_tokens"]) == (8, 512)
    assert (got["quarantined_slots"], got["unproven_objects"], got["recovering"]) == (1, 3, 0)
    assert (got["slack_seconds"], got["waiting_loads"], got["waiting_writes"]) == (0.5, 2, 4)
    assert got["service_threads"] == 2
    moved = [got[f"drive_moved_bytes/{drive}/{way}"] for drive in "01" for way in ("read", "write")]
    assert moved == [100, 10, 200, 20], "counted once"
    assert got["drive_window_bytes/1/read"] == 1 << 20
    assert got["drive_bytes_per_second/0/write"] == 10**9
    assert got["drive_latency_seconds/0/read"] == pytest.approx(250e-6)
    metrics.from_store({**stats, "free_objects": 0})
    assert metrics.snapshot()["fullness"] == 1
    assert metrics.snapshot()["agent_away"] == 0, "an embedded store has none"
    metrics.from_store({**stats, "connected": 0})
    assert metrics.snapshot()["agent_away"] == 1
    assert metrics.take_samples(LOAD) == ([4], [4096 / 0.5 / 1e9])
    assert metrics.take_samples(LOAD) == ([], [])
    assert {name.split("/")[0] for name in got} <= set(METRICS)


def test_older_numbers_of_the_store_count_nothing_twice() -> None:
    metrics = Metrics({"mode": HICACHE, "pool": "kv", "rank": "tp0"})
    for evicted in (10, 7, 12):  # two threads asked, and the slower one comes in between
        metrics.from_store({**STATS, "evicted": evicted})
    assert metrics.snapshot()["evicted_objects"] == 12


def test_the_log_sums_up_a_minute_and_repeats(caplog: pytest.LogCaptureFixture) -> None:
    metrics = Metrics({"mode": HICACHE, "pool": "kv", "rank": "tp0"})
    errors = ErrorLog(metrics)
    minutes = MinuteLog(metrics, errors, now_s=0.0)
    caplog.set_level("INFO")
    minutes.tick(61.0)
    assert not caplog.messages, "a pool that did nothing is not mentioned"
    metrics.count("hit_pages", 3)
    metrics.count("miss_pages", 1)
    metrics.moved(LOAD, 3, 3 * 10**9, 2.0)
    metrics.level("fullness", 0.5)
    for _ in range(3):
        errors.add("load: corrupt", "layer 3 of page 7")
    minutes.tick(100.0)
    assert len(caplog.messages) == 1, "the first error at once, nothing else before the minute ends"
    minutes.tick(122.0)
    assert caplog.messages[1].endswith(
        "3 of 4 pages found (75 %), loaded 3.00 GB at 1.50 GB/s, 3 errors, 50 % full"
    )
    assert "load: corrupt again, 2 times in the last minute, 3 in all" in caplog.messages[2]
    minutes.tick(183.0)
    assert len(caplog.messages) == 3


def test_every_metric_is_documented() -> None:
    text = (ROOT / "docs" / "sglang.md").read_text()
    for name, (kind, _) in METRICS.items():
        full = f"tutti:{name}" + ("_total" if kind == "counter" else "")
        assert f"`{full}`" in text, f"docs/sglang.md lacks {full}"
