"""Host memory that a GPU reaches, and leases of staging memory that recycle without waiting."""

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
    """Keeps an object and its memory until the process ends: a device may still use it."""
    _STUCK.append(owner)


class PinnedMemory(Owned):
    """Host memory registered with the driver until `close`, or until nothing has this object.

    Memory that other code has registered is accepted, except a `HostBuffer`: that is new, so the
    driver knows its address from memory that was unmapped, and would use those pages.

    `address` is the host's, `device_address` the device's.  Holds the buffer.
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
        #: Has the buffer too, which therefore is not unmapped before.
        self._unpin = finalize(self, _unregister, driver, buffer, self.address)
        self._unpin.atexit = False  # a kernel may still use it
        if not is_mine:
            self._unpin.detach()
        self.device_address = driver.device_address(self.address)

    def to_device(self, address: int) -> int:
        """Where the device finds a host address of this memory."""
        assert self.address <= address < self.address + self.nbytes, "an address in this memory"
        return self.device_address + address - self.address

    def close(self) -> None:
        """Unpins it if it was pinned here; a second call does nothing."""
        self._unpin()


def _unregister(driver: Driver, buffer: Any, address: int) -> None:
    """Unpins a buffer.  If that fails it stays mapped, so that no other comes to lie there."""
    try:
        driver.unregister_host(address)
    except BaseException:
        retain_until_exit(buffer)
        raise


@dataclass(eq=False)
class LeaseOwner:
    """Says when the parts that one transfer took come back.

    Made before the first of them, so that whatever interrupts a transfer's start can decide on all.
    is_free: whether they are unused.  owner: what keeps the memory mapped.
    """

    owner: object = None
    is_free: Callable[[], bool] = lambda: False


@dataclass(frozen=True)
class Lease:
    """A part of a stretch of memory, until its owner reports that it is unused."""

    address: int
    nbytes: int
    owner: LeaseOwner


class Arena:
    """A stretch of memory handed out in parts.

    A part is free again when it is unused, which is checked when the next one is asked
    for: no callback, and no CUDA call on anybody else's thread.
    """

    def __init__(self, address: int, nbytes: int, what: str) -> None:
        self.address = address
        self.nbytes = nbytes
        self._what = what
        self._lock = threading.Lock()
        self._leases: list[Lease] = []  # by address

    def lease(self, nbytes: int, timeout_s: float, owner: LeaseOwner) -> Lease:
        """A part of `nbytes`; waits until there is one.

        Raises CapacityError when there can never be one, DeviceTimeout after the timeout.
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
            time.sleep(_LOOK_S)
            lease = self._try(nbytes, owner)
        return lease

    def _try(self, nbytes: int, owner: LeaseOwner) -> Lease | None:
        """The first gap that is long enough."""
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
        """How many parts are handed out."""
        with self._lock:
            self._leases = [lease for lease in self._leases if not lease.owner.is_free()]
            return len(self._leases)


class PinnedStaging(Owned):
    """Pinned memory, on hugepages where it can be, that a controller may know too, in parts."""

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
        """Its registration with a controller, for the caller to close.

        The first caller gets the one that it was made with, so both name the same controller.
        """
        region, self._region = self._region, None
        return controller.register(self._buffer) if region is None else region

    def close(self) -> None:
        """Frees the memory, which must be unused."""
        self.pinned.close()
        self._unregister()

    def _unregister(self) -> None:
        if self._region is not None:
            self._region.close()


@dataclass(frozen=True)
class Tables:
    """One job's tables: written at `address` in pinned memory, used at `device_address`."""

    host: Lease
    device: Lease
    to_device: int  # from the pinned address to where the device finds it


class TableMemory(Owned):
    """Memory for the tables of kernels: pinned to write them in, on the device to use them in.

    All of it is allocated at the start: allocating while a kernel waits may wait for the kernel.
    """

    def __init__(self, driver: Driver, nbytes: int) -> None:
        self._driver = driver
        self._staging = PinnedStaging(driver, None, nbytes)
        try:
            self._device = driver.allocate(nbytes)
        except BaseException:
            self._staging.close()
            raise
        self._arena = Arena(self._device, nbytes, "memory for tables")

    def lease(self, nbytes: int, timeout_s: float, owner: LeaseOwner) -> Tables:
        """Room for `nbytes` on both sides; raises as `Arena.lease`.

        With the second refused the first is the owner's all the same.
        """
        host = self._staging.arena.lease(nbytes, timeout_s, owner)
        device = self._arena.lease(nbytes, timeout_s, owner)
        pinned = self._staging.pinned
        return Tables(host, device, pinned.device_address - pinned.address)

    def upload(self, tables: Tables, nbytes: int, stream: int) -> None:
        """Enqueues the copy of what was written."""
        source = tables.host.address + tables.to_device
        self._driver.copy(tables.device.address, source, nbytes, stream)

    def close(self) -> None:
        """Releases everything; no kernel may use it any more."""
        self._staging.close()
        self._driver.free(self._device)
