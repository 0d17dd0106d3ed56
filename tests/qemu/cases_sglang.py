"""In the guest: SGLang's own classes over two drives, by passthrough and then by vfio.

Importing SGLang takes minutes here, so both share one boot.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from linker_engine import Rig
from test_several_places import check_both_are_used, hicache_round_trip, linker_round_trip

from qemu.inside_kernel import generic, namespaces
from qemu.vfio_binding import bind
from tutti import cli
from tutti.errors import TuttiError

SERIALS = ("left", "right")


@pytest.fixture(scope="module", params=["passthrough", "vfio"])
def drives(request: pytest.FixtureRequest) -> list[str]:
    """Both drives, by the names that a user gives; the kernel loses them to vfio at the end."""
    if request.param == "passthrough":
        return [generic(namespaces(serial)[0]) for serial in SERIALS]
    return [f"nvme:{bdf}" for bdf in bind()]


def label(names: Sequence[str]) -> None:
    force = [word for serial in SERIALS for word in ("--force", serial)]
    assert cli.main(["format", *names, "--for-server", *force]) == 0


def test_hicache_on_two_drives(
    drives: list[str], tmp_path: Path, seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    label(drives)
    hicache_round_trip(drives, tmp_path, seed)
    check_both_are_used(drives, capsys)
    assert cli.main(["fsck", *drives]) == 0


def test_the_linker_on_two_drives(
    drives: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    label(drives)
    linker_round_trip(drives, tmp_path)
    check_both_are_used(drives, capsys)
    with pytest.raises(TuttiError, match="pass all of them"):
        Rig(tmp_path, path=drives[:1])
    assert cli.main(["fsck", *drives]) == 0
