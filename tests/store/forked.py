"""A process that forks in many ways while its pool is open; test_fork.py runs it with a path.

It prints one line of JSON for each way: the worst exit status of the children, whether the pool was
still locked, and how many objects the parent read back as it had put them.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable

import numpy as np

import tutti
from tutti.errors import ForkedProcess
from tutti.store import ObjectStore

LAYOUT = tutti.KVLayout.mha(
    layers=2, kv_heads=2, head_dim=64, page_size=16, dtype="bfloat16", model="test-model"
)
OBJECTS = 40
DEADLINE_S = 60
_OPEN = "import sys, tutti; tutti.open(sys.argv[1])"


class Parent:
    """The open pool, with objects in it, a put and a load that are done, and memory."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.store = tutti.open(path, LAYOUT, "8MiB")
        self.pool = self.store.allocate_memory(2 * OBJECTS)
        rng = np.random.default_rng(7)
        self.keys = rng.integers(0, 256, (OBJECTS, 16), np.uint8)
        for page in range(OBJECTS):
            self.pool.write(page, rng.integers(0, 256, LAYOUT.object_nbytes, np.uint8))
        self.content = [self.pool.read(page) for page in range(OBJECTS)]
        self.put = self.store.put(self.keys, np.arange(OBJECTS))
        assert self.put.wait().stored == OBJECTS
        self.load = self.store.load(self.keys, np.arange(OBJECTS, 2 * OBJECTS))
        self.load.wait()

    def right(self) -> int:
        """How many objects are read back as they were put."""
        pages = np.arange(OBJECTS, 2 * OBJECTS)
        self.store.load(self.keys, pages).wait()
        return sum(
            self.pool.read(int(page)) == content
            for page, content in zip(pages, self.content, strict=True)
        )

    def is_locked(self) -> bool:
        """Whether no other process can lock the pool's file now."""
        with open(self.path, "rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False


def others_are_refused(path: str) -> bool:
    """Whether another process is told that the pool is in use."""
    command = [sys.executable, "-c", _OPEN, path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    return done.returncode != 0 and "PoolInUse" in done.stderr


def calls(parent: Parent) -> list[str]:
    """What every call in a child raises; "" for those that return."""
    store, pool, keys = parent.store, parent.pool, parent.keys
    pages = np.arange(len(keys))
    tried: list[Callable[[], object]] = [
        lambda: store.put(keys, pages),
        lambda: store.load(keys, pages),
        lambda: store.match(keys),
        lambda: store.present(keys),
        lambda: store.clear(),
        lambda: store.prove(),
        lambda: store.stats(),
        lambda: store.allocate_memory(1),
        lambda: store.wait_recovered(),
        lambda: store.engine,
        lambda: store.__enter__(),
        lambda: len(store),
        lambda: keys[0].tobytes() in store,
        lambda: parent.put.wait(),
        lambda: parent.load.wait(),
        lambda: parent.load.wait_settled(),
        lambda: parent.load.on_settled(print),
        lambda: parent.load.cancel(),
        lambda: parent.put.on_done(print),
        lambda: parent.put.outcome,
        lambda: parent.load.done,
        lambda: pool.read(0),
    ]
    return [_name_of(call) for call in tried]


def _name_of(call: Callable[[], object]) -> str:
    try:
        call()
    except BaseException as error:
        return type(error).__name__
    return ""


def exit_normally(parent: Parent) -> None:
    sys.exit(0)


def raise_uncaught(parent: Parent) -> None:
    raise RuntimeError("on purpose")


def exit_at_once(parent: Parent) -> None:
    os._exit(0)


def call_everything(parent: Parent) -> None:
    found = calls(parent)
    assert found == [ForkedProcess.__name__] * len(found), found
    assert all("object at" in repr(thing) for thing in (parent.store, parent.put, parent.load))
    parent.store.close()
    parent.store.__exit__(None, None, None)
    sys.exit(0)


def close_in_with(parent: Parent) -> None:
    """As a program whose body forks: the child leaves the block as well."""
    parent.store.__exit__(SystemExit, SystemExit(0), None)
    sys.exit(0)


def drop_everything(parent: Parent) -> None:
    parent.__dict__.clear()
    sys.exit(0)


def open_another(parent: Parent) -> None:
    """A child may have a pool of its own, and forks do not hurt that either."""
    with tutti.open(parent.path + ".child", LAYOUT, "8MiB") as store:
        pool = store.allocate_memory(1)
        assert store.put(parent.keys[:1], [0], memory=pool).wait().stored == 1
        if os.fork() == 0:
            sys.exit(0)
        assert os.wait()[1] == 0
        assert store.match(parent.keys[:1]) == 1
    sys.exit(0)


def _work(number: int) -> int:
    return number + 1


def fork(parent: Parent, child: Callable[[Parent], None]) -> int:
    """The child's exit status."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(DEADLINE_S)
        child(parent)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def fork_workers(parent: Parent) -> int:
    """As a server that opens first and then forks workers, which only serve."""
    pids = []
    for _ in range(3):
        pid = os.fork()
        if pid == 0:
            signal.alarm(DEADLINE_S)
            asyncio.run(asyncio.sleep(0.01))
            sys.exit(0)
        pids.append(pid)
    assert parent.right() == OBJECTS
    return max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids)


def fork_in_thread(parent: Parent) -> int:
    """While other threads of the parent hold its locks, as long as that takes to happen."""
    stop = threading.Event()

    def look_up() -> None:
        while not stop.is_set():
            parent.store.match(parent.keys)

    thread = threading.Thread(target=look_up)
    thread.start()
    codes = [fork(parent, call_everything) for _ in range(5)]
    stop.set()
    thread.join()
    return max(map(abs, codes))


def by_multiprocessing(parent: Parent, method: str) -> int:
    with multiprocessing.get_context(method).Pool(2) as pool:
        assert pool.map(_work, range(8)) == list(range(1, 9))
        pool.close()
        pool.join()
    return 0


CHILDREN: dict[str, Callable[[Parent], int]] = {
    "exit": lambda parent: fork(parent, exit_normally),
    "uncaught": lambda parent: fork(parent, raise_uncaught) - 1,
    "_exit": lambda parent: fork(parent, exit_at_once),
    "calls": lambda parent: fork(parent, call_everything),
    "with": lambda parent: fork(parent, close_in_with),
    "drop": lambda parent: fork(parent, drop_everything),
    "another": lambda parent: fork(parent, open_another),
    "workers": fork_workers,
    "threads": fork_in_thread,
    "mp-fork": lambda parent: by_multiprocessing(parent, "fork"),
    "mp-forkserver": lambda parent: by_multiprocessing(parent, "forkserver"),
    "mp-spawn": lambda parent: by_multiprocessing(parent, "spawn"),
}


def main() -> None:
    (path,) = sys.argv[1:]
    parent = Parent(path)
    for how, run in CHILDREN.items():
        print(f"-- {how}", file=sys.stderr, flush=True)
        row = {"how": how, "status": run(parent)}
        print(json.dumps({**row, "locked": parent.is_locked(), "right": parent.right()}))
        sys.stdout.flush()  # or a child writes it as well
    refused = others_are_refused(path)
    parent.store.close()
    with tutti.open(path) as store:
        print(json.dumps({"refused": refused, "kept": store.match(parent.keys)}))


if __name__ == "__main__":
    main()

__all__ = ["CHILDREN", "LAYOUT", "OBJECTS", "ObjectStore"]
