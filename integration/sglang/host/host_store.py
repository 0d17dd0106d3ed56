"""One of SGLang's host pools and its Tutti pool: pages by hash, and calls that do not raise.

A page that cannot be loaded is a miss, and one that cannot be stored is not stored. Errors are
counted, logged once per kind, and summarized each minute.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from tutti.base.arrays import Keys
from tutti.base.checks import SECONDS_MAX
from tutti.errors import (
    CapacityError,
    ChecksumMismatch,
    DeviceTimeout,
    KeyMissing,
    PagesInUse,
    TuttiError,
)
from tutti.integration.sglang.kv_events import DiskEvents
from tutti.integration.sglang.metrics import LOAD, STORE, Metrics
from tutti.integration.sglang.page_keys import page_keys
from tutti.integration.sglang.second_touch import SecondTouch
from tutti.integration.sglang.server_log import ErrorLog, MinuteLog
from tutti.integration.sglang.weights import WeightsWatch
from tutti.interface import Store
from tutti.memory.host_memory import HostMemory
from tutti.transfers.tickets import LoadTicket, Outcome, PutTicket

Answer = TypeVar("Answer")

_log = logging.getLogger(__name__)

_HOLD_S = 60.0
_HOLD_ROUNDS = 1440
_IDLE_S = 60.0  # SGLang cancels prefetches after at most 30 s


class HostStore:
    """Pages of one host pool, by SGLang's page hashes.  Thread-safe.

    store, pool: an open store and the registered memory.  page_tokens: host indices per page.
    namespace: of its puts.
    """

    def __init__(
        self,
        store: Store,
        pool: HostMemory,
        page_tokens: int,
        metrics: Metrics,
        watch: WeightsWatch,
        *,
        timeout_s: float,
        second_touch: bool = False,
        namespace: str = "",
    ) -> None:
        self.store = store
        self.metrics = metrics
        self.error_log = ErrorLog(metrics)
        self._pool = pool
        self._page_tokens = page_tokens
        self._namespace = namespace
        self._watch = watch
        # A command fails after timeout_s; before it starts, a batch may wait for others.
        self._timeout_s = min(4 * timeout_s, SECONDS_MAX)
        self._second_touch = SecondTouch(metrics) if second_touch else None
        self.events: DiskEvents | None = None  # set before use if they are published
        self.pages_moved = False  # set when the host pool was moved to large pages
        self._moving: set[int] = set()
        self._closed = False
        self._looked_up_s: float | None = None
        self._minutes = MinuteLog(metrics, self.error_log, time.monotonic())

    @property
    def moving(self) -> bool:
        """Whether a thread is loading or storing, so that the device may use host pages."""
        return bool(self._moving)

    def keys(self, hashes: Sequence[str]) -> Keys | None:
        """ObjectKeys of page hashes; None while the current weights are unknown."""
        namespace = self._watch.namespace
        if namespace is None:
            return None
        return page_keys(self.store.layout.fingerprint, namespace, hashes)

    def match(self, hashes: Sequence[str]) -> int:
        """Number of hashes, from the first on, that are stored."""

        def look_up() -> int:
            keys = self.keys(hashes)
            self._looked_up_s = time.monotonic()
            found = 0 if keys is None or not hashes else self.store.match(keys, pin=True)
            if self.events is not None and keys is not None:
                self.events.found(hashes, keys[:found])
            self._count_lookup(len(hashes), found)
            return found

        return self._guard("look-up", 0, look_up)

    def present(self, hashes: Sequence[str]) -> list[bool]:
        """Returns for each of the hashes whether it is stored."""

        def look_up() -> list[bool]:
            keys = self.keys(hashes)
            there = [False] * len(hashes)
            self._looked_up_s = time.monotonic()
            if keys is not None:
                there = [bool(found) for found in self.store.present(keys, pin=True)]
            self._count_lookup(len(hashes), sum(there))
            return there

        return self._guard("look-up", [False] * len(hashes), look_up)

    def load(self, hashes: Sequence[str], host_indices: Any) -> list[bool]:
        """Reads pages into the host pool; returns which were found and verified."""
        failed = [False] * len(hashes)
        return self._move("load", failed, lambda: self.read(hashes, self._pages(host_indices)))

    def put(
        self, hashes: Sequence[str], host_indices: Any, prefix: Sequence[str] | None = None
    ) -> list[bool]:
        """Stores pages of the host pool; returns which are stored or need not be.

        prefix: the hashes before the first one, from the beginning of the sequence.
        """
        failed = [False] * len(hashes)
        return self._move(
            "store", failed, lambda: self.write(hashes, self._pages(host_indices), prefix)
        )

    def read(
        self, hashes: Sequence[str], pages: npt.NDArray[np.int64], pool: HostMemory | None = None
    ) -> list[bool]:
        """As `load`, into pages of any registered pool.  Raises TuttiError."""
        keys = self.keys(hashes)
        if keys is None or not hashes:
            return [False] * len(hashes)
        started = time.monotonic()
        ticket = self._start_load(keys, pages, pool or self._pool)
        if ticket is None:
            return [False] * len(hashes)
        try:
            ticket.wait(self._timeout_s)
        except TuttiError as error:
            kind = "corrupt" if isinstance(error, ChecksumMismatch) else type(error).__name__
            self.error_log.add(f"load: {kind}", error)
        self._hold(ticket.wait_settled, "a load")
        good = np.zeros(len(hashes), bool)
        good[: ticket.keys] = True
        good[ticket.failed()] = False
        self._count_move(LOAD, good, time.monotonic() - started)
        return [bool(right) for right in good]

    def write(
        self,
        hashes: Sequence[str],
        pages: npt.NDArray[np.int64],
        prefix: Sequence[str] | None = None,
        pool: HostMemory | None = None,
    ) -> list[bool]:
        """As `put`, from pages of any registered pool.  Raises TuttiError.

        Also True for pages that wait for their second offer, or while the weights are unknown.
        False for dropped pages: it ends SGLang's operation, whose later pages could not be found.
        """
        keys = self.keys(hashes)
        if keys is None or not hashes:
            return [True] * len(hashes)
        wanted = np.ones(len(keys), np.bool_)
        if self._second_touch is not None:
            wanted = self._second_touch.admitted(keys)
        good = ~wanted
        if not wanted.any():
            return [True] * len(hashes)
        started = time.monotonic()
        parent = self.keys(prefix[-1:]) if prefix else None
        ticket = self.store.put(
            keys[wanted],
            pages[wanted],
            memory=pool or self._pool,
            parent=None if parent is None else parent[0].tobytes(),
            depth=len(prefix or ()),
            namespace=self._namespace,
        )
        self._hold(lambda seconds: _put_done(ticket, seconds), "a store")
        try:
            ticket.wait(0.001)
        except CapacityError as error:
            self.error_log.add("store: disk full", error)
        except TuttiError as error:
            self.error_log.add(f"store: {type(error).__name__}", error)
        kept = (ticket.outcome == Outcome.STORED) | (ticket.outcome == Outcome.PRESENT)
        good[wanted] = kept
        if self.events is not None:
            self.events.offered(hashes, keys)
            self.events.stored(keys[wanted], kept)
        dropped = int(np.count_nonzero(ticket.outcome == Outcome.DROPPED))
        self.metrics.count("dropped_pages", dropped)
        self._count_move(STORE, ticket.outcome == Outcome.STORED, time.monotonic() - started)
        self.metrics.count(
            "failed_pages", int(np.count_nonzero(ticket.outcome == Outcome.FAILED)), STORE
        )
        return [bool(right) for right in good]

    def load_pages(
        self, hashes: Sequence[str], pages: npt.NDArray[np.int64], pool: HostMemory
    ) -> list[bool]:
        """As `load`, into numbered pages of another registered pool."""
        return self._move("load", [False] * len(hashes), lambda: self.read(hashes, pages, pool))

    def put_pages(
        self, hashes: Sequence[str], pages: npt.NDArray[np.int64], pool: HostMemory
    ) -> list[bool]:
        """As `put`, from numbered pages of another registered pool."""
        failed = [False] * len(hashes)
        return self._move("store", failed, lambda: self.write(hashes, pages, None, pool))

    def staging(self, pages: int, order: str) -> HostMemory | None:
        """New registered memory; None if there is none."""
        return self._guard("staging", None, lambda: self.store.allocate_memory(pages, order=order))

    def clear(self) -> bool:
        """Removes all pages; returns whether that succeeded."""

        def forget() -> bool:
            self.store.clear()
            if self._second_touch is not None:
                self._second_touch.clear()
            return True

        return self._guard("clear", False, forget)

    def refresh(self) -> None:
        page_tokens = self.store.layout.page_size
        self._guard(
            "statistics", None, lambda: self.metrics.from_store(self.store.stats(), page_tokens)
        )

    def tick(self, now_s: float) -> None:
        """Updates counters, logs, and unpins found pages after a minute without look-ups.

        now_s: time.monotonic().  Call it about once a second.
        """
        self.refresh()
        if (events := self.events) is not None:
            self._guard("events", None, lambda: events.check(self.store))
        if self.pages_moved:
            self.pages_moved = False
            self._guard("pages", None, lambda: self.store.controller.read_page_sizes())
        self._minutes.tick(now_s)
        if self._looked_up_s is not None and now_s - self._looked_up_s > _IDLE_S:
            self._looked_up_s = None
            self._guard("unpin", None, self.store.unpin)

    def close(self) -> None:
        """Waits for transfers and closes the store."""
        if not self._closed:
            self._closed = True
            self.metrics.level("attached", 0)
            if self.events is not None:
                self.events.close()
            self._guard("close", None, self.store.close)

    def _start_load(
        self, keys: Keys, pages: npt.NDArray[np.int64], pool: HostMemory
    ) -> LoadTicket | None:
        """Loads the longest stored prefix; None if there is none."""
        for _ in range(3):  # pages may be evicted between look-up and load
            # No pin: it would outlast the load, which pins its pages itself.
            found = self.store.match(keys)
            if found == 0:
                return None
            try:
                return self.store.load(keys[:found], pages[:found], memory=pool)
            except KeyMissing:
                continue
            except PagesInUse as error:
                self._hold(error.wait_settled, "a load that was given up")
                raise
        return None

    def _hold(self, wait: Callable[[float], bool], what: str) -> None:
        """Waits until the device does not use the host pages any more.

        SGLang reuses them once this thread returns: an earlier return could serve another page's
        bytes. A device that does not answer blocks this thread, not the server: with the prefetch
        policy `timeout` or `best_effort` requests are computed meanwhile. After a day the process
        exits, as with the linker, which raises on SGLang's main thread.
        """
        if wait(self._timeout_s):
            return
        error = DeviceTimeout(f"{what} is not over, its host pages stay in use until it is")
        for _ in range(_HOLD_ROUNDS):
            self.error_log.add("device holds pages", error)
            if wait(_HOLD_S):
                return
        # An exception would end only this thread; SGLang stops the server if a process exits.
        _log.critical("Tutti: %s; this process ends before wrong bytes are served", error)
        os.kill(os.getpid(), signal.SIGKILL)

    def _pages(self, host_indices: Any) -> npt.NDArray[np.int64]:
        """Page numbers of SGLang's token indices; the indices of a page are consecutive."""
        first = np.asarray(host_indices, np.int64)[:: self._page_tokens]
        if (first % self._page_tokens).any():
            raise TuttiError("host indices are not aligned to pages; nothing was moved")
        return first // self._page_tokens

    def _count_lookup(self, pages: int, found: int) -> None:
        self.metrics.count("hit_pages", found)
        self.metrics.count("miss_pages", pages - found)

    def _count_move(self, direction: str, moved: npt.NDArray[np.bool_], duration_s: float) -> None:
        pages = int(np.count_nonzero(moved))
        if pages:
            nbytes = pages * self.store.layout.object_nbytes
            self.metrics.moved(direction, pages, nbytes, duration_s)
        if direction == LOAD:
            self.metrics.count("failed_pages", moved.size - pages, direction)

    def _move(self, what: str, default: Answer, action: Callable[[], Answer]) -> Answer:
        """As `_guard`; `moving` is true meanwhile."""
        thread = threading.get_ident()
        self._moving.add(thread)
        try:
            return self._guard(what, default, action)
        finally:
            self._moving.discard(thread)

    def _guard(self, what: str, default: Answer, action: Callable[[], Answer]) -> Answer:
        """The result of `action`, or `default` after any error: SGLang's threads must survive."""
        try:
            return action()
        except Exception as error:
            self.error_log.add(f"{what}: {type(error).__name__}", error)
            return default


def _put_done(ticket: PutTicket, timeout_s: float) -> bool:
    try:
        ticket.wait(timeout_s)
    except DeviceTimeout:
        return ticket.done
    except TuttiError:
        return True
    return True
