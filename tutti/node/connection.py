"""A client's connection to the agent: one request and its answer at a time, with a deadline."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from tutti.base.process import own_file
from tutti.errors import AgentLost, AgentRefused, TuttiError, system_message
from tutti.node.messages import (
    FILES_MAX,
    HEADER,
    AskSpeeds,
    Failure,
    Hello,
    Join,
    Message,
    Pools,
    Welcome,
    body_nbytes,
    error_of,
    frame,
    read_reply,
)
from tutti.profiles.at_open import Speeds

_log = logging.getLogger(__name__)

_RECEIVE_NBYTES = 128 << 10  # more than the plan of 128 pages of 100 layers
_IDLE_MAX = 8
_TIMEVAL = struct.Struct("ll")


class Connection:
    """One open socket.  Not thread-safe, except ``close``.

    is_open: whether it can be used for another request.
    After AgentLost or AgentRefused it is closed: a late answer would be taken for the next one.
    """

    def __init__(self, path: str, timeout_s: float) -> None:
        self._buffer = np.empty(_RECEIVE_NBYTES, np.uint8).data
        self._came: bytes | memoryview = b""  # received, not returned yet; may be in the buffer
        self._path, self.is_open = path, True
        flags = socket.SOCK_STREAM | socket.SOCK_CLOEXEC
        try:
            self._socket = own_file(socket.socket(socket.AF_UNIX, flags))
        except OSError as error:
            raise AgentRefused(
                f"no connection to the agent can be made: {system_message(error)}"
            ) from error
        try:
            self._set_timeout(socket.SO_SNDTIMEO, timeout_s)
            self._limit_waits(timeout_s)
            self._socket.connect(path)
        except OSError as error:
            self._socket.close()
            raise AgentLost(
                f"no agent answers on {path}: {error.strerror or error}; start one with `tutti"
                " serve`, or correct the path"
            ) from error

    def request(self, message: Message, timeout_s: float) -> Any:
        """The answer to a request.  Raises the error that the agent answers, or AgentLost."""
        self.send(message, timeout_s)
        return self.receive(timeout_s)

    def open(self, hello: Hello, timeout_s: float) -> tuple[Welcome, list[int]]:
        """Opens a session; returns its Welcome and the descriptors of the members' files."""
        files: list[int] = []
        self.send(hello, timeout_s)
        try:
            part, files, flags, _ = socket.recv_fds(
                self._socket, _RECEIVE_NBYTES, FILES_MAX, socket.MSG_CMSG_CLOEXEC
            )
            if flags & socket.MSG_CTRUNC:
                raise AgentRefused(
                    "this process has as many files open as it may, so it cannot get those of the"
                    " pool; close others, or raise its limit (ulimit -n)"
                )
            self._came = part
            if not part:
                raise self._lost("it closed the connection")
            welcome = self.receive(timeout_s)
            if not isinstance(welcome, Welcome) or len(files) != len(welcome.files):
                raise AgentRefused("the agent did not open a session; use the same version of it")
            return welcome, files
        except BaseException as error:
            for fd in files:
                os.close(fd)
            self.close()
            if isinstance(error, OSError):
                raise self._lost(str(error.strerror or error)) from error
            raise

    def send(self, message: Message, timeout_s: float) -> None:
        """Sends a message.  Raises AgentLost."""
        left, deadline_s = memoryview(frame(message)), time.monotonic() + timeout_s
        while left:  # bounded by the deadline; once, as a rule
            try:
                left = left[self._socket.send(left, socket.MSG_DONTWAIT) :]
            except BlockingIOError as error:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0 or not self._is_ready(select.POLLOUT, left_s):
                    raise self._lost(_reason(error, timeout_s)) from error
            except (BrokenPipeError, ConnectionResetError):
                return  # the agent hung up: ``receive`` finds its error or the end
            except OSError as error:
                raise self._lost(_reason(error, timeout_s)) from error

    def receive(self, timeout_s: float) -> Any:
        """The next answer.  Raises the error of a Failure, or AgentLost."""
        if timeout_s < self._wait_s:
            self._limit_waits(timeout_s)
        deadline_s = time.monotonic() + timeout_s
        while (body := self._body()) is None:  # bounded by the deadline
            self._receive_some(deadline_s, timeout_s)
        reply = read_reply(body)
        if isinstance(reply, Failure):
            error = error_of(reply)
            if isinstance(error, AgentRefused):
                self.close()
            raise error
        return reply

    def _body(self) -> memoryview | None:
        """The next complete message, without its length, or None; valid until more is received."""
        came = self._came
        if len(came) < HEADER.size:
            return None
        try:
            end = HEADER.size + body_nbytes(came)
        except AgentRefused:
            self.close()
            raise
        if len(came) < end:
            return None
        self._came = came[end:]
        return memoryview(came)[HEADER.size : end]

    def _receive_some(self, deadline_s: float, timeout_s: float) -> None:
        part = bytes(self._came) if self._came else b""  # of a message, out of the buffer
        if part and (left_s := max(0.0, deadline_s - time.monotonic())) < self._wait_s:
            self._limit_waits(left_s)
        try:
            n = self._socket.recv_into(self._buffer)
        except OSError as error:
            left_s = deadline_s - time.monotonic()
            if isinstance(error, BlockingIOError) and left_s > 0:
                self._limit_waits(left_s)
                return
            raise self._lost(_reason(error, timeout_s)) from error
        if not n:
            raise self._lost("it closed the connection")
        self._came = part + self._buffer[:n] if part else self._buffer[:n]
        if time.monotonic() > deadline_s:
            raise self._lost(f"no whole answer within {timeout_s:g} s")

    def _limit_waits(self, timeout_s: float) -> None:
        """Sets how long one wait for an answer may take.  Calls with later deadlines wait again:
        setting it whenever look-ups and plans alternate would cost a system call each time.
        """
        self._set_timeout(socket.SO_RCVTIMEO, timeout_s)
        self._wait_s = timeout_s

    def _set_timeout(self, option: int, timeout_s: float) -> None:
        """Sets the kernel's time-out: one system call less per operation than with Python's."""
        value = _TIMEVAL.pack(int(timeout_s), max(1, int(timeout_s % 1 * 1e6)))
        with contextlib.suppress(OSError):
            self._socket.setsockopt(socket.SOL_SOCKET, option, value)

    def _lost(self, why: str) -> AgentLost:
        self.close()
        return AgentLost(f"the agent at {self._path} is lost: {why}; it is tried again")

    def wait_readable(self, timeout_s: float) -> bool:
        """Whether an answer, or the end of the connection, has begun to arrive."""
        return bool(self._came) or self._is_ready(select.POLLIN, timeout_s)

    def _is_ready(self, event: int, timeout_s: float) -> bool:
        poll = select.poll()  # select() takes no descriptor above 1023
        try:
            poll.register(self._socket, event)
            return bool(poll.poll(timeout_s * 1000))
        except (OSError, ValueError) as error:
            raise self._lost("it was closed") from error

    def shut_down(self) -> None:
        """Ends waits in other threads; they close it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes the connection.  A second call does nothing."""
        self.is_open = False
        self.shut_down()
        self._socket.close()


class Connections:
    """Pool of a session's connections: each request uses one exclusively.

    on_lost: called, perhaps repeatedly, when an answer was lost or is invalid.
    """

    def __init__(self, path: str, session: bytes, on_lost: Callable[[TuttiError], None]) -> None:
        self._path = path
        self._session = session
        self._on_lost = on_lost
        self._idle: list[Connection] = []
        self._all: set[Connection] = set()
        self._lock = threading.Lock()
        self._closed = self._was_refused = False

    def request(self, message: Message, timeout_s: float) -> Any:
        """See Connection.request; requests do not wait for each other.

        AgentRefused without a call of ``on_lost``: the agent has too many connections.
        """
        connection = self._take(timeout_s)
        try:
            answer = connection.request(message, timeout_s)
        except TuttiError as error:
            self._give_back(connection)
            if isinstance(error, AgentLost | AgentRefused):
                self._on_lost(error)
            raise
        except BaseException:  # a late answer must not be taken for another request's
            connection.close()
            self._give_back(connection)
            raise
        self._give_back(connection)
        return answer

    def _take(self, timeout_s: float) -> Connection:
        with self._lock:
            if self._closed:
                raise AgentLost("the session with the agent has ended; it is tried again")
            if self._idle:
                return self._idle.pop()
        try:
            connection = Connection(self._path, timeout_s)
            try:
                connection.request(Join(self._session), timeout_s)
            except BaseException:
                connection.close()
                raise
        except AgentLost as error:
            self._on_lost(error)
            raise
        except AgentRefused as error:
            was_refused, self._was_refused = self._was_refused, True
            if not was_refused:  # each such call is a miss; only the first is logged
                with contextlib.suppress(Exception):  # a logging handler of the user's
                    _log.warning("a call got no connection to the agent: %s", error)
            raise
        self._keep(connection)
        return connection

    def _keep(self, connection: Connection) -> None:
        with self._lock:
            self._all.add(connection)
            if self._closed:
                connection.close()

    def _give_back(self, connection: Connection) -> None:
        with self._lock:
            if not self._closed and connection.is_open and len(self._idle) < _IDLE_MAX:
                self._idle.append(connection)
                return
            self._all.discard(connection)
        connection.close()

    def close(self) -> None:
        """Closes all connections, and ends the waits of other threads."""
        with self._lock:
            self._closed = True
            connections = list(self._all)
            idle, self._idle = self._idle, []
        for connection in connections:
            connection.shut_down()
        for connection in idle:
            connection.close()


def _reason(error: OSError, timeout_s: float) -> str:
    if isinstance(error, BlockingIOError):
        return f"no answer within {timeout_s:g} s"
    return str(error.strerror or error)


def ask(path: str, message: Pools | AskSpeeds, timeout_s: float) -> Any:
    """The answer to a request without a session.  Raises AgentLost, AgentRefused."""
    with contextlib.closing(Connection(path, timeout_s)) as connection:
        return connection.request(message, timeout_s).value


def speeds_of(path: str, timeout_s: float = 30.0) -> Speeds:
    """Speeds of the agent's media.  Raises AgentLost, AgentRefused."""
    return Speeds(*ask(path, AskSpeeds(), timeout_s))
