"""`TuttiHiCacheStorage`: Tutti as the storage behind SGLang's host cache (HiCache, "L3").

README.md shows the flags. Wrong options and pools that do not fit are errors at start, with the
remedy. Later nothing raises: an error is a miss, or a page that is not stored; it is counted, and
logged once per kind.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from tutti.base.units import format_nbytes
from tutti.errors import ConfigError, PoolError, Unsupported
from tutti.gio_uring.memory import hugepage_nbytes
from tutti.integration.sglang import adapter
from tutti.integration.sglang.direct.model_steps import STEPS
from tutti.integration.sglang.host.flat_pages import FlatPages
from tutti.integration.sglang.host.host_pools import (
    COLLAPSING,
    PageFragments,
    advise_hugepages,
    host_pool_of,
    is_sharded,
    shape_of,
)
from tutti.integration.sglang.host.host_store import HostStore
from tutti.integration.sglang.identity import (
    ParallelRank,
    facts_of,
    identity_of,
    layout_of,
    open_store,
)
from tutti.integration.sglang.kv_events import DiskEvents, publishes
from tutti.integration.sglang.metrics import LOAD, STORE, Metrics
from tutti.integration.sglang.options import HICACHE, parse_options
from tutti.integration.sglang.storages import STORAGES
from tutti.integration.sglang.weights import WATCH
from tutti.memory.host_memory import HostMemory

_log = logging.getLogger(__name__)

KV = str(adapter.PoolName.KV)
_SIDECAR_PART = 8
_UPKEEP_S = 1.0


class TuttiHiCacheStorage(adapter.HiCacheStorage):
    """The storage of one rank, made by SGLang's `dynamic` backend; see the module."""

    def __init__(
        self, storage_config: adapter.HiCacheStorageConfig, _unused: dict[str, Any] | None = None
    ) -> None:
        """Checks options and version; raises ConfigError or Unsupported."""
        adapter.check_version()
        self._options = parse_options(storage_config.extra_config, HICACHE)
        WATCH.check(self._options["allow_unwatched_weights"])
        self._config = storage_config
        replicated = adapter.let_every_rank_write(storage_config)
        self._model = adapter.served_model()
        tp_rank, tp_size = adapter.attention_tp(storage_config)
        self._parallel_rank = ParallelRank(
            tp_rank=tp_rank,
            tp_size=tp_size,
            pp_rank=storage_config.pp_rank,
            pp_size=storage_config.pp_size,
            cp_rank=storage_config.attn_cp_rank,
            cp_size=storage_config.attn_cp_size,
            dp_rank=max(storage_config.dp_rank, self._model.dp_rank),
            dp_size=self._model.dp_size,
            replicated=replicated,
            nodes=self._model.nodes,
        )
        if (storage_config.tp_lcm_size or 0) > storage_config.tp_size:
            raise ConfigError("tp_lcm_size splits pages by heads, which Tutti does not; remove it")
        if storage_config.dcp_size > 1:
            raise Unsupported("decode context parallelism splits pages; start with --dcp-size 1")
        self.cleared = True  # whether the last `clear` succeeded
        self._stores: dict[str, HostStore] = {}
        self._refusal: Exception | None = None  # the error of a pool that could not be opened
        self._all_registered = False
        self._closed = threading.Event()
        self._upkeep: threading.Thread | None = None
        self._flat: FlatPages | None = None
        self._flat_lock = threading.Lock()

    @property
    def moving(self) -> bool:
        """Whether a thread of SGLang is loading or storing."""
        return any(store.moving for store in list(self._stores.values()))

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Opens the KV pool for SGLang's host pool.  Raises TuttiError with the remedy."""
        super().register_mem_pool_host(mem_pool_host)
        self._try_open(KV, mem_pool_host, self._options["capacity"])
        self._agree()

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Opens an additional pool (Mamba, SWA, ...).

        An error is raised once all pools are registered; for a later pool, here.
        """
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        name = str(host_pool_name)
        if name not in self._stores and self._refusal is None:
            capacity = self._options["sidecar_capacity"]
            capacity = capacity or self._options["capacity"] // _SIDECAR_PART
            self._try_open(name, host_pool, capacity)
        if self._all_registered and self._refusal is not None:
            self.close()  # SGLang does not close it here, and could not attach again
            raise self._refusal

    def on_host_pools_registered(self) -> None:
        """Raises the error of an additional pool, of this rank or another."""
        super().on_host_pools_registered()
        self._all_registered = True
        self._agree()

    def batch_exists(
        self, keys: list[str], extra_info: adapter.HiCacheStorageExtraInfo | None = None
    ) -> int:
        """Number of pages, from the first on, that are stored."""
        store = self._stores.get(KV)
        return store.match(keys) if store else 0

    def batch_get_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: adapter.HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Reads pages directly into the host pool; returns which were found and verified."""
        store = self._stores.get(KV)
        return store.load(keys, host_indices) if store else [False] * len(keys)

    def batch_set_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: adapter.HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Stores pages directly from the host pool; returns which are stored."""
        store = self._stores.get(KV)
        prefix = extra_info.prefix_keys if extra_info else None
        return store.put(keys, host_indices, prefix) if store else [False] * len(keys)

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[adapter.PoolTransfer] | None = None,
        extra_info: adapter.HiCacheStorageExtraInfo | None = None,
    ) -> adapter.PoolTransferResult:
        """Prefixes that can be restored from the KV pool and the additional pools together."""
        kv_pages = self.batch_exists(keys, extra_info)
        hits = {KV: kv_pages} if kv_pages else {}
        restorable = set(range(1, kv_pages + 1))
        for transfer in pool_transfers or []:
            if not restorable:
                break
            # Block groups are a second form of the same KV: not stored here, and never a limit.
            if transfer.hit_policy == adapter.PoolHitPolicy.BLOCK_GROUPS:
                continue
            allowed = restorable_lengths(
                self._stores.get(str(transfer.name)), transfer, keys[:kv_pages]
            )
            if allowed:
                hits[str(transfer.name)] = max(allowed)
            restorable &= allowed
        lengths = sorted(restorable)
        return adapter.PoolTransferResult(lengths[-1] if lengths else 0, hits, lengths)

    def batch_get_v2(
        self,
        transfers: list[adapter.PoolTransfer],
        extra_info: adapter.HiCacheStorageExtraInfo | None = None,
    ) -> dict[str, list[bool]]:
        """As `batch_get_v1`, for several pools."""
        return self._of_each(transfers, HostStore.load)

    def batch_set_v2(
        self,
        transfers: list[adapter.PoolTransfer],
        extra_info: adapter.HiCacheStorageExtraInfo | None = None,
    ) -> dict[str, list[bool]]:
        """As `batch_set_v1`, for several pools."""
        prefix = extra_info.prefix_keys if extra_info else None
        return self._of_each(transfers, lambda store, keys, where: store.put(keys, where, prefix))

    def _of_each(
        self,
        transfers: list[adapter.PoolTransfer],
        move: Callable[[HostStore, list[str], torch.Tensor], list[bool]],
    ) -> dict[str, list[bool]]:
        """Calls `move` for the pages of each pool; those of a pool that is not open are False."""
        answers = {}
        for transfer in transfers:
            store, keys = self._stores.get(str(transfer.name)), transfer.keys or []
            moved = move(store, keys, transfer.host_indices) if store else [False] * len(keys)
            answers[transfer.name] = moved
        return answers

    def exists(self, key: str) -> bool:
        """Whether one page is stored."""
        return self.batch_exists([key]) == 1

    def get(
        self, key: str, target_location: Any = None, target_sizes: Any = None
    ) -> torch.Tensor | None:
        """Copies one flat page into the tensor `target_location`; None if it is not stored."""
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """Copies flat pages into tensors; used without "interface_v1"."""
        flat = self._flat_pages()
        if flat is None or target_locations is None:
            return [None] * len(keys)
        return flat.read(keys, target_locations)

    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        """Stores one flat page."""
        return self.batch_set([key], [value])

    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Stores flat pages; returns whether all of them are stored."""
        flat = self._flat_pages()
        return flat is not None and values is not None and flat.write(keys, values)

    def clear(self) -> bool:
        """Removes all pages of all pools of this rank."""
        cleared = [store.clear() for store in self._stores.values()]
        self.cleared = all(cleared)
        return self.cleared

    def get_stats(self) -> adapter.StorageMetrics:
        """Pages and GB/s of every batch since the last call.

        SGLang's scheduler calls this in every turn; the stores' counters are read once a second.
        """
        stats = adapter.StorageMetrics()
        for store in list(self._stores.values()):
            pages, bandwidth = store.metrics.take_samples(LOAD)
            stats.prefetch_pgs += pages
            stats.prefetch_bandwidth += bandwidth
            pages, bandwidth = store.metrics.take_samples(STORE)
            stats.backup_pgs += pages
            stats.backup_bandwidth += bandwidth
        return stats

    def counters(self) -> dict[str, dict[str, float]]:
        """All counters, by pool."""
        for store in self._stores.values():
            store.refresh()
        return {name: store.metrics.snapshot() for name, store in self._stores.items()}

    def close(self) -> None:
        """Waits for transfers and closes the pools cleanly."""
        self._closed.set()
        STORAGES.discard(self)
        if self._upkeep is not None:
            self._upkeep.join(self._options["timeout_s"])
        stores, self._stores = self._stores, {}
        for store in stores.values():
            if store.store.scheduler is not None:
                STEPS.leave(store.store.scheduler)
            store.close()

    def _try_open(self, name: str, host_pool: Any, capacity: int) -> None:
        try:
            self._open(name, host_pool, capacity)
        except Exception as error:
            self._refusal = error

    def _agree(self) -> None:
        """If a rank could not open a pool, closes all pools and raises, on all ranks.

        If only that rank raised, the others would wait in SGLang's next collective.
        """
        own = self._refusal
        said = None if own is None else f"{self._parallel_rank.name}: {own}"
        refusals = [text for text in adapter.of_all_ranks(self._config, said) if text]
        if own is None and not refusals:
            return
        self.close()
        raise own or PoolError(f"another rank could not open its pool: {'; '.join(refusals)}")

    def _open(self, name: str, host_pool: Any, capacity: int) -> None:
        if name == KV:
            adapter.load_page_hashes()
        fragments = PageFragments(host_pool, name)
        identity = identity_of(self._options, self._model, self._config.model_name or "")
        rank = self._parallel_rank
        if is_sharded(host_pool):
            rank = replace(rank, replicated=False)
        layout = layout_of(shape_of(host_pool, name, fragments), identity, rank)
        metrics = Metrics(
            {"mode": HICACHE, "pool": name, "rank": rank.name},
            prometheus=self._config.enable_storage_metrics,
        )
        announces = self._options["kv_events"] and name == KV and publishes()
        store, path = open_store(layout, name, capacity, self._options, rank, is_kv=name == KV)
        try:
            memory: HostMemory = host_pool_of(layout, fragments, host_pool)
            store.register(memory)
        except BaseException:
            store.close()
            raise
        if store.scheduler is not None:
            STEPS.follow(store.scheduler, layout.model_layers)
        STORAGES.add(self)
        self._stores[name] = HostStore(
            store,
            memory,
            fragments.page_tokens,
            metrics,
            WATCH,
            timeout_s=self._options["timeout_s"],
            second_touch=self._options["second_touch"],
            namespace=self._options["namespace"],
        )
        if announces:
            self._stores[name].events = DiskEvents(fragments.page_tokens, metrics)
        metrics.info(facts_of(store, path))
        self._stores[name].refresh()
        if self._upkeep is None:
            self._upkeep = threading.Thread(target=self._keep_up, name="tutti-upkeep", daemon=True)
            self._upkeep.start()
        self._advise(self._stores[name], memory.buffers)
        _log.info(
            "Tutti: %s pool %s, %s objects of %s bytes",
            name,
            path,
            store.stats()["capacity_objects"],
            layout.object_nbytes,
        )

    def _keep_up(self) -> None:
        """Updates counters, logs the summary, and releases pins of look-ups without a load."""
        while not self._closed.wait(_UPKEEP_S):
            for store in list(self._stores.values()):
                store.tick(time.monotonic())

    def _advise(self, store: HostStore, buffers: Sequence[tuple[int, int]]) -> None:
        how, metrics = self._options["hugepages"], store.metrics

        def work() -> None:
            huge, why = hugepage_nbytes(buffers), ""
            metrics.level("hugepage_bytes", huge)
            if how != "off":
                why = advise_hugepages(list(buffers), how, self._closed)
                huge = hugepage_nbytes(buffers)
                metrics.level("hugepage_bytes", huge)
                store.pages_moved = True
            sizes = format_nbytes(huge), format_nbytes(sum(nbytes for _, nbytes in buffers))
            more = f"; loads go on, but {why}" if why else ""
            _log.info("Tutti: %s of %s of the host pool on hugepages%s", *sizes, more)

        threading.Thread(target=work, name=COLLAPSING, daemon=True).start()

    def _flat_pages(self) -> FlatPages | None:
        store = self._stores.get(KV)
        if store is None:
            return None
        with self._flat_lock:
            if self._flat is None:
                self._flat = FlatPages(store)
            return self._flat


def restorable_lengths(
    store: HostStore | None, transfer: adapter.PoolTransfer, keys: list[str]
) -> set[int]:
    """Prefix lengths, in pages, for which the pool of `transfer` has all pages that they need."""
    if store is None:
        return set()
    if transfer.hit_policy == adapter.PoolHitPolicy.ALL_PAGES:
        return set(range(1, store.match(keys) + 1))
    tail = max(1, len(transfer.keys or []))
    run, lengths = 0, set()
    for length, there in enumerate(store.present(keys), 1):
        run = run + 1 if there else 0
        if run >= min(tail, length):
            lengths.add(length)
    return lengths
