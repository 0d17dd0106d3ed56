"""Bounds on the hits of eviction policies.

`whole_puts` is Belady's MIN for a pool whose puts store whole requests: it knows the future, but
each put must make room for all blocks that its request missed, a window at a time, and leave the
reserve free. A policy that refuses blocks may exceed it.

`by_classes` is for policies that do not know the future, also if they refuse blocks. After each use
of a block, the policy decides for how many requests to keep it, or not to store it. It knows the
block's class: its number of uses and its depth, each rounded to a power of two, and optionally the
gap before this use. Ages are known exactly, because a keeping time is an age. For each class the
hits and the occupied slots follow from the gaps in the trace, as functions of the keeping time. The
bound fills the slots with the most hits per slot and request, over all classes: a fractional
knapsack over concave hulls. It is the hazard rate ordering of Panigrahy, Nain, Neglia, Towsley (A
New Upper Bound on Cache Hit Probability for Non-Anticipative Caching Policies, arXiv 2106.06457),
with hazards fitted to the trace after the fact, for caches that do not fetch ahead.

It bounds the expected hits of policies whose keeping times depend, within a class, on nothing that
is correlated with the block's own next use. The bound is loose: the distribution of the gaps is
known in advance, the capacity limits only the average over the trace, and a hit needs no
predecessors. A policy that knows more, such as phases of the trace, may exceed it.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise

import numpy as np

from tutti.bench.belady import HitCount, Requests

Line = tuple[float, float, float]  # hits per slot, slots, hits


def whole_puts(requests: Requests, capacity: int, reserve: int, window: int) -> HitCount:
    """The most hits of any order of evictions if puts store whole requests.

    Exact if every request fits into a window and into the pool. Otherwise the hits decide what can
    be evicted for later windows, and this counts one possible order, which may not be the best.
    """
    total, resident = HitCount(), dict[int, tuple[int, int]]()
    farthest: list[tuple[int, int, int]] = []

    def shrink(size: int, busy: Collection[int]) -> None:
        spared = []
        while len(resident) > size and farthest:
            entry = heapq.heappop(farthest)
            if resident.get(entry[2]) != (-entry[0], -entry[1]):
                continue  # used since
            if entry[2] in busy:
                spared.append(entry)
            else:
                del resident[entry[2]]
        for entry in spared:
            heapq.heappush(farthest, entry)

    for request, following in zip(requests, _next_requests(requests), strict=True):
        at = {int(block): (following[place], place) for place, block in enumerate(request)}
        found = {block for block in at if block in resident}
        fresh = [block for block in at if block not in found]
        total.references += len(at)
        total.hits += len(found)
        for block in found:
            resident[block] = at[block]
            heapq.heappush(farthest, (-at[block][0], -at[block][1], block))
        for start in range(0, len(fresh), window):
            part = fresh[start : start + window]
            shrink(max(0, capacity - len(part)), found)
            for block in part[: capacity - len(resident)]:
                resident[block] = at[block]
                heapq.heappush(farthest, (-at[block][0], -at[block][1], block))
            shrink(capacity - reserve, ())
    return total


def by_classes(requests: Requests, capacity: int, gaps: bool) -> float:
    """The bound on the hit rate of policies that know only classes; see the module."""
    last: dict[int, tuple[int, int, tuple[int, ...]]] = {}  # request, uses, class
    kept: dict[tuple[int, ...], list[tuple[int, int]]] = defaultdict(list)  # slots, hits
    budget, references = 0.0, 0
    for now, request in enumerate(requests):
        for depth, block in enumerate(map(int, request)):
            before, uses, kind = last.get(block, (now, 0, ()))
            if uses:
                kept[kind].append((now - before - 1, 1))
            gap = (now - before).bit_length() if gaps else 0
            kind = ((uses + 1).bit_length(), depth.bit_length(), gap)
            last[block] = now, uses + 1, kind
        references += len(request)
        budget += min(capacity, len(last))
    for before, _, kind in last.values():
        kept[kind].append((len(requests) - before - 1, 0))
    hits, lines = 0.0, [line for each in kept.values() for line in _hull(each)]
    for rate, slots, gained in sorted(lines, reverse=True):
        taken = slots if slots <= budget else budget
        hits += gained if taken == slots else rate * taken
        budget -= taken
    return hits / references if references else 0.0


def _hull(kept: Sequence[tuple[int, int]]) -> Iterator[Line]:
    """The concave hull of a class's hits over its slots, by all times of keeping."""
    slots, hit = np.array(sorted(kept), np.int64).T
    cost = np.cumsum(slots) + slots * np.arange(slots.size - 1, -1, -1)
    ends = np.append(slots[1:] != slots[:-1], True)
    hull = [(0, 0)]
    for x, y in zip(cost[ends].tolist(), np.cumsum(hit)[ends].tolist(), strict=True):
        if x == 0:
            yield float("inf"), 0, y  # used by successive requests
            hull = [(0, y)]
            continue
        while len(hull) > 1 and _rises(hull[-2], hull[-1]) <= _rises(hull[-2], (x, y)):
            hull.pop()
        hull.append((x, y))
    for left, right in pairwise(hull):
        yield _rises(left, right), right[0] - left[0], right[1] - left[1]


def _rises(left: tuple[int, int], right: tuple[int, int]) -> float:
    return (right[1] - left[1]) / (right[0] - left[0])


def _next_requests(requests: Requests) -> list[list[int]]:
    """For every reference the index of the next request with its block; if none, their count."""
    following: dict[int, int] = {}
    answer = []
    for number in range(len(requests) - 1, -1, -1):
        blocks = [int(block) for block in requests[number]]
        answer.append([following.get(block, len(requests)) for block in blocks])
        following.update(dict.fromkeys(blocks, number))
    return answer[::-1]
