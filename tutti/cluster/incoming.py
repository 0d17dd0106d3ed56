"""Stores values in the pool that a remote store has read into staging memory."""

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
    """A read of keys (n, 16) into pages (n,) of one part of the staging memory, ended or not."""

    keys: Keys
    pages: U32
    part: int

    def first(self, n: int) -> Read:
        """The part of the read that concerns its first ``n`` keys."""
        return Read(self.keys[:n], self.pages[:n], self.part)


def usable(read: Read, staging: Staging) -> Read:
    """The verified pages before the first that has expired or is of another version."""
    heads = staging.trailers[read.pages]
    lasts = (heads["expiry"] == 0) | (heads["expiry"] > time.time() / EXPIRY_UNIT_S)
    return read.first(len(prefix(read.keys, lasts & (heads["version"] == VERSION))))


def puts(read: Read, staging: Staging, most: int) -> Iterator[PutRequest]:
    """Requests that store verified pages: ``most`` per request, of one namespace and expiry."""
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
        yield PutRequest.of(read.keys[rows], parents, depths, read.pages[rows], *of)
