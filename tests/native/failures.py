"""One life of a pool, in which one call of the system fails: a program, over failing_calls.cpp.

    python failures.py KIND EXECUTOR FOLDER WHICH [RESULT]

KIND: what fails: "allocation" is `operator new` of the native library, "system" a system call or a
new thread, "interrupt" a call that a signal interrupts, "python" a call of a function of the
package, for want of memory. WHICH: "all", from the first call to the last one of a life that
passes, "FIRST-END", "SEED:COUNT", as many of them, or "sites", the first call of each line of the
package that calls a function of it ("sites:PART/PARTS" for a part of them).

After every failure: no untyped error, nothing left behind, and the pool opens and serves what was
acknowledged and no wrong byte. Prints each finding to stderr as it is found, then one line of JSON
with what was tried and what was found. Keeps a row of the file RESULT up to date meanwhile.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import json
import logging
import os
import random
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import IO, Any

import numpy as np

import tutti
from tutti.base import interrupts
from tutti.bench.environment import describe
from tutti.errors import ChecksumMismatch, MediumError, PoolCorrupt, PoolNotFound, TuttiError
from tutti.medium.keys import as_keys
from tutti.medium.layout import KVLayout
from tutti.memory.host_memory import HostMemory
from tutti.store import ObjectStore
from tutti.transfers.store_config import StoreConfig

LAYOUT = KVLayout.mha(
    layers=2, kv_heads=2, head_dim=64, page_size=16, dtype="bfloat16", model="test-model"
)
CAPACITY = "6MiB"
KINDS = {"allocation": 1, "system": 2, "interrupt": 4}
PACKAGE = str(Path(tutti.__file__).parent)
PAGES = 4
TIMEOUT_S = 2.0  # a life in which a call fails may well wait as long, often
CALM_S = 20.0  # where nothing fails, not even a flush on a busy machine
HANG_S = 60.0
LIVES_AT_ONCE = 3  # they wait most of the time
WRITE_EVERY_S = 10.0
CALLS_MAX = 100_000


#: How many calls there were, which one failed, and what is wrong.
Tried = tuple[int, str, list[str]]
#: Who calls, in which line, and what.
Site = tuple[CodeType | None, int, CodeType]


def content_of(key: bytes) -> bytes:
    return np.random.default_rng(list(key)).bytes(LAYOUT.object_nbytes)


FIRST, SECOND, THIRD = ([bytes([n, i]) * 8 for i in range(PAGES)] for n in (1, 2, 3))
CONTENT = {key: content_of(key) for key in (*FIRST, *SECOND, *THIRD)}


class Failing:
    """Makes one call fail: the n-th, or the first from a place in the package.

    sites: the places from which functions of the package were called so far.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._left = self._counted = 0
        self._site: Site | None = None
        self.sites: dict[Site, None] = {}
        if kind == "python":
            threading.settrace(self._trace)
            sys.settrace(self._trace)
        self._lib = ctypes.CDLL(None)
        self._lib.failing_what.restype = ctypes.c_char_p
        for name in ("failing_disarm", "failing_live", "failing_mapped"):
            getattr(self._lib, name).restype = ctypes.c_int64
        self._lib.failing_arm.argtypes = (ctypes.c_int64, ctypes.c_uint32)

    def arm(self, call: int | Site) -> None:
        if self._kind == "python":
            self._left, self._site = (call, None) if isinstance(call, int) else (CALLS_MAX, call)
            self._counted, self._what = 0, ""
            sys.settrace(self._trace)  # which an exception of its own ended
        else:
            self._lib.failing_arm(call, KINDS[self._kind])

    def disarm(self) -> int:
        """How many calls there were."""
        if self._kind == "python":
            self._left = 0
            return self._counted
        return int(self._lib.failing_disarm())

    def what(self) -> str:
        if self._kind == "python":
            return self._what
        return (self._lib.failing_what() or b"").decode()

    def _trace(self, frame: FrameType, event: str, argument: object) -> None:
        """Raises MemoryError in the chosen function of the package, as it is called."""
        if self._left == 0 or not frame.f_code.co_filename.startswith(PACKAGE):
            return
        self._counted += 1
        self._left -= 1
        back = frame.f_back
        site = (
            (None, 0, frame.f_code) if back is None else (back.f_code, back.f_lineno, frame.f_code)
        )
        self.sites.setdefault(site)
        if self._left == 0 or site == self._site:
            self._left = 0
            self._what = frame.f_code.co_qualname
            raise MemoryError

    def live(self) -> int:
        """Allocations of the native library."""
        return int(self._lib.failing_live())

    def mapped(self) -> int:
        """Bytes that Python and the native library mapped."""
        return int(self._lib.failing_mapped())


@dataclass
class Life:
    """A pool from its format on: what was acknowledged, and what may be gone."""

    path: Path
    executor: str
    acknowledged: set[bytes] = field(default_factory=set)
    is_formatted: bool = False
    timeout_s: float = TIMEOUT_S

    def opened(self) -> ObjectStore:
        config = StoreConfig(timeout_s=self.timeout_s, durability="flush")
        return tutti.open(self.path, executor=self.executor, profile=None, config=config)

    def run(self) -> None:
        tutti.format(self.path, LAYOUT, CAPACITY, executor=self.executor)
        self.is_formatted = True
        with self.opened() as store:
            pool = store.allocate_memory(PAGES)
            self.put(store, pool, FIRST)
            self.load(store, pool, FIRST)
            self.acknowledged.clear()
            store.clear()
            self.put(store, pool, SECOND)
        with self.opened() as store:
            pool = store.allocate_memory(PAGES)
            self.load(store, pool, SECOND)

    def put(self, store: ObjectStore, pool: HostMemory, keys: list[bytes]) -> None:
        for page, key in enumerate(keys):
            pool.write(page, CONTENT[key])
        if store.put(keys, np.arange(PAGES)).wait(self.timeout_s).stored == len(keys):
            self.acknowledged |= set(keys)

    def load(self, store: ObjectStore, pool: HostMemory, keys: list[bytes]) -> None:
        assert store.match(keys) == len(keys), "acknowledged objects are missing"
        try:
            store.load(keys, np.arange(PAGES)).wait(self.timeout_s)
        except MediumError:
            self.acknowledged -= set(keys)  # what cannot be read is taken out of use
            raise
        for page, key in enumerate(keys):
            assert pool.read(page) == CONTENT[key], "wrong bytes"

    def check(self) -> None:
        """The pool as it is now opens, serves what it must and nothing wrong, and takes more."""
        self.timeout_s = CALM_S
        try:
            store = self.opened()
        except (PoolNotFound, PoolCorrupt):  # it was given up in the middle of the format
            assert not self.is_formatted, "a pool that was formatted does not open"
            return
        with store:
            store.wait_recovered(self.timeout_s)
            pool = store.allocate_memory(PAGES)
            for key in (*FIRST, *SECOND):
                self._check_key(store, pool, key)
            self.put(store, pool, THIRD)
            self.load(store, pool, THIRD)

    def _check_key(self, store: ObjectStore, pool: HostMemory, key: bytes) -> None:
        there = store.match(as_keys([key])) == 1
        assert there or key not in self.acknowledged, "an acknowledged object is gone"
        if not there:
            return
        try:
            store.load([key], [0]).wait(self.timeout_s)
        except ChecksumMismatch:
            assert key not in self.acknowledged, "an acknowledged object is damaged"
            return
        assert pool.read(0) == CONTENT[key], "wrong bytes"


def resources(failing: Failing) -> dict[str, object]:
    """What this process owns."""
    gc.collect()
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    return {
        "files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "python threads": len(threading.enumerate()),
        "rings": sum("io_uring" in line[-1] for line in maps),
        "native allocations": failing.live(),
        "mapped bytes": failing.mapped(),
    }


def leaks(before: dict[str, object], failing: Failing) -> list[str]:
    """What is more than before, after waiting a while for threads to end."""
    deadline_s = time.monotonic() + 10
    while True:
        now = resources(failing)
        more = [name for name in before if now[name] > before[name]]  # type: ignore[operator]
        if not more or time.monotonic() > deadline_s:
            return [f"{name}: {before[name]} before, {now[name]} now" for name in more]
        time.sleep(0.02)


def try_one(
    call: int | Site, life: Life, failing: Failing, before: dict[str, object]
) -> tuple[int, list[str]]:
    """A life in which a call fails: how many calls there were, and what is wrong with it."""
    found = []
    failing.arm(call)
    try:
        life.run()
    except TuttiError:
        if not failing.what():
            found.append("nothing failed: " + traceback.format_exc())
    except MemoryError:
        if failing._kind != "python":
            found.append(traceback.format_exc())
    except BaseException:
        found.append(traceback.format_exc())
    finally:
        calls = failing.disarm()
    assert not isinstance(call, int) or calls < call or failing.what(), "nothing failed"
    found += leaks(before, failing)
    try:
        life.check()
    except BaseException:
        found.append("afterwards: " + traceback.format_exc())
    found += [] if found else leaks(before, failing)
    return calls, found


def choose(which: str, calls: int, sites: list[Site]) -> list[int] | list[Site]:
    if which.startswith("sites"):
        part, parts = (int(n) for n in (which.partition(":")[2] or "0/1").split("/"))
        return sites[part::parts]
    if which == "all":
        return list(range(1, calls * 2))  # it ends at the first that passes
    if "-" in which:
        first, last = which.split("-")
        return list(range(int(first), int(last)))
    seed, count = (int(part) for part in which.split(":"))
    return sorted(random.Random(seed).sample(range(1, calls + 1), min(count, calls)))


def one(call: int | Site, path: Path, executor: str, failing: Failing) -> Tried:
    """`try_one` from nothing."""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    before = resources(failing)
    life = Life(path, executor, timeout_s=CALM_S if call == CALLS_MAX else TIMEOUT_S)
    calls, found = try_one(call, life, failing, before)
    return calls, failing.what(), found


@dataclass
class Apart:
    """`one` in a fork of this process: a life that dies or hangs is a finding like others."""

    call: int | Site
    pid: int
    said: IO[str]

    @staticmethod
    def begin(call: int | Site, path: Path, executor: str, failing: Failing) -> Apart:
        ours, theirs = os.pipe()
        child = os.fork()
        if child == 0:
            faulthandler.dump_traceback_later(HANG_S, exit=True)
            with open(theirs, "w") as pipe:
                json.dump(one(call, path, executor, failing), pipe)
            os._exit(0)  # whatever threads are left
        os.close(theirs)
        return Apart(call, child, open(ours))

    def end(self) -> Tried:
        with self.said:
            said = self.said.read()
        status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        if not said:
            return 0, "it died", [f"the process ended with {status}; see stderr"]
        calls, what, found = json.loads(said)
        return calls, what, found


def lives(
    chosen: Sequence[int | Site], folder: Path, executor: str, failing: Failing
) -> Generator[tuple[int | Site, Tried], None, None]:
    """The lives of the chosen calls, some at once; those that run are awaited at the end."""
    running: deque[Apart] = deque()
    try:
        for number, call in enumerate(chosen):
            if len(running) == LIVES_AT_ONCE:
                yield running[0].call, running.popleft().end()
            path = folder / f"pool-{number % LIVES_AT_ONCE}"
            running.append(Apart.begin(call, path, executor, failing))
        while running:
            yield running[0].call, running.popleft().end()
    finally:
        for apart in running:
            apart.end()


@dataclass
class Sweep:
    """What was tried so far, and the row of a result that tells it."""

    row: dict[str, object]
    out: Path | None
    begun_s: float = field(default_factory=time.monotonic)
    written_s: float = 0.0
    tried: int = 0
    wrong: dict[str, list[str]] = field(default_factory=dict)

    def add(self, call: int | Site, what: str, found: list[str]) -> None:
        self.tried += bool(what)
        if found:
            self.wrong[f"{call} {what}"] = found
            print(f"{call} {what}:", *found, sep="\n", file=sys.stderr, flush=True)
        if found or time.monotonic() - self.written_s > WRITE_EVERY_S:
            self.write(ended=False)

    def write(self, ended: bool) -> None:
        """Replaces the row of the same calls and executor, or adds it."""
        self.written_s = time.monotonic()
        self.row |= {"failed": self.tried, "findings": len(self.wrong), "ended": ended}
        self.row |= {"seconds": round(self.written_s - self.begun_s)}
        print(json.dumps(self.row), file=sys.stderr, flush=True)
        if self.out is None:
            return
        result: dict[str, Any] = {"rows": []}
        with contextlib.suppress(FileNotFoundError):
            result = json.loads(self.out.read_text())
        same = ("what fails", "executor", "chosen")
        rows = [row for row in result["rows"] if any(row[name] != self.row[name] for name in same)]
        result = {"benchmark": "failures", "machine": describe(self.out.parent)}
        fresh = self.out.with_suffix(".part")
        fresh.write_text(json.dumps(result | {"rows": [*rows, self.row]}, indent=1) + "\n")
        fresh.replace(self.out)


def main(kind: str, executor: str, folder: str, which: str, out: str = "") -> int:
    logging.disable(logging.CRITICAL)
    logging.raiseExceptions = False
    threading.excepthook = lambda _: None
    sys.unraisablehook = lambda _: None
    interrupts._LINGER_S = 0.01  # what is left is counted when the threads of calls have ended
    failing = Failing(kind)
    faulthandler.dump_traceback_later(HANG_S, exit=True)
    for _ in range(3):  # what is made once
        calls, _, found = one(CALLS_MAX, Path(folder) / "pool-0", executor, failing)
    faulthandler.cancel_dump_traceback_later()
    assert not found, found
    gc.collect()
    gc.freeze()  # what is there is no child's to look at
    row: dict[str, object] = {"what fails": kind, "executor": executor, "calls of a life": calls}
    row |= {"places": len(failing.sites), "chosen": which}
    sweep = Sweep(row, Path(out) if out else None)
    chosen = choose(which, calls, list(failing.sites))
    with contextlib.closing(lives(chosen, Path(folder), executor, failing)) as tried:
        for call, (_, what, found) in tried:
            sweep.add(call, what, found)
            if not what and which == "all":
                break
    sweep.write(ended=True)
    print(json.dumps({"calls": calls, "tried": sweep.tried, "wrong": sweep.wrong}))
    return 1 if sweep.wrong else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
