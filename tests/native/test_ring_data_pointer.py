"""sgl.h and iocb.h against the NVMe formats, decoded here on their own account."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from native.programs import Program, Start

OK, INVALID_FIELD, INVALID_COUNT, INVALID_OFFSET = 0x000, 0x002, 0x00E, 0x013
FLUSH, WRITE, READ, DATASET_MANAGEMENT = 0, 1, 2, 9
PAGE = 4096
LIST_DMA = 1 << 40
UNTOUCHED = 0xA5A5A5A5A5A5A5A5
PROPERTY = settings(
    max_examples=300,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


class Built:
    """What a builder answered: its status, the command's qwords and the list's."""

    def __init__(self, answer: list[int]) -> None:
        self.status, self.sqe, self.list = answer[0], answer[1:9], answer[9:]

    @property
    def dptr(self) -> tuple[int, int]:
        return self.sqe[3], self.sqe[4]

    def dwords(self) -> tuple[int, ...]:
        return struct.unpack("<16I", struct.pack("<8Q", *self.sqe))

    def sgl(self) -> list[tuple[int, int]]:
        """Data blocks of DPTR (Base Specification 2.0, section 4.1.2)."""
        address, rest = self.dptr
        if rest >> 56 == 0x00:
            return [(address, rest)]
        assert rest >> 56 == 0x30, "last segment"
        assert address == LIST_DMA
        n = (rest & 0xFFFFFFFF) // 16
        blocks = [(self.list[2 * i], self.list[2 * i + 1]) for i in range(n)]
        assert all(high >> 32 == 0 for _, high in blocks), "type 0, reserved bytes 0"
        return blocks

    def prp(self, nbytes: int, dma: int = LIST_DMA) -> list[tuple[int, int]]:
        """Memory of DPTR (section 4.1.1); a list page's last entry chains when more follow."""
        first, second = self.dptr
        extents = [(first, min(nbytes, PAGE - first % PAGE))]
        left = nbytes - extents[0][1]
        entries = [second] if left <= PAGE else []
        if left > PAGE:
            assert second == dma
            room = (PAGE - dma % PAGE) // 8
            needed = -(-left // PAGE)
            assert needed <= room, "the list crosses a page without a chain pointer"
            entries = self.list[:needed]
        for entry in entries:
            if left:
                assert entry % PAGE == 0
                extents.append((entry, min(left, PAGE)))
                left -= extents[-1][1]
        assert left == 0
        return extents


def joined(extents: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Extents with contiguous neighbours as one, of less than 2**32 bytes each."""
    out: list[tuple[int, int]] = []
    for address, nbytes in extents:
        if out and sum(out[-1]) == address and out[-1][1] + nbytes < 1 << 32:
            out[-1] = (out[-1][0], out[-1][1] + nbytes)
        else:
            out.append((address, nbytes))
    return out


def flat(extents: list[tuple[int, int]]) -> list[int]:
    return [word for extent in extents for word in extent]


BuildList = Callable[..., Built]


@pytest.fixture
def builder(start: Start) -> BuildList:
    program = start("data_pointer")

    def build(
        kind: str, extents: list[tuple[int, int]], list_nbytes: int, dma: int = LIST_DMA
    ) -> Built:
        return Built(program.ask(kind, list_nbytes, dma, len(extents), *flat(extents)))

    return build


def test_one_extent_is_a_data_block_without_a_list(builder: BuildList) -> None:
    built = builder("sgl", [(0x1003, 777)], 16)
    assert built.status == OK
    assert built.dptr == (0x1003, 777)
    assert built.list == [UNTOUCHED, UNTOUCHED]


def test_a_join_never_overflows_the_descriptor_length(builder: BuildList) -> None:
    three_gib = 3 << 30
    built = builder("sgl", [(0, three_gib), (three_gib, three_gib)], 32)
    assert built.sgl() == [(0, three_gib), (three_gib, three_gib)]


def test_sgl_list_that_is_too_small_is_refused(builder: BuildList) -> None:
    assert builder("sgl", [(0, 8), (64, 8), (128, 8)], 48).status == OK
    assert builder("sgl", [(0, 8), (64, 8), (128, 8)], 47).status == INVALID_COUNT


PRP_CASES = {
    "within one page": ([(0x10004, 100)], [0x10004, 0]),
    "to the page's end": ([(0x10800, 0x800)], [0x10800, 0]),
    "two pages": ([(0x10800, 0x1000)], [0x10800, 0x11000]),
    "two scattered pages": ([(0x10000, PAGE), (0x90000, PAGE)], [0x10000, 0x90000]),
    "offset, then a list": ([(0x10800, 0x2000)], [0x10800, LIST_DMA]),
    "continued within a page": ([(0x10000, 8), (0x10008, 8)], [0x10000, 0]),
    "short end": ([(0x10000, PAGE), (0x90000, 4)], [0x10000, 0x90000]),
}


@pytest.mark.parametrize("name", PRP_CASES)
def test_prp_entries(builder: BuildList, name: str) -> None:
    extents, dptr = PRP_CASES[name]
    built = builder("prp", extents, 64)
    assert built.status == OK
    assert list(built.dptr) == dptr
    assert joined(built.prp(sum(nbytes for _, nbytes in extents))) == joined(extents)


@pytest.mark.parametrize(
    "extents",
    [
        [(0x10002, 8)],  # PRP1 is dword aligned
        [(0x10000, 100), (0x20000, 8)],  # a hole within a page
        [(0x10000, PAGE), (0x20004, 8)],  # only the first page may have an offset
        [(0x10000, PAGE + 8), (0x30000, 8)],
    ],
)
def test_memory_that_prp_cannot_describe_is_refused(
    builder: BuildList, extents: list[tuple[int, int]]
) -> None:
    assert builder("prp", extents, 64).status == INVALID_OFFSET


def test_prp_list_that_is_too_small_is_refused(builder: BuildList) -> None:
    assert builder("prp", [(0, 4 * PAGE)], 24).status == OK
    assert builder("prp", [(0, 5 * PAGE)], 24).status == INVALID_COUNT


@pytest.mark.parametrize(
    ("dma_offset", "list_nbytes", "pages", "fits"),
    [
        (0, PAGE, 513, True),
        (0, 2 * PAGE, 513, True),
        (0, 2 * PAGE, 514, False),
        (PAGE - 16, 64, 3, True),
        (PAGE - 16, 64, 4, False),
    ],
)
def test_prp_list_ends_with_its_page(
    builder: BuildList, dma_offset: int, list_nbytes: int, pages: int, fits: bool
) -> None:
    # A drive takes the last entry of a list page as a pointer to the next list page.
    dma = LIST_DMA + dma_offset
    built = builder("prp", [(0x100000, pages * PAGE)], list_nbytes, dma)
    assert built.status == (OK if fits else INVALID_COUNT)
    if fits:
        assert joined(built.prp(pages * PAGE, dma)) == [(0x100000, pages * PAGE)]


memory = st.lists(
    st.tuples(st.integers(0, 40).map(lambda i: i * 512), st.integers(1, 20).map(lambda i: i * 512)),
    min_size=1,
    max_size=12,
)


@PROPERTY
@given(extents=memory, list_nbytes=st.integers(1, 16).map(lambda i: i * 16))
def test_sgl_describes_the_extents(
    builder: BuildList, extents: list[tuple[int, int]], list_nbytes: int
) -> None:
    built = builder("sgl", extents, list_nbytes)
    fits = len(joined(extents)) * 16 <= list_nbytes
    assert built.status == (OK if fits else INVALID_COUNT)
    if fits:
        assert built.sgl() == joined(extents)


pages = st.lists(
    st.tuples(st.integers(0, 6).map(lambda i: i * PAGE), st.integers(1, 3).map(lambda i: i * PAGE)),
    min_size=1,
    max_size=6,
)


@PROPERTY
@given(
    extents=pages,
    head=st.sampled_from([0, 4, 512, 4092]),
    tail=st.sampled_from([0, 4, 512, 4092]),
    entries=st.integers(0, 24),
)
def test_prp_describes_the_extents(
    builder: BuildList, extents: list[tuple[int, int]], head: int, tail: int, entries: int
) -> None:
    extents = list(extents)
    extents[0] = (extents[0][0] + head, extents[0][1] - head)
    extents[-1] = (extents[-1][0], extents[-1][1] - tail)
    nbytes = sum(n for _, n in extents)
    if extents[-1][1] <= 0:
        extents.pop()
        nbytes = sum(n for _, n in extents)
    if not extents or nbytes <= 0:
        return
    built = builder("prp", extents, entries * 8)
    needed = sum(-(-(a % PAGE + n) // PAGE) for a, n in extents) - 1
    assert built.status == (OK if needed <= entries else INVALID_COUNT)
    if built.status == OK:
        assert joined(built.prp(nbytes)) == joined(extents)


def iocb(program: Program, list_nbytes: int = 256, **changes: Any) -> Built:
    """One command of K and V segments of 600 bytes, slices of 3 blocks, pages 5, 2, 9."""
    v: dict[str, Any] = {
        "opcode": READ, "psdt": 1, "flags": 0, "slice_nlb": 3, "lba_shift": 9, "layer_stride": 100,
        "padding": 7 << 30, "slba": (1 << 33) + 5, "nsid": 3, "nlb": 6, "first": 0, "skip": 0,
        "layer": 1, "cid": 0x1234, "pages": [5, 2, 9],
    } | changes  # fmt: skip
    bases = [1 << 20, 2 << 20, 3 << 20, 4 << 20]
    words = [
        "iocb", list_nbytes, LIST_DMA, v["opcode"], v["psdt"], v["flags"], v["slice_nlb"],
        v["lba_shift"], v["layer_stride"], v["padding"], 2, 600, 1000, 600, 2000, 2, *bases,
        len(v["pages"]), *v["pages"], v["slba"], v["nsid"], v["nlb"], v["first"], v["skip"],
        v["layer"], v["cid"],
    ]  # fmt: skip
    return Built(program.ask(*words))


def test_iocb_builds_all_sixteen_dwords(start: Start) -> None:
    built = iocb(start("data_pointer"), flags=1 << 30, opcode=WRITE)
    d = built.dwords()
    slba = (1 << 33) + 5 + 100
    assert d[0] == WRITE | 1 << 14 | 0x1234 << 16
    assert d[1:6] == (3, 0, 0, 0, 0)
    assert d[10:] == (slba & 0xFFFFFFFF, slba >> 32, 5 | 1 << 30, 0, 0, 0)
    assert built.sgl() == [
        ((3 << 20) + 5 * 1000, 600),
        ((4 << 20) + 5 * 2000, 600),
        (7 << 30, 336),
        ((3 << 20) + 2 * 1000, 600),
        ((4 << 20) + 2 * 2000, 600),
        (7 << 30, 336),
    ]


def test_iocb_starts_within_a_slice(start: Start) -> None:
    built = iocb(start("data_pointer"), nlb=1, first=2, skip=1024, layer=0)
    assert built.sgl() == [((2 << 20) + 9 * 2000 + 424, 176), (7 << 30, 336)]


@pytest.mark.parametrize(
    "changes", [{"first": 3}, {"first": 2**32 - 1}, {"nlb": 10}, {"pages": []}]
)
def test_a_run_beyond_the_pages_is_refused(start: Start, changes: dict[str, Any]) -> None:
    assert iocb(start("data_pointer"), **changes).status == INVALID_FIELD


@pytest.mark.parametrize("nlb", [0, (1 << 16) + 1, (1 << 23) + 1])
def test_a_length_that_nlb_cannot_hold_is_refused(start: Start, nlb: int) -> None:
    # NLB is 16 bits, 0-based: anything else would spill into FUA and PRINFO.
    built = iocb(start("data_pointer"), nlb=nlb, slice_nlb=1 << 22, list_nbytes=4096)
    assert built.status == INVALID_FIELD


def test_iocb_list_that_is_too_small_is_refused(start: Start) -> None:
    assert iocb(start("data_pointer"), list_nbytes=95).status == INVALID_COUNT


def test_prp_of_unaligned_segments_asks_for_staging(start: Start) -> None:
    assert iocb(start("data_pointer"), psdt=0).status == INVALID_OFFSET


def test_flush_and_deallocate_name_no_pages(start: Start) -> None:
    program = start("data_pointer")
    flush = iocb(program, opcode=FLUSH)
    assert flush.status == OK
    assert flush.dwords() == (0x1234 << 16, 3, *[0] * 14)
    trim = iocb(program, opcode=DATASET_MANAGEMENT)
    assert trim.status == OK
    assert trim.dwords()[0] == DATASET_MANAGEMENT | 0x1234 << 16
    assert trim.dwords()[10:12] == (0, 4), "one range, deallocate"
    assert trim.dptr == (LIST_DMA, 0)
    assert trim.list[:2] == [6 << 32, (1 << 33) + 105]


def test_deallocate_needs_room_for_its_range(start: Start) -> None:
    assert iocb(start("data_pointer"), opcode=DATASET_MANAGEMENT, list_nbytes=8).status != OK
