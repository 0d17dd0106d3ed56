"""Reads for requests that still wait: from the look-up on into staging, within bounds.

A look-up only leaves a note; one thread reads the notes and reads ahead, one short piece at a time,
so that a batch that starts meanwhile waits for little. What is staged is found by key, whoever
asked for it. It changes when bytes arrive, and never what a look-up or a load answers.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tutti.arrays import Keys
from tutti.errors import KeyMissing
from tutti.integration.sglang.breaker import Breaker
from tutti.integration.sglang.direct.reads import Read
from tutti.integration.sglang.direct.stored_pool import StoredPool
from tutti.integration.sglang.metrics import LOAD
from tutti.process import Owned

_PIECE_NBYTES = 16 << 20
_PIECE_PAGES = 64
_IDLE_S = 60.0


@dataclass
class _Note:
    """What one request may want: keys (n, 16) by stored_pool, and how far they were read."""

    wanted: Sequence[tuple[StoredPool, Keys]]
    seen: int
    next_pool: int = 0
    next_row: int = 0


@dataclass(eq=False)
class _Staged:
    """A read whose staging is kept: for requests by id, and for batches that use it now.

    used: rows that a batch took.
    """

    read: Read
    rids: set[str] = field(default_factory=set)
    users: int = 0
    used: set[int] = field(default_factory=set)
    listed: bool = True


class ReadAhead(Owned):
    """Staged pages of requests that wait.  Thread-safe.

    share: of each stored_pool's load staging that may be filled ahead.
    lookups: a request that did not look up again within so many look-ups has gone away.
    measured: is told the bytes and seconds of each read.
    """

    def __init__(
        self,
        stored_pools: Sequence[StoredPool],
        *,
        share: float,
        lookups: int,
        timeout_s: float,
        breaker: Breaker,
        measured: Callable[[int, float], None],
        log_error: Callable[[str, object], None],
    ) -> None:
        self._budget = {
            stored_pool.name: int(stored_pool.loads.pages * share) for stored_pool in stored_pools
        }
        self._held = dict.fromkeys(self._budget, 0)
        self._lookups = lookups
        self._timeout_s = timeout_s
        self._breaker = breaker
        self._measured = measured
        self._log_error = log_error
        self._changed = threading.Condition()
        self._notes: OrderedDict[str, _Note] = OrderedDict()
        self._staged: list[_Staged] = []
        self._by_key: dict[tuple[str, bytes], tuple[_Staged, int]] = {}
        self._clock = 0
        self._names = itertools.count()
        self._stop = False
        self.pages_read = 0
        self._thread: threading.Thread | None = None
        if any(self._budget.values()):
            self._thread = threading.Thread(target=self._run, name="tutti-ahead", daemon=True)
            self._thread.start()

    def note(self, rid: str, wanted: Sequence[tuple[StoredPool, Keys]]) -> None:
        """One more look-up; what request ``rid`` will load if it is scheduled.  Never waits."""
        if self._thread is None:
            return
        with self._changed:
            self._clock += 1
            old = self._notes.get(rid)
            if old is not None and _same(old.wanted, wanted):
                old.seen = self._clock
                self._notes.move_to_end(rid)
            elif wanted:
                self._notes[rid] = _Note(wanted, self._clock)
                self._notes.move_to_end(rid)
            else:
                self._forget(rid)
            while self._notes:
                oldest = next(iter(self._notes))
                if self._notes[oldest].seen >= self._clock - self._lookups:
                    break
                self._forget(oldest)
            self._changed.notify()

    def forget(self, rid: str) -> None:
        """The request loads now, or has gone away."""
        with self._changed:
            self._forget(rid)

    def staged_pages(self, stored_pool: StoredPool, keys: Keys) -> int:
        """How many of ``keys``, from the first on, are staged or on their way."""
        with self._changed:
            if not self._by_key:
                return 0
            for row, key in enumerate(keys):
                if (stored_pool.name, key.tobytes()) not in self._by_key:
                    return row
            return len(keys)

    def take(self, stored_pool: StoredPool, keys: Sequence[bytes]) -> dict[int, tuple[Read, int]]:
        """Which rows of ``keys`` are staged: the read, and the row in it.

        The reads stay until ``release`` was called for each (once, however many rows it serves).
        """
        found: dict[int, tuple[Read, int]] = {}
        users: dict[int, _Staged] = {}
        with self._changed:
            if not self._by_key:
                return found
            for row, key in enumerate(keys):
                place = self._by_key.get((stored_pool.name, key))
                if place is not None:
                    users[id(place[0])] = place[0]
                    place[0].used.add(place[1])
                    found[row] = place[0].read, place[1]
            for staged in users.values():
                staged.users += 1
        return found

    def release(self, read: Read) -> None:
        """A batch does not need a read any more."""
        with self._changed:
            for staged in self._staged:
                if staged.read is read:
                    staged.users -= 1
                    self._drop_unwanted(staged)
                    return

    def make_room(self, stored_pool: StoredPool, pages: int) -> None:
        """Drops what no batch uses, the oldest first, until ``pages`` of staging are free."""
        with self._changed:
            for staged in list(self._staged):
                if stored_pool.loads.free >= pages:
                    return
                if staged.read.stored_pool is stored_pool and not staged.users:
                    staged.rids.clear()
                    self._drop_unwanted(staged)

    def reset(self) -> None:
        """Forgets all requests."""
        with self._changed:
            for rid in list(self._notes):
                self._forget(rid)

    def close(self, timeout_s: float) -> None:
        """As reset, and ends the thread."""
        self.reset()
        with self._changed:
            self._stop = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout_s)

    @property
    def held(self) -> int:
        """Pages of staging that are kept for requests or batches."""
        with self._changed:
            return sum(self._held.values())

    def _forget(self, rid: str) -> None:
        self._notes.pop(rid, None)
        for staged in [staged for staged in self._staged if rid in staged.rids]:
            staged.rids.discard(rid)
            self._drop_unwanted(staged)

    def _drop_unwanted(self, staged: _Staged) -> None:
        if staged.rids or staged.users:
            return
        self._unlist(staged)
        self._staged.remove(staged)
        self._held[staged.read.stored_pool.name] -= len(staged.read.keys)
        metrics = staged.read.stored_pool.metrics
        metrics.count("ahead_used_pages", len(staged.used))
        metrics.count("ahead_unused_pages", len(staged.read.keys) - len(staged.used))
        staged.read.retire()
        self._changed.notify()

    def _unlist(self, staged: _Staged) -> None:
        """Removes it from the table."""
        if staged.listed:
            staged.listed = False
            for key in staged.read.keys:
                self._by_key.pop((staged.read.stored_pool.name, key.tobytes()), None)

    def _run(self) -> None:
        while not self._stop:  # ended by close()
            with self._changed:
                staged = self._next()
                if staged is None:
                    self._changed.wait(_IDLE_S)
                    continue
            try:
                began_s = time.monotonic()
                staged.read.start()
                over = staged.read.wait_over(began_s + self._timeout_s)
                self._ended(staged, over, time.monotonic() - began_s)
            except Exception as error:
                # The thread must live; batches read for themselves what is not staged.
                self._failed(staged, error)

    def _next(self) -> _Staged | None:
        """The next piece to read: for the request that has waited for longest."""
        if not self._breaker.closed:
            return None
        for rid, note in list(self._notes.items()):
            while note.next_pool < len(note.wanted):
                stored_pool, keys = note.wanted[note.next_pool]
                if note.next_row >= len(keys):
                    note.next_pool, note.next_row = note.next_pool + 1, 0
                    continue
                room = self._budget[stored_pool.name] - self._held[stored_pool.name]
                if room <= 0:
                    break
                staged = self._piece(rid, note, stored_pool, keys, room)
                if staged is not None:
                    return staged
        return None

    def _piece(
        self, rid: str, note: _Note, stored_pool: StoredPool, keys: Keys, room: int
    ) -> _Staged | None:
        """Claims the next keys that are not staged yet; None when there are none, or no staging."""
        most = max(1, min(room, _PIECE_PAGES, _PIECE_NBYTES // stored_pool.page_nbytes))
        rows: list[int] = []
        while note.next_row < len(keys) and len(rows) < most:
            place = self._by_key.get((stored_pool.name, keys[note.next_row].tobytes()))
            if place is None:
                rows.append(note.next_row)
            else:
                place[0].rids.add(rid)
            note.next_row += 1
        pages = stored_pool.loads.allocate(len(rows)) if rows else None
        if pages is None:
            note.next_row = rows[0] if rows else note.next_row
            if rows:
                note.next_pool = len(note.wanted)  # batches have all of staging: give up
            return None
        name = f"ahead {next(self._names)}"
        staged = _Staged(Read(stored_pool, keys[rows], pages, staged=True, batch=name), {rid})
        self._staged.append(staged)
        self._held[stored_pool.name] += len(rows)
        for place_in, row in enumerate(rows):
            self._by_key[stored_pool.name, keys[row].tobytes()] = (staged, place_in)
        return staged

    def _ended(self, staged: _Staged, over: bool, duration_s: float) -> None:
        error = staged.read.outcome() if over else None
        if over and error is None:
            metrics = staged.read.stored_pool.metrics
            metrics.count("ahead_pages", len(staged.read.keys))
            # Here and not with the batches that use it, which may be several, or none.
            metrics.count("moved_bytes", staged.read.nbytes, LOAD)
            metrics.count("busy_seconds", duration_s, LOAD)
            self.pages_read += len(staged.read.keys)
            if not staged.read.stored_pool.engine.trailing:
                self._measured(staged.read.nbytes, duration_s)
            return
        self._failed(staged, error)

    def _failed(self, staged: _Staged, error: Exception | None) -> None:
        """Removes it from the table.  error: None for a medium that did not answer in time."""
        if not isinstance(error, KeyMissing):
            what = "timeout" if error is None else type(error).__name__
            self._log_error(f"read-ahead: {what}", error or "the medium does not answer")
            self._breaker.failure()
        with self._changed:
            self._unlist(staged)
            staged.rids.clear()
            if staged in self._staged:
                self._drop_unwanted(staged)


def _same(old: Sequence[tuple[StoredPool, Keys]], new: Sequence[tuple[StoredPool, Keys]]) -> bool:
    """Whether both want the same, judged by the first and last key of each stored_pool."""
    if len(old) != len(new):
        return False
    for (stored_pool, keys), (other, others) in zip(old, new, strict=True):
        if stored_pool is not other or len(keys) != len(others):
            return False
        if len(keys) and not ((keys[0] == others[0]).all() and (keys[-1] == others[-1]).all()):
            return False
    return True
