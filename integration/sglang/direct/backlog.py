"""Offloads on their way to the store: bounded, and completed strictly in order.

Pages wait where the engine has them, locked, up to a bound; beyond it they are copied to staging,
and beyond that they are dropped and counted.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tutti.arrays import Keys
from tutti.errors import TuttiError
from tutti.integration.sglang.breaker import Breaker
from tutti.integration.sglang.direct.kv_pools import Pages
from tutti.integration.sglang.direct.staging_copy import Fence
from tutti.integration.sglang.direct.stored_pool import StoredPool
from tutti.integration.sglang.metrics import STORE
from tutti.process import Owned
from tutti.transfers.tickets import Outcome, PutTicket

_CHAINS = 512


class Chains:
    """The page chains of recent look-ups.  Thread-safe; bounded."""

    def __init__(self, chains_max: int = _CHAINS) -> None:
        self._max = chains_max
        self._lock = threading.Lock()
        self._chains: OrderedDict[bytes, npt.NDArray[np.uint64]] = OrderedDict()

    def seen(self, keys: Keys) -> None:
        """Keys (n, 16) that follow one another, as a look-up named them."""
        if len(keys) < 2:
            return
        words = keys.view(np.uint64).reshape(-1, 2)
        name = keys[0].tobytes()
        with self._lock:
            known = self._chains.get(name)
            if known is None or len(known) <= len(words):
                self._chains[name] = words
            self._chains.move_to_end(name)
            while len(self._chains) > self._max:
                self._chains.popitem(last=False)

    def before(self, key: bytes) -> tuple[bytes | None, int]:
        """The predecessor of a page and how many pages are known to precede it; (None, 0) for none.

        O(pages of the chains): for a thread that may take its time.
        """
        word = np.frombuffer(key, np.uint64)
        with self._lock:
            chains = list(self._chains.values())
        for words in reversed(chains):
            rows = np.flatnonzero(words[1:, 0] == word[0]) + 1
            for row in rows.tolist():
                if words[row, 1] == word[1]:
                    return words[row - 1].tobytes(), row
        return None, 0


_IDLE_S = 60.0


@dataclass(eq=False)
class Part:
    """Pages of one pool: keys (n, 16), and the slots of n pages.

    staged: where they are in staging; None while they hold the engine's pages.
    """

    stored_pool: StoredPool
    keys: Keys
    slots: torch.Tensor
    staged: Pages | None = None
    started_s: float = 0.0

    @property
    def pages(self) -> int:
        """How many pages."""
        return len(self.keys)


@dataclass(eq=False)
class Offload:
    """One of SGLang's offloads.

    waits: parts whose pages in the engine's memory are still needed.
    good: whether nothing of those parts failed or was dropped.
    kept: the answer to SGLang; None while it waits.
    """

    parts: Sequence[Part]
    fence: Fence
    waits: int
    good: bool = True
    kept: bool | None = None


class Backlog(Owned):
    """Offloads under way.  ``add`` never waits for the medium, nor for the engine's device.

    locked_share: of each pool's pages that may wait for the medium where they are.
    chains: what precedes a page.
    """

    def __init__(
        self,
        stored_pools: Sequence[StoredPool],
        *,
        locked_share: float,
        timeout_s: float,
        breaker: Breaker,
        chains: Chains,
        log_error: Callable[[str, object], None],
    ) -> None:
        self._locked = {stored_pool.name: 0 for stored_pool in stored_pools}
        self._locked_max = {s.name: int(s.engine.pages * locked_share) for s in stored_pools}
        self._timeout_s = timeout_s
        self._breaker = breaker
        self._chains = chains
        self._log_error = log_error
        self._changed = threading.Condition()
        self._order: deque[Offload] = deque()
        self._active = 0  # parts that are not over
        self._copies: queue.Queue[Offload | None] = queue.Queue()
        self._puts: queue.Queue[tuple[Offload, Part] | None] = queue.Queue()
        self._threads = [
            threading.Thread(target=self._run_copies, name="tutti-copy-out", daemon=True),
            threading.Thread(target=self._run_puts, name="tutti-offload", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def locked(self) -> int:
        """Engine pages that the medium may read, or that wait to be copied out."""
        with self._changed:
            return sum(self._locked.values())

    @property
    def active(self) -> int:
        """Parts of offloads that are not over."""
        with self._changed:
            return self._active

    def add(self, parts: Sequence[Part], fence: Fence) -> None:
        """Takes one offload, whose pages may be read when ``fence`` has passed."""
        offload = Offload(parts, fence, waits=len(parts))
        accepted = self._breaker.closed or self._breaker.take_probe()
        with self._changed:
            self._order.append(offload)
            if not (accepted and self._place(parts)):
                offload.kept = False
                for part in parts:
                    part.stored_pool.metrics.count("dropped_pages", part.pages)
                return
            self._active += len(parts)
        for part in parts:
            if part.staged is None:
                self._puts.put((offload, part))
        if any(part.staged is not None for part in parts):
            self._copies.put(offload)

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
            return self._changed.wait_for(lambda: self._active == 0, timeout_s)

    def reset(self, timeout_s: float) -> bool:
        """Waits for what is under way and forgets completions; whether no engine page is in use."""
        self.wait_quiet(timeout_s)
        with self._changed:
            self._order.clear()
            return not any(self._locked.values())

    def close(self, timeout_s: float) -> None:
        """Ends the threads."""
        self._copies.put(None)
        self._puts.put(None)
        for thread in self._threads:
            thread.join(timeout_s)

    def _place(self, parts: Sequence[Part]) -> bool:
        """Locks the engine's pages, or finds staging, for every part; False when that fails."""
        for part in parts:
            stored_pool, name = part.stored_pool, part.stored_pool.name
            room = self._locked_max[name] - self._locked[name]
            if stored_pool.memory is None or part.pages > room:
                part.staged = stored_pool.stores.allocate(part.pages)
                if part.staged is None:
                    self._unplace(parts, part)
                    return False
            self._locked[name] += part.pages
        return True

    def _unplace(self, parts: Sequence[Part], failed: Part) -> None:
        for part in parts:
            if part is failed:
                return
            self._locked[part.stored_pool.name] -= part.pages
            if part.staged is not None:
                part.stored_pool.stores.release(part.staged)

    def _run_copies(self) -> None:
        ended = False
        while not ended:
            try:
                offload = self._copies.get(timeout=_IDLE_S)
            except queue.Empty:
                continue
            ended = offload is None  # the end mark of close()
            if offload is None:
                continue
            for part in offload.parts:
                if part.staged is not None:
                    self._copy(offload, part, part.staged)

    def _copy(self, offload: Offload, part: Part, staged: Pages) -> None:
        """Copies a part out, so that the engine may have its pages back."""
        try:
            pages = self._pages(offload, part)
        except Exception as error:
            self._log_error(f"offload: {type(error).__name__}", error)
            self._let_go(offload, part, good=False)
            self._over(part)
            return
        try:
            part.stored_pool.copy_out(pages, staged, self._timeout_s)
        except Exception as error:
            self._log_error(f"offload: {type(error).__name__}", error)
            if part.stored_pool.gpu is None:
                self._let_go(offload, part, good=False)
                self._over(part)
            # A GPU may still read the pages and write the staging: they are never released.
            return
        self._let_go(offload, part, good=True)
        self._puts.put((offload, part))

    def _pages(self, offload: Offload, part: Part) -> Pages:
        offload.fence.wait(time.monotonic() + self._timeout_s)
        return part.stored_pool.page_numbers(part.slots, part.pages)

    def _run_puts(self) -> None:
        ended = False
        while not ended:
            try:
                work = self._puts.get(timeout=_IDLE_S)
            except queue.Empty:
                continue
            ended = work is None  # the end mark of close()
            if work is not None:
                self._put(*work)

    def _put(self, offload: Offload, part: Part) -> None:
        stored_pool, staged = part.stored_pool, part.staged
        try:
            pool = stored_pool.memory if staged is None else stored_pool.stores.pool
            pages = self._pages(offload, part) if staged is None else staged
            parent, depth = self._chains.before(part.keys[0].tobytes())
            part.started_s = time.monotonic()
            ticket = stored_pool.store.put(
                part.keys, pages, memory=pool, parent=parent, depth=depth
            )
        except Exception as error:
            # The thread must live; what was not stored is a miss.
            self._log_error(f"offload: {type(error).__name__}", error)
            if isinstance(error, TuttiError):
                self._breaker.failure()
            self._done_with(offload, part, good=False)
        else:
            ticket.on_done(lambda done: self._done(offload, part, done))

    def _done(self, offload: Offload, part: Part, ticket: PutTicket) -> None:
        counts = np.bincount(ticket.outcome, minlength=len(Outcome))
        failed, dropped = int(counts[Outcome.FAILED]), int(counts[Outcome.DROPPED])
        stored = int(counts[Outcome.STORED])
        metrics = part.stored_pool.metrics
        metrics.count("dropped_pages", dropped)
        metrics.count("failed_pages", failed, STORE)
        if stored:
            nbytes = stored * part.stored_pool.page_nbytes
            metrics.moved(STORE, stored, nbytes, time.monotonic() - part.started_s)
            self._breaker.success()
        if failed:
            self._breaker.failure()
            self._report(ticket)
        self._done_with(offload, part, good=not (failed or dropped))

    def _report(self, ticket: PutTicket) -> None:
        try:
            ticket.wait(0.001)
        except TuttiError as error:
            self._log_error(f"offload: {type(error).__name__}", error)

    def _done_with(self, offload: Offload, part: Part, *, good: bool) -> None:
        """The medium does not read the part's pages any more."""
        if part.staged is None:
            self._let_go(offload, part, good=good)
        self._over(part)

    def _let_go(self, offload: Offload, part: Part, *, good: bool) -> None:
        """The engine's pages of a part are not needed any more."""
        with self._changed:
            self._locked[part.stored_pool.name] -= part.pages
            offload.good &= good
            offload.waits -= 1
            if not offload.waits:
                offload.kept = offload.good

    def _over(self, part: Part) -> None:
        if part.staged is not None:
            part.stored_pool.stores.release(part.staged)
        with self._changed:
            self._active -= 1
            self._changed.notify_all()
