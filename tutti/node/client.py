"""A store whose index is the agent's: the interface of ObjectStore for any number of processes.

    with tutti.connect("/run/tutti.sock", layout=layout) as store:
        ...

The agent says where objects are; this process reads and writes them with its own engine on the
files that the agent handed out.  While the agent is away every look-up misses and nothing is
stored; the connection is tried again in the background.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from tutti.base.arrays import U32
from tutti.base.callbacks import check_not_called
from tutti.base.interrupts import uninterrupted
from tutti.base.process import Owned
from tutti.base.units import parse_nbytes
from tutti.errors import (
    AgentLost,
    AgentRefused,
    ConfigError,
    DeviceTimeout,
    KeyMissing,
    PoolClosed,
    TuttiError,
)
from tutti.gio_uring.controller import NativeController
from tutti.gio_uring.engine import Engine
from tutti.gio_uring.iocb import PagedMemory
from tutti.interface import Keys, Store
from tutti.medium.keys import KEY_NBYTES, as_keys
from tutti.medium.layout import KVLayout
from tutti.memory.host_memory import HostMemory
from tutti.node.agent_session import AgentSession
from tutti.node.kept_session import KeptSession
from tutti.node.messages import (
    LISTED_MAX,
    VERSION,
    Hello,
    Match,
    MoveJob,
    PlanLoad,
    PlanPut,
    Present,
    Unpin,
    Written,
    statuses_of,
)
from tutti.node.remote_catalogue import RemoteCatalogue, parts_of
from tutti.transfers.core import Closable
from tutti.transfers.put_request import PutRequest, checked_pages
from tutti.transfers.store_config import StoreConfig
from tutti.transfers.tickets import (
    LoadPart,
    LoadProgress,
    LoadTicket,
    Outcome,
    PutProgress,
    PutTicket,
)

#: What a plan may take beyond the store's own time-out for space and records.
_PLAN_S = 5.0
_UNDO_S = 60.0  # the longest wait for an interrupted put or load

_LookUp = TypeVar("_LookUp", Match, Present)


class NodeStore(Owned, Store):
    """A pool of the node's agent, which any number of processes share.

    While the agent is away ``match`` returns 0, ``put`` drops, ``load`` raises KeyMissing, and
    operations that need an answer raise AgentLost.
    """

    @uninterrupted(lambda store, _: store.close())
    def __init__(
        self,
        path: str,
        layout: KVLayout | None = None,
        capacity: int | str | None = None,
        *,
        pool: str = "",
        lookup_timeout_s: float = 1.0,
        open_timeout_s: float = 30.0,
        executor: str = "auto",
    ) -> None:
        """Connects.  Raises AgentLost when no agent answers, and what opening a pool raises."""
        self._lookup_timeout_s = lookup_timeout_s
        self._memories: list[HostMemory] = []
        self._parts: list[Closable] = []
        self._closed = self._ended = False
        self._missed = 0
        #: Of pins by a name that are in several parts, how many.
        self._pin_parts: dict[str, int] = {}
        nbytes = 0 if capacity is None else parse_nbytes(capacity)
        self.catalogue = RemoteCatalogue(self.call)
        hello = Hello(VERSION, "" if layout is None else layout.to_json(), nbytes, pool)
        self._kept = KeptSession(path, hello, open_timeout_s, executor, self._memories)
        session = self._kept.need()
        self.layout = session.layout
        self.geometry = session.geometry
        welcome = session.welcome
        self.config = StoreConfig(
            verify=welcome.verify, durability=welcome.durability, timeout_s=welcome.timeout_s
        )

    @property
    def connected(self) -> bool:
        """Whether the agent answers."""
        session = self._kept.session
        return session is not None and not session.lost

    @property
    def scheduler(self) -> None:
        return None

    @property
    def engine(self) -> Engine:
        return self._kept.need().engine

    @property
    def controller(self) -> NativeController:
        return self._kept.need().controller

    @property
    def recovered(self) -> bool:
        try:
            self.wait_recovered(0.0)
        except TuttiError:
            return False
        return True

    @uninterrupted(lambda store, memory: store.unregister(memory))
    def register(self, memory: HostMemory) -> HostMemory:
        self._check_layout(memory)
        self._check_open()
        self._kept.register(memory)
        return memory

    @uninterrupted()
    def unregister(self, memory: HostMemory) -> None:
        if not any(memory is known for known in self._memories):
            raise ConfigError("this memory is not registered with the store")
        timeout_s = self.config.timeout_s
        if not (self._kept.wait_quiet(timeout_s) and memory.wait_idle(timeout_s)):
            raise DeviceTimeout("transfers are still under way; the memory stays registered")
        self._kept.unregister(memory)

    def attach(self, part: Closable) -> None:
        self._check_open()
        self._parts.append(part)

    def match(self, keys: Keys, *, pin: bool | str = False, proven: bool = False) -> int:
        found = 0
        for message in self._look_ups(Match, keys, pin, proven):
            hits = int(self._look_up(message) or 0)
            found += hits
            if hits * KEY_NBYTES < len(message.keys):
                break
        return found

    def present(
        self, keys: Keys, *, pin: bool | str = False, proven: bool = False
    ) -> npt.NDArray[np.bool_]:
        there: list[npt.NDArray[np.bool_]] = []
        # Where not all can be pinned, the last ones are.
        for message in reversed(self._look_ups(Present, keys, pin, proven)):
            answer = self._look_up(message)
            absent = bytes(len(message.keys) // KEY_NBYTES)
            there.append(np.frombuffer(absent if answer is None else answer, np.bool_))
        return np.concatenate(there[::-1])

    def unpin(self, name: str | None = None) -> None:
        """See ObjectStore; pins of other processes stay."""
        if not name:
            self._pin_parts.clear()
        for part in range(self._pin_parts.pop(name or "", 1)):
            self._look_up(Unpin(_pin(name or "", part)))

    def _look_ups(
        self, kind: type[_LookUp], keys: Keys, pin: bool | str, proven: bool
    ) -> list[_LookUp]:
        """A look-up in as many parts as it needs messages, each of which has a pin of its own."""
        array = as_keys(keys)
        parts = max(1, -(-len(array) // LISTED_MAX))
        if isinstance(pin, str):  # its next look-up ends what it has pinned
            for part in range(1, self._pin_parts.pop(pin, 1)):
                self._look_up(Unpin(_pin(pin, part)))
            if parts > 1:
                self._pin_parts[pin] = parts
        starts = range(0, parts * LISTED_MAX, LISTED_MAX)
        return [
            kind(array[start : start + LISTED_MAX].tobytes(), _pin(pin, part), proven)
            for part, start in enumerate(starts)
        ]

    def _look_up(self, message: Match | Present | Unpin) -> Any:
        """The answer's value; None while the agent is away."""
        self._check_open()
        session = self._kept.session
        if session is not None:
            with contextlib.suppress(AgentLost, AgentRefused):
                return session.request(message, self._lookup_timeout_s).value
        self._missed += 1
        return None

    @uninterrupted(lambda _, ticket: ticket.wait_ended(_UNDO_S))
    def put(
        self,
        keys: Keys,
        pages: npt.ArrayLike,
        *,
        memory: HostMemory | None = None,
        parent: bytes | None = None,
        depth: int = 0,
        ttl_s: float | None = None,
        namespace: str = "",
    ) -> PutTicket:
        """See ObjectStore; all is dropped while the agent is away."""
        paged = self._memory(memory)
        request = PutRequest.checked(keys, pages, paged, parent, depth, ttl_s, namespace)
        n = len(request.keys)
        progress = PutProgress(n)
        try:
            session = self._kept.session
            step = n if session is None else session.welcome.batch_pages
            for start in range(0, n, max(1, step)):
                rows = np.arange(start, min(n, start + step))
                part = request.take(rows)
                try:
                    goes_on = self._put_part(session, progress, rows, part, ttl_s, namespace)
                except Exception as error:
                    if not start:
                        raise
                    progress.refuse(np.arange(start, n), error)  # others are under way
                    break
                if not goes_on:
                    progress.outcome[start + rows.size :] = Outcome.DROPPED
                    break
        finally:
            progress.end_part()
        return PutTicket(progress)

    def _put_part(
        self,
        session: AgentSession | None,
        progress: PutProgress,
        rows: npt.NDArray[Any],
        part: PutRequest,
        ttl_s: float | None,
        namespace: str,
    ) -> bool:
        """Puts the keys of one plan; False when the agent is away or has dropped some of them."""
        parent, depth = part.parents[0].tobytes(), int(part.depths[0])
        message = PlanPut(part.keys.tobytes(), parent, depth, ttl_s, namespace)
        plan = None
        with contextlib.suppress(AgentLost, AgentRefused):
            plan = None if session is None else session.plan(message, self._plan_timeout_s())
        if session is None or plan is None:
            _fill(progress, rows, None)
            return False
        goes_on = Outcome.DROPPED not in plan.outcome
        if not plan.jobs:
            _fill(progress, rows, Written(plan.number, plan.outcome, plan.status))
            return goes_on
        progress.add_part()

        def over(written: Written | None) -> None:
            _fill(progress, rows, written)
            progress.end_part()

        session.await_written(plan.number, over)
        jobs = list(plan.jobs)
        while jobs:  # bounded: each turn takes one
            job = jobs.pop(0)
            try:
                session.write(job, part.pages, part.memory, self.config.timeout_s)
            except BaseException as error:
                session.give_up(jobs)  # the outcome comes from the agent, for all of them
                if not isinstance(error, TuttiError):
                    raise
                break
        return goes_on

    @uninterrupted(lambda _, ticket: ticket.cancel(_UNDO_S))
    def load(
        self,
        keys: Keys,
        pages: npt.ArrayLike,
        *,
        memory: HostMemory | None = None,
        batch: str = "",
        ahead: bool = False,
    ) -> LoadTicket:
        """See ObjectStore; raises KeyMissing while the agent is away."""
        array, paged = as_keys(keys), self._memory(memory)
        numbers = checked_pages(array, pages, paged, once=self.config.verify != "off")
        session = self._kept.session
        if session is None:
            raise KeyMissing("the agent is away, so no key can be found; compute the pages")
        progress = LoadProgress(len(array), self.geometry.layers)
        parts = self._plan_load(session, array, progress)
        load = _Load(progress, sum(len(jobs) for _, jobs in parts), ahead=ahead)
        try:
            for start, jobs in parts:
                while jobs:  # bounded: each turn takes one
                    self._read(session, load, start, jobs.pop(0), numbers, paged)
        except BaseException as error:
            for _, jobs in parts:
                session.give_up(jobs)
                for _ in jobs:
                    load.end()
            progress.cancel(self.config.timeout_s)
            if isinstance(error, AgentRefused):
                raise KeyMissing(f"{error}; compute the pages") from error
            raise
        finally:
            load.end()
        return LoadTicket(progress)

    def _plan_load(
        self, session: AgentSession, keys: npt.NDArray[np.uint8], progress: LoadProgress
    ) -> list[tuple[int, list[MoveJob]]]:
        """All plans of a load, by their first row, before anything is read."""
        parts: list[tuple[int, list[MoveJob]]] = []
        step = session.welcome.batch_pages
        try:
            for start in range(0, len(keys), step):
                some = keys[start : start + step]
                plan = session.plan(PlanLoad(some.tobytes()), self._plan_timeout_s())
                parts.append((start, list(plan.jobs)))
                status = statuses_of(plan.status, len(some))
                progress.record_status[start : start + len(some)] = status
        except BaseException as error:
            for _, jobs in parts:
                session.give_up(jobs)
            if isinstance(error, AgentLost | AgentRefused):
                raise KeyMissing(f"{error}; compute the pages") from error
            raise
        return parts

    def _read(
        self,
        session: AgentSession,
        load: _Load,
        start: int,
        job: MoveJob,
        pages: U32,
        memory: PagedMemory,
    ) -> None:
        try:
            transfer, rows = session.read(
                *(job, pages[start:], memory, self.config.timeout_s, lambda _: load.end()),
                ahead=load.ahead,
            )
        except BaseException:
            load.end()
            raise
        load.progress.parts.append(LoadPart(transfer, rows + start, job.whole))

    def prove(self, max_objects: int = 64, *, timeout_s: float = 60.0) -> int:
        """Nothing is left to do here: the agent verifies for all of its clients."""
        self._check_open()
        return 0

    def quarantine(self, keys: Keys) -> int:
        parts = parts_of(as_keys(keys), LISTED_MAX)
        return sum(int(self.call("quarantine", keys=some)) for some in parts)

    def clear(self, *, deallocate: bool = True) -> None:
        """See ObjectStore; for all clients."""
        self.call("clear", timeout_s=8 * self.config.timeout_s, deallocate=deallocate)

    def wait_recovered(self, timeout_s: float = 600.0) -> None:
        deadline_s = time.monotonic() + timeout_s
        left_s = timeout_s
        while left_s >= 0:  # bounded by the deadline
            some_s = min(left_s, self.config.timeout_s)  # the agent waits no longer in one call
            with contextlib.suppress(DeviceTimeout):
                self.call("wait_recovered", some_s + _PLAN_S, seconds=some_s)
                return
            left_s = deadline_s - time.monotonic()
        raise DeviceTimeout(
            f"recovery is not done after {timeout_s:g} s; look-ups miss until it is"
        )

    def stats(self) -> dict[str, Any]:
        """See ObjectStore: the pool's, of all clients; and how this one is connected."""
        mine = {
            "connected": int(self.connected),
            "reconnects": self._kept.reconnects,
            "missed_calls": self._missed,
        }
        if (session := self._kept.session) is not None:
            mine["request_nbytes_max"] = session.controller.request_nbytes_max
        with contextlib.suppress(AgentLost, AgentRefused):
            return {**self.call("stats", self._lookup_timeout_s), **mine}
        return mine

    @uninterrupted()
    def call(self, name: str, timeout_s: float | None = None, **arguments: Any) -> Any:
        """An operation of the agent by name.  Raises AgentLost, and what the operation raises."""
        self._check_open()
        timeout_s = self._plan_timeout_s() if timeout_s is None else timeout_s
        return self._kept.need().call(name, timeout_s, **arguments)

    @uninterrupted()
    def close(self, timeout_s: float | None = None) -> None:
        """Ends what is under way here.  The pool stays open in the agent.  Raises DeviceTimeout; a
        call after that goes on from there.
        """
        if self._ended:
            return
        check_not_called()
        self._closed = True
        self._kept.close(self.config.timeout_s if timeout_s is None else timeout_s)
        while self._parts:  # bounded by their number
            self._parts[0].close()
            del self._parts[0]
        self._ended = True

    def _plan_timeout_s(self) -> float:
        return 2 * self.config.timeout_s + _PLAN_S

    def _check_open(self) -> None:
        if self._closed:
            raise PoolClosed("the pool is closed; open it again")

    def _memory(self, memory: HostMemory | None) -> PagedMemory:
        self._check_open()
        return self._chosen(memory, self._memories).memory


class _Load:
    """Counts the jobs of one load and settles its progress after the last."""

    def __init__(self, progress: LoadProgress, jobs: int, *, ahead: bool) -> None:
        self.progress = progress
        self.ahead = ahead
        self._left = jobs + 1  # the submission itself
        self._lock = threading.Lock()

    def end(self) -> None:
        """A job was released."""
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            self.progress.settle()


def _fill(progress: PutProgress, rows: npt.NDArray[Any], written: Written | None) -> None:
    """What became of some keys; without an answer they may or may not have been stored."""
    if written is None:
        progress.outcome[rows] = Outcome.DROPPED
        return
    progress.outcome[rows] = np.frombuffer(written.outcome, np.uint8)
    progress.status[rows] = statuses_of(written.status, rows.size)


def _pin(pin: bool | str, part: int) -> str:
    """The name of a pin in a message: "" for none, "*" for one without a name."""
    if isinstance(pin, str):
        return f"{pin}\0{part}" if part and pin not in ("", "*") else pin
    return "*" if pin else ""
