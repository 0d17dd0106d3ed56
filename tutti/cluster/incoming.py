"""Puts of values that a remote store has read into staging memory."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from tutti.base.arrays import U32, Keys
from tutti.cluster.chain_parts import prefix
from tutti.cluster.remote_process import Staging
from tutti.cluster.worker import VERSION
from tutti.medium.slot_record import EXPIRY_UNIT_S
from tutti.transfers.put_request import PutRequest


class Read(NamedTuple):
    """Keys that are read, or were, to pages of one part of the staging memory."""

    keys: Keys
    pages: U32
    part: int

    def first(self, n: int) -> Read:
        """The same for the first keys."""
        return Read(self.keys[:n], self.pages[:n], self.part)


def usable(read: Read, staging: Staging) -> Read:
    """Verified pages up to the first that has expired or is of another version."""
    heads = staging.trailers[read.pages]
    lasts = (heads["expiry"] == 0) | (heads["expiry"] > time.time() / EXPIRY_UNIT_S)
    return read.first(len(prefix(read.keys, lasts & (heads["version"] == VERSION))))


def puts(read: Read, staging: Staging, most: int) -> Iterator[PutRequest]:
    """Requests that store verified pages, so many at most, each of one namespace and expiry."""
    heads = staging.trailers[read.pages]
    kinds = heads[["tenant", "expiry"]]
    ends = {len(kinds), *range(0, len(kinds), most)}
    ends.update((np.flatnonzero(kinds[1:] != kinds[:-1]) + 1).tolist())
    for first, last in itertools.pairwise(sorted(ends)):
        rows, (tenant, expiry) = slice(first, last), kinds[first].tolist()
        parents, depths, digests = (
            np.ascontiguousarray(heads[name][rows]) for name in ("parent", "depth", "digests")
        )
        of = staging.memory, tenant, expiry, digests
        yield PutRequest(read.keys[rows], parents, depths, read.pages[rows], *of)
