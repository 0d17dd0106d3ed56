"""Boots guests in which a server's storage lies on two drives: through vfio, and by passthrough."""

from __future__ import annotations

from pathlib import Path

import pytest

from qemu.guest import PATIENCE, Drive, Guest, missing
from qemu.test_nvme import check, sparse
from tutti.base.units import MiB

pytestmark = [pytest.mark.nvme, pytest.mark.slow, pytest.mark.timeout(450 * PATIENCE)]
HERE = Path(__file__).parent


@pytest.mark.parametrize("how", ["inside", "inside_kernel"])
def test_a_server_on_two_drives(how: str, tmp_path: Path, seed: int) -> None:
    if reason := missing():
        pytest.skip(reason)
    names = ("left", "right")
    images = [sparse(tmp_path / name, 32 * MiB) for name in names]
    drives = [Drive(n, [image], hotplug=True) for n, image in zip(names, images, strict=True)]
    program = ["-m", f"qemu.{how}", "--seed", str(seed), str(HERE / "cases_server.py")]
    with Guest(tmp_path, drives, program) as guest:
        guest.wait_file("loading", 200)
        guest.command("device_del", id="right")
        guest.wait(150)
    check(guest.out)
