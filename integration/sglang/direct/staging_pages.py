"""Numbered pages of the integration's own memory, between SGLang's pages and the medium.

Pages that the device may still touch stay allocated, so a device that never answers costs
staging and never a page of SGLang.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np

from tutti.base.process import Owned
from tutti.gio_uring.gpu.stream_queue import wait_until
from tutti.integration.sglang.direct.kv_pools import Pages, Views
from tutti.interface import Store
from tutti.memory.host_memory import HostMemory


class StagingPages(Owned):
    """Pages in registered memory on hugepages.  Thread-safe.

    nbytes: rounded down to whole pages; less than a page gives no pages.
    views_of: returns views of the memory like those of SGLang's pool.
    """

    def __init__(
        self, store: Store, nbytes: int, views_of: Callable[[HostMemory], Views] | None = None
    ) -> None:
        layout = store.layout
        self.pages = nbytes // layout.object_nbytes
        self._lock = threading.Lock()
        self._free: Pages = np.arange(self.pages, dtype=np.int64)
        self._retired: list[tuple[Callable[[], bool], Pages]] = []
        self.memory: HostMemory | None = None
        self.views: Views = []
        if self.pages:
            self.memory = store.allocate_memory(self.pages)
            self.views = [] if views_of is None else views_of(self.memory)

    def allocate(self, pages: int, timeout_s: float = 0.0) -> Pages | None:
        """Allocates ``pages`` pages; returns their numbers, or None if too few are free.

        timeout_s: how long to wait for more. Those that are free are kept meanwhile.
        """
        taken = self._free[:0]

        def take() -> bool:
            nonlocal taken
            with self._lock:
                self._reclaim()
                more, self._free = np.split(self._free, [pages - taken.size])
            taken = np.concatenate((taken, more))
            return taken.size == pages

        if wait_until(take, timeout_s):
            return taken
        self.release(taken)
        return None

    def release(self, pages: Pages) -> None:
        """Frees pages that are not in use any more."""
        with self._lock:
            self._free = np.sort(np.concatenate((pages, self._free)))

    def retire(self, pages: Pages, is_over: Callable[[], bool]) -> None:
        """Frees pages once ``is_over()``; until then a device may still use them."""
        with self._lock:
            self._retired.append((is_over, pages))

    @property
    def free(self) -> int:
        """Number of free pages."""
        with self._lock:
            self._reclaim()
            return int(self._free.size)

    def _reclaim(self) -> None:
        waiting, over = [], [self._free]
        for is_over, pages in self._retired:
            if is_over():
                over.append(pages)
            else:
                waiting.append((is_over, pages))
        # Assigned together: callbacks may raise, and no page may be freed twice.
        self._free, self._retired = np.sort(np.concatenate(over)), waiting
