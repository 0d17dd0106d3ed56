"""SGLang's host pools in Tutti's terms: the fragments of a page, and their addresses.

They come from the pool's `get_page_buffer_meta`, which SGLang has for zero-copy storage: any kind
of pool is supported if its addresses are affine functions of the page number.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tutti.errors import Unsupported
from tutti.gio_uring.iocb import SEGMENTS_MAX, PagedMemory
from tutti.integration.sglang.identity import PageShape
from tutti.medium.layout import KVLayout
from tutti.memory.host_memory import HostMemory

LAYOUTS = ("layer_first", "page_first", "page_first_direct")

_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25  # include/uapi/asm-generic/mman-common.h
_HUGEPAGE_NBYTES = 2 << 20
COLLAPSING = "tutti-hugepages"  # name of the thread that collapses a pool
_COLLAPSE_STEP_NBYTES = 64 << 20
#: Pause before each round.  A round ends after repeated failures: each makes the kernel compact.
_COLLAPSE_PAUSES_S = (0.0, 5.0, 30.0, 120.0, 600.0)
_COLLAPSE_FAILURES = 16
_REFUSED_FOR_NOW = (errno.EAGAIN, errno.ENOMEM, errno.EBUSY)  # madvise(2)
_COLLAPSE_REST = 3  # pause, in times of a piece: so it uses a quarter of one processor
#: Of shared memory, as SGLang allocates it without the plugin; the kernel chooses the address.
_SHIFTED = (
    " (shared memory at an address that is not a multiple of 2 MiB: name Tutti as the storage when"
    " the server starts, so that the plugin has the pool allocated on large pages)"
)


class PageFragments:
    """The fragments of page 0, and the distance of each from page to page.

    addresses, sizes, strides: (layers, segments), sizes and strides in bytes.
    """

    def __init__(self, host_pool: Any, name: str) -> None:
        """Raises Unsupported if the addresses are not affine functions of the page number."""
        if not hasattr(host_pool, "page_num"):
            raise Unsupported(
                f"host pool {name!r} ({type(host_pool).__name__}) has no pages of its own in "
                "memory, so HiCache cannot keep this model's KV in Tutti; use the linker"
            )
        layout = getattr(host_pool, "layout", None)
        if layout not in LAYOUTS:
            raise Unsupported(
                f"host pool {name!r} has the memory layout {layout!r}; start SGLang with "
                f"--hicache-mem-layout {' or '.join(LAYOUTS)}"
            )
        self.layout: str = layout
        self.pages = int(host_pool.page_num)
        self.page_tokens = int(host_pool.page_size)
        first = _meta(host_pool, 0, name)
        last = _meta(host_pool, self.pages - 1, name)
        second = _meta(host_pool, min(1, self.pages - 1), name)
        strides = second[0] - first[0]
        if not (
            np.array_equal(first[1], last[1])
            and np.array_equal(first[0] + strides * (self.pages - 1), last[0])
        ):
            raise Unsupported(
                f"the pages of host pool {name!r} ({type(host_pool).__name__}) are not evenly "
                "spaced; this kind of pool is not supported"
            )
        self.model_layers = _model_layers(host_pool)
        shape = _shape(len(first[0]), self.layout, self.model_layers, name)
        self.addresses = first[0].reshape(shape)
        self.sizes = first[1].reshape(shape)
        self.strides = strides.reshape(shape)
        if (self.sizes != self.sizes[0]).any() or (self.strides != self.strides[0]).any():
            raise Unsupported(
                f"the layers of host pool {name!r} differ in size; use --hicache-mem-layout "
                "page_first"
            )

    @property
    def layers(self) -> int:
        """Number of layers of an object; 1 if a page has one fragment per segment."""
        return int(self.addresses.shape[0])

    @property
    def segments(self) -> tuple[int, ...]:
        """Bytes of each fragment of a page in one layer."""
        return tuple(int(size) for size in self.sizes[0])

    def buffers(self) -> list[tuple[int, int]]:
        """The (address, nbytes) ranges of all pages; adjacent ones are merged."""
        starts = self.addresses.reshape(-1)
        reach = (self.strides * (self.pages - 1) + self.sizes).reshape(-1)
        merged: list[tuple[int, int]] = []
        for start, nbytes in sorted(zip(starts.tolist(), reach.tolist(), strict=True)):
            if merged and start <= merged[-1][0] + merged[-1][1]:
                base, length = merged[-1]
                merged[-1] = (base, max(length, start + nbytes - base))
            else:
                merged.append((start, nbytes))
        return merged


def shape_of(host_pool: Any, name: str, fragments: PageFragments) -> PageShape:
    """The page shape for the fingerprint."""
    heads = ("head_num", "head_dim", "v_head_dim", "kv_lora_rank", "qk_rope_head_dim")
    found = [getattr(host_pool, attribute, None) for attribute in heads]
    return PageShape(
        pool=name,
        kind=_kind_of(host_pool),
        layers=fragments.layers,
        model_layers=fragments.layers if fragments.layers > 1 else fragments.model_layers,
        first_layer=int(getattr(host_pool, "start_layer", 0) or 0),
        segments=fragments.segments,
        page_size=fragments.page_tokens,
        dtype=str(host_pool.dtype).removeprefix("torch."),
        order=fragments.layout,
        dims=[int(dim) for dim in found if isinstance(dim, int) and dim > 0],
    )


def _kind_of(host_pool: Any) -> str:
    """The kind of KV.  A pool of Mamba states has two data types, of which `dtype` is one."""
    kind = "mla" if hasattr(host_pool, "kv_lora_rank") else type(host_pool).__name__
    states = getattr(host_pool, "temporal_dtype", None)
    return kind if states is None else f"{kind}-{str(states).removeprefix('torch.')}"


def is_sharded(host_pool: Any) -> bool:
    """Whether each TP rank has its own part of a page: of its heads, or of its Mamba states.

    True also for such pools beside a latent (MLA), which is replicated.
    """
    return hasattr(host_pool, "head_num") or hasattr(host_pool, "temporal_dtype")


def host_pool_of(layout: KVLayout, fragments: PageFragments, owner: Any) -> HostMemory:
    """The pool's memory for ObjectStore.register; `owner` keeps it alive."""
    memory = PagedMemory(
        np.ascontiguousarray(fragments.addresses, np.uint64),
        tuple(int(stride) for stride in fragments.strides[0]),
        fragments.segments,
        fragments.pages,
    )
    return HostMemory(layout, memory, fragments.buffers(), owner)


def advise_hugepages(buffers: list[tuple[int, int]], how: str, stop: threading.Event) -> str:
    """Requests hugepages for ranges of memory; how: "advise", or "collapse" (slow).

    Returns the reason of a failure, or "".  A failure affects only speed.
    """
    ranges = []
    for address, nbytes in buffers:
        start = -(-address // _HUGEPAGE_NBYTES) * _HUGEPAGE_NBYTES
        end = (address + nbytes) // _HUGEPAGE_NBYTES * _HUGEPAGE_NBYTES
        if end > start:
            ranges.append((start, end))
    advised = (_madvise(start, end - start, _MADV_HUGEPAGE) for start, end in ranges)
    code = next((code for code in advised if code), 0)
    if code:
        return f"madvise: {errno.errorcode[code]}, {os.strerror(code)}"
    return _collapse(ranges, stop) if how == "collapse" else ""


def _collapse(ranges: list[tuple[int, int]], stop: threading.Event) -> str:
    """Collapses in rounds, in ever shorter pieces: the kernel stops within a piece at the first
    large page that it cannot find or build, and memory may be free or unpinned later.

    What the kernel will never collapse (EINVAL) is divided into large pages at once, each is tried
    once, and the others go on.
    """
    step, code = _COLLAPSE_STEP_NBYTES, 0
    never_nbytes, never_at, never_code = 0, 0, 0
    for pause_s in _COLLAPSE_PAUSES_S:
        if stop.wait(pause_s):
            return ""
        untried: list[tuple[int, int]] = []
        refused: list[tuple[int, int]] = []
        in_a_row = 0
        pieces = [*_pieces(ranges, step)][::-1]
        while pieces:
            at, end = pieces.pop()
            if in_a_row >= _COLLAPSE_FAILURES or stop.is_set():
                untried.append((at, end))
                continue
            begin_s = time.monotonic()
            number = _madvise(at, end - at, _MADV_COLLAPSE)
            stop.wait(_COLLAPSE_REST * (time.monotonic() - begin_s))
            if number in _REFUSED_FOR_NOW:
                in_a_row, code = in_a_row + 1, number
                refused.append((at, end))
            elif number and end - at > _HUGEPAGE_NBYTES:
                pieces += [*_pieces([(at, end)], _HUGEPAGE_NBYTES)][::-1]
            elif number:
                never_nbytes, never_at, never_code = never_nbytes + end - at, at, number
            else:
                in_a_row = 0
        ranges, step = untried + refused, max(_HUGEPAGE_NBYTES, step // 4)
        if not ranges:
            break
    nbytes = sum(end - at for at, end in ranges)
    whys = [_refusal(nbytes, code)] if nbytes else []
    if never_nbytes:
        more = _SHIFTED if _is_shifted(never_at) else ""
        whys.append(_refusal(never_nbytes, never_code) + more)
    return "; ".join(whys)


def _refusal(nbytes: int, code: int) -> str:
    return f"MADV_COLLAPSE of {nbytes >> 20} MiB: {errno.errorcode[code]}, {os.strerror(code)}"


def _is_shifted(address: int) -> bool:
    """Whether memory is shared, and its address and its offset differ modulo a large page.

    No large page can be mapped there (thp_vma_suitable_order in include/linux/huge_mm.h).
    """
    for line in Path("/proc/self/maps").read_text().splitlines():
        ends, permissions, offset, *_ = line.split()
        start, end = (int(part, 16) for part in ends.split("-"))
        if start <= address < end:
            is_even = (start - int(offset, 16)) % _HUGEPAGE_NBYTES == 0
            return permissions.endswith("s") and not is_even
    return False


def _pieces(ranges: list[tuple[int, int]], step: int) -> Iterator[tuple[int, int]]:
    for start, end in ranges:
        for at in range(start, end, step):
            yield at, min(end, at + step)


def _madvise(address: int, nbytes: int, advice: int) -> int:
    """Calls madvise(2); returns 0 or errno."""
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return ctypes.get_errno() if madvise(address, nbytes, advice) else 0


def _model_layers(host_pool: Any) -> int:
    for attribute in ("layer_num", "num_mamba_layers"):
        value = getattr(host_pool, attribute, None)
        if isinstance(value, int) and value > 0:
            return value
    return 1


def _meta(host_pool: Any, page: int, name: str) -> tuple[Any, Any]:
    """Addresses and sizes (bytes, int64) of the fragments of one page."""
    import torch

    tokens = int(host_pool.page_size)
    indices = torch.arange(page * tokens, (page + 1) * tokens, dtype=torch.int64)
    try:
        addresses, sizes = host_pool.get_page_buffer_meta(indices)
    except (NotImplementedError, AttributeError, ValueError) as error:
        raise Unsupported(
            f"host pool {name!r} ({type(host_pool).__name__}) offers no zero-copy access: {error}"
        ) from error
    return np.array(addresses, np.int64), np.array(sizes, np.int64)


def _shape(fragments: int, layout: str, model_layers: int, name: str) -> tuple[int, int]:
    """(layers, segments) of a page with this number of fragments.

    Layer-first memory has a fragment per layer, alternately K and V.  Page-first memory has one for
    all layers, so that such an object is one slice, with few, long descriptors.
    """
    layers = model_layers if layout == "layer_first" else 1
    if fragments % layers or not 1 <= fragments // layers <= SEGMENTS_MAX:
        raise Unsupported(
            f"a page of host pool {name!r} has {fragments} fragments for {layers} layers; at most "
            f"{SEGMENTS_MAX} per layer are supported"
        )
    return layers, fragments // layers
