"""Counts the operations of a pool that are in flight, and waits for them."""

from __future__ import annotations

import contextlib
import copy
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tutti.base.arrays import Keys, Mask
from tutti.base.callbacks import Guard
from tutti.base.histogram import Histogram
from tutti.base.process import Owned
from tutti.errors import ConfigError, DeviceTimeout, PoolClosed
from tutti.gio_uring.iocb import PagedMemory
from tutti.medium.geometry import Geometry
from tutti.transfers.store_config import StoreConfig


class NotAdmitted(DeviceTimeout):
    """An operation that does not wait came before recovery's end, or during `Core.quiesced`."""


@dataclass
class Counters:
    """Totals since the pool was opened; objects unless the name says otherwise."""

    lookups: int = 0
    looked_up: int = 0
    hits: int = 0
    stored: int = 0
    present: int = 0
    dropped: int = 0
    over_budget: int = 0
    store_errors: int = 0
    loaded: int = 0
    load_errors: int = 0
    evicted: int = 0
    space_waits: int = 0  # batches of puts
    expired: int = 0
    quarantined: int = 0
    mismatches: int = 0
    proven: int = 0
    load_runs: int = 0
    payload_written_nbytes: int = 0
    payload_read_nbytes: int = 0
    deallocated_nbytes: int = 0


class InFlight(Owned):
    """The part of an open pool's state that a TransferQueue needs."""

    store_latency: Histogram | None = None

    def __init__(self, geometry: Geometry, config: StoreConfig, guard: Guard) -> None:
        self.geometry = geometry
        self.layers = geometry.layers
        self.object_nbytes = geometry.slice_nbytes * self.layers
        self.config = config
        self.guard = guard
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.counters = Counters()
        self.in_flight = 0  # operations
        self._uses: dict[int, int] = {}  # transfers under way of each memory, by its id
        self._withdrawn: set[int] = set()  # memory that is being unregistered
        # Wakes the queue's thread, which then also calls refill; an interrupted put keeps no lock.
        self.wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.refill: Callable[[], object] = lambda: None
        self.closing = False
        self.ready = False  # recovery is done, and nothing is quiesced
        self.quiesced_by = ""  # "a clear", "a replan": see Core.quiesced; a close waits for its end
        self.failure: BaseException | None = None  # why recovery failed

    def absent(self, keys: Keys) -> Mask | None:
        """Which of these keys (n,) a put would write, as far as is known; None: all.  Lock held."""
        raise NotImplementedError

    def dropped(self, keys: Keys) -> Mask | None:
        """Of a dropped put's keys (n,) those that are lost; counts all.  None: the agent knows."""
        return None

    def write_pages_max(self, memory: PagedMemory, most: int) -> int:
        """Pages of one write from this memory: ``most``, or what its path copies out at once."""
        limit = getattr(memory.path, "write_pages_max", None)
        return most if limit is None else min(most, limit(self.layers, self.geometry.slice_nlb))

    def begin(self, memory: PagedMemory | None = None) -> None:
        """Counts an operation in flight, of ``memory`` if it moves pages.  Lock held.

        Raises PoolClosed while closing, ConfigError for memory that is being unregistered.
        """
        if self.closing or self.failure is not None:
            self.check_open()
        if memory is not None:
            place = id(memory)
            if place in self._withdrawn:
                raise ConfigError("this memory is being unregistered; use other memory")
            self._uses[place] = self._uses.get(place, 0) + 1
        self.in_flight += 1

    def end(self, memory: PagedMemory | None = None) -> None:
        """An operation ended: wakes waiters for space or quiet.  memory: as it began."""
        with self.lock:
            if memory is not None:
                place = id(memory)
                self._uses[place] -= 1
                if not self._uses[place]:
                    del self._uses[place]
            self.in_flight -= 1
            self.changed.notify_all()

    @contextlib.contextmanager
    def withdrawn(self, memory: PagedMemory, timeout_s: float) -> Iterator[None]:
        """No transfer of ``memory`` is under way or begins inside.

        Raises DeviceTimeout when those under way do not end, ConfigError in a second call.
        """
        place = id(memory)
        with self.lock:
            if place in self._withdrawn:
                raise ConfigError("this memory is being unregistered by another call")
            self._withdrawn.add(place)
        try:
            with self.lock:
                if not self.changed.wait_for(lambda: place not in self._uses, timeout_s):
                    raise DeviceTimeout("transfers are under way; the memory stays registered")
            yield
        finally:
            self._withdrawn.remove(place)

    def check_open(self) -> None:
        """Raises PoolClosed after a close began, and the error of a recovery that failed."""
        if self.closing:
            raise PoolClosed("the pool is closed; open it again")
        if self.failure is not None:
            # A copy: a raised exception collects the frames that it passed.
            raise copy.copy(self.failure) from self.failure

    def wait_ready(self, timeout_s: float) -> None:
        """Waits for recovery and `Core.quiesced`.  DeviceTimeout when they take longer."""
        with self.lock:
            done = self.changed.wait_for(
                lambda: self.ready or self.failure is not None or self.closing, timeout_s
            )
            self.check_open()
            if not done:
                what = self.quiesced_by or "recovery"
                raise DeviceTimeout(
                    f"{what} is not done after {timeout_s:g} s; look-ups miss until it is"
                )

    def wait_quiet(self, timeout_s: float, lost: Callable[[], int] = int) -> bool:
        """Waits until only ``lost()`` operations, which no wait ends, are in flight.  Returns
        whether none is.  Lock held or not.
        """
        with self.lock:
            deadline_s = time.monotonic() + timeout_s
            while self.in_flight > lost() and (left_s := deadline_s - time.monotonic()) > 0:
                self.changed.wait(min(left_s, 0.2))
            return self.in_flight == 0

    def wait_admitted(self, timeout_s: float, memory: PagedMemory | None = None) -> None:
        """Waits until recovery and `Core.quiesced` are over.  memory: as for ``begin``, which
        follows.  Lock held.
        """
        if self.ready:
            return
        self.begin(memory)
        self.in_flight -= 1  # a clear waits for what is in flight, and this for the clear
        try:
            self.wait_ready(timeout_s)
        finally:
            self.in_flight += 1
            self.end(memory)

    def admitted(self, timeout_s: float, memory: PagedMemory | None = None) -> Admitted:
        """Calls ``wait_admitted`` and ``begin``, and counts an operation in flight inside.

        Raises DeviceTimeout when the wait takes longer.
        """
        return Admitted(self, timeout_s, memory)


class Admitted:
    """See InFlight.admitted; a class, as a generator takes three times as long."""

    __slots__ = ("_core", "_memory", "_timeout_s")

    def __init__(self, core: InFlight, timeout_s: float, memory: PagedMemory | None) -> None:
        self._core, self._timeout_s, self._memory = core, timeout_s, memory

    def __enter__(self) -> None:
        core = self._core
        with core.lock:
            core.wait_admitted(self._timeout_s, self._memory)
            core.begin(self._memory)  # under the same lock: no quiesced begins in between

    def __exit__(self, *exception: object) -> None:
        self._core.end(self._memory)


class Countdown:
    """Calls ``over`` when all that was added, and the submission itself, has ended."""

    def __init__(self, over: Callable[[], object], ends: int = 0) -> None:
        self._over = over
        self._left = ends + 1
        self._lock = threading.Lock()

    def add(self) -> None:
        with self._lock:
            self._left += 1

    def end(self, _: object = None) -> None:
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            self._over()
