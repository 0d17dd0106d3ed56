"""`make try-sglang` works as README prints it, in both modes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from server_modes import Mode, both_modes

HERE = Path(__file__).resolve().parent


@pytest.mark.slow
@pytest.mark.timeout(600)
@both_modes
def test_a_server_on_the_cpu_loads_from_the_pool(mode: Mode) -> None:
    places = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(HERE / "try_on_cpu.py"), mode.name],
        env={**os.environ, "PYTHONPATH": places},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if "loaded from the pool" in line]
    assert [line.split(": ")[1].split()[0] for line in lines] == ["0", "592", "592"]
    assert done.stdout.splitlines()[-1].startswith("works: ")
