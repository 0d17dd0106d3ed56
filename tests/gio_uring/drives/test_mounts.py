"""What is mounted where: made-up lines, and one answer for all who ask."""

from __future__ import annotations

from pathlib import Path

import pytest

from tutti.gio_uring.drives.mounts import Mount, filesystem_of, read_mounts
from tutti.gio_uring.probe import probe_direct
from tutti.machine import machine_facts

LINES = """\
22 1 8:1 / / rw shared:1 - ext4 /dev/sda1 rw
30 22 8:2 / /data\\040one rw - xfs /dev/disk\\0402 rw
31 22 8:3 / /d\\303\\251\\134040 rw shared:2 master:3 - btrfs /dev/sdc rw
32 22 0:40 / /datä rw - tmpfs none rw
33 22 0:41 / /datä rw - ramfs none rw
not a line
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/mountinfo").write_text(LINES.replace("\\303\\251", "é"))
    return tmp_path


def test_lines_with_escapes_are_read(root: Path) -> None:
    mounts = read_mounts(root)
    assert mounts[0] == Mount("8:1", "/", "ext4", "/dev/sda1")
    assert mounts[1] == Mount("8:2", "/data one", "xfs", "/dev/disk 2")
    assert [mount.point for mount in mounts[2:]] == ["/dé\\040", "/datä", "/datä"]
    assert read_mounts(root / "elsewhere") == []


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/data one/pool", "xfs"),
        ("/data one", "xfs"),
        ("/data onerous", "ext4"),
        ("/dé\\040/x", "btrfs"),
        ("/datä/x", "ramfs"),  # covers what was mounted there before
        ("/srv", "ext4"),
    ],
)
def test_the_longest_mount_point_counts(root: Path, path: str, kind: str) -> None:
    assert filesystem_of(path, root) == kind
    assert filesystem_of(path, root / "elsewhere") == "unknown"


def test_all_who_ask_get_the_same_answer(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = root / "a b"
    here.mkdir()
    with (root / "proc/self/mountinfo").open("a") as file:
        print(f"40 22 8:4 / {str(here).replace(' ', chr(92) + '040')} rw - zfs p rw", file=file)
    monkeypatch.setattr(read_mounts, "__defaults__", (root,))
    monkeypatch.setattr(filesystem_of, "__defaults__", (root,))
    assert filesystem_of(here) == "zfs"
    assert machine_facts(here)["filesystem"] == "zfs"
    assert probe_direct(str(here)).filesystem == "zfs"
