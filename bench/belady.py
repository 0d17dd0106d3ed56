"""Reference hit counts of a trace: Belady's MIN, plain LRU, and unlimited capacity.

A request is a sequence of blocks, each the successor of the one before. `hits` counts references to
resident blocks. `prefix_hits` counts only those before the first miss of their request, which a
prefix cache can serve.

MIN evicts the resident block whose next reference is farthest away (Belady 1966); this may be the
newest block, which is not kept then. No policy has more `hits` on the same references. A store that
serves prefixes looks a request up before it stores the rest: all of its hits precede its misses, so
MIN's `hits` are an upper bound for it, too. MIN's `prefix_hits` are not a bound, because MIN does
not know that a block without its predecessors is useless.

Published policies between the two come from the library libcachesim, if it is installed.
"""

from __future__ import annotations

import heapq
import importlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tutti.errors import ConfigError

#: Policies by their names in libcachesim, whose documentation cites their papers.
PUBLISHED = (
    *("ARC", "Cacheus", "Clock", "Clock2QPlus", "ClockPro", "FIFO", "GDSF", "Hyperbolic", "LFU"),
    *("LFUDA", "LHD", "LIRS", "LRUK", "LeCaR", "MQ", "S3FIFO", "SLRU", "Sieve", "TwoQ", "WTinyLFU"),
)

Block = int
Requests = Sequence[Sequence[Block] | npt.NDArray[np.uint64]]


@dataclass
class HitCount:
    """Number of referenced blocks, and how many of them were hits."""

    references: int = 0
    hits: int = 0
    prefix_hits: int = 0

    @property
    def hit_rate(self) -> float:
        """hits over references; 0 of nothing."""
        return self.hits / self.references if self.references else 0.0

    @property
    def prefix_hit_rate(self) -> float:
        """prefix_hits over references; 0 of nothing."""
        return self.prefix_hits / self.references if self.references else 0.0


class _Counting:
    """Feeds requests to `reference(block, place)`, which returns whether it was a hit."""

    def count(self, requests: Requests) -> HitCount:
        total = HitCount()
        for request in requests:
            whole = True
            for block in request:
                hit = self.reference(int(block), total.references)
                total.references += 1
                total.hits += hit
                whole = whole and hit
                total.prefix_hits += whole
        return total

    def reference(self, block: Block, place: int) -> bool:
        raise NotImplementedError


class _Minimum(_Counting):
    def __init__(self, requests: Requests, capacity: int) -> None:
        self._capacity = capacity
        self._next = _next_references(requests)
        self._resident: dict[Block, int] = {}  # place of its next reference
        self._farthest: list[tuple[int, Block]] = []  # with stale entries, which are skipped

    def reference(self, block: Block, place: int) -> bool:
        hit = block in self._resident
        self._resident[block] = self._next[place]
        heapq.heappush(self._farthest, (-self._next[place], block))
        while len(self._resident) > self._capacity:  # each turn pops one entry
            at, candidate = heapq.heappop(self._farthest)
            if self._resident.get(candidate) == -at:
                del self._resident[candidate]
        return hit


class _LeastRecentlyUsed(_Counting):
    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._resident: OrderedDict[Block, None] = OrderedDict()

    def reference(self, block: Block, place: int) -> bool:
        hit = block in self._resident
        self._resident[block] = None
        self._resident.move_to_end(block)
        if len(self._resident) > self._capacity:
            self._resident.popitem(last=False)
        return hit


class _Unlimited(_Counting):
    def __init__(self) -> None:
        self._seen: set[Block] = set()

    def reference(self, block: Block, place: int) -> bool:
        hit = block in self._seen
        self._seen.add(block)
        return hit


class _Published(_Counting):
    """A cache of libcachesim, whose objects are numbered from 1 in order of first reference."""

    def __init__(self, library: Any, name: str, capacity: int) -> None:
        self._cache = getattr(library, name)(cache_size=capacity)
        self._request = library.Request()
        self._request.obj_size = 1
        self._numbers: dict[Block, int] = {}

    def reference(self, block: Block, place: int) -> bool:
        self._request.obj_id = self._numbers.setdefault(block, len(self._numbers) + 1)
        self._request.clock_time = place
        return bool(self._cache.get(self._request))


def minimum(requests: Requests, capacity: int) -> HitCount:
    """Belady's MIN with room for `capacity` blocks; O(n log n) in the number of references."""
    return _Minimum(requests, capacity).count(requests)


def least_recently_used(requests: Requests, capacity: int) -> HitCount:
    """Plain LRU over single blocks."""
    return _LeastRecentlyUsed(capacity).count(requests)


def published(
    requests: Requests, capacity: int, names: Sequence[str] = PUBLISHED
) -> dict[str, HitCount]:
    """Hit counts of each of these policies.  Raises ConfigError without libcachesim."""
    try:
        library = importlib.import_module("libcachesim")
    except ImportError as error:
        raise ConfigError(
            "published policies come from libcachesim; pip install libcachesim==0.3.5"
        ) from error
    return {name: _Published(library, name, capacity).count(requests) for name in names}


def unlimited(requests: Requests) -> HitCount:
    """Hit counts without evictions."""
    return _Unlimited().count(requests)


def _references(requests: Requests) -> Iterator[Block]:
    return (int(block) for request in requests for block in request)


def _next_references(requests: Requests) -> list[int]:
    """For every reference the index of the next one to the same block; if none, their count."""
    stream = list(_references(requests))
    last: dict[Block, int] = {}
    following = [len(stream)] * len(stream)
    for place in range(len(stream) - 1, -1, -1):
        following[place] = last.get(stream[place], len(stream))
        last[stream[place]] = place
    return following
