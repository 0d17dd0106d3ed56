"""Background work: verification after an unclean close, probes of the medium, counters."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial

from tutti.base.process import Owned
from tutti.errors import ChecksumMismatch, DeviceTimeout, KeyMissing, PagesInUse, TuttiError
from tutti.integration.sglang.direct.staging_pages import StagingPages
from tutti.integration.sglang.direct.stored_pool import StoredPool
from tutti.integration.sglang.metrics import LOAD, STORE
from tutti.integration.sglang.server_log import ErrorLog, MinuteLog

_PROVE_OBJECTS = 64
_EVERY_S = 0.5
_REFRESH_S = 10.0


class Maintenance(Owned):
    """A thread that serves one pool.

    The breaker of its loads closes again when one of its known objects can be read.
    probe_s: limit of such a read.  page_tokens: see Metrics.from_store.
    """

    def __init__(
        self,
        stored_pool: StoredPool,
        *,
        errors: ErrorLog,
        probe_s: float,
        page_tokens: int = 0,
    ) -> None:
        self._stored_pool = stored_pool
        self._store = stored_pool.store
        self._staging = StagingPages(stored_pool.store, stored_pool.page_nbytes)
        self._metrics = stored_pool.metrics
        self._log_error = errors.add
        self._page_tokens = page_tokens
        self._probe_s = probe_s
        self._minutes = MinuteLog(stored_pool.metrics, errors, time.monotonic())
        self._proven = False
        self._hurries = True  # starts the next round without a pause
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tutti-maintenance", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        """Ends the thread."""
        self._stop.set()
        self._thread.join(timeout_s)
        if self._stored_pool.events is not None:
            self._stored_pool.events.close()

    def _run(self) -> None:
        refresh_s = time.monotonic()
        while not self._stop.wait(0.0 if self._hurries else _EVERY_S):
            self._hurries = False
            if not self._proven:
                self._guard("proof", self._prove)
            if self._stored_pool.known and self._stored_pool.reads.take_probe():
                self._guard("probe", self._probe)
            if (events := self._stored_pool.events) is not None:
                self._guard("events", partial(events.check, self._store))
            if time.monotonic() >= refresh_s:
                refresh_s = time.monotonic() + _REFRESH_S
                self._guard("statistics", self.refresh)
                self._minutes.tick(time.monotonic())

    def refresh(self) -> None:
        self._metrics.from_store(self._store.stats(), self._page_tokens)
        reads, writes = self._stored_pool.reads, self._stored_pool.writes
        for direction, breaker in ((LOAD, reads), (STORE, writes)):
            self._metrics.level("breaker_open", int(not breaker.closed), direction)

    def _prove(self) -> None:
        """Verifies some objects per round, so that probes go on while a large pool is verified."""
        try:
            self._store.wait_recovered(0.0)
        except DeviceTimeout:
            return  # later
        self._proven = not self._store.prove(_PROVE_OBJECTS)
        self._hurries = not self._proven

    def _probe(self) -> None:
        """Reads one object that should be there; success closes the breaker, else it stays open."""
        there = [key for key in list(self._stored_pool.known) if self._store.match([key])]
        if not there or any(self._read(key) for key in there):
            self._stored_pool.reads.success()  # if no known object is left, requests must try

    def _read(self, key: bytes) -> bool:
        pages = self._staging.allocate(1)
        if pages is None or self._staging.memory is None:
            return False
        try:
            ticket = self._store.load([key], pages, memory=self._staging.memory)
        except PagesInUse as error:
            given_up = error  # ``error`` is unbound after the except clause
            self._staging.retire(pages, lambda: given_up.wait_settled(0.0))
            raise
        except TuttiError as error:
            self._staging.release(pages)
            if isinstance(error, KeyMissing):
                return False
            raise
        self._staging.retire(pages, lambda: ticket.wait_settled(0.0))
        try:
            ticket.wait(self._probe_s)
        except ChecksumMismatch:
            return False
        return True

    def _guard(self, what: str, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            # The thread must survive any error.
            if isinstance(error, TuttiError) and self._stop.is_set():
                return
            self._log_error(f"{what}: {type(error).__name__}", error)
