"""The numbers of ``store.stats()`` that metrics show, by Prometheus and on SGLang's page alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tutti.profiles.at_open import OFF, SCHEDULING

#: Of a pool: name without prefix, type, key of `numbers`, meaning.
NUMBERS: Mapping[str, tuple[str, str, str]] = {
    "busy_objects": ("gauge", "busy_objects", "objects that transfers or look-ups now use"),
    "usable_objects": ("gauge", "usable_objects", "capacity without reserve and quarantined slots"),
    "missing_members": ("gauge", "missing_members", "members missing at the opening or lost since"),
    "corrupt_objects": ("counter", "mismatches", "objects that a load found with a wrong digest"),
    "evicted_objects": ("counter", "evicted", "objects evicted"),
    "over_budget_pages": ("counter", "over_budget", "pages dropped beyond the write budget"),
    "written_today_bytes": ("gauge", "written_today_nbytes", "bytes written since midnight UTC"),
    "bytes_written_per_byte_stored": (
        "gauge",
        "bytes_written_per_byte_stored",
        "write amplification, records and padding included; the drive's own is not",
    ),
    "deallocated_bytes": ("counter", "deallocated_nbytes", "bytes of objects deallocated"),
    "timeouts": ("counter", "timeouts", "commands that did not complete in time"),
    "service_threads": ("gauge", "service_threads", "threads that submit and reap commands"),
    "cpu_seconds": ("counter", "engine_cpu_s", "CPU time of service threads and digest workers"),
    "digest_seconds": ("counter", "digest_cpu_s", "time in which digests were computed"),
    "offloaded_digests": ("counter", "digests_offloaded", "commands that a worker hashed"),
    "page_cache_bytes": ("gauge", "page_cache_planned_nbytes", "bytes that use the page cache"),
    "residency_switches": ("counter", "residency_switches", "groups that changed their path"),
    "residency_moved_bytes": ("counter", "residency_moved_nbytes", "bytes that changed their path"),
    "residency_moving_seconds": ("counter", "residency_moving_s", "time that these changes took"),
    "cross_overlaps": ("gauge", "gpu_cross_overlaps", "kinds of loads copied to a GPU as a whole"),
    "scheduling": ("gauge", "scheduling", "scheduler: 0 off, 1 estimated profile, 2 other profile"),
    "prediction_error": ("gauge", "prediction_error", "mean of |measured - expected| / expected"),
    "waiting_loads": ("gauge", "loads_waiting", "loads of the queue that are not over"),
    "waiting_writes": ("gauge", "writes_waiting", "puts of the queue that are not over"),
    "deferred_pages": ("counter", "deferred_pages", "pages whose write waited for slack"),
    "forced_pages": ("counter", "forced_pages", "pages written while loads waited"),
    "slack_seconds": ("counter", "slack_s", "device time of writes in the slack of loads"),
}
#: Of each drive, by direction (read, write): name, type and meaning.
DRIVES: Mapping[str, tuple[str, str]] = {
    "drive_moved_bytes": ("counter", "bytes read from or written to a drive"),
    "drive_window_bytes": ("gauge", "bytes in flight that full bandwidth needs"),
    "drive_bytes_per_second": ("gauge", "bytes per second measured when the window was last full"),
    "drive_latency_seconds": ("gauge", "time of a command, smoothed"),
}


def numbers(stats: Mapping[str, Any]) -> dict[str, Any]:
    """``stats`` merged with the counters of its scheduler, and with times in seconds."""
    queue = stats.get("scheduler", {})
    return {
        **queue,
        **stats,
        "bubble_s": queue.get("bubble_ns", 0) / 1e9,
        "slack_s": queue.get("slack_ns", 0) / 1e9,
        "residency_moving_s": stats["residency_moving_ms"] / 1e3,
        "scheduling": SCHEDULING.get(stats.get("profile", OFF), 2),
        "service_threads": len(stats.get("drives", ())),
    }


def drive_numbers(stats: Mapping[str, Any]) -> Iterator[tuple[str, str, str, float]]:
    """Yields (key of DRIVES, number of the drive, direction, value)."""
    for number, drive in enumerate(stats.get("drives", ())):
        for direction, moved in (("read", "read_nbytes"), ("write", "written_nbytes")):
            values = (
                drive[moved],
                drive[f"{direction}_window_nbytes"],
                drive[f"{direction}_nbytes_per_s"],
                drive[f"{direction}_latency_us"] / 1e6,
            )
            for name, value in zip(DRIVES, values, strict=True):
                yield name, str(number), direction, float(value)
