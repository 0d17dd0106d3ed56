"""Learns from the times of writes when a drive's fast cache has ended, and what it takes again."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

#: So many measurements are compared; of the fastest so many may be outliers.
_LAST, _OUTLIERS = 48, 2
#: Slow: so many times as long as fast writes; a busy machine may double one.  What counts at most.
_SLOW, _SLOWED_MAX = 3.0, 8.0
#: What of the room that a pause gives is planned with.
_MARGIN = 0.8


@dataclass(slots=True)
class FastCache:
    """A drive whose cache is full writes as fast as it empties it, which it does in pauses too.

    So writes are worth their time while the cache has room.  Two slow measurements in a row tell
    that it ends: one may be an outlier.  From then on each tells that it is full, until fewer than
    two of the last are slow.

    fast: measured over expected time of writes that the cache takes.  slowed: how many times as
    long others take; 1 where no cache ends.  room_ns: of writing, that it had room for at at_ns.
    """

    fast: float = 1.0
    slowed: float = 1.0
    room_ns: float = 0.0
    at_ns: int = 0
    last: deque[float] = field(default_factory=lambda: deque(maxlen=_LAST))

    def measured(self, now_ns: int, took_ns: int, expected_ns: int) -> None:
        """Writes that had the drive for themselves have ended.  expected_ns: by the profile."""
        ratio, last = took_ns / expected_ns, self.last
        last.append(ratio)
        if len(last) <= _OUTLIERS:
            return
        self.fast = sorted(last)[_OUTLIERS]
        slow = sorted(one for one in last if one >= _SLOW * self.fast)
        ends = len(slow) > 1 and (self.slowed > 1 or min(last[-2], ratio) >= slow[0])
        self.slowed = min(_SLOWED_MAX, slow[len(slow) // 2] / self.fast) if ends else 1.0
        if not ends or ratio >= slow[0]:
            self.room_ns = 0.0
        else:
            pause_ns = now_ns - took_ns - self.at_ns
            self.room_ns += pause_ns * _MARGIN / (self.slowed - 1) - took_ns
        self.at_ns = now_ns

    def has_room_ns(self, ns: float) -> int:
        """When it has room for writes that take so long; 0 where no cache ends."""
        if self.slowed == 1:
            return 0
        return self.at_ns + round((ns - self.room_ns) * (self.slowed - 1) / _MARGIN)
