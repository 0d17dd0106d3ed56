"""The simplest KV store on an SSD, for comparison: a file per object, and threads.

Segments are gathered and scattered by pwritev and preadv. The oldest file is removed if there are
too many, so that both sides evict. There are no checksums, and no consistency after a crash.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tutti.bench.meter import Meter
from tutti.bench.pool_workload import Limit
from tutti.bench.stamps import Stamps, numbered_keys
from tutti.errors import CapacityError
from tutti.memory.host_memory import HostMemory

THREADS = 4
_WAIT_S = 120.0


class FilePerObject:
    """Objects in files of one directory, which is removed by `close`.

    direct: O_DIRECT; otherwise through the page cache: then a round of puts ends with an fdatasync,
    and gets begin with an empty cache, to be comparable with direct I/O.
    objects_max: most objects.
    """

    def __init__(
        self, directory: Path, pool: HostMemory, *, direct: bool, objects_max: int
    ) -> None:
        self._directory = directory
        self._directory.mkdir()
        self._direct = direct
        self._objects_max = objects_max
        self._pool = pool
        self._threads = ThreadPoolExecutor(THREADS)
        self._stamps = Stamps(pool)
        self._pages = [self._segments(page) for page in range(pool.pages)]
        self._stored = 0
        self.wrong = 0
        every = np.arange(pool.pages)
        self._stamps.fill(every, numbered_keys(every))

    def close(self) -> None:
        self._threads.shutdown()
        for file in self._directory.iterdir():
            file.unlink()
        self._directory.rmdir()

    def store_phase(self, limit: Limit) -> dict[str, Any]:
        """Stores new objects, from pages in rotation."""
        meter = Meter()
        first = self._stored

        def put(number: int) -> None:
            self._put(first + number)

        with meter.timed():
            count = self._run(put, meter, limit)
            self._stored += count
            if not self._direct:
                wait_all([self._threads.submit(self._sync, first + i) for i in range(count)])
        return meter.to_dict()

    def retrieve_phase(self, limit: Limit) -> dict[str, Any]:
        """Reads the stored objects in rotation, each into the page that it was written from."""
        meter = Meter()
        oldest = max(0, self._stored - self._objects_max)
        held = self._stored - oldest
        if held == 0:
            raise CapacityError("no objects were stored; run store_phase first")
        if not self._direct:
            wait_all([self._threads.submit(self._forget, oldest + i) for i in range(held)])
        every = np.arange(self._pool.pages)
        with meter.timed():
            count = self._run(lambda number: self._get(oldest + number % held), meter, limit)
        touched = every[: min(count, held, every.size)] + oldest
        pages = touched % self._pool.pages
        self.wrong += int(np.count_nonzero(self._stamps.wrong(pages, numbered_keys(pages))))
        return meter.to_dict()

    def _run(self, work: Callable[[int], None], meter: Meter, limit: Limit) -> int:
        """Works on objects, twice as many at a time as there are threads; returns their number."""
        object_nbytes = self._pool.layout.object_nbytes
        if limit.nbytes is None:
            raise CapacityError("a round of files is limited by bytes; give Limit.nbytes")
        count = -(-limit.nbytes // object_nbytes)
        # Objects in flight do not share a page.
        step = min(2 * THREADS, self._pool.pages)
        for start in range(0, count, step):
            numbers = range(start, min(count, start + step))
            wait_all([self._threads.submit(work, number) for number in numbers])
        meter.nbytes += count * object_nbytes
        return count

    def _put(self, number: int) -> None:
        old = self._file(number - self._objects_max)
        if number >= self._objects_max and old.exists():
            old.unlink()
        self._transfer(number, os.O_WRONLY | os.O_CREAT, os.pwritev)

    def _get(self, number: int) -> None:
        self._transfer(number, os.O_RDONLY, os.preadv)

    def _transfer(self, number: int, flags: int, transfer: Callable[..., int]) -> None:
        flags |= os.O_DIRECT if self._direct else 0
        descriptor = os.open(self._file(number), flags, 0o600)
        try:
            moved = transfer(descriptor, self._pages[number % self._pool.pages], 0)
        finally:
            os.close(descriptor)
        if moved != self._pool.layout.object_nbytes:
            raise CapacityError(f"only {moved} bytes of an object were moved; is the disk full?")

    def _sync(self, number: int) -> None:
        self._with_file(number, os.fdatasync)

    def _forget(self, number: int) -> None:
        self._with_file(number, lambda f: os.posix_fadvise(f, 0, 0, os.POSIX_FADV_DONTNEED))

    def _with_file(self, number: int, work: Callable[[int], None]) -> None:
        file = self._file(number)
        if not file.exists():
            return
        descriptor = os.open(file, os.O_RDONLY)
        try:
            work(descriptor)
        finally:
            os.close(descriptor)

    def _file(self, number: int) -> Path:
        return self._directory / f"{number:08x}"

    def _segments(self, page: int) -> list[npt.NDArray[np.uint8]]:
        layout = self._pool.layout
        every = [(layer, k) for layer in range(layout.layers) for k in range(len(layout.segments))]
        return [self._pool.segment(page, layer, k) for layer, k in every]


def wait_all(futures: list[Future[None]]) -> None:
    """Waits for all; raises the error of the first that failed."""
    for future in futures:
        future.result(timeout=_WAIT_S)
