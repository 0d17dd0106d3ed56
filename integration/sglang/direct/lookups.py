"""Finds the pages of a request that one rank's pools can restore; pins those worth loading."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tutti.base.arrays import Keys, Mask
from tutti.errors import TuttiError
from tutti.integration.sglang.direct import adapter
from tutti.integration.sglang.direct.admission import Admission
from tutti.integration.sglang.direct.read_ahead import ReadAhead
from tutti.integration.sglang.direct.stored_pool import StoredPool


@dataclass(frozen=True)
class Window:
    """Pages (n,) that a pool of states holds; a prefix needs the last ``pages`` of its own."""

    held: Mask
    pages: int


def restorable(pages: int, windows: Sequence[Window]) -> Mask:
    """Whether a prefix of each length from 0 to ``pages`` can be restored, (pages + 1,).

    pages: number of leading pages that all pools without a window have.  A window that is longer
    than a prefix needs the whole prefix.  Length 0 is always False.
    """
    good = np.ones(pages + 1, np.bool_)
    good[0] = False
    lengths = np.arange(pages + 1)
    for window in windows:
        counted = np.concatenate(([0], np.cumsum(window.held[:pages])))
        first = np.maximum(lengths - window.pages, 0)
        good &= counted[lengths] - counted[first] == lengths - first
    return good


@dataclass(frozen=True)
class Found:
    """The prefix lengths (in pages) that can be restored, ascending, and the longest one's pages.

    wanted: pages for read-ahead, which may be more than are worth waiting for now.
    """

    lengths: list[int]
    wanted: Sequence[tuple[StoredPool, Keys]]


class Lookups:
    """Looks up in all pools of one rank.  Not thread-safe.

    admission: decides which hits are taken.  ahead: knows staged pages, which take no load time.
    """

    def __init__(
        self,
        stored_pools: Sequence[StoredPool],
        admission: Admission,
        ahead: ReadAhead,
        log_error: Callable[[str, object], None],
    ) -> None:
        self._by_page = [pool for pool in stored_pools if not pool.kv_pool.trailing]
        self._states = [pool for pool in stored_pools if pool.kv_pool.trailing]
        self._admission = admission
        self._ahead = ahead
        self._log_error = log_error

    def find(
        self, rid: str, keys: Keys, transfers: Sequence[adapter.PoolTransfer], pages_max: int | None
    ) -> Found:
        """One look-up of request ``rid``: keys (n, 16), at most ``pages_max`` of them.

        Every pool counts one look-up, whatever is found, so that pins expire equally on all ranks.
        """
        wanted = keys if pages_max is None else keys[:pages_max]
        pages = min([self._match(rid, stored_pool, wanted) for stored_pool in self._by_page])
        windows = [self._window(rid, s, wanted[:pages], transfers) for s in self._states]
        good = restorable(pages, windows)
        best = int(np.flatnonzero(good)[-1]) if good.any() else 0
        staged = 0
        if self._admission.timed and best:
            staged = min([self._ahead.staged_pages(p, wanted[:best]) for p in self._by_page])
        least, most = self._admission.bounds(staged, pages=best, asked=len(keys), rid=rid)
        good[:least] = False
        good[most + 1 :] = False
        lengths = np.flatnonzero(good).tolist()
        for stored_pool in self._by_page:
            stored_pool.metrics.count("hit_pages", pages)
            stored_pool.metrics.count("miss_pages", len(wanted) - pages)
            stored_pool.metrics.count("refused_pages", best - max(lengths, default=0))
        ahead = self._pages_of(wanted[:best], windows) if most and best >= least else []
        if not ahead:
            self.release([rid])
        return Found(lengths, ahead)

    def still_there(self, rid: str, wanted: Sequence[tuple[StoredPool, Keys]]) -> bool:
        """Whether all pages of a load are still stored; pins exactly these."""
        there = True
        for stored_pool, keys in wanted:
            there = bool(self._present(rid, stored_pool, keys).all()) and there
        return there

    def release(self, rids: Sequence[str]) -> None:
        """Releases the pins of requests that were loaded or have ended."""
        for stored_pool in (*self._by_page, *self._states):
            for rid in rids:
                stored_pool.store.unpin(rid)

    def reset(self) -> None:
        """Releases all pins."""
        for stored_pool in (*self._by_page, *self._states):
            stored_pool.store.unpin()

    def _match(self, rid: str, stored_pool: StoredPool, keys: Keys) -> int:
        try:
            return stored_pool.store.match(keys, pin=rid, proven=True)
        except TuttiError as error:
            self._log_error(f"look-up: {type(error).__name__}", error)
            return 0

    def _window(
        self,
        rid: str,
        stored_pool: StoredPool,
        keys: Keys,
        transfers: Sequence[adapter.PoolTransfer],
    ) -> Window:
        """The stored pages of a pool of states or windows, which may be pinned."""
        named = [t.keys for t in transfers if t.name == stored_pool.kv_pool.source and t.keys]
        held = self._present(rid, stored_pool, keys)
        stored_pool.metrics.count("hit_pages", int(np.count_nonzero(held)))
        return Window(held, len(named[0]) if named else 1)

    def _present(self, rid: str, stored_pool: StoredPool, keys: Keys) -> Mask:
        try:
            return stored_pool.store.present(keys, pin=rid, proven=True)
        except TuttiError as error:
            self._log_error(f"look-up: {type(error).__name__}", error)
            return np.zeros(len(keys), np.bool_)

    def _pages_of(self, keys: Keys, windows: Sequence[Window]) -> list[tuple[StoredPool, Keys]]:
        """The pages that a load reads from each pool; states first, because they are short."""
        states = [
            (stored_pool, keys[max(0, len(keys) - window.pages) :])
            for stored_pool, window in zip(self._states, windows, strict=True)
        ]
        return [*states, *((stored_pool, keys) for stored_pool in self._by_page)]
