"""Where slots lie on a member, by docs/format.md and apart from the code that addresses them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tutti.medium.geometry import Geometry, Slots


def slot_lba(geometry: Geometry, slots: Slots, layer: int | Slots = 0) -> npt.NDArray[np.uint64]:
    """First LBA of the slices of member-local `slots` in `layer`; both broadcast."""
    group, place = np.divmod(np.asarray(slots, np.uint64), np.uint64(geometry.group_slots))
    at_layer = group * np.uint64(geometry.layers) + np.asarray(layer, np.uint64)
    within = at_layer * np.uint64(geometry.group_slots) + place
    first = np.uint64(geometry.groups_offset // geometry.lba_nbytes)
    return np.asarray(first + within * np.uint64(geometry.slice_nlb), np.uint64)


def record_lba(geometry: Geometry, slots: Slots) -> npt.NDArray[np.uint64]:
    """First LBA of the records of member-local `slots`."""
    first = np.uint64(geometry.table_offset // geometry.lba_nbytes)
    return np.asarray(first + np.asarray(slots, np.uint64) * np.uint64(geometry.record_nlb))
