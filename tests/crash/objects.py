"""Objects whose content follows from their key, so that any process can tell right from wrong."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from integrity import check_allocator, check_index
from waiting import wait_until

from store.pools import LAYOUT
from tutti.errors import ChecksumMismatch, PoolInUse
from tutti.gio_uring.controller_file import FileController
from tutti.gio_uring.file_creation import allocate_file
from tutti.medium.geometry import Geometry
from tutti.pool.block_io import opened_io
from tutti.pool.members import Members
from tutti.store import ObjectStore

#: How long a pool may stay locked after its owner was killed: the kernel ends its transfers first.
UNLOCK_TIMEOUT_S = 10.0


def content_of(key: bytes) -> bytes:
    return hashlib.shake_128(key).digest(LAYOUT.object_nbytes)


def as_rows(keys: Sequence[bytes]) -> npt.NDArray[np.uint8]:
    return np.frombuffer(b"".join(keys), np.uint8).reshape(-1, 16)


def make_files(paths: Sequence[str], geometry: Geometry) -> None:
    """A new, empty pool of a geometry that is smaller than `tutti.store.format` would plan."""
    for path in paths:
        allocate_file(path, geometry.member_nbytes)
    format_members(paths, geometry)


def format_members(paths: Sequence[str], geometry: Geometry, **options: Any) -> None:
    """Formats files that exist; options of the controller."""
    with FileController(paths, **options) as controller, opened_io(controller) as (engine, io):
        Members.format(io, engine, paths, LAYOUT, geometry)


def when_unlocked(opening: Callable[[], ObjectStore]) -> ObjectStore:
    """Opens a pool whose last owner was killed a moment ago."""
    deadline_s = time.monotonic() + UNLOCK_TIMEOUT_S
    while time.monotonic() < deadline_s:
        try:
            return opening()
        except PoolInUse:
            time.sleep(0.01)
    return opening()


def put_objects(store: ObjectStore, keys: Sequence[bytes]) -> None:
    """Stores new objects, from memory that is registered for that."""
    memory = store.allocate_memory(len(keys), hugepages=False)
    try:
        for page, key in enumerate(keys):
            memory.write(page, content_of(key))
        result = store.put(as_rows(keys), np.arange(len(keys)), memory=memory).wait(20)
        assert result.stored == len(keys), f"{result}, slots {store.stats()['slots']}"
    finally:
        store.unregister(memory)


def load_present(store: ObjectStore, keys: Sequence[bytes]) -> tuple[set[bytes], set[bytes]]:
    """Which of `keys` load and which are there but damaged; fails on a key with other bytes."""
    present = [key for key in keys if store.match(as_rows([key])) == 1]
    if not present:
        return set(), set()
    pool = store.allocate_memory(len(present), hugepages=False)
    ticket = store.load(as_rows(present), np.arange(len(present)))
    try:
        ticket.wait(20)
    except ChecksumMismatch:
        assert ticket.wait_settled(20), "a load does not settle"
    damaged = {present[row] for row in ticket.failed().tolist()}
    for page, key in enumerate(present):
        if key not in damaged:
            assert pool.read(page) == content_of(key), f"key {key.hex()} serves other bytes"
    assert store._core.wait_quiet(20), "a load leaves something in flight"
    store.unregister(pool)
    return set(present) - damaged, damaged


def check_books(store: ObjectStore) -> None:
    """Index and allocator agree with themselves and with each other.

    Afterwards nothing is evicted until something is put, or looked up with a pin: the room that
    those expect is made in the background, and does not count as in flight before it begins.
    """
    core = store._core
    wait_until(lambda: not core.expected, "the room that was expected is not made")
    with core.lock:
        assert core.wait_quiet(20), "something stays in flight"
        check_index(core.index)
        check_allocator(core.allocator)
        free = core.index.state <= 1
        for _, kept in store._reclaimer.faults.paused.values():  # free, and not to be used now
            free[kept] = False
        assert np.array_equal(core.allocator.is_free(np.arange(core.index.slots)), free)


def live(store: ObjectStore, keys: Sequence[bytes], life: int) -> None:
    """Life 0 stores objects, life 1 clears and deletes them; both load all of them, by layers."""
    rows, pages = as_rows(keys), np.arange(len(keys))
    pool = store.allocate_memory(2 * len(keys), hugepages=False)
    if life == 0:
        for page, key in enumerate(keys):
            pool.write(page, content_of(key))
        assert store.put(rows, pages).wait(30).stored == len(keys)
    assert store.match(rows) == len(keys)
    ticket = store.load(rows, len(keys) + pages)
    for layer in range(LAYOUT.layers):
        ticket.wait_layer(layer, 30)
    ticket.wait(30)
    assert all(pool.read(len(keys) + i) == content_of(key) for i, key in enumerate(keys))
    check_books(store)
    if life == 1:
        store.clear()
        assert store.match(rows) == 0
        given_nbytes = store.stats()["deallocated_nbytes"]
        assert store.put(rows, len(keys) + pages).wait(30).stored == len(keys)
        assert store.catalogue.delete(rows) == len(keys)
        assert store.stats()["deallocated_nbytes"] > given_nbytes > 0


def check_usable(store: ObjectStore, keys: Sequence[bytes]) -> None:
    """New objects can be stored and read back."""
    put_objects(store, keys)
    assert load_present(store, keys) == (set(keys), set())
