"""Every allocation and system call below the API fails, one at a time (see `failures.py`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from native.programs import HERE, Build

SAMPLE = 6  # three at once
KINDS = ["allocation", "system", "interrupt", "python"]
TIMEOUT_S = 110
TIMEOUT_ALL_S = 1700


def lives(
    library: Path | None, *arguments: object, timeout_s: int = TIMEOUT_S
) -> dict[str, object]:
    """What the program says of the lives that it tried; fails when it died."""
    environment = {
        **os.environ,
        "LD_PRELOAD": str(library),
        "PYTHONMALLOC": "malloc",  # so that only memory of Tutti's is mapped
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, str(HERE / "failures.py"), *map(str, arguments)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout_s, env=environment
    )
    assert done.stdout, f"it died ({done.returncode}) in a life of these:\n{done.stderr[-3000:]}"
    result: dict[str, object] = json.loads(done.stdout)
    return result


@pytest.mark.parametrize("kind", KINDS)
def test_a_sample_of_calls_fails(
    build: Build, tmp_path: Path, seed: int, kind: str, executor: str
) -> None:
    library = build("failing_calls", "library")
    found = lives(library, kind, executor, tmp_path, f"{seed}:{SAMPLE}")
    # How many calls there are differs from life to life: the last ones of a sample may be too many.
    assert found["tried"], "no call failed"
    assert not found["wrong"]


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_ALL_S + 60)
@pytest.mark.parametrize("kind", KINDS)
def test_every_call_fails(build: Build, tmp_path: Path, kind: str, executor: str) -> None:
    library = build("failing_calls", "library")
    which = "sites" if kind == "python" else "all"
    found = lives(library, kind, executor, tmp_path, which, timeout_s=TIMEOUT_ALL_S)
    assert found["tried"], "no call was counted"
    assert not found["wrong"]
