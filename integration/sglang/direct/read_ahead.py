"""Reads pages of requests that wait in SGLang's queue into staging, within limits.

A look-up only adds a note. One thread offers the next short piece of each request to the pools'
queue, which decides whose piece is read next and how many at once, and reads what the queue issues.
Trials tell the queue where pieces are better read alone (piece_trials.py). Staged pages are found
by key, for any request. This changes when bytes arrive, but never the answers of look-ups and
loads.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from tutti.base.arrays import Keys
from tutti.base.callbacks import Guard
from tutti.base.process import Owned
from tutti.errors import KeyMissing
from tutti.integration.sglang.direct.piece_trials import Flight, PieceTrials
from tutti.integration.sglang.direct.reads import Read
from tutti.integration.sglang.direct.stored_pool import StoredPool
from tutti.integration.sglang.metrics import LOAD
from tutti.scheduler.dispatcher import Dispatcher, Schedule
from tutti.scheduler.event import BatchJoined, LayersReady, LoadGone, LoadKnown
from tutti.scheduler.loads_and_writes import LoadKind
from tutti.scheduler.state import Issue

_PIECE_NBYTES = 16 << 20
_PIECE_PAGES = 64
_PIECES_MIN = 4  #: in what may be staged ahead
_IDLE_S = 60.0
_NO_PAGES = np.zeros(0, np.int64)


@dataclass
class _Note:
    """Pages that one request may load: keys (n, 16) by stored_pool, and how far they were offered.

    asked_ns: when it was first looked up.  seen: the look-up that was its last.
    """

    wanted: Sequence[tuple[StoredPool, Keys]]
    asked_ns: int
    seen: int
    next_pool: int = 0
    next_row: int = 0


@dataclass(eq=False)
class _Staged:
    """A read whose staging is kept, for requests (by id) and for batches that use it now; or an
    offer of one, which has no staging yet.

    name: its name in the queue.  used: rows that a batch took.  arrived: the queue knows that it
    was read.
    """

    name: str
    read: Read
    rids: set[str]
    users: int = 0
    used: set[int] = field(default_factory=set)
    arrived: bool = False
    listed: bool = True


class ReadAhead(Owned):
    """Staged pages of waiting requests.  Thread-safe.  See scheduler.dispatcher.LoadIssuer.

    schedule: of the queue that the pools share, with the limit of staging for read-ahead.
    lookups: a request that is not looked up again within this many look-ups is forgotten.
    measured: called with the bytes and seconds of each read.
    trials: find out whether pieces are better read alone.
    """

    def __init__(
        self,
        stored_pools: Sequence[StoredPool],
        *,
        schedule: Schedule,
        lookups: int,
        timeout_s: float,
        measured: Callable[[int, float], None],
        log_error: Callable[[str, object], None],
    ) -> None:
        self._limit_nbytes = schedule.limits.read_ahead_nbytes
        self._lookups = lookups
        self._timeout_s = timeout_s
        self._stored_pools = stored_pools
        self._measured = measured
        self._log_error = log_error
        self._changed = threading.Condition()
        self._notes: OrderedDict[str, _Note] = OrderedDict()
        self._staged: list[_Staged] = []
        self._by_key: dict[tuple[str, bytes], tuple[_Staged, int]] = {}
        self._clock = 0
        self._names = itertools.count()
        self._due: set[str] = set()  # requests whose next piece may be offered
        self._offers: dict[str, _Staged] = {}  # by name
        self._issued: deque[str] = deque()  # names
        self.trials = PieceTrials()
        self._wake = threading.Event()
        self._stop = False
        self._thread: threading.Thread | None = None
        if self._limit_nbytes and any(stored_pool.loads.pages for stored_pool in stored_pools):
            self._queue = Dispatcher.join(schedule, Guard())
            self._prefix = self._queue.attach(self)
            self._thread = threading.Thread(target=self._run, name="tutti-ahead", daemon=True)
            self._thread.start()

    def note(self, rid: str, wanted: Sequence[tuple[StoredPool, Keys]]) -> None:
        """Counts a look-up.  wanted: what request ``rid`` may load soon.  Does not block."""
        if self._thread is None:
            return
        with self._changed:
            self._clock += 1
            old = self._notes.get(rid)
            if old is not None and _same(old.wanted, wanted):
                old.seen = self._clock
                self._notes.move_to_end(rid)
            elif wanted:
                asked_ns = self._queue.now_ns() if old is None else old.asked_ns
                self._notes[rid] = _Note(wanted, asked_ns, self._clock)
                self._notes.move_to_end(rid)
                self._due.add(rid)
            else:
                self.forget(rid)
            while self._notes:
                oldest = next(iter(self._notes))
                if self._notes[oldest].seen >= self._clock - self._lookups:
                    break
                self.forget(oldest)
        self._wake.set()

    def forget(self, rid: str) -> None:
        """Forgets a request that loads now, or has ended."""
        with self._changed:
            self._notes.pop(rid, None)
            self._due.discard(rid)
            for staged in [*self._offers.values(), *self._staged]:
                if rid in staged.rids:
                    staged.rids.discard(rid)
                    self._drop_unwanted(staged)

    def staged_pages(self, stored_pool: StoredPool, keys: Keys) -> int:
        """Number of ``keys``, from the first on, that are staged or being read."""
        with self._changed:
            if not self._by_key:
                return 0
            for row, key in enumerate(keys):
                place = self._by_key.get((stored_pool.name, key.tobytes()))
                if place is None or place[0].name in self._offers:
                    return row
            return len(keys)

    def take(self, stored_pool: StoredPool, keys: Sequence[bytes]) -> dict[int, tuple[Read, int]]:
        """(read, row in it) of each row of ``keys`` that is staged.

        The reads are kept until ``release`` was called once for each.  Empty if all keys must go
        through staging, and the rest would not fit beside these reads: they may also hold pages of
        other requests.
        """
        with self._changed:
            for staged in self._staged:
                if staged.listed and staged.read.has_failed:  # the thread has not noticed yet
                    self._unlist(staged)
            known, name = self._by_key, stored_pool.name
            found = {row: known[name, key] for row, key in enumerate(keys) if (name, key) in known}
            found = {row: one for row, one in found.items() if one[0].name not in self._offers}
            users = {staged for staged, _ in found.values()}
            needed = sum(len(staged.read.keys) for staged in users) + len(keys) - len(found)
            if stored_pool.memory is None and needed > stored_pool.loads.pages:
                return {}
            for staged, place in found.values():
                staged.used.add(place)
            for staged in users:
                staged.users += 1
        return {row: (staged.read, place) for row, (staged, place) in found.items()}

    def join(self, reads: Sequence[Read], batch: str) -> None:
        """Tells the queue which reads a batch took: the batch's step waits for those under way."""
        with self._changed:
            for staged in self._staged if reads else ():
                if staged.read in reads and not staged.arrived:
                    self._queue.add(BatchJoined(self._queue.now_ns(), staged.name, batch))
                elif staged.read in reads:
                    self._withdraw(staged.name)
        if reads:
            self._queue.decide()

    def release(self, read: Read) -> None:
        """Releases a read that a batch took."""
        with self._changed:
            for staged in self._staged:
                if staged.read is read:
                    staged.users -= 1
                    self._drop_unwanted(staged)
                    return

    def make_room(self, stored_pool: StoredPool, pages: int) -> None:
        """Drops reads that no batch uses, the oldest first, until ``pages`` of staging are free."""
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
                self.forget(rid)

    def close(self, timeout_s: float) -> None:
        """As reset, and ends the thread."""
        self.reset()
        self._stop = True
        self._wake.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(timeout_s)
            self._queue.detach(self._prefix)
            self._queue.leave()

    def read(self, launch: Issue) -> None:
        self._issued.append(launch.name)
        self._wake.set()

    def _drop_unwanted(self, staged: _Staged) -> None:
        if staged.rids or staged.users:
            return
        self._unlist(staged)
        self._withdraw(staged.name)
        if self._offers.pop(staged.name, None) is not None:
            return
        self._staged.remove(staged)
        metrics = staged.read.stored_pool.metrics
        metrics.count("ahead_used_pages", len(staged.used))
        metrics.count("ahead_unused_pages", len(staged.read.keys) - len(staged.used))
        staged.read.retire()

    def _withdraw(self, name: str) -> None:
        """Withdraws a piece from the queue; the thread does it."""
        if name in self._queue.under_way:
            self._queue.add(LoadGone(self._queue.now_ns(), name))
        self._wake.set()

    def _unlist(self, staged: _Staged) -> None:
        """Removes a read from the table."""
        if staged.listed:
            staged.listed = False
            for key in staged.read.keys:
                self._by_key.pop((staged.read.stored_pool.name, key.tobytes()), None)

    def _run(self) -> None:
        flying: deque[tuple[_Staged, Flight]] = deque()
        while not self._stop:  # ended by close()
            self._wake.wait(_IDLE_S)
            self._wake.clear()
            while self._fill(flying):  # bounded by the notes
                self._finish(*flying.popleft())
            self.trials.rest()

    def _fill(self, flying: deque[tuple[_Staged, Flight]]) -> bool:
        """Starts the pieces that were issued; returns whether any is in flight."""
        while (staged := self._next()) is not None:  # bounded by the queue's limit
            try:
                read = staged.read
                most = self._most_pages(read.stored_pool)
                flight = self.trials.begin(read.stored_pool, read.keys, most, time.monotonic())
                read.start()
            except Exception as error:
                # The thread must survive; batches read pages that are not staged.
                self._failed(staged, error)
                continue
            for _, other in flying:
                other.shared = flight.shared = True
            flying.append((staged, flight))
        return bool(flying)

    def _finish(self, staged: _Staged, flight: Flight) -> None:
        try:
            over = staged.read.wait_over(flight.began_s + self._timeout_s)
            self._ended(staged, flight, over, self.trials.end(flight, time.monotonic()))
        except Exception as error:
            self._failed(staged, error)

    def _next(self) -> _Staged | None:
        """Offers pieces, and claims one that was issued; None if there is none."""
        with self._changed:
            if self._due and not self._stop and self._may_read():
                for rid in sorted(self._due, key=lambda rid: self._notes[rid].asked_ns):
                    self._offer(rid, self._notes[rid])
                self._due.clear()
        self._queue.decide()
        with self._changed:
            while self._issued:  # bounded by what was issued
                staged = self._offers.pop(self._issued.popleft(), None)
                if staged is not None:  # else it was withdrawn
                    return self._claim(staged)
        return None

    def _may_read(self) -> bool:
        """Whether look-ups can find anything: a prefix needs all pools."""
        return all(stored_pool.reads.closed for stored_pool in self._stored_pools)

    def _offer(self, rid: str, note: _Note) -> None:
        """Offers the next piece of a request; not beyond pages that are offered for another."""
        while note.next_pool < len(note.wanted):
            stored_pool, keys = note.wanted[note.next_pool]
            rows, other = self._missing(rid, note, stored_pool, keys)
            if rows:
                self._announce(stored_pool, keys[rows], rid, note.asked_ns)
            if rows or other:  # this request is due again when that piece is issued
                return
            note.next_pool, note.next_row = note.next_pool + 1, 0

    def _missing(
        self, rid: str, note: _Note, stored_pool: StoredPool, keys: Keys
    ) -> tuple[list[int], bool]:
        """(rows of the next keys that are not staged, whether an offer of another ends them)."""
        most, rows = self._most_pages(stored_pool), list[int]()
        while note.next_row < len(keys) and len(rows) < most:
            place = self._by_key.get((stored_pool.name, keys[note.next_row].tobytes()))
            if place is None:
                rows.append(note.next_row)
            else:
                place[0].rids.add(rid)
                if place[0].name in self._offers:
                    return rows, True
            note.next_row += 1
        return rows, False

    def _most_pages(self, stored_pool: StoredPool) -> int:
        """Number of pages of a whole piece."""
        most_nbytes = min(_PIECE_NBYTES, self._limit_nbytes // _PIECES_MIN)
        return max(1, min(_PIECE_PAGES, most_nbytes // stored_pool.page_nbytes))

    def _announce(self, stored_pool: StoredPool, keys: Keys, rid: str, asked_ns: int) -> None:
        """Announces a piece with all layers, because staged pages are found by key."""
        name, layout = f"{self._prefix}ahead {next(self._names)}", stored_pool.store.layout
        read = Read(stored_pool, keys, _NO_PAGES, staged=True, batch=name, ahead=True)
        staged = self._offers[name] = _Staged(name, read, {rid})
        for row, key in enumerate(keys):
            self._by_key[stored_pool.name, key.tobytes()] = (staged, row)
        known = LoadKnown(
            self._queue.now_ns(),
            name,
            layers=layout.layers,
            layer_nbytes=read.nbytes // layout.layers,
            tokens=0,
            prefix_tokens=0,
            unit_layers=layout.layers,
            batch=name,
            kind=LoadKind.READ_AHEAD,
            asked_ns=asked_ns,
            alone=self.trials.most(stored_pool) == 1,
        )
        self._queue.add(known)

    def _claim(self, staged: _Staged) -> _Staged | None:
        """Allocates staging for an issued piece; None if there is none."""
        read, rids = staged.read, staged.rids & self._notes.keys()
        self._due |= rids
        pages = read.stored_pool.loads.allocate(len(read.keys)) if self._may_read() else None
        if pages is None:
            self._unlist(staged)
            self._withdraw(staged.name)
            for rid in rids:  # batches use all of staging: these requests stop
                self._notes[rid].next_pool = len(self._notes[rid].wanted)
            return None
        read.pages = pages
        self._staged.append(staged)
        return staged

    def _ended(self, staged: _Staged, flight: Flight, over: bool, duration_s: float) -> None:
        error = staged.read.outcome() if over else None
        if over and error is None:
            metrics = staged.read.stored_pool.metrics
            layers = staged.read.stored_pool.store.layout.layers
            with self._changed:
                staged.arrived = True
                if staged.name in self._queue.under_way:
                    self._queue.add(LayersReady(self._queue.now_ns(), staged.name, layers))
            self._queue.decide()
            # Counted here: any number of batches may use it.
            metrics.count("moved_bytes", staged.read.nbytes, LOAD)
            metrics.count("busy_seconds", duration_s, LOAD)
            metrics.count("ahead_pages", len(staged.read.keys))
            nbytes, seconds = self.trials.observe(flight, duration_s)
            if nbytes and not staged.read.stored_pool.kv_pool.trailing:
                self._measured(nbytes, seconds)
            return
        self._failed(staged, error)

    def _failed(self, staged: _Staged, error: Exception | None) -> None:
        """Removes a failed read from the table.  error: None for a timeout of the medium."""
        if not isinstance(error, KeyMissing):
            what = "timeout" if error is None else type(error).__name__
            self._log_error(f"read-ahead: {what}", error or "the medium does not answer")
            staged.read.stored_pool.remember(staged.read.keys)
            staged.read.stored_pool.reads.failure()
        with self._changed:
            self._unlist(staged)
            staged.rids.clear()
            self._withdraw(staged.name)  # reads of a batch that took it may wait for it
            if staged in self._staged:
                self._drop_unwanted(staged)


def _same(old: Sequence[tuple[StoredPool, Keys]], new: Sequence[tuple[StoredPool, Keys]]) -> bool:
    """Whether both name the same pages; compares the first and last key of each stored_pool."""
    return [*map(_ends, old)] == [*map(_ends, new)]


def _ends(wanted: tuple[StoredPool, Keys]) -> tuple[str, int, bytes, bytes]:
    stored_pool, keys = wanted
    return stored_pool.name, len(keys), keys[:1].tobytes(), keys[-1:].tobytes()
