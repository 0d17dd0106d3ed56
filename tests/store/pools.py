"""Pools on memory controllers, for tests of the store: small, exact, and easy to damage."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from memory_controller import MemoryController

from tutti.gio_uring.engine import Engine
from tutti.medium.geometry import Geometry
from tutti.medium.layout import KVLayout
from tutti.memory.host_memory import HostMemory
from tutti.pool.block_io import opened_io
from tutti.pool.members import Members
from tutti.store import ObjectStore
from tutti.transfers.store_config import StoreConfig

LAYOUT = KVLayout.mha(
    layers=4, kv_heads=2, head_dim=64, page_size=16, dtype="bfloat16", model="test-model"
)
GEOMETRY = Geometry(
    layers=LAYOUT.layers, segments=LAYOUT.segments, lba_nbytes=4096, group_slots=4, groups=8
)

Bytes = npt.NDArray[np.uint8]


def blank_images(geometry: Geometry = GEOMETRY, members: int = 1) -> list[Bytes]:
    """Media of zeros, as large as the members need to be."""
    nbytes = -(-geometry.member_nbytes // (1 << 20)) << 20
    return [np.zeros(nbytes, np.uint8) for _ in range(members)]


def controller_of(images: list[Bytes], *, write_back: bool = False) -> MemoryController:
    """A memory controller whose namespaces begin as copies of `images`."""
    controller = MemoryController([image.size for image in images], write_back=write_back)
    for nsid, image in enumerate(images, 1):
        controller.medium(nsid)[:] = image
    return controller


def images_of(controller: MemoryController, members: int = 1) -> list[Bytes]:
    """What is on the medium now."""
    return [controller.medium(nsid).copy() for nsid in range(1, members + 1)]


def names(count: int) -> list[str]:
    return [f"member{i}" for i in range(count)]


def formatted(
    layout: KVLayout = LAYOUT, geometry: Geometry = GEOMETRY, members: int = 1
) -> list[Bytes]:
    """Images of a new, empty pool."""
    controller = controller_of(blank_images(geometry, members))
    with opened_io(controller) as (engine, io):
        Members.format(io, engine, names(members), layout, geometry)
    images = images_of(controller, members)
    controller.close()
    return images


def opened(
    images: list[Bytes],
    *,
    controller: MemoryController | None = None,
    window_nbytes: int | None = None,
    **config: object,
) -> ObjectStore:
    """A store over copies of the images, or over a controller that has them."""
    controller = controller or controller_of(images)
    config.setdefault("timeout_s", 5.0)
    engine = Engine(controller, window_nbytes=window_nbytes)
    return ObjectStore(
        controller,
        names(controller.info.namespaces),
        config=StoreConfig(**config),  # type: ignore[arg-type]
        engine=engine,
    )


def left_by(store: ObjectStore, *, clean: bool) -> list[Bytes]:
    """What a close leaves behind, or a crash at a quiet moment."""
    assert store._core.wait_quiet(5)
    members = store.members.count
    images = images_of(store.controller, members)
    controller = store.controller
    if clean:
        controller.close, close = lambda: None, controller.close  # type: ignore[method-assign]
        store.close()
        images = images_of(controller, members)
        close()
    else:
        store.close()
    return images


def some_keys(rng: np.random.Generator, n: int) -> Bytes:
    return rng.integers(0, 256, (n, 16), dtype=np.uint8)


def put_some(store: Any, rng: np.random.Generator, n: int, pages: int = 0) -> Bytes:
    """Keys of the first n pages of new memory, which are stored; it has more if `pages` says so."""
    store.allocate_memory(pages or n)
    keys = some_keys(rng, n)
    assert store.put(keys, np.arange(n)).wait(30).stored == n
    return keys


def fill(pool: HostMemory, pages: npt.ArrayLike, rng: np.random.Generator) -> list[bytes]:
    """Random content for pages; returns it."""
    contents = []
    for page in np.asarray(pages).tolist():
        content = rng.bytes(pool.layout.object_nbytes)
        pool.write(page, content)
        contents.append(content)
    return contents
