"""Peers without SGLang: the store itself with host memory, and a file per page."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile
from pathlib import Path

import numpy as np

import tutti
from tutti.bench.peers.peer import BATCH_PAGES, LAYERS, Peer, PeerPlan
from tutti.bench.peers.same_memory import Kept
from tutti.bench.shape import KvPageShape
from tutti.bench.stamps import Stamps, numbered_keys
from tutti.errors import ChecksumMismatch, MediumError
from tutti.gio_uring.memory import address_of
from tutti.memory.host_memory import HostMemory
from tutti.store import ObjectStore

_WAIT_S = 120.0
_THREADS = 4


class PlainPeer(Peer):
    """A peer with pages in ordinary memory, whose content stays and whose names change."""

    def __init__(self, plan: PeerPlan) -> None:
        self._plan = plan
        shape = KvPageShape(LAYERS, plan.page_nbytes // LAYERS)
        self._layout = shape.layout(plan.page_tokens).token_major()
        self._memory = HostMemory.allocate(
            self._layout, BATCH_PAGES, hugepages=plan.host_pages == "thp"
        )
        self._stamps = Stamps(self._memory)
        self._pages = np.arange(BATCH_PAGES)
        self._contents = numbered_keys(self._pages)
        self._stamps.fill(self._pages, self._contents)

    def memory(self) -> tuple[int, int]:
        """All pages are one buffer."""
        return address_of(self._memory.owner)

    def prepare_store(self, batch: int) -> None:
        """Nothing: every batch holds the same."""

    def prepare_load(self, batch: int) -> None:
        """Wipes the beginning and the end of every page."""
        for page in range(BATCH_PAGES):
            for k in range(len(self._layout.segments)):
                segment = self._memory.segment(page, 0, k)
                segment[:4096] = 0
                segment[-4096:] = 0

    def check(self, batch: int) -> None:
        """Raises ChecksumMismatch for a page that is not what was stored."""
        wrong = int(np.count_nonzero(self._stamps.wrong(self._pages, self._contents)))
        if wrong:
            raise ChecksumMismatch(f"{wrong} pages of batch {batch} hold wrong bytes")


class StorePeer(PlainPeer):
    """Tutti's store on one file, with one put or load per batch."""

    def __init__(self, plan: PeerPlan) -> None:
        super().__init__(plan)
        folders = (plan.directory, *plan.others)
        self._paths = [str(Path(folder) / "store.tutti") for folder in folders]
        self._store: ObjectStore | None = None

    def open(self) -> None:
        tutti.format(self._paths, self._layout, self._plan.capacity_nbytes)
        config = tutti.StoreConfig(eviction="lru")
        self._store = tutti.open(self._paths, self._layout, config=config)
        self._store.register(self._memory)

    def close(self) -> None:
        self._opened.close()

    def store(self, batch: int) -> None:
        ticket = self._opened.put(_keys(batch), self._pages, memory=self._memory)
        ticket.wait(_WAIT_S)

    def load(self, batch: int) -> None:
        ticket = self._opened.load(_keys(batch), self._pages, memory=self._memory)
        ticket.wait(_WAIT_S)
        if ticket.keys != BATCH_PAGES:
            raise MediumError(f"batch {batch}: only {ticket.keys} pages are stored")

    def exists(self, batches: list[int]) -> int:
        return int(self._opened.match(np.concatenate([_keys(batch) for batch in batches])))

    def kept(self, batch: int) -> Kept:
        return Kept(self._opened, self._memory, _keys(batch))

    @property
    def _opened(self) -> ObjectStore:
        assert self._store is not None, "open() comes first"
        return self._store


class FilesPeer(PlainPeer):
    """A file per page, with threads and O_DIRECT, without checksums."""

    def __init__(self, plan: PeerPlan) -> None:
        super().__init__(plan)
        self._directory = Path(plan.directory)
        self._segments = [
            [self._memory.segment(page, 0, k) for k in range(len(self._layout.segments))]
            for page in range(BATCH_PAGES)
        ]

    def open(self) -> None:
        self._threads = ThreadPoolExecutor(_THREADS)

    def close(self) -> None:
        self._threads.shutdown()

    def store(self, batch: int) -> None:
        self._each(batch, os.O_WRONLY | os.O_CREAT, os.pwritev)

    def load(self, batch: int) -> None:
        self._each(batch, os.O_RDONLY, os.preadv)

    def exists(self, batches: list[int]) -> int:
        files = (self._file(batch, page) for batch in batches for page in range(BATCH_PAGES))
        return sum(1 for _ in takewhile(Path.exists, files))

    def _each(self, batch: int, flags: int, transfer: Callable[..., int]) -> None:
        def move(page: int) -> None:
            descriptor = os.open(self._file(batch, page), flags | os.O_DIRECT, 0o600)
            try:
                moved = transfer(descriptor, self._segments[page], 0)
            finally:
                os.close(descriptor)
            if moved != self._plan.page_nbytes:
                raise MediumError(f"only {moved} bytes of a page were moved; is the disk full?")

        list(self._threads.map(move, range(BATCH_PAGES), timeout=_WAIT_S))

    def _file(self, batch: int, page: int) -> Path:
        return self._directory / f"{batch:06d}-{page:03d}"


def _keys(batch: int) -> np.typing.NDArray[np.uint8]:
    return numbered_keys(np.arange(batch * BATCH_PAGES, (batch + 1) * BATCH_PAGES))
