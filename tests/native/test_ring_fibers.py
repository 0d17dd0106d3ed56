"""The ring protocol under seeded schedules, and broken versions of it that must be caught."""

from __future__ import annotations

import random
import subprocess

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from native.programs import Build, Program, Start

FAITHFUL, FULL_DEPTH, EARLY_RELEASE, LATE_CQ_DOORBELL = 0, 2, 3, 4
NONE, STALLED, TOO_MANY, QUEUE_FULL = 0, 1, 4, 6
PROPERTY = settings(
    max_examples=400,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
depths = st.sampled_from([2, 4, 8, 16, 32, 64])


@PROPERTY
@given(
    depth=depths,
    submitters=st.integers(1, 8),
    commands=st.integers(1, 40),
    case=st.integers(0, 2**64 - 1),
    laps=st.integers(0, 2),
)
def test_every_command_completes_once(
    ring: Program, depth: int, submitters: int, commands: int, case: int, laps: int
) -> None:
    fault, *_ = ring.ask(depth, submitters, commands, case, FAITHFUL, laps)
    assert fault == NONE


@pytest.fixture
def ring(start: Start) -> Program:
    return start("ring_fiber")


def faults(program: Program, variant: int, depth: int, seed: int, n: int = 60) -> list[int]:
    """Faults of `n` drawn cases of a broken variant."""
    draw = random.Random(seed)
    return [program.ask(depth, 4, 20, draw.getrandbits(63), variant, 0)[0] for _ in range(n)]


def test_a_case_replays_exactly(ring: Program) -> None:
    case = (4, 3, 20, 12345, FAITHFUL, 1)
    assert ring.ask(*case) == ring.ask(*case)


@pytest.mark.parametrize("depth", [2, 4, 8])
def test_a_full_queue_of_depth_commands_is_caught(ring: Program, depth: int, seed: int) -> None:
    found = faults(ring, FULL_DEPTH, depth, seed)
    assert STALLED in found, "a full queue looks like an empty one and hangs"
    assert TOO_MANY not in found, "caught by what it does, not by counting"


@pytest.mark.parametrize("depth", [2, 4, 8])
def test_a_cid_released_before_its_completion_is_caught(
    ring: Program, depth: int, seed: int
) -> None:
    assert set(faults(ring, EARLY_RELEASE, depth, seed)) - {NONE}


def test_completions_before_the_cq_doorbell_are_caught(ring: Program, seed: int) -> None:
    assert QUEUE_FULL in faults(ring, LATE_CQ_DOORBELL, 2, seed, n=200)


@pytest.mark.parametrize("variant", [FULL_DEPTH, EARLY_RELEASE, LATE_CQ_DOORBELL])
@pytest.mark.parametrize("burst_max", [1, 16, 64])
def test_faults_are_caught_in_bursts_as_well(
    build: Build, variant: int, burst_max: int, seed: int
) -> None:
    draw = random.Random(seed)
    lines = [f"2 4 20 {draw.getrandbits(63)} {variant} 0" for _ in range(400)]
    done = subprocess.run(
        [str(build("ring_fiber", "fast")), "11", str(burst_max)], input="\n".join(lines),
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert {line.split()[0] for line in done.stdout.splitlines()} - {str(NONE)}


@pytest.mark.parametrize("depth", [4, 8, 64])
@pytest.mark.parametrize("extra", [-1, 0, 1, 100])
def test_the_lock_holder_rings_for_whoever_failed_to_get_the_lock(
    build: Build, depth: int, extra: int
) -> None:
    program = build("ring_handover", "asan")
    done = subprocess.run(
        [str(program), str(depth), str(depth + extra)],
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    tickets, rung = (int(word) for word in done.stdout.split())
    assert rung == tickets, "finished SQEs were left without a doorbell"
    assert tickets == depth + extra + 1
