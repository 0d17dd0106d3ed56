"""Remembers which page precedes which: a stored page's record names its predecessor."""

from __future__ import annotations

import threading
from collections import OrderedDict

import numpy as np
import numpy.typing as npt

from tutti.base.arrays import Keys

_CHAINS = 512


class Chains:
    """The page chains of recent look-ups.  Thread-safe; bounded."""

    def __init__(self, chains_max: int = _CHAINS) -> None:
        self._max = chains_max
        self._lock = threading.Lock()
        self._chains: OrderedDict[bytes, npt.NDArray[np.uint64]] = OrderedDict()

    def seen(self, keys: Keys) -> None:
        """Records keys (n, 16) of a look-up, which are consecutive pages."""
        if len(keys) < 2:
            return
        words = keys.view(np.uint64).reshape(-1, 2)
        name = keys[0].tobytes()
        with self._lock:
            known = self._chains.get(name)
            if known is None or len(known) <= len(words):
                self._chains[name] = words
            self._chains.move_to_end(name)
            while len(self._chains) > self._max:
                self._chains.popitem(last=False)

    def before(self, key: bytes) -> tuple[bytes | None, int]:
        """The predecessor of a page and how many pages are known to precede it; (None, 0) for none.

        O(pages of the chains): not for latency-critical threads.
        """
        word = np.frombuffer(key, np.uint64)
        with self._lock:
            chains = list(self._chains.values())
        for words in reversed(chains):
            rows = np.flatnonzero(words[1:, 0] == word[0]) + 1
            for row in rows.tolist():
                if words[row, 1] == word[1]:
                    return words[row - 1].tobytes(), row
        return None, 0
