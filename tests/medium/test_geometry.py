"""Geometry: planning and addresses."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from slot_addresses import record_lba, slot_lba

from tutti.base.units import GiB, KiB, MiB, TiB
from tutti.errors import CapacityError, LayoutError
from tutti.medium.geometry import SLOTS_MAX, Geometry
from tutti.medium.layout import KVLayout

LLAMA = KVLayout.mha(32, 8, 128, 64, "bfloat16")  # slices of 256 KiB
SMALL = Geometry(layers=3, segments=(4000, 3000), lba_nbytes=512, group_slots=4, groups=5)

geometries = st.builds(
    Geometry,
    layers=st.integers(1, 6),
    segments=st.lists(st.integers(1, 20000), min_size=1, max_size=4).map(tuple),
    lba_nbytes=st.sampled_from([512, 4096]),
    group_slots=st.integers(1, 9),
    groups=st.integers(1, 6),
)


def test_a_group_holds_two_mebibytes_of_each_layer() -> None:
    geometry = Geometry.plan(LLAMA, 64 * GiB)
    assert geometry.group_slots == 8
    assert geometry.slice_nlb == 64
    assert geometry.layer_stride_nlb == 512
    assert geometry.group_nbytes == 64 * MiB


@pytest.mark.parametrize(
    ("segment_nbytes", "group_slots"),
    [(4096, 256), (8192, 256), (12288, 128), (36 * KiB, 32), (MiB, 2), (3 * MiB, 1), (40 * MiB, 1)],
)
def test_group_slots_by_slice(segment_nbytes: int, group_slots: int) -> None:
    layout = KVLayout(8, (segment_nbytes,), 1, "uint8", "other", 8)
    assert Geometry.plan(layout, TiB).group_slots == group_slots


@given(
    capacity_nbytes=st.integers(65 * MiB, 20 * GiB),
    lba_nbytes=st.sampled_from([512, 4096]),
    group_slots=st.sampled_from([None, 1, 3, 8]),
)
def test_a_plan_uses_the_capacity_and_no_more(
    capacity_nbytes: int, lba_nbytes: int, group_slots: int | None
) -> None:
    geometry = Geometry.plan(LLAMA, capacity_nbytes, lba_nbytes=lba_nbytes, group_slots=group_slots)
    more = Geometry(
        geometry.layers, geometry.segments, lba_nbytes, geometry.group_slots, geometry.groups + 1
    )
    assert geometry.member_nbytes <= capacity_nbytes < more.member_nbytes


@given(nbytes=st.integers(64 * KiB, 3 * MiB))
def test_the_minimum_that_a_refusal_names_is_accepted(nbytes: int) -> None:
    layout = KVLayout.mha(3, 4, 32, 16, "bfloat16")
    try:
        Geometry.plan(layout, nbytes)
    except CapacityError as error:
        least = int(str(error).split("at least ")[1].split(" ")[0])
        assert Geometry.plan(layout, least).slots >= 1
        assert nbytes < least


def test_a_small_pool_has_groups_to_evict() -> None:
    for nbytes in (40 * MiB, 80 * MiB):
        small = Geometry.plan(KVLayout.mha(3, 2, 64, 16, "bfloat16"), nbytes)
        assert 15 <= small.groups <= 32
        assert small.slots * small.layers * small.slice_padded_nbytes > nbytes * 0.8
    assert Geometry.plan(LLAMA, 512 * MiB).group_slots < 8
    assert Geometry.plan(LLAMA, 512 * MiB, members=4).group_slots == 8


def test_slot_numbers_of_a_pool_end_before_32_bits_do() -> None:
    layout = KVLayout(1, (32 * KiB,), 1, "uint8", "other", 1)
    for members in (1, 16):
        geometry = Geometry.plan(layout, 2**62, members=members)
        assert SLOTS_MAX - members * 64 < geometry.slots * members <= SLOTS_MAX


@pytest.mark.parametrize("lba_nbytes", [512, 4096])
@pytest.mark.parametrize(
    ("layers", "segments"),
    [(32, (256, 256)), (61, (1152,)), (1, (9000,)), (2, (4097,)), (480, (1,))],
)
def test_waste_is_refused_with_the_bundle_that_cures_it(
    layers: int, segments: tuple[int, ...], lba_nbytes: int
) -> None:
    def waste(pages: int) -> float:
        padded_nbytes = -(-pages * sum(segments) // lba_nbytes) * lba_nbytes
        return (padded_nbytes * layers + 4096) / (pages * sum(segments) * layers)

    layout = KVLayout(layers, segments, 1, "uint8", "other", layers)
    if waste(1) <= 1.25:
        Geometry.plan(layout, GiB, lba_nbytes=lba_nbytes)
        return
    smallest = next(pages for pages in itertools.count(2) if waste(pages) <= 1.25)
    with pytest.raises(LayoutError, match=f"bundle {smallest} pages into one object"):
        Geometry.plan(layout, GiB, lba_nbytes=lba_nbytes)
    bundled = KVLayout(
        layers, tuple(n * smallest for n in segments), smallest, "uint8", "other", layers
    )
    Geometry.plan(bundled, 4 * GiB, lba_nbytes=lba_nbytes)


@pytest.mark.parametrize(
    "change",
    [
        {"layers": 0},
        {"layers": 481},
        {"segments": ()},
        {"segments": (1,) * 5},
        {"segments": (0,)},
        {"segments": ((1 << 30) + 1,)},
        {"lba_nbytes": 1024},
        {"group_slots": 0},
        {"group_slots": 257},
        {"groups": 0},
        {"groups": 2**32},
        {"groups": 2**29, "segments": (1 << 30,) * 4, "layers": 480},
    ],
)
def test_numbers_outside_the_limits_are_refused(change: dict[str, object]) -> None:
    numbers: dict[str, object] = {
        "layers": 3,
        "segments": (4000, 3000),
        "lba_nbytes": 512,
        "group_slots": 4,
        "groups": 5,
    }
    with pytest.raises(LayoutError):
        Geometry(**{**numbers, **change})  # type: ignore[arg-type]


def test_offsets_of_a_small_member() -> None:
    assert SMALL.slots == 20
    assert SMALL.slice_nlb == 14  # 7000 bytes in blocks of 512
    assert SMALL.snapshot_offset == 8192
    assert SMALL.snapshot_nbytes == 4096 + 4096
    assert SMALL.table_offset == 16384
    assert SMALL.groups_offset == MiB
    assert SMALL.member_nbytes == MiB + 5 * 3 * 4 * 14 * 512
    assert SMALL.waste == pytest.approx((3 * 14 * 512 + 4096) / 21000)


def test_addresses_of_a_small_member() -> None:
    first = MiB // 512
    assert slot_lba(SMALL, np.array([0, 1, 3, 4])).tolist() == [
        first,
        first + 14,
        first + 3 * 14,
        first + 3 * 4 * 14,
    ]
    assert slot_lba(SMALL, np.array([5]), layer=2).tolist() == [first + (1 * 3 + 2) * 4 * 14 + 14]
    assert record_lba(SMALL, np.array([0, 7])).tolist() == [32, 32 + 7 * 8]
    assert slot_lba(SMALL, np.array([[0], [1]]), layer=np.arange(3)).shape == (2, 3)


@given(geometries)
def test_slices_are_disjoint_and_inside_the_groups(geometry: Geometry) -> None:
    slots = np.arange(geometry.slots)[:, None]
    lbas = np.sort(slot_lba(geometry, slots, np.arange(geometry.layers)).ravel()).astype(int)
    assert (np.diff(lbas) == geometry.slice_nlb).all()
    assert lbas[0] * geometry.lba_nbytes == geometry.groups_offset
    assert (lbas[-1] + geometry.slice_nlb) * geometry.lba_nbytes == geometry.member_nbytes
    records = record_lba(geometry, np.arange(geometry.slots)).astype(int) * geometry.lba_nbytes
    assert records[0] == geometry.table_offset
    assert records[-1] + 4096 <= geometry.groups_offset


def test_addresses_do_not_overflow_on_a_large_member() -> None:
    geometry = Geometry.plan(LLAMA, 60 * TiB, lba_nbytes=512)
    last = int(slot_lba(geometry, np.array([geometry.slots - 1], np.uint32), 31)[0])
    assert (last + geometry.slice_nlb) * 512 == geometry.member_nbytes


def test_a_slot_number_names_its_member() -> None:
    members, local = SMALL.split_members(np.arange(18, 22))
    assert (members.tolist(), local.tolist()) == ([0, 0, 1, 1], [18, 19, 0, 1])
