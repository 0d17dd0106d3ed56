"""warp_kernel.cuh on fibers: gather and scatter through an IOCB, byte by byte."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from native.programs import Program, Start

PROPERTY = settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
PRP, SGL = 0, 1
WRITE, READ = 1, 2

depths = st.sampled_from([2, 4, 8, 16, 32, 64])
seeds = st.integers(0, 2**64 - 1)
doorbells = st.integers(0, 1)


@pytest.fixture
def warp(start: Start) -> Program:
    return start("ring_warp")


@pytest.mark.parametrize("opcode", [READ, WRITE])
@pytest.mark.parametrize("psdt", [PRP, SGL])
@PROPERTY
@given(case=seeds, depth=depths, warps=st.integers(1, 3), aligned=st.booleans(), mmio=doorbells)
def test_a_layer_lands_where_the_iocb_says(
    warp: Program,
    opcode: int,
    psdt: int,
    case: int,
    depth: int,
    warps: int,
    aligned: bool,
    mmio: int,
) -> None:
    fault, _ = warp.ask(case, depth, warps, psdt, int(aligned), opcode, mmio, 0)
    assert fault == 0


@settings(PROPERTY, max_examples=40)
@given(case=seeds, depth=depths, warps=st.integers(1, 3), mmio=doorbells)
def test_a_silent_controller_is_a_status_and_keeps_the_cids(
    warp: Program, case: int, depth: int, warps: int, mmio: int
) -> None:
    fault, _ = warp.ask(case, depth, warps, SGL, 1, READ, mmio, 1)
    assert fault == 0
