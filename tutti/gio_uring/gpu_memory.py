"""Host memory that a GPU reaches, and leases of staging memory that recycle without waiting."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tutti.errors import CapacityError, DeviceTimeout
from tutti.gio_uring.controller import NativeController
from tutti.gio_uring.gpu_driver import Driver
from tutti.gio_uring.memory import DmaRegion, HostBuffer, address_of
from tutti.units import format_nbytes

ALIGNMENT = 4096
_LOOK_S = 0.0002

#: Pinned memory that a device may still use when nobody could wait for it any longer.
_STUCK: list[object] = []


class PinnedMemory:
    """Host memory registered with the driver; memory that is registered already is accepted.

    `address` is the host's, `device_address` the device's.  Holds the buffer.
    """

    def __init__(self, driver: Driver, buffer: Any) -> None:
        self.buffer = buffer
        self.address, self.nbytes = address_of(buffer)
        self._driver = driver
        self._is_mine = driver.register_host(self.address, self.nbytes)
        self.device_address = driver.device_address(self.address)

    def to_device(self, address: int) -> int:
        """Where the device finds a host address of this memory."""
        assert self.address <= address < self.address + self.nbytes, "an address in this memory"
        return self.device_address + address - self.address

    def close(self) -> None:
        """Unpins it if it was pinned here; a second call does nothing."""
        is_mine, self._is_mine = self._is_mine, False
        if is_mine:
            self._driver.unregister_host(self.address)


@dataclass
class Lease:
    """A part of the staging memory, until `is_free` says that nobody touches it any more."""

    address: int
    nbytes: int
    is_free: Callable[[], bool] = lambda: False


class Staging:
    """Memory on hugepages where it can be, known to a controller and to a GPU, handed out in parts.

    A part comes back when nobody uses it any more, which is looked up when the next one is asked
    for: no callback, and no CUDA call on anybody else's thread.
    """

    def __init__(self, driver: Driver, controller: NativeController, nbytes: int) -> None:
        self.nbytes = nbytes
        self._buffer = HostBuffer(nbytes)
        self._region: DmaRegion = controller.register(self._buffer)
        try:
            self.pinned = PinnedMemory(driver, self._buffer)
        except BaseException:
            self._region.close()
            raise
        self._lock = threading.Lock()
        self._leases: list[Lease] = []  # by address

    def lease(self, nbytes: int, timeout_s: float) -> Lease:
        """A part of `nbytes`; waits until there is one.

        Raises CapacityError when there can never be one, DeviceTimeout after the timeout.
        """
        nbytes = -(-nbytes // ALIGNMENT) * ALIGNMENT
        if nbytes > self.nbytes:
            raise CapacityError(
                f"{format_nbytes(nbytes)} of staging are needed at once, there are "
                f"{format_nbytes(self.nbytes)}; give the GPU engine more, or move fewer pages"
            )
        deadline = time.monotonic() + timeout_s
        lease = self._try(nbytes)
        while lease is None:
            if time.monotonic() > deadline:
                raise DeviceTimeout(
                    f"no {format_nbytes(nbytes)} of staging came free within {timeout_s:g} s; "
                    "try again, or give the GPU engine more"
                )
            time.sleep(_LOOK_S)
            lease = self._try(nbytes)
        return lease

    def _try(self, nbytes: int) -> Lease | None:
        """The first gap that is long enough."""
        with self._lock:
            self._leases = [lease for lease in self._leases if not lease.is_free()]
            start = self.pinned.address
            for place, lease in enumerate(self._leases):
                if lease.address - start >= nbytes:
                    return self._insert(place, start, nbytes)
                start = lease.address + lease.nbytes
            if self.pinned.address + self.nbytes - start >= nbytes:
                return self._insert(len(self._leases), start, nbytes)
            return None

    def _insert(self, place: int, address: int, nbytes: int) -> Lease:
        lease = Lease(address, nbytes)
        self._leases.insert(place, lease)
        return lease

    @property
    def in_use(self) -> int:
        """How many parts are handed out."""
        with self._lock:
            self._leases = [lease for lease in self._leases if not lease.is_free()]
            return len(self._leases)

    def close(self) -> None:
        """Gives the memory back; nobody may use it any more."""
        self.pinned.close()
        self._region.close()

    def abandon(self) -> None:
        """Keeps the memory until the process ends: a device may still use it."""
        _STUCK.append(self)
