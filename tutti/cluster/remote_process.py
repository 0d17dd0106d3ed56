"""The agent's end of a remote store's process, and the memory that both share."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from tutti.base.arrays import U32, Keys
from tutti.cluster.remote_store import RemoteConfig
from tutti.cluster.worker import (
    ANSWER_NBYTES_MAX,
    ERROR,
    HEAD,
    OK,
    REPLY,
    REQUEST,
    VERSION,
    Spec,
    trailer_nbytes,
)
from tutti.errors import CapacityError, DeviceTimeout, RemoteFailed
from tutti.gio_uring.iocb import PagedMemory
from tutti.gio_uring.memory import address_of
from tutti.medium.layout import KVLayout
from tutti.memory.host_memory import HostMemory

_ALIGNMENT = 4096
_REAP_S = 5.0
_CALLS_MAX = 2**32 - 1
_QUIET = {"MC_LOG_LEVEL": "ERROR"}  # the agent reports what fails


class StagingInUse(DeviceTimeout):
    """A device or a worker that does not answer may still write to the staging memory."""


class Staging(HostMemory):
    """Memory shared with a worker: pages laid out as on the medium, each followed by its trailer.

    stats: returns what this memory adds to the store's statistics.  Raises CapacityError.
    trailers: (pages,), the fields of HEAD and the digests (layers,) of the slices.
    """

    def __init__(self, layout: KVLayout, pages: int, stats: Callable[[], dict[str, Any]]) -> None:
        value_nbytes = layout.object_nbytes + trailer_nbytes(layout.layers)
        self.stride_nbytes = -(-value_nbytes // _ALIGNMENT) * _ALIGNMENT
        nbytes = pages * self.stride_nbytes
        self.fd = -1
        try:
            self.fd = os.memfd_create("tutti-second-tier")
            os.ftruncate(self.fd, nbytes)
            self.map = mmap.mmap(self.fd, nbytes)
        except OSError as error:
            self.close_fd()
            raise CapacityError(
                f"cannot allocate {nbytes} bytes for the second tier: {error}; reduce its staging"
            ) from error
        self._stats = stats
        fields = np.dtype([*HEAD.descr, ("digests", "<u8", layout.layers)])
        place = layout.object_nbytes, (self.stride_nbytes,)
        self.trailers = np.ndarray((pages,), fields, self.map, *place)
        segments = np.array(layout.segments, np.uint64)
        layer_nbytes = segments.sum()
        base, _ = address_of(self.map)
        layers = np.arange(layout.layers, dtype=np.uint64)[:, None] * layer_nbytes
        bases = np.uint64(base) + layers + (np.cumsum(segments) - segments)[None, :]
        strides = (self.stride_nbytes,) * len(layout.segments)
        memory = PagedMemory(bases, strides, layout.segments, pages, self.map)
        super().__init__(layout, memory, [(base, nbytes)], self.map)

    def stats(self) -> dict[str, Any]:
        """See HostMemory."""
        return self._stats()

    def close_fd(self) -> None:
        """Closes the descriptor of the memory; no worker can be started afterwards."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def name_prefix(config: RemoteConfig, layout: KVLayout) -> str:
    """The common start of the names of a layout's values; the key in hex follows."""
    return f"tutti/{VERSION}/{config.namespace}/{layout.fingerprint.hex()}/"


class RemoteProcess:
    """Starts the worker when it is first needed, and again after it was lost.

    For one thread; only ``kill`` may be called from another.
    """

    def __init__(self, config: RemoteConfig, staging: Staging) -> None:
        layout = staging.layout
        self._config = config
        self._staging = staging
        self._spec = Spec(
            config.factory,
            dict(config.options),
            name_prefix(config, layout),
            layout.object_nbytes,
            layout.layers,
            staging.stride_nbytes,
            staging.nbytes,
            config.tenants,
        )
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._calls = 0
        self._asked: deque[tuple[int, int]] = deque()  # (number, keys) of each open request
        self.starts = 0

    def connect(self) -> None:
        """Starts the worker unless it runs.

        Raises RemoteFailed, after ``connect_s`` at most per store: of each tenant, and of the rest.
        """
        if self._process is None:
            self._start()

    def call(self, op: int, keys: Keys, pages: U32 | None, timeout_s: float) -> Any:
        """A ValueStatus per key, (n,) uint8.  Raises RemoteFailed.

        timeout_s: of the send and of the answer each; the start of a worker takes its own time.

        A worker that failed or did not answer is killed: nothing writes to the pages afterwards.
        """
        self.ask(op, keys, pages, timeout_s)
        return self.answer(timeout_s)

    def ask(self, op: int, keys: Keys, pages: U32 | None, timeout_s: float) -> None:
        """Sends a request; see ``call``.  ``answer`` returns answers in the order of requests."""
        self.connect()
        raw = b"" if pages is None else pages.astype("<u4").tobytes()
        self._calls = self._calls % _CALLS_MAX + 1
        self._asked.append((self._calls, len(keys)))
        self._send(REQUEST.pack(self._calls, op, len(keys)) + keys.tobytes() + raw, timeout_s)

    def answer(self, timeout_s: float) -> Any:
        """The answer to the oldest request that has none; see ``call``."""
        try:
            number, n = self._asked.popleft()
        except IndexError as error:
            raise RemoteFailed("the remote store's process was ended") from error
        reply = self._receive(number, timeout_s)
        if len(reply) != n:
            self.kill()
            raise RemoteFailed("the remote store's process sent an invalid reply; it is restarted")
        return np.frombuffer(reply, np.uint8)

    def abandon(self) -> None:
        """Kills the worker if requests are open, so that none writes to pages.  Raises StagingInUse
        if it cannot be killed.
        """
        if self._asked:
            self.kill()

    def kill(self) -> None:
        """Ends the worker.  Raises StagingInUse when it cannot be ended."""
        process, peer = self._process, self._socket
        self._asked.clear()
        if peer is not None:
            with contextlib.suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)
        if process is None:
            return
        process.kill()
        try:
            process.wait(_REAP_S)
        except subprocess.TimeoutExpired as error:
            raise StagingInUse(
                f"process {process.pid} of the remote store cannot be ended; its memory stays in"
                " use, and the tier is off"
            ) from error
        self._process = None
        if peer is not None:
            peer.close()

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        fds = (theirs.fileno(), self._staging.fd)
        path = os.pathsep.join(part for part in sys.path if part)
        command = [sys.executable, "-P", "-m", "tutti.cluster.worker", *map(str, fds)]
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [*command, json.dumps(self._spec)],
                    pass_fds=fds,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    env={**_QUIET, **os.environ, "PYTHONPATH": path},
                )
            except OSError as error:
                ours.close()
                raise RemoteFailed(f"the remote store's process cannot start: {error}") from error
        self._socket = ours
        self.starts += 1
        for _ in range(1 + len(self._config.tenants)):
            self._receive(0, self._config.connect_s)

    def _send(self, request: bytes, timeout_s: float) -> None:
        assert self._socket is not None
        try:
            self._socket.settimeout(max(0.001, timeout_s))
            self._socket.send(request)
        except OSError as error:
            raise self._lost(error, timeout_s) from error

    def _receive(self, number: int, timeout_s: float) -> bytes:
        """The answer to a request."""
        assert self._socket is not None
        try:
            self._socket.settimeout(max(0.001, timeout_s))
            reply = self._socket.recv(ANSWER_NBYTES_MAX)
        except OSError as error:
            raise self._lost(error, timeout_s) from error
        if not reply:
            raise self._lost(BrokenPipeError("its socket was closed"), timeout_s)
        status, answered = REPLY.unpack_from(reply) if len(reply) >= REPLY.size else (ERROR, -1)
        rest = reply[REPLY.size :]
        if answered == number and status == OK:
            return rest
        self.kill()
        if answered == number:
            raise RemoteFailed(rest.decode(errors="replace"))
        why = "an invalid reply" if answered < 0 else f"an answer to call {answered}, not {number}"
        raise RemoteFailed(f"the remote store's process sent {why}; it is restarted")

    def _lost(self, error: OSError, timeout_s: float) -> RemoteFailed:
        process, why = self._process, str(error)
        self.kill()
        if isinstance(error, TimeoutError):
            return RemoteFailed(f"the remote store did not answer within {timeout_s:g} s")
        if isinstance(error, BrokenPipeError | ConnectionResetError) and process is not None:
            code = process.returncode
            why = f"signal {-code}" if code < 0 else f"exit code {code}"
        return RemoteFailed(
            f"the remote store's process ended ({why}); its errors are on stderr, it is restarted"
        )
