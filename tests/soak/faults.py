"""A store over a drive in memory that fails in every way that a seed can draw."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
from crash.objects import check_books, load_present
from memory_controller import Faults, MemoryController
from soak.oracle import Finding, Oracle
from soak.traffic import PAGES, WAIT_S, Room, Shared, Traffic, in_threads

from store.pools import GEOMETRY, LAYOUT, controller_of, formatted, opened
from tutti.gio_uring import nvme_spec
from tutti.gio_uring.nvme_spec import (
    OPCODE_DATASET_MANAGEMENT,
    OPCODE_FLUSH,
    OPCODE_READ,
    OPCODE_WRITE,
)
from tutti.store import ObjectStore

KINDS = ("none", "status", "range", "short", "torn", "lost", "slow", "stall")
PHASES = 6
STEPS = 25  # of each thread in each phase
STATUS_MAX = 0x7FF
SPECIFIED = [n for name, n in vars(nvme_spec).items() if name.startswith("STATUS_") and n]
OPCODES = (OPCODE_READ, OPCODE_WRITE, OPCODE_FLUSH, OPCODE_DATASET_MANAGEMENT)


def some_status(rng: np.random.Generator) -> int:
    """One that NVMe or Tutti names, or any other that fits into the field."""
    if rng.random() < 0.6:
        return int(rng.choice(SPECIFIED))
    return int(rng.integers(1, STATUS_MAX + 1))


def drawn(kind: str, rng: np.random.Generator) -> Faults:
    """Faults of one kind."""
    base = Faults(seed=int(rng.integers(2**63)), reorder_ppm=100_000)
    ppm = int(10 ** rng.uniform(3.3, 5.3))
    if kind == "status":
        return replace(base, status_ppm=ppm, status=some_status(rng))
    if kind == "short":
        return replace(base, short_ppm=ppm, short_status=some_status(rng))
    if kind == "torn":
        silent = rng.random() < 0.5
        return replace(base, torn_ppm=ppm, torn_status=0 if silent else some_status(rng))
    if kind == "lost":
        return replace(base, lost_ppm=ppm)
    if kind == "slow":
        return replace(base, delay_ppm=900_000, delay_turns=int(rng.integers(8, 400)))
    return base


class Scene:
    """One store, its drive, and phases of faults."""

    def __init__(self, seed: int, tally: Counter[str]) -> None:
        self.rng = rng = np.random.default_rng(seed)
        self.tally = tally
        self.seed = seed
        self.members = int(rng.integers(1, 3))
        self.geometry = replace(GEOMETRY, groups=int(rng.choice([8, 96])))
        self.kinds = [str(kind) for kind in rng.choice(KINDS, PHASES)]
        honest = not set(self.kinds) - {"none", "slow"}
        self.keeps = honest and self.geometry.groups == 96
        self.fails = not honest
        self.oracle = Oracle(keeps=self.keeps)
        self.threads = int(rng.integers(1, 5))

    def run(self) -> None:
        images = formatted(LAYOUT, self.geometry, self.members)
        controller = controller_of(images)
        config = {
            "durability": str(self.rng.choice(["process", "flush"])),
            "digest_cache_nbytes": int(self.rng.choice([0, 4096, 1 << 20])),
            "pin_share": float(self.rng.choice([0.5, 1.0])),
        }
        with opened(images, controller=controller, **config) as store:
            store.wait_recovered(WAIT_S)
            memory = store.allocate_memory(PAGES * self.threads, hugepages=False)
            room = Room(self.geometry.slots * self.members // 2 if self.keeps else None)
            shared = Shared([], room, fails=self.fails)
            traffic = [
                Traffic(
                    store, self.oracle, memory, at * PAGES, np.random.default_rng([self.seed, at]),
                    shared,
                )
                for at in range(self.threads)
            ]  # fmt: skip
            for kind in self.kinds:
                if store._core.failure is None:
                    self._phase(kind, controller, traffic)
            store.unregister(memory)
            self._quiet(store)
            for one in traffic:
                self.tally.update(one.tally)

    def _phase(self, kind: str, controller: MemoryController, traffic: list[Traffic]) -> None:
        before = controller.stats()
        controller.set_faults(drawn(kind, self.rng))
        if kind == "range":
            self._ranges(controller)
        ended = threading.Event()

        def work(one: Traffic) -> None:
            for _ in range(STEPS):
                one.step()

        stalls = np.random.default_rng(int(self.rng.integers(2**63)))
        others = [lambda: self._stall(controller, stalls, ended)] if kind == "stall" else []

        def all_work() -> None:
            try:
                in_threads([lambda one=one: work(one) for one in traffic])  # type: ignore[misc]
            finally:
                ended.set()

        in_threads([all_work, *others])
        after = controller.stats()
        controller.set_faults(None)
        self.tally[f"phases of {kind}"] += 1
        self.tally[f"faults {kind}"] += int(after.faults - before.faults)
        self.tally["drive commands"] += int(after.commands - before.commands)

    def _ranges(self, controller: MemoryController) -> None:
        """Places that fail a few times: data, records, superblocks."""
        for _ in range(int(self.rng.integers(1, 12))):
            nsid = int(self.rng.integers(1, self.members + 1))
            table = self.geometry.table_offset // 4096
            data = self.geometry.groups_offset // 4096
            places = [0, table, data, data + int(self.rng.integers(64))]
            start = int(self.rng.choice(places, p=[0.05, 0.35, 0.3, 0.3]))
            nlb = int(self.rng.integers(1, 64))
            opcode = int(self.rng.choice(OPCODES, p=[0.4, 0.4, 0.1, 0.1]))
            count = int(self.rng.integers(1, 6))
            controller.fault_range(nsid, start, nlb, opcode, some_status(self.rng), count)

    def _stall(
        self, controller: MemoryController, rng: np.random.Generator, ended: threading.Event
    ) -> None:
        """The drive falls silent, again and again, for less than a command may take."""
        while not ended.is_set():  # bounded: the other threads' waits have deadlines
            controller.set_faults(Faults(stall_from=int(rng.integers(1, 20))))
            ended.wait(float(rng.uniform(0.01, 0.1)))
            self.tally["faults stall"] += int(controller.stats().unanswered)
            controller.set_faults(None)
            controller.release()
            ended.wait(float(rng.uniform(0.0, 0.03)))

    def _quiet(self, store: ObjectStore) -> None:
        """With a sound drive nothing is left under way, and what is served is right."""
        self.tally["stores checked"] += 1
        if store._core.failure is not None:
            self.tally["stores that stopped"] += 1
            return
        check_books(store)
        known = self.oracle.known()[-400:]
        present, damaged = load_present(store, known)
        self.tally["bytes verified"] += len(present) * LAYOUT.object_nbytes
        self.tally["damaged objects refused"] += len(damaged)
        if damaged and self.keeps:
            raise Finding(f"{len(damaged)} objects are damaged on a sound drive")
        check_books(store)


def run(seed: int, folder: Path, tally: Counter[str]) -> None:
    """One store from open to close; what it opened and started is gone afterwards."""
    del folder
    before = _owned()
    Scene(seed, tally).run()
    deadline_s = time.monotonic() + 5
    while (after := _owned()) > before and time.monotonic() < deadline_s:
        time.sleep(0.01)
    if after > before:
        raise Finding(f"file descriptors and threads: {before} before, {after} after")


def _owned() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), threading.active_count()
