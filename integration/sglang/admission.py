"""Which hits are taken: what pins may hold, and what pays.  Pure policy, counted in look-ups."""

from __future__ import annotations

from collections import OrderedDict


class PinLedger:
    """How many pages the pins of recent look-ups hold, at most ``pages_max``.

    A pin holds for ``lookups`` later look-ups, as in the store: never by wall clock, because all
    ranks must agree.  A request that looks up again renews its pins.
    """

    def __init__(self, pages_max: int, lookups: int) -> None:
        self._pages_max = pages_max
        self._lookups = lookups
        self._clock = 0
        self._held: OrderedDict[str, tuple[int, int]] = OrderedDict()
        self.pages = 0

    def budget(self, rid: str) -> int:
        """One more look-up, of request ``rid``: how many pages it may pin."""
        self._clock += 1
        while self._held and next(iter(self._held.values()))[0] < self._clock - self._lookups:
            _, (_, pages) = self._held.popitem(last=False)
            self.pages -= pages
        return max(0, self._pages_max - self.pages + self._held.get(rid, (0, 0))[1])

    def pinned(self, rid: str, pages: int) -> None:
        """The look-up pinned so many."""
        self.pages += pages - self._held.pop(rid, (0, 0))[1]
        if pages:
            self._held[rid] = (self._clock, pages)


class BreakEven:
    """From how many pages on loading is faster than computing.

    page_nbytes: of one object.  recompute_s: time to compute one page's KV; 0 is unknown, and every
    hit is taken.  pages_min: shorter hits are never taken.
    The bandwidth is that of past loads (exponential mean, weight one quarter); every 64th hit that
    would be refused is taken, so that a medium can become fast again.
    """

    def __init__(self, page_nbytes: int, recompute_s: float, pages_min: int) -> None:
        self._page_nbytes = page_nbytes
        self._recompute_s = recompute_s
        self._pages_min = max(1, pages_min)
        self._seconds_per_byte = 0.0
        self._refused = 0

    def loaded(self, nbytes: int, duration_s: float) -> None:
        """A load took so long."""
        if nbytes:
            measured = duration_s / nbytes
            old = self._seconds_per_byte or measured
            self._seconds_per_byte = old + (measured - old) / 4

    def lengths(self, pages: int) -> list[int]:
        """The prefix lengths up to ``pages`` that are worth loading."""
        if self._recompute_s and self._seconds_per_byte * self._page_nbytes > self._recompute_s:
            self._refused += 1
            if self._refused % 64:
                return []
        return list(range(self._pages_min, pages + 1))
