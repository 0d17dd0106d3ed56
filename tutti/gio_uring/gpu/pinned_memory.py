"""Host memory that a GPU can access, and leases of parts of it that end without a callback."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tutti.base.numa import on_node
from tutti.base.process import Owned, finalize
from tutti.base.units import format_nbytes
from tutti.errors import CapacityError, CudaError, DeviceTimeout
from tutti.gio_uring.controller import NativeController
from tutti.gio_uring.gpu.driver import Driver
from tutti.gio_uring.memory import DmaRegion, HostBuffer, address_of

ALIGNMENT = 4096
_LOOK_S = 0.0002

_STUCK: list[object] = []


def retain_until_exit(owner: object) -> None:
    """Keeps an object and its memory until the process exits: a device may still use it."""
    _STUCK.append(owner)


class PinnedMemory(Owned):
    """Host memory registered with the driver until `close`, or until this object is collected.

    Memory that other code has registered is accepted.  A `HostBuffer` is not: it is new, so the
    driver's registration there is of unmapped memory, and the driver would use the old pages.

    address: of the host.  device_address: of the device.  References the buffer.
    """

    def __init__(self, driver: Driver, buffer: Any) -> None:
        self.buffer = buffer
        self.address, self.nbytes = address_of(buffer)
        is_mine = driver.register_host(self.address, self.nbytes)
        if not is_mine and isinstance(buffer, HostBuffer):
            raise CudaError(
                f"the CUDA driver still has memory registered at {self.address:#x} that was "
                "unmapped, and a new buffer lies there now; restart the process",
                call="cuMemHostRegister",
            )
        #: References the buffer, too, so that it is not unmapped before.
        self._unpin = finalize(self, _unregister, driver, buffer, self.address)
        self._unpin.atexit = False  # a kernel may still use it
        if not is_mine:
            self._unpin.detach()
        self.device_address = driver.device_address(self.address)

    def to_device(self, address: int) -> int:
        """The device address of a host address in this memory."""
        assert self.address <= address < self.address + self.nbytes, "an address in this memory"
        return self.device_address + address - self.address

    def close(self) -> None:
        """Unregisters the memory if it was registered here; a second call does nothing."""
        self._unpin()


def _unregister(driver: Driver, buffer: Any, address: int) -> None:
    """Unregisters a buffer.  If that fails it stays mapped, so that its address is not reused."""
    try:
        driver.unregister_host(address)
    except BaseException:
        retain_until_exit(buffer)
        raise


@dataclass(eq=False)
class LeaseOwner:
    """Decides when the leases of one transfer end.

    Made before the first lease, so that all of them can be released if the transfer's start is
    interrupted.  is_free: returns whether they are unused.  owner: keeps the memory mapped.
    """

    owner: object = None
    is_free: Callable[[], bool] = lambda: False


@dataclass(frozen=True)
class Lease:
    """A part of an arena, leased until its owner reports that it is unused."""

    address: int
    nbytes: int
    owner: LeaseOwner


class Arena:
    """A range of memory that is leased in parts.

    Owners are polled when the next lease is requested: there is no callback, and no CUDA call on
    another thread.  on_full: called while a lease waits.
    """

    def __init__(self, address: int, nbytes: int, what: str) -> None:
        self.address = address
        self.nbytes = nbytes
        self._what = what
        self.on_full: Callable[[], object] = lambda: None
        self._lock = threading.Lock()
        self._leases: list[Lease] = []  # by address

    def lease(self, nbytes: int, timeout_s: float, owner: LeaseOwner) -> Lease:
        """Leases `nbytes`; waits until they are free.

        Raises CapacityError if the arena is smaller, DeviceTimeout after the timeout.
        """
        nbytes = -(-nbytes // ALIGNMENT) * ALIGNMENT
        if nbytes > self.nbytes:
            raise CapacityError(
                f"{format_nbytes(nbytes)} of {self._what} are needed at once, there are "
                f"{format_nbytes(self.nbytes)}; give the GPU engine more, or move fewer pages"
            )
        deadline = time.monotonic() + timeout_s
        lease = self._try(nbytes, owner)
        while lease is None:
            if time.monotonic() > deadline:
                raise DeviceTimeout(
                    f"no {format_nbytes(nbytes)} of {self._what} came free within {timeout_s:g} s; "
                    "try again, or give the GPU engine more"
                )
            self.on_full()
            time.sleep(_LOOK_S)
            lease = self._try(nbytes, owner)
        return lease

    def _try(self, nbytes: int, owner: LeaseOwner) -> Lease | None:
        """Leases the first gap that is long enough; None if there is none."""
        with self._lock:
            self._leases = [lease for lease in self._leases if not lease.owner.is_free()]
            start = self.address
            for place, lease in enumerate(self._leases):
                if lease.address - start >= nbytes:
                    return self._insert(place, Lease(start, nbytes, owner))
                start = lease.address + lease.nbytes
            if self.address + self.nbytes - start >= nbytes:
                return self._insert(len(self._leases), Lease(start, nbytes, owner))
            return None

    def _insert(self, place: int, lease: Lease) -> Lease:
        self._leases.insert(place, lease)
        return lease

    @property
    def in_use(self) -> int:
        """Number of leases."""
        with self._lock:
            self._leases = [lease for lease in self._leases if not lease.owner.is_free()]
            return len(self._leases)


class PinnedStaging(Owned):
    """Pinned memory, on hugepages if possible, leased in parts; a controller may know it, too."""

    def __init__(self, driver: Driver, controller: NativeController | None, nbytes: int) -> None:
        self.nbytes = nbytes
        with on_node(driver.numa_node):
            self._buffer = HostBuffer(nbytes)
        self._region: DmaRegion | None = None
        if controller is not None:
            self._region = controller.register(self._buffer)
        try:
            self.pinned = PinnedMemory(driver, self._buffer)
        except BaseException:
            self._unregister()
            raise
        self.arena = Arena(self.pinned.address, nbytes, "staging")

    def lend(self, controller: NativeController) -> DmaRegion:
        """Registers it with a controller; the caller must close the region.

        The first call returns the region that this object was made with, of the same controller.
        """
        region, self._region = self._region, None
        return controller.register(self._buffer) if region is None else region

    def close(self) -> None:
        """Frees the memory, which must not be in use."""
        self.pinned.close()
        self._unregister()

    def _unregister(self) -> None:
        if self._region is not None:
            self._region.close()


@dataclass(frozen=True)
class Tables:
    """One job's tables: written in pinned memory (host), used in device memory (device)."""

    host: Lease
    device: Lease
    to_device: int  # from a host address to its device address


class TableMemory(Owned):
    """Memory for the tables of kernels: pinned memory to write them, device memory to use them.

    All is allocated at the start: an allocation may wait for kernels, which may wait for this.
    """

    def __init__(self, driver: Driver, nbytes: int) -> None:
        self._driver, self.nbytes = driver, nbytes
        self._staging = PinnedStaging(driver, None, nbytes)
        try:
            self._device = driver.allocate(nbytes)
        except BaseException:
            self._staging.close()
            raise
        self._arena = Arena(self._device, nbytes, "memory for tables")
        self.arenas = self._staging.arena, self._arena

    def lease(self, nbytes: int, timeout_s: float, owner: LeaseOwner) -> Tables:
        """Leases `nbytes` in both memories; raises what `Arena.lease` raises.

        If the second lease fails, the first still belongs to the owner.
        """
        host = self._staging.arena.lease(nbytes, timeout_s, owner)
        device = self._arena.lease(nbytes, timeout_s, owner)
        pinned = self._staging.pinned
        return Tables(host, device, pinned.device_address - pinned.address)

    def upload(self, tables: Tables, nbytes: int, stream: int) -> None:
        """Enqueues the copy of the tables to the device."""
        source = tables.host.address + tables.to_device
        self._driver.copy(tables.device.address, source, nbytes, stream)

    def close(self) -> None:
        """Frees all memory; no kernel may use it any more."""
        self._staging.close()
        self._driver.free(self._device)
