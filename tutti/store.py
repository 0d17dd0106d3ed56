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
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from tutti.base.callbacks import check_not_called
from tutti.base.checks import belongs_in, instance, one_of, optional, takes
from tutti.base.interrupts import uninterrupted
from tutti.base.numa import on_node
from tutti.base.process import Owned, finalize
from tutti.base.threads import start_thread
from tutti.errors import (
    ConfigError,
    DeviceTimeout,
    KeyMissing,
    PagesInUse,
    PoolMismatch,
    TuttiError,
    system_errors,
)
from tutti.gio_uring.controller import NativeController
from tutti.gio_uring.controller_file import EXECUTORS
from tutti.gio_uring.engine import Engine
from tutti.gio_uring.iocb import PagedMemory
from tutti.interface import UNDO_S, Keys, Store
from tutti.medium.keys import as_keys
from tutti.medium.layout import KVLayout, differences
from tutti.memory.host_memory import HostMemory
from tutti.placement.index import MISSING, SlotState
from tutti.pool.block_io import BlockIo
from tutti.pool.member_controller import check_owners, open_controller
from tutti.pool.members import Members
from tutti.pool.places import shared_node
from tutti.pool.pool_format import Paths, format, format_missing, pool_members, warn_of_capacity
from tutti.profiles import at_open
from tutti.profiles.at_open import AUTO, OFF, ProfileChoice, check_choice, find_schedule
from tutti.scheduler.dispatcher import Schedule
from tutti.transfers.catalogue import Catalogue
from tutti.transfers.core import Closable, Core
from tutti.transfers.loader import Loader
from tutti.transfers.put_request import PutRequest
from tutti.transfers.reclaim import Reclaimer
from tutti.transfers.recovery import recover, write_snapshots
from tutti.transfers.residency import Residency
from tutti.transfers.resources import Resources
from tutti.transfers.store_config import StoreConfig
from tutti.transfers.tickets import PutTicket
from tutti.transfers.transfer_queue import TransferQueue
from tutti.transfers.writer import Writer

_CLOSE_WAITS = 8  # at most so many waits of timeout_s each are in one close
_PROVE_TRIES = 16  # attempts to read a batch before one of its objects is evicted
#: Settings that ``open`` takes inside a StoreConfig only.
_IN_CONFIG = sorted({field.name for field in fields(StoreConfig)} - {"verify", "durability"})


class ObjectStore(Owned, Store):
    """A pool that this process has opened.

    Made by ``open``, or directly over any controller whose namespaces hold a pool.
    """

    catalogue: Catalogue

    @uninterrupted(lambda store, _: store.close())
    def __init__(
        self,
        controller: NativeController,
        names: Sequence[str],
        *,
        config: StoreConfig | None = None,
        engine: Engine | None = None,
        schedule_of: Callable[[KVLayout], Schedule | None] | None = None,
    ) -> None:
        """Opens the pool on the namespaces of ``controller``, which the store then owns.

        names: of the namespaces, for messages.  schedule_of: returns the schedule for the pool's
        layout; called when the config has none.
        """
        self._controller = controller
        self.config = config or StoreConfig()
        self._proving = threading.Lock()
        self._prove_from = 0
        self._closing, self._closed = threading.Lock(), False
        self._engine = engine or Engine(controller, window_nbytes=self.config.window_nbytes)
        self._resources = Resources(controller, self.engine)
        parts = self._resources.parts
        try:
            self._io = BlockIo(self.engine, timeout_s=self.config.timeout_s)
            parts.append(self._io)
            degraded = self.config.degraded
            self.members = Members.open(self._io, self.engine, names, degraded=degraded)
            self.layout, self.geometry = self.members.layout, self.members.geometry
            if schedule_of is not None and self.config.schedule is None:
                self.config = replace(self.config, schedule=schedule_of(self.layout))
            clean, found_as = self.members.clean, list(self.members.superblocks)
            self._core = self._resources.core = Core(self.engine, self.members, self.config)
            self._reclaimer = Reclaimer(self._core)
            parts.append(self._reclaimer)
            self._writer = Writer(self._core, self._reclaimer)
            parts.append(self._writer)
            self._loader = Loader(self._core, self._reclaimer)
            parts.append(self._loader)
            self.catalogue = Catalogue(self._core, self._reclaimer)
            parts.append(self.catalogue)
            self._queue = TransferQueue(
                self._core, self._writer, self._loader, self.config.schedule
            )
            parts.append(self._queue)
            self.residency = Residency(self._core, controller)
            parts.append(self.residency)
            recovering = partial(
                recover,
                self._core,
                self._reclaimer,
                found_as,
                proven=clean,
                before_ready=(self.residency.plan_opening, self.catalogue.recount),
            )
            recovery = threading.Thread(target=_recover, args=(self._core, recovering), daemon=True)
            self._resources.recovery = recovery
            self.members.mark_open(self.members.next_sequence)  # last: what fails leaves it clean
            start_thread(recovery, "tutti-recovery")
            if clean:
                self._core.wait_ready(self.config.timeout_s * 4)
            self._dropped = finalize(self, self._resources.drop, self.config.timeout_s)
            self._dropped.atexit = False
        except BaseException as error:
            self._resources.undo_opening(error, self.config.timeout_s)
            raise

    @property
    def engine(self) -> Engine:
        return self._engine

    @property
    def controller(self) -> NativeController:
        return self._controller

    @uninterrupted(lambda store, memory: store.unregister(memory))
    def register(self, memory: HostMemory) -> HostMemory:
        self._check_new(memory, self._resources.memories)
        self._core.check_open()
        self._core.check_path(memory.memory)
        self._resources.add(memory)
        return memory

    def attach(self, part: Closable) -> None:
        self._core.check_open()
        self._resources.parts.append(part)

    @uninterrupted()
    def unregister(self, memory: HostMemory) -> None:
        timeout_s = self.config.timeout_s
        with self._core.withdrawn(memory.memory, timeout_s):
            self._chosen(memory, self._resources.memories)
            if not memory.wait_idle(timeout_s):
                raise DeviceTimeout("transfers are still under way; the memory stays registered")
            self._resources.remove(memory)
        self.controller.read_page_sizes()

    def match(self, keys: Keys, *, pin: bool | str = False, proven: bool = False) -> int:
        return self._core.match(as_keys(keys), pin=pin, proven=proven)

    def present(
        self, keys: Keys, *, pin: bool | str = False, proven: bool = False
    ) -> npt.NDArray[np.bool_]:
        return self._core.present(as_keys(keys), pin=pin, proven=proven)

    @uninterrupted()
    def unpin(self, name: str | None = None) -> None:
        self._core.unpin(name)

    @uninterrupted(lambda _, ticket: ticket.wait_ended(UNDO_S))
    def put_request(self, request: PutRequest) -> PutTicket:
        """As ``put``, for a request that was checked."""
        return PutTicket(self._queue.put(request))

    @uninterrupted()
    def prove(self, max_objects: int = 64, *, timeout_s: float = 60.0) -> int:
        with self._core.admitted(timeout_s), self._proving:
            start = self._prove_from
            for _ in range(_PROVE_TRIES):
                keys, self._prove_from = self._core.unproven_keys(max_objects, start)
                with contextlib.suppress(KeyMissing):  # one was evicted: choose again
                    self._read_once(keys, timeout_s)
                    return len(keys)
            self._prove_from = start
            raise DeviceTimeout("objects were evicted before they could be verified; try again")

    def _read_once(self, keys: npt.NDArray[np.uint8], timeout_s: float) -> None:
        """Reads unproven objects into temporary memory, which verifies them."""
        if not len(keys):
            return
        memory = HostMemory.allocate(self.layout, len(keys))
        regions = self.controller.register_all(memory.buffers)
        numbers = np.arange(len(keys), dtype=np.uint32)
        settled = True
        try:
            progress = self._queue.load(keys, numbers, memory.memory, "", ahead=True, admit=False)
            settled = progress.wait_settled(timeout_s)
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

    @uninterrupted()
    def quarantine(self, keys: Keys) -> int:
        core = self._core
        with core.admitted(self.config.timeout_s), core.lock:
            slots = np.unique(core.index.find(as_keys(keys)))
            slots = slots[slots != MISSING]
            slots = slots[core.index.state[slots] == SlotState.READY]
            self._reclaimer.quarantine(slots)
            return int(slots.size)

    @uninterrupted()
    def reuse_quarantined(self) -> int:
        """Frees the slots in quarantine, on the medium too.  Returns how many.

        Use it when the drive was repaired, or when the damage had another cause.  A slot that is
        still bad is found by the digests of its next object.  Raises DeviceTimeout.
        """
        core = self._core
        timeout_s = self.config.timeout_s
        with core.admitted(timeout_s), core.lock:
            # A quarantine record that is written late would replace that of the slot's next object.
            if not core.changed.wait_for(lambda: not self._reclaimer.busy, timeout_s):
                raise DeviceTimeout("records are still being written; try again")
            state, pins = core.index.state, core.index.pins
            slots = np.flatnonzero((state == SlotState.QUARANTINED) & (pins == 0))
            slots = slots[np.isin(slots // self.geometry.slots, core.members.present)]
            core.index.set_state(slots, SlotState.VOIDING)
            self._reclaimer.void(slots)
            return int(slots.size)

    @uninterrupted()
    def clear(self, *, deallocate: bool = True) -> None:
        core = self._core
        with core.quiesced("a clear"):
            try:
                self.members.new_epoch()
                if deallocate:
                    core.deallocate()
                with core.lock:
                    core.lookup_pins.clear()
                    core.lookup_pins.reserved = 0
                    held = core.index.clear()
                    if held.size:
                        core.allocator.free(held)
            except BaseException as error:
                core.failure = error  # the state of the medium is unknown now
                raise

    @uninterrupted()
    def wait_recovered(self, timeout_s: float = 600.0) -> None:
        self._core.wait_ready(timeout_s)

    def path_of(self, keys: npt.NDArray[np.uint8]) -> tuple[str, int]:
        blocks, controller = self.residency.groups_of(keys), self.controller
        path = controller.path_of([r.nsid for r in blocks], [r.slba for r in blocks])
        return path, controller.path_changes

    @property
    def recovered(self) -> bool:
        return self._core.ready

    def stats(self) -> dict[str, Any]:
        schedule, scheduler = self.config.schedule, self.scheduler
        stats = {
            **self._core.stats(),
            **self.residency.stats(),
            "recovered": self.recovered,
            "missing_members": self.members.missing,
            "profile": schedule.source if schedule is not None else OFF,
            "scheduler": scheduler.counters() if scheduler is not None else {},
        }
        # The reserve is kept free by eviction; what is quarantined is out of use.
        kept_free = self._reclaimer.reserve_slots + stats["slots"]["quarantined"]
        stats["usable_objects"] = max(0, stats["capacity_objects"] - kept_free)
        for memory in tuple(self._resources.memories):
            stats.update(memory.stats())
        return stats

    @uninterrupted()
    def close(self, timeout_s: float | None = None) -> None:
        if not self._dropped.alive:
            return
        check_not_called()
        timeout_s = self.config.timeout_s if timeout_s is None else timeout_s
        if not self._closing.acquire(timeout=min(_CLOSE_WAITS * timeout_s, threading.TIMEOUT_MAX)):
            raise DeviceTimeout("another thread is still closing the pool; try again")
        try:
            if self._dropped.alive:
                self._end(timeout_s)
        finally:
            self._closing.release()

    def _end(self, timeout_s: float) -> None:
        try:
            if not self._closed:  # otherwise this continues a close that failed
                self._closed = True
                self._settle(timeout_s)
        finally:
            try:
                self._resources.release(timeout_s)
            except DeviceTimeout:
                self._dropped.detach()
                raise
            self._dropped.detach()

    def _settle(self, timeout_s: float) -> None:
        """Ends what is under way, and leaves the pool clean if it can."""
        core = self._core
        self._queue.stop(timeout_s)
        self.catalogue.expiry.stop(timeout_s)
        with core.lock:
            core.closing = True
            core.changed.notify_all()
            core.changed.wait_for(lambda: not core.quiesced_by, timeout_s)
        assert self._resources.recovery is not None, "started with the store"
        self._resources.recovery.join(timeout_s)
        quiet = core.wait_quiet(timeout_s, self._resources.lost_jobs)
        # A pool with unproven objects is not marked clean, so that they stay unproven.
        if quiet and core.ready and core.failure is None:
            self._io.flush(self.members.nsids())
            self.controller.check_places(self.members.nsids())
            if not core.unproven and not core.leave_open:
                snapshots = write_snapshots(core)
                self._io.flush(self.members.nsids())
                self.members.mark_clean(core.sequence, snapshots)

    def _watch_expiry(self) -> None:
        self.catalogue.expiry.watch(True)

    def _memory(self, memory: HostMemory | None) -> PagedMemory:
        known = self._resources.memories
        if memory is None and len(known) == 1:
            with contextlib.suppress(IndexError):  # a close at the same time; the next line tells
                return known[0].memory  # InFlight.begin checks whether the pool is open
        self._core.check_open()
        return self._chosen(memory, known).memory


@system_errors()
@takes(
    layout=optional(instance(KVLayout)),
    executor=one_of(*EXECUTORS),
    **dict.fromkeys(_IN_CONFIG, belongs_in("config=StoreConfig(...)")),
)
@uninterrupted(lambda _, store: store.close())
def open(
    paths: Paths,
    layout: KVLayout | None = None,
    capacity: int | str | None = None,
    *,
    verify: str | None = None,
    durability: str | None = None,
    executor: str = "auto",
    profile: ProfileChoice = AUTO,
    config: StoreConfig | None = None,
) -> ObjectStore:
    """Opens a pool, formatting it first when it does not exist and ``capacity`` is given.

    paths: one path, or those of all members over which the pool is striped, always in the same
    order.  Each is a file, a folder that holds a file of the pool (docs/operations.md), a block
    device, or a drive such as "nvme:0000:03:00.0" (docs/vfio.md).  Devices and drives are formatted
    here only if ``tutti format --for-server`` has labelled them.  The pool's threads and memory are
    on the NUMA node of its drives, if sysfs reports the same node for all.
    layout: the layout that the pool must have (default: any).  A new pool needs one that names its
    model, see KVLayout.  capacity: total size of a new pool, in bytes or as "64GiB"; an existing
    pool keeps its size, and a difference is logged.
    verify, durability: see StoreConfig; ``config`` sets all settings instead.
    executor: "uring", "threads", "passthrough", or "auto" (io_uring unless the kernel refuses it).
    profile: the times by which puts yield to loads.  "auto" finds a profile (cached, measured in at
    most 2 s, or estimated), a path names one that `tutti profile` wrote, and None issues every
    transfer at once, which suits a benchmark of the drive.
    Raises PoolNotFound, PoolMismatch, PoolInUse, PoolCorrupt, PoolUntrusted, MemberMissing,
    CapacityError and others of tutti.errors.
    """
    names = pool_members(paths, layout)
    config = StoreConfig.choose(config, verify=verify, durability=durability)
    if config.schedule is not None and profile != AUTO:
        raise ConfigError("both config.schedule and profile are given; pass only one of them")
    check_choice(profile)
    format_missing(names, layout, capacity, executor)

    with on_node(shared_node(names)):  # with its threads and what it allocates
        needed = profile if config.schedule is None else None
        members = at_open.before_opening(needed, names, executor=executor)
        schedule_of = partial(find_schedule, profile, members, executor=executor)
        threads = config.service_threads
        controller = open_controller(names, executor=executor, service_threads=threads)
        try:
            if not config.any_owner:
                check_owners(controller)
            store = ObjectStore(controller, names, config=config, schedule_of=schedule_of)
        except BaseException:
            with contextlib.suppress(TuttiError):  # a stuck device keeps its controller
                controller.close()
            raise
    if layout is not None and layout != store.layout:
        found = differences(store.layout, layout)
        store.close()
        raise PoolMismatch(
            f"{names[0]} has another layout: {found}; open it with that layout, or format another"
            " pool"
        )
    if capacity is not None:
        warn_of_capacity(names[0], capacity, store.members.count, store.geometry)
    return store


def _recover(core: Core, recovering: Callable[[], None]) -> None:
    try:
        recovering()
    except BaseException as error:
        with core.lock:
            core.failure = error
            core.changed.notify_all()
        if not isinstance(error, TuttiError):
            raise


__all__ = ["ObjectStore", "format", "open"]
