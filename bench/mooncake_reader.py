"""A process that reads values by Mooncake's batch get, with the second tier's nice values."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import mmap
import multiprocessing
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from tutti.cluster.remote_store import RemoteConfig
from tutti.cluster.worker import NICE
from tutti.errors import CapacityError, DeviceTimeout

#: Names in one batch of ``exists``.
ASKED = 1024
_ASKS = 16
_WAIT_S = 60.0
_PARTS = 8
_END = "end"


class Direct:
    """A client of Mooncake that reads the same values into registered memory."""

    def __init__(self, config: RemoteConfig, names: Sequence[str], nbytes: int) -> None:
        from tutti.cluster.mooncake import MooncakeStore

        self._names, self._nbytes = names, nbytes
        self._stride = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        memory = mmap.mmap(-1, self._stride * len(names))
        memory.madvise(mmap.MADV_HUGEPAGE)
        self._values = np.frombuffer(memory, np.uint8).reshape(len(names), self._stride)
        base = int(self._values.ctypes.data)
        self._addresses = [base + i * self._stride for i in range(len(names))]
        self._store = MooncakeStore(config.options, base, len(memory))
        self._file = -1

    def get_s(self) -> float:
        """Seconds of one batch get."""
        start_s = time.monotonic()
        self._get(0, len(self._names))
        return time.monotonic() - start_s

    def digests_s(self) -> float:
        """Seconds of hashing all values."""
        start_s = time.monotonic()
        self._hash(self._values)
        return time.monotonic() - start_s

    def _hash(self, values: NDArray[np.uint8]) -> None:
        for value in values:
            xxhash.xxh3_64_intdigest(value[: self._nbytes].data)

    def keep_s(self, path: Path) -> float:
        """Seconds of gets in parts; a thread hashes and writes each part while the next is read.

        Writes like a pool: with direct I/O, over the bytes of the round before.
        """
        if self._file < 0:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            path.unlink()
            with contextlib.suppress(OSError):  # its file system refuses it, also to the pool
                flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
                fcntl.fcntl(self._file, fcntl.F_SETFL, flags | os.O_DIRECT)
        step = -(-len(self._names) // _PARTS)

        def keep(first: int, last: int) -> None:
            values = self._values[first:last]
            self._hash(values)
            if os.pwrite(self._file, values.data, first * self._stride) != values.nbytes:
                raise CapacityError(f"the disk of {path} is full; give another folder")

        start_s = time.monotonic()
        with ThreadPoolExecutor(1) as thread:
            kept = []
            for first in range(0, len(self._names), step):
                last = min(first + step, len(self._names))
                self._get(first, last)
                kept.append(thread.submit(keep, first, last))
            for part in kept:
                part.result(_WAIT_S)
        return time.monotonic() - start_s

    def exists_s(self) -> float:
        """Seconds of a batch exists of ASKED stored names, the mean of several."""
        names = list(itertools.islice(itertools.cycle(self._names), ASKED))
        start_s = time.monotonic()
        for _ in range(_ASKS):
            self._store.exists(names)
        return (time.monotonic() - start_s) / _ASKS

    def _get(self, first: int, last: int) -> None:
        names, addresses = self._names[first:last], self._addresses[first:last]
        if any(self._store.get(names, addresses, self._nbytes)):
            raise DeviceTimeout("Mooncake did not deliver all values; give its servers more memory")


class Reader:
    """A process with a Direct, with the nice values of the tier's process."""

    def __init__(self, config: RemoteConfig, names: Sequence[str], nbytes: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._peer, other = context.Pipe()
        process = context.Process(target=_read, args=(config, names, nbytes, other), daemon=True)
        process.start()
        other.close()
        assert process.pid is not None
        self.pid = process.pid
        self._reads = False
        self.call("get_s")  # opens connections

    def call(self, name: str, *arguments: object) -> float:
        """Seconds of a call of Direct."""
        self._peer.send((name, *arguments))
        if not self._peer.poll(_WAIT_S):
            raise DeviceTimeout("the process that reads from Mooncake does not; is it set up?")
        return float(self._peer.recv())

    def close(self) -> None:
        self._peer.send(_END)

    def go(self, reads: bool) -> None:
        """Starts to read repeatedly, or stops, and returns when it has stopped."""
        if reads:
            self._peer.send(None)
        elif self._reads:
            self.call("get_s")
        self._reads = reads


def _read(config: RemoteConfig, names: Sequence[str], nbytes: int, peer: Connection) -> None:
    os.nice(NICE)
    direct = Direct(config, names, nbytes)
    with contextlib.suppress(EOFError):  # the bench has ended
        for request in iter(peer.recv, _END):
            if request is None:
                while not peer.poll():  # bounded by go()
                    direct.get_s()
            else:
                peer.send(getattr(direct, request[0])(*request[1:]))
    os._exit(0)  # Mooncake's destructors may wait for peers that have gone
