"""Disks that fill up under a pool: a small file system, and a limit on the size of files."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
from collections import Counter
from pathlib import Path

import numpy as np
from crash.objects import check_books, content_of, load_present, make_files
from soak.oracle import Oracle
from soak.processes import Say, in_child
from soak.traffic import PAGES, Room, Shared, Traffic, in_threads

import tutti.store
from store.pools import LAYOUT
from tutti.gio_uring.controller_file import uring_refusal
from tutti.medium.geometry import Geometry

GEOMETRY = Geometry(LAYOUT.layers, LAYOUT.segments, 4096, 4, 24)
STEPS = 40
THREADS = 2
EPISODE_MAX_S = 120.0


def run(seed: int, folder: Path, tally: Counter[str]) -> None:
    """A store whose disk is full for a while: typed errors, no wrong byte, and then all is well."""
    rng = np.random.default_rng(seed)
    small = bool(rng.random() < 0.6) and _mount(folder)
    try:
        path = str(folder / "member0")
        make_files([path], GEOMETRY)

        def body(say: Say) -> None:
            counts: Counter[str] = Counter()
            try:
                _live(seed, path, counts, small=small)
            finally:
                say(["tally", dict(counts)])

        for report in in_child(body, EPISODE_MAX_S):
            tally.update(report[1])
    finally:
        if small:
            subprocess.run(["umount", "--lazy", str(folder)], check=True, timeout=60)
    tally["full file systems" if small else "limits on the size of files"] += 1


def _mount(folder: Path) -> bool:
    """A file system in memory with room for one pool; False where this may not be done."""
    nbytes = GEOMETRY.member_nbytes + (256 << 10)
    options = ["-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", str(folder)]
    try:
        return subprocess.run(["mount", *options], capture_output=True, timeout=60).returncode == 0
    except FileNotFoundError:
        return False


def _live(seed: int, path: str, tally: Counter[str], *, small: bool) -> None:
    rng = np.random.default_rng([seed, 1])
    executor = "threads" if small or rng.random() < 0.4 or uring_refusal() else "uring"
    durability = str(rng.choice(["process", "flush"]))
    oracle = Oracle(keeps=False)
    with tutti.store.open(path, executor=executor, durability=durability) as store:
        store.wait_recovered(20)
        memory = store.allocate_memory(PAGES * THREADS, hugepages=False)
        shared = Shared([], Room(None), fails=True)
        traffic = [
            Traffic(store, oracle, memory, at * PAGES, np.random.default_rng([seed, at]), shared)
            for at in range(THREADS)
        ]

        def work(one: Traffic) -> None:
            for _ in range(STEPS):
                one.step()

        def phase() -> None:
            in_threads([lambda one=one: work(one) for one in traffic])  # type: ignore[misc]

        phase()
        if small:  # clear gives the space back, and another file takes it
            store.clear(deallocate=True)
            with contextlib.suppress(OSError), open(f"{path}.other", "wb") as other:
                while other.write(bytes(1 << 20)):  # bounded by the file system
                    other.flush()
        else:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            limit = int(rng.integers(GEOMETRY.table_offset, GEOMETRY.member_nbytes))
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        before = sum(one.tally["error CapacityError"] for one in traffic)
        phase()
        tally["faults full disk"] += (
            sum(one.tally["error CapacityError"] for one in traffic) - before
        )
        if small:
            os.unlink(f"{path}.other")
        else:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        phase()
        store.unregister(memory)
        for one in traffic:
            tally.update(one.tally)
        if store._core.failure is not None:
            tally["stores that stopped"] += 1
            return
        check_books(store)
        present, damaged = load_present(store, oracle.known())
        tally["bytes verified"] += len(present) * len(content_of(b""))
        tally["damaged objects refused"] += len(damaged)
        check_books(store)
