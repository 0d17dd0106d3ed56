"""Ages a pool: stores chains of random length, looks some of them up again, and evicts others."""

from __future__ import annotations

from collections import deque

import numpy as np

from tutti.base.arrays import Keys
from tutti.base.terminal import ProgressFactory
from tutti.bench.pool_workload import WAIT_S, PoolWorkload
from tutti.bench.stamps import numbered_keys
from tutti.transfers.tickets import PutTicket

#: First number of the keys of churn; distinct from those of a workload's batches.
_FIRST_NUMBER = 1 << 40
_MEAN_PAGES = 12
_REMEMBERED = 256


def churn(workload: PoolWorkload, nbytes: int, *, seed: int, progress: ProgressFactory) -> None:
    """Puts ``nbytes`` in chains of geometric length.

    Before every second put, on average, one of the last chains is looked up, which makes it recent:
    so objects are not evicted in the order in which they were stored.
    """
    rng = np.random.default_rng(seed)
    store, source_pages = workload.store, workload.source_pages
    remembered: deque[Keys] = deque(maxlen=_REMEMBERED)
    waiting: deque[PutTicket] = deque()
    objects = -(-nbytes // workload.object_nbytes)
    put = 0
    with progress("churn, objects", objects) as bar:
        while put < objects:
            length = min(int(rng.geometric(1 / _MEAN_PAGES)), source_pages, objects - put)
            keys = numbered_keys(_FIRST_NUMBER + put + np.arange(length))
            if remembered and rng.random() < 0.5:
                store.match(remembered[int(rng.integers(len(remembered)))])
            if len(waiting) == workload.inflight:
                waiting.popleft().wait(WAIT_S)
            waiting.append(store.put(keys, rng.permutation(source_pages)[:length]))
            remembered.append(keys)
            put += length
            bar.advance(length)
        while waiting:
            waiting.popleft().wait(WAIT_S)
