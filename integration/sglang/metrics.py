"""Counters of the integration, for SGLang's statistics, for Prometheus and for tests.

Prometheus metrics are in the scheduler's process. SGLang's /metrics page shows them through
prometheus_client's multiprocess folder, which SGLang sets up with --enable-metrics.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from tutti.integration.sglang.options import HICACHE, LINKER
from tutti.store_numbers import DRIVES, NUMBERS, drive_numbers, numbers

UNFLUSHED = "weights_unflushed"

#: (kind, help) by name.  Labels are `mode`, `pool` and `rank`, and those of _LABELS.
#: All metrics of a mode exist from the start, at 0, except those by path or drive.
METRICS: Mapping[str, tuple[str, str]] = {
    **{name: (kind, meaning) for name, (kind, _, meaning) in NUMBERS.items()},
    **DRIVES,
    "hit_pages": ("counter", "pages that a look-up found"),
    "miss_pages": ("counter", "pages that a look-up did not find"),
    "refused_pages": ("counter", "pages found but computed again: options, or loading is slower"),
    "moved_pages": ("counter", "pages moved, by direction"),
    "moved_bytes": ("counter", "bytes moved, by direction; read-ahead counts once, used or not"),
    "busy_seconds": ("counter", "time with a transfer in flight, by direction"),
    "failed_pages": ("counter", "pages that could not be moved, by direction"),
    "dropped_pages": ("counter", "pages that were offered and not stored"),
    "declined_pages": ("counter", "pages not stored because they were offered for the first time"),
    "announced_pages": ("counter", "pages that KV events announced as stored on disk"),
    "withdrawn_pages": ("counter", "pages that KV events announced as removed from disk"),
    "unannounced_pages": ("counter", "stored pages without a KV event: too many, or no tokens"),
    "errors": ("counter", "operating errors: misses, pages not stored, loads that failed"),
    "device_read_bytes": ("counter", "bytes read from the medium"),
    "device_written_bytes": ("counter", "bytes written to the medium, which wear it"),
    "write_budget_bytes": ("gauge", "bytes a day that puts may write; 0 without a limit"),
    "bubble_seconds": ("counter", "time the model waited for layers"),
    "ahead_pages": ("counter", "pages read for requests that still waited"),
    "ahead_pieces": ("gauge", "read-ahead pieces in flight at once, chosen by trials, by path"),
    "ahead_used_pages": ("counter", "read-ahead pages that a batch used, each counted once"),
    "ahead_unused_pages": ("counter", "read-ahead pages dropped before any batch used them"),
    "kernel_copied_pages": ("counter", "pages that a kernel copied via staging, once per layer"),
    "fullness": ("gauge", "objects stored over usable_objects, 0 to 1"),
    "capacity_tokens": ("gauge", "tokens of usable_objects pages"),
    "quarantined_slots": ("gauge", "slots with damaged bytes, or on missing members"),
    "unproven_objects": ("gauge", "objects that an unclean close left to be verified"),
    "attached": ("gauge", "1 while the pool is open, 0 after it was detached"),
    "recovering": ("gauge", "1 while the slot tables are read and look-ups miss"),
    "agent_away": ("gauge", "1 while the agent of the pool does not answer and look-ups miss"),
    UNFLUSHED: ("gauge", "1 from an update of weights to a flush: nothing is found or stored"),
    "breaker_open": ("gauge", "1 while the medium is not used because it failed, by direction"),
    "hugepage_bytes": ("gauge", "bytes of SGLang's host pool on large pages, as smaps shows"),
    "backlog_pages": ("gauge", "pages waiting to be written"),
}
LATENCY = "batch_seconds"
_LATENCY_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
_BY_DIRECTION = ("moved_pages", "moved_bytes", "busy_seconds", "failed_pages", "breaker_open")
_LABELS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys((*_BY_DIRECTION, LATENCY), ("direction",)),
    **dict.fromkeys(DRIVES, ("drive", "direction")),
    "ahead_pieces": ("path",),
}
#: Metrics that exist in one mode only.
_OF_MODE = {
    **dict.fromkeys(("ahead_pages", "ahead_pieces", "ahead_used_pages"), LINKER),
    **dict.fromkeys(("ahead_unused_pages", "kernel_copied_pages", "refused_pages"), LINKER),
    **dict.fromkeys(("backlog_pages", "breaker_open", "bubble_seconds"), LINKER),
    "hugepage_bytes": HICACHE,
}
#: Counters of this process's queue; the others are the pool's, which an agent may own.
_OF_QUEUE = ("deferred_pages", "forced_pages", "slack_seconds")
INFO = "info"
_INFO_LABELS = ("version", "path", "executor", "verify", "durability", "profile")
_SAMPLES_MAX = 1024

LOAD, STORE = "load", "store"


class Metrics:
    """The metrics of one pool.  Thread-safe.

    labels: `mode`, `pool` and `rank`.  prometheus: publish them if prometheus_client is installed.
    """

    def __init__(self, labels: Mapping[str, str], *, prometheus: bool = False) -> None:
        self._labels = dict(labels)
        self._lock = threading.Lock()
        self._values: dict[tuple[str, ...], float] = {}  # by name and labels
        self._seen: dict[tuple[str, ...], float] = {}
        self._session = -1  # number of the last session with an agent
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
        """Creates counters at 0: a rate over a counter that appears later misses an event."""
        for name in (*METRICS, LATENCY):
            if _OF_MODE.get(name, self._labels["mode"]) != self._labels["mode"]:
                continue
            known: dict[tuple[str, ...], Any] = {(): ((),), ("direction",): ((LOAD,), (STORE,))}
            for labels in known.get(_LABELS.get(name, ()), ()):
                self._publish(name, labels, lambda metric: None)

    def info(self, facts: Mapping[str, str]) -> None:
        """Publishes the pool's settings as labels of a metric that is always 1, and its budget."""
        self.level("write_budget_bytes", int(facts.get("write_budget_bytes", 0)))
        if self._published is None:
            return
        labels = {**self._labels, **{name: facts.get(name, "") for name in _INFO_LABELS}}
        self._published[INFO].labels(**labels).set(1)

    def count(self, name: str, n: float = 1, *labels: str) -> None:
        """Adds to a counter.  labels: values of those in _LABELS."""
        if n <= 0:
            return
        with self._lock:
            key = (name, *labels)
            self._values[key] = self._values.get(key, 0) + n
        self._publish(name, labels, lambda metric: metric.inc(n))

    def level(self, name: str, value: float, *labels: str) -> None:
        """Sets a gauge.  labels: as for `count`."""
        with self._lock:
            self._values[name, *labels] = value
        self._publish(name, labels, lambda metric: metric.set(value))

    def moved(self, direction: str, pages: int, nbytes: int, duration_s: float) -> None:
        """Counts one batch that was moved."""
        self.count("moved_pages", pages, direction)
        self.count("moved_bytes", nbytes, direction)
        self.count("busy_seconds", duration_s, direction)
        with self._lock:
            self._samples[direction].append((pages, nbytes / max(duration_s, 1e-9) / 1e9))
        self._publish(LATENCY, (direction,), lambda metric: metric.observe(duration_s))

    def from_store(self, stats: Mapping[str, Any], page_tokens: int = 0) -> None:
        """Updates the metrics from an ObjectStore's statistics.

        page_tokens: tokens per object; 0 if an object is not a page.
        """
        found = numbers(stats)
        usable, quarantined = int(stats["usable_objects"]), int(stats["slots"]["quarantined"])
        held = int(stats["capacity_objects"]) - int(stats["free_objects"]) - quarantined
        self.level("fullness", min(1.0, held / max(1, usable)))
        self.level("capacity_tokens", usable * page_tokens)
        self.level("quarantined_slots", quarantined)
        self.level("unproven_objects", int(stats["slots"]["unproven"]))
        self.level("attached", 1)
        self.level("recovering", int(not stats["recovered"]))
        self.level("agent_away", int(not stats.get("connected", 1)))
        totals: dict[tuple[str, ...], float] = {
            ("device_read_bytes",): float(stats["bytes_read"]),
            ("device_written_bytes",): float(stats["bytes_written"]),
            **{(name,): float(found.get(key, 0)) for name, (_, key, _) in NUMBERS.items()},
            **{tuple(labels): value for *labels, value in drive_numbers(stats)},
        }
        for key in [key for key in totals if METRICS[key[0]][0] == "gauge"]:
            self.level(key[0], totals.pop(key), *key[1:])
        self._count_up({(name,): totals.pop((name,)) for name in _OF_QUEUE})
        if stats.get("connected", 1):
            self._count_up(totals, stats.get("reconnects"))

    def _count_up(
        self, totals: Mapping[tuple[str, ...], float], session: int | None = None
    ) -> None:
        """Raises counters, by name and labels, to totals.

        session: number of the session with an agent.  Its totals include a time before the first
        session, and restart at 0 with the agent.
        """
        with self._lock:  # so that another thread's newer totals are not mixed in
            if session is not None and session != self._session:
                if session < self._session:
                    return
                if self._session < 0:
                    self._seen |= totals
                elif any(value < self._seen.get(key, 0.0) for key, value in totals.items()):
                    self._seen |= dict.fromkeys(totals, 0.0)
                self._session = session
            grown = {key: value - self._seen.get(key, 0.0) for key, value in totals.items()}
            self._seen |= {key: totals[key] for key, n in grown.items() if n > 0}
        for (name, *labels), n in grown.items():
            self.count(name, n, *labels)

    def take_samples(self, direction: str) -> tuple[list[int], list[float]]:
        """Pages and GB/s of each batch since the last call."""
        with self._lock:
            samples = list(self._samples[direction])
            self._samples[direction].clear()
        return [pages for pages, _ in samples], [bandwidth for _, bandwidth in samples]

    def snapshot(self) -> dict[str, float]:
        """All values; those with labels as "name/label"."""
        with self._lock:
            return {"/".join(key): value for key, value in self._values.items()}

    def _publish(self, name: str, labels: Sequence[str], update: Any) -> None:
        if self._published is None:
            return
        own = dict(zip(_LABELS.get(name, ()), labels, strict=True))
        update(self._published[name].labels(**self._labels, **own))


#: The Metrics of this process, and the gauges that all of them show.
_ALL: weakref.WeakSet[Metrics] = weakref.WeakSet()
_OF_ALL: dict[str, float] = {}
_ALL_LOCK = threading.Lock()


def level_all(name: str, value: float) -> None:
    """Sets a gauge of every pool in this process, including pools that are opened later."""
    with _ALL_LOCK:
        _OF_ALL[name] = value
        for metrics in _ALL:
            metrics.level(name, value)


_PUBLISHED: dict[str, Any] = {}
_PUBLISHED_LOCK = threading.Lock()


def _published() -> dict[str, Any] | None:
    """The process's Prometheus metrics, created once; None without prometheus_client."""
    try:
        from prometheus_client import Counter, Gauge, Histogram
    except ImportError:
        return None
    with _PUBLISHED_LOCK:
        if not _PUBLISHED:
            labels, recent = ("mode", "pool", "rank"), {"multiprocess_mode": "mostrecent"}
            for name, (kind, meaning) in METRICS.items():
                own = (*labels, *_LABELS.get(name, ()))
                make = Counter if kind == "counter" else Gauge
                extra = {} if kind == "counter" else recent
                _PUBLISHED[name] = make(f"tutti:{name}", meaning, own, **extra)
            own = (*labels, *_INFO_LABELS)
            _PUBLISHED[INFO] = Gauge(f"tutti:{INFO}", "what a pool was opened with", own, **recent)
            _PUBLISHED[LATENCY] = Histogram(
                f"tutti:{LATENCY}",
                "time of one batch, by direction",
                (*labels, "direction"),
                buckets=_LATENCY_BUCKETS_S,
            )
        return _PUBLISHED
