"""SGLang's real pools and allocator with a TuttiLinker over them, in this process."""

from __future__ import annotations

import functools
import hashlib
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.server_args import ServerArgs
from waiting import wait_until as wait_for

from tutti.integration.sglang.direct.read_ahead import ReadAhead
from tutti.integration.sglang.direct.staging_pages import StagingPages
from tutti.integration.sglang.linker import TuttiLinker

PAGE = 16
LAYERS = 3
PAGES = 64
WAIT_S = 30.0
#: Where pools lie; the tests on a GPU put them there.
DEVICE = "cpu"


@functools.cache
def server_args() -> ServerArgs:
    # The one name for which SGLang looks for no files.
    args = ServerArgs(model_path="dummy", device=DEVICE, page_size=PAGE)
    publish(args, role="test", ranks=SpawnRanks(world_rank=0, dp_rank=None))
    return args


def kv_pool(kind: str) -> Any:
    common = {
        "size": PAGES * PAGE,
        "page_size": PAGE,
        "dtype": torch.bfloat16,
        "layer_num": LAYERS,
        "device": DEVICE,
        "enable_memory_saver": False,
    }
    if kind == "mla":
        return MLATokenToKVPool(**common, kv_lora_rank=256, qk_rope_head_dim=128)
    return MHATokenToKVPool(**common, head_num=4, head_dim=32)


def init_params(pool: Any, **changes: Any) -> CacheInitParams:
    server_args()
    allocator = PagedTokenToKVPoolAllocator(PAGES * PAGE, PAGE, torch.bfloat16, DEVICE, pool, False)
    requests = ReqToTokenPool(
        size=8, max_context_len=2048, device=DEVICE, enable_memory_saver=False
    )
    known = {
        "disable": False,
        "req_to_token_pool": requests,
        "token_to_kv_pool_allocator": allocator,
        "page_size": PAGE,
        "tree_components": (ComponentType.FULL,),
    }
    return CacheInitParams(**{**known, **changes})


class FlatProfile:
    """A machine on which everything takes a little."""

    interference = 4.0

    def engine_us(self, tier: str) -> dict[str, float]:
        return {}

    def layer_us(self, new_tokens: int, prefix_tokens: int) -> float:
        return 100.0

    def decode_us(self, batch: int, context_tokens: int) -> float:
        return 1000.0

    def read_us(self, nbytes: int) -> float:
        return nbytes / 1000

    def write_us(self, nbytes: int) -> float:
        return nbytes / 500


class SlowProfile(FlatProfile):
    """A machine that is believed to write slowly."""

    def write_us(self, nbytes: int) -> float:
        return nbytes / 5


class Rig:
    """One rank's pool and linker.  Options: those of the linker."""

    def __init__(self, folder: Path, kind: str = "mha", **options: Any) -> None:
        self.pool = kv_pool(kind)
        self.params = init_params(self.pool)
        config = {
            "path": str(folder),
            "capacity": "8MiB",
            "load_staging": "2MiB",
            "store_staging": "2MiB",
            "allow_unwatched_weights": True,
            **options,
        }
        self.linker = TuttiLinker(
            server_args(), self.params, components={ComponentType.FULL}, extra_config=config
        )
        self.pool.register_layer_transfer_counter(self.linker.layer_done_counter)

    @property
    def stored_pool(self) -> Any:
        """The pool of KV, with what keeps its pages."""
        return self.linker.stored_pools["kv"]

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *exception: object) -> None:
        self.linker.close()

    def file(self, folder: Path) -> Path:
        (found,) = folder.rglob("*.tutti")
        return found

    def buffers(self, layer: int) -> list[torch.Tensor]:
        if isinstance(self.pool, MLATokenToKVPool):
            return [self.pool.kv_buffer[layer]]
        return [self.pool.k_buffer[layer], self.pool.v_buffer[layer]]

    def fill(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for layer in range(LAYERS):
            for buffer in self.buffers(layer):
                buffer.copy_(torch.randn(buffer.shape, generator=generator))

    def content(self, pages: Sequence[int], layers: Sequence[int] = range(LAYERS)) -> list[bytes]:
        """Bytes of each page, over the layers."""
        return [
            b"".join(
                buffer[page * PAGE : (page + 1) * PAGE].view(torch.uint8).cpu().numpy().tobytes()
                for layer in layers
                for buffer in self.buffers(layer)
            )
            for page in pages
        ]

    def wipe(self) -> None:
        for layer in range(LAYERS):
            for buffer in self.buffers(layer):
                buffer.zero_()

    def offload(self, names: Sequence[str], pages: Sequence[int]) -> bool:
        return self.linker.offload([transfer(names, pages)])

    def store(self, names: Sequence[str], pages: Sequence[int]) -> bool:
        """Offloads, and waits until it is on the medium: what is copied out completes before."""
        assert self.offload(names, pages)
        try:
            wait_for(lambda: self.linker.num_completed_offloads() == 1)
            assert self.linker.backlog.wait_quiet(WAIT_S)
        except AssertionError as error:
            error.add_note(f"store: {self.stored_pool.store.stats()}")
            raise
        return self.linker.pop_completed_offload()

    def lookup(self, names: Sequence[str], rid: str = "r") -> int:
        lengths = self.linker.lookup(rid, [transfer(names)])
        return max(lengths, default=0)

    def load(self, names: Sequence[str], pages: Sequence[int], rid: str = "r") -> bool:
        return self.linker.load(rid, [transfer(names, pages)])

    def restore(self, names: Sequence[str], pages: Sequence[int], rid: str = "r") -> bool:
        """One batch of one load; False as well if a read-ahead has found that it cannot be had."""
        if not self.load(names, pages, rid):
            return False
        return self.linker.finish_layer_wise_loading(self.linker.start_layer_wise_loading())

    def stored(self, count: int) -> list[bytes]:
        """Fills the pool's memory and stores its first pages; returns their bytes."""
        self.fill(1)
        want = self.content(range(count))
        assert self.store(names(count), range(count))
        return want

    def check_restored(self, keys: Sequence[str], pages: Sequence[int], want: list[bytes]) -> None:
        """Loads pages in one batch, and compares their bytes."""
        assert self.restore(keys, pages)
        assert self.content(pages) == want

    def round_trip(
        self, pages: Sequence[int], to: Sequence[int], ahead: float | None = None
    ) -> None:
        """Pages leave, and come back into others.

        ahead: the share of staging for what a look-up reads before; None for no look-up.
        """
        self.fill(1)
        want, keys = self.content(pages), names(len(pages))
        assert self.store(keys, pages)
        self.wipe()
        if ahead is not None:
            assert self.lookup(names(len(pages) + 2)) == len(pages)
            wait_for(lambda: bool(ahead_pages(self.linker)) == bool(ahead))
        self.check_restored(keys, to, want)


def transfer(names: Sequence[str], pages: Sequence[int] | None = None) -> PoolTransfer:
    indices = None
    if pages is not None:
        rows = [torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages]
        indices = torch.cat(rows) if rows else torch.zeros(0, dtype=torch.int64)
        indices = indices.to(DEVICE)
    return PoolTransfer(name=PoolName.KV, keys=list(names), device_indices=indices)


def names(count: int, salt: str = "") -> list[str]:
    """Page hashes as SGLang writes them."""
    return [hashlib.sha256(f"{salt}/{i}".encode()).hexdigest() for i in range(count)]


def in_use(staging: StagingPages) -> int:
    """Pages that are not free."""
    return staging.pages - staging.free


def kept_ahead(ahead: ReadAhead) -> int:
    """Pages of staging that are kept for requests or batches."""
    with ahead._changed:
        return sum(len(staged.read.keys) for staged in ahead._staged)


def ahead_pages(linker: TuttiLinker) -> int:
    """Pages of all pools that were read ahead."""
    snapshots = [pool.metrics.snapshot() for pool in linker.stored_pools.values()]
    return int(sum(snapshot.get("ahead_pages", 0) for snapshot in snapshots))


def damage(file: Path, seed: int = 0, *, start: int | None = None) -> None:
    """Flips bits all over a pool's file, from its second quarter on: only slices are there."""
    rng = random.Random(seed)
    with file.open("r+b") as medium:
        size = file.stat().st_size
        for offset in range(size // 4096 // 4 * 4096 if start is None else start, size, 1024):
            medium.seek(offset + rng.randrange(512))
            byte = medium.read(1)
            medium.seek(-1, 1)
            medium.write(bytes([byte[0] ^ 0x5A]))
