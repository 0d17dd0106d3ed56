"""Boots a guest whose kernel drives the drives, and lets them fail below pools."""

from __future__ import annotations

from pathlib import Path

import pytest

from qemu.guest import PATIENCE, Drive, Guest, missing
from qemu.test_nvme import check, sparse
from store.pools import GEOMETRY
from tutti.base.units import MiB

pytestmark = [pytest.mark.nvme, pytest.mark.slow, pytest.mark.timeout(450 * PATIENCE)]
HERE = Path(__file__).parent
RECORDS = range(GEOMETRY.table_offset, GEOMETRY.groups_offset, 4096)


def faults() -> str:
    """QEMU's blkdebug: Write Zeroes turns from health to failing flushes, records, writes, health.

    Whatever a turn injects ends with the next turn.
    """
    turns = [
        [{"iotype": "flush"}],
        [{"iotype": "write", "sector": at // 512} for at in RECORDS],
        [{"iotype": "write"}],
        [{"iotype": "discard"}],  # which is never sent
    ]
    lines = []
    for state, rules in enumerate(turns, 1):
        event = {"event": "pwritev_zero", "state": state}
        sections = [("inject-error", event | {"errno": 5, "once": "off"} | rule) for rule in rules]
        sections.append(("set-state", event | {"new_state": state % len(turns) + 1}))
        for name, keys in sections:
            lines += [f"[{name}]", *(f'{key} = "{value}"' for key, value in keys.items()), ""]
    return "\n".join(lines)


def test_what_fails_below_the_kernel(tmp_path: Path, seed: int) -> None:
    """FUA and Flush on the wire; errors of each; drives that are unplugged."""
    if reason := missing():
        pytest.skip(reason)
    (tmp_path / "blkdebug").write_text(faults())
    failing = (
        f"driver=raw,file.driver=blkdebug,file.config={tmp_path / 'blkdebug'},"
        "file.image.driver=file,file.image.filename={path}"
    )
    drives = [
        Drive("wired", [sparse(tmp_path / "wired", 8 * MiB)]),
        Drive("failing", [sparse(tmp_path / "failing", 8 * MiB)], backend=failing),
    ]
    for name in ("left", "right", "upper"):
        drives.append(Drive(name, [sparse(tmp_path / name, 8 * MiB)], hotplug=True))
    program = ["-m", "qemu.inside_kernel", "--seed", str(seed)]
    with Guest(tmp_path, drives, [*program, str(HERE / "cases_kernel_faults.py")]) as guest:
        for name in ("right", "upper"):
            guest.wait_file(f"loading-{name}", 200)
            guest.command("device_del", id=name)
        guest.wait(100)
    check(guest.out)
