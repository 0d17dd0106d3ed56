"""The device kernels on fibers against two controllers: whole batches, byte by byte.

What runs here is the text that NVRTC compiles for a GPU, under the address and undefined-behaviour
sanitizers, with threads that are fibers. It says nothing of a GPU's memory model or speed.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from native.programs import Program, Start

PROPERTY = settings(
    max_examples=20,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
PRP, SGL = 0, 1
WRITE, READ = 1, 2
SUBMIT_AND_DRAIN, RESIDENT, PERSISTENT, AHEAD = 0, 1, 2, 3
NO_FAULTS, STATUSES, SILENCE, SHORT_READS = 0, 1, 2, 3

seeds = st.integers(0, 2**64 - 1)
depths = st.sampled_from([2, 4, 8, 16, 32, 64])
flags = st.integers(0, 1)
# Depth, shares, warps of a block, PSDT, aligned to memory pages.
shapes = st.tuples(depths, st.integers(1, 3), st.integers(1, 2), flags, flags)


@pytest.fixture
def device(start: Start) -> Program:
    return start("device_layers")


@pytest.mark.parametrize("engine", [SUBMIT_AND_DRAIN, RESIDENT, PERSISTENT])
@pytest.mark.parametrize("opcode", [READ, WRITE])
@PROPERTY
@given(seed=seeds, shape=shapes, mmio=flags, staged=flags, digests=flags)
def test_every_layer_lands_where_the_iocb_says(
    device: Program,
    engine: int,
    opcode: int,
    seed: int,
    shape: tuple[int, ...],
    mmio: int,
    staged: int,
    digests: int,
) -> None:
    words = (*shape, opcode, mmio, engine, staged, digests, NO_FAULTS)
    assert device.ask(seed, *words)[0] == 0


@PROPERTY
@given(seed=seeds, shape=shapes, staged=flags, digests=flags)
def test_a_layer_that_is_sent_ahead_leaves_the_one_before_its_commands(
    device: Program, seed: int, shape: tuple[int, ...], staged: int, digests: int
) -> None:
    words = (*shape, READ, 0, AHEAD, staged, digests, NO_FAULTS)
    assert device.ask(seed, *words)[0] == 0


@pytest.mark.parametrize("engine", [SUBMIT_AND_DRAIN, RESIDENT, PERSISTENT])
@PROPERTY
@given(seed=seeds, shape=shapes, opcode=st.sampled_from([READ, WRITE]), staged=flags, digests=flags)
def test_a_failed_command_is_a_status_of_its_pages_alone(
    device: Program,
    engine: int,
    seed: int,
    shape: tuple[int, ...],
    opcode: int,
    staged: int,
    digests: int,
) -> None:
    words = (*shape, opcode, 0, engine, staged, digests, STATUSES)
    assert device.ask(seed, *words)[0] == 0


@pytest.mark.parametrize("engine", [SUBMIT_AND_DRAIN, RESIDENT, PERSISTENT, AHEAD])
@settings(PROPERTY, max_examples=15)
@given(seed=seeds, shape=shapes, opcode=st.sampled_from([READ, WRITE]), mmio=flags, staged=flags)
def test_a_silent_drive_is_a_status_and_keeps_its_cids(
    device: Program,
    engine: int,
    seed: int,
    shape: tuple[int, ...],
    opcode: int,
    mmio: int,
    staged: int,
) -> None:
    """Later layers do not wait for that queue again, and send nothing by it."""
    opcode = READ if engine == AHEAD else opcode
    words = (*shape, opcode, mmio, engine, staged, 0, SILENCE)
    assert device.ask(seed, *words)[0] == 0


@pytest.mark.parametrize("engine", [SUBMIT_AND_DRAIN, RESIDENT, PERSISTENT])
@settings(PROPERTY, max_examples=15)
@given(seed=seeds, shape=shapes, staged=flags)
def test_digests_find_what_the_drive_does_not_tell(
    device: Program, engine: int, seed: int, shape: tuple[int, ...], staged: int
) -> None:
    words = (*shape, READ, 0, engine, staged, 1, SHORT_READS)
    assert device.ask(seed, *words)[0] == 0
