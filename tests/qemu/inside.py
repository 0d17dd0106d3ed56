"""Runs in the guest: `python -m qemu.inside FILE...`, pytest on test files with vfio controllers.

The fixtures stand in for those of `tests/parity/conftest.py`, so the same tests run on a drive.
"""

from __future__ import annotations

import contextlib
import faulthandler
import sys
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from nvme_host import NvmeHost

from qemu.guest import PATIENCE
from qemu.vfio_binding import bind
from tutti.gio_uring import nvme_spec as nvme
from tutti.gio_uring.controller_vfio import VfioController

OUT = Path("/out")
LIMIT_S = 280

_IOMMU = "QEMU's drive answers success where the IOMMU dropped a transfer"
_STATUS = "QEMU's drive refuses it with a status of its own"
_LENIENT = "QEMU's drive takes it"

#: Tests of the parity suite that QEMU's drive cannot pass: with which ends of their names (none:
#: all of them), and why.
NOT_ON_A_DRIVE: dict[str, tuple[tuple[str, ...], str]] = {
    "test_wild_doorbells_are_ignored": ((), "a drive's doorbells cannot be read back"),
    "test_deallocate_out_of_range": ((), _LENIENT),
    "test_sgl_segment_chains": ((), "QEMU's drive mistakes segments of equal size for each other"),
    "test_unknown_namespace": (
        ("3", "64", "4294967295"),
        "an inactive namespace is an invalid field, and a flush of all of them is allowed",
    ),
    "test_unknown_opcode": (("5",), "it is Compare, which QEMU's drive has"),
    "test_wild_addresses": ((), _IOMMU),
    "test_extent_over_the_end_of_a_region": ((), _IOMMU),
    "test_sgl_length_mismatch": (("4100", "8192", "4294967292"), _LENIENT),
    "test_misaligned_prp": ((), _LENIENT),
    "test_bad_psdt": ((), _LENIENT),
    "test_bad_descriptors": (("0-17", "1-17", "2-17", "3-14", "6-13"), _STATUS),
    "test_bad_segments": (("4-32", "1-16"), _STATUS),
    "test_endless_chain_of_empty_segments": ((), "QEMU's drive follows it without end"),
    "test_too_many_descriptors": ((), _LENIENT),
}
#: Cases of each test of refusals that run: the drive refuses, and two show that its status arrives.
REFUSALS_MAX = 2


class Drives:
    """The guest's drives, by place; opened one at a time."""

    def __init__(self) -> None:
        self.bdfs = bind()

    @contextlib.contextmanager
    def open(self, place: int, **options: object) -> Iterator[VfioController]:
        """One drive; released even when a test fails and leaves regions behind."""
        made = VfioController(self.bdfs[place], **options)  # type: ignore[arg-type]
        try:
            yield made
            made.close()
        finally:
            made._buffers.clear()
            made.close()


def zero(controller: VfioController) -> None:
    """Deallocates all blocks, which then read as zeros: cases_drive.py shows it of this drive."""
    host = NvmeHost(controller, depth=16)
    for nsid, size in enumerate(controller.info.namespace_nlb, 1):
        assert host.deallocate([(0, size)], nsid) == nvme.STATUS_OK
    host.close()
    host.queue_pair.close()


def name_of(item: pytest.Item) -> str:
    """Of the test, without its parameters."""
    return getattr(item, "originalname", item.name)


def why_not(item: pytest.Item) -> str:
    """Why a test of the parity suite cannot run on QEMU's drive; "" for one that can."""
    if "parity" not in item.path.parts:
        return ""
    ends, reason = NOT_ON_A_DRIVE.get(name_of(item), ((), ""))
    is_meant = not ends or item.name.endswith(tuple(f"{end}]" for end in ends))
    return reason if is_meant else ""


class Fixtures:
    """A pytest plugin."""

    drives = Drives()

    @pytest.fixture
    def seed(self, request: pytest.FixtureRequest) -> int:
        return int(request.config.option.seed)

    @pytest.fixture(name="drives")
    def all_drives(self) -> Drives:
        return self.drives

    @pytest.fixture
    def controller(self, request: pytest.FixtureRequest) -> Iterator[VfioController]:
        """The first drive, whose namespaces are NAMESPACES and begin with zeros.

        Half of the tests ring its doorbells, half its shadow doorbells.
        """
        shadow = zlib.crc32(request.node.name.encode()) % 2 == 1
        with self.drives.open(0, shadow_doorbells=shadow) as made:
            zero(made)
            yield made

    @pytest.fixture
    def host(self, controller: VfioController) -> Iterator[NvmeHost]:
        made = NvmeHost(controller)
        yield made
        made.close()

    @staticmethod
    def pytest_addoption(parser: pytest.Parser) -> None:
        parser.addoption("--seed", type=int)

    @staticmethod
    def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
        taken, counts = [], Counter[str]()
        for item in items:
            name, reason = name_of(item), why_not(item)
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))
            elif item.path.name == "test_refusals.py":
                counts[name] += 1
            if reason or counts[name] <= REFUSALS_MAX:
                taken.append(item)
        items[:] = taken


def main(arguments: Sequence[str]) -> int:
    faulthandler.dump_traceback_later(LIMIT_S * PATIENCE, exit=True)
    fixed = ["--noconftest", "-c", "/dev/null", "--import-mode=importlib", "-q", "-rs"]
    fixed += ["-p", "no:cacheprovider", f"--junitxml={OUT / 'results.xml'}", "--durations=8"]
    return int(pytest.main([*fixed, *arguments], plugins=[Fixtures()]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
