"""A client process that stores and loads chains and compares every byte, until SIGTERM.

    worker.py SOCKET SEED CHAINS ACKNOWLEDGED

The content of a page follows from its key.  Keys of acknowledged puts are appended to the file
ACKNOWLEDGED; the last line of output is the outcome, as JSON.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

import tutti
from tutti.errors import ChecksumMismatch, KeyMissing, MediumError, TuttiError
from tutti.node.client import NodeStore
from tutti.transfers.tickets import Outcome

LAYOUT = tutti.KVLayout.mha(
    layers=4, kv_heads=2, head_dim=64, page_size=16, dtype="bfloat16", model="test-model"
)
CHAIN_PAGES = 16
WAIT_S = 60.0


def chain(number: int) -> npt.NDArray[np.uint8]:
    keys = [xxhash.xxh3_128_digest(b"%d/%d" % (number, page)) for page in range(CHAIN_PAGES)]
    return np.frombuffer(b"".join(keys), np.uint8).reshape(-1, 16)


def content(key: bytes) -> bytes:
    return np.random.default_rng(list(key)).bytes(LAYOUT.object_nbytes)


def main(path: str, seed: int, chains: int, acknowledged: str) -> None:
    ended: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: ended.append(number))
    rng = np.random.default_rng(seed)
    counts = {"loaded": 0, "stored": 0, "missed": 0, "errors": 0, "wrong": 0, "wrong_keys": []}
    log = os.open(acknowledged, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    with connected(path) as store:
        memory = store.allocate_memory(2 * CHAIN_PAGES)
        print("running", flush=True)
        while not ended:
            turn(store, memory, chain(int(rng.integers(chains))), counts, log)
        counts["reconnects"] = store.stats()["reconnects"]
    print(json.dumps(counts), flush=True)


def connected(path: str) -> NodeStore:
    """A client, as soon as there is an agent."""
    deadline_s = time.monotonic() + WAIT_S
    while True:
        try:
            return tutti.connect(path, LAYOUT, "64MiB", lookup_timeout_s=2.0)
        except TuttiError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.1)


def turn(
    store: NodeStore,
    memory: tutti.HostMemory,
    keys: npt.NDArray[np.uint8],
    counts: dict[str, object],
    log: int,
) -> None:
    """Loads what there is of a chain, compares it, and stores the rest."""

    def count(name: str, n: int) -> None:
        counts[name] = int(counts[name]) + n  # type: ignore[call-overload]

    found = store.match(keys)
    count("missed", CHAIN_PAGES - found)
    if found:
        try:
            ticket = store.load(keys[:found], np.arange(found))
            try:
                ticket.wait(WAIT_S)
            except (ChecksumMismatch, MediumError):
                count("errors", 1)
            assert ticket.wait_settled(WAIT_S)
            bad = set(ticket.failed().tolist())
            for page in set(range(found)) - bad:
                if memory.read(page) != content(keys[page].tobytes()):
                    count("wrong", 1)
            count("loaded", found - len(bad))
        except KeyMissing:
            pass
    if found < CHAIN_PAGES:
        rest = np.arange(found, CHAIN_PAGES)
        for page in rest.tolist():
            memory.write(CHAIN_PAGES + page, content(keys[page].tobytes()))
        parent = keys[found - 1].tobytes() if found else None
        put = store.put(keys[rest], CHAIN_PAGES + rest, parent=parent, depth=found)
        try:
            put.wait(WAIT_S)
        except MediumError:
            count("errors", 1)
        stored = rest[put.outcome == Outcome.STORED]
        os.write(log, keys[stored].tobytes())
        count("stored", stored.size)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    Path(sys.argv[4]).touch()
