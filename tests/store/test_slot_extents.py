"""Runs of slots as the native code finds them, against the addresses of the format."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from slot_addresses import record_lba, slot_lba

from tutti.medium.geometry import Geometry
from tutti.pool.slot_extents import SlotExtents, object_places, record_places

GEOMETRIES = st.builds(
    Geometry,
    layers=st.integers(1, 6),
    segments=st.just((20000,)),
    lba_nbytes=st.sampled_from([512, 4096]),
    group_slots=st.integers(1, 9),
    groups=st.integers(1, 6),
)
NSIDS = np.array([3, 1], np.uint32)


@st.composite
def slots_of_a_pool(draw: st.DrawFn) -> tuple[Geometry, np.ndarray]:
    """A geometry, and stretches of slots of its two members in page order."""
    geometry = draw(GEOMETRIES)
    end = 2 * geometry.slots
    stretches = draw(st.lists(st.tuples(st.integers(0, end - 1), st.integers(1, 20)), max_size=8))
    slots = [slot for first, n in stretches for slot in range(first, min(end, first + n))]
    return geometry, np.array(slots, np.int64)


def runs_of(extents: SlotExtents, slice_nlb: int) -> list[list[tuple[int, int]]]:
    """(namespace, LBA) of each slice of each run."""
    runs = zip(extents.nsid.tolist(), extents.slba.tolist(), extents.count.tolist(), strict=True)
    return [
        [(nsid, first + place * slice_nlb) for place in range(count)] for nsid, first, count in runs
    ]


@given(slots_of_a_pool())
def test_a_run_is_as_long_as_its_group_allows(case: tuple[Geometry, np.ndarray]) -> None:
    geometry, slots = case
    extents = SlotExtents(object_places(geometry, NSIDS), slots, geometry.slice_nlb)
    runs = runs_of(extents, geometry.slice_nlb)
    member, local = geometry.split_members(slots)
    expected = zip(NSIDS[member].tolist(), slot_lba(geometry, local).tolist(), strict=True)
    assert [place for run in runs for place in run] == list(expected)
    ends = np.cumsum([len(run) for run in runs])[:-1]
    breaks = (np.diff(slots) != 1) | (slots[1:] % geometry.group_slots == 0)
    assert ends.tolist() == (np.flatnonzero(breaks) + 1).tolist()


@given(slots_of_a_pool())
def test_records_are_neighbours_through_a_member(case: tuple[Geometry, np.ndarray]) -> None:
    geometry, slots = case
    extents = SlotExtents(record_places(geometry, NSIDS), slots, geometry.record_nlb)
    runs = runs_of(extents, geometry.record_nlb)
    member, local = geometry.split_members(slots)
    expected = zip(NSIDS[member].tolist(), record_lba(geometry, local).tolist(), strict=True)
    assert [place for run in runs for place in run] == list(expected)
    ends = np.cumsum([len(run) for run in runs])[:-1]
    breaks = (np.diff(slots) != 1) | (slots[1:] % geometry.slots == 0)
    assert ends.tolist() == (np.flatnonzero(breaks) + 1).tolist()
