"""KV pages in host DRAM, in one of the orders that servers use.

`HostMemory` only describes memory; ``ObjectStore.register`` makes it known to the controller.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tutti.base.checks import flag, instance, one_of, optional, takes, whole
from tutti.base.process import Owned
from tutti.base.units import format_nbytes
from tutti.errors import ConfigError, PageRangeError
from tutti.gio_uring.iocb import PagedMemory
from tutti.gio_uring.memory import HostBuffer, address_of, view_at
from tutti.medium.layout import KVLayout, itemsize_nbytes

#: Orders of one buffer.  The letters name the axes from the slowest to the fastest: segment (K, V
#: or the latent), layer, page, token.
LAYER_FIRST = "layer_first"  # [segment][layer][page]
PAGE_FIRST_DIRECT = "page_first_direct"  # [segment][page][layer]
PAGE_FIRST = "page_first"  # [segment][page][token][layer]: the layout is token_major()
ORDERS = (LAYER_FIRST, PAGE_FIRST_DIRECT, PAGE_FIRST)


PAGES_MAX = 2**32 - 1  # page numbers are u32

_LAYOUT = instance(KVLayout)
_ORDER = optional(one_of(*ORDERS))


def _pages(name: str, value: Any) -> None:
    whole(name, value, 1, PAGES_MAX)


class HostMemory(Owned):
    """Numbered pages of one KV layout in host memory; ``Store.register`` registers them.

    memory: where segment k of page p in layer l lies (see PagedMemory).
    buffers: the (address, nbytes) ranges to register.
    """

    def __init__(
        self, layout: KVLayout, memory: PagedMemory, buffers: Sequence[tuple[int, int]], owner: Any
    ) -> None:
        self.layout = layout
        self.memory = memory
        self.buffers = tuple(buffers)
        self.owner = owner  # keeps the memory alive

    def __repr__(self) -> str:
        name = type(self).__name__
        return f"<{name}: {self.pages} pages of {format_nbytes(self.layout.object_nbytes)}>"

    @property
    def pages(self) -> int:
        return self.memory.pages

    @property
    def nbytes(self) -> int:
        """Size of all buffers."""
        return sum(nbytes for _, nbytes in self.buffers)

    @classmethod
    @takes(layout=_LAYOUT, pages=_pages, order=_ORDER, hugepages=flag)
    def allocate(
        cls, layout: KVLayout, pages: int, *, order: str | None = None, hugepages: bool = True
    ) -> HostMemory:
        """Allocates memory for ``pages`` pages, on hugepages if possible.  order: see from_buffer.

        hugepages: False asks for ordinary pages, each of which costs the device a descriptor.
        Raises ConfigError for an unknown order or no pages, CapacityError for too little memory.
        """
        buffer = HostBuffer(pages * layout.object_nbytes, hugepages=hugepages)
        return cls.from_buffer(layout, buffer, pages, order=order)

    @classmethod
    @takes(layout=_LAYOUT, pages=_pages, order=_ORDER)
    def from_buffer(
        cls, layout: KVLayout, buffer: Any, pages: int, *, order: str | None = None
    ) -> HostMemory:
        """Pages in one buffer: a numpy array, anything with ``data_ptr`` (torch), shared memory,
        a writable buffer, or an (address, nbytes) pair whose memory the caller keeps alive.

        order: LAYER_FIRST (default) or PAGE_FIRST_DIRECT; token-major layouts are PAGE_FIRST.
        The segments follow one another, each as one array in that order.
        Raises ConfigError for no pages, and when the buffer is too small, read-only or not
        contiguous, or has elements of another size than the layout's (bytes suit every layout).
        """
        order = _check_order(layout, order)
        _check_elements(layout, buffer)
        base, nbytes = address_of(buffer)
        need = pages * layout.object_nbytes
        if nbytes < need:
            raise ConfigError(
                f"{pages} pages of {layout.object_nbytes} bytes need {need} bytes, the buffer has "
                f"{nbytes}; pass a larger buffer or fewer pages"
            )
        layers = layout.layers
        segments = np.array(layout.segments, np.uint64)
        starts = base + (np.cumsum(segments) - segments) * np.uint64(layers * pages)
        step = segments if order == PAGE_FIRST_DIRECT else segments * np.uint64(pages)
        bases = starts[None, :] + np.arange(layers, dtype=np.uint64)[:, None] * step[None, :]
        scale = layers if order == PAGE_FIRST_DIRECT else 1
        strides = tuple(int(segment) * scale for segment in layout.segments)
        memory = PagedMemory(bases.astype(np.uint64), strides, layout.segments, pages, buffer)
        return cls(layout, memory, [(base, need)], buffer)

    @classmethod
    @takes(layout=_LAYOUT, pages=_pages)
    def from_layers(
        cls, layout: KVLayout, buffers: Sequence[Sequence[Any]], pages: int
    ) -> HostMemory:
        """Pages in one buffer per layer and segment: ``buffers[layer][segment]``, page after page,
        as inference engines keep their KV.  Raises ConfigError for no pages, for a wrong number or
        size of buffers, and for a wrong size of their elements.
        """
        if len(buffers) != layout.layers:
            raise ConfigError(f"{len(buffers)} layers of buffers, the layout has {layout.layers}")
        bases = np.zeros((layout.layers, len(layout.segments)), np.uint64)
        ranges = []
        for layer, row in enumerate(buffers):
            if len(row) != len(layout.segments):
                raise ConfigError(
                    f"layer {layer} has {len(row)} buffers, the layout {len(layout.segments)}"
                )
            for k, buffer in enumerate(row):
                # Segments of several sizes, as scales, have a precision of their own.
                if len(set(layout.segments)) == 1:
                    _check_elements(layout, buffer)
                address, nbytes = address_of(buffer)
                if nbytes < pages * layout.segments[k]:
                    raise ConfigError(
                        f"buffer {k} of layer {layer} has {nbytes} bytes, {pages} pages need "
                        f"{pages * layout.segments[k]}"
                    )
                bases[layer, k] = address
                ranges.append((address, pages * layout.segments[k]))
        memory = PagedMemory(bases, layout.segments, layout.segments, pages, buffers)
        return cls(layout, memory, ranges, buffers)

    def stats(self) -> dict[str, Any]:
        """Its part of the store's stats; empty for host memory."""
        return {}

    def wait_idle(self, timeout_s: float) -> bool:
        """Waits until nothing but the store moves the pages; in host memory nothing else does."""
        return True

    def segment(self, page: int, layer: int, k: int) -> npt.NDArray[np.uint8]:
        """A view of segment ``k``, uint8 (segment_nbytes,).  Raises PageRangeError."""
        limits = (self.pages, self.layout.layers, len(self.layout.segments))
        if not all(
            isinstance(number, int | np.integer) and 0 <= number < limit
            for number, limit in zip((page, layer, k), limits, strict=True)
        ):
            raise PageRangeError(
                f"page {page!r}, layer {layer!r}, segment {k!r} is outside a pool of {limits[0]}"
                f" pages, {limits[1]} layers and {limits[2]} segments; use numbers from 0"
            )
        memory = self.memory
        page, layer, k = int(page), int(layer), int(k)  # numpy's integers may overflow
        address = int(memory.bases[layer, k]) + page * memory.stride_nbytes[k]
        return view_at(address, memory.segment_nbytes[k], self.owner)

    def read(self, page: int) -> bytes:
        """All bytes of a page, ordered as on the medium: layer by layer, segments in order."""
        return b"".join(
            self.segment(page, layer, k).tobytes()
            for layer in range(self.layout.layers)
            for k in range(len(self.layout.segments))
        )

    def write(self, page: int, content: bytes | npt.NDArray[np.uint8]) -> None:
        """Fills a page from ``object_nbytes`` bytes in the order of ``read``.  Raises ConfigError
        for another number of bytes, and PageRangeError.
        """
        source = bytes_of_page(self.layout, content)
        start = 0
        for layer in range(self.layout.layers):
            for k, nbytes in enumerate(self.layout.segments):
                self.segment(page, layer, k)[:] = source[start : start + nbytes]
                start += nbytes


def bytes_of_page(layout: KVLayout, content: Any) -> npt.NDArray[np.uint8]:
    """The content of a page as uint8.  Raises ConfigError for another type or number of bytes."""
    try:
        source = np.frombuffer(content, np.uint8)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"the content of a page is {type(content).__name__}; pass bytes"
        ) from error
    if source.size != layout.object_nbytes:
        raise ConfigError(f"a page has {layout.object_nbytes} bytes, not {source.size}; pass those")
    return source


def _check_elements(layout: KVLayout, buffer: Any) -> None:
    """Raises ConfigError for a tensor or an array of another type than the layout's KV."""
    size_of = getattr(buffer, "element_size", None)
    nbytes = getattr(buffer, "itemsize", 1) if size_of is None else size_of()
    want = itemsize_nbytes(layout.dtype)
    if nbytes not in (1, want) and layout.dtype not in ("uint8", "int8"):
        raise ConfigError(
            f"the buffer's elements have {nbytes} bytes, the layout's have {want} ({layout.dtype});"
            " make a layout of the buffer's dtype, or pass the memory as bytes:"
            " tensor.view(torch.uint8), array.view(numpy.uint8)"
        )


def _check_order(layout: KVLayout, order: str | None) -> str:
    by_layer = layout.layers == layout.model_layers
    if order is None:
        order = LAYER_FIRST if by_layer else PAGE_FIRST
    if order == PAGE_FIRST and by_layer and layout.layers > 1:
        raise ConfigError(
            "page-first memory interleaves the layers of every token; "
            "use layout.token_major() for the pool and its memory"
        )
    return order
