"""SGLang's own host pools, small and on CPU, over made-up device buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.mem_cache.device_pool_info import (
    KVBufferLayout,
    KVBuffers,
    MambaStateBufferInfo,
    MHABufferInfo,
    MLABufferInfo,
)
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.pool_host.dsa import DSAIndexerPoolHost
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

#: Opens a storage for a pool, with changes of `config`: a fixture of conftest.py.
Make = Callable[..., Any]
LAYOUTS = ("layer_first", "page_first", "page_first_direct")
LAYERS, HEADS, HEAD_DIM, PAGES = 4, 4, 32, 24
_CPU = torch.device("cpu")


def _pointers(tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.uint64)


def mha_pool(layout: str, page_size: int = 16, heads: int = HEADS) -> MHATokenToKVPoolHost:
    shape = (page_size, heads, HEAD_DIM)
    k = tuple(torch.zeros(shape, dtype=torch.bfloat16) for _ in range(LAYERS))
    v = tuple(torch.zeros(shape, dtype=torch.bfloat16) for _ in range(LAYERS))
    info = MHABufferInfo(
        buffers=KVBuffers(
            k=k,
            v=v,
            k_data_ptrs=_pointers(k),
            v_data_ptrs=_pointers(v),
            layout=KVBufferLayout.NHD,
        ),
        page_size=page_size,
        head_num=heads,
        head_dim=HEAD_DIM,
        v_head_dim=HEAD_DIM,
        dtype=torch.bfloat16,
        device=_CPU,
    )
    return MHATokenToKVPoolHost(
        info,
        1.0,
        0,
        page_size,
        layout,
        pin_memory=False,
        device_capacity_tokens=page_size,
        start_layer=0,
        end_layer=LAYERS,
        host_token_capacity=PAGES * page_size,
    )


def mla_pool(layout: str, page_size: int = 16) -> MLATokenToKVPoolHost:
    rows = tuple(torch.zeros((page_size, 1, 128), dtype=torch.bfloat16) for _ in range(LAYERS))
    info = MLABufferInfo(
        buffers=rows,
        data_ptrs=_pointers(rows),
        layer_indices=tuple(range(LAYERS)),
        device_layer_num=LAYERS,
        page_size=page_size,
        kv_lora_rank=112,
        qk_rope_head_dim=16,
        kv_cache_dim=128,
        dtype=torch.bfloat16,
        device=_CPU,
    )
    return MLATokenToKVPoolHost(
        info,
        1.0,
        0,
        page_size,
        layout,
        pin_memory=False,
        device_capacity_tokens=page_size,
        start_layer=0,
        end_layer=LAYERS,
        target_layer_num=LAYERS,
        host_token_capacity=PAGES * page_size,
    )


def mamba_pool(temporal: torch.dtype = torch.float32) -> MambaPoolHost:
    heads = 32 // temporal.itemsize  # the same bytes of any type
    info = MambaStateBufferInfo(
        temporal=torch.zeros((LAYERS, 4, heads, 16, 16), dtype=temporal),
        conv=(torch.zeros((LAYERS, 4, 64, 4), dtype=torch.bfloat16),),
    )
    return MambaPoolHost(
        info, 6.0, 0, device_capacity=4, pin_memory=False, layout="page_first_direct"
    )


def tutti_options(path: Any) -> dict[str, Any]:
    """HiCache's extra config for pools below `path`."""
    return {
        "backend_name": "tutti",
        "module_path": "tutti.integration.sglang.hicache",
        "class_name": "TuttiHiCacheStorage",
        "interface_v1": 1,
        "allow_unwatched_weights": True,
        "path": str(path),
        "capacity": "32MiB",
        "hugepages": "off",
    }


def config(path: Any, **changes: Any) -> HiCacheStorageConfig:
    """A storage config of one rank, as SGLang's controller makes it."""
    options = {**tutti_options(path), **changes.pop("options", {})}
    fields = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": False,
        "is_page_first_layout": False,
        "model_name": "tiny",
        "extra_config": options,
    }
    return HiCacheStorageConfig(**{**fields, **changes})


def fill(pool: Any, seed: int) -> None:
    """Random bytes everywhere."""
    generator = torch.Generator().manual_seed(seed)
    for buffer in buffers(pool):
        flat = buffer.view(torch.uint8).reshape(-1)
        flat.copy_(torch.randint(0, 256, flat.shape, dtype=torch.uint8, generator=generator))


def wipe(pool: Any) -> None:
    for buffer in buffers(pool):
        buffer.zero_()


def buffers(pool: Any) -> list[torch.Tensor]:
    if isinstance(pool, MambaPoolHost):
        return [pool.temporal_buffer, *pool.conv_buffer]
    if isinstance(pool, DSAIndexerPoolHost):
        return [pool.index_k_with_scale_buffer]
    return [pool.kv_buffer]


def page_bytes(pool: Any, page: int) -> bytes:
    """A page as SGLang itself flattens it."""
    data: Any = pool.get_data_page(page * pool.page_size, flat=True)
    return bytes(data.contiguous().view(torch.uint8).numpy().tobytes())


def indices(pool: Any, pages: list[int]) -> torch.Tensor:
    """Token indices of pages."""
    size = pool.page_size
    return torch.cat([torch.arange(page * size, (page + 1) * size) for page in pages])
