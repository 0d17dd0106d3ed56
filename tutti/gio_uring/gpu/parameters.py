"""Parameters of device kernels: the structs of ``kernels/device/parameters.cuh``.

That file describes every field, the kernels and their order; a test
compares the layouts.  Addresses are device addresses unless a field says otherwise.
"""

from __future__ import annotations

import ctypes

from tutti.native import members

#: `RunState.status` of a command that has not ended; with `NO_CID`, of one that was not sent.
RUN_PENDING = 0xFFFFFFFF

#: Most threads of a block of the kernels that allow "32 to 256".
BLOCK_THREADS_MAX = 256

_U32 = ctypes.c_uint32
_U64 = ctypes.c_uint64


class QueueShareStruct(ctypes.LittleEndianStructure):
    """``gio::QueueShare``: one block's part of every layer."""

    _fields_ = (
        *members(_U64, "qp lists lists_dma"),
        *members(_U32, "list_nbytes first_run n_runs lost"),
    )


class RunStateStruct(ctypes.LittleEndianStructure):
    """``gio::RunState``: progress of one run's command."""

    _fields_ = (("cid", _U32), ("status", _U32))


class LayerTallyStruct(ctypes.LittleEndianStructure):
    """``gio::LayerTally``: sums over the blocks of a layer."""

    _fields_ = (("arrived", _U32), ("status", _U32), ("owned", _U32), ("reserved", _U32))


class SliceTableStruct(ctypes.LittleEndianStructure):
    """``gio::SliceTable``: locations of slices, in staging and in pages."""

    _fields_ = (*members(_U64, "paged staged_bases staged_stride digests page_status"),)


class BatchStruct(ctypes.LittleEndianStructure):
    """``gio::Batch``: everything that a kernel needs, for all layers."""

    _fields_ = (
        *members(_U64, "iocb shares states slices flags tallies timeout_ns"),
        *members(_U32, "n_shares ready"),
    )


class PostStruct(ctypes.LittleEndianStructure):
    """``gio::Post``: one layer for the persistent kernel."""

    _fields_ = (("batch", _U64), ("layer", _U32), ("publish", _U32))


class MailboxStruct(ctypes.LittleEndianStructure):
    """``gio::Mailbox``: the persistent kernel's orders."""

    _fields_ = (
        *members(_U64, "posts posted stop consumed idle_timeout_ns"),
        *members(_U32, "capacity reserved"),
    )
