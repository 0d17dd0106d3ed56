"""`make try-sglang` works as README prints it, in both modes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from server_modes import Mode, both_modes

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


def run(*words: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Runs Python with the folders for modules that the Makefile gives it, and no other."""
    recipe = (ROOT / "Makefile").read_text().partition("\ntry-sglang:")[2]
    places = re.search(r"PYTHONPATH=(\S+)", recipe)
    assert places is not None
    path = places[1].replace("$(CURDIR)", str(ROOT))
    return subprocess.run(
        [sys.executable, *words],
        env={**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


def test_its_program_finds_its_modules() -> None:
    load = "import runpy, sys; runpy.run_path(sys.argv[1])"
    done = run("-c", load, str(HERE / "try_on_cpu.py"), timeout_s=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
@both_modes
def test_a_server_on_the_cpu_loads_from_the_pool(mode: Mode) -> None:
    done = run(str(HERE / "try_on_cpu.py"), mode.name, timeout_s=500)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if "loaded from the pool" in line]
    assert [line.split(": ")[1].split()[0] for line in lines] == ["0", "592", "592"]
    assert done.stdout.splitlines()[-1].startswith("works: ")
