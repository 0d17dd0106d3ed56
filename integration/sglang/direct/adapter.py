"""Everything that only the linker takes from SGLang 0.5.23; the rest is in adapter.py."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.hybrid_cache.linker_pool_assembler import (
    DevicePoolEntry,
    DevicePoolGroup,
    _mamba_device_pool_entry,
    resolve_hybrid_device_pool_group,
)
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker

from tutti.errors import Unsupported
from tutti.integration.sglang.adapter import PoolHitPolicy, PoolName, PoolTransfer
from tutti.integration.sglang.identity import ParallelRank, ServedModel
from tutti.integration.sglang.launch import OMISSIONS, linker_refusal

__all__ = [
    "DevicePoolEntry",
    "MHATokenToKVPool",
    "MLATokenToKVPool",
    "PoolHitPolicy",
    "PoolName",
    "PoolTransfer",
    "UnifiedCacheLinker",
    "check_server",
    "device_group",
    "parallel_rank_of",
]

_FULL, _SWA, _MAMBA = ComponentType.FULL, ComponentType.SWA, ComponentType.MAMBA


def check_server(args: Any) -> None:
    """Raises Unsupported for a server whose loop does not serve a linker."""

    def has(argument: str) -> bool:
        flag, _, value = argument.partition(" ")
        found = getattr(args, flag[2:].replace("-", "_"), None)
        return found == value if value else bool(found)

    if refusal := linker_refusal([*filter(has, OMISSIONS)]):
        raise Unsupported(refusal)


def device_group(params: Any, components: Collection[Any]) -> DevicePoolGroup:
    """SGLang's pools, in the form that SGLang's own linkers get.

    Built here for the models for which SGLang 0.5.23 leaves it to the linker: plain MHA and MLA,
    sliding windows, and Mamba with MHA.  For all others SGLang builds it, or raises ValueError.
    """
    kvcache = params.token_to_kv_pool_allocator.get_kvcache()
    kind, kinds, page_size = type(kvcache), frozenset(components), params.page_size
    drafts = params.mtp_draft_device_pools or params.sidecar_draft_device_pools
    if not drafts and kinds == {_FULL} and kind in (MHATokenToKVPool, MLATokenToKVPool):
        layers = {layer: layer for layer in range(kvcache.layer_num)}
        entry = _kv_entry(PoolName.KV, kvcache, layers, page_size)
        replicated = kind is MLATokenToKVPool
        return DevicePoolGroup([entry], kvcache.layer_num, page_size, rank_replicated=replicated)
    if not drafts and kinds == {_FULL, _SWA} and kind is SWAKVPool:
        return _group([*_window_entries(kvcache, page_size)], page_size)
    if not drafts and kinds == {_FULL, _MAMBA} and kind is HybridLinearKVPool:
        full = kvcache.full_kv_pool
        if type(full) is MHATokenToKVPool:
            layers = {
                layer - kvcache.start_layer: row
                for layer, row in kvcache.full_attention_layer_id_mapping.items()
            }
            states = _mamba_device_pool_entry(params.req_to_token_pool, kvcache.start_layer)
            return _group([_kv_entry(PoolName.KV, full, layers, page_size), states], page_size)
    return resolve_hybrid_device_pool_group(
        kvcache=kvcache, page_size=page_size, params=params, components=set(components)
    )


def parallel_rank_of(params: Any, model: ServedModel, *, replicated: bool) -> ParallelRank:
    """The rank of this process, from CacheInitParams."""
    from sglang.srt.runtime_context import get_parallel

    tp_rank, tp_size = 0, int(get_parallel().tp_size)
    group = params.attn_tp_cache_group or params.tp_cache_group
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        tp_rank = torch.distributed.get_rank(group=group)
        tp_size = torch.distributed.get_world_size(group=group)
    return ParallelRank(
        tp_rank=tp_rank,
        tp_size=tp_size,
        pp_rank=params.pp_rank,
        pp_size=params.pp_size,
        cp_rank=params.attn_cp_rank,
        cp_size=params.attn_cp_size,
        dp_rank=model.dp_rank,
        dp_size=model.dp_size,
        replicated=replicated,
        nodes=model.nodes,
    )


def _group(entries: list[DevicePoolEntry], page_size: int) -> DevicePoolGroup:
    layers = 1 + max(layer for entry in entries for layer in entry.layer_mapping)
    return DevicePoolGroup(entries, layers, page_size)


def _window_entries(kvcache: Any, page_size: int) -> tuple[DevicePoolEntry, DevicePoolEntry]:
    layers: dict[bool, dict[int, int]] = {False: {}, True: {}}
    for layer, (row, windowed) in kvcache.layers_mapping.items():
        layers[windowed][layer - kvcache.start_layer] = row
    return (
        _kv_entry(PoolName.KV, kvcache.full_kv_pool, layers[False], page_size),
        _kv_entry(PoolName.SWA, kvcache.swa_kv_pool, layers[True], page_size),
    )


def _kv_entry(name: PoolName, pool: Any, layers: dict[int, int], page_size: int) -> DevicePoolEntry:
    """The pool entry of K and V, or of the latent, of each layer; rows are tokens."""
    if isinstance(pool, MLATokenToKVPool):
        buffers: list[Any] = [list(pool.kv_buffer)]
    else:
        buffers = [list(pool.k_buffer), list(pool.v_buffer)]
    return DevicePoolEntry(
        name=name,
        indices_from_pool=name,
        device_pool=pool,
        components=buffers,
        layer_mapping=layers,
        page_size=page_size,
        rows_are_pages=False,
    )


def kv_of(transfers: Sequence[PoolTransfer]) -> PoolTransfer | None:
    """The transfer of KV, if there is one."""
    return next((transfer for transfer in transfers if transfer.name == PoolName.KV), None)


def kv_names(transfers: Sequence[PoolTransfer]) -> Sequence[str]:
    """SGLang's hashes of the pages of KV."""
    kv = kv_of(transfers)
    return (kv.keys or ()) if kv is not None else ()
