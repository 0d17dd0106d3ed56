"""A drive's doorbells where kernels find them: the registers of BAR0, mapped for the GPU.

Tier T1. Kernels only ever write there (st.mmio): a read of a drive's registers by a GPU can take
the link down on some machines.
"""

from __future__ import annotations

import ctypes
import mmap

from tutti.base.process import Owned
from tutti.errors import ConfigError, CudaError, Unsupported
from tutti.gio_uring.gpu.driver import Driver


class GpuDoorbells(Owned):
    """Registers at [address, address + nbytes) of this process, mapped for the GPU until `close`.

    Raises Unsupported where the driver refuses, with what it needs.
    """

    def __init__(self, driver: Driver, address: int, nbytes: int) -> None:
        self._driver = driver
        # Whole pages: the driver maps nothing else, and the drive's queue registers fill theirs.
        self.address = address - address % mmap.PAGESIZE
        self.nbytes = -(-(address + nbytes - self.address) // mmap.PAGESIZE) * mmap.PAGESIZE
        # vfio maps a page at its first use, also again after a reset; NVIDIA's driver takes only
        # pages that are mapped.  A reserved word is read, which has no effect on the drive.
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
        """Where kernels find a doorbell of this process. Raises ConfigError for any other place."""
        offset = address - self.address
        if not 0 <= offset <= self.nbytes - 4:
            raise ConfigError(
                f"{address:#x} is not a doorbell of this drive; ring one of its queues"
            )
        return self._device_address + offset

    def close(self) -> None:
        """No kernel may ring any more."""
        self._driver.unregister_host(self.address)
