"""The node's agent: one process owns the pools, and others use them over a Unix socket.

Control plane only: a client gets the members' file descriptors and slot numbers, and does the I/O.
Each connection has a thread of its own (served_connection.py), so that a client that floods or
hangs does not delay the others.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from tutti.errors import AgentRefused, TuttiError, system_message
from tutti.node.agent_pools import AgentPools
from tutti.node.listener import SpareFile, check_peer, is_out_of_files, listen, out_of_files
from tutti.node.messages import Failure, failure_of, frame
from tutti.node.pool_service import ClientSession
from tutti.node.served_connection import AgentConfig, ServedConnection

_log = logging.getLogger(__name__)

_SWEEP_S = 0.25
_SWITCH_S = 0.0005
_WARN_EVERY_S = 60.0


@dataclass
class AgentCounters:
    """Totals since the agent started.

    lost: sessions that ended without a close, or with jobs that were not reported.
    """

    connections: int = 0
    sessions: int = 0
    requests: int = 0
    refused: int = 0
    lost: int = 0


class Agent:
    """Serves pools until ``stop``.

    pools: the caller closes them after ``serve``.
    """

    def __init__(self, config: AgentConfig, pools: AgentPools) -> None:
        self.config = config
        self.counters = AgentCounters()
        self.pools = pools
        self.sessions: dict[bytes, ClientSession] = {}
        self._connections: set[ServedConnection] = set()
        self._leaving: set[ClientSession] = set()
        self._lock = threading.Lock()  # guards all of these
        self._stops = False
        self._spare = SpareFile()
        self._warns_from_s = 0.0

    def serve(self, started: Callable[[], None] = lambda: None) -> None:
        """Listens until ``stop``, then ends all sessions.  Raises ConfigError or PoolInUse."""
        # A shorter switch interval: a look-up waits less for the GIL while other threads compute.
        sys.setswitchinterval(_SWITCH_S)
        listener = listen(self.config.path, self.config.group)
        try:
            listener.settimeout(_SWEEP_S)
            self._spare.take()
            started()
            swept_s = time.monotonic()
            while not self._stops:
                self._accept(listener)
                if time.monotonic() - swept_s > _SWEEP_S:
                    self._settle_gone()
                    self._spare.take()
                    swept_s = time.monotonic()
        finally:
            with contextlib.suppress(OSError):
                os.unlink(self.config.path)
            listener.close()
            self._spare.release()
            with self._lock:
                self._stops = True
                connections = list(self._connections)
            for connection in connections:
                connection.shut_down()
            self._drain()

    def stop(self) -> None:
        """Ends ``serve``; from any thread, or a signal's handler."""
        self._stops = True

    def count(self, name: str) -> None:
        """Adds one to a counter."""
        with self._lock:
            setattr(self.counters, name, getattr(self.counters, name) + 1)

    def session_opened(self, session: ClientSession) -> None:
        """Clients may join the session.  Raises AgentRefused when the agent stops."""
        with self._lock:
            self.sessions[session.id] = session
            self.counters.sessions += 1
            stops = self._stops
        if stops:
            raise AgentRefused("the agent is stopping; connect again later")

    def connection_over(self, connection: ServedConnection, owns: bool) -> None:
        """A connection has ended, and its session if it owns one."""
        session = connection.session
        with self._lock:
            self._connections.discard(connection)
            if not owns or session is None:
                return
            del self.sessions[session.id]
            self._leaving.add(session)
            has_left = session.has_left and session.jobs.is_empty()
            self.counters.lost += not (has_left or self._stops)
            others = [each for each in self._connections if each.session is session]
        session.disconnect()
        for each in others:
            each.shut_down()

    def _accept(self, listener: socket.socket) -> None:
        """Serves the next connection, if one comes before it is time to sweep."""
        try:
            peer, _ = listener.accept()
        except TimeoutError:
            return
        except OSError as error:
            self._not_accepted(listener, error)
            return
        connection = None
        try:
            connection = ServedConnection(self, peer, self._check_peer(peer))
            with self._lock:
                self._connections.add(connection)
                self.counters.connections += 1
            connection.start()
        except Exception as error:  # of this peer alone
            if not isinstance(error, TuttiError):
                _log.error("a connection failed", exc_info=error)
            self._refuse(peer, error)
            with self._lock:
                self._connections.discard(connection)

    def _not_accepted(self, listener: socket.socket, error: OSError) -> None:
        """Handles a failed accept; without a free descriptor the spare one is used to refuse."""
        now_s = time.monotonic()
        if now_s >= self._warns_from_s:
            self._warns_from_s = now_s + _WARN_EVERY_S
            _log.warning("no connection could be accepted: %s", system_message(error))
        if is_out_of_files(error):
            self._spare.release()
            try:
                peer, _ = listener.accept()
            except OSError:
                time.sleep(_SWEEP_S)  # others end meanwhile
            else:
                self._refuse(peer, out_of_files())
            self._spare.take()
        else:
            time.sleep(_SWEEP_S)

    def _refuse(self, peer: socket.socket, why: Exception) -> None:
        self.count("refused")
        with contextlib.suppress(OSError):
            peer.send(frame(Failure("AgentRefused", failure_of(why).message)), socket.MSG_DONTWAIT)
        peer.close()

    def _check_peer(self, peer: socket.socket) -> int:
        """The peer's process id.  Raises AgentRefused for a process that may not connect."""
        pid = check_peer(peer, self.config.group)
        if (n := len(self._connections)) >= self.config.connections_max:
            raise AgentRefused(f"the agent has {n} connections, its limit; end other clients")
        return pid

    def _settle_gone(self) -> None:
        """Ends the jobs of clients that are gone, once no request and no transfer of theirs is
        under way.
        """
        with self._lock:
            busy = {each.session for each in self._connections}
            gone = [each for each in self._leaving if each not in busy]
        for session in gone:
            if not session.is_using_files():
                session.end()
                with self._lock:
                    self._leaving.discard(session)

    def _drain(self) -> None:
        """Waits a while for the clients to close the pools' files."""
        deadline_s = time.monotonic() + self.config.unread_s
        while time.monotonic() < deadline_s:
            self._settle_gone()
            with self._lock:
                if not (self._leaving or self._connections):
                    return
            time.sleep(_SWEEP_S / 5)
        _log.warning("%d disconnected clients still have the pools' files open", len(self._leaving))
