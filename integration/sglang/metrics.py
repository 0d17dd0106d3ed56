"""Counters of the integration, for SGLang's statistics, for Prometheus and for tests.

Prometheus metrics live in the scheduler's process and reach SGLang's /metrics page through
prometheus_client's multiprocess folder, which SGLang sets up with --enable-metrics.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Mapping
from typing import Any

from tutti.integration.sglang.options import HICACHE, LINKER
from tutti.profiles.at_open import OFF, SCHEDULING

UNFLUSHED = "weights_unflushed"

#: Name, kind, meaning.  Labels are `mode`, `pool` and `rank`, and `direction` where it says so.
#: All of a mode exist from the start, at 0.
METRICS: Mapping[str, tuple[str, str]] = {
    "hit_pages": ("counter", "pages that a look-up found"),
    "miss_pages": ("counter", "pages that a look-up did not find"),
    "refused_pages": ("counter", "pages found by look-ups that the options leave to be computed"),
    "moved_pages": ("counter", "pages moved, by direction"),
    "moved_bytes": ("counter", "bytes moved, by direction; those read ahead once, used or not"),
    "busy_seconds": ("counter", "time in which something moved, by direction"),
    "failed_pages": ("counter", "pages that could not be moved, by direction"),
    "dropped_pages": ("counter", "pages that were offered and not stored"),
    "over_budget_pages": ("counter", "of these, pages beyond the budget of bytes written"),
    "declined_pages": ("counter", "pages not stored because they were offered for the first time"),
    "announced_pages": ("counter", "pages that KV events said are on the disk"),
    "withdrawn_pages": ("counter", "pages that KV events said are there no longer"),
    "unannounced_pages": ("counter", "stored pages without an event: too many, or tokens unknown"),
    "errors": ("counter", "operating errors: misses, pages not stored, loads that failed"),
    "corrupt_objects": ("counter", "objects that a load found with a wrong digest"),
    "evicted_objects": ("counter", "objects evicted"),
    "device_read_bytes": ("counter", "bytes read from the medium"),
    "device_written_bytes": ("counter", "bytes written to the medium: its wear"),
    "written_today_bytes": ("gauge", "bytes written to the medium since midnight UTC"),
    "bytes_written_per_byte_stored": ("gauge", "write amplification, without the drive's own"),
    "deallocated_bytes": ("counter", "bytes of removed objects that were deallocated"),
    "residency_switches": ("counter", "groups that changed between direct and cached"),
    "residency_moved_bytes": ("counter", "bytes of these groups"),
    "residency_moving_seconds": ("counter", "time that these changes took"),
    "bubble_seconds": ("counter", "time the model waited for layers"),
    "ahead_pages": ("counter", "pages read for requests that still waited"),
    "ahead_pieces": ("gauge", "pieces of them that are read at once, as trials found it faster"),
    "ahead_used_pages": ("counter", "pages of these that a batch used, counted once"),
    "ahead_unused_pages": ("counter", "pages of these that no batch used before they were dropped"),
    "kernel_copied_pages": (
        "counter",
        "pages that a kernel copied between staging and GPU memory, once for each layer",
    ),
    "cross_overlaps": ("gauge", "paths and sizes of loads that are copied to the GPU as a whole"),
    "page_cache_bytes": ("gauge", "bytes of the pool that go through the page cache"),
    "fullness": ("gauge", "objects stored over usable_objects, 0 to 1"),
    "usable_objects": ("gauge", "pages that the pool can keep: neither reserve nor quarantine"),
    "capacity_tokens": ("gauge", "the same in tokens"),
    "quarantined_slots": ("gauge", "slots out of use because their bytes were damaged"),
    "unproven_objects": ("gauge", "objects that an unclean close left to be verified"),
    "attached": ("gauge", "1 while the pool is open, 0 after it was detached"),
    "recovering": ("gauge", "1 while the slot tables are read and look-ups miss"),
    UNFLUSHED: (
        "gauge",
        "1 while nothing is found or stored: weights changed, and SGLang did not flush its cache",
    ),
    "breaker_open": ("gauge", "1 while the medium is not asked because it failed, by direction"),
    "busy_objects": ("gauge", "objects that transfers or look-ups protect from eviction"),
    "hugepage_bytes": ("gauge", "bytes of SGLang's host pool on large pages, as smaps shows"),
    "deferred_pages": (
        "counter",
        "pages written later than they were offered, so that loads go first",
    ),
    "forced_pages": ("counter", "pages written while loads waited: they were too old or too many"),
    "prediction_error": ("gauge", "mean of |measured - expected| time over expected time"),
    "scheduling": ("gauge", "0 without, 1 by an estimated profile, 2 by a measured one"),
    "backlog_pages": ("gauge", "pages waiting to be written"),
}
LATENCY = "batch_seconds"
_LATENCY_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
_BY_DIRECTION = ("moved_pages", "moved_bytes", "busy_seconds", "failed_pages", "breaker_open")
#: Metrics that one mode alone has.
_OF_MODE = {
    "bubble_seconds": LINKER,
    "refused_pages": LINKER,
    "ahead_pages": LINKER,
    "ahead_pieces": LINKER,
    "ahead_used_pages": LINKER,
    "ahead_unused_pages": LINKER,
    "kernel_copied_pages": LINKER,
    "backlog_pages": LINKER,
    "breaker_open": LINKER,
    "hugepage_bytes": HICACHE,
}
INFO = "info"
_INFO_LABELS = ("version", "path", "executor", "verify", "durability")
_SAMPLES_MAX = 1024

#: Counters of ObjectStore.stats(), and the metric that each one is.
_FROM_STORE = {
    "mismatches": "corrupt_objects",
    "evicted": "evicted_objects",
    "bytes_read": "device_read_bytes",
    "bytes_written": "device_written_bytes",
    "over_budget": "over_budget_pages",
    "deallocated_nbytes": "deallocated_bytes",
    "residency_switches": "residency_switches",
    "residency_moved_nbytes": "residency_moved_bytes",
}

LOAD, STORE = "load", "store"


class Metrics:
    """Counts for one pool.  Thread-safe.

    labels: `mode`, `pool` and `rank`.  prometheus: also publish, if prometheus_client is there.
    """

    def __init__(self, labels: Mapping[str, str], *, prometheus: bool = False) -> None:
        self._labels = dict(labels)
        self._lock = threading.Lock()
        self._values: dict[tuple[str, str], float] = {}
        self._seen: dict[str, float] = {}
        self._session = -1  # the last one with an agent
        self._samples: dict[str, deque[tuple[int, float]]] = {
            direction: deque(maxlen=_SAMPLES_MAX) for direction in (LOAD, STORE)
        }
        self._published = _published() if prometheus else None
        self._start_at_zero()
        with _ALL_LOCK:
            _ALL.add(self)
            for name, value in _OF_ALL.items():
                self.level(name, value)

    @property
    def name(self) -> str:
        """The pool and its rank, for messages."""
        return " ".join(self._labels[label] for label in ("mode", "pool", "rank"))

    def _start_at_zero(self) -> None:
        """A rate over a counter that appears with its first event misses that event."""
        for name in (*METRICS, LATENCY):
            if _OF_MODE.get(name, self._labels["mode"]) != self._labels["mode"]:
                continue
            directions = (LOAD, STORE) if name in (*_BY_DIRECTION, LATENCY) else ("",)
            for direction in directions:
                self._publish(name, direction, lambda metric: None)

    def info(self, facts: Mapping[str, str]) -> None:
        """What the pool was opened with, as labels of a metric that is always 1."""
        if self._published is None:
            return
        labels = {**self._labels, **{name: facts.get(name, "") for name in _INFO_LABELS}}
        self._published[INFO].labels(**labels).set(1)

    def count(self, name: str, n: float = 1, direction: str = "") -> None:
        """Adds to a counter."""
        if n <= 0:
            return
        with self._lock:
            key = (name, direction)
            self._values[key] = self._values.get(key, 0) + n
        self._publish(name, direction, lambda metric: metric.inc(n))

    def level(self, name: str, value: float, direction: str = "") -> None:
        """Sets a gauge."""
        with self._lock:
            self._values[name, direction] = value
        self._publish(name, direction, lambda metric: metric.set(value))

    def moved(self, direction: str, pages: int, nbytes: int, duration_s: float) -> None:
        """One batch was moved."""
        self.count("moved_pages", pages, direction)
        self.count("moved_bytes", nbytes, direction)
        self.count("busy_seconds", duration_s, direction)
        with self._lock:
            self._samples[direction].append((pages, nbytes / max(duration_s, 1e-9) / 1e9))
        self._publish(LATENCY, direction, lambda metric: metric.observe(duration_s))

    def from_store(self, stats: Mapping[str, Any], page_tokens: int = 0) -> None:
        """Takes over what an ObjectStore counts itself.

        page_tokens: tokens of an object; 0 where an object is not a page.
        """
        totals = {name: float(stats[source]) for source, name in _FROM_STORE.items()}
        totals["residency_moving_seconds"] = stats["residency_moving_ms"] / 1e3
        if stats.get("connected", 1):
            self._count_up(totals, stats.get("reconnects"))
        self.level("written_today_bytes", int(stats["written_today_nbytes"]))
        amplification = float(stats["bytes_written_per_byte_stored"])
        self.level("bytes_written_per_byte_stored", amplification)
        self.level("page_cache_bytes", int(stats["page_cache_planned_nbytes"]))
        self.level("cross_overlaps", stats.get("gpu_cross_overlaps", 0))
        queue = stats.get("scheduler", {})
        self._count_up({name: queue.get(name, 0) for name in ("deferred_pages", "forced_pages")})
        self.level("prediction_error", queue.get("prediction_error", 0.0))
        self.level("scheduling", SCHEDULING.get(stats.get("profile", OFF), 2))
        usable, quarantined = int(stats["usable_objects"]), int(stats["slots"]["quarantined"])
        held = int(stats["capacity_objects"]) - int(stats["free_objects"]) - quarantined
        self.level("fullness", min(1.0, held / max(1, usable)))
        self.level("usable_objects", usable)
        self.level("capacity_tokens", usable * page_tokens)
        self.level("quarantined_slots", quarantined)
        self.level("unproven_objects", int(stats["slots"]["unproven"]))
        self.level("attached", 1)
        self.level("recovering", int(not stats["recovered"]))
        self.level("busy_objects", int(stats["busy_objects"]))

    def _count_up(self, totals: Mapping[str, float], session: int | None = None) -> None:
        """Counters have reached values.

        session: number of the session with an agent, whose totals began before the first one, and
        begin again at 0 when it is restarted.
        """
        with self._lock:  # another thread may come with newer numbers in between
            if session is not None and session != self._session:
                if session < self._session:
                    return
                if self._session < 0:
                    self._seen |= totals
                elif any(value < self._seen[name] for name, value in totals.items()):
                    self._seen |= dict.fromkeys(totals, 0.0)
                self._session = session
            grown = {name: value - self._seen.get(name, 0.0) for name, value in totals.items()}
            self._seen |= {name: totals[name] for name, n in grown.items() if n > 0}
        for name, n in grown.items():
            self.count(name, n)

    def take_samples(self, direction: str) -> tuple[list[int], list[float]]:
        """Pages and GB/s of each batch since the last call."""
        with self._lock:
            samples = list(self._samples[direction])
            self._samples[direction].clear()
        return [pages for pages, _ in samples], [bandwidth for _, bandwidth in samples]

    def snapshot(self) -> dict[str, float]:
        """Every number so far; those by direction as "name/direction"."""
        with self._lock:
            items = list(self._values.items())
        return {f"{name}/{kind}" if kind else name: value for (name, kind), value in items}

    def _publish(self, name: str, direction: str, update: Any) -> None:
        if self._published is None:
            return
        labels = dict(self._labels)
        if direction:
            labels["direction"] = direction
        update(self._published[name].labels(**labels))


#: Of this process, and the gauges that all of them show.
_ALL: weakref.WeakSet[Metrics] = weakref.WeakSet()
_OF_ALL: dict[str, float] = {}
_ALL_LOCK = threading.Lock()


def level_all(name: str, value: float) -> None:
    """Sets a gauge of every pool in this process, also of those that are opened later."""
    with _ALL_LOCK:
        _OF_ALL[name] = value
        for metrics in _ALL:
            metrics.level(name, value)


_PUBLISHED: dict[str, Any] = {}
_PUBLISHED_LOCK = threading.Lock()


def _published() -> dict[str, Any] | None:
    """The process's Prometheus metrics, made once; None without prometheus_client."""
    try:
        from prometheus_client import Counter, Gauge, Histogram
    except ImportError:
        return None
    with _PUBLISHED_LOCK:
        if not _PUBLISHED:
            labels = ("mode", "pool", "rank")
            for name, (kind, meaning) in METRICS.items():
                own = (*labels, "direction") if name in _BY_DIRECTION else labels
                make = Counter if kind == "counter" else Gauge
                extra = {} if kind == "counter" else {"multiprocess_mode": "mostrecent"}
                _PUBLISHED[name] = make(f"tutti:{name}", meaning, own, **extra)
            _PUBLISHED[INFO] = Gauge(
                f"tutti:{INFO}",
                "what the pool was opened with",
                (*labels, *_INFO_LABELS),
                multiprocess_mode="mostrecent",
            )
            _PUBLISHED[LATENCY] = Histogram(
                f"tutti:{LATENCY}",
                "time of one batch, by direction",
                (*labels, "direction"),
                buckets=_LATENCY_BUCKETS_S,
            )
        return _PUBLISHED
