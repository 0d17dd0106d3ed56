"""Tutti: a key-value store on NVMe SSDs for the KV cache of large language models.

`tutti.open` opens a pool, `tutti.KVLayout` describes the engine's pages, and
`tutti.ObjectStore` is what `open` returns. They load on first use, so that
importing a part of the package stays cheap.
"""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"
__all__ = [
    "HostMemory",
    "KVLayout",
    "ObjectStore",
    "StoreConfig",
    "__version__",
    "chain_keys",
    "connect",
    "format",
    "object_keys",
    "open",
]

_EXPORTS = {
    "HostMemory": "tutti.memory.host_memory",
    "KVLayout": "tutti.medium.layout",
    "ObjectStore": "tutti.store",
    "StoreConfig": "tutti.transfers.core",
    "chain_keys": "tutti.medium.keys",
    "connect": "tutti.node.client",
    "format": "tutti.store",
    "object_keys": "tutti.medium.keys",
    "open": "tutti.store",
}


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'tutti' has no attribute {name!r}; it has {sorted(_EXPORTS)}")
    from importlib import import_module

    return getattr(import_module(_EXPORTS[name]), name)
