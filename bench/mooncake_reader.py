"""A process that reads values by Mooncake's own batch get, as nice as that of the second tier."""

from __future__ import annotations

import contextlib
import itertools
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
from tutti.errors import DeviceTimeout

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
        self._memory = np.zeros(nbytes * len(names), np.uint8)
        base = int(self._memory.ctypes.data)
        self._addresses = [base + i * nbytes for i in range(len(names))]
        self._store = MooncakeStore(config.options, base, self._memory.nbytes)

    def get_s(self) -> float:
        """Seconds of one batch get."""
        start_s = time.monotonic()
        self._get(0, len(self._names))
        return time.monotonic() - start_s

    def digests_s(self) -> float:
        """Seconds of hashing all values."""
        start_s = time.monotonic()
        self._hash(self._memory)
        return time.monotonic() - start_s

    def _hash(self, values: NDArray[np.uint8]) -> None:
        for start in range(0, values.size, self._nbytes):
            xxhash.xxh3_128(values.data[start : start + self._nbytes]).digest()

    def keep_s(self, path: Path) -> float:
        """Seconds of gets in parts; a thread hashes and writes each while the next is read."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        base, step = self._addresses[0], -(-len(self._names) // _PARTS)

        def keep(first: int, last: int) -> None:
            part = self._memory[first * self._nbytes : last * self._nbytes]
            self._hash(part)
            os.pwrite(fd, part.data, self._addresses[first] - base)

        try:
            start_s = time.monotonic()
            with ThreadPoolExecutor(1) as thread:
                kept = []
                for first in range(0, len(self._names), step):
                    last = min(first + step, len(self._names))
                    self._get(first, last)
                    kept.append(thread.submit(keep, first, last))
                for part in kept:
                    part.result(_WAIT_S)
            os.fdatasync(fd)
            return time.monotonic() - start_s
        finally:
            os.close(fd)
            path.unlink()

    def exists_s(self) -> float:
        """Seconds of a batch exists of ASKED names that are there, the mean of several."""
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
    """A process, as nice as the tier's, with a Direct."""

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
        """Ends the process."""
        self._peer.send(_END)

    def go(self, reads: bool) -> None:
        """Reads from now on, or has ended reading on return."""
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
