"""Starts the puts and loads of one pool when the scheduler of the process decides so.

A put is cut into parts of whole pages, which the writer takes with the put's own ticket.  A long
put is granted layer by layer, so that it can stop when a load comes.  Short parts wait while the
writer is busy, and are written together: decoding appends single pages to many chains, and each
alone would cost a command per layer and a record.  As in Nagle's algorithm no clock decides: they
start when the first batch ends.

The engine gets a load at once, but reads only layers that were granted; arrivals are reported a few
at a time.  Loads into GPU memory share a stream, which waits for them in the order of their start,
so the next is announced when the one before is granted in full.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from contextlib import nullcontext, suppress
from functools import partial
from queue import Empty
from typing import Any

import numpy as np
import numpy.typing as npt

from tutti.base.arrays import FIRST_ROWS, Rows
from tutti.base.process import Owned
from tutti.base.threads import start_thread
from tutti.errors import TuttiError
from tutti.gio_uring.iocb import PagedMemory, Pages
from tutti.scheduler.dispatcher import Dispatcher, Schedule
from tutti.scheduler.event import (
    BatchJoined,
    LayersReady,
    LoadGone,
    LoadKnown,
    PagesWritten,
    WriteGone,
    WriteKnown,
    WriteStopped,
)
from tutti.scheduler.loads_and_writes import LoadKind, report_at
from tutti.scheduler.state import Issue
from tutti.transfers.in_flight import InFlight, NotAdmitted
from tutti.transfers.loader import QueuedLoad, are_passed
from tutti.transfers.put_request import NO_ROWS, OpenParts, PutGrant, PutPart, PutRequest, QueuedPut
from tutti.transfers.starters import LoadStarter, PartStarter
from tutti.transfers.tickets import LoadProgress, Outcome, PutProgress

COMMAND_NBYTES = 256 << 10  #: a run with so many bytes per layer is worth its own commands
LONG_NBYTES = UNIT_NBYTES = 16 << 20  #: least size of a put that can stop, and size of its parts
_LOOK_S, _NEVER, _FEW_PAGES = 0.5, 2**32 - 1, 16


class TransferQueue(Owned):
    """Stands before the writer and the loader of one pool; see scheduler.dispatcher.TransferIssuer.

    schedule: None starts everything at once.
    """

    def __init__(
        self, core: InFlight, writer: PartStarter, loader: LoadStarter, schedule: Schedule | None
    ) -> None:
        self._core = core
        self._writer = writer
        self._loader = loader
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()  # the core's, where both are held, was taken before
        self._turn = threading.Condition(self._lock)  # of loads into GPU memory
        self._puts: dict[str, QueuedPut] = {}
        self._open: set[PutGrant] = set()  # parts of all puts that stop
        self._loads: dict[str, QueuedLoad] = {}
        self._alone: tuple[str, LoadProgress | None] = ("", None)  # the last, until it was reported
        self._stopping = self._closed = False
        padded_nbytes = core.geometry.slice_padded_nbytes
        self._short = min(core.geometry.group_slots, -(-COMMAND_NBYTES // padded_nbytes))
        self._slice_nbytes = core.geometry.slice_nbytes
        # A put may wait for staging or space; decisions, and with them loads, must not.  One thread
        # at a time starts parts: that of a caller of ``put``, or the starter.
        self._parts: deque[PutPart] = deque()
        self._held: list[PutPart] = []  # short ones, while the writer is at work
        self._held_since = 0  # batches that the writer had finished
        self._starting, self._here = threading.Lock(), threading.local()
        self._starter = threading.Thread(target=self._run, name="tutti-puts", daemon=True)
        self.dispatcher: Dispatcher | None = None
        self._prefix, self._most = "", 0
        if schedule is not None:
            self._most = schedule.limits.locked_pages if schedule.puts else 0
            self.dispatcher = Dispatcher.join(schedule, core.guard)
            self._prefix = self.dispatcher.attach(self)
        start_thread(self._starter, give_up=self._leave)
        writer.batch_ended = lambda: core.wake.put(None) if self._held else None

    def put(self, request: PutRequest) -> PutProgress:
        """Starts a put, now or later; see ObjectStore.put.

        A put of more pages than may wait starts at once, as dropping it would free nothing.
        """
        core, dispatcher, n = self._core, self.dispatcher, request.n
        now = FIRST_ROWS[:n] if n <= FIRST_ROWS.size else np.arange(n, dtype=np.int64)
        with core.lock:
            if not core.ready:
                core.wait_admitted(core.config.timeout_s, request.memory)
            progress = PutProgress(n, core.guard, core.store_latency)
            put = QueuedPut(request, progress, n, now)
            core.begin(request.memory)
            if dispatcher is not None and self._most:
                # A few pages do not wait if nothing else is under way; the writer looks them up.
                meets = n > _FEW_PAGES or bool(dispatcher.under_way)
                absent = core.absent(request.keys) if meets else None
                count = n if absent is None else np.count_nonzero(absent)
                with self._lock:
                    if 0 < count <= self._most and not self._stopping:
                        # Keys that are present cost the device nothing, so they need not wait.
                        put.name = f"{self._prefix}{next(self._numbers)}"
                        put.rows = now if absent is None else np.flatnonzero(absent)
                        now = NO_ROWS if absent is None else np.flatnonzero(~absent)
                        is_long = count * core.object_nbytes >= LONG_NBYTES
                        if is_long and count >= 2 * self._short and request.memory.path is None:
                            put.open = OpenParts(core.layers, self._open)
                        self._puts[put.name] = put
        error = self._put_now(put, now) if now.size or not put.name else None
        if put.name and dispatcher is not None:
            self._post_put(dispatcher, put)
        elif error is not None:
            raise error
        return progress

    def _post_put(self, dispatcher: Dispatcher, put: QueuedPut) -> None:
        known = WriteKnown(dispatcher.now_ns(), put.name, put.rows.size, self._core.object_nbytes)
        if put.open is not None:
            known.can_stop, known.unit_pages = True, -(-self._part_rows(put) // self._core.layers)
        over, parts = self._over() if dispatcher.under_way else 0, []
        with self._lock:  # a close at the same time must not release it first
            if put.is_free:
                return
            self._puts[put.name] = self._puts.pop(put.name)  # in the order of the events
            if not dispatcher.alone(known, over):
                dispatcher.add(known)
            elif len(parts := self._launch(put, put.rows.size)) > 1:
                self._parts += parts  # in their order, also if another follows meanwhile
        if len(parts) == 1:  # nothing is under way that it could go behind, or together with
            self._start(parts)
            return
        self._here.puts = True
        try:
            dispatcher.decide()
        finally:
            self._here.puts = False
        self._start_parts(len(self._parts))

    def load(
        self,
        keys: npt.NDArray[np.uint8],
        pages: Pages,
        memory: PagedMemory,
        batch: str,
        ahead: bool,
        admit: bool = True,
    ) -> LoadProgress:
        """Starts a load, whose layers are read in their turn; see ObjectStore.load, Loader.load."""
        core, dispatcher, n, start = self._core, self.dispatcher, len(keys), self._loader.load
        if dispatcher is None or not n or self._stopping or (batch and dispatcher.is_issued(batch)):
            return start(keys, pages, memory, admit=admit, ahead=ahead)
        name, at_ns, load = f"{self._prefix}{next(self._numbers)}", dispatcher.now_ns(), None
        known = LoadKnown(at_ns, name, core.layers, self._slice_nbytes * n, 0, 0, 1, batch)
        if memory.path is not None:
            known.unit_layers = 1 if getattr(memory.path, "holds", False) else core.layers
            known.blocks = getattr(memory.path, "launches", False)
        elif ahead:
            known.kind, known.batch = LoadKind.BACKGROUND, batch or name
        # A load that waits for a clear first would be measured as slow, so it is not alone.
        over = self._over() if dispatcher.under_way else 0
        try:
            if core.ready and dispatcher.alone(known, over):
                progress = start(keys, pages, memory, admit=admit, waits=False, ahead=ahead)
                self._alone = name, progress
            else:
                load = QueuedLoad(name, core.layers)
                with core.admitted(core.config.timeout_s, memory) if admit else nullcontext():
                    given = keys, pages, memory, ahead
                    progress = self._load_in_turn(dispatcher, load, known, given)
        except BaseException as error:
            self._gone(dispatcher, name, 0, load)
            if load is None and isinstance(error, NotAdmitted):  # a clear began meanwhile
                return self.load(keys, pages, memory, batch, ahead, admit)
            raise
        if ahead and memory.path is None:
            joined = BatchJoined(at_ns, known.batch, known.batch)
            progress.on_wanted = partial(dispatcher.post, joined)
        progress.on_settled(partial(self._gone, dispatcher, name, core.layers, load))
        return progress

    def _load_in_turn(
        self, dispatcher: Dispatcher, load: QueuedLoad, known: LoadKnown, given: tuple[Any, ...]
    ) -> LoadProgress:
        timeout_s = self._core.config.timeout_s
        load.due = threading.Event() if given[2].path is not None else None
        can_hold = load.due is None or known.unit_layers < load.layers
        with self._turn:
            if load.due is not None and can_hold:
                self._turn.wait_for(partial(are_passed, self._loads), timeout_s)
                known.at_ns = dispatcher.now_ns()
            self._loads[load.name] = load
        if self._stopping:
            self._release_load(load)
        else:
            dispatcher.post(known)
        if load.due is not None and not load.due.wait(timeout_s):
            load.granted = load.layers  # a stuck scheduler delays loads, but does not stop them
        held = can_hold and load.granted < load.layers
        progress = self._loader.load(*given[:3], held=held, ahead=given[3])
        load.progress, load.started = progress if held else None, True
        try:
            self._go_on(load)  # what was decided meanwhile
        except BaseException:
            progress.cancel(timeout_s)
            raise
        return progress

    def _over(self) -> int:
        """Loads that have ended, as their callers know, and whose end was not added yet."""
        progress = self._alone[1]
        try:
            return int(progress is not None and progress.is_done())
        except TuttiError:  # a lost context of a GPU, which the load's caller is told
            return 0

    def _release_load(self, load: QueuedLoad) -> None:
        """Lets a load go on without further decisions."""
        load.granted = load.layers
        self._go_on(load)

    def _go_on(self, load: QueuedLoad) -> None:
        if load.due is not None:  # wakes the threads that called ``load``, and the next one's
            load.due.set()
            with self._turn:
                self._turn.notify_all()
        if load.progress is not None:
            self._grant(load, load.progress)

    def stop(self, timeout_s: float) -> None:
        """Starts all that waits, and waits for its end.  Later transfers start at once."""
        core, dispatcher = self._core, self.dispatcher
        with self._lock:
            self._stopping = True
            puts, loads = list(self._puts.values()), list(self._loads.values())
        for put in puts:
            rows = self._give_up(put)
            if rows.size and dispatcher is not None:
                self._parts.append(self._part(put, rows))
                dispatcher.post(WriteGone(dispatcher.now_ns(), put.name, withdrawn=True))
        for load in loads:
            self._release_load(load)
        core.wake.put(None)
        with core.lock:
            core.changed.wait_for(lambda: not (self._puts or self._parts or self._held), timeout_s)
        if self._starting.acquire(timeout=timeout_s):  # what was taken last has begun
            self._starting.release()

    def close(self) -> None:
        """Ends the thread, and leaves the scheduler."""
        self.stop(0.0)
        self._closed = True
        self._core.wake.put(None)
        self._starter.join(1.0)
        self._leave()

    def _leave(self) -> None:
        if (dispatcher := self.dispatcher) is not None:
            dispatcher.detach(self._prefix)
            dispatcher.leave()

    def read(self, launch: Issue) -> None:
        with self._lock:
            load = self._loads.get(launch.name)
            if load is None or self._stopping:
                return
            load.granted = launch.first + launch.count
        self._go_on(load)

    def _grant(self, load: QueuedLoad, progress: LoadProgress) -> None:
        """Tells a load what is granted; one that is granted in full reports only its end."""
        with self._lock:  # or another thread's later grant would be followed by this one
            told_at = report_at(load.ready, load.granted) if load.granted < load.layers else _NEVER
            progress.grant(load.granted, told_at, partial(self._arrived, load, progress))

    def _arrived(self, load: QueuedLoad, progress: LoadProgress) -> None:
        dispatcher, ready = self.dispatcher, min(progress.layers_ready, load.granted)
        with self._lock:
            if dispatcher is None or ready <= load.ready:
                return
            load.ready = ready
            dispatcher.add(LayersReady(dispatcher.now_ns(), load.name, ready))
        if ready < load.granted:
            self._grant(load, progress)
        dispatcher.decide()

    def write(self, launch: Issue) -> None:
        with self._lock:
            put = self._puts.get(launch.name)
            if put is None or put.is_free or put.granted < launch.first:
                return  # given up meanwhile
            self._parts += self._launch(put, max(launch.first + launch.count, put.granted))
        if not getattr(self._here, "puts", False):
            self._core.wake.put(None)

    def stop_write(self, name: str) -> None:
        """See TransferIssuer.  Commands that are under way end."""
        with self._lock:
            put, dispatcher = self._puts.get(name), self.dispatcher
            if put is None or put.open is None or put.is_free or dispatcher is None:
                return
            end = put.open.stop(min(put.granted, put.launched))
            self._report(put)
            put.granted = max(end, put.written)
            dispatcher.add(WriteStopped(dispatcher.now_ns(), name, put.granted))
        if self._held:
            self._core.wake.put(None)

    def copy_out(self, name: str) -> None:
        """See TransferIssuer.  A pool has no staging, so its limits never ask for a copy."""
        raise NotImplementedError("the limits of a pool have no staged pages")

    def drop(self, name: str) -> None:
        put = self._puts.get(name)
        if put is not None and (waiting := self._give_up(put)).size:
            lost = self._core.dropped(put.request.keys[waiting])
            if lost is None:  # the starter asks
                self._parts.append(self._part(put, waiting)._replace(is_dropped=True))
                self._core.wake.put(None)
                return
            put.progress.outcome[waiting] = np.where(lost, Outcome.DROPPED, Outcome.PRESENT)
            self._end_rows(put, waiting.size)

    def _put_now(self, put: QueuedPut, rows: Rows) -> BaseException | None:
        """Starts rows that wait for no decision; returns why that failed."""
        if not put.left:  # no keys at all
            self._end_rows(put, 0)
        if not rows.size:
            return None
        part = self._part(put, rows)
        if rows.size < self._short and not put.name and self._writer.active:
            self._hold(part)
            self._start_parts(0)
            return None
        return self._writer.put([part])

    def _part(self, put: QueuedPut, rows: Rows) -> PutPart:
        """A part of rows that wait for no decision."""
        return PutPart(put.request, rows, put.progress, lambda *_: self._end_rows(put, rows.size))

    def _launch(self, put: QueuedPut, end: int) -> list[PutPart]:
        """Grants rows up to ``end``, and makes parts of as many as may be open.  Lock held."""
        parts, put.granted, ended = [], end, partial(self._ended, put)
        while put.launched < end and (put.open is None or put.open.has_room):  # a row each turn
            rows = end - put.launched if put.open is None else self._part_rows(put)
            first, put.launched = put.launched, put.launched + rows
            grant = None if put.open is None else put.open.add(first, rows)
            taken = put.rows if rows == put.rows.size else put.rows[first : put.launched]
            parts.append(PutPart(put.request, taken, put.progress, ended, grant))
        if put.open is not None:
            put.open.grant(end, partial(self._progressed, put))
        return parts

    def _part_rows(self, put: QueuedPut) -> int:
        """Rows of the next part: a batch or UNIT_NBYTES per layer, and no short rest after it."""
        left, core, batch = put.rows.size - put.launched, self._core, self._writer.batch_pages
        most = min(batch, max(self._short, UNIT_NBYTES * core.layers // core.object_nbytes))
        if left >= most + self._short:
            return most
        return left if left <= batch else max(1, left - self._short)

    def _progressed(self, put: QueuedPut, end: int) -> None:
        dispatcher = self.dispatcher
        with self._lock:
            if dispatcher is None or put.open is None or put.granted != end:
                return  # stopped, or granted more meanwhile
            put.open.written(end)
            self._report(put)
        dispatcher.decide()

    def _report(self, put: QueuedPut, failed: int = 0, there: int = 0) -> None:
        """Tells the scheduler what is written.  Lock held: events come in the order of numbers."""
        dispatcher, rows = self.dispatcher, put.ended + (put.open.done if put.open else 0)
        if dispatcher is not None and rows > put.written:
            put.written = rows
            put.granted = max(put.granted, rows)  # it stopped, and what was under way ended
            dispatcher.add(PagesWritten(dispatcher.now_ns(), put.name, rows, failed, there))

    def _run(self) -> None:
        while not self._closed:  # bounded by close()
            with suppress(Empty):
                self._core.wake.get(timeout=_LOOK_S)
            self._core.refill()
            with self._lock:  # what was granted while too many parts were open
                for put in self._puts.values():
                    if put.launched < put.granted:
                        self._parts += self._launch(put, put.granted)
            self._start_parts(None)

    def _start_parts(self, most: int | None) -> None:
        """Starts up to ``most`` parts in the order of their decisions, and short ones together; not
        while another thread does so.  What is left, or came meanwhile, is the starter's.
        """
        if not self._starting.acquire(blocking=False):
            return
        try:
            while self._parts and (most is None or most > 0):  # bounded: by the pages that wait
                most = None if most is None else most - 1
                part = self._parts.popleft()
                if part.rows.size < self._short and not self._stopping:
                    self._hold(part)
                else:
                    self._start([part])
            while self._held and self._is_due():  # bounded likewise
                self._start(self._take_held())
        finally:
            self._starting.release()
        if self._parts:
            self._core.wake.put(None)

    def _start(self, parts: list[PutPart]) -> None:
        error = self._writer.put(parts)
        if error is not None and not isinstance(error, TuttiError):
            self._core.guard.caught("the start of a put", error)

    def _hold(self, part: PutPart) -> None:
        with self._lock:
            if not self._held:
                self._held_since = self._writer.finished
            self._held.append(part)

    def _is_due(self) -> bool:
        writer = self._writer
        if not writer.active or writer.finished != self._held_since or self._stopping:
            return True
        with self._lock:  # the batches under way may be those of a put that stopped
            has_stopped = any(put.granted < put.launched for put in self._puts.values())
        return has_stopped or sum(part.rows.size for part in self._held) >= writer.batch_pages

    def _take_held(self) -> list[PutPart]:
        """The held parts that can be written together with the one held for longest."""
        with self._lock:
            first = self._held[0].kind if self._held else ()
            taken = [part for part in self._held if part.kind == first]
            self._held = [part for part in self._held if part.kind != first]
        return taken

    def _give_up(self, put: QueuedPut) -> Rows:
        """Ends decisions on a put; returns the rows that were not launched."""
        with self._lock:
            waiting = put.rows[put.launched :]
            put.launched = put.granted = put.rows.size
            put.is_free = True
            if put.open is not None:
                put.open.grant(put.granted, partial(self._progressed, put))
        return waiting

    def _ended(self, put: QueuedPut, part: PutPart, error: BaseException | None) -> None:
        """Rows have their outcome.  After an error, what waits behind them fails too."""
        rows, dispatcher = part.rows.size, self.dispatcher
        assert dispatcher is not None, "it decided on them"
        if error is not None:
            behind = self._give_up(put)
            put.progress.refuse(behind, error)
            rows += behind.size
            dispatcher.add(WriteGone(dispatcher.now_ns(), put.name))
        lost, there = put.lost_and_there(part.rows)
        with self._lock:
            if put.open is not None and part.grant is not None:
                put.open.remove(part.grant)
                self._core.wake.put(None)  # others may have waited for that
            if error is None:
                put.ended += rows
                self._report(put, lost, there)
        self._end_rows(put, rows)
        dispatcher.note()

    def _end_rows(self, put: QueuedPut, rows: int) -> None:
        """Ends so many rows, which have their outcome; ends the put with the last one."""
        with self._lock:
            put.left -= rows
            if put.left:
                return
            self._puts.pop(put.name, None)
        put.progress.end_part()
        self._core.end(put.request.memory)

    def _gone(self, to: Dispatcher, name: str, layers: int, load: QueuedLoad | None) -> None:
        """A load has ended with so many layers.  load: None if it went alone."""
        with self._lock:
            if load is not None:
                layers = layers if load.granted == load.layers else 0
                self._loads.pop(name, None)
                self._turn.notify_all()
            elif self._alone[0] == name:
                self._alone = "", None
        to.note(LoadGone(to.now_ns(), name, layers))
