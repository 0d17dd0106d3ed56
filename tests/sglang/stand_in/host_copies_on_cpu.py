"""An SGLang plugin for machines without a GPU: HiCache's copies between pools, done by torch.

SGLang's own copies are CUDA kernels, and it pins host pools, which needs a CUDA driver. And where
it may choose how to compute latent attention, its CPU backend has the absorbed form only.
"""

from __future__ import annotations

from typing import Any

import torch

_POOLS = "sglang.srt.mem_cache.pool_host."
_MHA = _POOLS + "mha.MHATokenToKVPoolHost"
_MLA = _POOLS + "mla.MLATokenToKVPoolHost"
_MAMBA = _POOLS + "mamba.MambaPoolHost"


def activate() -> None:
    if torch.cuda.is_available():
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    _choose_absorbed_attention()
    for pool, tables in ((_MHA, _mha_tables), (_MLA, _mla_tables), (_MAMBA, _mamba_tables)):
        HookRegistry.register(f"{pool}.__init__", _unpinned, HookType.BEFORE)
        load, back_up = _copies(tables)
        HookRegistry.register(f"{pool}.load_to_device_per_layer", load, HookType.REPLACE)
        HookRegistry.register(f"{pool}.backup_from_device_all_layer", back_up, HookType.REPLACE)


def _choose_absorbed_attention() -> None:
    from sglang.srt.models.deepseek_common.attention_backend_handler import (
        AttentionBackendRegistry,
        AttnForwardMethod,
    )

    AttentionBackendRegistry.register("torch_native", lambda *_: AttnForwardMethod.MLA)


def _unpinned(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
    return args, {**kwargs, "pin_memory": False}


def _mha_tables(pool: Any) -> list[tuple[torch.Tensor, Any]]:
    return [(pool.k_buffer, pool.device_k_buffers), (pool.v_buffer, pool.device_v_buffers)]


def _mla_tables(pool: Any) -> list[tuple[torch.Tensor, Any]]:
    return [(pool.kv_buffer, pool.device_kv_buffers)]


def _mamba_tables(pool: Any) -> list[tuple[torch.Tensor, Any]]:
    hosts = [pool.temporal_buffer, *pool.conv_buffer]
    return list(zip(hosts, [pool.buffer_info.temporal, *pool.buffer_info.conv], strict=True))


def _host_layer(pool: Any, host: torch.Tensor, layer: int) -> torch.Tensor:
    return host[layer] if pool.layout == "layer_first" else host[:, layer]


def _host_rows(pool: Any, indices: torch.Tensor) -> Any:
    if pool.layout == "page_first_direct" and pool.page_size > 1:
        return indices // pool.page_size, indices % pool.page_size
    return indices


def _copies(tables: Any) -> tuple[Any, Any]:
    def load(
        self: Any,
        device_pool: Any,
        host_indices: torch.Tensor,
        device_indices: torch.Tensor,
        layer_id: int,
        io_backend: str,
        *,
        is_draft: bool = False,
    ) -> None:
        rows = _host_rows(self, host_indices)
        for host, device in tables(self):
            device[layer_id][device_indices] = _host_layer(self, host, layer_id)[rows]

    def back_up(
        self: Any,
        device_pool: Any,
        host_indices: torch.Tensor,
        device_indices: torch.Tensor,
        io_backend: str,
    ) -> None:
        rows = _host_rows(self, host_indices)
        for host, device in tables(self):
            for layer in range(len(device)):
                _host_layer(self, host, layer)[rows] = device[layer][device_indices]

    return load, back_up
