"""SGLang's pools in Tutti's terms: each has numbered pages of one layout.

A model has one pool of KV, and may have further ones: sliding windows, Mamba states, an indexer.
Unsupported pools are refused at start, with the reason.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tutti.errors import ConfigError, LayoutError, Unsupported
from tutti.gio_uring.iocb import PagedMemory
from tutti.gio_uring.memory import view_at
from tutti.integration.sglang.direct import adapter
from tutti.integration.sglang.identity import PageShape
from tutti.medium.geometry import WASTE_MAX, Geometry
from tutti.medium.layout import KVLayout
from tutti.memory.host_memory import HostMemory

Pages = npt.NDArray[np.int64]
Views = list[list[npt.NDArray[np.uint8]]]

#: Devices of pools: host memory, or GPU memory that CUDA addresses.
_DEVICES = ("cpu", "cuda")
_HICACHE = "serve this model in Tutti's HiCache mode instead (which does not take DeepSeek-V4)"
_LBA_NBYTES = 4096


@dataclass(frozen=True)
class Span:
    """A segment of all pages in one layer: page p has ``nbytes`` bytes at address + p * stride."""

    address: int
    nbytes: int
    stride_nbytes: int


Spans = list[list[Span]]


class KvPool:
    """One pool of one rank.

    name, source: SGLang's names of the pool, and of the pool whose keys and slots name its pages.
    slots: number of SGLang's slots per page; 1 if a slot is a page.
    device: where the memory is.  spans: SGLang's memory, as ``spans[layer][segment]``.
    views: the same as uint8 (pages, nbytes); empty unless it is host memory.
    layer_of: transfer layer -> layer of this pool; layers of the model without state are missing.
    packed: an object is one piece with all layers, because one layer of a page is too small for the
    medium's blocks, has too many segments for a command, or the layers differ.  Packed pages go
    through staging.
    """

    def __init__(self, entry: adapter.DevicePoolEntry, slots: int) -> None:
        self.name = str(entry.name)
        self.source = str(entry.indices_from_pool)
        self.slots = slots
        self.device_pool = entry.device_pool
        layers = sorted(entry.layer_mapping)
        self.layer_of: Mapping[int, int] = {layer: own for own, layer in enumerate(layers)}
        rows = [_buffers(entry, layer) for layer in layers]
        _check_buffers(self.name, rows)
        # Rows of token pools are slots; rows of other pools are pages.
        span = _row_span(entry)
        self.pages = min(buffer.shape[0] for row in rows for buffer in row) // span
        self.device: torch.device = rows[0][0].device
        self.spans: Spans = [[_span_of(self.name, b, span) for b in row] for row in rows]
        self.views: Views = []
        if self.device.type == "cpu":
            self.views = [[_view_of(span, self.pages) for span in row] for row in self.spans]
        self._owner = rows
        self.packed = _must_pack(self.spans)
        self.shape = self._shape(entry)

    @property
    def trailing(self) -> bool:
        """Whether only the last pages of a prefix are needed, as for states and windows."""
        return self.source != str(adapter.PoolName.KV)

    @property
    def nbytes(self) -> int:
        """Bytes of a page."""
        return sum(span.nbytes for row in self.spans for span in row)

    def host_pool(self, layout: KVLayout) -> HostMemory | None:
        """The memory in the form for ObjectStore.register, or DeviceMemory; None if packed."""
        if self.packed:
            return None
        bases = np.array([[span.address for span in row] for row in self.spans], np.uint64)
        strides = tuple(span.stride_nbytes for span in self.spans[0])
        memory = PagedMemory(bases, strides, layout.segments, self.pages, self._owner)
        buffers = [
            (span.address, (self.pages - 1) * span.stride_nbytes + span.nbytes)
            for row in self.spans
            for span in row
        ]
        return HostMemory(layout, memory, buffers, self._owner)

    def staging_views(self, pool: HostMemory) -> Views:
        """Views of staging, indexed like ``spans``; staging is a pool in one host buffer."""
        if not self.packed:
            return _views_by_layer(pool)
        whole = pool.owner.array[: pool.pages * self.nbytes].reshape(pool.pages, self.nbytes)
        views: Views = []
        start = 0
        for row in self.spans:
            views.append([])
            for span in row:
                views[-1].append(whole[:, start : start + span.nbytes])
                start += span.nbytes
        return views

    def page_numbers(self, indices: torch.Tensor, pages: int) -> Pages:
        """Page numbers of the slots of ``pages`` whole pages.  Waits for SGLang's device.

        Raises ConfigError if the slots are not whole pages: nothing may be moved then.
        """
        slots = indices.detach().to("cpu", torch.int64).numpy().reshape(-1)
        if slots.size != pages * self.slots:
            raise ConfigError(f"pool {self.name}: {slots.size} slots are not {pages} pages")
        table = slots.reshape(pages, self.slots)
        first = table[:, 0]
        numbers: Pages = first // self.slots
        wrong = (first % self.slots).any() or (first < 0).any()
        if wrong or (table != first[:, None] + np.arange(self.slots)).any():
            raise ConfigError(f"pool {self.name}: the slots are not whole pages; nothing was moved")
        if pages and numbers.max() >= self.pages:
            raise ConfigError(f"pool {self.name}: slot {int(slots.max())} lies beyond the pool")
        return numbers

    def _shape(self, entry: adapter.DevicePoolEntry) -> PageShape:
        pool = entry.device_pool
        kind, dims = _kind_of(pool)
        dtypes = [_dtype_name(buffer.dtype) for buffer in self._owner[0]]
        if len(set(dtypes)) > 1:  # types of the same size could be exchanged unnoticed
            kind = "-".join((kind, *dtypes))
        layers = len(self.spans)
        sizes = tuple(span.nbytes for span in self.spans[0])
        if self.packed:
            dims = (layers, *sorted({span.nbytes for row in self.spans for span in row}))
        return PageShape(
            pool=self.name,
            kind=kind,
            layers=1 if self.packed else layers,
            model_layers=1 if self.packed else layers,
            first_layer=int(getattr(pool, "start_layer", 0) or 0),
            segments=(self.nbytes,) if self.packed else sizes,
            page_size=self.slots,
            dtype=_dtype_name(entry.kv_buffer[0].dtype),
            order="packed" if self.packed else "layer_first",
            dims=dims,
        )


@dataclass(frozen=True)
class KvPoolGroup:
    """All pools of one rank, by SGLang's name.  layers: number of the model's layers on this rank.

    context_tokens: tokens of the longest request.
    """

    pools: Mapping[str, KvPool]
    layers: int
    page_size: int
    replicated: bool
    context_tokens: int

    @property
    def device(self) -> torch.device:
        """The device of all pools.  Raises Unsupported if they are on several."""
        return _one_device("the pools lie", {pool.device for pool in self.pools.values()})

    @property
    def has_states(self) -> bool:
        """Whether requests have Mamba states, in a pool next to the KV pool."""
        return adapter.PoolName.MAMBA in self.pools


def kv_pool_group(params: Any, components: Collection[Any]) -> KvPoolGroup:
    """The pools of CacheInitParams.  Raises Unsupported with the reason."""
    kvcache = params.token_to_kv_pool_allocator.get_kvcache()
    _check_pool(kvcache, params.page_size)
    try:
        group = adapter.device_group(params, components)
    except (ArithmeticError, AssertionError, NotImplementedError, ValueError) as error:
        names = ", ".join(sorted(component.name for component in components))
        raise Unsupported(
            f"SGLang offers no direct access to a {type(kvcache).__name__} with {names}"
            f"{_with_drafts(params)} ({error}); {_HICACHE}"
        ) from error
    pools = {}
    for entry in group.entries:
        _check_pool(entry.device_pool, None)
        pools[str(entry.name)] = KvPool(entry, entry.page_size)
    if all(pool.trailing for pool in pools.values()):
        raise Unsupported(f"no KV of {type(kvcache).__name__} is in pages; {_HICACHE}")
    return KvPoolGroup(
        pools,
        group.num_layers,
        group.page_size,
        group.rank_replicated,
        int(params.req_to_token_pool.max_context_len),
    )


def _with_drafts(params: Any) -> str:
    drafts = params.mtp_draft_device_pools or params.sidecar_draft_device_pools
    return " and a speculative draft model" if drafts else ""


def _check_pool(pool: Any, page_size: int | None) -> None:
    """Raises Unsupported for a pool of which part of the KV would be lost."""
    scales = ("k_scale_buffer", "native_k_scale_buffer", "kv_scale_buffer")
    if any(getattr(pool, scale, None) is not None for scale in scales):
        raise Unsupported(
            "the KV cache is quantised with separate scales, which this version's linker "
            "does not store; choose a --kv-cache-dtype without scales"
        )
    layout = getattr(pool, "kv_cache_layout", "nhd")
    if layout != "nhd":
        raise Unsupported(f"the KV pool has the memory layout {layout!r}; only 'nhd' is supported")
    if getattr(pool, "layer_shard_enabled", False):
        raise Unsupported(f"a KV pool whose layers are sharded is not supported; {_HICACHE}")
    if page_size is not None and pool.page_size != page_size:
        raise Unsupported(
            f"the KV pool has pages of {pool.page_size} tokens, the tree of {page_size}; "
            "give SGLang one --page-size, and --dcp-size 1"
        )


def _row_span(entry: adapter.DevicePoolEntry) -> int:
    """Number of buffer rows per page."""
    _, _, nbytes = entry.buffer_meta[0][0]
    buffer = entry.components[0][0]
    return max(1, int(nbytes) * int(buffer.shape[0]) // int(buffer.nbytes))


def _buffers(entry: adapter.DevicePoolEntry, layer: int) -> list[torch.Tensor]:
    mapped = entry.layer_mapping[layer]
    numbers = (mapped,) if isinstance(mapped, int) else tuple(mapped)
    return [component[i] for component in entry.components for i in numbers]


def _one_device(what: str, devices: set[torch.device]) -> torch.device:
    if len(devices) > 1:
        raise Unsupported(f"{what} on several devices, which is not supported; {_HICACHE}")
    return devices.pop()


def _check_buffers(name: str, rows: Sequence[Sequence[torch.Tensor]]) -> None:
    kind = _one_device(f"pool {name} lies", {buffer.device for row in rows for buffer in row}).type
    if kind not in _DEVICES:
        raise Unsupported(
            f"pool {name} is in {kind} memory; the linker moves pools in the memory of the CPU and "
            f"of CUDA devices; {_HICACHE}"
        )
    starts = [buffer.data_ptr() for row in rows for buffer in row]
    if len(set(starts)) != len(starts):
        raise Unsupported(f"layers of pool {name} share memory, which is not supported; {_HICACHE}")


def _span_of(name: str, buffer: torch.Tensor, rows: int) -> Span:
    """The pages of a buffer, with ``rows`` rows per page."""
    row_nbytes = buffer[0].numel() * buffer.element_size()
    stride = buffer.stride(0) * buffer.element_size()
    if not buffer[0].is_contiguous() or (rows > 1 and stride != row_nbytes):
        raise Unsupported(
            f"pages of pool {name} are not contiguous in memory, which is not supported; {_HICACHE}"
        )
    return Span(buffer.data_ptr(), row_nbytes * rows, stride * rows)


def _view_of(span: Span, pages: int) -> npt.NDArray[np.uint8]:
    """uint8 (pages, nbytes) over host memory."""
    flat = view_at(span.address, (pages - 1) * span.stride_nbytes + span.nbytes)
    view: npt.NDArray[np.uint8] = np.lib.stride_tricks.as_strided(
        flat, (pages, span.nbytes), (span.stride_nbytes, 1)
    )
    return view


def spans_of(views: Views, shift: int = 0) -> Spans:
    """The spans of views, with ``shift`` added to their addresses."""
    return [
        [Span(int(v.ctypes.data) + shift, int(v.shape[1]), int(v.strides[0])) for v in row]
        for row in views
    ]


def _must_pack(spans: Spans) -> bool:
    sizes = {tuple(span.nbytes for span in row) for row in spans}
    strides = {tuple(span.stride_nbytes for span in row) for row in spans}
    if len(sizes) > 1 or len(strides) > 1:
        return True
    try:
        one = Geometry(len(spans), next(iter(sizes)), _LBA_NBYTES, 1, 1)
    except LayoutError:
        return True
    return one.waste > WASTE_MAX


def _views_by_layer(pool: HostMemory) -> Views:
    """Views of a layer-first pool in one buffer, in the form of KvPool.views."""
    array: npt.NDArray[np.uint8] = pool.owner.array
    views: Views = []
    for bases in pool.memory.bases:
        row = []
        for base, nbytes in zip(bases, pool.memory.segment_nbytes, strict=True):
            start = int(base) - pool.owner.address
            row.append(array[start : start + pool.pages * nbytes].reshape(pool.pages, nbytes))
        views.append(row)
    return views


def _kind_of(pool: Any) -> tuple[str, tuple[int, ...]]:
    """The kind of KV in a pool, for its identity."""
    if type(pool) is adapter.MHATokenToKVPool:
        return "mha", (pool.head_num, pool.head_dim, pool.v_head_dim)
    if type(pool) is adapter.MLATokenToKVPool:
        return "mla", (pool.kv_lora_rank, pool.qk_rope_head_dim)
    return type(pool).__name__, ()


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
