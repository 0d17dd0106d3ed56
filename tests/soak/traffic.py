"""Random operations of several threads on one open store, each compared with the oracle."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from crash.objects import as_rows, content_of
from soak.oracle import Finding, Oracle

from tutti.errors import KeyMissing, PagesInUse, TuttiError
from tutti.store import ObjectStore

PAGES = 16  # of each thread
KEYS_MAX = 8
WAIT_S = 30.0
OPERATIONS = ("put", "put again", "load", "look", "prove", "clear", "unpin", "stats")
CHANCES = (0.34, 0.06, 0.4, 0.1, 0.03, 0.02, 0.03, 0.02)


class Room:
    """How many objects may still be put before one would be evicted; None for any number."""

    def __init__(self, objects: int | None) -> None:
        self._all = self._left = objects
        self._lock = threading.Lock()

    def take(self, n: int) -> bool:
        with self._lock:
            if self._left is None:
                return True
            if self._left < n:
                return False
            self._left -= n
            return True

    def taken(self) -> int:
        """How many were taken so far."""
        with self._lock:
            return 0 if self._all is None or self._left is None else self._all - self._left

    def give_back(self, n: int) -> None:
        with self._lock:
            if self._left is not None:
                self._left += n


class Traffic:
    """One thread's operations on a store that all threads share.

    memory: registered memory; this thread uses PAGES pages of it from `first` on. fails: whether
    the medium may fail, which allows typed errors.
    """

    def __init__(
        self,
        store: ObjectStore,
        oracle: Oracle,
        memory: Any,
        first: int,
        rng: np.random.Generator,
        shared: Shared,
    ) -> None:
        self._store = store
        self._oracle = oracle
        self._memory = memory
        self._first = first
        self._rng = rng
        self._shared = shared
        self._name = f"thread at page {first}"
        self.tally: Counter[str] = Counter()

    def step(self) -> None:
        """One random operation."""
        name = str(self._rng.choice(OPERATIONS, p=CHANCES))
        self.tally["operations"] += 1
        self.tally[name.split()[0]] += 1
        try:
            {
                "put": self._put,
                "put again": self._put_again,
                "load": self._load,
                "look": self._look,
                "prove": lambda: self._store.prove(4, timeout_s=WAIT_S),
                "clear": self._clear,
                "unpin": lambda: self._store.unpin(self._name),
                "stats": self._stats,
            }[name]()
        except TuttiError as error:
            if not self._shared.fails:
                raise
            self.tally[f"error {type(error).__name__}"] += 1

    def _pick(self) -> list[bytes]:
        known = list(self._shared.keys)  # other threads change it
        n = int(self._rng.integers(1, KEYS_MAX + 1))
        picked = self._rng.integers(0, max(1, len(known)), n).tolist()
        return list(dict.fromkeys(known[at] for at in picked)) if known else []

    def _put(self) -> None:
        n = int(self._rng.integers(1, KEYS_MAX + 1))
        keys = [self._rng.bytes(16) for _ in range(n)]
        if not self._shared.room.take(n):
            return self._load()
        self._store_keys(keys)
        self._shared.keys.extend(keys)
        return None

    def _put_again(self) -> None:
        keys = self._pick()
        if keys and self._shared.room.take(len(keys)):
            self._store_keys(keys)

    def _store_keys(self, keys: list[bytes]) -> None:
        for at, key in enumerate(keys):
            self._memory.write(self._first + at, content_of(key))
        cut = int(self._rng.integers(0, len(keys)))
        parts = [(at, part) for at, part in ((0, keys[:cut]), (cut, keys[cut:])) if part]
        waiting = []
        parent = None
        for at, part in parts:
            begun = self._oracle.put_begins(part)
            try:
                pages = np.arange(self._first + at, self._first + at + len(part))
                depth = at if parent is not None else 0
                ticket = self._store.put(as_rows(part), pages, parent=parent, depth=depth)
            except BaseException:
                self._oracle.put_ends(begun, part, acknowledged=False)
                self._finish(waiting)
                raise
            parent = part[-1]
            if self._rng.random() < 0.2:
                ticket.on_done(_raise)
            waiting.append((ticket, begun, part))
        self._finish(waiting)

    def _finish(self, waiting: list[tuple[Any, int, list[bytes]]]) -> None:
        failure: TuttiError | None = None
        for ticket, begun, part in waiting:
            stored = 0
            try:
                stored = ticket.wait(WAIT_S).stored
            except TuttiError as error:
                if not ticket.done:
                    raise Finding(f"a put does not end within {WAIT_S:g} s") from None
                failure = error
            finally:
                self._oracle.put_ends(begun, part, acknowledged=stored == len(part))
            self.tally["objects stored"] += stored
        if failure is not None:
            raise failure

    def _look(self) -> None:
        keys = self._pick()
        begun = self._oracle.look_begins()
        hits = self._store.match(as_rows(keys)) if keys else 0
        for key in keys[:hits]:
            self._oracle.looked(begun, key, present=True)
        for key in keys[hits : hits + 1]:
            self._oracle.looked(begun, key, present=False)

    def _load(self) -> None:
        keys = self._pick()
        if not keys:
            return
        pin = self._rng.random() < 0.4
        begun = self._oracle.look_begins()
        there = self._store.present(as_rows(keys), pin=self._name if pin else False)
        for key, present in zip(keys, there.tolist(), strict=True):
            if present or not pin:  # where not all can be pinned some are hidden
                self._oracle.looked(begun, key, present=present)
        found = [key for key, present in zip(keys, there.tolist(), strict=True) if present]
        if not found:
            return
        pages = self._first + KEYS_MAX + np.arange(len(found))
        try:
            ticket = self._store.load(as_rows(found), pages)
        except PagesInUse as error:
            self._settled(error.wait_settled)
            raise
        except KeyMissing:
            if pin and not self._shared.fails and not self._oracle.cleared_since(begun):
                raise Finding("a pinned object was evicted") from None
            return
        self._check(ticket, found, pages.tolist())

    def _check(self, ticket: Any, keys: Sequence[bytes], pages: list[int]) -> None:
        """Every layer as soon as it is ready, or all of them at the end."""
        try:
            if self._rng.random() < 0.5:
                for layer in range(self._memory.layout.layers):
                    ticket.wait_layer(layer, WAIT_S)
                    for key, page in zip(keys, pages, strict=True):
                        self._compare(key, page, layer)
            ticket.wait(WAIT_S)
        except TuttiError:
            self._settled(ticket.wait_settled)
            failed = ticket.failed().tolist()
            self._oracle.damaged([keys[row] for row in failed])
            self.tally["objects refused"] += len(failed)
            raise
        finally:
            self._settled(ticket.wait_settled)
            bad = set(ticket.failed().tolist())
            for row, (key, page) in enumerate(zip(keys, pages, strict=True)):
                if row not in bad:
                    self._compare(key, page, None)

    def _compare(self, key: bytes, page: int, layer: int | None) -> None:
        content, nbytes = content_of(key), self._memory.layout.object_nbytes
        if layer is None:
            got = self._memory.read(page)
        else:
            part = nbytes // self._memory.layout.layers
            segments = len(self._memory.layout.segments)
            got = b"".join(self._memory.segment(page, layer, k).tobytes() for k in range(segments))
            content = content[layer * part : (layer + 1) * part]
        self.tally["bytes verified"] += len(got)
        if got != content:
            raise Finding(f"key {key.hex()} serves other bytes")

    def _settled(self, wait: Callable[[float], bool]) -> None:
        if not wait(WAIT_S):
            raise Finding(f"the pages of a load are not released after {WAIT_S:g} s")

    def _clear(self) -> None:
        if not self._shared.clearing.acquire(blocking=False):
            return
        try:
            taken = self._shared.room.taken()
            self._oracle.clear_begins()
            done = False
            try:
                self._store.clear(deallocate=bool(self._rng.random() < 0.5))
                done = True
            finally:
                self._oracle.clear_ends(done=done)
            self._shared.room.give_back(taken)
            del self._shared.keys[:-200]
        finally:
            self._shared.clearing.release()

    def _stats(self) -> None:
        stats = self._store.stats()
        if sum(stats["slots"].values()) != stats["capacity_objects"]:
            raise Finding(f"the states of the slots do not add up: {stats}")


class Shared:
    """What the threads of one store share."""

    def __init__(self, keys: list[bytes], room: Room, *, fails: bool = False) -> None:
        self.keys = keys
        self.room = room
        self.fails = fails
        self.clearing = threading.Lock()


def _raise(ticket: object) -> None:
    raise ValueError("a callback of the soak fails on purpose")


def in_threads(bodies: Sequence[Callable[[], None]]) -> None:
    """Runs all of them at the same time; raises what the first one raised that failed."""
    failures: list[BaseException] = []

    def guarded(body: Callable[[], None]) -> None:
        try:
            body()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
        if thread.is_alive():
            raise Finding("an operation hangs")
    if failures:
        raise failures[0]
