"""The object store: named KV objects on NVMe SSDs or files, moved layer by layer.

    with tutti.open("pool.tutti", layout=layout, capacity="8GiB") as store:
        pool = store.allocate_pool(pages=256)
        store.put(keys, pages).wait()
        n = store.match(keys)
        ticket = store.load(keys[:n], pages[:n])
        ticket.wait_layer(0)

This is the only file that joins KV (layouts, keys, index) and gio_uring (engine, controllers).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from tutti.block_io import BlockIo
from tutti.core import Core, StoreConfig
from tutti.errors import (
    CapacityError,
    ConfigError,
    DeviceTimeout,
    KeySizeError,
    PoolExists,
    PoolMismatch,
    PoolNotFound,
    TuttiError,
)
from tutti.geometry import Geometry
from tutti.gio_uring.controller import NativeController
from tutti.gio_uring.controller_file import FileController, allocate_file
from tutti.gio_uring.engine import Engine
from tutti.gio_uring.memory import DmaRegion
from tutti.host_pool import HostPool
from tutti.keys import KEY_NBYTES, as_keys
from tutti.layout import KVLayout
from tutti.loader import Loader
from tutti.medium import Superblock
from tutti.members import Members
from tutti.reclaim import Reclaimer
from tutti.recovery import recover, write_snapshots
from tutti.tickets import LoadTicket, PutTicket
from tutti.units import parse_nbytes
from tutti.writer import PutRequest, Writer

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
Keys = npt.NDArray[np.uint8] | Sequence[bytes]

#: Stores whose device could not be stopped: their memory is kept until the process ends.
_STUCK: list[ObjectStore] = []


class ObjectStore:
    """An open pool.  Thread-safe; use it as a context manager or call ``close``.

    Made by ``open`` for files, or directly over any controller whose namespaces hold a pool.
    """

    def __init__(
        self,
        controller: NativeController,
        names: Sequence[str],
        *,
        config: StoreConfig | None = None,
        engine: Engine | None = None,
        degraded: bool = False,
    ) -> None:
        """Opens the pool on the namespaces of ``controller``, which the store then owns.

        names: what messages call the namespaces.  degraded: see ``open``.
        """
        self.controller = controller
        self.config = config or StoreConfig()
        self._regions: dict[int, list[DmaRegion]] = {}
        self._pools: list[HostPool] = []
        self._closed = False
        self.engine = engine or Engine(controller)
        self._io = BlockIo(self.engine, timeout_s=self.config.timeout_s)
        self._parts: list[BlockIo | Reclaimer | Writer | Loader] = [self._io]
        try:
            self.members = Members.open(self._io, self.engine, names, degraded=degraded)
            clean, found_as = self.members.clean, list(self.members.superblocks)
            self.members.mark_open(self.members.next_sequence)
            self._core = Core(self.engine, self.members, self.config)
            self._reclaimer = Reclaimer(self._core)
            self._parts.append(self._reclaimer)
            self._writer = Writer(self._core, self._reclaimer)
            self._parts.append(self._writer)
            self._loader = Loader(self._core, self._reclaimer)
            self._parts.append(self._loader)
        except BaseException:
            self._shut_down_failed()
            raise
        self._recovery = threading.Thread(
            target=self._recover, args=(found_as, clean), name="tutti-recovery", daemon=True
        )
        self._recovery.start()
        if clean:
            self.wait_recovered(self.config.timeout_s * 4)

    @property
    def layout(self) -> KVLayout:
        """The KV layout of the pool."""
        return self.members.layout

    @property
    def geometry(self) -> Geometry:
        """Where everything lies."""
        return self.members.geometry

    def register(self, pool: HostPool) -> HostPool:
        """Makes engine memory known, so that ``put`` and ``load`` may name its pages.

        Raises PoolMismatch when its layout is not the pool's.
        """
        if pool.layout != self.layout:
            raise PoolMismatch(
                f"the memory holds {pool.layout.to_json()}, the pool {self.layout.to_json()}; "
                "open a pool of the memory's layout"
            )
        regions: list[DmaRegion] = []
        try:
            for address, nbytes in pool.buffers:
                regions.append(self.controller.register((address, nbytes)))
        except BaseException:
            for region in regions:
                region.close()
            raise
        self._regions[id(pool)] = regions
        self._pools.append(pool)
        return pool

    def unregister(self, pool: HostPool) -> None:
        """Forgets engine memory.  No put or load of it may be under way."""
        if pool not in self._pools:
            raise ConfigError("this memory is not registered with the store")
        if not self._core.wait_quiet(self.config.timeout_s):
            raise DeviceTimeout("transfers are still under way; the memory stays registered")
        self._pools.remove(pool)
        for region in self._regions.pop(id(pool)):
            region.close()

    def allocate_pool(
        self, pages: int, *, order: str | None = None, hugepages: bool = True
    ) -> HostPool:
        """Fresh engine memory of ``pages`` pages, registered; see HostPool.allocate."""
        return self.register(
            HostPool.allocate(self.layout, pages, order=order, hugepages=hugepages)
        )

    def match(self, keys: Keys, *, pin: bool = False) -> int:
        """How many of ``keys``, from the first on without a gap, are in the pool.

        keys: uint8 (n, 16), or a list of 16-byte strings, in the order of the chain.
        pin: keep what was found from eviction during the next ``pin_lookups`` look-ups.
        Answers 0 while recovery runs.  Raises KeySizeError.
        """
        array = as_keys(keys)
        core = self._core
        with core.lock:
            core.check_open()
            if not core.ready:
                return 0
            found = core.index.match(array, pin=pin)
            core.counters.lookups += 1
            core.counters.looked_up += len(array)
            core.counters.hits += found.size
            return int(found.size)

    def put(
        self,
        keys: Keys,
        pages: npt.ArrayLike,
        *,
        pool: HostPool | None = None,
        parent: bytes | None = None,
        depth: int = 0,
    ) -> PutTicket:
        """Starts to store pages under keys; keys that are there already are left alone.

        keys: as for ``match``, each the successor of the one before; ``parent`` precedes the
        first and has ``depth - 1`` pages before it.  pages: page numbers (n,) in ``pool``, which
        may be left out when only one is registered; they must not change before the ticket is
        done.  What does not fit because everything is in use is dropped, and counted.
        Raises KeySizeError, PageRangeError, ConfigError, PoolClosed; the ticket tells the rest.
        """
        array, memory = as_keys(keys), self._pool(pool).memory
        numbers = memory.check_pages(pages)
        _check_lengths(array, numbers)
        if parent is not None and len(parent) != KEY_NBYTES:
            raise KeySizeError(f"the parent key has {len(parent)} bytes, not {KEY_NBYTES}")
        if depth < 0:
            raise ConfigError(f"depth is {depth}; it counts the pages before the first key")
        self._core.wait_ready(self.config.timeout_s)
        return self._writer.put(PutRequest(array, numbers, memory, parent, depth))

    def load(self, keys: Keys, pages: npt.ArrayLike, *, pool: HostPool | None = None) -> LoadTicket:
        """Starts to read objects into pages; layers become ready one after another.

        keys, pages, pool: as for ``put``.  Raises KeyMissing unless every key is in the pool.
        """
        array, memory = as_keys(keys), self._pool(pool).memory
        numbers = memory.check_pages(pages)
        _check_lengths(array, numbers)
        self._core.wait_ready(self.config.timeout_s)
        return self._loader.load(array, numbers, memory)

    def clear(self, *, deallocate: bool = True) -> None:
        """Forgets every object; durable on return.

        deallocate: also tells the medium that the space holds nothing (DSM deallocate; on files
        holes are punched, and the file system may give the space to others).
        Waits for what is under way; raises DeviceTimeout when that does not end.
        """
        core = self._core
        core.wait_ready(self.config.timeout_s)
        with core.lock:
            core.check_open()
            if not core.wait_quiet(self.config.timeout_s):
                raise DeviceTimeout("transfers are still under way; nothing was cleared, try again")
            self.members.new_epoch()
            held = core.index.clear()
            if held.size:
                core.allocator.free(held)
            core.changed.notify_all()
            if deallocate:
                self._deallocate()

    def wait_recovered(self, timeout_s: float = 600.0) -> None:
        """Waits until recovery is done.  Raises what broke it, or DeviceTimeout."""
        self._core.wait_ready(timeout_s)

    @property
    def recovered(self) -> bool:
        """Whether recovery is done: before, every look-up misses."""
        return self._core.ready

    def stats(self) -> dict[str, Any]:
        """Counters since the pool was opened, and how full it is."""
        core = self._core
        engine = self.engine.stats()
        with core.lock:
            counts = {state.name.lower(): n for state, n in core.index.counts().items()}
            counters = dict(vars(core.counters))
        payload = counters["payload_written_nbytes"]
        runs = counters["load_runs"]
        return {
            **counters,
            "slots": counts,
            "capacity_objects": core.index.slots,
            "free_objects": core.allocator.free_slots,
            "mean_run_length": counters["loaded"] / runs if runs else 0.0,
            "bytes_read": int(engine.bytes_read),
            "bytes_written": int(engine.bytes_written),
            "bytes_written_per_byte_stored": engine.bytes_written / payload if payload else 0.0,
            "commands": int(engine.commands),
            "timeouts": int(engine.timeouts),
            "engine_cpu_s": engine.thread_cpu_ns / 1e9,
            "digest_cpu_s": engine.digest_ns / 1e9,
            "index_nbytes_per_object": core.index.nbytes_per_slot,
        }

    def close(self, timeout_s: float | None = None) -> None:
        """Ends what is under way, writes the snapshots and marks the pool clean.

        Raises DeviceTimeout when the device does not let go: the pool is then left unclean.
        """
        if self._closed:
            return
        self._closed = True
        timeout_s = self.config.timeout_s if timeout_s is None else timeout_s
        core = self._core
        with core.lock:
            core.closing = True
            core.changed.notify_all()
        self._recovery.join(timeout_s)
        quiet = core.wait_quiet(timeout_s)
        try:
            if quiet and core.ready:
                self._mark_clean()
        finally:
            self._shut_down(timeout_s)

    def __enter__(self) -> ObjectStore:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _recover(self, found_as: Sequence[Superblock | None], clean: bool) -> None:
        core = self._core
        try:
            recover(core, self._reclaimer, found_as, proven=clean)
        except BaseException as error:
            with core.lock:
                core.failure = error
                core.changed.notify_all()
            if not isinstance(error, TuttiError):
                raise

    def _mark_clean(self) -> None:
        core = self._core
        snapshots = write_snapshots(core)
        self._io.flush(self.members.nsids())
        self.members.mark_clean(core.sequence, snapshots)

    def _shut_down(self, timeout_s: float) -> None:
        try:
            self.engine.close(timeout_s)
        except DeviceTimeout:
            _STUCK.append(self)  # the device may still write into what this object holds
            raise
        for part in self._parts:
            part.close()
        for pool in list(self._pools):
            for region in self._regions.pop(id(pool)):
                region.close()
        self._pools.clear()
        self.controller.close()

    def _shut_down_failed(self) -> None:
        """Undoes an opening that failed; the controller stays the caller's."""
        self.engine.close(self.config.timeout_s)
        for part in self._parts:
            part.close()

    def _pool(self, pool: HostPool | None) -> HostPool:
        if pool is not None:
            if pool not in self._pools:
                raise ConfigError("this memory is not registered; call store.register(pool) first")
            return pool
        if len(self._pools) != 1:
            raise ConfigError(
                f"{len(self._pools)} pools of memory are registered; register one, or say which "
                "with pool="
            )
        return self._pools[0]

    def _deallocate(self) -> None:
        geometry, members = self.geometry, self.members
        start = geometry.groups_offset // geometry.lba_nbytes
        nlb = geometry.groups * geometry.layers * geometry.layer_stride_nlb
        step = 2**31
        nsids = np.array(members.nsids(), np.uint32)
        for offset in range(0, nlb, step):
            count = np.full(nsids.size, min(step, nlb - offset))
            slba = np.full(nsids.size, start + offset)
            job = self.engine.deallocate(slba, nsids, count)
            if not job.wait_released(self.config.timeout_s * 4):
                raise DeviceTimeout("the medium did not answer a deallocate; the pool is cleared")


def open(
    paths: Paths,
    layout: KVLayout | None = None,
    capacity: int | str | None = None,
    *,
    verify: str = "always",
    durability: str = "process",
    executor: str = "auto",
    degraded: bool = False,
    config: StoreConfig | None = None,
) -> ObjectStore:
    """Opens a pool, formatting it first when it does not exist and ``capacity`` is given.

    paths: one path, or several members over which the pool is striped, in a fixed order.
    layout: what the pool must hold; left out, whatever it holds.
    capacity: total size of a new pool, as bytes or "64GiB".
    verify, durability: see StoreConfig.  executor: "auto", "uring" or "threads".
    degraded: accept missing members; their objects are misses.
    Raises PoolNotFound, PoolMismatch, PoolInUse, PoolCorrupt, MemberMissing, CapacityError and
    others of tutti.errors.
    """
    names = _names(paths)
    if not any(os.path.exists(name) for name in names):
        if capacity is None or layout is None:
            raise PoolNotFound(
                f"{names[0]} does not exist; give layout and capacity to format a new pool"
            )
        format(names, layout, capacity)
    config = config or StoreConfig(verify=verify, durability=durability)
    controller = FileController(names, executor=executor)
    try:
        store = ObjectStore(controller, names, config=config, degraded=degraded)
    except BaseException:
        controller.close()
        raise
    if layout is not None and layout != store.layout:
        found = store.layout.to_json()
        store.close()
        raise PoolMismatch(
            f"{names[0]} holds {found}, not {layout.to_json()}; open it with that layout, or "
            "format another pool"
        )
    return store


def format(
    paths: Paths,
    layout: KVLayout,
    capacity: int | str,
    *,
    force: bool = False,
    prewrite: bool = False,
    progress: Any = None,
) -> Geometry:
    """Makes a new, empty pool in files of ``capacity`` bytes in all.

    force: overwrite files that exist.  prewrite: write them once, which spares the first puts
    their journal commits; ``progress(done, total)`` is called in bytes.
    Raises PoolExists, CapacityError (also for a full disk), LayoutError, PoolInUse.
    """
    names = _names(paths)
    nbytes = parse_nbytes(capacity)
    geometry = Geometry.plan(layout, nbytes // len(names), members=len(names))
    for name in names:
        if os.path.exists(name) and not force:
            raise PoolExists(f"{name} exists; open it, or format with force to lose what it holds")
    made: list[str] = []
    try:
        for name in names:
            if not os.path.exists(name):
                made.append(name)
            allocate_file(name, geometry.member_nbytes, prewrite=prewrite, progress=progress)
        _write_format(names, layout, geometry)
    except BaseException:
        for name in made:
            if os.path.exists(name):
                os.unlink(name)
        raise
    return geometry


def _write_format(names: Sequence[str], layout: KVLayout, geometry: Geometry) -> None:
    with FileController(names) as controller:
        engine = Engine(controller)
        io = BlockIo(engine)
        try:
            Members.format(io, engine, names, layout, geometry)
        finally:
            io.close()
            engine.close()


def _names(paths: Paths) -> list[str]:
    if isinstance(paths, (str, os.PathLike)):
        return [os.fspath(paths)]
    names = [os.fspath(path) for path in paths]
    if not names:
        raise ConfigError("give at least one path")
    return names


def _check_lengths(keys: npt.NDArray[np.uint8], pages: npt.NDArray[np.uint32]) -> None:
    if len(keys) != pages.size:
        raise ConfigError(f"{len(keys)} keys and {pages.size} pages; give one page per key")


__all__ = ["CapacityError", "ObjectStore", "format", "open"]
