"""The ring protocol under real threads and the sanitizers, and a doorbell that orders nothing."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from native.programs import ENVIRONMENT, SANITIZER_EXIT, Build

FAITHFUL, RELAXED_DOORBELL = 0, 1
# depth, submitters, commands, seed, laps before the counters wrap
CASES = [
    (2, 1, 2000, 1, 1),
    (2, 4, 2000, 2, 0),
    (4, 3, 20000, 3, 3),
    (8, 8, 10000, 4, 1),
    (16, 2, 20000, 5, 1),
    (64, 4, 20000, 6, 2),
    (64, 1, 20000, 7, 1),
]


def run(program: Path, case: tuple[int, ...], variant: int) -> subprocess.CompletedProcess[str]:
    depth, submitters, commands, seed, laps = case
    words = [str(program), *map(str, (depth, submitters, commands, seed, variant, laps))]
    return subprocess.run(words, capture_output=True, text=True, timeout=100, env=ENVIRONMENT)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("sanitizer", ["tsan", "asan"])
def test_every_command_completes_once(build: Build, sanitizer: str, case: tuple[int, ...]) -> None:
    done = run(build("ring_stress", sanitizer), case, FAITHFUL)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "fault 0" in done.stdout


def test_tsan_sees_a_doorbell_that_orders_nothing(build: Build) -> None:
    done = run(build("ring_stress", "tsan"), (64, 2, 5000, 1, 0), RELAXED_DOORBELL)
    assert done.returncode == SANITIZER_EXIT, done.stdout
    assert "data race" in done.stderr
    assert "sq_fetch" in done.stderr, "the race is the controller's read of an SQE"
