"""What the linker alone takes from SGLang 0.5.23; the rest is in adapter.py."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker

from tutti.integration.sglang.adapter import PoolName, PoolTransfer, ServedModel
from tutti.integration.sglang.identity import Place

__all__ = [
    "ComponentType",
    "MHATokenToKVPool",
    "MLATokenToKVPool",
    "PoolName",
    "PoolTransfer",
    "UnifiedCacheLinker",
    "place_of",
]


def place_of(params: Any, model: ServedModel, *, replicated: bool) -> Place:
    """Which rank this process is, from CacheInitParams."""
    from sglang.srt.runtime_context import get_parallel

    tp_rank, tp_size = 0, int(get_parallel().tp_size)
    group = params.attn_tp_cache_group or params.tp_cache_group
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        tp_rank = torch.distributed.get_rank(group=group)
        tp_size = torch.distributed.get_world_size(group=group)
    return Place(
        tp_rank=tp_rank,
        tp_size=tp_size,
        pp_rank=params.pp_rank,
        pp_size=params.pp_size,
        cp_rank=params.attn_cp_rank,
        cp_size=params.attn_cp_size,
        dp_rank=model.dp_rank,
        dp_size=model.dp_size,
        replicated=replicated,
    )
