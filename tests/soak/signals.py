"""Ctrl-C, thousands of times and at any moment, in a thread that uses a store."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from crash.objects import as_rows, check_books, check_usable, content_of, load_present, make_files
from soak.oracle import Finding
from soak.processes import Say, in_child

import tutti.store
from store.pools import LAYOUT
from tutti.errors import TuttiError
from tutti.gio_uring.controller_file import uring_refusal
from tutti.medium.geometry import Geometry
from tutti.store import ObjectStore

GEOMETRY = Geometry(LAYOUT.layers, LAYOUT.segments, 4096, 4, 16)
SIGNALS = 500
KEYS = 8
QUIET_MAX_S = 20.0
WAIT_S = 30.0
EPISODE_MAX_S = 200.0


def run(seed: int, folder: Path, tally: Counter[str]) -> None:
    """A storm of SIGINT over puts, loads and look-ups: afterwards nothing is left under way."""
    path = str(folder / "member0")
    make_files([path], GEOMETRY)

    def body(say: Say) -> None:
        counts: Counter[str] = Counter()
        try:
            _live(seed, path, counts)
        finally:
            say(["tally", dict(counts)])

    for report in in_child(body, EPISODE_MAX_S):
        tally.update(report[1])


def _live(seed: int, path: str, tally: Counter[str]) -> None:
    rng = np.random.default_rng(seed)
    executor = "threads" if rng.random() < 0.5 or uring_refusal() else "uring"
    interrupt = Interrupt()
    signal.signal(signal.SIGINT, interrupt)
    with tutti.store.open(path, executor=executor) as store:
        store.wait_recovered(20)
        memory = store.allocate_memory(2 * KEYS, hugepages=False)
        keys = [rng.bytes(16) for _ in range(200)]
        over = threading.Event()
        storm = threading.Thread(target=_storm, args=(int(rng.integers(2**32)), over, tally))
        storm.start()
        while not over.is_set():  # bounded by the storm
            try:
                interrupt.armed = True
                _operate(store, memory, keys, rng)
                interrupt.armed = False
            except KeyboardInterrupt:  # what it began may still use the pages
                tally["operations interrupted"] += 1
                _wait_quiet(store)
            except TuttiError as error:
                interrupt.armed = False
                tally[f"error {type(error).__name__}"] += 1
            tally["operations"] += 1
        storm.join(60)
        tally["signals"] += SIGNALS
        _wait_quiet(store)
        store.unregister(memory)
        check_books(store)
        present, damaged = load_present(store, keys)
        tally["bytes verified"] += len(present) * LAYOUT.object_nbytes
        if damaged:
            raise Finding(f"{len(damaged)} objects are damaged after a storm")
        store.clear()
        check_usable(store, keys[:4])
        check_books(store)


def _storm(seed: int, over: threading.Event, tally: Counter[str]) -> None:
    rng = np.random.default_rng(seed)
    try:
        for _ in range(SIGNALS):
            time.sleep(float(rng.exponential(0.002)))
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        over.set()


def _operate(store: ObjectStore, memory: Any, keys: list[bytes], rng: np.random.Generator) -> None:
    """One operation, whose pages are settled before the next one uses them."""
    picked = [keys[at] for at in rng.choice(len(keys), KEYS, replace=False).tolist()]
    if rng.random() < 0.5:
        for page, key in enumerate(picked):
            memory.write(page, content_of(key))
        ticket = store.put(as_rows(picked), np.arange(KEYS))
        ticket.wait(WAIT_S)
        return
    picked = picked[: store.match(as_rows(picked), pin="storm")]
    if picked:
        ticket = store.load(as_rows(picked), KEYS + np.arange(len(picked)))
        ticket.wait_settled(WAIT_S)
        if not ticket.failed().size:
            for at, key in enumerate(picked):
                if memory.read(KEYS + at) != content_of(key):
                    raise Finding(f"key {key.hex()} serves other bytes")


def _wait_quiet(store: ObjectStore) -> None:
    if not store._core.wait_quiet(QUIET_MAX_S):
        slots = store.stats()["slots"]
        raise Finding(f"in flight after an interrupt: {store._core.in_flight}, {slots}")


class Interrupt:
    """Raises once for each time it is armed, so that no interrupt hits what cleans up."""

    armed = False

    def __call__(self, number: int, frame: object) -> None:
        if self.armed:
            self.armed = False
            raise KeyboardInterrupt
