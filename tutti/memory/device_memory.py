"""KV pages in tensors in GPU memory, which a GPU engine such as `HostEngine` moves.

gpu = HostEngine(CudaDriver(), store.engine)
store.attach(gpu)
memory = store.register(DeviceMemory.from_layers(layout, tensors, pages, gpu=gpu))
memory.follow(torch.cuda.current_stream().cuda_stream)
ticket = store.load(keys, pages, memory=memory)
ticket.order_stream(torch.cuda.current_stream().cuda_stream, layer)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt

from tutti.errors import ConfigError, DeviceTimeout, Unsupported
from tutti.gio_uring.gpu.driver import Driver
from tutti.gio_uring.memory import HostBuffer
from tutti.medium.layout import KVLayout
from tutti.memory.host_memory import HostMemory, bytes_of_page

_COPY_TIMEOUT_S = 30.0


class GpuEngine(Protocol):
    """What a pool needs of the engine that moves its pages."""

    driver: Driver

    def follow(self, stream: int) -> None:
        """Makes later transfers touch pages only after the work that is on `stream` now."""

    def wait_idle(self, timeout_s: float) -> bool:
        """Waits until no transfer moves pages.  False after the timeout."""

    def stats(self) -> dict[str, Any]:
        """Its part of the store's stats."""

    @property
    def submit(self) -> Callable[..., Any]:
        """See `tutti.gio_uring.transfer.Submitter`."""


class DeviceMemory(HostMemory):
    """Numbered pages of one KV layout in GPU memory.

    Its addresses are those of the GPU, so they are not registered with a controller; `gpu` moves
    the pages through its staging.  Tensors: objects with `data_ptr()`, or (address, nbytes) pairs.
    """

    def __init__(self, pool: HostMemory, gpu: GpuEngine) -> None:
        memory = replace(pool.memory, path=gpu)
        super().__init__(pool.layout, memory, (), pool.owner)
        self.gpu = gpu

    @property
    def nbytes(self) -> int:
        """Size of all pages."""
        return self.pages * self.layout.object_nbytes

    @classmethod
    def from_buffer(
        cls,
        layout: KVLayout,
        buffer: Any,
        pages: int,
        *,
        order: str | None = None,
        gpu: GpuEngine | None = None,
    ) -> Self:
        """Pages in one tensor; see HostMemory.from_buffer.  gpu: the engine that moves them."""
        return cls(HostMemory.from_buffer(layout, buffer, pages, order=order), _required(gpu))

    @classmethod
    def from_layers(
        cls,
        layout: KVLayout,
        buffers: Sequence[Sequence[Any]],
        pages: int,
        *,
        gpu: GpuEngine | None = None,
    ) -> Self:
        """Pages in one tensor per layer and segment; see HostMemory.from_layers."""
        return cls(HostMemory.from_layers(layout, buffers, pages), _required(gpu))

    @classmethod
    def allocate(
        cls, layout: KVLayout, pages: int, *, order: str | None = None, hugepages: bool = True
    ) -> Self:
        """Raises Unsupported: allocate a tensor and pass it to `from_buffer` instead."""
        raise Unsupported("allocate a CUDA tensor and pass it to DeviceMemory.from_buffer")

    def follow(self, stream: int) -> None:
        """Makes later puts and loads wait for the work that is on `stream` now: kernels that fill
        pages before a put, or that still read them before a load.
        """
        self.gpu.follow(stream)

    def stats(self) -> dict[str, Any]:
        return self.gpu.stats()

    def wait_idle(self, timeout_s: float) -> bool:
        return self.gpu.wait_idle(timeout_s)

    def segment(self, page: int, layer: int, k: int) -> npt.NDArray[np.uint8]:
        """Raises Unsupported: there is no view of GPU memory on the host; see `read`."""
        raise Unsupported("a page in GPU memory has no view; use read() and write()")

    def read(self, page: int) -> bytes:
        """All bytes of a page, as HostMemory.read.  Waits for a copy, so it is for tests and tools.

        Raises PageRangeError, and DeviceTimeout when the GPU does not copy it in time.
        """
        buffer = HostBuffer(self.layout.object_nbytes, hugepages=False)
        self._copy(page, buffer.address, to_page=False)
        return buffer.array.tobytes()

    def write(self, page: int, content: bytes | npt.NDArray[np.uint8]) -> None:
        """Fills a page, as HostMemory.write.  Waits and raises as `read`."""
        source = bytes_of_page(self.layout, content)
        buffer = HostBuffer(source.size, hugepages=False)
        buffer.array[:] = source
        self._copy(page, buffer.address, to_page=True)

    def _copy(self, page: int, host: int, *, to_page: bool) -> None:
        """Moves one page from or to private host memory, and waits."""
        driver, memory = self.gpu.driver, self.memory
        (number,) = memory.check_pages([page]).tolist()
        stream = driver.create_stream()
        try:
            for layer in range(self.layout.layers):
                for k, nbytes in enumerate(self.layout.segments):
                    there = int(memory.bases[layer, k]) + number * memory.stride_nbytes[k]
                    target, source = (there, host) if to_page else (host, there)
                    driver.copy(target, source, nbytes, stream)
                    host += nbytes
            deadline = time.monotonic() + _COPY_TIMEOUT_S
            while not driver.is_stream_done(stream):
                if time.monotonic() > deadline:
                    raise DeviceTimeout("the GPU copied no page in time; check whether it is busy")
                time.sleep(0.0001)
        finally:
            driver.destroy_stream(stream)


def _required(gpu: GpuEngine | None) -> GpuEngine:
    if gpu is None:
        raise ConfigError("pass gpu=, the engine that moves the pages of this GPU memory")
    return gpu
