"""SGLang's real hybrid pools, small and on CPU, with a TuttiLinker over them in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import linker_engine as engine
import numpy as np
import torch
from linker_engine import PAGE, WAIT_S, server_args, wait_for
from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateDType, Mamba2StateShape
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.memory_pool import (
    DSATokenToKVPool,
    HybridLinearKVPool,
    HybridReqToTokenPool,
)
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

from tutti.integration.sglang.direct.kv_pools import KvPool, Span
from tutti.integration.sglang.linker import TuttiLinker

PAGES, STATES = 32, 12
FULL, SWA, MAMBA = ComponentType.FULL, ComponentType.SWA, ComponentType.MAMBA
KV = PoolName.KV


def windows(
    heads: int = 4, full: Sequence[int] = (0, 3), swa: Sequence[int] = (1, 2, 4)
) -> tuple[Any, Any]:
    """Layers of full attention, and of a sliding window."""
    pool = SWAKVPool(
        size=PAGES * PAGE,
        size_swa=16 * PAGE,
        page_size=PAGE,
        dtype=torch.bfloat16,
        head_num=heads,
        head_dim=32,
        swa_attention_layer_ids=list(swa),
        full_attention_layer_ids=list(full),
        device=engine.DEVICE,
    )
    return pool, None


def states(conv: torch.dtype = torch.bfloat16) -> HybridReqToTokenPool:
    shape = Mamba2StateShape.create(
        tp_world_size=1,
        intermediate_size=256,
        n_groups=1,
        num_heads=4,
        head_dim=64,
        state_size=16,
        conv_kernel=4,
    )
    return HybridReqToTokenPool(
        size=8,
        mamba_size=STATES,
        mamba_spec_state_size=0,
        max_context_len=2048,
        device=engine.DEVICE,
        enable_memory_saver=False,
        cache_params=Mamba2CacheParams(
            shape=shape, layers=[0, 2, 3], dtype=Mamba2StateDType(conv=conv, temporal=torch.float32)
        ),
        mamba_layer_ids=[0, 2, 3],
        enable_mamba_extra_buffer=False,
        enable_overlap_schedule=False,
    )


def linear(*, use_mla: bool, conv: torch.dtype = torch.bfloat16) -> tuple[Any, Any]:
    """Mamba in layers 0, 2 and 3, full attention in 1 and 4."""
    requests = states(conv)
    pool = HybridLinearKVPool(
        size=PAGES * PAGE,
        dtype=torch.bfloat16,
        page_size=PAGE,
        head_num=4,
        head_dim=32,
        full_attention_layer_ids=[1, 4],
        device=engine.DEVICE,
        mamba_pool=requests.mamba_pool,
        use_mla=use_mla,
        kv_lora_rank=256,
        qk_rope_head_dim=128,
    )
    return pool, requests


def linear_and_windows() -> tuple[Any, Any]:
    """Mamba in layers 0, 2 and 3, full attention in 1 and 5, a window in 4 and 6."""
    pool = SWAKVPool(
        size=PAGES * PAGE,
        size_swa=16 * PAGE,
        page_size=PAGE,
        dtype=torch.bfloat16,
        head_num=4,
        head_dim=32,
        swa_attention_layer_ids=[4, 6],
        full_attention_layer_ids=[1, 5],
        device=engine.DEVICE,
    )
    return pool, states()


def sparse(pages: int = 16) -> tuple[Any, Any]:
    """Latents with an indexer, whose pages are smaller than the medium's blocks."""
    pool = DSATokenToKVPool(
        size=pages * 64,
        page_size=64,
        kv_lora_rank=512,
        dtype=torch.bfloat16,
        qk_rope_head_dim=64,
        layer_num=5,
        device=engine.DEVICE,
        index_head_dim=128,
        enable_memory_saver=False,
        kv_cache_dim=576,
    )
    return pool, None


def compressed() -> tuple[Any, Any]:
    """DeepSeek-V4: windows, two compressed latents, an indexer, and states of compression."""
    pool = DeepSeekV4TokenToKVPool(
        max_num_reqs=4,
        swa_size=16 * 256,
        c4_size=16 * 64,
        c128_size=16 * 2,
        c4_state_pool_size=16 * 8,
        c128_state_pool_size=16 * 128,
        page_size=256,
        swa_page_size=256,
        dtype=torch.float8_e4m3fn,
        c4_state_dtype=torch.float32,
        c128_state_dtype=torch.float32,
        qk_nope_head_dim=448,
        qk_rope_head_dim=64,
        indexer_head_dim=128,
        layer_num=45,
        device=engine.DEVICE,
        enable_memory_saver=False,
        compression_ratios=[0, *(4, 128) * 22],
    )
    return pool, None


#: Kind of model -> its pools, SGLang's components, tokens of a page.
KINDS: Mapping[str, tuple[Callable[[], tuple[Any, Any]], set[Any], int]] = {
    "windows": (windows, {FULL, SWA}, PAGE),
    "mamba": (lambda: linear(use_mla=False), {FULL, MAMBA}, PAGE),
    "mamba-latent": (lambda: linear(use_mla=True), {FULL, MAMBA}, PAGE),
    "mamba-windows": (linear_and_windows, {FULL, SWA, MAMBA}, PAGE),
    "sparse": (sparse, {FULL}, 64),
    "compressed": (compressed, {FULL, SWA}, 256),
}


class _OnGpu:
    """The pages of a span for PyTorch, by Numba's CUDA array interface, version 2."""

    def __init__(self, span: Span, pages: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (span.address, False),
            "shape": (pages, span.nbytes),
            "strides": (span.stride_nbytes, 1),
            "typestr": "|u1",
            "version": 2,
        }


def views_of(pool: KvPool) -> list[list[torch.Tensor]]:
    """uint8 (pages, bytes of a segment) of each segment of each layer, in the pool's memory."""
    if pool.views:
        return [[torch.from_numpy(view) for view in row] for row in pool.views]
    return [
        [torch.as_tensor(_OnGpu(span, pool.pages), device=pool.device) for span in row]
        for row in pool.spans
    ]


class StatesRig:
    """The pools of one rank and their linker.  Options: those of the linker."""

    def __init__(self, folder: Path, kind: str, **options: Any) -> None:
        server_args()
        make, components, self.page = KINDS[kind]
        self.pool, requests = make()
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=requests
            or engine.init_params(engine.kv_pool("mha")).req_to_token_pool,
            token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: self.pool),
            page_size=self.page,
            tree_components=tuple(sorted(components, key=int)),
        )
        size = 128 if kind == "compressed" else 24
        config = {
            "path": str(folder),
            "capacity": f"{size}MiB",
            "sidecar_capacity": f"{size}MiB",
            "load_staging": f"{size}MiB",
            "store_staging": f"{size}MiB",
            "allow_unwatched_weights": True,
            **options,
        }
        self.requests = requests
        self.linker = TuttiLinker(server_args(), params, components=components, extra_config=config)
        self.sources = sorted({s.kv_pool.source for s in self.linker.stored_pools.values()})

    def __enter__(self) -> StatesRig:
        return self

    def __exit__(self, *exception: object) -> None:
        self.linker.close()

    def fill(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        for stored_pool in self.linker.stored_pools.values():
            for row in views_of(stored_pool.kv_pool):
                for view in row:
                    content = rng.integers(0, 256, tuple(view.shape), np.uint8)
                    view.copy_(torch.from_numpy(content))

    def wipe(self) -> None:
        for stored_pool in self.linker.stored_pools.values():
            for row in views_of(stored_pool.kv_pool):
                for view in row:
                    view.zero_()

    def content(self, name: str, pages: Sequence[int]) -> list[bytes]:
        """Bytes of pages of one pool, over its layers."""
        views = views_of(self.linker.stored_pools[name].kv_pool)
        return [
            b"".join(view[page].cpu().numpy().tobytes() for row in views for view in row)
            for page in pages
        ]

    def transfers(
        self,
        names: Sequence[str],
        places: Mapping[str, Sequence[int]] | None = None,
        windows: Mapping[str, int] | None = None,
    ) -> list[PoolTransfer]:
        """As SGLang makes them: every KV page, and the last ``windows`` of the states' sources."""
        found = []
        for source in self.sources:
            count = len(names) if source == "kv" else min((windows or {})[source], len(names))
            slots = None
            if places is not None:
                assert len(places[source]) == count
                slots = self.slots(source, places[source])
            policy = PoolHitPolicy.ALL_PAGES if source == "kv" else PoolHitPolicy.TRAILING_PAGES
            found.append(
                PoolTransfer(
                    name=PoolName(source),
                    keys=list(names[len(names) - count :]),
                    device_indices=slots,
                    hit_policy=policy,
                )
            )
        return found

    def slots(self, source: str, pages: Sequence[int]) -> torch.Tensor:
        size = 1 if source == "mamba" else self.page
        rows = [torch.arange(page * size, (page + 1) * size) for page in pages]
        slots = torch.cat(rows) if rows else torch.zeros(0, dtype=torch.int64)
        return slots.to(engine.DEVICE)

    def round_trip(self) -> None:
        """Stores six pages with the windows that end there, wipes all pools, and restores the pages
        in other places: every byte is the same, and page 0 stays empty.
        """
        windows = {"swa": 2, "mamba": 1}
        self.fill(1)
        pools = self.linker.stored_pools.items()
        counts = {source: windows.get(source, 6) for source in self.sources}
        at = {source: list(range(1, 1 + n)) for source, n in counts.items()}
        to = {source: list(range(8, 8 + n)) for source, n in counts.items()}
        want = {name: self.content(name, at[pool.kv_pool.source]) for name, pool in pools}
        keys = engine.names(6)
        assert self.store(self.transfers(keys, at, windows))
        self.wipe()
        assert self.linker.lookup("r", self.transfers(keys, None, windows))[-1:] == [6]
        assert self.restore(self.transfers(keys, to, windows))
        for name, pool in pools:
            assert self.content(name, to[pool.kv_pool.source]) == want[name], name
            assert self.content(name, [0]) == [bytes(pool.kv_pool.nbytes)]

    def store(self, transfers: list[PoolTransfer]) -> bool:
        """Offloads, and waits until it is on the medium: what is copied out completes before."""
        assert self.linker.offload(transfers)
        wait_for(lambda: self.linker.num_completed_offloads() == 1)
        assert self.linker.backlog.wait_quiet(WAIT_S)
        return self.linker.pop_completed_offload()

    def restore(self, transfers: list[PoolTransfer]) -> bool:
        """Whether all of it came; a read ahead may find out before the load that it does not."""
        if not self.linker.load("r", transfers):
            return False
        index = self.linker.start_layer_wise_loading()
        return self.linker.finish_layer_wise_loading(index)
