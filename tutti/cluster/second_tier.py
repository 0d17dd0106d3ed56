"""The second tier of one pool: copies its pages to a remote store, and fetches what look-ups miss.

One thread does both, away from look-ups, puts and loads, which only append to its queues.  Fetched
pages are verified, stored in the pool by a normal put, and found by the next look-up.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tutti.base.arrays import U32, Keys
from tutti.base.breaker import Breaker
from tutti.base.threads import start_thread
from tutti.cluster.chain_parts import prefix, split, take
from tutti.cluster.incoming import Read, puts, usable
from tutti.cluster.local_loads import LocalLoads
from tutti.cluster.outgoing import Outgoing
from tutti.cluster.recent_keys import RecentKeys
from tutti.cluster.remote_process import RemoteProcess, Staging, StagingInUse
from tutti.cluster.remote_store import RemoteConfig, ValueStatus
from tutti.cluster.worker import EXISTS, GET, KEYS_MAX, PUT, REMOVE
from tutti.errors import DeviceTimeout, PoolClosed, RemoteFailed, TuttiError
from tutti.medium.keys import as_keys
from tutti.placement.index import MISSING
from tutti.store import ObjectStore
from tutti.transfers.tickets import Outcome, PutTicket

_log = logging.getLogger(__name__)

_CHAINS_MAX = 256
_LOOK_S = 0.5
_REPLICATED_S = 300.0  # then checked again: the remote store may have evicted the page
#: Parts of the staging memory (fewer if it has few pages): the pool stores one while the others are
#: read.  Several, so that the remote store always has a next get; and small, because the pool can
#: store nothing before the first has arrived.
_PARTS, _PARTS_MIN = 4, 3
#: While local loads run: limit of one put of fetched pages; limit of one get if loads do not pause;
#: and the fraction of the timeout for which a get, and a put, waits for a pause.
_PUT_NBYTES, _BESIDE_NBYTES, _PATIENCE = 8 << 20, 1 << 20, 0.1
_OFF = "off"
_DONE, _REFUSED, _FAILED, _BROKEN = "done", "refused", "failed", "broken"  # broken: local fault
_REMOVED_S = 60.0  # a fetch that was under way is over by then
_REMOVALS_MAX = 1 << 17  # keys
_Wait = Callable[[float], bool]

#: Outcomes of pages that were offered for replication.
COPIED = ("there", "replicated", "replicate_failed", "not_copied", "dropped", "refused")
#: What ``stats()["remote"]`` counts; pages unless the name says otherwise.
COUNTERS = (
    "missed", "fetched", "absent", "fetch_failed", "corrupt", "not_stored", "over_budget", "late",
    "fetch_dropped", "fetch_refused", "offered", *COPIED, "removed", "remove_failed", "failures",
    "local_failures", "fetch_waits",
)  # fmt: skip


class _Work(NamedTuple):
    keys: Keys
    deadline_s: float


class _Landing(NamedTuple):
    """A put of fetched pages."""

    keys: Keys
    ticket: PutTicket


class Tier:
    """The second tier of an open pool.  ``missed`` and ``used`` are called from any thread.

    Raises CapacityError without memory or a thread, ConfigError for a pool whose pages may not be
    copied.
    """

    def __init__(self, store: ObjectStore, config: RemoteConfig) -> None:
        config.check(store.config.verify)
        self._store = store
        self._config = config
        pages = config.staging_nbytes // store.layout.object_nbytes
        parts = min(_PARTS, max(_PARTS_MIN, pages))
        self._part = min(max(1, pages // parts), KEYS_MAX)
        self._at_once = max(1, _PUT_NBYTES // store.layout.object_nbytes)
        self._beside = max(1, _BESIDE_NBYTES // store.layout.object_nbytes)
        self._counts: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))
        self._staging = Staging(store.layout, parts * self._part, self.stats)
        self._remote = RemoteProcess(config, self._staging)
        self._reads, self._writes = (
            Breaker(config.failures_max, config.client_ttl_s, time.monotonic) for _ in range(2)
        )
        self._failed = RecentKeys(config.client_ttl_s, time.monotonic)
        self._replicated = RecentKeys(_REPLICATED_S, time.monotonic)
        self._removed = RecentKeys(_REMOVED_S, time.monotonic)
        self._outgoing = Outgoing(store, self._staging, self._settle_read)
        # Users of each part of staging: (call that returns True at the end, put or None).
        self._in_use: list[list[tuple[_Wait, _Landing | None]]] = [[] for _ in range(parts)]
        self._fetching: set[bytes] = set()  # first keys of chains that wait or are fetched
        self._wanted: deque[_Work] = deque()
        self._offered: OrderedDict[bytes, None] = OrderedDict()
        self._uncounted = 0  # pages of the copy that is under way
        self._removals: OrderedDict[bytes, None] = OrderedDict()
        self._gone = self._removed, self._removals
        self._has_fetched = False  # in the last step
        self._changed = threading.Condition()
        self._stopping = False
        waited, patience_s = partial(self._count, "fetch_waits", 1), _PATIENCE * config.timeout_s
        self._local = LocalLoads(store._loader, patience_s, waited, lambda: self._stopping)
        self._is_off = False
        self._answered = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        try:
            store.register(self._staging)
            start_thread(self._thread, "tutti-second-tier")
        except BaseException:
            self._staging.close_fd()
            raise

    def missed(self, keys: Keys) -> None:
        """A look-up did not find these keys (n, 16), in the order of their chain.

        The first 2,048 are fetched; a later look-up asks for the next.
        """
        if not self._store.recovered:
            return  # recovery may still find them
        keys = keys[:KEYS_MAX].copy()
        first = keys[0].tobytes()
        with self._changed:
            if any(first in known for known in (self._fetching, self._failed, *self._gone)):
                return
            self._counts["missed"] += len(keys)
            if self._refuses(self._reads):
                self._counts["fetch_refused"] += len(keys)
                return
            if len(self._wanted) >= _CHAINS_MAX:
                self._counts["fetch_dropped"] += len(keys)
                return
            self._fetching.add(first)
            self._wanted.append(_Work(keys, time.monotonic() + self._config.timeout_s))
            self._changed.notify()

    def used(self, keys: Keys, *, first: bool = False) -> None:
        """Keys (n, 16) in the pool were used.  first: they were just stored."""
        replicate = self._config.replicate
        if replicate == "off" or (first and replicate != "first") or not len(keys):
            return
        room = max(1, self._config.queue_nbytes // self._store.layout.object_nbytes)
        names = [key.tobytes() for key in keys]
        with self._changed:
            known = (self._replicated, self._failed, self._offered, *self._gone)
            new = [name for name in names if not any(name in k for k in known)]
            self._counts["offered"] += len(new)
            if not new or self._refuses(self._writes):
                self._counts["refused"] += len(new)
                return
            self._offered.update(dict.fromkeys(new))
            while len(self._offered) > room:
                self._offered.popitem(last=False)
                self._counts["dropped"] += 1
            self._changed.notify()

    def put_over(self, keys: Keys, outcome: npt.NDArray[np.uint8]) -> None:
        """A put of keys (n, 16) has ended with outcomes (n,)."""
        self.used(keys[outcome == Outcome.STORED], first=True)
        self.used(keys[outcome == Outcome.PRESENT])

    def removing(self, keys: Keys) -> None:
        """Keys (n, 16) are deleted from the pool now: their copies are removed too, later.

        They are neither fetched nor copied until a minute after that.
        """
        names = [key.tobytes() for key in keys]
        with self._changed:
            self._removed.add(names)
            for name in names:
                if name in self._offered:
                    del self._offered[name]
                    self._counts["not_copied"] += 1
            room = _REMOVALS_MAX - len(self._removals)
            self._removals.update(dict.fromkeys(names[:room]))
            self._counts["remove_failed"] += len(names[room:])
            self._changed.notify()

    def _refuses(self, breaker: Breaker) -> bool:
        return self._stopping or self._is_off or breaker.state == "open"

    def stats(self) -> dict[str, Any]:
        """Counters since the pool was opened, and the states of fetches and of copies."""
        with self._changed:
            return {
                "remote": {
                    **self._counts,
                    "state": _OFF if self._is_off else self._reads.state,
                    "write_state": _OFF if self._is_off else self._writes.state,
                    "opened": self._reads.opened + self._writes.opened,
                    "starts": self._remote.starts,
                    "queued_nbytes": len(self._offered) * self._store.layout.object_nbytes,
                    "queued_chains": len(self._wanted),
                }
            }

    def close(self) -> None:
        """Ends the tier before the store closes; queued work is dropped."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        for timeout_s in (2 * self._store.config.timeout_s, 0.0):
            with contextlib.suppress(StagingInUse):
                self._remote.kill()
            self._thread.join(timeout_s)
        if not self._thread.is_alive():
            self._staging.close_fd()

    def _run(self) -> None:
        try:
            with contextlib.suppress(StagingInUse):
                self._do(None, as_keys([]))  # starts the worker
            while not self._stopping:
                try:
                    self._step()
                except DeviceTimeout as error:  # StagingInUse, or a deletion that did not end
                    self._pause(error)
        except PoolClosed as error:
            if not self._stopping:
                _log.warning("the second tier is off: %s", error)
        finally:
            self._is_off = True

    def _pause(self, error: DeviceTimeout) -> None:
        """Turns the tier off for ``client_ttl_s``, after a fault of this machine."""
        with self._changed:
            if not self._is_off and not self._stopping:
                _log.warning("the second tier is paused until this is resolved: %s", error)
            self._is_off = True
            self._counts["local_failures"] += 1
            self._changed.wait_for(lambda: self._stopping, self._config.client_ttl_s)

    def _step(self) -> None:
        """Carries out removals; then fetches one chain or replicates a few pages, alternately if
        both wait.
        """
        if self._is_off:
            self._remote.kill()
            self._settle()
            self._is_off = False
        with self._changed:
            if not self._wanted and not self._offered and not self._removals:
                self._changed.wait(_LOOK_S)
            removals = self._taken(self._removals, KEYS_MAX)
            self._removed.add(removals)
            self._replicated.discard(removals)  # also those whose copy had begun
            fetches = self._wanted and not (self._offered and self._has_fetched)
            work = self._wanted.popleft() if fetches else None
            self._has_fetched = work is not None
            keys = work.keys if work else as_keys(self._taken(self._offered, self._part))
        if removals:
            self._remove(as_keys(removals))
        if len(keys):
            self._do(work, keys)

    def _do(self, work: _Work | None, keys: Keys) -> None:
        """Fetches a chain, or replicates keys."""
        if work is None:
            self._copy(keys)
            return
        try:
            if self._attempt(self._reads, partial(self._fetch, work), keys) == _REFUSED:
                self._count("fetch_refused", len(keys))
        finally:
            with self._changed:
                self._fetching.discard(work.keys[0].tobytes())

    def _copy(self, keys: Keys) -> None:
        """Replicates keys, and counts what became of each."""
        self._uncounted, fate = len(keys), "not_copied"
        try:
            end = self._attempt(self._writes, partial(self._replicate, keys), keys)
            fate = {_REFUSED: "refused", _FAILED: "replicate_failed"}.get(end, fate)
        finally:
            self._count(fate, self._uncounted)

    def _remove(self, keys: Keys) -> None:
        """Removes copies from the remote store.  What fails is not tried again."""
        left = len(keys)

        def remove() -> None:
            nonlocal left
            failed = int((self._call(REMOVE, keys, None) == ValueStatus.FAILED).sum())
            self._count("removed", left - failed)
            left = failed

        try:
            self._attempt(self._writes, remove, as_keys([]))
        finally:
            self._count("remove_failed", left)

    def _attempt(self, breaker: Breaker, work: Callable[[], None], keys: Keys) -> str:
        """Runs ``work`` on keys unless the breaker is open; returns how it ended."""
        failures, self._answered = self._counts["failures"], False
        if breaker.state == "open":
            return _REFUSED
        try:
            work()
            # Not after each call: a master may know pages whose servers are gone.
            if self._answered and self._counts["failures"] == failures:
                breaker.success()
            return _DONE
        except (StagingInUse, PoolClosed):
            raise
        except Exception as error:  # fails this work only: the tier goes on
            known, remote = isinstance(error, TuttiError), isinstance(error, RemoteFailed)
            if not self._stopping:
                _log.warning("the second tier failed: %s", error, exc_info=not known)
            self._fail(keys, breaker if remote or not known else None)
            return _FAILED if remote else _BROKEN

    def _fail(self, keys: Any, breaker: Breaker | None) -> None:
        """A call, or some keys of it, failed.  breaker: None for a fault of this machine."""
        if breaker is not None:
            breaker.failure()
        self._count("local_failures" if breaker is None else "failures", 1)
        self._remember(self._failed, keys)

    def _remember(self, known: RecentKeys, keys: Any) -> None:
        names = [key.tobytes() for key in keys]
        with self._changed:
            known.add(names)

    @staticmethod
    def _among(keys: Keys, *known: RecentKeys | OrderedDict[bytes, None]) -> npt.NDArray[np.bool_]:
        names = [key.tobytes() for key in keys]
        return np.array([any(name in some for some in known) for name in names], np.bool_)

    @staticmethod
    def _taken(queue: OrderedDict[bytes, None], most: int) -> list[bytes]:
        return [queue.popitem(last=False)[0] for _ in range(min(most, len(queue)))]

    def _call(self, op: int, keys: Keys, pages: U32 | None) -> Any:
        """See RemoteProcess.call."""
        if self._stopping:
            raise RemoteFailed("the tier is closing")
        answers = self._remote.call(op, keys, pages, self._config.timeout_s)
        self._answered = True
        return answers

    def _fetch(self, work: _Work) -> None:
        self._remote.connect()
        if time.monotonic() >= work.deadline_s:
            self._count("late", len(work.keys))
            return
        keys = self._not_there(work.keys)
        keys = prefix(keys, ~self._among(keys, self._failed, *self._gone))
        if not len(keys):
            return
        found = prefix(keys, self._call(EXISTS, keys, None) == ValueStatus.DONE)
        self._count("absent", len(keys) - len(found))
        budget = max(1, self._config.prefetch_nbytes // self._store.layout.object_nbytes)
        self._count("over_budget", len(found[budget:]))
        parts, reads = deque(split(found[:budget], self._part)), deque[Read]()
        free = itertools.cycle(range(len(self._in_use)))
        try:
            while self._ask(parts, reads, free, work.deadline_s):
                read = reads.popleft()
                come = self._come(read)
                is_whole = len(come.keys) == len(read.keys)
                # Asked before the puts, so that the remote store has work meanwhile.
                if is_whole and not self._local.near():
                    self._ask(parts, reads, free, work.deadline_s)
                self._put(come, work.deadline_s)
                if not is_whole:
                    break  # nothing is stored after a gap in the chain
        finally:
            try:
                self._remote.abandon()
            finally:
                self._settle()

    def _ask(
        self, parts: deque[Keys], reads: deque[Read], free: Iterator[int], deadline_s: float
    ) -> deque[Read]:
        """Requests parts while staging memory is free for them, and adds them to reads.
        One at a time while local loads run, because a request cannot be recalled.
        """
        while parts and len(reads) < len(self._in_use) - 1 and not (reads and self._local.near()):
            most = self._part if self._local.wait_for_pause(deadline_s) else self._beside
            part = next(free)
            self._settle(part)
            if time.monotonic() >= deadline_s:
                self._count("late", sum(map(len, parts)))
                parts.clear()
                break
            if self._stopping:
                raise RemoteFailed("the tier is closing")
            keys = take(parts, most)
            pages = np.arange(len(keys), dtype=np.uint32) + np.uint32(part * self._part)
            self._remote.ask(GET, keys, pages, self._config.timeout_s)
            reads.append(Read(keys, pages, part))
        return reads

    def _come(self, read: Read) -> Read:
        """Waits for a read; returns it up to the first page that is wrong, unusable or deleted."""
        answers = self._remote.answer(self._config.timeout_s)
        self._answered = True
        for answer, name in enumerate(("absent", "fetch_failed", "corrupt"), ValueStatus.ABSENT):
            self._count(name, int(np.count_nonzero(answers == answer)))
        wrong = (answers == ValueStatus.FAILED) | (answers == ValueStatus.CORRUPT)
        if wrong.any():
            self._fail(read.keys[wrong], self._reads)
            # Late bytes of a failed read must not reach the next pages of the staging memory.
            self._remote.kill()
        right = read.first(len(prefix(read.keys, answers == ValueStatus.DONE)))
        come = usable(right, self._staging)
        come = come.first(len(prefix(come.keys, ~self._among(come.keys, *self._gone))))
        self._count("absent", len(right.keys) - len(come.keys))
        return come

    def _put(self, read: Read, deadline_s: float) -> None:
        """Stores verified staging pages in the pool; a few at a time while local loads run."""
        self._settle()  # one at a time, so that a load waits for few writes
        most = self._part if self._local.wait_for_pause(deadline_s) else self._at_once
        for number, request in enumerate(puts(read, self._staging, most)):
            if number:
                self._settle()
                self._local.wait_for_pause(deadline_s)
            self._store.catalogue.expiry.watch(request.expiry_64s > 0)
            ticket = self._store.put_request(request)
            self._in_use[read.part].append((ticket.wait_ended, _Landing(request.keys, ticket)))

    def _settle(self, *parts: int) -> None:
        """Waits until parts of the staging memory, by default all of them, may be overwritten.

        Raises StagingInUse.
        """
        parts = parts or tuple(range(len(self._in_use)))
        while uses := next(filter(None, (self._in_use[part] for part in parts)), None):
            if not uses[0][0](2 * self._store.config.timeout_s):
                raise StagingInUse("the pool's medium does not answer; staging stays in use")
            _, landing = uses.pop(0)
            if landing is not None:
                self._landed(*landing)

    def _landed(self, keys: Keys, put: PutTicket) -> None:
        """Accounts for a put of fetched pages that has ended."""
        is_stored = put.outcome == Outcome.STORED
        landed = int(np.count_nonzero(is_stored | (put.outcome == Outcome.PRESENT)))
        self._count("fetched", landed)
        self._count("not_stored", len(keys) - landed)
        stored = keys[is_stored]
        if len(gone := stored[self._among(stored, *self._gone)]):
            self._store.catalogue.delete(gone)  # they were deleted while they landed

    def _replicate(self, keys: Keys) -> None:
        self._remote.connect()
        if not len(keys):
            return
        there = self._call(EXISTS, keys, None) == ValueStatus.DONE
        self._remember(self._replicated, keys[there])
        self._copied("there", int(np.count_nonzero(there)))
        own = self._outgoing.read(keys[~there])
        if not len(own):
            return
        self._copied("not_copied", self._uncounted - len(own))
        answers = self._call(PUT, own, np.arange(len(own), dtype=np.uint32))
        done = answers == ValueStatus.DONE
        self._remember(self._replicated, own[done])
        self._copied("replicated", int(np.count_nonzero(done)))
        self._copied("replicate_failed", int(np.count_nonzero(~done)))
        self._remember(self._failed, own[~done])
        failed = answers == ValueStatus.FAILED  # ABSENT, as beyond a tenant's quota, is no failure
        if failed.any():
            self._fail(own[failed], self._writes)

    def _settle_read(self, wait: _Wait) -> None:
        """Waits until pages that were read for a copy may be overwritten.  Raises StagingInUse."""
        self._in_use[0].append((wait, None))
        self._settle(0)

    def _not_there(self, keys: Keys) -> Keys:
        """The keys that are still not in the pool."""
        core = self._store._core
        with core.lock:
            missing: npt.NDArray[np.bool_] = core.index.find(keys) == MISSING
        return keys[missing]

    def _copied(self, fate: str, pages: int) -> None:
        self._count(fate, pages)
        self._uncounted -= pages

    def _count(self, name: str, pages: int) -> None:
        with self._changed:
            self._counts[name] += pages
