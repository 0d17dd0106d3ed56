"""A clock for tests."""

from __future__ import annotations


class ManualClock:
    """A clock that moves only when told to, or when a caller sleeps on it."""

    def __init__(self, now_ns: int = 0, unix_ns: int = 1_700_000_000 * 10**9) -> None:
        self._now_ns = now_ns
        self._unix_offset_ns = unix_ns - now_ns

    def now_ns(self) -> int:
        return self._now_ns

    def unix_ns(self) -> int:
        return self._now_ns + self._unix_offset_ns

    def sleep(self, duration_s: float) -> None:
        self.advance(duration_s)

    def advance(self, duration_s: float) -> None:
        """Move forward by `duration_s` seconds."""
        assert duration_s >= 0, "time does not go back"
        self._now_ns += round(duration_s * 1e9)
