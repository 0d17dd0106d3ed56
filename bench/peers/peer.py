"""Interface of a compared system: stores and loads batches of pages of Llama-3-8B's shape."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass

from tutti.bench.peers.same_memory import Kept
from tutti.errors import Unsupported

# Llama-3-8B: 32 layers, 8 heads of KV, 128 wide, 2 bytes (its config.json on huggingface.co).
LAYERS, HEADS, HEAD_DIM, DTYPE_NBYTES = 32, 8, 128, 2

#: SGLang's batches (STORAGE_BATCH_SIZE in mem_cache/hicache_storage.py, 0.5.23).
BATCH_PAGES = 128


@dataclass(frozen=True)
class PeerPlan:
    """Parameters of all peers: page size, location, number of batches that are kept.

    layout: of SGLang's host pool.  batches: number of stored batches; the oldest is removed.
    host_pages: how memory gets large pages; "": by each peer itself.  others: more directories,
    for more members of Tutti's pools.
    """

    directory: str
    page_tokens: int
    layout: str
    batches: int
    host_pages: str = ""
    others: tuple[str, ...] = ()

    @property
    def page_nbytes(self) -> int:
        """Bytes of K and V of one page over all layers."""
        return 2 * LAYERS * self.page_tokens * HEADS * HEAD_DIM * DTYPE_NBYTES

    @property
    def batch_nbytes(self) -> int:
        """Bytes of one batch."""
        return BATCH_PAGES * self.page_nbytes

    @property
    def kept_nbytes(self) -> int:
        """Bytes that every peer keeps on disk; the disk's host caches a part of them.

        A load makes its batch recent. So a pool that evicts the least recently used also keeps old
        batches, which are not loaded again.
        """
        return (2 * self.batches - 1) * self.batch_nbytes

    @property
    def capacity_nbytes(self) -> int:
        """Capacity of a pool with `eviction="lru"`, which keeps some slots free."""
        return self.kept_nbytes + self.batch_nbytes // 2

    def to_json(self) -> str:
        """For the command line."""
        return json.dumps(asdict(self))


class Peer(ABC):
    """Stores and loads the same pages repeatedly, under different names.  Not thread-safe."""

    @abstractmethod
    def memory(self) -> tuple[int, int]:
        """(address, nbytes) of the memory of its pages."""

    @abstractmethod
    def open(self) -> None:
        """Opens the measured system; memory that it takes from now on is counted."""

    @abstractmethod
    def close(self) -> None:
        """Closes it."""

    @abstractmethod
    def prepare_store(self, batch: int) -> None:
        """Whatever is not timed."""

    @abstractmethod
    def store(self, batch: int) -> None:
        """Stores all pages of a batch."""

    @abstractmethod
    def prepare_load(self, batch: int) -> None:
        """Whatever is not timed."""

    @abstractmethod
    def load(self, batch: int) -> None:
        """Loads all pages of a batch."""

    @abstractmethod
    def check(self, batch: int) -> None:
        """Raises ChecksumMismatch for wrong bytes after a load."""

    @abstractmethod
    def exists(self, batches: list[int]) -> int:
        """Looks all pages of these batches up in one call: how many are stored, from the first."""

    def kept(self, batch: int) -> Kept:
        """Location of a batch in Tutti's store.  Raises Unsupported for other peers."""
        raise Unsupported(f"{type(self).__name__} has no store of Tutti's; ask another peer")
