"""Documents are computed once, offline, and pinned, so that they are never evicted.

    python examples/precompute.py /tmp/pool.tutti

`tutti ls`, `tutti pin` and `tutti rm` do the same from the command line.
"""

from __future__ import annotations

import sys

from tiny import LAYOUT, compute_page, keys_of, prompt

import tutti

DOCUMENTS = {"handbook": 1, "contract": 2, "draft": 3}
PAGES = 6


def main(path: str) -> None:
    """Stores three documents, pins two, deletes one, and shows what is there."""
    with tutti.open(path, layout=LAYOUT, capacity="64MiB") as store:
        memory = store.allocate_memory(PAGES)
        for name, seed in DOCUMENTS.items():
            keys = keys_of(prompt(seed, PAGES))
            for page, key in enumerate(keys):
                memory.write(page, compute_page(key))
            store.put(keys, range(PAGES), namespace=name).wait()
        for name in ("handbook", "contract"):
            pinned = store.catalogue.pin(keys_of(prompt(DOCUMENTS[name], PAGES)))
            print(f"{name}: {pinned} pages pinned")
        deleted = store.catalogue.delete(keys_of(prompt(DOCUMENTS["draft"], PAGES)))
        print(f"draft: {deleted} pages deleted")
    with tutti.open(path, layout=LAYOUT) as store:  # a later process
        for name, seed in DOCUMENTS.items():
            print(f"{name}: {store.match(keys_of(prompt(seed, PAGES)))} pages found")


if __name__ == "__main__":
    main(sys.argv[1])
