"""Runs cut into commands: every block once, in order, within the limits."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tutti.errors import ConfigError, PageRangeError
from tutti.gio_uring.iocb import CutStruct, Extents, PagedMemory, flat_memory

LBA_NBYTES = 4096


@given(
    counts=st.lists(st.integers(1, 40), min_size=0, max_size=8),
    slice_nlb=st.integers(1, 70),
    nlb_max=st.integers(1, 64),
    slices_max=st.integers(1, 20),
    seed=st.integers(0, 2**32 - 1),
)
def test_commands_cover_every_block_once(
    counts: list[int], slice_nlb: int, nlb_max: int, slices_max: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    slba = rng.integers(0, 2**40, len(counts)).astype(np.uint64)
    nsid = rng.integers(1, 5, len(counts))
    cut = CutStruct(slice_nlb, LBA_NBYTES, nlb_max, slices_max)
    runs = Extents(slba, nsid, counts, slice_nlb).commands(cut)
    expected = [  # (namespace, lba, page, block inside the slice)
        (int(nsid[i]), int(slba[i]) + s * slice_nlb + b, sum(counts[:i]) + s, b)
        for i, count in enumerate(counts)
        for s in range(count)
        for b in range(slice_nlb)
    ]
    found = []
    for run in runs:
        assert 1 <= run["nlb"] <= nlb_max
        first, skip = int(run["first"]), int(run["skip"]) // LBA_NBYTES
        assert int(run["skip"]) % LBA_NBYTES == 0
        assert skip == 0 or slice_nlb > nlb_max
        blocks = [divmod(skip + b, slice_nlb) for b in range(int(run["nlb"]))]
        assert blocks[-1][0] < slices_max
        found += [
            (int(run["nsid"]), int(run["slba"]) + i, first + page, block)
            for i, (page, block) in enumerate(blocks)
        ]
    assert found == expected


def test_a_cut_of_nothing_is_refused() -> None:
    for cut in (CutStruct(0, 4096, 1, 1), CutStruct(1, 4096, 0, 1), CutStruct(1, 4096, 1, 0)):
        with pytest.raises(ValueError, match="has size 0"):
            Extents([0], [1], [1], 1).commands(cut)
    with pytest.raises(ValueError, match="shape"):
        Extents([0, 1], [1], [1], 1).commands(CutStruct(1, 4096, 1, 1))


def test_page_numbers_are_checked() -> None:
    memory = flat_memory(1 << 20, 4096, 10)
    assert memory.check_pages([0, 9]).dtype == np.uint32
    assert memory.check_pages([]).size == 0
    for bad in ([10], [-1], [[0]], [0.0], ["0"], [2**40]):
        with pytest.raises(PageRangeError):
            memory.check_pages(bad)


@pytest.mark.parametrize("kind", ["i1", "u2", "i4", "u4", "i8", "u8", ">i4", ">u8"])
def test_page_numbers_may_be_any_integers(kind: str) -> None:
    memory, pages = flat_memory(1 << 20, 4096, 100), np.array([7, 99, 0, 3], kind)
    assert memory.check_pages(pages, once=True).tolist() == [7, 99, 0, 3]
    assert memory.check_pages(pages[::-2]).tolist() == [3, 99]
    for bad in (100, -1)[: 1 if "u" in kind else 2]:
        with pytest.raises(PageRangeError, match=f"page {bad} is outside"):
            memory.check_pages(np.array([7, bad], kind))


def test_there_is_a_page_for_each_key() -> None:
    memory = flat_memory(1 << 20, 4096, 10)
    assert memory.check_pages([0, 9], n=2).tolist() == [0, 9]
    for n in (0, 1, 3):
        with pytest.raises(ConfigError, match=f"{n} keys and 2 pages"):
            memory.check_pages([0, 9], n=n)


@pytest.mark.parametrize("n", [2, 500])
def test_a_page_may_have_to_be_named_once(n: int) -> None:
    memory, pages = flat_memory(1 << 20, 4096, 1000), np.arange(n)
    assert np.array_equal(memory.check_pages(pages, once=True), pages)
    pages[-1] = 0
    assert np.array_equal(memory.check_pages(pages), pages)
    with pytest.raises(ConfigError, match="twice"):
        memory.check_pages(pages, once=True)


def test_memory_must_fit_its_segments() -> None:
    bases = np.zeros((2, 2), np.uint64)
    with pytest.raises(ConfigError, match="shape"):
        PagedMemory(bases, (1,), (1,), 1)
    with pytest.raises(ConfigError, match="stride"):
        PagedMemory(bases, (1,), (1, 1), 1)
    with pytest.raises(ConfigError, match="segments"):
        PagedMemory(np.zeros((1, 5), np.uint64), (1,) * 5, (1,) * 5, 1)
