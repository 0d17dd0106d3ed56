"""One KV pool of SGLang with its Tutti pool: store, registered memory, and staging."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import torch

from tutti.base.arrays import Keys, Mask
from tutti.base.breaker import Breaker
from tutti.errors import ConfigError, TuttiError
from tutti.integration.sglang.direct.gpu_copies import Gpu
from tutti.integration.sglang.direct.kv_pools import KvPool, Pages, Spans, Views, spans_of
from tutti.integration.sglang.direct.staging_pages import StagingPages
from tutti.integration.sglang.direct.staging_size import StagingSize
from tutti.integration.sglang.kv_events import DiskEvents
from tutti.integration.sglang.metrics import Metrics
from tutti.interface import Store
from tutti.memory.device_memory import DeviceMemory
from tutti.memory.host_memory import HostMemory

_KNOWN_KEYS = 16


class StoredPool:
    """A KV pool of SGLang, and the store of its pages.

    memory: SGLang's pages for direct transfers; None if everything goes through staging.
    namespace: of its puts.  staging: bytes for loads, and for stores.  breaker: makes one.
    loads, stores: staging for each direction, with views like those of SGLang's pool.
    gpu: the GPU with the pages; None for host memory.  gpu_staging: of the engine that moves them.
    events: KV events of stored pages; None if they are not published.
    known: some objects that were stored, or whose load failed last.
    reads, writes: breakers of its medium; probes alone close that of reads.
    """

    def __init__(
        self,
        kv_pool: KvPool,
        store: Store,
        metrics: Metrics,
        *,
        staging: tuple[int, int],
        breaker: Callable[[], Breaker],
        namespace: str = "",
        gpu: Gpu | None = None,
        gpu_staging: StagingSize | None = None,
    ) -> None:
        self.kv_pool = kv_pool
        self.store = store
        self.metrics = metrics
        self.namespace = namespace
        self.gpu = gpu
        self.reads, self.writes = breaker(), breaker()
        self.events: DiskEvents | None = None
        self.known: deque[bytes] = deque(maxlen=_KNOWN_KEYS)
        self._read_pages_max: int | None = None
        memory = kv_pool.host_pool(store.layout)
        if gpu is not None and gpu_staging is not None and memory is not None:
            memory = DeviceMemory(memory, gpu.attach(store, gpu_staging))
            self._read_pages_max = gpu.read_pages_max(store)
        self.memory: HostMemory | None = None if memory is None else store.register(memory)
        self.loads = StagingPages(store, staging[0], kv_pool.staging_views)
        self.stores = StagingPages(store, staging[1], kv_pool.staging_views)
        self._load_spans = self._reached(self.loads)
        self._store_spans = self._reached(self.stores)
        if gpu is not None and self._load_spans + self._store_spans:
            gpu.expect(kv_pool.spans)
        if self.memory is None and not (self.loads.pages and self.stores.pages):
            raise ConfigError(
                f"pool {kv_pool.name} goes through staging, and a page of it has "
                f"{self.page_nbytes} bytes; set larger load_staging and store_staging"
            )

    @property
    def name(self) -> str:
        """SGLang's name of the pool."""
        return self.kv_pool.name

    @property
    def page_nbytes(self) -> int:
        """Payload of one page."""
        return self.store.layout.object_nbytes

    @property
    def batch_pages_max(self) -> int | None:
        """Most pages that one batch can load; None: unlimited."""
        return self.loads.pages if self.memory is None else self._read_pages_max

    @property
    def reads_directly(self) -> bool:
        """Whether reads of batches go to SGLang's pages without this object's staging."""
        return self.gpu is not None and self.memory is not None

    def present(self, keys: Keys) -> Mask:
        """Which of keys (n, 16) are stored already, (n,); publishes events of them."""
        try:
            there = self.store.present(keys)
        except TuttiError:  # storing a page twice costs less than not storing it
            return np.zeros(len(keys), np.bool_)
        if self.events is not None and there.any():
            self.events.stored(keys[there], np.ones(np.count_nonzero(there), np.bool_))
        return there

    def remember(self, keys: Keys) -> None:
        """Remembers objects (n, 16) that are or were stored; a probe may read them."""
        self.known.extend(key.tobytes() for key in keys[-2:])

    def page_numbers(self, slots: torch.Tensor, pages: int) -> Pages:
        """See KvPool.page_numbers; on a GPU, waits only for the slots."""
        if self.gpu is None:
            return self.kv_pool.page_numbers(slots, pages)
        with self.gpu.streams.on_side_stream():
            return self.kv_pool.page_numbers(slots, pages)

    def _reached(self, staging: StagingPages) -> Spans:
        """Spans of staging at the GPU's addresses; empty without a GPU."""
        if self.gpu is None or staging.memory is None:
            return []
        return spans_of(staging.views, self.gpu.pin(self.store, staging.memory))

    def copy_layer(self, layer: int, rows: Pages, targets: Pages, *, staged: bool) -> None:
        """Enqueues copies to ``targets`` on the GPU, from staging or (not staged) other pages."""
        assert self.gpu is not None, "pages in GPU memory"
        target = self.kv_pool.spans[layer]
        source = self._load_spans[layer] if staged else target
        stream = self.gpu.copy_stream
        self._count(self.gpu.copy(stream, target, targets, source, rows, is_local=not staged), rows)

    def _count(self, by_kernel: bool, pages: Pages) -> None:
        self.metrics.count("kernel_copied_pages", len(pages) if by_kernel else 0)

    def copy_from_staging(self, layer: int, source: Views, rows: Pages, targets: Pages) -> None:
        """Copies pages ``rows`` of one of SGLang's layers from staging to ``targets``."""
        for staged, view in zip(source[layer], self.kv_pool.views[layer], strict=True):
            view[targets] = staged[rows]

    def copy_out(self, pages: Pages, staged: Pages, timeout_s: float) -> None:
        """Copies SGLang's ``pages`` into staging for stores.

        Raises DeviceTimeout or CudaError; the GPU may still read the pages then.
        """
        if self.gpu is not None:
            for there, here in zip(self._store_spans, self.kv_pool.spans, strict=True):
                self._count(self.gpu.copy(self.gpu.leaving, there, staged, here, pages), pages)
            self.gpu.wait_left(timeout_s)
            return
        for sources, targets in zip(self.kv_pool.views, self.stores.views, strict=True):
            for source, target in zip(sources, targets, strict=True):
                target[staged] = source[pages]


def split_nbytes(nbytes: int, pools: Sequence[KvPool], kv_share: float) -> dict[str, int]:
    """Bytes by pool: pools with KV pages get ``kv_share`` of them, with equally many pages.

    Other pools, whose objects are states, share the rest equally, and get at least one object.
    """
    by_page = [pool for pool in pools if not pool.trailing]
    states = [pool for pool in pools if pool.trailing]
    whole = nbytes if not states else int(nbytes * kv_share)
    page = max(1, sum(pool.nbytes for pool in by_page))
    shares = {pool.name: whole * pool.nbytes // page for pool in by_page}
    for pool in states:
        shares[pool.name] = (nbytes - whole) // len(states)
        if nbytes:
            shares[pool.name] = max(shares[pool.name], pool.nbytes)
    return shares
