"""Boots guests with emulated NVMe drives and reports what the cases inside found."""

from __future__ import annotations

import struct
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from nvme_host import NAMESPACES

from qemu.guest import PATIENCE, Drive, Guest, missing
from tutti.base.units import MiB

pytestmark = [pytest.mark.nvme, pytest.mark.timeout(450 * PATIENCE)]
HERE = Path(__file__).parent
PARITY_SUITE = [HERE.parent / f"parity/test_{what}.py" for what in ("controllers", "refusals")]

BLKDEBUG = "".join(
    f'[inject-error]\nevent = "none"\niotype = "{kind}"\nerrno = "5"\n{more}\n\n'
    for kind, more in (
        ("read", 'sector = "800"\nonce = "off"'),
        ("read", 'sector = "2400"\nonce = "off"'),
        ("write", 'sector = "1600"\nonce = "off"'),
        ("flush", 'once = "on"'),
    )
)
SLOW_NBYTES_PER_S = 4 * MiB


def sparse(path: Path, nbytes: int) -> Path:
    with path.open("wb") as file:
        file.truncate(nbytes)
    return path


def drives_of_the_first_boot(folder: Path) -> list[Drive]:
    usual = [sparse(folder / f"usual{i}", nbytes) for i, nbytes in enumerate(NAMESPACES)]
    odd = [sparse(folder / f"odd{i}", nlb * 512) for i, nlb in enumerate((16391, 1001))]
    (folder / "blkdebug").write_text(BLKDEBUG)
    faulty = (
        f"driver=raw,file.driver=blkdebug,file.config={folder / 'blkdebug'},"
        "file.image.driver=file,file.image.filename={path}"
    )
    slow = "driver=throttle,throttle-group=slow,file.driver=file,file.filename={path}"
    return [
        Drive("usual", usual),
        Drive("odd", odd, blocks=512, mdts=5, queues=2),
        Drive("faulty", [sparse(folder / "faulty", 4 * MiB)], backend=faulty),
        Drive("slow", [sparse(folder / "slow", 8 * MiB)], backend=slow),
    ]


def check(out: Path) -> None:
    """Fails with the failures of the run inside."""
    root = ElementTree.parse(out / "results.xml").getroot()
    cases = list(root.iter("testcase"))
    bad = [case for case in cases for kind in ("failure", "error") if case.find(kind) is not None]
    skipped = sum(case.find("skipped") is not None for case in cases)
    print(f"emulated: {len(cases)} cases, {skipped} skipped, {len(bad)} failed")
    assert cases
    assert not bad, "\n".join(f"{case.get('classname')}::{case.get('name')}" for case in bad)


@pytest.fixture(autouse=True)
def _guest_can_start() -> None:
    if reason := missing():
        pytest.skip(reason)


def test_one_drive(tmp_path: Path, seed: int) -> None:
    """The parity suite, and a drive's limits."""
    cases = [HERE / f"cases_{what}.py" for what in ("drive", "store", "address")]
    program = ["-m", "qemu.inside", "--seed", str(seed), *map(str, [*PARITY_SUITE, *cases])]
    objects = [f"throttle-group,id=slow,x-bps-total={SLOW_NBYTES_PER_S}"]
    drives = drives_of_the_first_boot(tmp_path)
    for name in ("left", "right"):
        drives.append(Drive(name, [sparse(tmp_path / name, 24 * MiB)]))
    with Guest(tmp_path, drives, program, objects=objects) as guest:
        guest.wait(300)
    check(guest.out)


def partitioned(path: Path, nbytes: int, blocks: int) -> Path:
    """One partition behind the first megabyte (the PC's partition table, its first entry)."""
    start, end = MiB // blocks, nbytes // blocks
    table = bytearray(512)
    struct.pack_into("<B3xB3xII", table, 446, 0, 0x83, start, end - start)
    table[510:] = b"\x55\xaa"
    with sparse(path, nbytes).open("r+b") as file:
        file.write(table)
    return path


def test_unplugged(tmp_path: Path, seed: int) -> None:
    """One of two drives leaves in mid-load; the other one goes on."""
    names = ("left", "right")
    images = [sparse(tmp_path / name, 8 * MiB) for name in names]
    drives = [Drive(n, [image], hotplug=True) for n, image in zip(names, images, strict=True)]
    program = ["-m", "qemu.inside", "--seed", str(seed), str(HERE / "cases_unplug.py")]
    with Guest(tmp_path, drives, program) as guest:
        guest.wait_file("loading", 100)
        guest.command("device_del", id="right")
        guest.wait(120)
    check(guest.out)
    print(f"emulated: {(guest.out / 'served').read_text()} objects are left of both drives")


@pytest.mark.parametrize(
    "files",
    [
        pytest.param([HERE / "cases_kernel.py"], id="pools"),
        pytest.param(PARITY_SUITE, id="parity", marks=pytest.mark.slow),
    ],
)
def test_the_kernels_driver(tmp_path: Path, seed: int, files: list[Path]) -> None:
    """The parity suite by passthrough and on block devices; pools on both and on a partition."""
    program = ["-m", "qemu.inside_kernel", "--seed", str(seed), *map(str, files)]
    usual, odd, faulty, _ = drives_of_the_first_boot(tmp_path)
    pools = Drive("pools", [sparse(tmp_path / f"pool{i}", 24 * MiB) for i in range(2)])
    parted = Drive("parted", [partitioned(tmp_path / "parted", 48 * MiB, 4096)])
    with Guest(tmp_path, [usual, odd, faulty, pools, parted], program) as guest:
        guest.wait(300)
    check(guest.out)
