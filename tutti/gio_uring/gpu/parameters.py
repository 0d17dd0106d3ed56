"""Parameters of device kernels: the structs of ``kernels/device/parameters.cuh``.

That file describes every field, the kernels and their order; a test
compares the layouts.  Addresses are device addresses unless a field says otherwise.
"""

from __future__ import annotations

import ctypes

#: `RunState.status` of a command that has not ended, and with `NO_CID` one that was not sent.
RUN_PENDING = 0xFFFFFFFF

#: Most threads of a block, where the entry point says "32 to 256".
BLOCK_THREADS_MAX = 256

_U32 = ctypes.c_uint32
_U64 = ctypes.c_uint64


class QueueShareStruct(ctypes.LittleEndianStructure):
    """``gio::QueueShare``: one block's part of every layer."""

    _fields_ = (
        ("qp", _U64),
        ("lists", _U64),
        ("lists_dma", _U64),
        ("list_nbytes", _U32),
        ("first_run", _U32),
        ("n_runs", _U32),
        ("lost", _U32),
    )


class RunStateStruct(ctypes.LittleEndianStructure):
    """``gio::RunState``: where one run's command stands."""

    _fields_ = (("cid", _U32), ("status", _U32))


class LayerTallyStruct(ctypes.LittleEndianStructure):
    """``gio::LayerTally``: what the blocks of a layer add up."""

    _fields_ = (("arrived", _U32), ("status", _U32), ("owned", _U32), ("reserved", _U32))


class SliceTableStruct(ctypes.LittleEndianStructure):
    """``gio::SliceTable``: where slices lie, staged and in their pages."""

    _fields_ = (
        ("paged", _U64),
        ("staged_bases", _U64),
        ("staged_stride", _U64),
        ("staged_flags", _U64),
        ("digests", _U64),
        ("page_status", _U64),
    )


class BatchStruct(ctypes.LittleEndianStructure):
    """``gio::Batch``: everything that a kernel needs, for all layers."""

    _fields_ = (
        ("iocb", _U64),
        ("shares", _U64),
        ("states", _U64),
        ("slices", _U64),
        ("flags", _U64),
        ("tallies", _U64),
        ("timeout_ns", _U64),
        ("n_shares", _U32),
        ("ready", _U32),
    )


class PostStruct(ctypes.LittleEndianStructure):
    """``gio::Post``: one layer for the persistent kernel."""

    _fields_ = (("batch", _U64), ("layer", _U32), ("publish", _U32))


class MailboxStruct(ctypes.LittleEndianStructure):
    """``gio::Mailbox``: the persistent kernel's orders."""

    _fields_ = (
        ("posts", _U64),
        ("posted", _U64),
        ("stop", _U64),
        ("consumed", _U64),
        ("idle_timeout_ns", _U64),
        ("capacity", _U32),
        ("reserved", _U32),
    )
