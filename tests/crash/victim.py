"""Processes that use a pool until they are killed: run as a program, forks one per request.

The forking process has no threads and opens nothing, so that a fork of it is a fresh process
without the price of its imports. A request is one line of JSON, see `Request`; the answer is one
line with what the victim said before it died, and how it ended.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np
from crash.objects import as_rows, content_of, when_unlocked

import tutti.store
from tutti.errors import KeyMissing
from tutti.memory.host_memory import HostMemory
from tutti.store import ObjectStore

PAGES = 24
PUT_KEYS_MAX = 12


@dataclass(frozen=True)
class Request:
    """kill_at, kill_count, kill_delay_s: SIGKILL so long after the line of this beginning was said
    so often, or after the close began. room: how many objects may still be put, so that none is
    evicted; -1 for churn. known: keys that the pool may hold, in hexadecimal.
    """

    paths: list[str]
    executor: str
    durability: str
    seed: int
    steps: int
    room: int
    known: list[str]
    kill_at: str
    kill_count: int
    kill_delay_s: float
    deadline_s: float = 30.0


class Victim:
    """Reports what it begins and what it ended, in an order that depends on the seed alone."""

    def __init__(self, request: Request, say: Callable[[str], None]) -> None:
        self._request = request
        self._say = say
        self._rng = np.random.default_rng(request.seed)
        self._known = [bytes.fromhex(key) for key in request.known]
        self._room = request.room

    def run(self) -> None:
        request, say = self._request, self._say
        say("open begins")
        store = when_unlocked(
            lambda: tutti.store.open(
                request.paths, executor=request.executor, durability=request.durability
            )
        )
        pool = store.allocate_memory(PAGES, hugepages=False)
        store.wait_recovered(10)
        say("open ends")
        for _ in range(request.steps):
            chance = self._rng.random()
            if chance < 0.55:
                self._put(store, pool)
            elif chance < 0.85:
                self._load(store, pool)
            else:
                say("clear begins")
                store.clear(deallocate=bool(self._rng.random() < 0.5))
                say("clear ends")
                self._known.clear()
                self._room = request.room
        say("close begins")
        store.close()
        say("close ends")

    def _put(self, store: ObjectStore, pool: HostMemory) -> None:
        n = int(self._rng.integers(1, PUT_KEYS_MAX + 1))
        if 0 <= self._room < n:
            return self._load(store, pool)
        keys = [self._rng.bytes(16) for _ in range(n)]
        for page, key in enumerate(keys):
            pool.write(page, content_of(key))
        cut = int(self._rng.integers(0, n))
        self._say("put begins " + " ".join(key.hex() for key in keys))
        parts = [(at, part) for at, part in ((0, keys[:cut]), (cut, keys[cut:])) if part]
        tickets = [store.put(as_rows(part), np.arange(at, at + len(part))) for at, part in parts]
        stored = []
        for ticket, (_, part) in zip(tickets, parts, strict=True):
            if ticket.wait(10).stored == len(part):
                stored += part
        self._say("put ends " + " ".join(key.hex() for key in stored))
        self._known += stored
        self._room -= n if self._room >= 0 else 0
        return None

    def _load(self, store: ObjectStore, pool: HostMemory) -> None:
        if not self._known:
            return
        picked = self._rng.permutation(len(self._known))[:PUT_KEYS_MAX]
        keys = [self._known[i] for i in picked.tolist()]
        keys = keys[: store.match(as_rows(keys))]
        if not keys:
            return
        self._say("load begins")
        try:
            store.load(as_rows(keys), np.arange(12, 12 + len(keys))).wait(10)
        except KeyMissing:
            return  # evicted since the look-up
        for i, key in enumerate(keys):
            if pool.read(12 + i) != content_of(key):
                self._say(f"error: key {key.hex()} serves other bytes")
        self._say("load ends")


def live(request: Request, pipe: int) -> None:
    """The life of a victim; never returns."""
    status = 1
    try:
        Victim(request, lambda line: os.write(pipe, line.encode() + b"\n")).run()
        status = 0
    except BaseException:
        os.write(pipe, b"error: " + repr(traceback.format_exc()).encode() + b"\n")
    os._exit(status)


def watch(request: Request, pid: int, pipe: int) -> dict[str, object]:
    """Reads what a victim says, kills it when the time has come, and tells how it ended."""
    said, killed, deadline_s = b"", False, time.monotonic() + request.deadline_s
    begin = b"\n" + request.kill_at.encode()
    latest = b"\nclose begins"
    while time.monotonic() < deadline_s:
        ready, _, _ = select.select([pipe], [], [], max(0.0, deadline_s - time.monotonic()))
        part = os.read(pipe, 1 << 16) if ready else b""
        if not part:
            break
        said += part
        lines = b"\n" + said
        if not killed and (lines.count(begin) >= request.kill_count or latest in lines):
            time.sleep(request.kill_delay_s)
            os.kill(pid, signal.SIGKILL)
            killed = True
    hung = time.monotonic() >= deadline_s
    if hung:
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    complete = said[: said.rfind(b"\n") + 1].decode()
    return {"said": complete.splitlines(), "status": status, "hung": hung}


def main() -> None:
    for line in sys.stdin:
        request = Request(**json.loads(line))
        pipe, inner = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(pipe)
            live(request, inner)
        os.close(inner)
        print(json.dumps(watch(request, pid, pipe)), flush=True)
        os.close(pipe)


def encode(request: Request) -> str:
    """The line that asks for a victim."""
    return json.dumps(asdict(request)) + "\n"


if __name__ == "__main__":
    main()
