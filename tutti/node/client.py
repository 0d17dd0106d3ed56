"""A store whose index is the agent's: the interface of ObjectStore for any number of processes.

    with tutti.connect("/run/tutti.sock", layout=layout) as store:
        ...

The agent says where objects are; this process reads and writes them with its own engine on the
files that the agent handed out.  While the agent is away every look-up misses and nothing is
stored; the connection is tried again in the background.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from tutti.base.callbacks import check_not_called
from tutti.base.interrupts import uninterrupted
from tutti.base.process import Owned
from tutti.base.units import parse_nbytes
from tutti.errors import AgentLost, AgentRefused, DeviceTimeout, PoolClosed, TuttiError
from tutti.gio_uring.controller import NativeController
from tutti.gio_uring.engine import Engine
from tutti.gio_uring.iocb import PagedMemory
from tutti.interface import Keys, Store
from tutti.medium.keys import KEY_NBYTES, as_keys
from tutti.medium.layout import KVLayout
from tutti.memory.host_memory import HostMemory
from tutti.node.client_transfers import PLAN_S, ClientLoader, ClientState, ClientWriter
from tutti.node.connection import speeds_of
from tutti.node.kept_session import KeptSession
from tutti.node.messages import LISTED_MAX, VERSION, Hello, Match, Present, Unpin
from tutti.node.remote_catalogue import RemoteCatalogue, parts_of
from tutti.profiles.at_open import AUTO, OFF, ProfileChoice, find_schedule, is_off
from tutti.scheduler.dispatcher import Schedule
from tutti.transfers.core import Closable
from tutti.transfers.store_config import StoreConfig
from tutti.transfers.transfer_queue import TransferQueue

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
        profile: ProfileChoice | Schedule = AUTO,
    ) -> None:
        """See tutti.connect."""
        self._lookup_timeout_s = lookup_timeout_s
        self._memories: list[HostMemory] = []
        self._closed = self._ended = False
        self._missed = 0  # look-ups that the agent did not answer
        #: Number of parts, by name, of pins that need more than one.
        self._pin_parts: dict[str, int] = {}
        nbytes = 0 if capacity is None else parse_nbytes(capacity)
        self.catalogue = RemoteCatalogue(self.call)
        hello = Hello(VERSION, "" if layout is None else layout.to_json(), nbytes, pool)
        self._kept = KeptSession(path, hello, open_timeout_s, executor, self._memories)
        try:
            session = self._kept.need()
            self.layout, self.geometry = session.layout, session.geometry
            self._pool_stats, welcome = session.pool_stats, session.welcome
            schedule = profile if isinstance(profile, Schedule) else None
            if not isinstance(profile, Schedule) and not is_off(profile):
                speeds = speeds_of(path, open_timeout_s)
                schedule = find_schedule(profile, speeds, self.layout, executor=executor)
            self.config = StoreConfig(
                verify=welcome.verify,
                durability=welcome.durability,
                timeout_s=welcome.timeout_s,
                schedule=schedule,
            )
            self._state = state = ClientState(self.geometry, self.config)
            self._writer, loader = ClientWriter(self._kept, state), ClientLoader(self._kept, state)
            self._queue = TransferQueue(state, self._writer, loader, schedule)
        except BaseException:
            self._kept.close(open_timeout_s)
            raise
        self._parts: list[Closable] = [self._queue]

    @property
    def connected(self) -> bool:
        """Whether the agent answers."""
        session = self._kept.session
        return session is not None and not session.lost

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
        self._check_new(memory, self._memories)
        self._check_open()
        self._kept.register(memory)
        return memory

    @uninterrupted()
    def unregister(self, memory: HostMemory) -> None:
        timeout_s = self.config.timeout_s
        with self._state.withdrawn(memory.memory, timeout_s):
            self._chosen(memory, self._memories)
            if not (self._kept.wait_lost(timeout_s) and memory.wait_idle(timeout_s)):
                raise DeviceTimeout("transfers are still under way; the memory stays registered")
            self._kept.unregister(memory)

    def attach(self, part: Closable) -> None:
        self._check_open()
        self._parts.append(part)

    def match(self, keys: Keys, *, pin: bool | str = False, proven: bool = False) -> int:
        found = 0
        for message in self._look_ups(Match, keys, pin, proven):
            hits = self._ask(message)
            if hits is None:
                self._missed += 1
                break
            found += hits
            if hits * KEY_NBYTES < len(message.keys):
                break
        return found

    def present(
        self, keys: Keys, *, pin: bool | str = False, proven: bool = False
    ) -> npt.NDArray[np.bool_]:
        messages = self._look_ups(Present, keys, pin, proven)
        # The last parts are pinned first: they win if not all can be pinned.
        answers = [self._ask(message) for message in reversed(messages)][::-1]
        self._missed += None in answers
        absent = (bytes(len(message.keys) // KEY_NBYTES) for message in messages)
        there = (a if b is None else b for a, b in zip(absent, answers, strict=True))
        return np.frombuffer(bytearray().join(there), np.bool_)

    def unpin(self, name: str | None = None) -> None:
        """See ObjectStore; pins of other processes stay."""
        if name is None:
            self._pin_parts.clear()
            self._ask(Unpin())
            return
        for part in range(self._pin_parts.pop(name, 1)):
            self._ask(Unpin(_pin(name, part)))

    def _look_ups(
        self, kind: type[_LookUp], keys: Keys, pin: bool | str, proven: bool
    ) -> list[_LookUp]:
        """Splits a look-up into messages; each part has a pin of its own."""
        array = as_keys(keys)
        parts = max(1, -(-len(array) // LISTED_MAX))
        if isinstance(pin, str):  # a new look-up under a name replaces its pins
            for part in range(1, self._pin_parts.pop(pin, 1)):
                self._ask(Unpin(_pin(pin, part)))
            if parts > 1:
                self._pin_parts[pin] = parts
        starts = range(0, parts * LISTED_MAX, LISTED_MAX)
        return [
            kind(array[start : start + LISTED_MAX].tobytes(), _pin(pin, part), proven)
            for part, start in enumerate(starts)
        ]

    def _ask(self, message: Match | Present | Unpin) -> Any:
        """The answer's value; None while the agent is away."""
        self._check_open()
        session = self._kept.session
        if session is not None:
            with contextlib.suppress(AgentLost, AgentRefused):
                return session.request(message, self._lookup_timeout_s).value
        return None

    def prove(self, max_objects: int = 64, *, timeout_s: float = 60.0) -> int:
        """Returns 0: the agent verifies for all of its clients."""
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
            some_s = min(left_s, self.config.timeout_s)  # the agent's limit of one call
            with contextlib.suppress(DeviceTimeout):
                self.call("wait_recovered", some_s + PLAN_S, seconds=some_s)
                return
            left_s = deadline_s - time.monotonic()
        raise DeviceTimeout(
            f"recovery or a clear is not done after {timeout_s:g} s; look-ups miss until it is"
        )

    def stats(self) -> dict[str, Any]:
        """See ObjectStore: those of the pool, of all clients; and this client's connection.

        While ``connected`` is 0, the pool's statistics are those of the agent's last answer.
        """
        mine: dict[str, Any] = {
            "connected": 0,
            "reconnects": self._kept.reconnects,
            "missed_calls": self._missed,
            "lost_pages": self._writer.lost_pages,
            "dropped": self._state.counters.dropped,
            "profile": OFF if self.config.schedule is None else self.config.schedule.source,
            "scheduler": {} if self.scheduler is None else self.scheduler.counters(),
        }
        for memory in self._memories:
            mine |= memory.stats()
        if (session := self._kept.session) is not None:
            mine["request_nbytes_max"] = session.controller.request_nbytes_max
        with contextlib.suppress(AgentLost, AgentRefused):
            self._pool_stats = self.call("stats", self._lookup_timeout_s)
            mine["connected"] = 1
        mine["dropped"] += self._pool_stats["dropped"]
        return {**self._pool_stats, **mine}

    @uninterrupted()
    def call(self, name: str, timeout_s: float | None = None, **arguments: Any) -> Any:
        """An operation of the agent by name.  Raises AgentLost, and what the operation raises."""
        self._check_open()
        timeout_s = self._state.plan_timeout_s if timeout_s is None else timeout_s
        return self._kept.need().call(name, timeout_s, **arguments)

    @uninterrupted()
    def close(self, timeout_s: float | None = None) -> None:
        """Waits for this client's transfers, and disconnects.  The pool stays open in the agent.
        Raises DeviceTimeout; another call then continues.
        """
        if self._ended:
            return
        check_not_called()
        self._closed = True
        timeout_s = self.config.timeout_s if timeout_s is None else timeout_s
        self._queue.stop(timeout_s)
        self._kept.close(timeout_s)
        while self._parts:  # bounded by their number
            self._parts[0].close()
            del self._parts[0]
        self._ended = True

    def _check_open(self) -> None:
        if self._closed:
            raise PoolClosed("the pool is closed; open it again")

    def _watch_expiry(self) -> None:
        """Does nothing: the agent watches expiry."""

    def _memory(self, memory: HostMemory | None) -> PagedMemory:
        self._check_open()
        return self._chosen(memory, self._memories).memory


def _pin(pin: bool | str, part: int) -> str:
    """The pin as in messages: its part and name, which may be any (SGLang's users choose the ids of
    requests); "" for no pin, "*" for a pin without a name.
    """
    if isinstance(pin, str):
        return f"{part}={pin}"
    return "*" if pin else ""
