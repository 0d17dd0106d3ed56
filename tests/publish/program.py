"""A user's program, typed: it runs against the installed package and passes mypy's strict mode."""

from __future__ import annotations

import sys

import numpy as np

import tutti


def main(path: str) -> None:
    """Stores and loads two pages."""
    layout = tutti.KVLayout.mha(
        layers=2, kv_heads=1, head_dim=64, page_size=32, dtype="float16", model="m"
    )
    keys = tutti.chain_keys(layout.fingerprint, np.arange(64), layout.page_size)
    with tutti.open(path, layout=layout, capacity="8MiB") as store:
        memory: tutti.HostMemory = store.allocate_memory(pages=4)
        memory.write(0, bytes(layout.object_nbytes))
        put: tutti.PutTicket = store.put(keys, [0, 1])
        put.wait()
        load: tutti.LoadTicket = store.load(keys[: store.match(keys)], [2, 3])
        for layer in range(layout.layers):
            load.wait_layer(layer)
        assert memory.read(2) == memory.read(0)
    print("stored and loaded")


if __name__ == "__main__":
    main(sys.argv[1])
