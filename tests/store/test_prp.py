"""Stores on drives without SGLs: what their commands cannot name is refused before any transfer."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from memory_controller import MemoryController

from store.pools import LAYOUT, fill, names, some_keys
from tutti.base.units import MiB
from tutti.errors import Unsupported
from tutti.gio_uring.engine import Engine
from tutti.gio_uring.memory import HostBuffer
from tutti.medium.geometry import Geometry
from tutti.medium.layout import KVLayout
from tutti.memory.host_memory import HostMemory
from tutti.pool.block_io import BlockIo
from tutti.pool.members import Members
from tutti.store import ObjectStore
from tutti.transfers.store_config import StoreConfig

PAGES = 4
MLA = KVLayout.mla(5, 512, 64, 16, "bfloat16", model="test-model")


def opened(layout: KVLayout, lba_nbytes: int = 4096) -> ObjectStore:
    geometry = Geometry(layout.layers, layout.segments, lba_nbytes, group_slots=4, groups=4)
    nbytes = -(-geometry.member_nbytes // MiB) * MiB
    controller = MemoryController([nbytes], lba_nbytes=lba_nbytes)
    engine = Engine(controller, use_sgl=False)
    io = BlockIo(engine)
    Members.format(io, engine, names(1), layout, geometry)
    io.close()
    return ObjectStore(controller, names(1), config=StoreConfig(timeout_s=5.0), engine=engine)


@pytest.fixture
def store() -> Iterator[ObjectStore]:
    with opened(LAYOUT) as made:
        yield made


def check(store: ObjectStore, pool: HostMemory, rng: np.random.Generator) -> None:
    """Pages are put, from the last to the first, and loaded to others."""
    content, keys = fill(pool, range(PAGES), rng), some_keys(rng, PAGES)
    assert store.put(keys, np.arange(PAGES)[::-1], memory=pool).wait(5).stored == PAGES
    store.load(keys, np.arange(PAGES, 2 * PAGES), memory=pool).wait(5)
    assert [pool.read(page) for page in range(PAGES, 2 * PAGES)] == content[::-1]


def test_segments_of_whole_pages(store: ObjectStore, rng: np.random.Generator) -> None:
    check(store, store.allocate_memory(2 * PAGES), rng)


def test_one_segment_of_whole_blocks(rng: np.random.Generator) -> None:
    """Each slice has a command of its own, wherever it begins."""
    buffer = HostBuffer(2 * PAGES * MLA.object_nbytes + 4096)
    with opened(MLA, 512) as store:
        check(store, store.allocate_memory(2 * PAGES), rng)
        inside = (buffer.address + 12, buffer.nbytes - 12)
        check(store, store.register(HostMemory.from_buffer(MLA, inside, 2 * PAGES)), rng)
        odd = HostMemory.from_buffer(MLA, (buffer.address + 2, buffer.nbytes - 2), 2 * PAGES)
        with pytest.raises(Unsupported, match="no SGLs"):
            store.register(odd)


def test_memory_that_begins_inside_of_a_page(store: ObjectStore) -> None:
    buffer = HostBuffer(PAGES * LAYOUT.object_nbytes + 4096)
    inside = (buffer.address + 512, buffer.nbytes - 512)
    with pytest.raises(Unsupported, match="no SGLs"):
        store.register(HostMemory.from_buffer(LAYOUT, inside, PAGES))
    store.register(HostMemory.from_buffer(LAYOUT, buffer, PAGES))


def test_segments_that_end_inside_of_a_page() -> None:
    with opened(MLA) as store, pytest.raises(Unsupported, match="18432 bytes"):
        store.allocate_memory(PAGES)
