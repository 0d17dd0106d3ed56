"""A storm of Ctrl-C on a busy store; test_interrupts.py runs it as `python storm.py PATH N HOW`.

It prints one line of JSON: what is left in flight, in slots and in staging when all has ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import threading
import time
from types import FrameType

import numpy as np
from scheduler.drive import Linear

import tutti
from tutti.base import interrupts
from tutti.errors import ConfigError, KeyMissing, TuttiError
from tutti.memory.host_memory import HostMemory
from tutti.scheduler.dispatcher import Schedule
from tutti.store import ObjectStore
from tutti.transfers.store_config import StoreConfig

LAYOUT = tutti.KVLayout.mha(
    layers=2, kv_heads=2, head_dim=64, page_size=16, dtype="bfloat16", model="test-model"
)
PAGES = 48
QUIET_S = 60.0
#: The storm waits while more calls go on, or a slow machine has ever more threads to serve.
CALLS_MAX = 32
PAUSES_MAX = 1000  # of 10 ms, until fewer go on


class Storm:
    """Sends SIGINT to this process until `wanted` of them were raised within `traffic`."""

    def __init__(self, wanted: int, seed: int) -> None:
        self.wanted = wanted
        self.raised = 0
        self._random = random.Random(seed)
        signal.signal(signal.SIGINT, self._strike)
        self._thread = threading.Thread(target=self._send, daemon=True)
        self._thread.start()

    @property
    def over(self) -> bool:
        return self.raised >= self.wanted

    def _strike(self, number: int, frame: FrameType | None) -> None:
        """Raises in the traffic alone, and nothing in the loop that begins it again."""
        while frame is not None:
            if frame.f_code is traffic.__code__ and not self.over:
                self.raised += 1
                raise KeyboardInterrupt
            frame = frame.f_back

    def _send(self) -> None:
        while not self.over:
            # Some strike twice, into what the first one began to undo.
            for _ in range(self._random.choice((1, 1, 1, 2, 5))):
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(self._random.random() * 0.0005)
            time.sleep(self._random.random() * 0.01)
            for _ in range(PAUSES_MAX):
                if len(interrupts._running) > CALLS_MAX:
                    time.sleep(0.01)


def traffic(store: ObjectStore, memory: HostMemory, rng: np.random.Generator) -> None:
    """Every call that takes something, in random order, until it is interrupted."""
    while True:
        keys = rng.integers(0, 256, (6, 16), np.uint8)
        keys[:, 1:] = 0  # few enough that they meet again
        pages = rng.permutation(PAGES)[:6]
        turn = rng.integers(0, 24)
        with contextlib.suppress(KeyMissing):
            if turn < 8:
                put = store.put(keys, pages, memory=memory)
                if turn % 2:
                    put.wait()
            elif turn < 16:
                there = store.present(keys, pin="load")
                load = store.load(keys[there], pages[there], memory=memory)
                if turn % 2:
                    load.wait()
                    load.wait_settled()
                store.unpin("load")
            elif turn < 20:
                store.match(keys, pin=bool(turn % 2))
            elif turn == 20:
                store.unregister(store.allocate_memory(2))
            elif turn == 21:
                store.clear(deallocate=False)
            elif turn == 22:
                store.quarantine(keys[:0])
                store.prove(1)
            else:
                store.stats()


def left(store: ObjectStore, memory: HostMemory) -> dict[str, object]:
    """Resources that are still taken when everything under way has ended."""
    core = store._core
    end_s = time.monotonic() + QUIET_S
    while interrupts._running and time.monotonic() < end_s:
        time.sleep(0.01)  # calls that were interrupted twice go on in their own threads
    quiet = core.wait_quiet(QUIET_S)
    for other in list(store._resources.memories):
        if other is not memory:  # of a call that was interrupted twice, and may still be undone
            with contextlib.suppress(ConfigError):
                store.unregister(other)
    store.unpin()
    stats = store.stats()
    slots = stats["slots"]
    tables = (store._reclaimer._table, store._writer._table, store._loader._table)
    return {
        "quiet": quiet,
        "in flight": core.in_flight,
        "writing": slots.get("writing", 0) + slots.get("voiding", 0),
        "busy": stats["busy_objects"],
        "kept": store._core.lookup_pins.count,
        "staging": [len(table._free) for table in tables],
        "slots": slots["ready"] + stats["free_objects"] + slots["quarantined"]
        == stats["capacity_objects"],
    }


def main() -> None:
    path, wanted, how = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    schedule = Schedule(Linear()) if how == "scheduled" else None
    store = tutti.open(path, LAYOUT, "8MiB", config=StoreConfig(schedule=schedule, timeout_s=20.0))
    memory = store.allocate_memory(PAGES)
    seed = int.from_bytes(os.urandom(4), "little")
    rng, storm = np.random.default_rng(seed), Storm(wanted, seed)
    while not storm.over:
        with contextlib.suppress(KeyboardInterrupt):
            traffic(store, memory, rng)
    found: dict[str, object] = {"raised": storm.raised, "seed": seed}
    try:
        found |= left(store, memory)
        store.clear()
        keys = rng.integers(0, 256, (4, 16), np.uint8)
        found["stored"] = store.put(keys, np.arange(4), memory=memory).wait().stored
        store.close()
        core = store._core  # why it would not be clean
        found["why"] = [core.in_flight, core.leave_open, core.unproven, repr(core.failure)]
        with tutti.open(path) as again:
            found["snapshot"] = again.stats()["proven"] == 0 and again.match(keys) == 4
    except TuttiError as error:
        found["error"] = repr(error)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
