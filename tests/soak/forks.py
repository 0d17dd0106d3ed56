"""Children that a process with an open pool forks, and which end in every way there is.

    python -m soak.forks SEED FILE

is the process that forks: a child that exits there ends as any program does, finalisers included.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from crash.objects import check_books, load_present, make_files
from soak.oracle import Finding, Oracle
from soak.processes import Say, in_child
from soak.traffic import PAGES, Room, Shared, Traffic

import tutti.store
from store.pools import LAYOUT
from tutti.errors import PoolInUse, TuttiError
from tutti.gio_uring.controller_file import uring_refusal
from tutti.medium.geometry import Geometry
from tutti.store import ObjectStore

GEOMETRY = Geometry(LAYOUT.layers, LAYOUT.segments, 4096, 4, 96)
FORKS = 6
STEPS = 15
CHILD_MAX_S = 30.0
USED = 77  # the status of a child that could use the store
EPISODE_MAX_S = 300.0


def run(seed: int, folder: Path, tally: Counter[str]) -> None:
    """A store whose process forks between its operations: the store does not notice."""
    path = str(folder / "member0")
    make_files([path], GEOMETRY)
    done = subprocess.run(
        [sys.executable, "-m", "soak.forks", str(seed), path],
        capture_output=True,
        text=True,
        timeout=EPISODE_MAX_S,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    if done.returncode:
        raise Finding(done.stderr[-3000:])
    tally.update(json.loads(done.stdout.splitlines()[-1]))


def _live(seed: int, path: str, tally: Counter[str]) -> None:
    rng = np.random.default_rng(seed)
    executor = "threads" if rng.random() < 0.5 or uring_refusal() else "uring"
    oracle = Oracle(keeps=True)
    with tutti.store.open(path, executor=executor) as store:
        store.wait_recovered(20)
        memory = store.allocate_memory(PAGES, hugepages=False)
        shared = Shared([], Room(GEOMETRY.slots // 2))
        traffic = Traffic(store, oracle, memory, 0, np.random.default_rng([seed, 1]), shared)
        for _ in range(FORKS):
            for _ in range(STEPS):
                traffic.step()
            name = str(rng.choice(list(ENDS)))
            end, expected = ENDS[name]
            if (status := _fork(end, store)) != expected:
                raise Finding(f"a forked child that should {name} ended with status {status}")
            tally["forks"] += 1
            tally[f"forks that {name}"] += 1
            _still_ours(path)
        store.unregister(memory)
        check_books(store)
        must = oracle.must()
        present, damaged = load_present(store, oracle.known())
        if damaged or must - present:
            raise Finding(f"{len(damaged)} objects damaged, {len(must - present)} lost after forks")
        tally.update(traffic.tally)


def _fork(end: Callable[[ObjectStore], Any], store: ObjectStore) -> int:
    """How the child ended: its exit status, or minus the signal."""
    pid = os.fork()
    if pid == 0:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 2)
        end(store)  # leaves this process as programs do: with finalisers, or without
        sys.exit(0)
    deadline_s = time.monotonic() + CHILD_MAX_S
    while True:  # bounded by the deadline
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline_s:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise Finding(f"a forked child does not end within {CHILD_MAX_S:g} s")
        time.sleep(0.002)


def _still_ours(path: str) -> None:
    """No other process may open the pool."""

    def body(say: Say) -> None:
        try:
            tutti.store.open(path).close()
        except PoolInUse:
            say(["refused"])

    if not in_child(body, 60.0):
        raise Finding("after a fork another process opens the pool")


def _use(store: ObjectStore) -> None:
    """Every call of the store in a child is refused at once."""
    for call in (lambda: store.match([bytes(16)]), lambda: store.clear(), lambda: store.prove()):
        try:
            call()
        except TuttiError:
            continue
        os._exit(USED)


#: How a child ends, and the status that it must have then.
ENDS: dict[str, tuple[Callable[[ObjectStore], Any], int]] = {
    "exit": (lambda store: sys.exit(0), 0),
    "end without finalisers": (lambda store: os._exit(0), 0),
    "raise": (lambda store: 1 // 0, 1),
    "are killed": (lambda store: os.kill(os.getpid(), signal.SIGKILL), -signal.SIGKILL),
    "close the store": (lambda store: store.close(), 0),
    "use the store": (_use, 0),
}


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    counted: Counter[str] = Counter()
    _live(int(sys.argv[1]), sys.argv[2], counted)
    print(json.dumps(counted))
