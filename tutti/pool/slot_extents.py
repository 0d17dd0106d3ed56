"""Computes where slots lie on the medium, as runs and as the commands of a transfer."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from tutti.base.arrays import U32, Slots
from tutti.gio_uring import _native
from tutti.gio_uring.iocb import CutStruct, Extents, Runs, fill_runs
from tutti.medium.geometry import Geometry
from tutti.native import address, members

#: No limit to the length of a run.
WHOLE = 2**32 - 1


class SlotPlaces(ctypes.Structure):
    """``gio::SlotPlaces``: where the slots of a pool lie."""

    _fields_ = (
        *members(ctypes.c_uint64, "nsids members member_slots group_slots layers first_lba"),
    )


def object_places(geometry: Geometry, nsids: U32) -> SlotPlaces:
    """Places of the slices of layer 0.  nsids: of the members; the caller keeps the array alive."""
    return SlotPlaces(
        address(nsids),
        nsids.size,
        geometry.slots,
        geometry.group_slots,
        geometry.layers,
        geometry.groups_offset // geometry.lba_nbytes,
    )


def record_places(geometry: Geometry, nsids: U32) -> SlotPlaces:
    """Places of the slot records, which are contiguous over all groups of a member."""
    first_lba = geometry.table_offset // geometry.lba_nbytes
    return SlotPlaces(address(nsids), nsids.size, geometry.slots, geometry.slots, 1, first_lba)


class SlotExtents(Extents):
    """Extents of slots in page order: commands are computed directly, runs only when they are read.

    slots: (n,).  layer_stride_nlb: see Extents.
    """

    slots: Slots

    def __init__(
        self, places: SlotPlaces, slots: Slots, slice_nlb: int, layer_stride_nlb: int = 0
    ) -> None:
        self.__dict__.update(slice_nlb=slice_nlb, layer_stride_nlb=layer_stride_nlb)
        self.__dict__.update(_places=places, slots=slots)

    def __getattr__(self, name: str) -> Any:
        if name not in ("slba", "nsid", "count"):
            raise AttributeError(name)
        runs = self.commands(CutStruct(self.slice_nlb, 1, WHOLE, WHOLE))
        count = runs["nlb"].astype(np.int64) // self.slice_nlb
        self.__dict__.update(slba=runs["slba"], nsid=runs["nsid"], count=count)
        return self.__dict__[name]

    def commands(self, cut: CutStruct) -> Runs:
        slots = np.ascontiguousarray(self.slots)
        arguments = (address(slots), slots.size, ctypes.byref(self._places))
        return fill_runs(_native.quick().gio_slot_runs, arguments, cut, 2 * slots.size + 64)
