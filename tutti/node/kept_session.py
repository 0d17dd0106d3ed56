"""A session with the agent that is opened again whenever the agent was lost."""

from __future__ import annotations

import contextlib
import itertools
import logging
import random
import threading
import time

from tutti.base.threads import start_thread
from tutti.errors import AgentLost, ConfigError, PoolClosed, PoolMismatch, TuttiError
from tutti.memory.host_memory import HostMemory
from tutti.node.agent_session import AgentSession
from tutti.node.messages import VERSION, Hello

_log = logging.getLogger(__name__)

_RETRY_FIRST_S = 0.05
_RETRY_MAX_S = 2.0


class KeptSession:
    """The current session, or None while the agent is away.  Thread-safe.

    memories: registered with every session; the list is shared with the store.  session: may end
    at any moment; its calls raise AgentLost then.  reconnects: number since the first session.
    Raises what AgentSession raises.
    """

    def __init__(
        self,
        path: str,
        hello: Hello,
        open_timeout_s: float,
        executor: str,
        memories: list[HostMemory],
    ) -> None:
        self._path = path
        self._hello = hello
        self._open_timeout_s = open_timeout_s
        self._executor = executor
        self._memories = memories
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._retired: list[AgentSession] = []
        self._closed, self.reconnects = False, 0
        first = self._open()
        self.session: AgentSession | None = first
        self._layout, self._geometry = first.layout, first.geometry
        if first.layout.fingerprint.hex() in first.welcome.files[0]:  # it is named after its layout
            self._hello = Hello(VERSION, first.welcome.layout, hello.capacity)
        self._timeout_s = first.welcome.timeout_s
        self._keeper = threading.Thread(target=self._keep, daemon=True)
        start_thread(self._keeper, "tutti-reconnect", lambda: first.close(self._timeout_s))

    def need(self) -> AgentSession:
        """The session.  Raises AgentLost while the agent is away."""
        session = self.session
        if session is None:
            raise AgentLost(f"the agent at {self._path} is not reachable; reconnecting")
        return session

    def register(self, memory: HostMemory) -> None:
        """Makes memory known to the session with the agent, and to all later ones."""
        with self._lock:
            if self.session is not None:
                self.session.register(memory)
            else:
                _check_apart([*self._memories, memory])
            self._memories.append(memory)

    def unregister(self, memory: HostMemory) -> None:
        """Unregisters memory; no transfer may use it."""
        with self._lock:
            self._memories.remove(memory)
            if self.session is not None:
                self.session.unregister(memory)  # a lost session unregisters when it closes

    def wait_lost(self, timeout_s: float) -> bool:
        """Waits until the transfers of lost sessions have ended; their puts have failed already."""
        deadline_s = time.monotonic() + timeout_s
        return all(
            each.wait_quiet(max(0.0, deadline_s - time.monotonic()))
            for each in self._sessions()
            if each.lost
        )

    def close(self, timeout_s: float) -> None:
        """Waits for transfers, and closes the session.  Raises DeviceTimeout; another call then
        continues.
        """
        with self._lock:
            self._closed = True
            self._changed.notify_all()
        self._keeper.join(timeout_s + self._open_timeout_s)
        session = self.session
        if session is not None:
            session.wait_quiet(timeout_s)
        errors: list[TuttiError] = []
        for each in self._sessions():
            try:
                each.close(timeout_s)
            except TuttiError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _sessions(self) -> list[AgentSession]:
        """The current session, and lost ones that may still move pages."""
        session, retired = self.session, self._retired
        return retired if session is None else [*retired, session]

    def _open(self) -> AgentSession:
        return AgentSession(
            self._path,
            self._hello,
            open_timeout_s=self._open_timeout_s,
            executor=self._executor,
            on_lost=self._wake,
        )

    def _wake(self) -> None:
        with self._lock:
            self._changed.notify_all()

    def _keep(self) -> None:
        """Closes sessions whose agent is lost, and connects again; runs on a thread of its own."""
        while not self._closed:
            with self._lock:
                self._changed.wait_for(lambda: self._closed or self._is_lost(), 1.0)
                lost = self.session if self._is_lost() else None
                if lost is not None and not self._closed:
                    self._retired = [*self._retired, lost]
                    self.session = None
            if lost is not None and not self._closed:
                self._retire(lost)
                self._reconnect()
            self._retire_late()

    def _is_lost(self) -> bool:
        return self.session is not None and self.session.lost

    def _retire(self, session: AgentSession) -> None:
        """Closes the files once the transfers of a lost session have ended."""
        try:
            session.close(self._timeout_s)
        except Exception as error:
            with contextlib.suppress(Exception):  # a logging handler of the user's
                _log.warning("transfers of a lost session are still under way: %s", error)
            return
        with self._lock:
            self._retired = [each for each in self._retired if each is not session]

    def _retire_late(self) -> None:
        """Tries again to close sessions that had transfers: an agent waits for their files."""
        for session in self._retired:
            if session.wait_quiet(0.0):
                self._retire(session)

    def _reconnect(self) -> None:
        pause_s = _RETRY_FIRST_S
        told: set[type[Exception]] = {AgentLost, PoolClosed}  # the first was logged at the loss
        while not self._closed:
            self._retire_late()
            try:
                self._adopt(self._open())
                return
            except Exception as error:  # of any kind: the next attempt may succeed
                if type(error) not in told:  # it may last, as another pool or version does
                    told.add(type(error))
                    with contextlib.suppress(Exception):  # a logging handler of the user's
                        _log.warning("not connected to the agent at %s: %s", self._path, error)
                with self._lock:
                    # Jitter, so that many clients do not reconnect at once.
                    self._changed.wait_for(lambda: self._closed, pause_s * random.uniform(0.5, 1))
                pause_s = min(2 * pause_s, _RETRY_MAX_S)

    def _adopt(self, session: AgentSession) -> None:
        """Makes a new session the current one, or closes it and raises."""
        try:
            if session.layout != self._layout or session.geometry != self._geometry:
                raise PoolMismatch("the agent has another pool now; restart this process")
            with self._lock:
                if self._closed:
                    raise PoolClosed("the pool is closed; open it again")
                for memory in self._memories:
                    session.register(memory)
                self.session = session
                self.reconnects += 1
        except BaseException:
            session.close(self._timeout_s)
            raise
        with contextlib.suppress(Exception):  # a logging handler of the user's
            _log.info("connected to the agent at %s again", self._path)


def _check_apart(memories: list[HostMemory]) -> None:
    """Raises ConfigError for memory that overlaps, as a controller would."""
    ranges = sorted(buffer for memory in memories for buffer in memory.buffers)
    for (start, nbytes), (following, _) in itertools.pairwise(ranges):
        if start + nbytes > following:
            raise ConfigError(
                f"the memory at {following:#x} overlaps other memory; register memory once, and"
                " unregister what it overlaps first"
            )
