"""Loads of a pool, which come before the work of its second tier."""

from __future__ import annotations

import time
from collections.abc import Callable

from tutti.transfers.loader import Loader

_PAUSE_S = 0.005  # loads that follow one another leave less between them


class LocalLoads:
    """Waits for pauses between the loads of a pool.  For one thread.

    patience_s: the longest wait, so that fetches go on beside loads without a pause.
    waited: called for each wait.  stopping: whether to wait no longer.
    """

    def __init__(
        self,
        loader: Loader,
        patience_s: float,
        waited: Callable[[], None],
        stopping: Callable[[], bool],
    ) -> None:
        self._loader, self._patience_s = loader, patience_s
        self._waited, self._stopping = waited, stopping
        self._seen, self._seen_s = (0, 0), 0.0  # loads that began, that ended; the last change

    def near(self) -> bool:
        """Whether a load is under way, or was a moment ago."""
        ended, begun = self._loader.ended, self._loader.begun  # in this order: loads go on
        now_s = time.monotonic()
        if (begun, ended) != self._seen:
            self._seen, self._seen_s = (begun, ended), now_s
        return begun > ended or now_s < self._seen_s + _PAUSE_S

    def wait_for_pause(self, deadline_s: float) -> bool:
        """Whether there is a pause now, after the longest wait or at the deadline at the latest."""
        if not self.near():
            return True
        end_s = min(deadline_s, time.monotonic() + self._patience_s)
        time.sleep(_PAUSE_S)  # it may have ended long ago
        if self.near():
            self._waited()
        while self.near():
            if self._stopping() or time.monotonic() >= end_s:
                return False
            time.sleep(_PAUSE_S)
        return True
