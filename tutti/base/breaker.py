"""Circuit breaker of a medium or remote store: stops requests on failures, probes before more."""

from __future__ import annotations

import threading
from collections.abc import Callable

from tutti.errors import ConfigError


class Breaker:
    """Closed while all is well; open after ``failures`` failures in a row.  Thread-safe.

    An open breaker is probed once in ``pause_s`` seconds, and closed by the first success.
    clock: seconds, monotonic.
    """

    def __init__(self, failures: int, pause_s: float, clock: Callable[[], float]) -> None:
        if failures < 1 or not pause_s > 0:
            raise ConfigError(
                f"{failures} failures and a pause of {pause_s} s; both must be positive"
            )
        self._failures = failures
        self._pause_s = pause_s
        self._clock = clock
        self._lock = threading.Lock()
        self._row = 0
        self._probe_at_s = 0.0
        self.opened = 0  # how often

    @property
    def state(self) -> str:
        """One of "closed", "open" and "half-open", in which the next call is a probe."""
        if self.closed:
            return "closed"
        return "open" if self._clock() < self._probe_at_s else "half-open"

    @property
    def closed(self) -> bool:
        """Whether the medium may be used."""
        return self._row < self._failures

    def success(self, *, closes: bool = True) -> None:
        """Counts a success, which ends a row of failures.

        closes: whether it closes an open breaker; not if it may be older than the failures.
        """
        with self._lock:
            if closes or self.closed:
                self._row = 0

    def failure(self) -> None:
        """Counts a failure."""
        with self._lock:
            self._row += 1
            if self._row == self._failures:
                self.opened += 1
            if self._row >= self._failures:
                self._probe_at_s = self._clock() + self._pause_s

    def take_probe(self) -> bool:
        """Whether the breaker is open and the caller is the one to probe now."""
        with self._lock:
            now_s = self._clock()
            if self._row < self._failures or now_s < self._probe_at_s:
                return False
            self._probe_at_s = now_s + self._pause_s
            return True


def crawls(nbytes: int, waited_s: float, *, least_mbs: float, patience_s: float) -> bool:
    """Whether a transfer was so slow that it counts as a failure.

    least_mbs: lowest acceptable speed, in 10^6 bytes per second.  patience_s: waits of at most this
    time never count.
    """
    return waited_s > patience_s and nbytes < least_mbs * 1e6 * waited_s
