"""The object store: named KV objects on NVMe SSDs or files, moved layer by layer.

    with tutti.open("pool.tutti", layout=layout, capacity="8GiB") as store:
        memory = store.allocate_memory(pages=256)
        store.put(keys, pages).wait()
        n = store.match(keys)
        ticket = store.load(keys[:n], pages[:n])
        ticket.wait_layer(0)

This is the only file that joins KV (layouts, keys, index) and gio_uring (engine, controllers).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from tutti.errors import (
    CapacityError,
    ConfigError,
    DeviceTimeout,
    KeyMissing,
    PagesInUse,
    PoolMismatch,
    TuttiError,
    system_errors,
)
from tutti.gio_uring.controller import NativeController
from tutti.gio_uring.engine import Engine
from tutti.interrupts import uninterrupted
from tutti.medium.geometry import Geometry
from tutti.medium.keys import as_keys
from tutti.medium.layout import KVLayout
from tutti.medium.superblock import Superblock
from tutti.memory.host_memory import HostMemory
from tutti.placement.index import MISSING, SlotState
from tutti.pool.block_io import BlockIo
from tutti.pool.member_controller import check_owners, open_controller
from tutti.pool.members import Members
from tutti.pool.pool_format import Paths, format, format_missing, member_names
from tutti.process import Owned, finalize
from tutti.scheduler.dispatcher import Dispatcher
from tutti.threads import start_thread
from tutti.transfers.catalogue import Catalogue
from tutti.transfers.coalescer import Coalescer
from tutti.transfers.core import Closable, Core, StoreConfig
from tutti.transfers.loader import Loader
from tutti.transfers.reclaim import Reclaimer
from tutti.transfers.recovery import recover, write_snapshots
from tutti.transfers.residency import Residency
from tutti.transfers.resources import Resources
from tutti.transfers.tickets import LoadTicket, PutTicket
from tutti.transfers.transfer_queue import TransferQueue
from tutti.transfers.writer import PutRequest, Writer, check_lengths

Keys = npt.NDArray[np.uint8] | Sequence[bytes]

_UNDO_S = 60.0  # the longest wait for an interrupted put or load


class ObjectStore(Owned):
    """An open pool.  Thread-safe; use it as a context manager or call ``close``.

    Made by ``open`` for files, or directly over any controller whose namespaces hold a pool.
    """

    @uninterrupted(lambda store, _: store.close())
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
        self._proving = threading.Lock()
        self._prove_from = 0
        self._closed = False
        self.engine = engine or Engine(controller, window_nbytes=self.config.window_nbytes)
        self._resources = Resources(controller, self.engine)
        parts = self._resources.parts
        try:
            self._io = BlockIo(self.engine, timeout_s=self.config.timeout_s)
            parts.append(self._io)
            self.members = Members.open(self._io, self.engine, names, degraded=degraded)
            clean, found_as = self.members.clean, list(self.members.superblocks)
            self.members.mark_open(self.members.next_sequence)
            self._core = self._resources.core = Core(self.engine, self.members, self.config)
            self._reclaimer = Reclaimer(self._core)
            parts.append(self._reclaimer)
            self._writer = Writer(self._core, self._reclaimer)
            parts.append(self._writer)
            self._coalescer = Coalescer(self._core, self._writer)
            parts.append(self._coalescer)
            self._loader = Loader(self._core, self._reclaimer)
            parts.append(self._loader)
            self.catalogue = Catalogue(self._core, self._reclaimer)
            parts.append(self.catalogue)
            self._queue: TransferQueue | None = None
            if self.config.schedule is not None:
                self._queue = TransferQueue(
                    self._core, self._coalescer, self._loader, self.config.schedule
                )
                parts.append(self._queue)
            arguments = (self._core, self._reclaimer, self.catalogue, found_as, clean)
            recovery = threading.Thread(target=_recover, args=arguments, daemon=True)
            self._resources.recovery = recovery
            start_thread(recovery, "tutti-recovery")
            if clean:
                self.wait_recovered(self.config.timeout_s * 4)
            self.residency = Residency(self._core, controller)
        except BaseException as error:
            self._resources.undo_opening(error, self.config.timeout_s)
            raise
        self._dropped = finalize(self, self._resources.drop, self.config.timeout_s)
        self._dropped.atexit = False

    @property
    def layout(self) -> KVLayout:
        """The KV layout of the pool."""
        return self.members.layout

    @property
    def geometry(self) -> Geometry:
        """Where everything lies."""
        return self.members.geometry

    @property
    def scheduler(self) -> Dispatcher | None:
        """What launches puts and loads; post to it what the model computes.  None: all at once."""
        return None if self._queue is None else self._queue.dispatcher

    @uninterrupted(lambda store, memory: store.unregister(memory))
    def register(self, memory: HostMemory) -> HostMemory:
        """Makes engine memory known, so that ``put`` and ``load`` may name its pages.

        Raises PoolMismatch when its layout is not the pool's.
        """
        if memory.layout != self.layout:
            raise PoolMismatch(
                f"the memory holds {memory.layout.to_json()}, the pool {self.layout.to_json()}; "
                "open a pool of the memory's layout"
            )
        self._core.check_open()
        self._resources.add(memory)
        return memory

    def attach(self, part: Closable) -> None:
        """Closes ``part`` with the store: after the engine, before the controller."""
        self._core.check_open()
        self._resources.parts.append(part)

    @uninterrupted()
    def unregister(self, memory: HostMemory) -> None:
        """Forgets engine memory.  No put or load of it may be under way."""
        if memory not in self._resources.memories:
            raise ConfigError("this memory is not registered with the store")
        timeout_s = self.config.timeout_s
        if not (self._core.wait_quiet(timeout_s) and memory.wait_idle(timeout_s)):
            raise DeviceTimeout("transfers are still under way; the memory stays registered")
        self._resources.remove(memory)

    @uninterrupted(lambda store, memory: store.unregister(memory))
    def allocate_memory(
        self, pages: int, *, order: str | None = None, hugepages: bool = True
    ) -> HostMemory:
        """Fresh engine memory of ``pages`` pages, registered; see HostMemory.allocate."""
        return self.register(
            HostMemory.allocate(self.layout, pages, order=order, hugepages=hugepages)
        )

    def match(self, keys: Keys, *, pin: bool | str = False, proven: bool = False) -> int:
        """How many of ``keys``, from the first on without a gap, are in the pool.

        keys: uint8 (n, 16), or a list of 16-byte strings, in the order of the chain.
        pin: keep what was found from eviction during the next ``pin_lookups`` look-ups, as far as
        ``pin_share`` allows.  A name instead of True: until ``unpin`` or its next look-up.
        proven: count only objects that need no verification before they are served; after an
        unclean close see ``prove``.  Answers 0 while recovery runs.  Raises KeySizeError.
        """
        return self._core.match(as_keys(keys), pin=pin, proven=proven)

    def present(
        self, keys: Keys, *, pin: bool | str = False, proven: bool = False
    ) -> npt.NDArray[np.bool_]:
        """Which of ``keys`` are in the pool, each on its own: bool (n,).

        As ``match``, one look-up whatever n is; where not all can be pinned the last ones are.
        """
        return self._core.present(as_keys(keys), pin=pin, proven=proven)

    def unpin(self, name: str | None = None) -> None:
        """Takes back what look-ups pinned by this name, if they did; all pins without one."""
        self._core.unpin(name)

    @uninterrupted(lambda _, ticket: ticket.wait_ended(_UNDO_S))
    def put(
        self,
        keys: Keys,
        pages: npt.ArrayLike,
        *,
        memory: HostMemory | None = None,
        parent: bytes | None = None,
        depth: int = 0,
        ttl_s: float | None = None,
        namespace: str = "",
    ) -> PutTicket:
        """Starts to store pages under keys; keys that are there already are left alone.

        keys: as for ``match``, each the successor of the one before; ``parent`` precedes the
        first and has ``depth - 1`` pages before it.  pages: page numbers (n,) in ``memory``, which
        may be left out when only one is registered; they must not change before the ticket is
        done.  What does not fit because everything is in use is dropped, and counted.  ttl_s: after
        which the objects are removed, in steps of 64 s.  namespace: whose objects they count as.
        Raises KeySizeError, PageRangeError, ConfigError, PoolClosed or DeviceTimeout (no staging).
        """
        paged = self._registered(memory).memory
        request = PutRequest.checked(keys, pages, paged, parent, depth, ttl_s, namespace)
        self.catalogue.watch(ttl_s is not None)
        with self._core.admitted(self.config.timeout_s):
            return (self._queue or self._coalescer).put(request)

    @uninterrupted(lambda _, ticket: ticket.abandon(_UNDO_S))
    def load(
        self,
        keys: Keys,
        pages: npt.ArrayLike,
        *,
        memory: HostMemory | None = None,
        batch: str = "",
    ) -> LoadTicket:
        """Starts to read objects into pages; layers become ready one after another.

        keys, pages, memory: as for ``put``.  batch: by which a step of the model calls for it, see
        ``StepBegan``.  Raises KeyMissing unless every key is in the pool, ConfigError for a page
        that is to hold two objects at once, PagesInUse when it had to be given up half started and
        the device may still write into ``pages``; after any other error nothing does.
        """
        array, paged = as_keys(keys), self._registered(memory).memory
        numbers = check_lengths(array, paged.check_pages(pages))
        if self.config.verify != "off" and np.unique(numbers).size != numbers.size:
            raise ConfigError("a page is named twice; give every key a page of its own")
        with self._core.admitted(self.config.timeout_s):
            if self._queue is None:
                return self._loader.load(array, numbers, paged)
            return self._queue.load(array, numbers, paged, batch)

    @uninterrupted()
    def prove(self, max_objects: int = 64, *, timeout_s: float = 60.0) -> int:
        """Verifies up to ``max_objects`` objects that an unclean close left unproven.

        Intact ones are served from then on, damaged ones are quarantined.  Returns how many were
        read: 0 after a round through the pool.  Raises DeviceTimeout.
        """
        with self._core.admitted(timeout_s), self._proving:
            keys, self._prove_from = self._core.unproven_keys(max_objects, self._prove_from)
            if not len(keys):
                return 0
            memory = HostMemory.allocate(self.layout, len(keys))
            regions = self._resources.register(memory)
            numbers = np.arange(len(keys), dtype=np.uint32)
            settled = True
            try:
                ticket = self._loader.load(keys, numbers, memory.memory)
                settled = ticket.wait_settled(timeout_s)
            except KeyMissing:
                return len(keys)  # one was evicted meanwhile
            except PagesInUse as error:
                settled = error.wait_settled(timeout_s)
            finally:
                for region in regions if settled else ():
                    region.close()
            if not settled:
                self._resources.lose(regions)
                raise DeviceTimeout(
                    f"the objects were not read within {timeout_s:g} s; their memory stays in use"
                )
            return len(keys)

    @uninterrupted()
    def quarantine(self, keys: Keys) -> int:
        """Takes objects out of use permanently, with their slots.  Returns how many."""
        core = self._core
        with core.admitted(self.config.timeout_s), core.lock:
            slots = np.unique(core.index.find(as_keys(keys)))
            slots = slots[slots != MISSING]
            slots = slots[core.index.state[slots] == SlotState.READY]
            self._reclaimer.quarantine(slots)
            return int(slots.size)

    @uninterrupted()
    def clear(self, *, deallocate: bool = True) -> None:
        """Removes every object; durable on return.

        deallocate: also sends DSM deallocate (on files: punches holes).
        Waits for transfers in flight; raises DeviceTimeout.
        """
        core = self._core
        with core.quiesced():
            try:
                self.members.new_epoch()
                if deallocate:
                    core.deallocate()
            except TuttiError as error:
                core.failure = error  # the state of the medium is unknown now
                raise
            with core.lock:
                core.lookup_pins.clear()
                held = core.index.clear()
                if held.size:
                    core.allocator.free(held)

    @uninterrupted()
    def wait_recovered(self, timeout_s: float = 600.0) -> None:
        """Waits until recovery is done.  Raises what broke it, or DeviceTimeout."""
        self._core.wait_ready(timeout_s)

    @property
    def recovered(self) -> bool:
        """Whether recovery is done: before, every look-up misses."""
        return self._core.ready

    def stats(self) -> dict[str, Any]:
        """Counters since the pool was opened, and how full it is."""
        return self._core.stats()

    @uninterrupted()
    def close(self, timeout_s: float | None = None) -> None:
        """Ends what is under way, writes the snapshots and marks the pool clean.

        Raises DeviceTimeout when the device does not let go, and PoolMoved when a file is no longer
        the one under its name: the pool is then left unclean.
        """
        if self._closed:
            return
        self._closed = True
        timeout_s = self.config.timeout_s if timeout_s is None else timeout_s
        core = self._core
        if self._queue is not None:
            self._queue.stop(timeout_s)
        self._coalescer.stop(timeout_s)
        self.catalogue.stop(timeout_s)
        with core.lock:
            core.closing = True
            core.changed.notify_all()
        assert self._resources.recovery is not None, "started with the store"
        self._resources.recovery.join(timeout_s)
        quiet = core.wait_quiet(timeout_s)
        try:
            # What is unproven stays so: a pool that has some is left as a crash leaves it.
            if quiet and core.ready and core.failure is None:
                self._io.flush(self.members.nsids())
                self.controller.check_places()
                if not core.unproven and not core.leave_open:
                    self._mark_clean()
        finally:
            self._dropped.detach()
            self._resources.release(timeout_s)

    def __enter__(self) -> ObjectStore:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _mark_clean(self) -> None:
        core = self._core
        snapshots = write_snapshots(core)
        self._io.flush(self.members.nsids())
        self.members.mark_clean(core.sequence, snapshots)

    def _registered(self, memory: HostMemory | None) -> HostMemory:
        self._core.check_open()
        if memory is not None:
            if memory not in self._resources.memories:
                raise ConfigError(
                    "this memory is not registered; call store.register(memory) first"
                )
            return memory
        memories = self._resources.memories
        if len(memories) == 1:
            return memories[0]
        raise ConfigError(f"{len(memories)} memories are registered; register one, or pass memory=")


@system_errors()
@uninterrupted(lambda _, store: store.close())
def open(
    paths: Paths,
    layout: KVLayout | None = None,
    capacity: int | str | None = None,
    *,
    verify: str | None = None,
    durability: str | None = None,
    executor: str = "auto",
    degraded: bool = False,
    any_owner: bool = False,
    config: StoreConfig | None = None,
) -> ObjectStore:
    """Opens a pool, formatting it first when it does not exist and ``capacity`` is given.

    paths: one path, or several members over which the pool is striped, in a fixed order; or drives
    as "nvme:0000:03:00.0", see docs/vfio.md.  Devices and drives are formatted here only if
    they were labelled for it by ``tutti format --for-server``.
    layout: what the pool must hold; left out, whatever it holds.  That of a new pool names its
    model, see KVLayout.  capacity: total size of a new pool, as bytes or "64GiB".
    verify, durability: see StoreConfig, which ``config`` gives as a whole instead.
    executor: "auto", "uring" or "threads".  degraded: accept missing members; their objects are
    misses.  any_owner: accept files that other users can change, and with them what they serve.
    Raises PoolNotFound, PoolMismatch, PoolInUse, PoolCorrupt, PoolUntrusted, MemberMissing,
    CapacityError and others of tutti.errors.
    """
    names = member_names(paths)
    config = StoreConfig.choose(config, verify=verify, durability=durability)
    format_missing(names, layout, capacity, executor)
    controller = open_controller(names, executor=executor, service_threads=config.service_threads)
    try:
        if not any_owner:
            check_owners(controller)
        store = ObjectStore(controller, names, config=config, degraded=degraded)
    except BaseException:
        with contextlib.suppress(TuttiError):  # a device that is stuck keeps it
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


def _recover(
    core: Core,
    reclaimer: Reclaimer,
    catalogue: Catalogue,
    found_as: Sequence[Superblock | None],
    clean: bool,
) -> None:
    try:
        recover(core, reclaimer, found_as, proven=clean)
        catalogue.recount()
    except BaseException as error:
        with core.lock:
            core.failure = error
            core.changed.notify_all()
        if not isinstance(error, TuttiError):
            raise


__all__ = ["CapacityError", "ObjectStore", "format", "open"]
