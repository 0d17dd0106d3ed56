"""The process of a remote store: moves values between it and memory shared with the agent.

    python -m tutti.cluster.worker SOCKET_FD MEMORY_FD SPEC

It exits when the socket closes.  It verifies values that arrive, so that the agent's threads need
not: they store the digests that come with a value.
A request has an operation, keys and page numbers; its answer has one byte per key, a ValueStatus.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import mmap
import os
import signal
import socket
import struct
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np
import xxhash

from tutti.cluster.remote_store import ValueStatus
from tutti.cluster.tenants import OTHERS, TenantStores
from tutti.errors import RemoteFailed
from tutti.gio_uring.memory import address_of
from tutti.medium.keys import KEY_NBYTES
from tutti.medium.slot_record import tenant_of

#: Version of the values' format.  Part of their names: versions do not see each other's values.
VERSION = 2
#: A value is its payload and a trailer: this head (expiry in units of 64 s), XXH3-64 of the slice
#: of each layer (u64, little-endian), and a seal: XXH3-128 of the name, the head and these digests.
HEAD = np.dtype(
    [
        *((name, "u1", KEY_NBYTES) for name in ("key", "parent")),
        *((name, "<u4") for name in ("depth", "tenant", "expiry", "version")),
    ]
)
_SEAL_NBYTES = 16
EXISTS, GET, PUT, REMOVE = range(4)
#: Number of the call, operation and number of keys; 16 bytes per key and a u32 per page follow.
REQUEST = struct.Struct("<IBI")
#: Head of an answer: OK or ERROR, and the number of its call; 0 once per store at the start.
REPLY = struct.Struct("<BI")
KEYS_MAX = 2048  # 40 KiB: one datagram
ANSWER_NBYTES_MAX = 64 << 10
OK, ERROR = range(2)
_PR_SET_PDEATHSIG = 1
NICE = 5  # local loads and look-ups come first
#: Of the thread that calls the store: Mooncake busy-waits for values, which would take time from
#: the threads that receive and send them.
CALLER_NICE = 19
_Reply = tuple[bytes, Callable[[], bytes]]  # head, and the call that returns the rest


def trailer_nbytes(layers: int) -> int:
    """Bytes of a trailer."""
    return HEAD.itemsize + 8 * layers + _SEAL_NBYTES


class Spec(NamedTuple):
    """Start parameters of a worker, passed as JSON."""

    factory: str
    options: Mapping[str, str]
    prefix: str
    object_nbytes: int
    layers: int
    stride_nbytes: int
    nbytes: int
    tenants: Sequence[str]


class Worker:
    """Serves requests with the stores of all tenants over one piece of memory.

    opened: called for each store.  They are opened one after another: Mooncake holds the GIL
    meanwhile, so that threads would not make it faster.
    """

    def __init__(self, spec: Spec, memory: mmap.mmap, opened: Callable[[], object]) -> None:
        self._spec = spec
        self._bytes = memoryview(memory)
        self._base, _ = address_of(memory)
        self._slice_nbytes = spec.object_nbytes // spec.layers
        self._value_nbytes = spec.object_nbytes + trailer_nbytes(spec.layers)
        module, _, name = spec.factory.partition(":")
        make: Any = getattr(importlib.import_module(module), name)
        options = {OTHERS: spec.options}
        options |= {tenant_of(name): {**spec.options, "tenant_id": name} for name in spec.tenants}
        stores = {}
        for number, own in options.items():
            stores[number] = make(own, self._base, spec.nbytes)
            opened()
        self._stores = TenantStores(stores)

    def answer(self, request: bytes) -> Callable[[], bytes]:
        """Moves the values; the returned call verifies them and returns one byte per key."""
        _, op, n = REQUEST.unpack_from(request)
        keys = [request[i : i + KEY_NBYTES] for i in range(REQUEST.size, len(request), KEY_NBYTES)]
        names = [self._spec.prefix + key.hex() for key in keys[:n]]
        if op == EXISTS:
            return partial(bytes, self._stores.exists(names))
        if op == REMOVE:
            return partial(bytes, self._stores.remove(names))
        pages = np.frombuffer(request, "<u4", n, REQUEST.size + n * KEY_NBYTES)
        starts = [int(page) * self._spec.stride_nbytes for page in pages]
        addresses = [self._base + start for start in starts]
        if op == PUT:
            for name, start in zip(names, starts, strict=True):
                trailer = self._trailer(start)
                trailer[-_SEAL_NBYTES:] = _seal(name, trailer)
            heads = [np.frombuffer(self._trailer(start), HEAD, 1) for start in starts]
            tenants = [int(head["tenant"][0]) for head in heads]
            put = self._stores.put(names, tenants, addresses, self._value_nbytes)
            return partial(bytes, put)
        answers = self._stores.get(names, addresses, self._value_nbytes)
        return partial(self._verified, names, starts, answers)

    def _verified(self, names: list[str], starts: list[int], answers: list[ValueStatus]) -> bytes:
        for i, (name, start) in enumerate(zip(names, starts, strict=True)):
            if answers[i] == ValueStatus.DONE and not self._is_right(name, start):
                answers[i] = ValueStatus.CORRUPT
        return bytes(answers)

    def _is_right(self, name: str, start: int) -> bool:
        """Whether the seal is that of the name, and the slices match the digests of the trailer."""
        trailer = self._trailer(start)
        if trailer[-_SEAL_NBYTES:] != _seal(name, trailer):
            return False
        digests = np.frombuffer(trailer, "<u8", self._spec.layers, HEAD.itemsize)
        for digest in digests.tolist():
            end = start + self._slice_nbytes
            if xxhash.xxh3_64_intdigest(self._bytes[start:end]) != digest:
                return False
            start = end
        return True

    def _trailer(self, start: int) -> memoryview:
        return self._bytes[start + self._spec.object_nbytes : start + self._value_nbytes]


def _seal(name: str, trailer: memoryview) -> bytes:
    digest = xxhash.xxh3_128(name.encode())
    digest.update(trailer[:-_SEAL_NBYTES])
    return digest.digest()


def main(socket_fd: int, memory_fd: int, spec: Spec) -> None:
    """Serves until the agent closes the socket."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(NICE)
    with socket.socket(fileno=socket_fd) as peer, mmap.mmap(memory_fd, spec.nbytes) as memory:
        try:
            worker = Worker(spec, memory, lambda: peer.send(REPLY.pack(OK, 0)))
        except Exception as error:
            peer.send(REPLY.pack(ERROR, 0) + str(error).encode()[:1024])
            os._exit(1)
        replies: SimpleQueue[_Reply | None] = SimpleQueue()
        threading.Thread(target=_reply, args=(peer, replies), daemon=True).start()
        os.nice(CALLER_NICE - NICE)  # of this thread only; the stores' threads run already
        while request := peer.recv(ANSWER_NBYTES_MAX):
            number = REQUEST.unpack_from(request)[0]
            try:
                replies.put((REPLY.pack(OK, number), worker.answer(request)))
            except RemoteFailed as error:
                reply = str(error).encode()[:1024]
                replies.put((REPLY.pack(ERROR, number), partial(bytes, reply)))
        os._exit(0)  # destructors of a store may wait for peers that have gone


def _reply(peer: socket.socket, replies: SimpleQueue[_Reply | None]) -> None:
    """Sends answers in the order of requests while the next values are moved; ends at a None."""
    try:
        for head, rest in iter(replies.get, None):
            peer.send(head + rest())
    finally:
        os._exit(1)  # the agent sees its socket closed, as after any other crash


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Spec(*json.loads(sys.argv[3])))
