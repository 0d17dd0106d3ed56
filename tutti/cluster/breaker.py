"""When a remote store may be asked: a circuit breaker, and keys that failed lately."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

_KEYS_MAX = 1 << 17


class Breaker:
    """Opens after so many failures in a row; then lets one call in ``pause_s`` through.

    now_s: a monotonic clock.
    """

    def __init__(self, failures_max: int, pause_s: float, now_s: Callable[[], float]) -> None:
        self._failures_max = failures_max
        self._pause_s = pause_s
        self._now_s = now_s
        self._failures = 0
        self._closed_from_s = 0.0
        self.opened = 0

    @property
    def state(self) -> str:
        """One of "closed", "open" and "half-open", in which the next call is a probe."""
        if self._failures < self._failures_max:
            return "closed"
        return "open" if self._now_s() < self._closed_from_s else "half-open"

    def succeeded(self) -> None:
        """A call has succeeded."""
        self._failures = 0

    def failed(self) -> None:
        """A call has failed."""
        self._failures += 1
        if self._failures >= self._failures_max:
            self.opened += self._failures == self._failures_max
            self._closed_from_s = self._now_s() + self._pause_s


class RecentKeys:
    """Keys that are remembered for ``ttl_s``, the newest so many of them."""

    def __init__(self, ttl_s: float, now_s: Callable[[], float]) -> None:
        self._ttl_s = ttl_s
        self._now_s = now_s
        self._until_s: OrderedDict[bytes, float] = OrderedDict()  # the next to end first

    def add(self, keys: Iterable[bytes]) -> None:
        """Remembers keys from now on."""
        now_s = self._now_s()
        for key in keys:
            self._until_s[key] = now_s + self._ttl_s
            self._until_s.move_to_end(key)
        while self._until_s:
            key, until_s = self._until_s.popitem(last=False)
            if until_s > now_s and len(self._until_s) < _KEYS_MAX:
                self._until_s[key] = until_s
                self._until_s.move_to_end(key, last=False)
                break

    def __contains__(self, key: bytes) -> bool:
        return self._until_s.get(key, 0.0) > self._now_s()
