"""I/O control blocks: runs, memory and their arithmetic, shared with the native engine.

The structs mirror ``kernels/include/gio_uring/iocb.h``; a test compares the layouts.  An IOCB is
prepared once for all layers with vectorised code: nothing here loops over pages.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tutti.arrays import U32, U64
from tutti.errors import ConfigError, PageRangeError

SEGMENTS_MAX = 4

#: ``gio::Run``: one command per layer.
RUN_DTYPE = np.dtype(
    [("slba", "<u8"), ("nsid", "<u4"), ("nlb", "<u4"), ("first", "<u4"), ("skip", "<u4")]
)


class IocbStruct(ctypes.Structure):
    """``gio::Iocb``."""

    _fields_ = (
        ("runs", ctypes.c_uint64),
        ("pages", ctypes.c_uint64),
        ("bases", ctypes.c_uint64),
        ("padding", ctypes.c_uint64),
        ("segment_stride", ctypes.c_uint64 * SEGMENTS_MAX),
        ("segment_nbytes", ctypes.c_uint32 * SEGMENTS_MAX),
        ("n_runs", ctypes.c_uint32),
        ("n_pages", ctypes.c_uint32),
        ("n_layers", ctypes.c_uint32),
        ("n_segments", ctypes.c_uint32),
        ("opcode", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("slice_nlb", ctypes.c_uint32),
        ("layer_stride_nlb", ctypes.c_uint32),
        ("lba_shift", ctypes.c_uint32),
        ("psdt", ctypes.c_uint32),
    )


@dataclass(frozen=True)
class PagedMemory:
    """Where the segments of numbered pages lie.

    Segment ``k`` of page ``p`` in layer ``l`` is ``segment_nbytes[k]`` bytes at
    ``bases[l, k] + p * stride_nbytes[k]``.

    bases: uint64 (layers, segments), addresses inside registered memory.
    stride_nbytes, segment_nbytes: one number per segment, at most four.
    pages: how many pages there are; a page number is below it.
    owner: what keeps the memory mapped; jobs hold it as long as a device may write there.
    path: the `Submitter` of memory that the controller does not reach itself, such as a GPU's.
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
            raise ConfigError("give one stride per segment")

    def check_pages(self, pages: npt.ArrayLike) -> U32:
        """A copy of ``pages`` as uint32 (n,).  Raises PageRangeError."""
        array = np.asarray(pages)
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            raise PageRangeError("pages must be a one-dimensional sequence of integers")
        if array.size:
            low, high = int(array.min()), int(array.max())
            if low < 0 or high >= self.pages:
                bad = low if low < 0 else high
                raise PageRangeError(
                    f"page {bad} is outside the registered pool of {self.pages} pages; "
                    f"use page numbers from 0 to {self.pages - 1}"
                )
        return array.astype(np.uint32, order="C")


def flat_memory(address: int, nbytes: int, count: int, owner: Any = None) -> PagedMemory:
    """Memory of ``count`` consecutive blocks of ``nbytes`` bytes: one layer, one segment."""
    return PagedMemory(np.array([[address]], np.uint64), (nbytes,), (nbytes,), count, owner)


def split_runs(
    slba: npt.ArrayLike,
    nsid: npt.ArrayLike,
    count: npt.ArrayLike,
    *,
    slice_nlb: int,
    lba_nbytes: int,
    command_nlb_max: int,
    command_slices_max: int,
) -> npt.NDArray[np.void]:
    """Cuts runs of ``count`` consecutive slices into commands.

    slba, nsid, count: (n,) first LBA in layer 0, namespace and number of slices of each run; the
    runs' pages follow one another.  Returns RUN_DTYPE, in the same order.  A slice longer than a
    command is split at LBAs; otherwise commands hold whole slices.
    """
    slba = np.asarray(slba, np.uint64)
    nsid = np.asarray(nsid, np.uint32)
    count = np.asarray(count, np.int64)
    first = np.cumsum(count) - count
    if slice_nlb <= command_nlb_max:
        step = max(1, min(command_nlb_max // slice_nlb, command_slices_max))
        pieces = -(-count // step)
        run, piece = _repeat(pieces)
        start = piece * step
        nlb = np.minimum(step, count[run] - start) * slice_nlb
        skip_nlb = np.zeros_like(start)
    else:
        per_slice = -(-slice_nlb // command_nlb_max)
        run, piece = _repeat(count * per_slice)
        start, part = np.divmod(piece, per_slice)
        skip_nlb = part * command_nlb_max
        nlb = np.minimum(command_nlb_max, slice_nlb - skip_nlb)
    out = np.zeros(run.size, RUN_DTYPE)
    out["slba"] = slba[run] + (start * slice_nlb + skip_nlb).astype(np.uint64)
    out["nsid"] = nsid[run]
    out["nlb"] = nlb
    out["first"] = first[run] + start
    out["skip"] = skip_nlb * lba_nbytes
    return out


def _repeat(pieces: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.int64]]:
    """Index of the run and number of the piece inside it, for every piece."""
    run = np.repeat(np.arange(pieces.size), pieces)
    piece = np.arange(run.size) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    return run, piece
