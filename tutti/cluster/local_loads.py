"""Gives a pool's own loads precedence over the work of its second tier."""

from __future__ import annotations

import time
from collections.abc import Callable

from tutti.transfers.loader import Loader

_PAUSE_S = 0.005  # longer than the gaps between loads of one request


class LocalLoads:
    """Waits for pauses between the loads of a pool.  Not thread-safe.

    patience_s: the longest wait, so that fetches proceed even if loads never pause.
    waited: called once per wait.  stopping: returns True to end a wait early.
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
        self._seen, self._seen_s = (0, 0), 0.0  # loads (begun, ended), their last change

    def near(self) -> bool:
        """Whether a load is under way, or was a moment ago."""
        ended, begun = self._loader.ended, self._loader.begun  # this order: ended <= begun
        now_s = time.monotonic()
        if (begun, ended) != self._seen:
            self._seen, self._seen_s = (begun, ended), now_s
        return begun > ended or now_s < self._seen_s + _PAUSE_S

    def wait_for_pause(self, deadline_s: float) -> bool:
        """Waits for a pause, up to ``patience_s`` or the deadline; returns whether there is one."""
        if not self.near():
            return True
        end_s = min(deadline_s, time.monotonic() + self._patience_s)
        time.sleep(_PAUSE_S)  # the last load may have ended long ago, noticed only now
        if self.near():
            self._waited()
        while self.near():
            if self._stopping() or time.monotonic() >= end_s:
                return False
            time.sleep(_PAUSE_S)
        return True
