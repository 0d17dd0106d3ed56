"""LMCache's `fs_native`: its C++ client, a file for every page, four threads, O_DIRECT.

Only the client is measured (`lmcache.lmcache_fs` of LMCache 0.5.6), as its adapter for the second
level calls it; LMCache's server, which would copy pages to and from it, is not in between.
"""

from __future__ import annotations

import importlib.util
import select
import time
from pathlib import Path
from typing import Any

import numpy as np

from tutti.bench.peers.peer import BATCH_PAGES, PeerPlan
from tutti.bench.peers.plain import PlainPeer
from tutti.errors import DeviceTimeout, MediumError

_THREADS = 4
_WAIT_S = 120.0


def missing() -> str:
    """The reason why the client cannot run here; empty if it can."""
    package = importlib.util.find_spec("lmcache")
    if package is None:
        return "lmcache is not installed"
    folders = package.submodule_search_locations or []
    if not any(list(Path(folder).glob("lmcache_fs.*.so")) for folder in folders):
        return "this lmcache was built without its C++ client for files"
    if importlib.util.find_spec("torch") is None:
        return "lmcache's client needs torch, which is not installed"
    return ""


class LMCachePeer(PlainPeer):
    """A file per page, by LMCache's client, without checksums."""

    def __init__(self, plan: PeerPlan) -> None:
        super().__init__(plan)
        whole = np.asarray(self._memory.owner.array).reshape(-1)[: plan.batch_nbytes]
        # The parts of all pages together; a file holds as many bytes as a page, in one piece.
        self._parts = [part.data for part in whole.reshape(BATCH_PAGES, -1)]

    def open(self) -> None:
        from lmcache.lmcache_fs import LMCacheFSClient

        self._client: Any = LMCacheFSClient(self._plan.directory, _THREADS, "", True, 0)

    def close(self) -> None:
        self._client.close()

    def store(self, batch: int) -> None:
        """One request.  Raises MediumError when it failed."""
        self._wait(self._client.submit_batch_set(_names(batch), self._parts))

    def load(self, batch: int) -> None:
        """One request.  Raises MediumError when pages were not there."""
        there = self._wait(self._client.submit_batch_get(_names(batch), self._parts))
        if there.count(True) != BATCH_PAGES:
            raise MediumError(f"batch {batch}: only {there.count(True)} pages were loaded")

    def exists(self, batches: list[int]) -> int:
        names = [name for batch in batches for name in _names(batch)]
        there = self._wait(self._client.submit_batch_exists(names))
        return there.index(False) if False in there else len(there)

    def _wait(self, request: int) -> list[bool]:
        deadline_s = time.monotonic() + _WAIT_S
        while (left_s := deadline_s - time.monotonic()) > 0:
            select.select([self._client.event_fd()], [], [], left_s)
            for number, is_done, error, each in self._client.drain_completions():
                if number == request and not is_done:
                    raise MediumError(f"LMCache's client failed: {error}")
                if number == request:
                    return list(each or ())
        raise DeviceTimeout(f"LMCache's client did not answer within {_WAIT_S:g} s")


def _names(batch: int) -> list[str]:
    """As LMCache names files: model, rank, group of objects and hash."""
    return [f"llama-3-8b@00000000@0@{batch:06d}{page:03d}" for page in range(BATCH_PAGES)]
