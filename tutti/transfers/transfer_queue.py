"""Puts and loads of a pool, each launched when the pool's scheduler decides it.

A put is cut to launches of whole pages, in order; its progress has the outcome of all.  A load is
one launch, and ``load`` returns once it was started.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tutti.arrays import Rows
from tutti.errors import TuttiError
from tutti.gio_uring.iocb import PagedMemory
from tutti.placement.index import MISSING
from tutti.process import Owned
from tutti.scheduler.dispatcher import Dispatcher, Schedule
from tutti.scheduler.event import (
    LayersReady,
    LoadGone,
    LoadKnown,
    PagesWritten,
    WriteGone,
    WriteKnown,
)
from tutti.scheduler.state import Issue
from tutti.threads import start_thread
from tutti.transfers.coalescer import Coalescer
from tutti.transfers.core import Core
from tutti.transfers.loader import Loader
from tutti.transfers.tickets import LoadProgress, Outcome, PutProgress
from tutti.transfers.writer import PutRequest

_LOOK_S = 0.5


@dataclass
class _Put:
    """A put that is not over.

    rows: are to be written, in this order; the first ``launched`` went, ``written`` are over.
    left: rows of the request, those that need no write included, without an outcome.
    """

    request: PutRequest
    progress: PutProgress
    rows: Rows
    left: int
    launched: int = 0
    written: int = 0


@dataclass
class _Load:
    """A load on its way; ``due`` is set when it may start."""

    due: threading.Event = field(default_factory=threading.Event)


class TransferQueue(Owned):
    """Stands before the writer and the loader of one pool, and carries out decisions.

    See scheduler.dispatcher.TransferIssuer.
    """

    def __init__(
        self, core: Core, coalescer: Coalescer, loader: Loader, schedule: Schedule
    ) -> None:
        self._core = core
        self._coalescer = coalescer
        self._loader = loader
        self._names = map(str, itertools.count(1))
        self._lock = threading.Lock()  # the core's, where both are held, was taken before
        self._puts: dict[str, _Put] = {}
        self._loads: dict[str, _Load] = {}
        self._most = schedule.limits.locked_pages
        self._stopping = False
        # A put may wait for staging or space; decisions, and with them loads, must not.  One thread
        # at a time starts puts: that of a caller of ``put``, or the starter.
        self._launches: deque[Issue] = deque()
        self._starting = threading.Lock()
        self._here = threading.local()
        self._launched = threading.Semaphore(0)
        self._closed = False
        self._starter = threading.Thread(target=self._run, name="tutti-puts", daemon=True)
        self.dispatcher = Dispatcher.of(schedule, self, core.guard)
        start_thread(self._starter)
        self.dispatcher.start()

    def put(self, request: PutRequest) -> PutProgress:
        """Starts a put, now or later; see ObjectStore.put.

        One that is longer than what may wait goes at once: to drop it would free nothing.
        """
        core = self._core
        progress = PutProgress(len(request.keys), core.guard, core.store_latency)
        with core.lock:
            absent = core.index.find(request.keys) == MISSING
            rows = np.flatnonzero(absent).astype(np.int64)
            put = _Put(request, progress, rows, len(request.keys))
            with self._lock:
                paced = 0 < rows.size <= self._most and not self._stopping
                if paced:
                    core.begin()
                    name = next(self._names)
                    self._puts[name] = put
        if not paced:
            return self._coalescer.put(request)
        if rows.size < len(request.keys):
            # What is there costs the device nothing: no reason to wait.
            self._start(name, put, np.flatnonzero(~absent).astype(np.int64), paced=False)
        nbytes = core.geometry.slice_nbytes * core.layers
        now_ns = self.dispatcher.now_ns()
        self._here.puts = True
        try:
            self.dispatcher.post(WriteKnown(now_ns, name, pages=rows.size, page_nbytes=nbytes))
        finally:
            self._here.puts = False
        self._start_puts(len(self._launches))
        return progress

    def load(
        self, keys: npt.NDArray[np.uint8], pages: Any, memory: PagedMemory, batch: str
    ) -> LoadProgress:
        """Waits for its turn, behind writes and loads under way, and starts.

        See ObjectStore.load.
        """
        core, dispatcher = self._core, self.dispatcher
        load = _Load()
        with self._lock:
            paced = len(keys) > 0 and not self._stopping
            if paced:
                name = next(self._names)
                self._loads[name] = load
        if not paced:
            return self._loader.load(keys, pages, memory)
        layers = core.layers
        known = LoadKnown(
            dispatcher.now_ns(),
            name,
            layers=layers,
            layer_nbytes=core.geometry.slice_nbytes * len(keys),
            tokens=0,
            prefix_tokens=0,
            unit_layers=layers,
            batch=batch,
        )
        dispatcher.post(known)
        try:
            # A scheduler that is stuck costs time, not service.
            load.due.wait(core.config.timeout_s)
            progress = self._loader.load(keys, pages, memory)
        except BaseException:
            self._loaded(name, layers=0)
            raise
        progress.on_settled(lambda: self._loaded(name, layers))
        return progress

    def stop(self, timeout_s: float) -> None:
        """Launches what waits, and ends; what was not launched in time is dropped.

        What comes from now on goes at once.
        """
        with self._lock:
            self._stopping = True
        self.dispatcher.expedite()
        core = self._core
        with core.lock:
            core.changed.wait_for(lambda: not self._puts, timeout_s)
        self.dispatcher.stop(timeout_s)
        with self._lock:
            names, loads = list(self._puts), list(self._loads.values())
        for name in names:
            self.drop(name)
        for load in loads:
            load.due.set()

    def close(self) -> None:
        """Ends the scheduler if ``stop`` did not."""
        self.dispatcher.stop()
        self._closed = True
        self._launched.release()
        self._starter.join(1.0)

    def read(self, launch: Issue) -> None:
        """See TransferIssuer: the thread that called ``load`` goes on."""
        with self._lock:
            load = self._loads.get(launch.name)
        if load is not None:
            load.due.set()

    def write(self, launch: Issue) -> None:
        """See TransferIssuer."""
        self._launches.append(launch)
        if not getattr(self._here, "puts", False):
            self._launched.release()

    def copy_out(self, name: str) -> None:
        """See TransferIssuer.  A pool has no staging, so its limits never ask for a copy."""
        raise NotImplementedError("the limits of a pool have no staged pages")

    def drop(self, name: str) -> None:
        """See TransferIssuer."""
        with self._lock:
            put = self._puts.get(name)
        if put is None:
            return
        waiting = self._give_up(put)
        if waiting.size:
            put.progress.outcome[waiting] = Outcome.DROPPED
            with self._core.lock:
                self._core.counters.dropped += waiting.size
            self._end_rows(name, put, waiting)

    def _run(self) -> None:
        while not self._closed:  # bounded by close()
            self._launched.acquire(timeout=_LOOK_S)
            while self._launches and self._start_puts(len(self._launches)):
                pass  # bounded: by the pages that wait

    def _start_puts(self, most: int) -> bool:
        """Starts up to ``most`` of what was decided, in that order; False while another thread does
        so.  What is left, or came meanwhile, is the starter's.
        """
        if not self._starting.acquire(blocking=False):
            return False
        try:
            while self._launches and most > 0:
                most -= 1
                self._launch(self._launches.popleft())
        finally:
            self._starting.release()
        if self._launches:
            self._launched.release()
        return True

    def _launch(self, launch: Issue) -> None:
        end = launch.first + launch.count
        with self._lock:
            put = self._puts.get(launch.name)
            if put is None or put.launched != launch.first:
                return  # given up meanwhile
            put.launched = end
        self._start(launch.name, put, put.rows[launch.first : end], paced=True)

    def _give_up(self, put: _Put) -> Rows:
        """What was not launched and will not be."""
        with self._lock:
            waiting = put.rows[put.launched :]
            put.launched = put.rows.size
        return waiting

    def _start(self, name: str, put: _Put, rows: Rows, *, paced: bool) -> None:
        """Puts some rows.  If that cannot be started they fail, and what waits behind them."""
        try:
            part = self._coalescer.put(put.request.take(rows))
        except BaseException as error:  # of any kind: the ticket has waiters
            if not isinstance(error, TuttiError):
                self._core.guard.caught("the start of a put", error)
            if paced:
                rows = np.concatenate((rows, self._give_up(put)))
                self.dispatcher.post(WriteGone(self.dispatcher.now_ns(), name))
            put.progress.refuse(rows, error)
            self._end_rows(name, put, rows)
            return
        part.on_done(lambda done: self._written(name, put, rows, done, paced=paced))

    def _written(self, name: str, put: _Put, rows: Rows, part: PutProgress, *, paced: bool) -> None:
        put.progress.outcome[rows] = part.outcome
        put.progress.status[rows] = part.status
        put.progress.refusal = part.refusal or put.progress.refusal
        if paced:
            lost = np.isin(part.outcome, (Outcome.FAILED, Outcome.DROPPED))
            with self._lock:  # so that events come in the order of their numbers
                put.written += rows.size
                now_ns, failed = self.dispatcher.now_ns(), int(np.count_nonzero(lost))
                self.dispatcher.add(PagesWritten(now_ns, name, put.written, failed))
        self._end_rows(name, put, rows)
        self.dispatcher.decide()

    def _end_rows(self, name: str, put: _Put, rows: Rows) -> None:
        """These rows have their outcome."""
        with self._lock:
            put.left -= rows.size
            over = put.left == 0 and rows.size > 0
            if over:
                del self._puts[name]
        if over:
            put.progress.end_part()
            self._core.end()

    def _loaded(self, name: str, layers: int) -> None:
        with self._lock:
            del self._loads[name]
        now_ns = self.dispatcher.now_ns()
        if layers:
            self.dispatcher.post(LayersReady(now_ns, name, layers))
        self.dispatcher.post(LoadGone(now_ns, name))
