"""Offloads on their way to the store: bounded, and completed strictly in order.

Pages wait where the engine has them, locked, up to a bound; beyond it they are copied to staging,
and beyond that they are dropped and counted.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tutti.errors import TuttiError
from tutti.host_pool import HostPool
from tutti.integration.sglang.breaker import Breaker
from tutti.integration.sglang.metrics import STORE, Recorder
from tutti.integration.sglang.pools import EnginePool, Pages
from tutti.integration.sglang.staging import Staging
from tutti.store import ObjectStore
from tutti.tickets import Outcome, PutTicket

Keys = npt.NDArray[np.uint8]
_IDLE_S = 60.0


@dataclass
class Offload:
    """One of SGLang's offloads.

    staged: its pages in staging, or None while it holds the engine's.
    kept: whether all was stored or there already; None while SGLang waits for it.
    """

    keys: Keys
    pages: Pages
    staged: Pages | None = None
    kept: bool | None = None
    started_s: float = 0.0


class Backlog:
    """Offloads under way.  ``add`` never waits for the medium.

    locked_max: engine pages that may wait for it.
    """

    def __init__(
        self,
        store: ObjectStore,
        engine: EnginePool,
        memory: HostPool,
        staging: Staging,
        *,
        locked_max: int,
        breaker: Breaker,
        recorder: Recorder,
        complain: Callable[[str, object], None],
    ) -> None:
        self._store = store
        self._engine = engine
        self._memory = memory
        self._staging = staging
        self._locked_max = locked_max
        self._breaker = breaker
        self._recorder = recorder
        self._complain = complain
        self._changed = threading.Condition()
        self._order: deque[Offload] = deque()
        self._work: queue.Queue[Offload | None] = queue.Queue()
        self.locked = 0  # engine pages that the medium may read
        self.active = 0  # offloads that are not over
        self._thread = threading.Thread(target=self._run, name="tutti-offload", daemon=True)
        self._thread.start()

    def add(self, keys: Keys, pages: Pages) -> None:
        """Takes one offload: keys (n, 16) and engine pages (n,)."""
        offload = Offload(keys, pages)
        accepted = self._breaker.closed or self._breaker.take_probe()
        with self._changed:
            self._order.append(offload)
            locks = accepted and self.locked + pages.size <= self._locked_max
            if locks:
                self.locked += pages.size
                self.active += 1
        if not locks and not (accepted and self._stage(offload)):
            self._recorder.count("dropped_pages", pages.size)
            offload.kept = False
            return
        self._work.put(offload)

    def completed(self) -> int:
        """How many offloads, from the oldest on, are complete."""
        with self._changed:
            count = 0
            for offload in self._order:
                if offload.kept is None:
                    break
                count += 1
            return count

    def pop(self) -> bool:
        """Takes the oldest offload, which is complete: whether its pages are kept."""
        with self._changed:
            return bool(self._order.popleft().kept)

    def wait_quiet(self, timeout_s: float) -> bool:
        """Waits until all is over; whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: self.active == 0, timeout_s)

    def reset(self, timeout_s: float) -> bool:
        """Waits for what is under way and forgets completions; whether no engine page is in use."""
        self.wait_quiet(timeout_s)
        with self._changed:
            self._order.clear()
            return self.locked == 0

    def close(self, timeout_s: float) -> None:
        """Ends the thread."""
        self._work.put(None)
        self._thread.join(timeout_s)

    def _stage(self, offload: Offload) -> bool:
        """Copies the pages out, so that the engine may have them back at once."""
        staged = self._staging.allocate(offload.pages.size)
        if staged is None:
            return False
        for sources, targets in zip(self._engine.views, self._staging.views, strict=True):
            for source, target in zip(sources, targets, strict=True):
                target[staged] = source[offload.pages]
        offload.staged = staged
        with self._changed:
            self.active += 1
            offload.kept = True
        return True

    def _run(self) -> None:
        ended = False
        while not ended:
            try:
                offload = self._work.get(timeout=_IDLE_S)
            except queue.Empty:
                continue
            ended = offload is None  # the end mark of close()
            if offload is not None:
                self._put(offload)

    def _put(self, offload: Offload) -> None:
        offload.started_s = time.monotonic()
        staged = offload.staged
        pool = self._memory if staged is None else self._staging.pool
        try:
            ticket = self._store.put(
                offload.keys, offload.pages if staged is None else staged, pool=pool
            )
        except Exception as error:
            # The thread must live; what was not stored is a miss.
            self._complain(f"offload: {type(error).__name__}", error)
            if isinstance(error, TuttiError):
                self._breaker.failure()
            self._over(offload, kept=False)
        else:
            ticket.on_done(lambda done: self._done(offload, done))

    def _done(self, offload: Offload, ticket: PutTicket) -> None:
        counts = np.bincount(ticket.outcome, minlength=len(Outcome))
        failed, dropped = int(counts[Outcome.FAILED]), int(counts[Outcome.DROPPED])
        stored = int(counts[Outcome.STORED])
        self._recorder.count("dropped_pages", dropped)
        self._recorder.count("failed_pages", failed, STORE)
        if stored:
            nbytes = stored * self._store.layout.object_nbytes
            self._recorder.moved(STORE, stored, nbytes, time.monotonic() - offload.started_s)
            self._breaker.success()
        if failed:
            self._breaker.failure()
            self._report(ticket)
        self._over(offload, kept=not (failed or dropped))

    def _report(self, ticket: PutTicket) -> None:
        try:
            ticket.wait(0.001)
        except TuttiError as error:
            self._complain(f"offload: {type(error).__name__}", error)

    def _over(self, offload: Offload, *, kept: bool) -> None:
        """The medium does not read the pages any more."""
        if offload.staged is not None:
            self._staging.release(offload.staged)
        with self._changed:
            if offload.staged is None:
                self.locked -= offload.pages.size
                offload.kept = kept
            self.active -= 1
            self._changed.notify_all()
