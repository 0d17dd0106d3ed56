"""Runs in the guest: `python -m qemu.inside_kernel FILE...`, pytest over the kernel's own driver.

The fixtures stand in for those of `tests/parity/conftest.py`: the same tests run on namespaces by
passthrough, and on their block devices.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from nvme_host import NvmeHost

from qemu.guest import PATIENCE
from tutti.gio_uring.controller_file import FileController
from tutti.gio_uring.file_member import FileMember

OUT = Path("/out")
LIMIT_S = float(os.environ.get("TUTTI_GUEST_LIMIT_S", "280"))
KINDS = ("passthrough", "block")
PAIRS = ("usual", "odd", "pools")
NVME_CLASS = "0x010802"
BLKZEROOUT = 0x127F  # linux/fs.h


def load_driver(pairs: Sequence[str] = PAIRS) -> None:
    """The kernel's driver takes all drives; those of `pairs` have two namespaces, others one."""
    subprocess.run(["modprobe", "-a", "nvme", "ext4"], check=True)
    deadline_s = time.monotonic() + 30
    while time.monotonic() < deadline_s and not _is_settled(pairs):
        time.sleep(0.1)


def _is_settled(pairs: Sequence[str]) -> bool:
    classes = [p.read_text().strip() for p in Path("/sys/bus/pci/devices").glob("*/class")]
    drives = controllers()
    return len(drives) == classes.count(NVME_CLASS) and all(
        (drives[s] / "state").read_text().strip() == "live"
        and len(namespaces(s)) == 1 + (s in pairs)
        for s in drives
    )


def controllers() -> dict[str, Path]:
    """The drives' folders in sysfs, by serial number."""
    found = Path("/sys/class/nvme").glob("nvme*")
    return {(folder / "serial").read_text().strip(): folder for folder in found}


def namespaces(serial: str) -> list[str]:
    """Block devices of the drive with this serial number, by nsid; their names have no order."""
    found = []
    for head in Path("/sys/class/block").glob("nvme*n*"):
        place = head / "device/serial"
        is_path = "c" in head.name.removeprefix("nvme")
        if not is_path and place.exists() and place.read_text().strip() == serial:
            found.append((int((head / "nsid").read_text()), f"/dev/{head.name}"))
    return [path for _, path in sorted(found)]


def generic(block: str) -> str:
    return block.replace("/dev/nvme", "/dev/ng")


def members(kind: str, serial: str) -> list[str]:
    blocks = namespaces(serial)
    return [generic(b) for b in blocks] if kind == "passthrough" else blocks


def zero(path: str) -> None:
    member = FileMember(path)  # waits until the previous controller has closed it
    fcntl.ioctl(member.fd, BLKZEROOUT, struct.pack("=QQ", 0, member.nbytes))
    member.close()


class Fixtures:
    """A pytest plugin."""

    @pytest.fixture
    def seed(self, request: pytest.FixtureRequest) -> int:
        return int(request.config.option.seed)

    @pytest.fixture(params=KINDS)
    def kind(self, request: pytest.FixtureRequest) -> str:
        return str(request.param)

    @pytest.fixture
    def controller(self, kind: str) -> Iterator[FileController]:
        """Over the namespaces of the first drive, which begin with zeros."""
        for path in namespaces("usual"):
            zero(path)
        with FileController(members(kind, "usual")) as made:
            yield made

    @pytest.fixture
    def host(self, controller: FileController) -> Iterator[NvmeHost]:
        made = NvmeHost(controller)
        yield made
        made.close()

    @staticmethod
    def pytest_addoption(parser: pytest.Parser) -> None:
        parser.addoption("--seed", type=int)


def main(arguments: Sequence[str]) -> int:
    faulthandler.dump_traceback_later(LIMIT_S * PATIENCE, exit=True)
    load_driver()
    fixed = ["--noconftest", "-c", "/dev/null", "--import-mode=importlib", "-q", "-rs"]
    fixed += ["-p", "no:cacheprovider", f"--junitxml={OUT / 'results.xml'}", "--durations=8"]
    return int(pytest.main([*fixed, *arguments], plugins=[Fixtures()]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
