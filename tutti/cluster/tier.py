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
from collections import Counter, deque
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tutti.arrays import U32, Keys
from tutti.cluster.breaker import Breaker, RecentKeys
from tutti.cluster.remote import Answer, RemoteConfig
from tutti.cluster.remote_process import RemoteProcess, Staging, StagingInUse
from tutti.cluster.worker import EXISTS, GET, KEYS_MAX, PUT
from tutti.errors import (
    KeyMissing,
    MediumError,
    PagesInUse,
    PoolClosed,
    RemoteFailed,
    TuttiError,
)
from tutti.medium.keys import as_keys
from tutti.medium.slot_record import EXPIRY_UNIT_S, expiry_of
from tutti.placement.index import MISSING
from tutti.store import ObjectStore
from tutti.threads import start_thread
from tutti.transfers.put_request import PutRequest
from tutti.transfers.tickets import Outcome, PutTicket

_log = logging.getLogger(__name__)

_CHAINS_MAX = 256
_LOOK_S = 0.5
_REPLICATED_S = 300.0  # the remote store may have evicted a page since
_VERSION = 1
_OFF = "off"

#: What ``stats()["remote"]`` counts; pages unless the name says otherwise.
COUNTERS = (
    "missed", "fetched", "absent", "fetch_failed", "corrupt", "not_landed", "over_budget",
    "late", "offered", "replicated", "replicate_failed", "dropped", "refused", "failures",
)  # fmt: skip


class _Work(NamedTuple):
    keys: Keys
    deadline_s: float


class Tier:
    """The second tier of an open pool.  ``missed`` and ``used`` are called from any thread.

    Raises CapacityError without memory or a thread.
    """

    def __init__(self, store: ObjectStore, config: RemoteConfig) -> None:
        self._store = store
        self._config = config
        self._half = max(1, config.staging_nbytes // (2 * store.layout.object_nbytes))
        self._half = min(self._half, KEYS_MAX)
        self._counts: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))
        self._staging = Staging(store.layout, 2 * self._half, self.stats)
        self._remote = RemoteProcess(config, self._staging)
        self._breaker = Breaker(config.failures_max, config.client_ttl_s, time.monotonic)
        self._failed = RecentKeys(time.monotonic)
        self._replicated = RecentKeys(time.monotonic)
        self._fetching: set[bytes] = set()  # first keys of chains that wait or are fetched
        self._wanted: deque[_Work] = deque()
        self._offered: deque[Keys] = deque()
        self._offered_nbytes = 0
        self._changed = threading.Condition()
        self._stopping = False
        self._is_off = False
        self._answered = False
        store.register(self._staging)
        self._thread = threading.Thread(target=self._run, daemon=True)
        start_thread(self._thread, "tutti-second-tier")

    def missed(self, keys: Keys) -> None:
        """A look-up did not find these keys (n, 16), in the order of their chain."""
        if not self._store.recovered:
            return  # they may be there
        first = keys[0].tobytes()
        with self._changed:
            if first in self._fetching or first in self._failed:
                return
            self._counts["missed"] += len(keys)
            if self._refuses(len(keys)):
                return
            if len(self._wanted) >= _CHAINS_MAX:
                self._counts["dropped"] += len(keys)
                return
            self._fetching.add(first)
            self._wanted.append(_Work(keys.copy(), time.monotonic() + self._config.timeout_s))
            self._changed.notify()

    def used(self, keys: Keys, *, first: bool = False) -> None:
        """Keys (n, 16) in the pool were used: for the first time, stored, or again."""
        replicate = self._config.replicate
        if replicate == "off" or (first and replicate != "first") or not len(keys):
            return
        each = self._store.layout.object_nbytes
        with self._changed:
            self._counts["offered"] += len(keys)
            if self._refuses(len(keys)):
                return
            room = max(0, (self._config.queue_nbytes - self._offered_nbytes) // each)
            self._counts["dropped"] += len(keys[room:])
            if room:
                self._offered.append(keys[:room].copy())
                self._offered_nbytes += len(keys[:room]) * each
                self._changed.notify()

    def put_over(self, keys: Keys, outcome: npt.NDArray[np.uint8]) -> None:
        """A put of keys (n, 16) has ended with outcomes (n,)."""
        self.used(keys[outcome == Outcome.STORED], first=True)
        self.used(keys[outcome == Outcome.PRESENT])

    def _refuses(self, pages: int) -> bool:
        refuses = self._stopping or self._is_off or self._breaker.state == "open"
        self._counts["refused"] += pages * refuses
        return refuses

    def stats(self) -> dict[str, Any]:
        """Counters since the pool was opened, and the state of the tier."""
        with self._changed:
            return {
                "remote": {
                    **self._counts,
                    "state": _OFF if self._is_off else self._breaker.state,
                    "opened": self._breaker.opened,
                    "starts": self._remote.starts,
                    "queued_nbytes": self._offered_nbytes,
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

    def _run(self) -> None:
        try:
            try:
                self._remote.connect()
            except RemoteFailed as error:
                _log.warning("the second tier is away: %s", error)
                self._fail(())
            while not self._stopping:
                self._step()
        except (StagingInUse, PoolClosed) as error:
            if not self._stopping:
                _log.warning("the second tier is off: %s", error)
        finally:
            self._is_off = True

    def _step(self) -> None:
        """Fetches one chain, or replicates a few pages."""
        with self._changed:
            if not self._wanted and not self._offered:
                self._changed.wait(_LOOK_S)
            work = self._wanted.popleft() if self._wanted else None
            keys = self._next_offered() if work is None else None
        failures, self._answered = self._counts["failures"], False
        try:
            if self._breaker.state == "open":
                refused = keys if work is None else work.keys
                self._count("refused", 0 if refused is None else len(refused))
            elif work is not None:
                self._fetch(work)
            elif keys is not None:
                self._replicate(keys)
            # Not after each call: a master may know pages whose servers are gone.
            if self._answered and self._counts["failures"] == failures:
                self._breaker.succeeded()
        except (StagingInUse, PoolClosed):
            raise
        except Exception as error:  # of this work alone: the tier goes on
            failed = keys if work is None else work.keys
            if not self._stopping:
                unexpected = not isinstance(error, TuttiError)
                _log.warning("the second tier failed: %s", error, exc_info=unexpected)
            self._fail(() if failed is None else failed)
        finally:
            if work is not None:
                with self._changed:
                    self._fetching.discard(work.keys[0].tobytes())

    def _fail(self, keys: Any) -> None:
        with self._changed:
            self._counts["failures"] += 1
            self._breaker.failed()
            self._failed.add((key.tobytes() for key in keys), self._config.client_ttl_s)

    def _next_offered(self) -> Keys | None:
        if not self._offered:
            return None
        keys = self._offered.popleft()
        some, rest = keys[: self._half], keys[self._half :]
        if len(rest):
            self._offered.appendleft(rest)
        self._offered_nbytes -= len(some) * self._store.layout.object_nbytes
        return some

    def _call(self, op: int, keys: Keys, pages: U32 | None, deadline_s: float) -> Any:
        """See RemoteProcess.call."""
        if self._stopping:
            raise RemoteFailed("the tier is closing")
        answers = self._remote.call(op, keys, pages, deadline_s - time.monotonic())
        self._answered = True
        return answers

    def _fetch(self, work: _Work) -> None:
        self._remote.connect()
        if time.monotonic() >= work.deadline_s:
            self._count("late", len(work.keys))
            return
        keys = self._not_there(work.keys[:KEYS_MAX])
        may = [key.tobytes() not in self._failed for key in keys]
        keys = _prefix(keys, np.array(may, np.bool_))
        if not len(keys):
            return
        found = _prefix(keys, self._call(EXISTS, keys, None, work.deadline_s) == Answer.DONE)
        self._count("absent", len(keys) - len(found))
        budget = self._config.prefetch_nbytes // self._store.layout.object_nbytes
        self._count("over_budget", len(found[budget:]))
        found = found[:budget]
        tickets: list[tuple[PutTicket, int]] = []
        try:
            for number, start in enumerate(range(0, len(found), self._half)):
                while len(tickets) > 1:
                    self._landed(*tickets.pop(0))
                if time.monotonic() >= work.deadline_s:
                    self._count("late", len(found) - start)
                    break
                some = found[start : start + self._half]
                got, put = self._fetch_some(some, number % 2 * self._half, work.deadline_s)
                tickets += put
                if got < len(some):
                    break
        finally:
            for ticket, pages in tickets:
                self._landed(ticket, pages)

    def _fetch_some(
        self, keys: Keys, page: int, deadline_s: float
    ) -> tuple[int, list[tuple[PutTicket, int]]]:
        """Reads keys into staging pages; how many came from the first on, and their puts."""
        pages = np.arange(page, page + len(keys), dtype=np.uint32)
        answers = self._call(GET, keys, pages, deadline_s)
        wrong = np.isin(answers, (Answer.FAILED, Answer.CORRUPT))
        for name, answer in (
            ("absent", Answer.ABSENT),
            ("fetch_failed", Answer.FAILED),
            ("corrupt", Answer.CORRUPT),
        ):
            self._count(name, int(np.count_nonzero(answers == answer)))
        n = len(_prefix(keys, answers == Answer.DONE))
        puts = self._put(keys[:n], pages[:n])
        if wrong.any():
            # Late bytes of a failed read must not reach the next pages of the staging memory.
            for ticket, count in puts:
                self._landed(ticket, count)
            puts = []
            self._remote.kill()
            self._fail(keys[wrong])
        return n, puts

    def _put(self, keys: Keys, pages: U32) -> list[tuple[PutTicket, int]]:
        """Stores verified staging pages in the pool, one put per namespace and expiry."""
        heads = [self._staging.head(int(page)) for page in pages]
        now_64s = time.time() / EXPIRY_UNIT_S
        puts = []
        kind = [(tenant, expiry) for _, _, _, tenant, expiry, _ in heads]
        for (tenant, expiry), group in itertools.groupby(range(len(keys)), key=kind.__getitem__):
            if expiry and expiry <= now_64s:
                break
            rows = list(group)
            parents = as_keys([heads[row][1] for row in rows])
            depths = np.array([heads[row][2] for row in rows], np.uint32)
            request = PutRequest(
                keys[rows], parents, depths, pages[rows], self._staging.memory, tenant, expiry
            )
            puts.append((self._store.put_request(request), len(rows)))
        return puts

    def _landed(self, ticket: PutTicket, pages: int) -> None:
        """Waits until the pages of a put may be overwritten.  Raises DeviceTimeout."""
        if not ticket.wait_ended(2 * self._store.config.timeout_s):
            raise StagingInUse("the pool's medium does not answer; staging stays in use")
        landed = int(np.isin(ticket.outcome, (Outcome.STORED, Outcome.PRESENT)).sum())
        self._count("fetched", landed)
        self._count("not_landed", pages - landed)

    def _replicate(self, keys: Keys) -> None:
        known = (self._replicated, self._failed)
        keep = [i for i, key in enumerate(keys) if not any(key.tobytes() in k for k in known)]
        if not keep:
            return
        self._remote.connect()
        keys = np.unique(keys[keep], axis=0)
        deadline_s = time.monotonic() + self._config.timeout_s
        there = self._call(EXISTS, keys, None, deadline_s) == Answer.DONE
        self._replicated.add((key.tobytes() for key in keys[there]), _REPLICATED_S)
        infos = self._store.catalogue.objects(keys[~there])
        pages = np.arange(len(infos), dtype=np.uint32)
        keys = as_keys([info.key for info in infos])
        if not infos or not self._read(keys, pages):
            return
        for page, info in enumerate(infos):
            expiry = expiry_of(info.expires_s)
            self._staging.set_head(
                page, info.key, info.parent, info.depth, info.tenant, expiry, _VERSION
            )
        answers = self._call(PUT, keys, pages, time.monotonic() + self._config.timeout_s)
        done = answers == Answer.DONE
        self._replicated.add((key.tobytes() for key in keys[done]), _REPLICATED_S)
        self._count("replicated", int(np.count_nonzero(done)))
        if not done.all():
            self._count("replicate_failed", int(np.count_nonzero(~done)))
            self._fail(keys[~done])

    def _read(self, keys: Keys, pages: U32) -> bool:
        """Reads objects of the pool into staging pages; whether all were right."""
        timeout_s = 2 * self._store.config.timeout_s
        try:
            ticket = self._store.load(keys, pages, memory=self._staging)
        except KeyMissing:
            return False  # evicted meanwhile
        except PagesInUse as error:
            if not error.wait_settled(timeout_s):
                raise StagingInUse(str(error)) from error
            return False
        try:
            ticket.wait(timeout_s)
        except MediumError:
            return False
        finally:
            if not ticket.wait_settled(timeout_s):
                raise StagingInUse("the pool's medium does not answer; staging stays in use")
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


def _prefix(keys: Keys, good: npt.NDArray[np.bool_]) -> Keys:
    """Keys before the first that is not good."""
    wrong = np.flatnonzero(~good)
    return keys[: wrong[0]] if wrong.size else keys
