"""A drive's doorbells for kernels: the registers of BAR0, mapped for the GPU (tier T1).

Kernels only write there (st.mmio): on some machines a GPU's read of a drive's registers takes the
PCIe link down.
"""

from __future__ import annotations

import ctypes
import mmap

from tutti.base.process import Owned
from tutti.errors import ConfigError, CudaError, Unsupported
from tutti.gio_uring.gpu.driver import Driver


class GpuDoorbells(Owned):
    """Registers at [address, address + nbytes) of this process, mapped for the GPU until `close`.

    Raises Unsupported, with the remedy, if the driver refuses.
    """

    def __init__(self, driver: Driver, address: int, nbytes: int) -> None:
        self._driver = driver
        # The driver maps only whole pages, and the drive's doorbells fill theirs.
        self.address = address - address % mmap.PAGESIZE
        self.nbytes = -(-(address + nbytes - self.address) // mmap.PAGESIZE) * mmap.PAGESIZE
        # vfio maps a page at its first access, and again after a reset; NVIDIA's driver needs
        # mapped pages.  So a reserved word is read, which has no effect on the drive.
        for page in range(self.address, self.address + self.nbytes, mmap.PAGESIZE):
            _ = ctypes.c_uint32.from_address(page + mmap.PAGESIZE - 4).value
        try:
            driver.register_io(self.address, self.nbytes)
        except CudaError as error:
            raise Unsupported(
                f"the GPU cannot map the drive's registers ({error}); it needs root, or the NVIDIA"
                " driver's PeerMappingOverride=1, and a driver of 570.133.07 or newer on Linux 6.12"
                " and newer; use tier T0"
            ) from error
        self._device_address = driver.device_address(self.address)

    def to_device(self, address: int) -> int:
        """The device address of a doorbell. Raises ConfigError for any other address."""
        offset = address - self.address
        if not 0 <= offset <= self.nbytes - 4:
            raise ConfigError(
                f"{address:#x} is not a doorbell of this drive; ring one of its queues"
            )
        return self._device_address + offset

    def close(self) -> None:
        """Unmaps the doorbells; no kernel may ring any more."""
        self._driver.unregister_host(self.address)
