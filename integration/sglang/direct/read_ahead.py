"""Reads pages of requests that wait in SGLang's queue into staging, within limits.

A look-up only adds a note. One thread reads the notes, announces one short piece at a time to the
pools' queue, and reads it when the queue issues it; two pieces at a time if that is faster
(piece_trials.py). Staged pages are found by key, for any request. This changes when bytes arrive,
but never the answers of look-ups and loads.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tutti.base.arrays import Keys
from tutti.base.callbacks import Guard
from tutti.base.process import Owned
from tutti.errors import KeyMissing
from tutti.integration.sglang.direct.piece_trials import Flight, PieceTrials
from tutti.integration.sglang.direct.reads import Read
from tutti.integration.sglang.direct.stored_pool import StoredPool
from tutti.integration.sglang.metrics import LOAD
from tutti.scheduler.dispatcher import Dispatcher, Schedule
from tutti.scheduler.event import LayersReady, LoadGone, LoadKnown
from tutti.scheduler.loads_and_writes import LoadKind
from tutti.scheduler.state import Issue

_PIECE_NBYTES = 16 << 20
_PIECE_PAGES = 64
_PIECES_MIN = 4  #: in what may be staged ahead
_IDLE_S = 60.0


@dataclass
class _Note:
    """Pages that one request may load: keys (n, 16) by stored_pool, and how far they were read."""

    wanted: Sequence[tuple[StoredPool, Keys]]
    seen: int
    next_pool: int = 0
    next_row: int = 0


@dataclass(eq=False)
class _Piece:
    """Keys (n, 16) that were announced to the queue under a name; none is staged yet."""

    name: str
    rid: str
    stored_pool: StoredPool
    keys: Keys
    is_issued: bool = False


@dataclass(eq=False)
class _Staged:
    """A read whose staging is kept, for requests (by id) and for batches that use it now.

    name: its name in the queue.  used: rows that a batch took.
    """

    name: str
    read: Read
    rids: set[str] = field(default_factory=set)
    users: int = 0
    used: set[int] = field(default_factory=set)
    listed: bool = True


class ReadAhead(Owned):
    """Staged pages of waiting requests.  Thread-safe.  See scheduler.dispatcher.LoadIssuer.

    schedule: of the queue that the pools share, with the limit of staging for read-ahead.
    lookups: a request that is not looked up again within this many look-ups is forgotten.
    measured: called with the bytes and seconds of each read.
    trials: decide how many pieces are read at once.
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
        self._piece: _Piece | None = None
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
                self._notes[rid] = _Note(wanted, self._clock)
                self._notes.move_to_end(rid)
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
            if self._piece is not None and self._piece.rid == rid:
                self._queue.add(LoadGone(self._queue.now_ns(), self._piece.name))
                self._piece = None
            for staged in [staged for staged in self._staged if rid in staged.rids]:
                staged.rids.discard(rid)
                self._drop_unwanted(staged)

    def staged_pages(self, stored_pool: StoredPool, keys: Keys) -> int:
        """Number of ``keys``, from the first on, that are staged or being read."""
        with self._changed:
            if not self._by_key:
                return 0
            for row, key in enumerate(keys):
                if (stored_pool.name, key.tobytes()) not in self._by_key:
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
            users = {staged for staged, _ in found.values()}
            needed = sum(len(staged.read.keys) for staged in users) + len(keys) - len(found)
            if stored_pool.memory is None and needed > stored_pool.loads.pages:
                return {}
            for staged, place in found.values():
                staged.used.add(place)
            for staged in users:
                staged.users += 1
        return {row: (staged.read, place) for row, (staged, place) in found.items()}

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
        with self._changed:
            if self._piece is not None and self._piece.name == launch.name:
                self._piece.is_issued = True
        self._wake.set()

    def _drop_unwanted(self, staged: _Staged) -> None:
        if staged.rids or staged.users:
            return
        self._unlist(staged)
        self._staged.remove(staged)
        metrics = staged.read.stored_pool.metrics
        metrics.count("ahead_used_pages", len(staged.used))
        metrics.count("ahead_unused_pages", len(staged.read.keys) - len(staged.used))
        staged.read.retire()
        self._withdraw(staged.name)

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
        """Starts as many pieces as may be in flight; returns whether any is."""
        while len(flying) < (flying[0][1].most if flying else 1):
            staged = self._next()
            if staged is None:
                break
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
        """Claims the issued piece, or announces the next one; None if none was issued."""
        with self._changed:
            if self._piece is None and not self._stop and self._may_read():
                self._piece = self._find()
                if self._piece is not None:
                    self._announce(self._piece)
        self._queue.decide()
        with self._changed:
            piece = self._piece
            if piece is None or not piece.is_issued:
                return None
            self._piece = None
            return self._claim(piece)

    def _find(self) -> _Piece | None:
        """The next piece to read, for the request that has waited longest."""
        for rid, note in list(self._notes.items()):
            while note.next_pool < len(note.wanted):
                stored_pool, keys = note.wanted[note.next_pool]
                if note.next_row < len(keys):
                    rows = self._missing(rid, note, stored_pool, keys)
                    if rows:
                        name = f"{self._prefix}ahead {next(self._names)}"
                        return _Piece(name, rid, stored_pool, keys[rows])
                else:
                    note.next_pool, note.next_row = note.next_pool + 1, 0
        return None

    def _may_read(self) -> bool:
        """Whether look-ups can find anything: a prefix needs all pools."""
        return all(stored_pool.reads.closed for stored_pool in self._stored_pools)

    def _missing(self, rid: str, note: _Note, stored_pool: StoredPool, keys: Keys) -> list[int]:
        """Rows of the next keys that are not staged."""
        most, rows = self._most_pages(stored_pool), list[int]()
        while note.next_row < len(keys) and len(rows) < most:
            place = self._by_key.get((stored_pool.name, keys[note.next_row].tobytes()))
            if place is None:
                rows.append(note.next_row)
            else:
                place[0].rids.add(rid)
            note.next_row += 1
        return rows

    def _most_pages(self, stored_pool: StoredPool) -> int:
        """Number of pages of a whole piece."""
        most_nbytes = min(_PIECE_NBYTES, self._limit_nbytes // _PIECES_MIN)
        return max(1, min(_PIECE_PAGES, most_nbytes // stored_pool.page_nbytes))

    def _announce(self, piece: _Piece) -> None:
        """Announces a piece with all layers, because staged pages are found by key."""
        layout = piece.stored_pool.store.layout
        known = LoadKnown(
            self._queue.now_ns(),
            piece.name,
            layers=layout.layers,
            layer_nbytes=len(piece.keys) * piece.stored_pool.page_nbytes // layout.layers,
            tokens=0,
            prefix_tokens=0,
            unit_layers=layout.layers,
            batch=piece.name,
            kind=LoadKind.READ_AHEAD,
        )
        self._queue.add(known)

    def _claim(self, piece: _Piece) -> _Staged | None:
        """Allocates staging for an issued piece; None if there is none."""
        stored_pool = piece.stored_pool
        pages = stored_pool.loads.allocate(len(piece.keys)) if self._may_read() else None
        if pages is None:
            self._withdraw(piece.name)
            note = self._notes[piece.rid]
            note.next_pool = len(note.wanted)  # batches use all of staging: stop for this request
            return None
        read = Read(stored_pool, piece.keys, pages, staged=True, batch=piece.name, ahead=True)
        staged = _Staged(piece.name, read, {piece.rid})
        self._staged.append(staged)
        for row, key in enumerate(piece.keys):
            self._by_key[stored_pool.name, key.tobytes()] = (staged, row)
        return staged

    def _ended(self, staged: _Staged, flight: Flight, over: bool, duration_s: float) -> None:
        error = staged.read.outcome() if over else None
        if over and error is None:
            metrics = staged.read.stored_pool.metrics
            layers = staged.read.stored_pool.store.layout.layers
            self._queue.post(LayersReady(self._queue.now_ns(), staged.name, layers))
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
