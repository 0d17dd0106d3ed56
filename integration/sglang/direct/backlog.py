"""Offloads that wait for the store: their number is bounded, and they complete in order.

Pages wait in SGLang's memory, locked, up to a limit; beyond it they are copied to staging, and
beyond staging they are dropped and counted.  The queue that the pools share decides this.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch

from tutti.base.arrays import Keys, Mask
from tutti.base.callbacks import Guard
from tutti.base.process import Owned
from tutti.errors import ConfigError, CudaError, DeviceTimeout, TuttiError
from tutti.integration.sglang.direct.chains import Chains
from tutti.integration.sglang.direct.gpu_copies import Gpu
from tutti.integration.sglang.direct.kv_pools import Pages
from tutti.integration.sglang.direct.staging_copy import Fence
from tutti.integration.sglang.direct.stored_pool import StoredPool
from tutti.integration.sglang.metrics import STORE
from tutti.integration.sglang.second_touch import SecondTouch
from tutti.integration.sglang.server_log import ErrorLog
from tutti.scheduler.dispatcher import Dispatcher, Schedule
from tutti.scheduler.event import (
    PagesCopied,
    PagesWritten,
    SpaceKnown,
    WriteGone,
    WriteKnown,
    WriteStopped,
)
from tutti.scheduler.state import Issue
from tutti.transfers.tickets import Outcome, PutTicket

_IDLE_S = 60.0
_POLL_S = 0.05
#: A part is stored in batches of this size, this many at a time, so that it can stop for loads.
_BATCH_NBYTES, _FLYING_MAX = 32 << 20, 2
#: Kinds of drops, with the remedies.
_FULL = (
    "backlog: full",
    "more wait for the SSD than SGLang's memory and the staging may hold; raise backlog_share or"
    " store_staging, or set second_touch to store less",
)
_TOO_LONG = (
    "backlog: too long",
    "one offload has more than may wait for the SSD ({} pages); raise backlog_share or"
    " store_staging",
)
_PAUSED = ("offload: paused", "the SSD failed several times; see the errors logged before")
_SLOW = ("offload: slow", "the SSD did not begin to store them in {:g} s; raise load_timeout_s")
_NO_SPACE = (
    "offload: no space",
    "no slot is free, or a budget is used up; raise capacity, write_budget or the quota",
)


@dataclass(eq=False)
class OffloadPart:
    """The pages of an offload in one pool: keys (n, 16), and SGLang's slots of n pages.

    numbers: page numbers, once known.  staged: pages of staging; None while the pages are in
    SGLang's memory.  leaves: a copy to staging was begun.  The first ``granted`` pages may be
    stored, ``begun`` were submitted (``flying`` batches are in flight), and ``ended`` have ended.
    """

    stored_pool: StoredPool
    keys: Keys
    slots: torch.Tensor
    numbers: Pages | None = None
    staged: Pages | None = None
    leaves: bool = False
    granted: int = 0
    begun: int = 0
    flying: int = 0
    ended: int = 0
    good: bool = True

    @property
    def pages(self) -> int:
        """Number of pages."""
        return len(self.keys)

    @property
    def batch(self) -> int:
        """Most pages that are stored with one call."""
        return max(1, _BATCH_NBYTES // self.stored_pool.page_nbytes)

    def without(self, pages: Mask) -> OffloadPart:
        """The part without these pages; it must not have begun."""
        if not pages.any():
            return self
        rows = np.flatnonzero(~pages)
        taken: slice | list[int] = slice(self.pages - rows.size, None)  # usually the end is left
        if pages[taken].any():
            taken = rows.tolist()
        slots = self.slots.reshape(self.pages, -1)[taken]
        return OffloadPart(self.stored_pool, self.keys[rows], slots.reshape(-1))


def admitted(
    parts: Sequence[OffloadPart], second_touches: Mapping[str, SecondTouch]
) -> tuple[list[OffloadPart], int]:
    """(parts of an offload that must be stored; number of pages declined until their second offer).

    Leaves out stored pages: SGLang offers loaded pages again, and they would take the place of a
    long prompt's new pages.  second_touches: by pool; a pool without one stores all new pages.
    """
    taken, declined = [], 0
    for part in parts:
        part = part.without(part.stored_pool.present(part.keys))
        second_touch = second_touches.get(part.stored_pool.name)
        if second_touch is not None:
            wanted = second_touch.admitted(part.keys)
            declined += int(np.count_nonzero(~wanted))
            part = part.without(~wanted)
        if part.pages:
            taken.append(part)
    return taken, declined


@dataclass(eq=False)
class Offload:
    """One of SGLang's offloads.

    waits: number of parts whose pages in SGLang's memory are still needed.
    good: False once a page of its parts has failed or was dropped.
    kept: the answer to SGLang; None before it is known.
    """

    fence: Fence
    waits: int
    good: bool = True
    kept: bool | None = None


def _next(names: queue.Queue[str | None], timeout_s: float) -> str | None:
    """The next name; empty after the timeout."""
    with suppress(queue.Empty):
        return names.get(timeout=timeout_s)
    return ""


class Backlog(Owned):
    """Offloads under way.  ``add`` waits neither for the medium nor for SGLang's device.

    Carries out the queue's decisions on writes; see scheduler.dispatcher.WriteIssuer.

    schedule: of the queue that the pools share.
    locked_share: share of each pool's pages that may wait in SGLang's memory.
    chains: finds the predecessors of pages.
    locked: number of SGLang's pages that the medium may read, or that wait to be copied out.
    Raises ConfigError for a store whose schedule queues puts: the two queues would wait for each
    other.
    """

    def __init__(
        self,
        stored_pools: Sequence[StoredPool],
        *,
        schedule: Schedule,
        locked_share: float,
        timeout_s: float,
        chains: Chains,
        errors: ErrorLog,
    ) -> None:
        for stored_pool in stored_pools:
            queued = stored_pool.store.config.schedule
            if queued is not None and queued.puts:
                raise ConfigError(
                    f"the store of {stored_pool.name} schedules puts, which would deadlock with "
                    "the backlog's thread; open it with Schedule(..., puts=False)"
                )
        self._timeout_s = timeout_s
        self._chains = chains
        self._errors = errors
        self._changed = threading.Condition()
        self._order: deque[Offload] = deque()
        self._parts: dict[str, tuple[Offload, OffloadPart]] = {}  # not ended, by name
        self._leaving: dict[str, tuple[Gpu, Pages]] = {}  # staging of copies that timed out
        self._numbers = itertools.count(1)
        self.locked = 0
        self._copies: queue.Queue[str | None] = queue.Queue()
        self._puts: queue.Queue[str | None] = queue.Queue()
        self._queue = Dispatcher.join(schedule, Guard())
        self._prefix = self._queue.attach(self)
        self._longest: dict[str, int] = {}  # most pages of a part, by pool
        for pool in stored_pools:
            # Without direct access, all pages are copied out.
            most = 0 if pool.memory is None else int(pool.kv_pool.pages * locked_share)
            self._longest[pool.name] = max(most, pool.stores.pages)
            now_ns, space = self._queue.now_ns(), self._prefix + pool.name
            self._queue.post(SpaceKnown(now_ns, space, most, pool.stores.pages))
        self._threads = [
            threading.Thread(target=self._run_copies, name="tutti-copy-out", daemon=True),
            threading.Thread(target=self._run_puts, name="tutti-offload", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def add(self, parts: Sequence[OffloadPart], fence: Fence, *, whole: bool = True) -> None:
        """Takes one offload, whose pages may be read once ``fence`` has passed.

        whole: whether the parts are the whole offload; if not, the answer to SGLang is False.
        """
        offload = Offload(fence, len(parts), whole, None if parts else whole)
        with self._changed:
            self._order.append(offload)
            for part in parts:
                name, stored_pool = f"{self._prefix}{next(self._numbers)}", part.stored_pool
                self.locked += part.pages
                if not (stored_pool.writes.closed or stored_pool.writes.take_probe()):
                    self._dropped(part, *_PAUSED, part.pages)
                    self._unlock(offload, part)
                    continue
                self._parts[name] = offload, part
                now_ns, space = self._queue.now_ns(), self._prefix + stored_pool.name
                known = WriteKnown(now_ns, name, part.pages, stored_pool.page_nbytes, space=space)
                known.can_stop = part.pages > part.batch * _FLYING_MAX
                self._queue.add(known)
        self._queue.decide()

    def completed(self) -> int:
        """Number of complete offloads, from the oldest on."""
        with self._changed:
            return len([*itertools.takewhile(lambda one: one.kept is not None, self._order)])

    def pop(self) -> bool:
        """Removes the oldest offload, which must be complete: whether its pages are kept."""
        with self._changed:
            return bool(self._order.popleft().kept)

    def wait_quiet(self, timeout_s: float) -> bool:
        """Waits until all offloads have ended; returns whether they have."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._parts, timeout_s)

    def finish(self, *, stale: bool = False) -> None:
        """Waits until none of SGLang's pages is in use.  Raises DeviceTimeout.

        After half of the time, pages that no device has touched are dropped.  stale: no look-up
        could find them; they are dropped at once, and not counted.
        """
        if not self.wait_quiet(0.0 if stale else self._timeout_s / 2):
            self._drop_unbegun(stale=stale)
        with self._changed:
            if not self._changed.wait_for(lambda: not self.locked, self._timeout_s / 2):
                raise DeviceTimeout(
                    f"the device may still read pages of SGLang after {self._timeout_s:g} s, and "
                    "SGLang would use them for something else; restart the server"
                )

    def reset(self, *, stale: bool) -> None:
        """As ``finish``, and forgets completions."""
        self.finish(stale=stale)
        with self._changed:
            self._order.clear()

    def _drop_unbegun(self, *, stale: bool) -> None:
        """Drops what was not begun; batches and copies to staging that are under way continue."""
        with self._changed:
            for name, (offload, part) in list(self._parts.items()):
                left = part.pages - part.begun
                if left and not part.leaves:
                    if not stale:
                        self._dropped(part, _SLOW[0], _SLOW[1].format(self._timeout_s / 2), left)
                    part.begun = part.granted = part.pages
                    part.ended += left
                    self._queue.add(WriteGone(self._queue.now_ns(), name, withdrawn=True))
                    if not part.flying:
                        self._end(name, offload, part)
        self._queue.decide()

    def close(self, timeout_s: float) -> None:
        """Ends the threads, and detaches from the queue."""
        self._copies.put(None)
        self._puts.put(None)
        for thread in self._threads:
            thread.join(timeout_s)
        self._queue.detach(self._prefix)
        self._queue.leave()

    def write(self, launch: Issue) -> None:
        with self._changed:
            if launch.name in self._parts:  # else it was dropped meanwhile
                part = self._parts[launch.name][1]
                part.granted = max(part.granted, launch.first + launch.count)
        self._puts.put(launch.name)

    def stop_write(self, name: str) -> None:
        """See WriteIssuer.  Batches that are in flight continue."""
        with self._changed:
            if name in self._parts:  # else it has ended
                part = self._parts[name][1]
                part.granted = part.begun
                self._queue.add(WriteStopped(self._queue.now_ns(), name, part.begun))

    def copy_out(self, name: str) -> None:
        """See WriteIssuer: after the copy SGLang may reuse its pages."""
        with self._changed:
            if name in self._parts:
                self._parts[name][1].leaves = True
                self._copies.put(name)

    def drop(self, name: str) -> None:
        with self._changed:
            if name in self._parts:
                offload, part = self._parts[name]
                longest = self._longest[part.stored_pool.name]
                kind, why = _TOO_LONG if part.pages > longest else _FULL
                self._dropped(part, kind, why.format(longest), part.pages)
                self._end(name, offload, part)

    def _dropped(self, part: OffloadPart, kind: str, why: str, pages: int) -> None:
        part.good = False
        part.stored_pool.metrics.count("dropped_pages", pages)
        name = part.stored_pool.name
        self._errors.tell(kind, f"{pages} pages of {name} are not stored: {why}")

    def _run_copies(self) -> None:
        name: str | None = ""
        while name is not None:  # the end mark of close()
            self._end_late()
            name = _next(self._copies, _POLL_S if self._leaving else _IDLE_S)
            if name:
                self._copy(name, *self._parts[name])

    def _end_late(self) -> None:
        """Ends parts whose copies timed out, once the GPU has finished these copies."""
        for name, (gpu, staged) in list(self._leaving.items()):
            try:
                if not gpu.driver.is_stream_done(gpu.leaving):
                    return
            except CudaError:
                return  # a failed GPU reports nothing: memory that it may use stays locked
            del self._leaving[name]
            offload, part = self._parts[name]
            part.stored_pool.stores.release(staged)
            self._end(name, offload, part)

    def _copy(self, name: str, offload: Offload, part: OffloadPart) -> None:
        """Copies a part out, so that SGLang may reuse its pages."""
        staged: Pages | None = None
        try:
            pages = self._pages(offload, part)
            staged = part.stored_pool.stores.allocate(part.pages)
            if staged is None:  # copies that timed out still use staging
                raise DeviceTimeout("the staging of earlier stores is still in use")
            part.stored_pool.copy_out(pages, staged, self._timeout_s)
        except Exception as error:
            self._errors.add(f"offload: {type(error).__name__}", error)
            self._queue.post(WriteGone(self._queue.now_ns(), name))
            part.good = False
            gpu = part.stored_pool.gpu
            if staged is not None and gpu is not None:
                # The GPU may still read the pages and write the staging.
                self._leaving[name] = gpu, staged
                return
            if staged is not None:
                part.stored_pool.stores.release(staged)
            self._end(name, offload, part)
            return
        self._unlock(offload, part)
        part.staged = staged
        self._queue.post(PagesCopied(self._queue.now_ns(), name))

    def _pages(self, offload: Offload, part: OffloadPart) -> Pages:
        if part.numbers is None:
            offload.fence.wait(time.monotonic() + self._timeout_s)
            part.numbers = part.stored_pool.page_numbers(part.slots, part.pages)
        return part.numbers

    def _run_puts(self) -> None:
        while (name := _next(self._puts, _IDLE_S)) is not None:  # the end mark of close()
            launch = self._next_batch(name)
            if launch is not None:
                self._put(launch, *self._parts[name])

    def _next_batch(self, name: str) -> Issue | None:
        """The next batch of a part, unless enough are in flight, or it must stop, or has ended."""
        with self._changed:
            part = self._parts[name][1] if name in self._parts else None
            if part is None or part.flying == _FLYING_MAX or part.begun == part.granted:
                return None
            first, part.flying = part.begun, part.flying + 1
            part.begun = min(part.granted, first + part.batch)
            if part.begun < part.granted:
                self._puts.put(name)  # after the batches of other parts
            return Issue(name, first, part.begun - first)

    def _put(self, launch: Issue, offload: Offload, part: OffloadPart) -> None:
        stored_pool, staged = part.stored_pool, part.staged
        first, end = launch.first, launch.first + launch.count
        began_s = time.monotonic()
        try:
            pool = stored_pool.memory if staged is None else stored_pool.stores.memory
            pages = self._pages(offload, part) if staged is None else staged
            parent, depth = self._chains.before(part.keys[0].tobytes())
            if first:
                parent, depth = part.keys[first - 1].tobytes(), depth + first
            ticket = stored_pool.store.put(
                part.keys[first:end],
                pages[first:end],
                memory=pool,
                parent=parent,
                depth=depth,
                namespace=stored_pool.namespace,
            )
        except Exception as error:
            # The thread must survive; pages that were not stored are misses.
            self._errors.add(f"offload: {type(error).__name__}", error)
            if isinstance(error, TuttiError):
                stored_pool.writes.failure()
            self._stored(launch, offload, part, launch.count)
        else:
            ticket.on_done(lambda done: self._done(launch, offload, part, done, began_s))

    def _done(
        self, launch: Issue, offload: Offload, part: OffloadPart, ticket: PutTicket, began_s: float
    ) -> None:
        counts = np.bincount(ticket.outcome, minlength=len(Outcome))
        failed, dropped = int(counts[Outcome.FAILED]), int(counts[Outcome.DROPPED])
        stored = int(counts[Outcome.STORED])
        metrics, events = part.stored_pool.metrics, part.stored_pool.events
        keys = part.keys[launch.first : launch.first + launch.count]
        kept = (ticket.outcome == Outcome.STORED) | (ticket.outcome == Outcome.PRESENT)
        part.stored_pool.remember(keys[kept])
        if events is not None:
            events.stored(keys, kept)
        if dropped:
            self._dropped(part, *_NO_SPACE, dropped)
        metrics.count("failed_pages", failed, STORE)
        if stored:
            nbytes = stored * part.stored_pool.page_nbytes
            metrics.moved(STORE, stored, nbytes, time.monotonic() - began_s)
            part.stored_pool.writes.success()
        if failed:
            part.stored_pool.writes.failure()
            try:
                ticket.wait(0.001)
            except TuttiError as error:
                self._errors.add(f"offload: {type(error).__name__}", error)
        self._stored(launch, offload, part, failed + dropped, int(counts[Outcome.PRESENT]))

    def _stored(
        self, launch: Issue, offload: Offload, part: OffloadPart, lost: int, there: int = 0
    ) -> None:
        """Handles the end of a batch: the medium does not read its pages any more.  lost: number of
        pages that were not stored.  there: number that had been stored before.
        """
        name = launch.name
        with self._changed:
            part.good = part.good and not lost
            part.ended += launch.count
            part.flying -= 1
            written = PagesWritten(self._queue.now_ns(), name, part.ended, lost, there)
            over = part.ended == part.pages
            if not over:
                self._queue.add(written)
                self._puts.put(name)
        if over:
            self._end(name, offload, part)  # before decide(): decisions may use its staging
            self._queue.add(written)
        self._queue.decide()

    def _end(self, name: str, offload: Offload, part: OffloadPart) -> None:
        """Ends a part that was stored or dropped, or has failed."""
        if part.staged is None:
            self._unlock(offload, part)
        else:
            part.stored_pool.stores.release(part.staged)
        with self._changed:
            self._parts.pop(name)
            self._changed.notify_all()

    def _unlock(self, offload: Offload, part: OffloadPart) -> None:
        """Unlocks a part's pages in SGLang's memory, which are not needed any more."""
        with self._changed:
            self.locked -= part.pages
            offload.good &= part.good
            offload.waits -= 1
            if not offload.waits:
                offload.kept = offload.good
            self._changed.notify_all()
