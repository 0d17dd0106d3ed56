"""The geometry of a pool: pure address arithmetic, fixed at format (docs/format.md, section 1)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tutti.base.units import GiB, MiB, format_nbytes
from tutti.errors import CapacityError, LayoutError

FORMAT_VERSION = 1  # of everything on a member, and of the layout's JSON
BLOCK_NBYTES = 4096  # of superblocks, records and the snapshot's header
RECORD_NBYTES = 4096
SNAPSHOT_OFFSET = 2 * BLOCK_NBYTES
SNAPSHOT_ENTRY_NBYTES = 48
LBA_NBYTES_CHOICES = (512, 4096)
LAYERS_MAX = 480
SEGMENTS_MAX = 4
SEGMENT_NBYTES_MAX = GiB
SLICE_NBYTES_MAX = 2**31  # commands count the bytes of a slice in 32 bits
GROUP_SLOTS_MAX = 256
MEMBERS_MAX = 256
SLOTS_MAX = 2**32 - 2  # of a pool; 2^32 - 1 means "no slot" in the index
GROUP_LAYER_NBYTES = 2 * MiB  # aim for one layer of a group
GROUPS_LEAST = 16  # aim for this many in a small pool: a short object takes part of a group
WASTE_MAX = 1.25
LAYOUT_JSON_NBYTES_MAX = 1024

Slots = npt.NDArray[np.integer[Any]]


class LayoutShape(Protocol):
    """What the geometry needs to know about a layout."""

    @property
    def layers(self) -> int: ...
    @property
    def segments(self) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class Geometry:
    """Offsets of all parts of a member; they follow from five numbers and are equal on all members.

    segments: bytes of each.  group_slots: slots of a group.  groups: of one member.
    """

    layers: int
    segments: tuple[int, ...]
    lba_nbytes: int
    group_slots: int
    groups: int

    def __post_init__(self) -> None:
        """Raises LayoutError for numbers outside the limits of docs/format.md."""
        if self.lba_nbytes not in LBA_NBYTES_CHOICES:
            raise LayoutError(f"LBA size {self.lba_nbytes}; use 512 or 4096")
        _check_limit("layers", self.layers, LAYERS_MAX)
        _check_limit("number of segments", len(self.segments), SEGMENTS_MAX)
        for nbytes in self.segments:
            _check_limit("segment size", nbytes, SEGMENT_NBYTES_MAX)
        _check_limit("slice size", self.slice_padded_nbytes, SLICE_NBYTES_MAX)
        _check_limit("slots in a group", self.group_slots, GROUP_SLOTS_MAX)
        _check_limit("groups", self.groups, SLOTS_MAX // self.group_slots)
        _check_limit("member size", self.member_nbytes, 2**63 - 1)

    @classmethod
    def plan(
        cls,
        layout: LayoutShape,
        capacity_nbytes_per_member: int,
        *,
        lba_nbytes: int = 4096,
        group_slots: int | None = None,
        members: int = 1,
    ) -> Geometry:
        """The largest geometry that fits into `members` members of this capacity in bytes each.

        Without `group_slots` a group has the largest power of two of slots (at most 256) of which
        one layer fits into 2 MiB, and fewer where the pool would have fewer than 16 groups.
        Raises LayoutError if padding and records cost too much, CapacityError below one group.
        """
        one = cls(layout.layers, tuple(layout.segments), lba_nbytes, 1, 1)
        if one.waste > WASTE_MAX:
            raise LayoutError(
                f"padding and records cost {one.waste:.2f} times the payload of {one.slice_nbytes}"
                f" bytes in {one.layers} layers, at most {WASTE_MAX} is accepted;"
                f" bundle {_bundle_pages(one)} pages into one object (a larger page size)"
            )
        smaller = "" if group_slots is None else ", or smaller groups"
        if group_slots is None:
            fitting = max(1, GROUP_LAYER_NBYTES // one.slice_padded_nbytes)
            group_slots = min(GROUP_SLOTS_MAX, 1 << (fitting.bit_length() - 1))
            # Superblocks and records take their part of the capacity.
            room_nbytes = max(0, capacity_nbytes_per_member - one.groups_offset)
            slots = members * (room_nbytes // one.group_nbytes)
            while group_slots > 1 and slots < GROUPS_LEAST * group_slots:
                group_slots //= 2
        least = cls(one.layers, one.segments, lba_nbytes, group_slots, 1)
        if least.member_nbytes > capacity_nbytes_per_member:
            raise CapacityError(
                f"{format_nbytes(capacity_nbytes_per_member)} per member is less than one group;"
                f" pass at least {least.member_nbytes} bytes"
                f" ({format_nbytes(least.member_nbytes)}){smaller}"
            )
        group_nbytes = least.group_nbytes + group_slots * (RECORD_NBYTES + SNAPSHOT_ENTRY_NBYTES)
        # Space beyond the highest slot number stays unused.
        slots_max = SLOTS_MAX // members
        groups = min(capacity_nbytes_per_member // group_nbytes + 1, slots_max // group_slots)
        planned = cls(one.layers, one.segments, lba_nbytes, group_slots, groups)
        while planned.member_nbytes > capacity_nbytes_per_member:  # ends at one group at the latest
            groups -= 1
            planned = cls(one.layers, one.segments, lba_nbytes, group_slots, groups)
        return planned

    @cached_property
    def slice_nbytes(self) -> int:
        """Payload of a slice."""
        return sum(self.segments)

    @cached_property
    def slice_nlb(self) -> int:
        """Blocks of a slice, padding included."""
        return -(-self.slice_nbytes // self.lba_nbytes)

    @property
    def slice_padded_nbytes(self) -> int:
        return self.slice_nlb * self.lba_nbytes

    @property
    def layer_stride_nlb(self) -> int:
        """Blocks from a slot's slice in one layer to its slice in the next."""
        return self.group_slots * self.slice_nlb

    @property
    def group_nbytes(self) -> int:
        return self.layers * self.layer_stride_nlb * self.lba_nbytes

    @property
    def slots(self) -> int:
        """Slots of one member."""
        return self.groups * self.group_slots

    @property
    def record_nlb(self) -> int:
        return RECORD_NBYTES // self.lba_nbytes

    @property
    def snapshot_offset(self) -> int:
        return SNAPSHOT_OFFSET

    @property
    def snapshot_nbytes(self) -> int:
        """Room for the header and an entry for every slot."""
        return BLOCK_NBYTES + _round_up(self.slots * SNAPSHOT_ENTRY_NBYTES, BLOCK_NBYTES)

    @property
    def table_offset(self) -> int:
        return self.snapshot_offset + self.snapshot_nbytes

    @cached_property
    def groups_offset(self) -> int:
        return _round_up(self.table_offset + self.slots * RECORD_NBYTES, MiB)

    @property
    def member_nbytes(self) -> int:
        """End of the last group."""
        return self.groups_offset + self.groups * self.group_nbytes

    @property
    def waste(self) -> float:
        """Bytes on the medium over payload: padding and the slot record."""
        spent_nbytes = self.slice_padded_nbytes * self.layers + RECORD_NBYTES
        return spent_nbytes / (self.slice_nbytes * self.layers)

    def split_members(self, slots: Slots) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """(member index, member-local slot) of pool-wide slot numbers."""
        return np.divmod(np.asarray(slots, np.int64), self.slots)


def _bundle_pages(one: Geometry) -> int:
    """The smallest number of pages in one object with which `one` wastes little enough."""
    enough = -(-4 * (one.lba_nbytes + RECORD_NBYTES) // one.slice_nbytes)
    for pages in range(2, enough + 1):
        nbytes = one.layers * _round_up(pages * one.slice_nbytes, one.lba_nbytes) + RECORD_NBYTES
        if nbytes <= WASTE_MAX * pages * one.layers * one.slice_nbytes:
            return pages
    return enough


def _round_up(nbytes: int, multiple: int) -> int:
    return -(-nbytes // multiple) * multiple


def _check_limit(name: str, value: int, limit: int) -> None:
    if not 1 <= value <= limit:
        raise LayoutError(f"{name} is {value}; it must be between 1 and {limit}")
