"""The second tier of one pool: copies its pages to a remote store, and fetches what look-ups miss.

One thread does both, away from look-ups, puts and loads, which only append to its queues.  Fetched
pages are verified, stored in the pool as any put, and found by the next look-up.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tutti.base.arrays import U32, Keys
from tutti.base.breaker import Breaker
from tutti.base.threads import start_thread
from tutti.cluster.recent_keys import RecentKeys
from tutti.cluster.remote_process import RemoteProcess, Staging, StagingInUse
from tutti.cluster.remote_store import RemoteConfig, ValueStatus
from tutti.cluster.worker import EXISTS, GET, KEYS_MAX, PUT, VERSION
from tutti.errors import KeyMissing, MediumError, PagesInUse, PoolClosed, RemoteFailed, TuttiError
from tutti.medium.keys import as_keys
from tutti.medium.slot_record import EXPIRY_UNIT_S
from tutti.placement.index import MISSING
from tutti.store import ObjectStore
from tutti.transfers.put_request import PutRequest
from tutti.transfers.tickets import Outcome, PutTicket

_log = logging.getLogger(__name__)

_CHAINS_MAX = 256
_LOOK_S = 0.5
_REPLICATED_S = 300.0  # the remote store may have evicted a page since
_GETS = 2  # under way at a time: the digests of one are compared while the next is read
_PARTS = 3  # of the staging memory: those of the gets, and one that the pool stores meanwhile
_OFF = "off"
_Wait = Callable[[float], bool]

#: What ``stats()["remote"]`` counts; pages unless the name says otherwise.
COUNTERS = (
    "missed", "fetched", "absent", "fetch_failed", "corrupt", "not_stored", "over_budget",
    "late", "offered", "replicated", "replicate_failed", "dropped", "refused", "failures",
    "local_failures",
)  # fmt: skip


class _Work(NamedTuple):
    keys: Keys
    deadline_s: float


class _Read(NamedTuple):
    """Keys that are read to pages of one part of the staging memory."""

    keys: Keys
    pages: U32
    part: int


class Tier:
    """The second tier of an open pool.  ``missed`` and ``used`` are called from any thread.

    Raises CapacityError without memory or a thread, ConfigError for a pool whose pages may not be
    copied.
    """

    def __init__(self, store: ObjectStore, config: RemoteConfig) -> None:
        config.check(store.config.verify)
        self._store = store
        self._config = config
        self._part = max(1, config.staging_nbytes // (_PARTS * store.layout.object_nbytes))
        self._part = min(self._part, KEYS_MAX)
        self._counts: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))
        self._staging = Staging(store.layout, _PARTS * self._part, self.stats)
        self._remote = RemoteProcess(config, self._staging)
        self._reads, self._writes = (
            Breaker(config.failures_max, config.client_ttl_s, time.monotonic) for _ in range(2)
        )
        self._failed = RecentKeys(config.client_ttl_s, time.monotonic)
        self._replicated = RecentKeys(_REPLICATED_S, time.monotonic)
        # What may still touch each part of the staging memory, until its call is True; a put.
        self._in_use: list[list[tuple[_Wait, PutTicket | None]]] = [[] for _ in range(_PARTS)]
        self._fetching: set[bytes] = set()  # first keys of chains that wait or are fetched
        self._wanted: deque[_Work] = deque()
        self._offered: OrderedDict[bytes, None] = OrderedDict()
        self._has_fetched = False  # in the last step
        self._changed = threading.Condition()
        self._stopping = False
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
            return  # they may be there
        keys = keys[:KEYS_MAX].copy()
        first = keys[0].tobytes()
        with self._changed:
            if first in self._fetching or first in self._failed:
                return
            self._counts["missed"] += len(keys)
            if self._refuses(len(keys), self._reads):
                return
            if len(self._wanted) >= _CHAINS_MAX:
                self._counts["dropped"] += len(keys)
                return
            self._fetching.add(first)
            self._wanted.append(_Work(keys, time.monotonic() + self._config.timeout_s))
            self._changed.notify()

    def used(self, keys: Keys, *, first: bool = False) -> None:
        """Keys (n, 16) in the pool were used: for the first time, stored, or again."""
        replicate = self._config.replicate
        if replicate == "off" or (first and replicate != "first") or not len(keys):
            return
        room = self._config.queue_nbytes // self._store.layout.object_nbytes
        names = [key.tobytes() for key in keys]
        with self._changed:
            known = (self._replicated, self._failed, self._offered)
            new = [name for name in names if not any(name in k for k in known)]
            self._counts["offered"] += len(new)
            if not new or self._refuses(len(new), self._writes):
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

    def _refuses(self, pages: int, breaker: Breaker) -> bool:
        refuses = self._stopping or self._is_off or breaker.state == "open"
        self._counts["refused"] += pages * refuses
        return refuses

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
        """Ends the tier before the store closes; what waits is dropped."""
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
                except StagingInUse as error:
                    self._pause(error)
        except PoolClosed as error:
            if not self._stopping:
                _log.warning("the second tier is off: %s", error)
        finally:
            self._is_off = True

    def _pause(self, error: StagingInUse) -> None:
        """Off for a while, after a fault of this machine."""
        with self._changed:
            if not self._is_off and not self._stopping:
                _log.warning("the second tier is off until that is over: %s", error)
            self._is_off = True
            self._counts["local_failures"] += 1
            self._changed.wait_for(lambda: self._stopping, self._config.client_ttl_s)

    def _step(self) -> None:
        """Fetches one chain, or replicates a few pages; in turns, where both wait."""
        if self._is_off:
            self._remote.kill()
            self._settle()
            self._is_off = False
        with self._changed:
            if not self._wanted and not self._offered:
                self._changed.wait(_LOOK_S)
            fetches = self._wanted and not (self._offered and self._has_fetched)
            work = self._wanted.popleft() if fetches else None
            self._has_fetched = work is not None
            keys = self._next_offered() if work is None else work.keys
        if len(keys):
            self._do(work, keys)

    def _do(self, work: _Work | None, keys: Keys) -> None:
        """Fetches a chain, or replicates keys."""
        breaker = self._writes if work is None else self._reads
        failures, self._answered = self._counts["failures"], False
        try:
            if breaker.state == "open":
                self._count("refused", len(keys))
            elif work is not None:
                self._fetch(work)
            else:
                self._replicate(keys)
            # Not after each call: a master may know pages whose servers are gone.
            if self._answered and self._counts["failures"] == failures:
                breaker.success()
        except (StagingInUse, PoolClosed):
            raise
        except Exception as error:  # of this work alone: the tier goes on
            known = isinstance(error, TuttiError)
            if not self._stopping:
                _log.warning("the second tier failed: %s", error, exc_info=not known)
            self._fail(keys, breaker if isinstance(error, RemoteFailed) or not known else None)
        finally:
            if work is not None:
                with self._changed:
                    self._fetching.discard(work.keys[0].tobytes())

    def _fail(self, keys: Any, breaker: Breaker | None) -> None:
        """Calls, or keys of one, have failed; without a breaker by a fault of this machine."""
        if breaker is not None:
            breaker.failure()
        self._count("local_failures" if breaker is None else "failures", 1)
        self._remember(self._failed, keys)

    def _remember(self, known: RecentKeys, keys: Any) -> None:
        names = [key.tobytes() for key in keys]
        with self._changed:
            known.add(names)

    def _next_offered(self) -> Keys:
        n = min(self._part, len(self._offered))
        return as_keys([self._offered.popitem(last=False)[0] for _ in range(n)])

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
        may = [key.tobytes() not in self._failed for key in keys]
        keys = _prefix(keys, np.array(may, np.bool_))
        if not len(keys):
            return
        found = _prefix(keys, self._call(EXISTS, keys, None) == ValueStatus.DONE)
        self._count("absent", len(keys) - len(found))
        budget = self._config.prefetch_nbytes // self._store.layout.object_nbytes
        self._count("over_budget", len(found[budget:]))
        found = found[:budget]
        parts = _split(found, self._part)
        reads: deque[_Read] = deque()
        try:
            for number, keys in enumerate(parts):
                if len(reads) == _GETS and not self._land(reads):
                    break
                self._settle(number % _PARTS)
                if time.monotonic() >= work.deadline_s:
                    self._count("late", sum(map(len, parts[number:])))
                    break
                reads.append(self._read_part(keys, number % _PARTS))
            while reads:  # each turn takes one, or all
                self._land(reads)
        finally:
            try:
                self._remote.abandon()
            finally:
                self._settle()

    def _read_part(self, keys: Keys, part: int) -> _Read:
        """Begins to read keys into a part of the staging memory."""
        if self._stopping:
            raise RemoteFailed("the tier is closing")
        pages = np.arange(len(keys), dtype=np.uint32) + np.uint32(part * self._part)
        self._remote.ask(GET, keys, pages, self._config.timeout_s)
        return _Read(keys, pages, part)

    def _land(self, reads: deque[_Read]) -> bool:
        """Puts what the oldest read brought; whether all of it, or else leaves the other reads."""
        keys, pages, part = reads.popleft()
        answers = self._remote.answer(self._config.timeout_s)
        self._answered = True
        for answer, name in enumerate(("absent", "fetch_failed", "corrupt"), ValueStatus.ABSENT):
            self._count(name, int(np.count_nonzero(answers == answer)))
        wrong = np.isin(answers, (ValueStatus.FAILED, ValueStatus.CORRUPT))
        if wrong.any():
            self._fail(keys[wrong], self._reads)
            # Late bytes of a failed read must not reach the next pages of the staging memory.
            self._remote.kill()
        n = len(_prefix(keys, answers == ValueStatus.DONE))
        is_whole = self._put(keys[:n], pages[:n], part) == len(keys)
        if not is_whole:
            reads.clear()  # nothing is stored behind a hole
        return is_whole

    def _put(self, keys: Keys, pages: U32, part: int) -> int:
        """Stores verified staging pages in the pool, one put per namespace and expiry.

        How many, up to the first that has expired or is of another version.
        """
        heads = [self._staging.head(int(page)) for page in pages]
        now_64s = time.time() / EXPIRY_UNIT_S
        usable = [head[5] == VERSION and not 0 < head[4] <= now_64s for head in heads]
        n = len(_prefix(keys, np.array(usable, np.bool_)))
        self._count("absent", len(keys) - n)
        kinds = [(head[3], head[4]) for head in heads]
        for (tenant, expiry), group in itertools.groupby(range(n), key=kinds.__getitem__):
            rows = list(group)
            parents = as_keys([heads[row][1] for row in rows])
            depths = np.array([heads[row][2] for row in rows], np.uint32)
            digests = np.array([self._staging.digests(int(pages[row])) for row in rows])
            of = self._staging.memory, tenant, expiry, digests
            request = PutRequest(keys[rows], parents, depths, pages[rows], *of)
            self._store.catalogue.expiry.watch(expiry > 0)
            ticket = self._store.put_request(request)
            self._in_use[part].append((ticket.wait_ended, ticket))
        return n

    def _settle(self, *parts: int) -> None:
        """Waits until parts of the staging memory, by default all of them, may be overwritten.

        Raises StagingInUse.
        """
        parts = parts or tuple(range(_PARTS))
        while uses := next(filter(None, (self._in_use[part] for part in parts)), None):
            if not uses[0][0](2 * self._store.config.timeout_s):
                raise StagingInUse("the pool's medium does not answer; staging stays in use")
            _, put = uses.pop(0)
            if put is not None:
                landed = int(np.isin(put.outcome, (Outcome.STORED, Outcome.PRESENT)).sum())
                self._count("fetched", landed)
                self._count("not_stored", len(put.outcome) - landed)

    def _replicate(self, keys: Keys) -> None:
        self._remote.connect()
        if not len(keys):
            return
        there = self._call(EXISTS, keys, None) == ValueStatus.DONE
        self._remember(self._replicated, keys[there])
        own = self._read(keys[~there])
        if not len(own):
            return
        answers = self._call(PUT, own, np.arange(len(own), dtype=np.uint32))
        done = answers == ValueStatus.DONE
        self._remember(self._replicated, own[done])
        self._count("replicated", int(np.count_nonzero(done)))
        self._count("replicate_failed", int(np.count_nonzero(~done)))
        self._remember(self._failed, own[~done])
        failed = answers == ValueStatus.FAILED  # the others: a tenant's quota is no fault
        if failed.any():
            self._fail(own[failed], self._writes)

    def _read(self, keys: Keys) -> Keys:
        """Reads objects of the pool into the first staging pages, with their trailers.

        Those that may be copied, in the order of these pages; none if one of them was not right.
        """
        found = self._store.catalogue.described(keys)
        found = [
            (i, r) for i, r in found if i.has_digests and (i.expires_s is None or i.expires_s > 0)
        ]
        now_s, layers = time.time(), self._store.layout.layers
        own = as_keys([info.key for info, _ in found])
        if not found or not self._load(own):
            return own[:0]
        for page, (info, record) in enumerate(found):
            until_s = 0 if info.expires_s is None else now_s + info.expires_s
            expiry = round(until_s / EXPIRY_UNIT_S)
            names = (info.key, info.parent, info.depth, info.tenant)
            self._staging.set_head(page, *names, expiry, VERSION)
            self._staging.digests(page)[:] = record["digests"][:layers]
        with self._store._core.lock:
            index = self._store._core.index
            slots = index.find(own)
            same = index.sequence[slots] == [record["sequence"] for _, record in found]
        # An object that was stored anew meanwhile may have other bytes than its record told.
        return own if same.all() and (slots != MISSING).all() else own[:0]

    def _load(self, keys: Keys) -> bool:
        """Loads objects into the first staging pages; whether all were right."""
        pages = np.arange(len(keys), dtype=np.uint32)
        try:
            ticket = self._store.load(keys, pages, memory=self._staging, ahead=True)
        except KeyMissing:
            return False  # evicted meanwhile
        except PagesInUse as error:
            self._in_use[0].append((error.wait_settled, None))
            self._settle(0)
            return False
        self._in_use[0].append((ticket.wait_settled, None))
        try:
            ticket.wait_settled(2 * self._store.config.timeout_s)
            ticket.wait(_LOOK_S)
        except MediumError:
            return False
        finally:
            self._settle(0)
        return True

    def _not_there(self, keys: Keys) -> Keys:
        """Without those that are in the pool by now."""
        core = self._store._core
        with core.lock:
            missing: npt.NDArray[np.bool_] = core.index.find(keys) == MISSING
        return keys[missing]

    def _count(self, name: str, pages: int) -> None:
        with self._changed:
            self._counts[name] += pages


def _split(keys: Keys, most: int) -> list[Keys]:
    """Parts to get.  Those at the end are small, as the last one lands while no other is read.

    Not below a third of the most, as each get has a cost of its own.
    """
    parts, least = [], -(-most // 3)
    while len(keys):
        size = min(most, max(-(-len(keys) // 2), least))
        parts.append(keys[:size])
        keys = keys[size:]
    return parts


def _prefix(keys: Keys, good: npt.NDArray[np.bool_]) -> Keys:
    """Keys before the first that is not good."""
    wrong = np.flatnonzero(~good)
    return keys[: wrong[0]] if wrong.size else keys
