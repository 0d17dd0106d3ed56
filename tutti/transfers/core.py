"""Shared parts of one open pool: index, allocator, engine, counters, and the lock."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, Unpack, runtime_checkable

import numpy as np
import numpy.typing as npt

from tutti.base.arrays import U32, Keys, Mask, Slots
from tutti.base.histogram import Histogram
from tutti.errors import DeviceTimeout, PoolCorrupt
from tutti.gio_uring.engine import PRIORITY_STORE, Engine
from tutti.gio_uring.engine_structs import WindowStats
from tutti.gio_uring.iocb import Extents, PagedMemory
from tutti.gio_uring.nvme_spec import OPCODE_READ, OPCODE_WRITE
from tutti.gio_uring.transfer import Submitter, Transfer, TransferOptions
from tutti.medium.geometry import RECORD_NBYTES
from tutti.medium.slot_record import COUNTER_MAX
from tutti.placement.allocator import Allocator, Placer
from tutti.placement.digest_cache import DigestCache
from tutti.placement.eviction import EvictionView, expected_slots, reserve_slots
from tutti.placement.index import MISSING, Index, SlotState
from tutti.placement.load_plan import LoadPlanner
from tutti.placement.lookup_pins import LookupPins
from tutti.placement.reuse import ReuseHistory
from tutti.pool.members import Members
from tutti.pool.slot_extents import SlotExtents, object_places
from tutti.pool.slot_jobs import SlotJobs
from tutti.transfers.in_flight import InFlight
from tutti.transfers.put_limits import Quotas
from tutti.transfers.store_config import StoreConfig

_P = ParamSpec("_P")
_R = TypeVar("_R")

_RANGE_NLB = 2**31  # a range of a DSM command has 32 bits for its length
_RANGES = 32  # deallocated at a time


def releases_lock(
    method: Callable[Concatenate[Core, _P], _R],
) -> Callable[Concatenate[Core, _P], _R]:
    """A decorator for short calls that take the lock on the caller's thread and do not nest: an
    interrupt between the last statement of a ``with`` and the release leaves nothing taken.
    """

    @functools.wraps(method)
    def call(self: Core, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return method(self, *args, **kwargs)
        except BaseException:
            with contextlib.suppress(RuntimeError):  # it was released, as a rule
                self.lock.release()
            raise

    return call


def _drive(window: WindowStats) -> dict[str, Any]:
    """The engine's statistics of one drive, separately for reads and writes."""
    stats: dict[str, Any] = {
        "commands": int(window.commands),
        "read_nbytes": int(window.bytes_read),
        "written_nbytes": int(window.bytes_written),
        "inflight_nbytes": int(window.inflight_nbytes),
    }
    for i, direction in enumerate(("read", "write")):
        stats[f"{direction}_window_nbytes"] = int(window.window_nbytes[i])
        stats[f"{direction}_nbytes_per_s"] = int(window.rate[i])
        stats[f"{direction}_latency_us"] = window.latency_ns[i] / 1e3
    return stats


@runtime_checkable
class Closable(Protocol):
    """A part that ends with the store."""

    def close(self) -> None:
        """Releases what it holds."""


class Core(InFlight):
    """The shared state of an open pool.  Arrays of the index are touched under ``lock`` only."""

    def __init__(self, engine: Engine, members: Members, config: StoreConfig) -> None:
        super().__init__(members.geometry, config, engine.guard)
        self.engine = engine
        self.members = members
        self.load_latency = Histogram()
        self.store_latency: Histogram = Histogram()
        padded_nbytes = members.geometry.slice_padded_nbytes * self.layers
        self._stored_nbytes = padded_nbytes + RECORD_NBYTES
        self.quotas = Quotas(config.quotas, self._stored_nbytes, config.write_budget_nbytes)
        self.is_unlimited = config.write_budget_nbytes is None and not config.quotas
        self._day, self._before_day_nbytes = self._today(), 0
        self._others_nbytes = {OPCODE_READ: 0, OPCODE_WRITE: 0}
        self.sequence = 1
        self.leave_open = False  # records on the medium are not what the index says
        self.index = Index(members.count * self.geometry.slots)
        self._reserve = reserve_slots(self.index.slots)
        self.expected = 0  # pages that a put may bring soon
        self._expected_most = expected_slots(self.index.slots, self.index.slots)
        self.history = ReuseHistory(self.index.slots, chooses=config.eviction == "mq")
        self.lookup_pins = LookupPins(
            self.index.kept,
            lookups=config.pin_lookups,
            slots_max=int(self.index.slots * config.pin_share),
        )
        self.allocator = Allocator(members.count, self.geometry.groups, self.geometry.group_slots)
        self.placer = Placer(self.index, self.history, self.allocator)
        entry_nbytes = 8 * self.layers + 16
        entries = min(self.index.slots, config.digest_cache_nbytes // entry_nbytes)
        self.digests = DigestCache(entries, self.layers)
        group_slots = self.geometry.group_slots
        self.planner = LoadPlanner(self.index, self.history, self.digests, group_slots)
        self._nsid = np.array([members.nsid(m) for m in range(members.count)], np.uint32)
        self._places = object_places(self.geometry, self._nsid)
        slice_nlb, stride_nlb = self.geometry.slice_nlb, self.geometry.layer_stride_nlb
        self.slot_jobs = SlotJobs(
            engine, self._places, slice_nlb, stride_nlb, timeout_s=config.timeout_s
        )

    def write(
        self, slots: Slots, pages: U32, memory: PagedMemory, **options: Unpack[TransferOptions]
    ) -> Transfer:
        """Starts to write pages (n,) to slots (n,), in the order of both."""
        options["priority"], options["timeout_s"] = PRIORITY_STORE, self.config.timeout_s
        if memory.path is None:
            return self.slot_jobs.start(OPCODE_WRITE, slots, pages, memory, **options)
        if self.is_remote(memory):
            self.moved_elsewhere(OPCODE_WRITE, slots.size)
        extents = self.extents(slots)
        started: Transfer = memory.path.submit(OPCODE_WRITE, extents, pages, memory, **options)
        return started

    def submitter(self, memory: PagedMemory) -> Submitter:
        """What moves pages of this memory: the engine, or what it names itself."""
        path: Submitter | None = memory.path
        return self.engine if path is None else path

    @staticmethod
    def is_remote(memory: PagedMemory) -> bool:
        """Whether another process moves the pages of this memory."""
        return bool(getattr(memory.path, "is_remote", False))

    def check_path(self, memory: PagedMemory) -> None:
        """Raises CapacityError for memory whose path could not move a single page, and Unsupported
        for memory that the drive cannot reach by itself.
        """
        if memory.path is None:
            self.engine.check_memory(memory, self.geometry.slice_nlb)
        check = getattr(memory.path, "check_page", None)
        if check is not None:
            check(memory, self.geometry.slice_nlb)

    def choose_victims(self, n: int, among: Mask) -> Slots:
        """Slots to evict, at least ``n`` of a mask if the policy finds so many.  Lock held."""
        index, policy = self.index, self.config.eviction_policy
        assert policy is not None, "checked by StoreConfig"
        # The policy does not see pinned objects: the rest of their group is evicted as usual.
        view = EvictionView(
            index.resident() & ~index.pinned & among,
            index.busy(),
            index.access,
            index.depth,
            self.geometry.group_slots,
            self.history.uses,
            index.uses,
            self.history.lifetime_bits,
            self.history.by_uses,
        )
        victims = np.ascontiguousarray(policy.victims(view, n), np.int64)
        if victims.size:
            self.counters.evicted += victims.size
            self.history.evicted(victims, index.key[victims])
        return victims

    def remove(self, slots: Slots, state: SlotState) -> None:
        """Removes objects from slots; see Index.remove.  Lock held."""
        if pinned := int(np.count_nonzero(self.index.pinned[slots])):
            self.lookup_pins.reserve(-pinned)
        self.index.remove(slots, state)

    def extents(self, slots: Slots) -> Extents:
        """Where the objects of slots in page order lie, as runs."""
        geometry = self.geometry
        return SlotExtents(self._places, slots, geometry.slice_nlb, geometry.layer_stride_nlb)

    @property
    def unproven(self) -> int:
        """Objects that must be verified before they are served."""
        return int(np.count_nonzero(self.index.state == SlotState.UNPROVEN))

    def unproven_keys(self, n: int, start: int) -> tuple[npt.NDArray[np.uint8], int]:
        """Keys (<= n, 16) of unproven objects from slot ``start`` on, and the next ``start``."""
        with self.lock:
            slots = start + np.flatnonzero(self.index.state[start:] == SlotState.UNPROVEN)[:n]
            return self.index.key[slots].copy(), int(slots[-1]) + 1 if slots.size else 0

    def proven_prefix(self, slots: Slots) -> int:
        """How many of these slots come before the first unproven one."""
        unproven = np.flatnonzero(self.index.state[slots] == SlotState.UNPROVEN)
        return int(unproven[0]) if unproven.size else slots.size

    def match(self, keys: npt.NDArray[np.uint8], *, pin: bool | str, proven: bool) -> int:
        """See Store.match."""
        try:  # as `releases_lock`, a call fewer
            with self.lock:
                if self.closing or self.failure is not None:
                    self.check_open()
                if not self.ready:
                    return 0
                pins, counters = self.lookup_pins, self.counters
                if pins.holders or pins.is_changing:
                    pins.lookup()
                if proven or pin is not False:
                    found = self.index.match(keys)
                    hits = self.proven_prefix(found) if proven else found.size
                    if pin is not False:
                        hits = pins.pin(pin, found[:hits])
                        self.expect(len(keys) - hits)  # a put of the missed pages
                else:
                    hits = self.index.prefix(keys)
                counters.lookups += 1
                counters.looked_up += len(keys)
                counters.hits += hits
                return hits
        except BaseException:
            with contextlib.suppress(RuntimeError):
                self.lock.release()
            raise

    @releases_lock
    def present(
        self, keys: npt.NDArray[np.uint8], *, pin: bool | str, proven: bool
    ) -> npt.NDArray[np.bool_]:
        """See Store.present."""
        with self.lock:
            self.check_open()
            if not self.ready:
                return np.zeros(len(keys), np.bool_)
            self.lookup_pins.lookup()
            slots = self.index.look(keys)
            there: npt.NDArray[np.bool_] = slots != MISSING
            if proven:
                there &= self.index.state[slots] != SlotState.UNPROVEN
            if pin is not False:
                rows = np.flatnonzero(there)
                kept = self.lookup_pins.pin(pin, slots[rows], last=True)
                there[rows[: rows.size - kept]] = False
            hits = int(np.count_nonzero(there))
            self.counters.lookups += 1
            self.counters.looked_up += len(keys)
            self.counters.hits += hits
            if pin is not False:
                self.expect(len(keys) - hits)
            return there

    def unpin(self, name: str | None) -> None:
        """See Store.unpin."""
        with self.lock:
            if name is None:
                self.lookup_pins.clear()
            else:
                self.lookup_pins.release(name)

    def expect(self, pages: int) -> None:
        """A put may bring so many pages soon: there should be room for them.  Lock held."""
        slots = pages if pages < self._expected_most else self._expected_most
        if slots > self.expected and self.allocator.native.free_slots < self._reserve + slots:
            self.expected = slots
            self.wake.put(None)

    def count_stored(self, objects: int) -> None:
        """Objects have reached the medium.  Lock held."""
        self.counters.stored += objects
        self.counters.payload_written_nbytes += objects * self.object_nbytes
        if self._today() != self._day:
            self._begin_day(self._written_nbytes() - objects * self._stored_nbytes)

    def moved_elsewhere(self, opcode: int, objects: int) -> None:
        """Counts objects that another process moves, as the engine here does not."""
        with self.lock:
            self._others_nbytes[opcode] += objects * (self._stored_nbytes - RECORD_NBYTES)

    def _written_nbytes(self) -> int:
        """Bytes written to the medium, records included.  Lock held."""
        return int(self.engine.stats().bytes_written) + self._others_nbytes[OPCODE_WRITE]

    def _begin_day(self, written_nbytes: int) -> None:
        """Begins today's count.  written_nbytes: bytes that were written before midnight."""
        self._day, self._before_day_nbytes = self._today(), written_nbytes

    def _today(self) -> int:
        """The day of UTC, which begins at midnight: 86,400 s are 1,350 times 64 s."""
        return self.now_64s() // 1350

    @releases_lock
    def stats(self) -> dict[str, Any]:
        """See Store.stats."""
        engine = self.engine.stats()
        with self.lock:
            written_nbytes = self._written_nbytes()
            read_nbytes = int(engine.bytes_read) + self._others_nbytes[OPCODE_READ]
            if self._today() != self._day:
                self._begin_day(written_nbytes)
            today_nbytes = written_nbytes - self._before_day_nbytes
            counts = {state.name.lower(): n for state, n in self.index.counts().items()}
            counters = dict(vars(self.counters))
            busy = int(np.count_nonzero(self.index.busy()))
            namespaces = self.quotas.stats(self.index)
        payload = counters["payload_written_nbytes"]
        runs, given = counters["load_runs"], self.config.eviction
        return {
            **counters,
            "slots": counts,
            "namespaces": namespaces,
            "capacity_objects": self.index.slots,
            "free_objects": self.allocator.free_slots,
            "busy_objects": busy,
            "pinned_objects": self.lookup_pins.reserved,
            "mean_run_length": counters["loaded"] / runs if runs else 0.0,
            "bytes_read": read_nbytes,
            "bytes_written": written_nbytes,
            "written_today_nbytes": today_nbytes,
            "bytes_written_per_byte_stored": written_nbytes / payload if payload else 0.0,
            "commands": int(engine.commands),
            "request_nbytes_max": self.engine.controller.request_nbytes_max,
            "jobs": int(engine.jobs),
            "timeouts": int(engine.timeouts),
            "engine_cpu_s": engine.thread_cpu_ns / 1e9,
            "digest_cpu_s": engine.digest_ns / 1e9,
            "digests_offloaded": int(engine.digests_offloaded),
            "drives": [_drive(window) for window in self.engine.windows()],
            "index_nbytes_per_object": (
                self.index.nbytes_per_slot + self.history.nbytes / self.index.slots
            ),
            "eviction": given if isinstance(given, str) else type(given).__name__,
            "evicted_too_early": self.history.regretted,
            "evicts_by_uses": self.history.by_uses,
            "callback_errors": self.guard.errors,
            "load_latency": self.load_latency.as_dict(),
            "store_latency": self.store_latency.as_dict(),
        }

    def absent(self, keys: Keys) -> Mask | None:
        """See InFlight: those without a slot."""
        if not self.index.has_any(keys):
            return None
        absent: Mask = self.index.find(keys) == MISSING
        return absent

    def dropped(self, keys: Keys) -> Mask:
        """See InFlight."""
        with self.lock:
            absent = self.absent(keys)
            lost = np.ones(len(keys), np.bool_) if absent is None else absent
            self.counters.dropped += int(np.count_nonzero(lost))
            self.counters.present += int(np.count_nonzero(~lost))
        return lost

    def take_sequences(self, n: int) -> int:
        """The first of n new numbers.  Lock held.  Raises PoolCorrupt when none are left."""
        first = self.sequence
        if first + n > COUNTER_MAX:
            raise PoolCorrupt(
                f"no sequence numbers are left after {first}, so the pool must be damaged; format"
                " the pool again"
            )
        self.sequence += n
        return first

    @contextlib.contextmanager
    def quiesced(self, by: str) -> Iterator[None]:
        """Nothing is in flight inside; meanwhile look-ups miss, and puts and loads wait.

        by: what they wait for, for their error.
        Raises DeviceTimeout, before anything happened, when transfers do not end.
        """
        with self.lock:
            self.wait_ready(self.config.timeout_s)
            self.check_open()
            self.ready, self.quiesced_by = False, by
        try:
            if not self.wait_quiet(self.config.timeout_s):
                raise DeviceTimeout("transfers are still under way; nothing was done, try again")
            yield
        finally:
            with self.lock:
                self.ready, self.quiesced_by = True, ""
                self.changed.notify_all()

    def deallocate(self, groups: Slots | None = None) -> None:
        """Tells the medium that groups of the pool hold nothing; None: all of them.

        Raises DeviceTimeout when it does not answer.
        """
        geometry = self.geometry
        group_nlb = geometry.layers * geometry.layer_stride_nlb
        if groups is None:  # those of a member lie one after another
            groups = np.array(self.members.present, np.int64) * geometry.groups
            counts = np.full(groups.size, geometry.groups)
        else:
            groups, counts = _neighbours(groups, geometry.groups)
        member, group = np.divmod(groups, geometry.groups)
        start = geometry.groups_offset // geometry.lba_nbytes + group * group_nlb
        nlb = counts * group_nlb
        timeout_s = 4 * self.config.timeout_s  # a drive may take long over so much space
        for offset in range(0, int(nlb.max(initial=0)), _RANGE_NLB):
            rows = np.flatnonzero(nlb > offset)
            # Few at a time: a drive or a file system works at each of them, and loads wait for it.
            for part in np.split(rows, range(_RANGES, rows.size, _RANGES)):
                count = np.minimum(nlb[part] - offset, _RANGE_NLB)
                where = (start[part] + offset, self._nsid[member[part]], count)
                job = self.engine.deallocate(*where, timeout_s=timeout_s)
                if not job.wait_released(timeout_s + self.config.timeout_s):
                    raise DeviceTimeout(
                        "the medium did not complete a deallocate in time and may still erase data "
                        "that is written there later; open the pool again"
                    )
                if job.report().status == 0:  # otherwise the drive keeps them, which is harmless
                    self.counters.deallocated_nbytes += int(count.sum()) * geometry.lba_nbytes

    def now_64s(self) -> int:
        """Wall time in the unit of records."""
        return int(time.time()) >> 6


def _neighbours(groups: Slots, member_groups: int) -> tuple[Slots, Slots]:
    """Ascending groups as runs of one member: the first of each run, and its length."""
    goes_on = (np.diff(groups) == 1) & (groups[1:] % member_groups != 0)
    first = np.flatnonzero(np.concatenate([[True], ~goes_on])[: groups.size])
    return groups[first], np.diff(np.append(first, groups.size))
