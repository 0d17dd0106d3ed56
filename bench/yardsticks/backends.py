"""Backends for MLPerf Storage's KV-cache benchmark: Tutti, and files by O_DIRECT.

The benchmark (mlcommons/storage, kv_cache_benchmark) writes, reads and deletes whole entries by
name.  It counts a hit before it reads and ignores read errors, so `Counted` wraps every backend,
also the benchmark's own, and counts actual results.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

import tutti
from tutti.base.arrays import Keys
from tutti.base.units import MiB
from tutti.errors import CapacityError, DeviceTimeout, MediumError, PoolClosed
from tutti.gio_uring.memory import HostBuffer

Bytes = npt.NDArray[np.uint8]
#: The benchmark's IOTiming: seconds in total, of the device, of the host.
Timing = Callable[[float, float, float], Any]

PAGE_NBYTES = MiB
CHUNKS = 4  # entries transferred at a time; further ones wait
CHUNK_NBYTES = 128 * MiB
_CHUNK_PAGES = CHUNK_NBYTES // PAGE_NBYTES
_BLOCK_NBYTES = 4096
_WAIT_S = 60.0


@dataclass
class Counts:
    """Actual results of a backend.  wrong: entries whose bytes differ from those written."""

    reads: int = 0
    read_nbytes: int = 0
    writes: int = 0
    write_nbytes: int = 0
    deletes: int = 0
    misses: int = 0
    errors: int = 0
    wrong: int = 0
    first_error: str = ""


class Counted:
    """Forwards the benchmark's calls to a backend, counts them and compares checksums.

    The times that a backend reports exclude checksums.  Thread-safe.
    """

    def __init__(self, backend: Any, folder: str) -> None:
        self.base_path = Path(folder)
        self._backend = backend
        self._counts = Counts()
        self._sums: dict[str, int] = {}
        self._idle = threading.Condition()
        self._under_way = 0
        self._ended = False

    def write(self, key: str, data: npt.NDArray[Any]) -> Any:
        """Stores an entry; returns its IOTiming."""
        checksum = _checksum(data)
        with self._call():
            timing = self._backend.write(key, data)
        self._sums[key] = checksum
        self._count(writes=1, write_nbytes=data.nbytes)
        return timing

    def read(self, key: str) -> Any:
        """Returns (entry, IOTiming)."""
        with self._call():
            data, timing = self._backend.read(key)
        wrong = _checksum(data) != self._sums.get(key)
        self._count(reads=1, read_nbytes=data.nbytes, wrong=int(wrong))
        return data, timing

    def delete(self, key: str) -> None:
        with self._call():
            self._backend.delete(key)
        self._count(deletes=1)

    def clear(self) -> None:
        for key in list(self._sums):
            self.delete(key)

    def finish(self) -> Counts:
        """Waits for running calls and returns the counts; later calls fail uncounted."""
        with self._idle:
            self._ended = True
            counts = replace(self._counts)
            if not self._idle.wait_for(lambda: self._under_way == 0, _WAIT_S):
                raise DeviceTimeout(f"an entry was not moved within {_WAIT_S:g} s")
        if isinstance(self._backend, PoolEntries):
            self._backend.close()
        return counts

    @contextmanager
    def _call(self) -> Iterator[None]:
        with self._idle:
            if self._ended:
                raise PoolClosed("the round has ended; start another one")
            self._under_way += 1
        try:
            yield
        except (KeyError, FileNotFoundError):
            self._count(misses=1)
            raise
        except Exception as error:
            self._counts.first_error = self._counts.first_error or repr(error)
            self._count(errors=1)
            raise
        finally:
            with self._idle:
                self._under_way -= 1
                self._idle.notify_all()

    def _count(self, **numbers: int) -> None:
        with self._idle:
            for name, number in numbers.items():
                setattr(self._counts, name, getattr(self._counts, name) + number)


#: Transfers bytes of an entry: (offset, number of bytes, whether they are the last).
Move = Callable[[int, int, bool], None]


class Entries(ABC):
    """Entries that are transferred piece by piece through chunks of transfer memory.

    The benchmark passes and expects its own arrays, so each byte is copied once.
    """

    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self._buffer = HostBuffer(CHUNKS * CHUNK_NBYTES)
        self._chunks: queue.Queue[int] = queue.Queue()
        for chunk in range(CHUNKS):
            self._chunks.put(chunk)
        self._sizes: dict[str, int] = {}

    def write(self, key: str, data: npt.NDArray[Any]) -> Any:
        """Stores an entry.  Raises TuttiError or OSError, and then it is not stored."""
        raw = _flat(data)
        if key in self._sizes:
            self.delete(key)
        try:
            timing = self._move(key, raw, is_write=True)
        except BaseException:
            self.delete(key)
            raise
        self._sizes[key] = raw.nbytes
        return timing

    def read(self, key: str) -> tuple[Bytes, Any]:
        """The bytes of an entry.  Raises KeyError or FileNotFoundError for one that is missing."""
        data = np.empty(self._sizes[key], np.uint8)
        return data, self._move(key, data, is_write=False)

    @abstractmethod
    def delete(self, key: str) -> None:
        """Deletes an entry, if it is stored."""

    @abstractmethod
    def _open(self, key: str, chunk: int, *, is_write: bool) -> AbstractContextManager[Move]:
        """Gives a function that transfers pieces between the entry and the start of a chunk."""

    def _move(self, key: str, data: Bytes, *, is_write: bool) -> Any:
        begin_s, device_s = time.perf_counter(), 0.0
        chunk = self._chunks.get(timeout=_WAIT_S)
        memory = self._buffer.array[chunk * CHUNK_NBYTES :][:CHUNK_NBYTES]
        try:
            with self._open(key, chunk, is_write=is_write) as move:
                for start in range(0, data.nbytes, CHUNK_NBYTES):
                    piece = data[start : start + CHUNK_NBYTES]
                    if is_write:
                        memory[: piece.nbytes] = piece
                    issued_s = time.perf_counter()
                    move(start, piece.nbytes, start + piece.nbytes == data.nbytes)
                    device_s += time.perf_counter() - issued_s
                    if not is_write:
                        piece[:] = memory[: piece.nbytes]
        finally:
            self._chunks.put(chunk)
        total_s = time.perf_counter() - begin_s
        return self._timing(total_s, device_s, total_s - device_s)


class PoolEntries(Entries):
    """Entries as chains of pages of a Tutti pool; the last page's padding is not returned.

    choices: options of tutti.open.
    """

    def __init__(self, timing: Timing, folder: str, capacity_nbytes: int, **choices: Any) -> None:
        super().__init__(timing)
        layout = tutti.KVLayout(1, (PAGE_NBYTES,), 64, "uint8", "bench", 1, model="bench")
        path = str(Path(folder) / "pool.tutti")
        self._store = tutti.open(path, layout, capacity_nbytes, **choices)
        pages = CHUNKS * _CHUNK_PAGES
        self._store.register(tutti.HostMemory.from_buffer(layout, self._buffer, pages))

    def delete(self, key: str) -> None:
        nbytes = self._sizes.pop(key, None)
        if nbytes is not None:
            self._store.delete(self._keys(key, 0, nbytes))

    def close(self) -> None:
        self._store.close()

    @contextmanager
    def _open(self, key: str, chunk: int, *, is_write: bool) -> Iterator[Move]:
        def put(start: int, nbytes: int, _: bool) -> None:
            self._sizes[key] = start + nbytes
            keys = self._keys(key, start, nbytes)
            pages = chunk * _CHUNK_PAGES + np.arange(len(keys))
            before = start // PAGE_NBYTES
            parent = self._keys(key, start - 1, 1)[0].tobytes() if start else None
            result = self._store.put(keys, pages, parent=parent, depth=before).wait(_WAIT_S)
            if result.dropped:
                raise CapacityError(f"{result.dropped} pages of an entry had no slot")

        def load(start: int, nbytes: int, _: bool) -> None:
            keys = self._keys(key, start, nbytes)
            pages = chunk * _CHUNK_PAGES + np.arange(len(keys))
            self._store.load(keys, pages).wait(_WAIT_S)

        yield put if is_write else load

    def _keys(self, key: str, start: int, nbytes: int) -> Keys:
        """Keys of the pages that contain these bytes of an entry."""
        numbers = range(start // PAGE_NBYTES, -(-(start + nbytes) // PAGE_NBYTES))
        names = [f"{key} {number}".encode() for number in numbers]
        return tutti.object_keys(self._store.layout.fingerprint, names)


class DirectEntries(Entries):
    """A file for each entry, by O_DIRECT: the benchmark's own way, without the page cache.

    durability: with "flush", an entry is stored after an fdatasync, as Tutti's level of that name.
    """

    def __init__(self, timing: Timing, folder: str, durability: str) -> None:
        super().__init__(timing)
        self._folder = Path(folder)
        self._flushes = durability == "flush"

    def delete(self, key: str) -> None:
        self._sizes.pop(key, None)
        (self._folder / key).unlink(missing_ok=True)

    @contextmanager
    def _open(self, key: str, chunk: int, *, is_write: bool) -> Iterator[Move]:
        memory = self._buffer.array[chunk * CHUNK_NBYTES :][:CHUNK_NBYTES]
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC if is_write else os.O_RDONLY
        descriptor = os.open(self._folder / key, flags | os.O_DIRECT, 0o600)

        def move(start: int, nbytes: int, is_last: bool) -> None:
            padded = -(-nbytes // _BLOCK_NBYTES) * _BLOCK_NBYTES
            transfer = os.pwritev if is_write else os.preadv
            if transfer(descriptor, [memory[:padded].data], start) < nbytes:
                raise MediumError("a piece of an entry was cut short; is the disk full?")
            if is_write and is_last and self._flushes:
                os.fdatasync(descriptor)

        try:
            yield move
        finally:
            os.close(descriptor)


def _flat(data: npt.NDArray[Any]) -> Bytes:
    return data.reshape(-1).view(np.uint8)


def _checksum(data: npt.NDArray[Any]) -> int:
    return xxhash.xxh3_64_intdigest(_flat(data).data)
