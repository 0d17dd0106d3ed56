"""I/O control blocks: runs, memory and their arithmetic, shared with the native engine.

The structs mirror ``kernels/include/gio_uring/iocb.h``; a test compares the layouts.  An IOCB is
prepared once for all layers: nothing here loops over pages in Python.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from tutti.base.arrays import U32, U64, UINT32
from tutti.errors import ConfigError, PageRangeError
from tutti.gio_uring import _native
from tutti.gio_uring.nvme_spec import PAGE_NBYTES
from tutti.native import address, members

SEGMENTS_MAX = 4
_COPIED = UINT32, np.dtype(np.int64), np.dtype(np.uint64), np.dtype(np.int32)  # by native code

#: ``gio::Run``: one command per layer.
RUN_DTYPE = np.dtype(
    [("slba", "<u8"), ("nsid", "<u4"), ("nlb", "<u4"), ("first", "<u4"), ("skip", "<u4")]
)

Runs = npt.NDArray[np.void]
Pages = npt.NDArray[np.integer[Any]]  #: see as_pages


class IocbStruct(ctypes.Structure):
    """``gio::Iocb``."""

    _fields_ = (
        *members(ctypes.c_uint64, "runs pages bases padding"),
        ("segment_stride", ctypes.c_uint64 * SEGMENTS_MAX),
        ("segment_nbytes", ctypes.c_uint32 * SEGMENTS_MAX),
        *members(ctypes.c_uint32, "n_runs n_pages n_layers n_segments opcode flags slice_nlb"),
        *members(ctypes.c_uint32, "layer_stride_nlb lba_shift psdt"),
    )


@dataclass(frozen=True)
class PagedMemory:
    """Addresses of the segments of numbered pages.

    Segment ``k`` of page ``p`` in layer ``l`` is ``segment_nbytes[k]`` bytes at
    ``bases[l, k] + p * stride_nbytes[k]``.

    bases: uint64 (layers, segments), addresses inside registered memory.
    stride_nbytes, segment_nbytes: one number per segment, at most four.
    pages: number of pages; page numbers are 0 to pages - 1.
    owner: keeps the memory mapped; jobs reference it as long as a device may write there.
    path: the `Submitter` of memory that the controller cannot access, such as a GPU's.
    """

    bases: U64
    stride_nbytes: tuple[int, ...]
    segment_nbytes: tuple[int, ...]
    pages: int
    owner: Any = None
    path: Any = None

    def __post_init__(self) -> None:
        if self.bases.ndim != 2 or self.bases.shape[1] != len(self.segment_nbytes):
            raise ConfigError("bases must have the shape (layers, segments)")
        if not 1 <= len(self.segment_nbytes) <= SEGMENTS_MAX:
            raise ConfigError(f"a slice has 1 to {SEGMENTS_MAX} segments")
        if len(self.stride_nbytes) != len(self.segment_nbytes):
            raise ConfigError("pass one stride per segment")

    @cached_property
    def table(self) -> U64:
        """``bases`` as a contiguous uint64 array, for native code."""
        return np.ascontiguousarray(self.bases, np.uint64)

    @cached_property
    def fills_pages(self) -> bool:
        """Whether every segment begins and ends at a page boundary of the device."""
        lengths = (*self.segment_nbytes, *self.stride_nbytes)
        is_odd = any(nbytes % PAGE_NBYTES for nbytes in lengths)
        return not is_odd and not np.any(self.bases % np.uint64(PAGE_NBYTES))

    @cached_property
    def iocb(self) -> IocbStruct:
        """An I/O control block with the fields that depend only on this memory.  n_pages: all."""
        io = IocbStruct(n_pages=self.pages)
        io.bases, (io.n_layers, io.n_segments) = address(self.table), self.table.shape
        for k, nbytes in enumerate(self.segment_nbytes):
            io.segment_nbytes[k], io.segment_stride[k] = nbytes, self.stride_nbytes[k]
        return io

    def check_pages(self, pages: npt.ArrayLike, *, once: bool = False, n: int | None = None) -> U32:
        """A copy of ``pages`` as uint32 (n,).  once: refuse duplicates.  n: the number of keys.

        Raises PageRangeError, ConfigError for duplicates or another number of pages than of keys.
        """
        array = as_pages(pages, n)
        numbers = np.empty(array.size, UINT32)
        arguments = (array.tobytes(), array.itemsize, array.size, self.pages, address(numbers))
        ascends = _native.quick().gio_copy_pages(*arguments)
        if ascends < 0:
            bad = min(0, int(array.min())) or int(array.max())
            raise PageRangeError(
                f"page {bad} is outside the registered memory of {self.pages} pages; "
                f"use page numbers from 0 to {self.pages - 1}"
            )
        if once and not ascends and len(set(numbers.tolist())) != numbers.size:
            raise ConfigError("a page is named twice; pass a different page for each key")
        return numbers


def as_pages(pages: npt.ArrayLike, n: int | None = None) -> Pages:
    """Page numbers as an array of integers, (n,), that native code reads; of any size as yet.

    n: the number of keys.  Raises PageRangeError, ConfigError for another number of pages.
    """
    array = np.asarray(pages)
    is_copied, size = array.dtype in _COPIED, array.size
    if array.ndim != 1 or (size and not is_copied and array.dtype.kind not in "iu"):
        raise PageRangeError("pages must be a one-dimensional sequence of integers")
    if n is not None and n != size:
        raise ConfigError(f"{n} keys and {size} pages; pass one page per key")
    return array if is_copied else array.astype(np.int64)


def flat_memory(address: int, nbytes: int, count: int, owner: Any = None) -> PagedMemory:
    """Memory of ``count`` consecutive blocks of ``nbytes`` bytes: one layer, one segment."""
    return PagedMemory(np.array([[address]], np.uint64), (nbytes,), (nbytes,), count, owner)


class CutStruct(ctypes.Structure):
    """``gio::Cut``: how runs are cut into commands."""

    _fields_ = (
        *members(ctypes.c_uint32, "slice_nlb lba_nbytes command_nlb_max command_slices_max"),
    )


@dataclass(frozen=True)
class Extents:
    """Runs on the medium, in the order of their pages.

    slba, nsid, count: (n,) first LBA in layer 0, namespace, number of consecutive slices.
    slice_nlb: LBAs of one slice.  layer_stride_nlb: LBAs from one layer to the next.
    """

    slba: npt.ArrayLike
    nsid: npt.ArrayLike
    count: npt.ArrayLike
    slice_nlb: int
    layer_stride_nlb: int = 0

    def commands(self, cut: CutStruct) -> Runs:
        """The commands of one layer as RUN_DTYPE, in the same order.

        A slice longer than a command is split at LBAs; otherwise commands hold whole slices.
        """
        slba = np.ascontiguousarray(self.slba, np.uint64)
        nsid = np.ascontiguousarray(self.nsid, np.uint32)
        count = np.ascontiguousarray(self.count, np.int64)
        if not slba.shape == nsid.shape == count.shape == (slba.size,):
            raise ValueError("slba, nsid and count must have one shape (n,)")
        places = (address(slba), address(nsid), address(count), slba.size)
        return fill_runs(_native.quick().gio_split_runs, places, cut, 2 * slba.size + 64)


def fill_runs(
    function: Callable[..., int], arguments: tuple[Any, ...], cut: CutStruct, guess: int
) -> Runs:
    """Returns the commands that a native function writes; guess: expected number of commands."""
    for _ in range(2):  # a second time if the guess was too low
        runs = np.empty(guess, RUN_DTYPE)
        found = function(*arguments, ctypes.byref(cut), address(runs), guess)
        if found < 0:
            raise ValueError("a slice, command or slot has size 0 or exceeds the pool")
        if found <= guess:
            break
        guess = found
    return runs[:found]
