"""SGLang's own controller over one of its storage backends, on a host pool of Llama-3-8B's shape.

Controller (managers/cache_controller.py of SGLang 0.5.23), host pool and backends are SGLang's own;
only the two calls that move pages run in the caller's thread, so that they can be timed. There is
no request, model or server.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import mmap
import os
import threading
from collections.abc import Callable
from functools import cache
from typing import Any

from tutti.bench.peers.peer import BATCH_PAGES, HEAD_DIM, HEADS, LAYERS, Peer, PeerPlan
from tutti.bench.peers.same_memory import Kept
from tutti.errors import ChecksumMismatch, MediumError
from tutti.gio_uring.memory import HUGEPAGE_NBYTES, address_of
from tutti.integration.sglang.host.host_pools import COLLAPSING

_MARK_NBYTES = 16
#: Limit of the wait for hugepages: after a refusal a collapse is retried, at last after minutes.
COLLAPSE_S = 60.0


def missing(backend: str) -> str:
    """The reason why a backend cannot run here; empty if it can."""
    if importlib.util.find_spec("sglang") is None:
        return "sglang is not installed"
    if backend == "nixl" and importlib.util.find_spec("nixl") is None:
        return "nixl is not installed"
    return ""


def align_next_mapping(nbytes: int) -> None:
    """Makes the next mapping of this size begin at a large page; Linux maps downwards.

    SGLang's pool is shared memory, and the kernel collapses none of it if it begins elsewhere. The
    pages between it and the mapping above stay reserved.
    """
    with mmap.mmap(-1, nbytes, flags=mmap.MAP_SHARED) as trial:
        address, _ = address_of(trial)
    shift = address % HUGEPAGE_NBYTES
    if shift:
        libc = ctypes.CDLL(None)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *3 * [ctypes.c_int], ctypes.c_long)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        libc.mmap(address + nbytes - shift, shift, 0, flags, -1, 0)


class HiCachePeer(Peer):
    """Pages of one host pool, stored and loaded by SGLang's controller in batches of 128."""

    def __init__(self, plan: PeerPlan, backend: str, **options: Any) -> None:
        _publish_settings()
        import torch

        self._plan = plan
        if plan.host_pages == "collapse":
            align_next_mapping(plan.batch_nbytes)
        self._pool, self._controller = _controller(plan)
        self._indices = torch.arange(BATCH_PAGES * plan.page_tokens)
        self._marks = self._places_of_marks()
        for page in range(BATCH_PAGES):
            self._mark(page, b"\xff" * _MARK_NBYTES)
        self._attach: Callable[[], None] = lambda: self._controller.attach_storage_backend(
            backend, model_name="llama-3-8b", storage_backend_extra_config=options
        )

    def open(self) -> None:
        """Attaches the backend, and waits until its memory was moved to large pages."""
        self._attach()
        for thread in threading.enumerate():
            if thread.name == COLLAPSING:
                thread.join(COLLAPSE_S)

    def close(self) -> None:
        self._controller.detach_storage_backend()

    def memory(self) -> tuple[int, int]:
        """SGLang's host pool."""
        return address_of(self._pool.kv_buffer)

    def prepare_store(self, batch: int) -> None:
        """Every page contains its number."""
        for page in range(BATCH_PAGES):
            self._mark(page, _mark_of(batch, page))

    def store(self, batch: int) -> None:
        """SGLang's backup of one batch.  Raises MediumError when pages were not stored."""
        from sglang.srt.managers.cache_controller import StorageOperation

        operation = StorageOperation(self._indices, [], hash_value=_hashes(batch))
        self._controller._page_backup(operation)
        if operation.completed_tokens != self._indices.numel():
            raise MediumError(
                f"batch {batch}: only {operation.completed_tokens} tokens were stored"
            )

    def prepare_load(self, batch: int) -> None:
        """Clears the page numbers in the pages."""
        for page in range(BATCH_PAGES):
            self._mark(page, bytes(_MARK_NBYTES))

    def load(self, batch: int) -> None:
        """SGLang's prefetch of one batch.  Raises MediumError when pages were not there."""
        from sglang.srt.managers.cache_controller import PrefetchOperation

        operation = PrefetchOperation(f"batch {batch}", [])
        operation.hash_value, operation.host_indices = _hashes(batch), self._indices
        pages = self._controller._page_transfer(operation)
        if pages != BATCH_PAGES:
            raise MediumError(f"batch {batch}: only {pages} of {BATCH_PAGES} pages were loaded")

    def check(self, batch: int) -> None:
        """Raises ChecksumMismatch for a page that is not what was stored."""
        for page in range(BATCH_PAGES):
            found = {ctypes.string_at(place, _MARK_NBYTES) for place in self._marks[page]}
            if found != {_mark_of(batch, page)}:
                raise ChecksumMismatch(f"batch {batch}, page {page} holds wrong bytes")

    def exists(self, batches: list[int]) -> int:
        """SGLang's look-up of many pages in one call."""
        hashes = [page_hash for batch in batches for page_hash in _hashes(batch)]
        return int(self._controller.storage_backend.batch_exists(hashes))

    def kept(self, batch: int) -> Kept:
        """Store and keys of a batch in TuttiHiCacheStorage's KV pool."""
        (behind,) = self._controller.storage_backend._stores.values()
        return Kept(behind.store, behind._pool, behind.keys(_hashes(batch)))

    def _places_of_marks(self) -> list[tuple[int, int]]:
        """Addresses of the first and the last bytes of every page."""
        places = []
        for indices in self._indices.split(self._plan.page_tokens):
            pointers, sizes = self._pool.get_page_buffer_meta(indices)
            places.append((int(pointers[0]), int(pointers[-1]) + int(sizes[-1]) - _MARK_NBYTES))
        return places

    def _mark(self, page: int, mark: bytes) -> None:
        for place in self._marks[page]:
            ctypes.memmove(place, mark, _MARK_NBYTES)


def _publish_settings() -> None:
    """SGLang's settings for one rank on the CPU, without a model."""
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import ServerArgs

    # The only name for which SGLang does not search files.
    publish(
        ServerArgs(model_path="dummy", device="cpu"),
        role="test",
        ranks=SpawnRanks(world_rank=0, dp_rank=None),
    )


def _controller(plan: PeerPlan) -> tuple[Any, Any]:
    import torch
    from sglang.srt.managers.cache_controller import HiCacheController
    from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    size = plan.page_tokens
    device = MHATokenToKVPool(
        size=size,
        page_size=size,
        dtype=torch.bfloat16,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
        head_num=HEADS,
        head_dim=HEAD_DIM,
    )
    allocator = PagedTokenToKVPoolAllocator(size, size, torch.bfloat16, "cpu", device, False)
    pool = MHATokenToKVPoolHost(
        device._mha_buffer_info(),
        1.0,
        0,
        size,
        plan.layout,
        pin_memory=False,
        device_capacity_tokens=size,
        start_layer=0,
        end_layer=LAYERS,
        host_token_capacity=BATCH_PAGES * size,
    )
    pool.kv_buffer.view(torch.uint8).random_(0, 256)
    controller = HiCacheController(
        allocator, pool, size, None, threading.Event(), io_backend="direct"
    )
    return pool, controller


@cache  # SGLang has these before a look-up, so they are not timed
def _hashes(batch: int) -> list[str]:
    return [hashlib.sha256(b"%d %d" % (batch, page)).hexdigest() for page in range(BATCH_PAGES)]


def _mark_of(batch: int, page: int) -> bytes:
    return batch.to_bytes(8, "little") + page.to_bytes(8, "little")
