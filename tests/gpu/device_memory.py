"""Device memory of a test: filled and read by copies, and layouts of pages over it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from waiting import wait_until

from tutti.gio_uring.gpu.driver import CudaDriver
from tutti.gio_uring.gpu.pinned_memory import PinnedMemory
from tutti.gio_uring.iocb import PagedMemory
from tutti.gio_uring.memory import HostBuffer

Bytes = npt.NDArray[np.uint8]


class Allocation:
    """Bytes on the device.  Offers `data_ptr` as a tensor does.

    Made before, and closed after, whatever must not be waited for by an allocation.
    """

    def __init__(self, driver: CudaDriver, nbytes: int) -> None:
        self.driver = driver
        self.nbytes = nbytes
        self.address = driver.allocate(nbytes)
        self._stream = driver.create_stream()
        self._host = HostBuffer(nbytes, hugepages=False)
        self._pinned = PinnedMemory(driver, self._host)

    def data_ptr(self) -> int:
        return self.address

    def is_contiguous(self) -> bool:
        return True

    def numel(self) -> int:
        return self.nbytes

    def element_size(self) -> int:
        return 1

    def write(self, content: Bytes) -> None:
        self._host.array[:] = content
        host = self._pinned.device_address
        self.driver.copy(self.address, host, self.nbytes, self._stream)
        self.wait()

    def read(self) -> Bytes:
        host = self._pinned.device_address
        self.driver.copy(host, self.address, self.nbytes, self._stream)
        self.wait()
        return self._host.array.copy()

    def wait(self) -> None:
        wait_until(lambda: self.driver.is_stream_done(self._stream))

    def close(self) -> None:
        self.driver.destroy_stream(self._stream)
        self._pinned.close()
        self.driver.free(self.address)


def paged(memory: Allocation, segments: tuple[int, ...], layers: int, pages: int) -> PagedMemory:
    """All layers and segments one after another, each as an array of pages."""
    starts = np.cumsum((0, *segments[:-1])) * pages
    layer = np.arange(layers)[:, None] * sum(segments) * pages
    bases = (memory.address + layer + starts[None, :]).astype(np.uint64)
    return PagedMemory(bases, segments, segments, pages)


def page_bytes(
    content: Bytes, segments: tuple[int, ...], layers: int, pages: int
) -> npt.NDArray[np.uint8]:
    """uint8 (layers, pages, bytes of a slice) of what `paged` describes."""
    out = []
    for layer in content.reshape(layers, -1):
        start, parts = 0, []
        for nbytes in segments:
            parts.append(layer[start : start + nbytes * pages].reshape(pages, nbytes))
            start += nbytes * pages
        out.append(np.concatenate(parts, axis=1))
    return np.stack(out)
