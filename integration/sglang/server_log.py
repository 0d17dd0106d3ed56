"""Logs one pool on the server: the first error of each kind, and a summary each minute."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Mapping

from tutti.integration.sglang.metrics import LOAD, STORE, Metrics

_log = logging.getLogger(__name__)

_EVERY_S = 60.0


class ErrorLog:
    """Logs the first error of each kind, and counts all of them.  Thread-safe."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._lock = threading.Lock()
        self._reported: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()

    def add(self, kind: str, message: object) -> None:
        """Counts an error; logs the first one of its kind."""
        self._metrics.count("errors")
        self.tell(kind, message)

    def tell(self, kind: str, message: object) -> None:
        """Logs the first event of a kind that is not an error."""
        with self._lock:
            self.counts[kind] += 1
            first = self.counts[kind] == 1
            if first:
                self._reported[kind] = 1
        if first:
            _log.warning("Tutti: %s (%s); repeats are summed up each minute", message, kind)

    def repeats(self) -> dict[str, int]:
        """Number of repetitions of each kind since the last call; empty if there were none."""
        with self._lock:
            grown = self.counts - self._reported  # without those that did not grow
            self._reported = self.counts.copy()
        return grown


class MinuteLog:
    """Logs a pool's activity once a minute; an idle pool is not mentioned."""

    def __init__(self, metrics: Metrics, errors: ErrorLog, now_s: float) -> None:
        self._name = metrics.name
        self._metrics = metrics
        self._errors = errors
        self._before = metrics.snapshot()
        self._due_s = now_s + _EVERY_S

    def tick(self, now_s: float) -> None:
        """Logs if a minute has passed.  now_s: time.monotonic().  Call it every few seconds."""
        if now_s < self._due_s:
            return
        self._due_s = now_s + _EVERY_S
        now = self._metrics.snapshot()
        text = summary(self._before, now)
        self._before = now
        if text:
            _log.info("Tutti %s, last minute: %s", self._name, text)
        for kind, count in self._errors.repeats().items():
            numbers = self._name, kind, count, self._errors.counts[kind]
            _log.warning("Tutti %s: %s again, %d times in the last minute, %d in all", *numbers)


def summary(before: Mapping[str, float], now: Mapping[str, float]) -> str:
    """Hit rate, GB/s and errors between two snapshots of Metrics; empty without activity."""

    def grown(name: str) -> float:
        return now.get(name, 0.0) - before.get(name, 0.0)

    parts = []
    hits, misses = grown("hit_pages"), grown("miss_pages")
    if hits + misses:
        share = 100 * hits / (hits + misses)
        parts.append(f"{hits:.0f} of {hits + misses:.0f} pages found ({share:.0f} %)")
    for direction, done in ((LOAD, "loaded"), (STORE, "stored")):
        nbytes = grown(f"moved_bytes/{direction}")
        if nbytes:
            rate = nbytes / max(grown(f"busy_seconds/{direction}"), 1e-9) / 1e9
            parts.append(f"{done} {nbytes / 1e9:.2f} GB at {rate:.2f} GB/s")
    for name, what in (("dropped_pages", "pages not stored"), ("errors", "errors")):
        if grown(name):
            parts.append(f"{grown(name):.0f} {what}")
    if parts and "fullness" in now:
        parts.append(f"{100 * now['fullness']:.0f} % full")
    return ", ".join(parts)
