"""The agent's end of one connection: a thread that answers each request before it reads the next.

Threads, not an event loop: a request is one wake-up of one thread, and what has to wait for space
or for the medium waits there, where it delays no other connection.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from tutti.base.threads import start_thread
from tutti.errors import AgentRefused, CapacityError, TuttiError
from tutti.node import called_operations
from tutti.node.agent_pools import AgentPools
from tutti.node.messages import (
    FRAME_NBYTES_MAX,
    HEADER,
    VERSION,
    Answer,
    AskSpeeds,
    Call,
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
    body_nbytes,
    failure_of,
    frame,
    read_request,
)
from tutti.node.pool_service import ClientSession

_log = logging.getLogger(__name__)

_RECEIVE_NBYTES = 64 << 10
_UNSENT_NBYTES_MAX = 8 << 20
_TIMEVAL = struct.Struct("ll")


@dataclass(frozen=True)
class AgentConfig:
    """How an agent serves.

    path: of its socket, mode 0600.  group: id of a group that may connect, too (mode 0660).
    hello_s: limit for the first message of a connection, and for the rest of any message.
    unread_s: limit for a client to read its answers.  connections_max: of all clients together.
    """

    path: str
    group: int | None = None
    hello_s: float = 5.0
    unread_s: float = 30.0
    connections_max: int = 1024


class Host(Protocol):
    """What connections need of the agent.  sessions: by their ids."""

    config: AgentConfig
    pools: AgentPools
    sessions: dict[bytes, ClientSession]

    def count(self, name: str) -> None:
        """Adds one to a counter."""

    def session_opened(self, session: ClientSession) -> None:
        """Clients may join the session.  Raises AgentRefused when the agent stops."""

    def connection_over(self, connection: ServedConnection, owns: bool) -> None:
        """A connection has ended, and its session if it owns one."""


class Outgoing:
    """Sends messages on a socket from any thread, without waiting for the peer to read.

    Bytes that do not fit into the socket's buffer are queued and sent by a thread that ends with
    the queue.  A peer that leaves them unread for ``unread_s``, or too many, is disconnected.
    """

    def __init__(self, peer: socket.socket, unread_s: float) -> None:
        self._peer = peer
        self._unread_s = unread_s
        self._unsent: deque[bytes | memoryview] = deque()
        self._unsent_nbytes = 0
        self._is_closed = False
        self._lock = threading.Lock()  # takes a fifth of the time of taking the condition
        self._changed = threading.Condition(self._lock)

    def send(self, raw: bytes | memoryview) -> None:
        """Sends bytes after those of earlier calls; nothing once the connection is cut off."""
        with self._lock:
            if self._is_closed:
                return
            if not self._unsent:
                try:
                    sent = self._peer.send(raw, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    sent = 0
                except OSError:
                    return  # the connection's thread notices the end
                if sent == len(raw):
                    return
                raw = raw[sent:]
                self._unsent.append(raw)
                thread = threading.Thread(target=self._flush, daemon=True)
                try:
                    start_thread(thread, "tutti-agent-unsent")
                except CapacityError:
                    self._unsent.clear()
                    self.cut_off()
                    return
            else:
                self._unsent.append(raw)
            self._unsent_nbytes += len(raw)
            if self._unsent_nbytes > _UNSENT_NBYTES_MAX:
                self.cut_off()

    def drain(self) -> None:
        """Waits until the queue is empty, or cuts the peer off; its requests wait meanwhile."""
        if self._unsent:
            with self._changed:
                if not self._changed.wait_for(lambda: not self._unsent, self._unread_s):
                    self.cut_off()

    def close(self) -> None:
        """Disconnects, and waits until nothing is being sent."""
        with self._changed:
            self._is_closed = True
            self.cut_off()
            # Sends on a socket that is shut down fail at once.
            self._changed.wait_for(lambda: not self._unsent, self._unread_s)

    def cut_off(self) -> None:
        """Ends the connection, from any thread."""
        with contextlib.suppress(OSError):
            self._peer.shutdown(socket.SHUT_RDWR)

    def _flush(self) -> None:
        is_left = True
        while is_left:  # bounded by what is unsent, and by SO_SNDTIMEO
            try:
                self._peer.sendall(self._unsent[0])
                was_sent = True
            except OSError:
                was_sent = False
            with self._changed:
                if was_sent:
                    self._unsent_nbytes -= len(self._unsent.popleft())
                else:
                    self._is_closed = True
                    self.cut_off()
                    self._unsent.clear()
                is_left = bool(self._unsent)
                self._changed.notify_all()


class ServedConnection:
    """One connection of a client; a session ends with its first connection."""

    def __init__(self, agent: Host, peer: socket.socket, pid: int) -> None:
        self._agent = agent
        self._peer = peer
        self._pid = pid
        self._room, self._buffer = np.empty(_RECEIVE_NBYTES, np.uint8).data, bytearray()
        self._owns = False
        config = agent.config
        self._outgoing = Outgoing(peer, config.unread_s)
        self.session: ClientSession | None = None
        peer.settimeout(None)
        # Room for a long plan, which a new thread would send otherwise; the kernel doubles it.
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, FRAME_NBYTES_MAX // 2)
        for option, timeout_s in (
            (socket.SO_RCVTIMEO, config.hello_s),
            (socket.SO_SNDTIMEO, config.unread_s),
        ):
            value = _TIMEVAL.pack(int(timeout_s), int(timeout_s % 1 * 1e6))
            peer.setsockopt(socket.SOL_SOCKET, option, value)

    def start(self) -> None:
        """Serves on a thread of its own.  Raises CapacityError."""
        start_thread(threading.Thread(target=self._run, daemon=True), "tutti-agent-client")

    def shut_down(self) -> None:
        """Ends the connection from any thread, without a message."""
        self._outgoing.cut_off()

    def _run(self) -> None:
        try:
            while (body := self._next_body()) is not None:
                self._serve(body)
                self._agent.count("requests")  # counted while the client continues
                self._outgoing.drain()
        except AgentRefused as error:
            self._agent.count("refused")
            self._send(failure_of(error))
        except OSError:
            pass  # the client is gone
        except Exception as error:  # of this connection alone
            _log.error("a connection failed", exc_info=error)
        finally:
            self._outgoing.close()
            self._agent.connection_over(self, self._owns)
            self._peer.close()

    def _serve(self, body: bytes | memoryview) -> None:
        """Answers one request.  Raises AgentRefused, which ends the connection."""
        try:
            answer = self._answer(read_request(body))
            if isinstance(answer, memoryview):
                self._outgoing.send(answer)
            elif answer is not None:
                self._send(answer)
        except AgentRefused:
            raise
        except Exception as error:  # sent to the client
            if not isinstance(error, TuttiError):
                _log.error("a request failed", exc_info=error)
            self._send(failure_of(error))
            if self.session is None:
                self._outgoing.drain()
                self.shut_down()

    def _next_body(self) -> bytes | memoryview | None:
        """The next complete message, valid until the next call; None at the end of the connection.

        Raises AgentRefused when the first message, or the rest of one, does not arrive in time.
        """
        hello_s = self._agent.config.hello_s
        began_s = 0.0
        while (body := self._whole()) is None:  # bounded by hello_s, once a message has begun
            if self._buffer:
                began_s = began_s or time.monotonic()
                if time.monotonic() - began_s > hello_s:
                    raise AgentRefused("half a message came; the connection is closed, try again")
            try:
                n = self._peer.recv_into(self._room)
            except BlockingIOError:  # SO_RCVTIMEO
                if self.session is None and not self._buffer:
                    reason = "no request came on the connection; it is closed, connect again"
                    raise AgentRefused(reason) from None
                continue
            if not n:
                return None
            part = self._room[:n]
            if not self._buffer and n > HEADER.size and n == HEADER.size + body_nbytes(part):
                return part[HEADER.size :]  # the common case: exactly one request
            self._buffer += part
        return body

    def _whole(self) -> bytes | None:
        """The next message in the buffer, if it is complete."""
        buffer = self._buffer
        if len(buffer) < HEADER.size:
            return None
        end = HEADER.size + body_nbytes(buffer)
        if len(buffer) < end:
            return None
        body = bytes(memoryview(buffer)[HEADER.size : end])
        del buffer[:end]
        return body

    def _answer(self, message: Any) -> Message | memoryview | None:
        """The answer to a request, or its frame; None if none is due, or it was sent already."""
        session = self.session
        if session is None:
            return self._greet(message)
        if isinstance(message, Match):
            return Answer(session.match(message))
        if isinstance(message, PlanLoad):
            return session.plan_load(message)
        if isinstance(message, PlanPut):
            return session.plan_put(message)
        if isinstance(message, Moved):
            session.moved(message)
            return None
        if isinstance(message, Present):
            return Answer(session.present(message))
        if isinstance(message, Unpin):
            session.unpin(message.name)
            return Answer()
        if isinstance(message, Call):
            return Answer(called_operations.run(session, message.name, message.arguments))
        raise AgentRefused("the session is open already; open another connection")

    def _greet(self, message: Any) -> Message | None:
        if isinstance(message, Join):
            self.session = self._agent.sessions.get(message.session)
            if self.session is None:
                raise AgentRefused("the session has ended; connect again")
            return Answer()
        if isinstance(message, Pools):
            return Answer(self._agent.pools.names())
        if isinstance(message, AskSpeeds):
            return Answer(list(self._agent.pools.speeds))
        if not isinstance(message, Hello):
            raise AgentRefused("the first message of a connection opens or joins a session")
        if message.version != VERSION:
            raise AgentRefused(
                f"the client speaks version {message.version}, the agent {VERSION}; use the"
                " same version of tutti on both sides"
            )
        service = self._agent.pools.open(message.layout, message.capacity, message.pool)
        self._open_session(service.open_session(self._pid, self._send))
        return None

    def _open_session(self, session: ClientSession) -> None:
        self.session, self._owns = session, True
        self._agent.session_opened(session)
        files = session.share_files()
        try:
            # Nothing was sent before, so the buffer has room for this and the descriptors.
            welcome = frame(session.welcome())
            sent = socket.send_fds(self._peer, [welcome], files)
        except (BrokenPipeError, ConnectionResetError):
            return  # the client is gone; the next read finds that
        finally:
            for fd in files:
                os.close(fd)
        self._outgoing.send(welcome[sent:])

    def _send(self, message: Message) -> None:
        """Sends a message, from any thread."""
        self._outgoing.send(frame(message))
