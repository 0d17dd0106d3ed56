"""Allocates SGLang's host pool on large pages if HiCache's storage is Tutti.

SGLang pins its host pool for a GPU at its allocation, and pinned memory cannot be moved to large
pages. SGLang can allocate the pool on them, but only if an environment variable is set. The plugin
sets that variable while such a pool is allocated, so that no other setting is needed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from tutti.integration.sglang.launch import STORAGE_CLASS, server_environment
from tutti.integration.sglang.options import HICACHE


def activate() -> None:
    """Hooks the allocation of host pools; for SGLang's plugin."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    target = "sglang.srt.mem_cache.pool_host.common.HostTensorAllocator.allocate"
    HookRegistry.register(target, _allocate, HookType.AROUND)


def _allocate(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    added = server_environment(HICACHE) if _wants_large_pages() else {}
    os.environ.update(added)
    try:
        return original(*args, **kwargs)
    finally:
        for name in added:
            os.environ.pop(name, None)


def _wants_large_pages() -> bool:
    """Whether this server's storage is Tutti, and the option `hugepages` is not off."""
    from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
    from sglang.srt.runtime_context import get_memory

    try:
        memory = get_memory()
        if memory.hicache_storage_backend != "dynamic":
            return False
        config, *_ = HybridCacheController.parse_storage_backend_extra_config(
            memory.hicache_storage_backend_extra_config
        )
    except (OSError, ValueError):  # not a server's process, or flags that SGLang refuses later
        return False
    is_tutti = all(config.get(name) == value for name, value in STORAGE_CLASS.items())
    return is_tutti and config.get("hugepages") != "off"
