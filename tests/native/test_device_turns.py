"""A block that stays for its layer: all of its warps move slices, however short the runs are."""

from __future__ import annotations

import pytest
from native.programs import Program, Start


@pytest.fixture
def turns(start: Start) -> Program:
    return start("device_turns")


@pytest.mark.parametrize("slices", [1, 2, 3, 8, 11])
@pytest.mark.parametrize("warps", [1, 4, 8])
def test_slices_are_dealt_evenly_over_the_warps(turns: Program, slices: int, warps: int) -> None:
    pages = 40
    counts = turns.ask(pages, slices, warps)
    assert sum(counts) == pages
    assert max(counts) - min(counts) <= 1
