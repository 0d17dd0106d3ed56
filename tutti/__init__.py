"""Tutti: a key-value store on NVMe SSDs for the KV cache of large language models.

    with tutti.open("pool.tutti", layout=layout, capacity="8GiB") as store: ...

`open` opens a pool in this process, `connect` a pool that the node's agent serves.  `KVLayout`
describes pages, `HostMemory` holds them.  Errors are in `tutti.errors`.  The exported names are
imported on first use, so that importing a single module of the package stays cheap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tutti.interface import Store
    from tutti.medium.keys import chain_keys, object_keys
    from tutti.medium.layout import KVLayout
    from tutti.memory.host_memory import HostMemory
    from tutti.node.connect import connect
    from tutti.store import ObjectStore, format, open
    from tutti.transfers.store_config import StoreConfig
    from tutti.transfers.tickets import LoadTicket, PutResult, PutTicket

__version__ = "0.1.0"
__all__ = [
    "HostMemory",
    "KVLayout",
    "LoadTicket",
    "ObjectStore",
    "PutResult",
    "PutTicket",
    "Store",
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
    "LoadTicket": "tutti.transfers.tickets",
    "ObjectStore": "tutti.store",
    "PutResult": "tutti.transfers.tickets",
    "PutTicket": "tutti.transfers.tickets",
    "Store": "tutti.interface",
    "StoreConfig": "tutti.transfers.store_config",
    "chain_keys": "tutti.medium.keys",
    "connect": "tutti.node.connect",
    "format": "tutti.store",
    "object_keys": "tutti.medium.keys",
    "open": "tutti.store",
}


def __dir__() -> list[str]:
    return sorted(__all__)


if not TYPE_CHECKING:  # otherwise a type checker would accept every name

    def __getattr__(name):
        if name not in _EXPORTS:
            names = sorted(_EXPORTS)
            raise AttributeError(f"module 'tutti' has no attribute {name!r}; it has {names}")
        from importlib import import_module

        return getattr(import_module(_EXPORTS[name]), name)
