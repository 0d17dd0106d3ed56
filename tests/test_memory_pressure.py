"""What the kernel says of memory: /proc, control groups of both versions, pressure."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tutti.base.memory_pressure import MemoryFacts, read_memory, read_stall_us, total_nbytes
from tutti.base.units import GiB, MiB
from tutti.errors import Unsupported


def machine(root: Path, available_kib: int = 8 * 1024 * 1024) -> Path:
    """A root with /proc, without control groups."""
    own = root / "proc/self"
    own.mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 9 kB\nMemAvailable: {available_kib} kB\n")
    (own / "mountinfo").write_text("22 1 8:1 / / rw - ext4 disk rw\n")
    (own / "cgroup").write_text("0::/\n")
    return root


def add_group(root: Path, path: str, version: int, limit: str, stat: str) -> None:
    folder = root / "sys/fs/cgroup" / path
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ("memory.max" if version == 2 else "memory.limit_in_bytes")).write_text(limit + "\n")
    (folder / "memory.stat").write_text(stat)


def mount(root: Path, version: int, mounted: str = "/") -> None:
    kind = "cgroup2 none rw" if version == 2 else "cgroup none rw,memory"
    with (root / "proc/self/mountinfo").open("a") as file:
        file.write(f"30 22 0:26 {mounted} /sys/fs/cgroup rw - {kind}\n")


def test_without_control_groups_the_machine_counts(tmp_path: Path) -> None:
    facts = read_memory(machine(tmp_path))
    assert facts == MemoryFacts(8 * GiB)
    assert facts.free_nbytes == 8 * GiB


def test_version_2_counts_anon_and_shmem_of_the_tightest_group(tmp_path: Path) -> None:
    root = machine(tmp_path)
    mount(root, 2)
    (root / "proc/self/cgroup").write_text("0::/outer/inner\n")
    add_group(root, "", 2, "max", "")
    add_group(root, "outer", 2, str(2 * GiB), f"anon {GiB}\nshmem {512 * MiB}\nfile 5\n")
    add_group(root, "outer/inner", 2, str(1 * GiB), f"anon {100 * MiB}\nshmem 0\n")
    facts = read_memory(root)
    assert facts.free_nbytes == 512 * MiB  # of the outer one, which is tighter
    assert "version 2" in facts.source


@pytest.mark.parametrize(
    ("most", "high", "limit_nbytes"),
    [
        ("max", f"{GiB}", GiB),
        (f"{2 * GiB}", f"{GiB}", GiB),
        (f"{GiB}", f"{2 * GiB}", GiB),
        (f"{GiB}", "max", GiB),
        ("max", "max", None),
    ],
)
def test_version_2_is_limited_by_the_smaller_of_high_and_max(
    tmp_path: Path, most: str, high: str, limit_nbytes: int | None
) -> None:
    root = machine(tmp_path)
    mount(root, 2)
    add_group(root, "", 2, most, f"anon {100 * MiB}\n")
    (root / "sys/fs/cgroup/memory.high").write_text(f"{high}\n")
    facts = read_memory(root)
    assert facts.limit_nbytes == limit_nbytes
    assert facts.free_nbytes == (GiB - 100 * MiB if limit_nbytes else 8 * GiB)
    (root / "sys/fs/cgroup/memory.high").write_text("\n")
    assert read_memory(root).told == {root / "sys/fs/cgroup": False}


def test_names_of_mounts_and_groups_need_not_be_text(tmp_path: Path) -> None:
    """As of a drive that was labelled in Latin-1."""
    root = machine(tmp_path)
    with (root / "proc/self/mountinfo").open("ab") as file:
        file.write(b"31 22 8:17 / /media/caf\xe9 rw - vfat /dev/sdb1 rw\n")
    mount(root, 2)
    (root / "proc/self/cgroup").write_bytes(b"0::/caf\xe9\n")
    add_group(root, os.fsdecode(b"caf\xe9"), 2, str(GiB), "anon 0\n")
    assert read_memory(root).free_nbytes == GiB


def test_the_total_is_the_tightest_limit_whatever_is_used(tmp_path: Path) -> None:
    root = machine(tmp_path)
    assert total_nbytes(root) == 9 * 1024
    (root / "proc/meminfo").write_text(f"MemTotal: {8 * 1024 * 1024} kB\n")
    assert total_nbytes(root) == 8 * GiB
    mount(root, 2)
    (root / "proc/self/cgroup").write_text("0::/outer/inner\n")
    add_group(root, "", 2, "max", "")
    add_group(root, "outer", 2, str(2 * GiB), f"anon {2 * GiB}\n")
    add_group(root, "outer/inner", 2, str(GiB), "anon 0\n")
    assert total_nbytes(root) == GiB
    (root / "proc/meminfo").unlink()
    with pytest.raises(Unsupported, match="mount /proc"):
        total_nbytes(root)


def test_version_1_beside_an_empty_version_2(tmp_path: Path) -> None:
    """A hybrid hierarchy: memory is limited by version 1 alone."""
    root = machine(tmp_path)
    mount(root, 1)
    (root / "proc/self/cgroup").write_text("4:cpu,memory:/job\n0::/elsewhere\n")
    add_group(root, "", 1, "9223372036854771712", "total_rss 1\n")
    stat = f"cache 7\nrss 1\nshmem 1\ntotal_rss {300 * MiB}\ntotal_shmem {20 * MiB}\n"
    add_group(root, "job", 1, str(GiB), stat)
    facts = read_memory(root)
    assert (facts.limit_nbytes, facts.anon_nbytes, facts.shmem_nbytes) == (
        GiB,
        300 * MiB,
        20 * MiB,
    )
    assert facts.free_nbytes == GiB - 320 * MiB


def test_a_container_sees_its_own_group_as_the_root(tmp_path: Path) -> None:
    root = machine(tmp_path)
    mount(root, 2, "/docker/abc")
    (root / "proc/self/cgroup").write_text("0::/docker/abc\n")
    add_group(root, "", 2, str(GiB), "anon 0\n")
    assert read_memory(root).free_nbytes == GiB


def test_a_limit_above_what_is_available_changes_nothing(tmp_path: Path) -> None:
    root = machine(tmp_path, available_kib=1024)
    mount(root, 2)
    add_group(root, "", 2, str(64 * GiB), "anon 5\n")
    assert read_memory(root).free_nbytes == MiB


def test_more_used_than_allowed_leaves_nothing() -> None:
    assert MemoryFacts(GiB, GiB, anon_nbytes=GiB, shmem_nbytes=1).free_nbytes == 0


@pytest.mark.parametrize("limit", ["", "garbage", "-5", "max\n"])
def test_a_limit_that_cannot_be_read_is_none(tmp_path: Path, limit: str) -> None:
    root = machine(tmp_path)
    mount(root, 2)
    add_group(root, "", 2, limit, "anon 5\n")
    facts = read_memory(root)
    assert facts.limit_nbytes is None
    # Only a group that says so has no limit.
    assert facts.told == {root / "sys/fs/cgroup": limit.startswith("max")}


def test_no_proc_is_said(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="mount /proc"):
        read_memory(tmp_path)


@pytest.mark.skipif(not os.path.exists("/proc/meminfo"), reason="no /proc")
def test_this_machine_answers() -> None:
    assert read_memory().free_nbytes > 0


def test_pressure_is_that_of_the_group_or_of_the_machine(tmp_path: Path) -> None:
    root = machine(tmp_path)
    assert read_stall_us(root) is None
    (root / "proc/pressure").mkdir(parents=True)
    (root / "proc/pressure/memory").write_text("some avg10=0.00 total=7\nfull avg10=0.0 total=3\n")
    assert read_stall_us(root) == 7
    mount(root, 2)
    add_group(root, ".", 2, "max", "")
    (root / "proc/self/cgroup").write_text("0::/\n")
    (root / "sys/fs/cgroup/memory.pressure").write_text("some avg10=1.00 total=11\nnonsense\n")
    assert read_stall_us(root) == 11
    (root / "sys/fs/cgroup/memory.pressure").write_text("some avg10=1.00 total=\n")
    assert read_stall_us(root) == 7
