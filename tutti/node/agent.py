"""The node's agent: one process owns the pools, and others use them over a Unix socket.

Control plane only: a client gets the files of the members and slots, and moves the bytes itself.
One asyncio loop serves all connections; what may wait runs on threads of its own, one request of a
connection at a time, so that a client that floods or hangs does not delay the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from tutti.errors import AgentRefused, TuttiError, system_message
from tutti.node import operations
from tutti.node.listener import check_peer, listen
from tutti.node.messages import (
    HEADER,
    VERSION,
    Answer,
    Call,
    Failure,
    Hello,
    Join,
    Match,
    Message,
    Moved,
    PlanLoad,
    PlanPut,
    Pools,
    Present,
    Unpin,
    Written,
    body_nbytes,
    failure_of,
    frame,
    read_request,
)
from tutti.node.pool_service import ClientSession
from tutti.node.pools import AgentPools

_log = logging.getLogger(__name__)

_TURN = 16  # messages of one connection before others have their turn
_BUFFER_NBYTES_MAX = 2 << 20
_UNSENT_NBYTES_MAX = 8 << 20
_SWEEP_S = 0.25
_SWITCH_S = 0.0005


@dataclass(frozen=True)
class AgentConfig:
    """How an agent serves.

    path: of its socket, mode 0600.  group: members of this group may connect as well (0660).
    hello_s: how long a connection may take for its first message, and to complete any message.
    unread_s: how long a client may leave answers unread.  connections_max: of all clients.
    threads: requests of each kind (loads, puts, operations) that may wait at the same time.
    """

    path: str
    group: int | None = None
    hello_s: float = 5.0
    unread_s: float = 30.0
    connections_max: int = 1024
    threads: int = 16


@dataclass
class AgentCounters:
    """Totals since the agent started."""

    connections: int = 0
    sessions: int = 0
    requests: int = 0
    refused: int = 0
    lost: int = 0


class _Executors:
    """Threads by what they wait for, so that a load never waits behind puts without space."""

    def __init__(self, threads: int) -> None:
        sizes = {"puts": threads, "loads": threads, "calls": threads, "reports": 1}
        self._all = [
            ThreadPoolExecutor(size, thread_name_prefix=f"tutti-agent-{name}")
            for name, size in sizes.items()
        ]
        self.puts, self.loads, self.others, self.reports = self._all

    def shutdown(self) -> None:
        for each in self._all:
            each.shutdown(wait=False, cancel_futures=True)


class Agent:
    """Serves pools until ``stop``.

    pools: the caller closes them after ``serve``.
    """

    def __init__(self, config: AgentConfig, pools: AgentPools) -> None:
        self.config = config
        self.counters = AgentCounters()
        self.pools = pools
        self.sessions: dict[bytes, ClientSession] = {}
        self.connections: set[_Connection] = set()
        self.executors = _Executors(config.threads)
        self.loop: asyncio.AbstractEventLoop | None = None
        self._leaving: set[ClientSession] = set()
        self._stopping = threading.Event()

    async def serve(self, started: Callable[[], None] = lambda: None) -> None:
        """Listens until ``stop``, then ends all sessions.  Raises ConfigError or PoolInUse."""
        self.loop = asyncio.get_running_loop()
        # Look-ups are answered between the instructions of requests that wait.
        sys.setswitchinterval(_SWITCH_S)
        listener = listen(self.config.path, self.config.group)
        accepting = asyncio.ensure_future(self._accept(listener))
        sweeping = asyncio.ensure_future(self._sweep())
        try:
            started()
            await asyncio.wait([accepting, sweeping], return_when=asyncio.FIRST_COMPLETED)
        finally:
            accepting.cancel()
            with contextlib.suppress(OSError):
                os.unlink(self.config.path)
            listener.close()
            for connection in list(self.connections):
                connection.close()
            await self._drain()
            sweeping.cancel()
            self.executors.shutdown()

    def stop(self) -> None:
        """Ends ``serve``; from any thread."""
        self._stopping.set()

    async def _accept(self, listener: socket.socket) -> None:
        assert self.loop is not None
        while listener.fileno() >= 0:  # bounded by serve(), which cancels it
            try:
                peer, _ = await self.loop.sock_accept(listener)
            except OSError as error:  # too many open files: others end meanwhile
                _log.warning("no connection could be accepted: %s", system_message(error))
                await asyncio.sleep(_SWEEP_S)
                continue
            try:
                pid = self._check_peer(peer)
            except TuttiError as error:
                self.counters.refused += 1
                with contextlib.suppress(OSError):
                    peer.send(frame(failure_of(error)))
                peer.close()
                continue
            self.counters.connections += 1
            connection = _Connection(self, peer, pid)
            await self.loop.connect_accepted_socket(lambda made=connection: made, peer)  # type: ignore[misc]

    def _check_peer(self, peer: socket.socket) -> int:
        """The process at the other end.  Raises AgentRefused for one that may not connect."""
        pid = check_peer(peer, self.config.group)
        if len(self.connections) >= self.config.connections_max:
            raise AgentRefused(
                f"the agent has {len(self.connections)} connections, its limit; close some, or"
                " raise connections_max"
            )
        return pid

    def end_session(self, session: ClientSession) -> None:
        """The client is gone; its jobs end once its files are closed."""
        if self.sessions.pop(session.id, None) is None:
            return
        self.counters.lost += 1
        session.disconnect()
        self._leaving.add(session)
        for connection in list(self.connections):
            if connection.session is session:
                connection.close()

    async def _sweep(self) -> None:
        """Ends what took too long, and what has gone."""
        while not self._stopping.is_set():
            await asyncio.sleep(_SWEEP_S)
            now_s = time.monotonic()
            for connection in list(self.connections):
                connection.check_time(now_s)
            self._settle_gone()

    def _settle_gone(self) -> None:
        for session in list(self._leaving):
            if not session.is_using_files():
                self._leaving.discard(session)
                session.end()

    async def _drain(self) -> None:
        """Waits a while for the clients to close the pools' files."""
        deadline_s = time.monotonic() + self.config.unread_s
        while (self._leaving or self.sessions) and time.monotonic() < deadline_s:
            await asyncio.sleep(_SWEEP_S / 5)
            self._settle_gone()
        if self._leaving:
            _log.warning("%d clients still use the pools' files", len(self._leaving))


class _Connection(asyncio.Protocol):
    """One connection of a client; the first of a session is the one that it ends with."""

    def __init__(self, agent: Agent, peer: socket.socket, pid: int) -> None:
        self._agent = agent
        self._peer = peer
        self._pid = pid
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None
        self._busy = False
        self._turning = False
        self._opened_s = time.monotonic()
        self._partial_s: float | None = None
        self._unread_s: float | None = None
        self._owns = False
        self.session: ClientSession | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._agent.connections.add(self)

    def connection_lost(self, reason: Exception | None) -> None:
        self._transport = None
        self._agent.connections.discard(self)
        if self._owns and self.session is not None:
            self._agent.end_session(self.session)

    def pause_writing(self) -> None:
        self._unread_s = time.monotonic()

    def resume_writing(self) -> None:
        self._unread_s = None

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if len(self._buffer) > _BUFFER_NBYTES_MAX and self._transport is not None:
            self._transport.pause_reading()
        if not self._busy and not self._turning:
            self._turn()

    def check_time(self, now_s: float) -> None:
        """Closes a connection that sends nothing, sends half a message, or does not read."""
        config = self._agent.config
        if self.session is None and now_s - self._opened_s > config.hello_s and not self._busy:
            self._refuse(AgentRefused("no request came on the connection; it is closed"))
        elif self._partial_s is not None and now_s - self._partial_s > config.hello_s:
            self._refuse(AgentRefused("the rest of a message did not come; the session is closed"))
        elif self._unread_s is not None and now_s - self._unread_s > config.unread_s:
            self.close()

    def close(self) -> None:
        """Ends the connection, without a word."""
        if self._transport is not None:
            self._transport.abort()

    def _turn(self) -> None:
        """Handles a few messages, then leaves the loop to others."""
        self._turning = False
        for _ in range(_TURN):
            if self._busy or self._transport is None or self._transport.is_closing():
                return
            try:
                body = self._next_body()
                if body is None:
                    self._transport.resume_reading()
                    return
                self._agent.counters.requests += 1
                self._handle(read_request(body))
            except AgentRefused as error:
                self._refuse(error)
            except Exception as error:  # goes to the client; others are served on
                self._fail(error)
        self._turn_later()

    def _turn_later(self) -> None:
        if not self._turning and self._agent.loop is not None:
            self._turning = True
            self._agent.loop.call_soon(self._turn)

    def _next_body(self) -> bytes | None:
        """The next whole message; None while there is none."""
        have = len(self._buffer)
        need = HEADER.size
        if have >= need:
            need += body_nbytes(self._buffer[: HEADER.size])
        if have < need or need == HEADER.size:
            if have == 0:
                self._partial_s = None
            elif self._partial_s is None:
                self._partial_s = time.monotonic()
            return None
        self._partial_s = None
        body = bytes(memoryview(self._buffer)[HEADER.size : need])
        del self._buffer[:need]
        return body

    def _handle(self, message: Any) -> None:
        session = self.session
        if session is None:
            self._greet(message)
        elif isinstance(message, Match):
            self.send(Answer(session.match(message)))
        elif isinstance(message, Present):
            self.send(Answer(session.present(message)))
        elif isinstance(message, PlanPut):
            self._plan(
                self._agent.executors.puts, session.may_wait(message), session.plan_put, message
            )
        elif isinstance(message, PlanLoad):
            self._plan(
                self._agent.executors.loads, session.may_wait(message), session.plan_load, message
            )
        elif isinstance(message, Moved):
            self._wait_for(self._agent.executors.reports, lambda: session.moved(message))
        elif isinstance(message, Unpin):
            session.unpin(message.name)
            self.send(Answer())
        elif isinstance(message, Call):
            name, arguments = message.name, message.arguments
            self._wait_for(
                self._agent.executors.others,
                lambda: Answer(operations.run(session, name, arguments)),
            )
        else:
            raise AgentRefused("the session is open already; open another connection")

    def _plan(
        self, executor: Executor, may_wait: bool, make: Callable[[Any], Message], request: Any
    ) -> None:
        """Answers at once, or from a thread where that may take long."""
        if may_wait:
            self._wait_for(executor, lambda: make(request))
        else:
            self.send(make(request))

    def _greet(self, message: Any) -> None:
        if isinstance(message, Join):
            self.session = self._agent.sessions.get(message.session)
            if self.session is None:
                raise AgentRefused("the session has ended; connect again")
            self.send(Answer())
        elif isinstance(message, Hello):
            if message.version != VERSION:
                raise AgentRefused(
                    f"the client speaks version {message.version}, the agent {VERSION}; use the"
                    " same version of tutti on both sides"
                )
            self._wait_for(
                self._agent.executors.others,
                lambda: self._agent.pools.open(message.layout, message.capacity, message.pool),
                self._open_session,
            )
        elif isinstance(message, Pools):
            self._wait_for(self._agent.executors.others, lambda: Answer(self._agent.pools.names()))
        else:
            raise AgentRefused("the first message of a connection opens or joins a session")

    def _open_session(self, service: Any) -> None:
        session: ClientSession = service.open_session(self._pid, self._report)
        self._agent.sessions[session.id] = session
        self._agent.counters.sessions += 1
        self.session, self._owns = session, True
        files = session.share_files()
        try:
            # Nothing was sent before: the socket takes this at once, and the files with it.
            welcome = frame(session.welcome())
            sent = socket.send_fds(self._peer, [welcome], files)
        finally:
            for fd in files:
                os.close(fd)
        if sent < len(welcome) and self._transport is not None:
            self._transport.write(welcome[sent:])

    def _report(self, written: Written) -> None:
        """From any thread."""
        loop = self._agent.loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self.send, written)

    def send(self, message: Message) -> None:
        """Sends an answer.  A client that reads none is closed before they fill the memory."""
        if self._transport is None or self._transport.is_closing():
            return
        self._transport.write(frame(message))
        if self._transport.get_write_buffer_size() > _UNSENT_NBYTES_MAX:
            self.close()

    def _wait_for(
        self,
        executor: Executor,
        work: Callable[[], Any],
        then: Callable[[Any], None] | None = None,
    ) -> None:
        """Answers when a thread has done the work; the connection's next request waits for it."""
        loop = self._agent.loop
        assert loop is not None
        self._busy = True

        def run() -> None:
            result, error = None, None
            try:
                result = work()
            except Exception as failure:
                error = failure
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._waited, result, error, then or self._send_result)

        executor.submit(run)

    def _send_result(self, result: Any) -> None:
        if isinstance(result, Message):
            self.send(result)

    def _waited(self, result: Any, error: Exception | None, then: Callable[[Any], None]) -> None:
        self._busy = False
        try:
            if error is not None:
                raise error
            then(result)
        except AgentRefused as refusal:
            self._refuse(refusal)
        except Exception as failure:
            self._fail(failure)
        self._turn_later()

    def _fail(self, error: Exception) -> None:
        if not isinstance(error, TuttiError):
            _log.error("a request failed", exc_info=error)
        self.send(failure_of(error))
        if self.session is None and self._transport is not None:
            self._transport.close()

    def _refuse(self, error: TuttiError) -> None:
        """Sends the reason and ends the connection; with its first one the session ends too."""
        self._agent.counters.refused += 1
        if self._transport is not None:
            self.send(Failure("AgentRefused", str(error)))
            self._transport.close()
