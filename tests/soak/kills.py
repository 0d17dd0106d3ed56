"""Processes that are killed, and copies of their pool while they use it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from crash.objects import check_books, check_usable, load_present, make_files, when_unlocked
from soak.oracle import Finding, Oracle
from soak.processes import Child, Say, in_child
from soak.traffic import PAGES, Room, Shared, Traffic, in_threads

import tutti.store
from store.pools import LAYOUT
from tutti.errors import PoolInUse
from tutti.gio_uring.controller_file import uring_refusal
from tutti.medium.geometry import Geometry

VICTIMS = 12
STEPS_MAX = 60  # of each thread of a victim that is killed in its close or ends by itself
STEPS_UNTIL_KILLED = 5000
#: What a victim has said when the time until its kill begins to run.
MOMENTS = ("opened", "opened", "opened", "put_ends", "clear_begins", "closing", "begun")
LIFE_MAX_S = 60.0
CHECK_MAX_S = 120.0
KNOWN_MAX = 200  # cleared keys that a check looks for
DECADE_S = 10 * 365 * 86_400.0


class Campaign:
    """One pool, and the processes that die on it."""

    def __init__(self, seed: int, folder: Path, tally: Counter[str]) -> None:
        self.rng = rng = np.random.default_rng(seed)
        self.tally = tally
        self.folder = folder
        keeps = bool(rng.random() < 0.7)
        self.oracle = Oracle(keeps=keeps)
        self.options = {
            "executor": "threads" if rng.random() < 0.4 or uring_refusal() else "uring",
            "durability": "flush" if rng.random() < 0.3 else "process",
        }
        self.threads = int(rng.integers(1, 4))
        geometry = Geometry(LAYOUT.layers, LAYOUT.segments, 4096, 4, 96 if keeps else 8)
        self.paths = [str(folder / f"member{i}") for i in range(int(rng.integers(1, 3)))]
        make_files(self.paths, geometry)
        self.slots = geometry.slots * len(self.paths)

    def run(self) -> None:
        for _ in range(VICTIMS):
            self._victim()
            # After a death in a clear always: the next clear would hide whether this one happened.
            if self.rng.random() < 0.75 or self.oracle.clearing:
                self._check(self.paths, torn=False)
            self.oracle.forget(self.rng, KNOWN_MAX)
        self._check(self.paths, torn=False)

    def _victim(self) -> None:
        rng, oracle = self.rng, self.oracle
        seed = int(rng.integers(2**63))
        left = self.slots // 2 - len(oracle.must()) - 16 * self.threads
        room = max(0, left) if oracle.keeps else None
        moment = str(rng.choice(MOMENTS))
        closes = moment == "closing"
        steps = int(rng.integers(STEPS_MAX)) if closes else STEPS_UNTIL_KILLED
        child = Child(lambda say: self._live(say, seed, room, steps))
        delay_s = float(rng.random() ** 2 * (0.4 if moment in ("opened", "begun") else 0.02))
        copies = rng.random() < 0.5
        kill_s, deadline_s, killed = float("inf"), time.monotonic() + LIFE_MAX_S, False
        while not child.ended:
            now_s = time.monotonic()
            for report in child.reports(max(0.0, min(0.2, kill_s - now_s))):
                if report[0] in (moment, "closing") and kill_s == float("inf"):
                    kill_s = time.monotonic() + delay_s
                self._hear(report)
            if now_s >= kill_s and not killed:
                if copies:
                    self._copy(child)
                    copies = False
                killed = child.kill()
                kill_s = deadline_s
            if now_s > deadline_s:
                child.kill()
                child.wait()
                raise Finding(f"a victim hangs {LIFE_MAX_S:g} s after its start")
        status = child.wait()
        if child.failure:
            raise Finding(child.failure)
        if status not in (0, signal.SIGKILL):
            raise Finding(f"a victim ended with status {status}")
        self.tally["kills" if status else "victims that ended by themselves"] += 1

    def _hear(self, report: list[Any]) -> None:
        if report[0] == "tally":
            self.tally.update(report[1])
        elif report[0] not in ("begun", "opened", "closing", "closed"):
            self.oracle.follow(report)

    def _live(self, say: Say, seed: int, room: int | None, steps: int) -> None:
        rng = np.random.default_rng(seed)
        if rng.random() < 0.3:
            jumping_clock(rng)
        say(["begun"])
        store = when_unlocked(lambda: tutti.store.open(self.paths, **self.options))
        store.wait_recovered(20)
        memory = store.allocate_memory(PAGES * self.threads, hugepages=False)
        say(["opened"])
        self.oracle.tell = say
        shared = Shared(self.oracle.known(), Room(room))
        traffic = [
            Traffic(
                store, self.oracle, memory, at * PAGES, np.random.default_rng([seed, at]), shared
            )
            for at in range(self.threads)
        ]

        def work(one: Traffic) -> None:
            for _ in range(steps):
                one.step()
                say(["tally", dict(one.tally)])
                one.tally.clear()

        in_threads([lambda one=one: work(one) for one in traffic])  # type: ignore[misc]
        say(["closing"])
        store.close()
        say(["closed"])

    def _copy(self, child: Child) -> None:
        """Copies the members while the victim writes: nothing orders the copies' parts."""
        must = self.oracle.must()
        moment = self.oracle.look_begins()
        copies = [f"{path}.copy" for path in self.paths]
        try:
            for path, copy in zip(self.paths, copies, strict=True):
                shutil.copyfile(path, copy)
            contender = self._contends()
            for report in child.reports(0.0):
                self._hear(report)
            if self.oracle.cleared_since(moment) or not contender:
                must = frozenset()
            self._check(copies, torn=True, must=must)
        finally:
            for copy in copies:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(copy)

    def _contends(self) -> bool:
        """Another process opens the pool, which its owner has; whether the owner still lives."""

        def body(say: Say) -> None:
            try:
                tutti.store.open(self.paths).close()
            except PoolInUse:
                say(["refused"])

        reports = in_child(body, CHECK_MAX_S)
        self.tally["refused openings"] += len(reports)
        return bool(reports)

    def _check(self, paths: list[str], *, torn: bool, must: frozenset[bytes] = frozenset()) -> None:
        """What the pool holds is what the oracle allows, and the pool can be used."""
        known = self.oracle.known()
        fresh = [] if torn else [self.rng.bytes(16) for _ in range(3)]
        executor = self.options["executor"]

        def body(say: Say) -> None:
            with when_unlocked(lambda: tutti.store.open(paths, LAYOUT, executor=executor)) as store:
                store.wait_recovered(20)
                check_books(store)
                present, damaged = load_present(store, known)
                say(["present", [key.hex() for key in sorted(present)]])
                say(["damaged", [key.hex() for key in sorted(damaged)]])
                if fresh:
                    check_usable(store, fresh)
                check_books(store)

        found = dict(in_child(body, CHECK_MAX_S))
        present = {bytes.fromhex(key) for key in found["present"]}
        self.tally["bytes verified"] += len(present) * LAYOUT.object_nbytes
        if torn:
            self.tally["torn copies"] += 1
            self.tally["damaged objects refused"] += len(found["damaged"])
            if lost := must - present:
                raise Finding(f"{len(lost)} of {len(must)} objects are not in a copy")
            return
        self.tally["recoveries checked"] += 1
        if found["damaged"]:
            raise Finding(f"{len(found['damaged'])} records are there without their data")
        self.oracle.settle(present)
        begun = self.oracle.put_begins(fresh)
        self.oracle.put_ends(begun, fresh, acknowledged=True)


def jumping_clock(rng: np.random.Generator) -> None:
    """The wall clock of this process jumps by years, both ways, at every tenth look or so."""
    real, offset_s = time.time, [0.0]

    def now_s() -> float:
        if rng.random() < 0.1:
            offset_s[0] = float(rng.uniform(-DECADE_S, DECADE_S))
        return real() + offset_s[0]

    time.time = now_s
    time.time_ns = lambda: int(now_s() * 1e9)


def run(seed: int, folder: Path, tally: Counter[str]) -> None:
    """One campaign."""
    Campaign(seed, folder, tally).run()
