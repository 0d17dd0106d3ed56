"""Boots a guest in which SGLang's own classes store KV on two drives, which are emulated."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from soak.linker import PYTHON, ROOT, is_there

from qemu.guest import PATIENCE, Drive, Guest, missing
from qemu.test_nvme import check, sparse
from tutti.base.units import MiB

pytestmark = [pytest.mark.nvme, pytest.mark.slow, pytest.mark.timeout(1000 * PATIENCE)]
HERE = Path(__file__).parent
INSIDE_S = 800
PLACES = ("build/view", "tests", "tests/sglang", "tests/sglang/stand_in")
#: SGLang's host pools leave 10 GiB free; the guest touches less than 3 GiB.
MEMORY = "12G"


def test_sglang_on_two_drives(tmp_path: Path, seed: int) -> None:
    """HiCache's storage and the linker, by passthrough and by vfio."""
    if reason := missing():
        pytest.skip(reason)
    if not is_there():
        pytest.skip(f"SGLang is not installed in {PYTHON.parents[1]}; run `make test-sglang`")
    names = ("left", "right")
    drives = [Drive(name, [sparse(tmp_path / name, 32 * MiB)]) for name in names]
    environment = {
        "PYTHONSAFEPATH": "1",
        "PYTHONPATH": os.pathsep.join(str(ROOT / place) for place in PLACES),
        "SGLANG_USE_CPU_ENGINE": "1",
        "TUTTI_GUEST_LIMIT_S": str(INSIDE_S),
    }
    program = ["-m", "qemu.inside_kernel", "--seed", str(seed), str(HERE / "cases_sglang.py")]
    with Guest(
        tmp_path, drives, program, python=PYTHON, memory=MEMORY, environment=environment
    ) as guest:
        guest.wait(INSIDE_S + 100)
    check(guest.out)
