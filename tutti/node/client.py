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
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from tutti.arrays import U32
from tutti.errors import (
    AgentLost,
    AgentRefused,
    ConfigError,
    DeviceTimeout,
    KeyMissing,
    PagesInUse,
    PoolClosed,
    PoolMismatch,
    TuttiError,
)
from tutti.gio_uring.engine import Engine
from tutti.gio_uring.iocb import PagedMemory
from tutti.medium.geometry import Geometry
from tutti.medium.keys import as_keys
from tutti.medium.layout import KVLayout
from tutti.memory.host_memory import HostMemory
from tutti.node.kept_session import KeptSession
from tutti.node.messages import (
    Job,
    Match,
    PlanLoad,
    PlanPut,
    Present,
    Unpin,
    Written,
    statuses_of,
)
from tutti.node.remote_catalogue import RemoteCatalogue
from tutti.node.session import AgentSession
from tutti.transfers.core import Closable, StoreConfig
from tutti.transfers.tickets import LoadPart, LoadTicket, Outcome, PutTicket
from tutti.transfers.writer import PutRequest
from tutti.units import parse_nbytes

Keys = npt.NDArray[np.uint8] | Sequence[bytes]

#: What a plan may take beyond the store's own time-out for space and records.
_PLAN_S = 5.0


class NodeStore:
    """A pool of the node's agent.  Thread-safe; use it as a context manager or call ``close``.

    Every method does what ObjectStore's does.  What differs: while the agent is away ``match``
    answers 0, ``put`` drops, ``load`` raises KeyMissing, and operations that need an answer raise
    AgentLost.
    """

    def __init__(
        self,
        path: str,
        layout: KVLayout | None = None,
        capacity: int | str | None = None,
        *,
        lookup_timeout_s: float = 1.0,
        open_timeout_s: float = 30.0,
        executor: str = "auto",
    ) -> None:
        """Connects.  Raises AgentLost when no agent answers, and what opening a pool raises."""
        self._lookup_timeout_s = lookup_timeout_s
        self._memories: list[HostMemory] = []
        self._parts: list[Closable] = []
        self._closed = False
        self._missed = 0
        nbytes = 0 if capacity is None else parse_nbytes(capacity)
        self.catalogue = RemoteCatalogue(self.call)
        self._kept = KeptSession(path, layout, nbytes, open_timeout_s, executor, self._memories)
        session = self._kept.need()
        self.layout = session.layout
        self.geometry: Geometry = session.geometry
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
        """What launches puts and loads: nothing, all go at once."""
        return

    @property
    def engine(self) -> Engine:
        """What moves the pages of this process.  Raises AgentLost."""
        return self._kept.need().engine

    @property
    def controller(self) -> Any:
        """What executes the engine's commands.  Raises AgentLost."""
        return self._kept.need().controller

    @property
    def recovered(self) -> bool:
        """See ObjectStore."""
        try:
            self.wait_recovered(0.0)
        except TuttiError:
            return False
        return True

    def register(self, memory: HostMemory) -> HostMemory:
        """See ObjectStore; after a reconnection the memory is registered again."""
        if memory.layout != self.layout:
            raise PoolMismatch(
                f"the memory holds {memory.layout.to_json()}, the pool {self.layout.to_json()}; "
                "open a pool of the memory's layout"
            )
        self._check_open()
        self._kept.register(memory)
        return memory

    def unregister(self, memory: HostMemory) -> None:
        """See ObjectStore."""
        if memory not in self._memories:
            raise ConfigError("this memory is not registered with the store")
        timeout_s = self.config.timeout_s
        if not (self._kept.wait_quiet(timeout_s) and memory.wait_idle(timeout_s)):
            raise DeviceTimeout("transfers are still under way; the memory stays registered")
        self._kept.unregister(memory)

    def allocate_memory(
        self, pages: int, *, order: str | None = None, hugepages: bool = True
    ) -> HostMemory:
        """See ObjectStore."""
        return self.register(
            HostMemory.allocate(self.layout, pages, order=order, hugepages=hugepages)
        )

    def attach(self, part: Closable) -> None:
        """See ObjectStore."""
        self._check_open()
        self._parts.append(part)

    def match(self, keys: Keys, *, pin: bool | str = False, proven: bool = False) -> int:
        """See ObjectStore."""
        array = as_keys(keys)
        answer = self._look_up(Match(array.tobytes(), _pin(pin), proven))
        return 0 if answer is None else int(answer)

    def present(
        self, keys: Keys, *, pin: bool | str = False, proven: bool = False
    ) -> npt.NDArray[np.bool_]:
        """See ObjectStore."""
        array = as_keys(keys)
        answer = self._look_up(Present(array.tobytes(), _pin(pin), proven))
        if answer is None:
            return np.zeros(len(array), np.bool_)
        return np.frombuffer(answer, np.bool_).copy()

    def unpin(self, name: str | None = None) -> None:
        """See ObjectStore; pins of other processes stay."""
        self._look_up(Unpin(name or ""))

    def _look_up(self, message: Match | Present | Unpin) -> Any:
        """The answer's value; None while the agent is away."""
        self._check_open()
        session = self._kept.session
        if session is not None:
            with contextlib.suppress(AgentLost, AgentRefused):
                return session.request(message, self._lookup_timeout_s).value
        self._missed += 1
        return None

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
        paged = self._registered(memory).memory
        request = PutRequest.checked(keys, pages, paged, parent, depth, ttl_s, namespace)
        n = len(request.keys)
        ticket = PutTicket(n)
        try:
            session = self._kept.session
            step = n if session is None else session.welcome.batch_pages
            for start in range(0, n, max(1, step)):
                rows = np.arange(start, min(n, start + step))
                part = request.take(rows)
                if session is None or not self._put_part(
                    session, ticket, rows, part, ttl_s, namespace
                ):
                    ticket.outcome[start:] = Outcome.DROPPED
                    break
        finally:
            ticket.end_part()
        return ticket

    def _put_part(
        self,
        session: AgentSession,
        ticket: PutTicket,
        rows: npt.NDArray[Any],
        part: PutRequest,
        ttl_s: float | None,
        namespace: str,
    ) -> bool:
        """Puts the keys of one plan; False when the agent is away."""
        parent, depth = part.parents[0].tobytes(), int(part.depths[0])
        message = PlanPut(part.keys.tobytes(), parent, depth, ttl_s, namespace)
        try:
            plan = session.plan(message, self._plan_timeout_s())
        except (AgentLost, AgentRefused):
            return False
        if not plan.jobs:
            _fill(ticket, rows, Written(plan.number, plan.outcome, plan.status))
            return True
        ticket.add_part()

        def over(written: Written | None) -> None:
            _fill(ticket, rows, written)
            ticket.end_part()

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
        return True

    def load(
        self,
        keys: Keys,
        pages: npt.ArrayLike,
        *,
        memory: HostMemory | None = None,
        batch: str = "",
    ) -> LoadTicket:
        """See ObjectStore; raises KeyMissing while the agent is away."""
        array, paged = as_keys(keys), self._registered(memory).memory
        numbers = paged.check_pages(pages)
        if len(array) != numbers.size:
            raise ConfigError(f"{len(array)} keys and {numbers.size} pages; give one page per key")
        if self.config.verify != "off" and np.unique(numbers).size != numbers.size:
            raise ConfigError("a page is named twice; give every key a page of its own")
        session = self._kept.session
        if session is None:
            raise KeyMissing("the agent is away, so no key can be found; compute the pages")
        ticket = LoadTicket(len(array), self.geometry.layers)
        parts = self._plan_load(session, array, ticket)
        load = _Load(ticket, sum(len(jobs) for _, jobs in parts))
        try:
            for start, jobs in parts:
                while jobs:  # bounded: each turn takes one
                    self._read(session, load, start, jobs.pop(0), numbers, paged)
        except BaseException:
            for _, jobs in parts:
                session.give_up(jobs)
                load.skip(len(jobs))
            self._abandon(ticket)
            raise
        finally:
            load.end()
        return ticket

    def _plan_load(
        self, session: AgentSession, keys: npt.NDArray[np.uint8], ticket: LoadTicket
    ) -> list[tuple[int, list[Job]]]:
        """All plans of a load, by their first row, before anything is read."""
        parts: list[tuple[int, list[Job]]] = []
        step = session.welcome.batch_pages
        try:
            for start in range(0, len(keys), step):
                some = keys[start : start + step]
                plan = session.plan(PlanLoad(some.tobytes()), self._plan_timeout_s())
                parts.append((start, list(plan.jobs)))
                status = statuses_of(plan.status, len(some))
                ticket.record_status[start : start + len(some)] = status
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
        job: Job,
        pages: U32,
        memory: PagedMemory,
    ) -> None:
        rows = np.frombuffer(job.rows, "<u4").astype(np.int64) + start
        try:
            transfer = session.read(
                job, pages[start:], memory, self.config.timeout_s, lambda _: load.end()
            )
        except BaseException:
            load.end()
            raise
        load.ticket.parts.append(LoadPart(transfer, rows, job.whole))

    def _abandon(self, ticket: LoadTicket) -> None:
        for part in ticket.parts:
            part.job.cancel()
        for part in ticket.parts:
            if not part.job.wait_released(self.config.timeout_s):
                raise PagesInUse(
                    "a load was abandoned but the device still owns its pages; do not reuse them "
                    "before it is done or the pool is closed",
                    ticket.wait_settled,
                )

    def prove(self, max_objects: int = 64, *, timeout_s: float = 60.0) -> int:
        """Nothing is left to do here: the agent verifies for all of its clients."""
        self._check_open()
        return 0

    def quarantine(self, keys: Keys) -> int:
        """See ObjectStore."""
        return int(self.call("quarantine", keys=as_keys(keys).tobytes()))

    def clear(self, *, deallocate: bool = True) -> None:
        """See ObjectStore; for all clients."""
        self.call("clear", timeout_s=8 * self.config.timeout_s, deallocate=deallocate)

    def wait_recovered(self, timeout_s: float = 600.0) -> None:
        """See ObjectStore."""
        self.call("wait_recovered", timeout_s=timeout_s + _PLAN_S, seconds=timeout_s)

    def stats(self) -> dict[str, Any]:
        """See ObjectStore: the pool's, of all clients; and how this one is connected."""
        mine = {
            "connected": int(self.connected),
            "reconnects": self._kept.reconnects,
            "missed_calls": self._missed,
        }
        with contextlib.suppress(AgentLost, AgentRefused):
            return {**self.call("stats", self._lookup_timeout_s), **mine}
        return mine

    def call(self, name: str, timeout_s: float | None = None, **arguments: Any) -> Any:
        """An operation of the agent by name.  Raises AgentLost, and what the operation raises."""
        self._check_open()
        timeout_s = self._plan_timeout_s() if timeout_s is None else timeout_s
        return self._kept.need().call(name, timeout_s, **arguments)

    def close(self, timeout_s: float | None = None) -> None:
        """Ends what is under way here.  The pool stays open in the agent.  Raises DeviceTimeout."""
        if self._closed:
            return
        self._closed = True
        self._kept.close(self.config.timeout_s if timeout_s is None else timeout_s)
        for part in self._parts:
            part.close()

    def __enter__(self) -> NodeStore:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _plan_timeout_s(self) -> float:
        return 2 * self.config.timeout_s + _PLAN_S

    def _check_open(self) -> None:
        if self._closed:
            raise PoolClosed("the pool is closed; open it again")

    def _registered(self, memory: HostMemory | None) -> HostMemory:
        self._check_open()
        if memory is not None:
            if memory not in self._memories:
                raise ConfigError(
                    "this memory is not registered; call store.register(memory) first"
                )
            return memory
        if len(self._memories) != 1:
            raise ConfigError(
                f"{len(self._memories)} memories are registered; register one, or pass memory="
            )
        return self._memories[0]


class _Load:
    """Counts the jobs of one load and settles its ticket after the last."""

    def __init__(self, ticket: LoadTicket, jobs: int) -> None:
        self.ticket = ticket
        self._left = jobs + 1  # the submission itself
        self._lock = threading.Lock()

    def skip(self, jobs: int) -> None:
        """These will not be submitted."""
        for _ in range(jobs):
            self.end()

    def end(self) -> None:
        """A job was released."""
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            self.ticket.settle()


def _fill(ticket: PutTicket, rows: npt.NDArray[Any], written: Written | None) -> None:
    """What became of some keys; without an answer they may or may not have been stored."""
    if written is None:
        ticket.outcome[rows] = Outcome.DROPPED
        return
    ticket.outcome[rows] = np.frombuffer(written.outcome, np.uint8)
    ticket.status[rows] = statuses_of(written.status, rows.size)


def _pin(pin: bool | str) -> str:
    if isinstance(pin, str):
        return pin
    return "*" if pin else ""


def connect(
    path: str,
    layout: KVLayout | None = None,
    capacity: int | str | None = None,
    *,
    lookup_timeout_s: float = 1.0,
    executor: str = "auto",
) -> NodeStore:
    """Connects to the node's agent (`tutti serve`), whose pools all processes share.

    path: the agent's socket, with or without "unix:".  layout: of the pool; left out, the agent's
    only one.  capacity: of a pool that the agent is to make when it has none of this layout.
    lookup_timeout_s: after which a look-up misses and the agent counts as lost.
    Raises AgentLost when no agent answers, AgentRefused, PoolNotFound, PoolMismatch and others.
    """
    return NodeStore(
        path.removeprefix("unix:"),
        layout,
        capacity,
        lookup_timeout_s=lookup_timeout_s,
        executor=executor,
    )
