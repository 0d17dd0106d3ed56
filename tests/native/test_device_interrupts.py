"""A warp at a queue that it shares: another submitter comes between any two of its accesses."""

from __future__ import annotations

import pytest
from native.programs import Program, Start

RING, REAP = 0, 1
POINTS_MAX = 1000


@pytest.fixture
def interrupts(start: Start) -> Program:
    return start("device_interrupts")


@pytest.mark.parametrize("verb", [RING, REAP])
@pytest.mark.parametrize("depth", [4, 32, 64])
def test_nothing_is_lost_or_told_twice(interrupts: Program, depth: int, verb: int) -> None:
    for seed in range(2):
        came = points = 1
        while came:
            assert points < POINTS_MAX
            came, good = interrupts.ask(depth, verb, seed, points - 1)
            assert good, f"seed {seed}, interrupted at switch point {points - 1}"
            points += 1
        assert points > 10, "the other submitter hardly ever came"
