"""Pools beside the KV (v2): SGLang's real host pools of windows, drafts and sparse indexers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import host_pools as hp
import pytest
import torch
from node.agents import running
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.memory_pool_host import LogicalHostPool
from sglang.srt.mem_cache.pool_host.dsa import DSAIndexerPoolHost

from tutti.errors import ConfigError, Unsupported
from tutti.integration.sglang.hicache import TuttiHiCacheStorage

WINDOW = 2
KEYS = [f"{i:064x}" for i in range(1, 9)]


def indexer_pool(anchor: Any) -> DSAIndexerPoolHost:
    """Bytes and scales of sparse attention's index keys; the device's side is made up."""
    page_nbytes = anchor.page_size * 132
    buffers = [torch.zeros((4, page_nbytes), dtype=torch.uint8) for _ in range(hp.LAYERS)]
    device_pool = SimpleNamespace(
        store_dtype=torch.uint8,
        start_layer=0,
        end_layer=hp.LAYERS,
        device="cpu",
        layer_shard_enabled=False,
        layer_num=hp.LAYERS,
        index_k_with_scale_buffer=buffers,
    )
    storage = SimpleNamespace(
        dtype=torch.uint8,
        bytes_per_token_per_layer=132,
        page_bytes=lambda page_size: page_size * 132,
        host_bytes=lambda page_num, layer_num, page_size: page_num * layer_num * page_size * 132,
    )
    decl = SimpleNamespace(device_pool=device_pool, storage_info=storage, owned_device_layers=None)
    return DSAIndexerPoolHost(decl, anchor, pin_memory=False)


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[TuttiHiCacheStorage]:
    storage = TuttiHiCacheStorage(hp.config(tmp_path), {})
    yield storage
    storage.close()


def transfer(name: PoolName, keys: list[str], pool: Any, pages: list[int]) -> PoolTransfer:
    policy = {PoolName.SWA: PoolHitPolicy.TRAILING_PAGES}.get(name, PoolHitPolicy.ALL_PAGES)
    where = hp.indices(pool, pages)
    return PoolTransfer(name=name, keys=keys, host_indices=where, hit_policy=policy)


@pytest.mark.parametrize("name", [PoolName.SWA, PoolName.DRAFT, PoolName.INDEXER])
@pytest.mark.parametrize("layout", ["page_first", "page_first_direct"])
def test_what_both_pools_have_is_found_and_comes_back(
    storage: TuttiHiCacheStorage, name: PoolName, layout: str, seed: int
) -> None:
    # Index keys are small: pages of 16 tokens in four layers would waste too much of the medium.
    kv = hp.mla_pool(layout, 64) if name == PoolName.INDEXER else hp.mha_pool(layout)
    side = indexer_pool(kv) if name == PoolName.INDEXER else hp.mha_pool(layout, heads=2)
    storage.register_mem_pool_host(kv)
    storage.register_mem_host_pool_v2(side, name)
    storage.on_host_pools_registered()
    hp.fill(kv, seed)
    hp.fill(side, seed + 1)
    assert all(storage.batch_set_v1(KEYS, hp.indices(kv, list(range(8)))))
    # Of the side pool pages 0 to 3 and 5: a hole at 4, nothing from 6 on.
    rows = [0, 1, 2, 3, 5]
    want = [hp.page_bytes(side, page) for page in (10, 11, 12, 13, 15)]
    stored = [KEYS[row] for row in rows]
    answer = storage.batch_set_v2([transfer(name, stored, side, [10, 11, 12, 13, 15])])
    assert answer == {name: [True] * 5}
    asked = transfer(name, KEYS[-WINDOW:], side, [0, 1])
    found = storage.batch_exists_v2(KEYS, [asked])
    # All pages from the first on, or a window of two that ends there (or begins at the first).
    assert found.restorable_prefix_pages == [1, 2, 3, 4]
    assert found.kv_hit_pages == 4
    counted = storage.counters()[str(name)]
    hits = 5 if name == PoolName.SWA else 4  # a window may lie behind the hole
    assert (counted["hit_pages"], counted["miss_pages"]) == (hits, len(KEYS) - hits)
    hp.wipe(side)
    loaded = storage.batch_get_v2([transfer(name, KEYS[:6], side, [0, 1, 2, 3, 4, 5])])
    assert loaded == {name: [True, True, True, True, False, False]}, "a gap ends what is served"
    assert [hp.page_bytes(side, page) for page in rows[:4]] == want[:4]
    assert not any(hp.page_bytes(side, 4)), "a page that is not stored was written"


def test_pages_of_a_later_node_lie_behind_those_before_it(
    storage: TuttiHiCacheStorage, seed: int
) -> None:
    """SGLang stores each node of its tree by itself; of equally old pages the deepest go first."""
    side = hp.mha_pool("page_first", heads=2)
    storage.register_mem_pool_host(hp.mha_pool("page_first"))
    storage.register_mem_host_pool_v2(side, PoolName.DRAFT)
    storage.on_host_pools_registered()
    hp.fill(side, seed)
    for first in (0, 3):
        node = transfer(PoolName.DRAFT, KEYS[first : first + 3], side, [0, 1, 2])
        answer = storage.batch_set_v2([node], HiCacheStorageExtraInfo(prefix_keys=KEYS[:first]))
        assert answer == {PoolName.DRAFT: [True] * 3}
    kept = storage._stores[str(PoolName.DRAFT)]
    found = {one.key: one for one in kept.store.catalogue.objects(kept.keys(KEYS[:6]))}
    names = [key.tobytes() for key in kept.keys(KEYS[:6])]
    assert [found[name].depth for name in names] == list(range(6))
    assert [found[name].parent for name in names] == [bytes(16), *names[:5]]


@pytest.mark.parametrize("name", [PoolName.MAMBA, PoolName.DRAFT])
def test_ranks_of_a_latent_do_not_share_states_and_heads(
    tmp_path: Path, name: PoolName, seed: int
) -> None:
    """On an agent they share the latent; the states or heads of one rank are wrong in another."""
    found = []
    with running(tmp_path / "agent") as agent, ExitStack() as opened:
        for rank in range(2):
            changes = {"is_mla_model": True, "tp_rank": rank, "tp_size": 2}
            config = hp.config(f"unix:{agent.path}", options={"capacity": "128MiB"}, **changes)
            storage = opened.enter_context(closing(TuttiHiCacheStorage(config, {})))
            kv = hp.mla_pool("page_first", 64)
            side = hp.mamba_pool() if name == PoolName.MAMBA else hp.mha_pool("page_first")
            storage.register_mem_pool_host(kv)
            storage.register_mem_host_pool_v2(side, name)
            storage.on_host_pools_registered()
            hp.fill(side, seed + rank)
            beside = sum(storage._stores[str(name)].present(KEYS[:2]))
            found.append((storage.batch_exists(KEYS[:2]), beside))
            assert all(storage.batch_set_v1(KEYS[:2], hp.indices(kv, [0, 1])))
            answer = storage.batch_set_v2([transfer(name, KEYS[:2], side, [0, 1])])
            assert answer == {name: [True, True]}
    assert found == [(0, 0), (2, 0)]


def test_states_of_another_type_miss(tmp_path: Path) -> None:
    """As after another --mamba-ssm-dtype: two of its types have the same size."""
    for dtype, found in ((torch.bfloat16, 0), (torch.float16, 0), (torch.bfloat16, 2)):
        storage = TuttiHiCacheStorage(hp.config(tmp_path), {})
        states = hp.mamba_pool(dtype)
        storage.register_mem_pool_host(hp.mha_pool("page_first_direct"))
        storage.register_mem_host_pool_v2(states, PoolName.MAMBA)
        storage.on_host_pools_registered()
        assert sum(storage._stores[str(PoolName.MAMBA)].present(KEYS[:2])) == found, dtype
        pages = transfer(PoolName.MAMBA, KEYS[:2], states, [0, 1])
        assert storage.batch_set_v2([pages]) == {PoolName.MAMBA: [True] * 2}
        storage.close()


def test_a_pool_without_pages_of_its_own_is_refused(storage: TuttiHiCacheStorage) -> None:
    """SGLang's anchor of DeepSeek-V4 has numbers of pages alone."""
    with pytest.raises(Unsupported, match=r"'kv' \(LogicalHostPool\).*use the linker"):
        storage.register_mem_pool_host(LogicalHostPool(64, 16, "page_first"))


def test_what_splits_pages_is_refused(tmp_path: Path) -> None:
    split = {"tp_size": 2, "dcp_size": 2, "logical_page_size": 32}
    with pytest.raises(Unsupported, match="dcp-size"):
        TuttiHiCacheStorage(hp.config(tmp_path, is_mla_model=True, **split), {})
    with pytest.raises(ConfigError, match="tp_lcm_size"):
        TuttiHiCacheStorage(hp.config(tmp_path, tp_lcm_size=2), {})
    TuttiHiCacheStorage(hp.config(tmp_path, tp_lcm_size=1), {}).close()
