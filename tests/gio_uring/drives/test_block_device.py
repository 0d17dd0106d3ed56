"""What may be written to: devices made of sysfs files, and loop devices where there are some."""

from __future__ import annotations

import os
import random
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from loop_devices import loop_devices
from nvme_host import LBA, READ, WRITE, NvmeHost

import tutti
from store.pools import LAYOUT
from tutti import cli
from tutti.base.units import KiB, MiB
from tutti.errors import ConfigError, PoolExists, PoolInUse, PoolNotFound
from tutti.gio_uring import nvme_spec as nvme
from tutti.gio_uring.controller_file import FileController
from tutti.gio_uring.drives import block_device
from tutti.gio_uring.drives.block_device import Devices, check_devices, device_name
from tutti.gio_uring.drives.device_content import Held, check_forced, contents
from tutti.gio_uring.drives.generic_device import is_generic, readable_path
from tutti.gio_uring.file_member import FileMember
from tutti.pool import places

NBYTES = 8 * MiB
MAGICS = [
    ("ext2", 0x438, b"\x53\xef"),
    ("XFS", 0, b"XFSB"),
    ("Btrfs", 0x10040, b"_BHRfS_M"),
    ("(GPT)", 512, b"EFI PART"),
    ("(GPT)", 4096, b"EFI PART"),
    ("boot sector", 510, b"\x55\xaa"),
    ("LVM", 512, b"LABELONE"),
    ("LUKS", 0, b"LUKS\xba\xbe"),
    ("md 1.1", 0, b"\xfc\x4e\x2b\xa9"),
    ("md 1.2", 4096, b"\xfc\x4e\x2b\xa9"),
    ("md 1.0", NBYTES - 8 * KiB, b"\xfc\x4e\x2b\xa9"),
    ("md 0.90", NBYTES - 64 * KiB, b"\xfc\x4e\x2b\xa9"),
    ("GPT backup", NBYTES - 512, b"EFI PART"),
    ("Intel", NBYTES - 1024, b"Intel Raid ISM Cfg Sig. 1.1"),
    ("DDF", NBYTES - 512, b"\xde\x11\xde\x11"),
    ("ZFS", 128 * KiB + 3 * KiB, b"\x0c\xb1\xba\x00"),
    ("swap", 4086, b"SWAPSPACE2"),
    ("unknown kind", 700_001, b"\x01"),
    ("unknown kind", NBYTES - 1, b"\x01"),
]


def put(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        place = folder / name.replace("__", "/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)


class Machine:
    """A tree with /sys, /proc and /dev: the drive nvme0n1 with two partitions, and nvme1n1."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "dev").mkdir()
        self.mounts: list[str] = []
        put(root / "proc", swaps="Filename Type Size Used Priority\n")
        for drive, serial in (("nvme0n1", "SYSTEM"), ("nvme1n1", "SPARE")):
            self.add(f"pci/{drive}", drive)
            put(
                root / "sys/devices/pci" / drive,
                queue__logical_block_size="4096\n",
                device__serial=f"{serial}   \n",
                device__model="Model\n",
            )
        for number in (1, 2):
            name = f"nvme0n1p{number}"
            self.add(f"pci/nvme0n1/{name}", name)
            put(root / "sys/devices/pci/nvme0n1" / name, partition=f"{number}\n")

    def add(self, place: str, name: str) -> None:
        folder = self.root / "sys/devices" / place
        put(folder, size=f"{NBYTES // 512}\n", ro="0\n")
        (folder / "holders").mkdir()
        (self.root / "sys/class/block").mkdir(parents=True, exist_ok=True)
        (self.root / "sys/class/block" / name).symlink_to(folder)
        with (self.root / "dev" / name).open("wb") as file:
            file.truncate(NBYTES)

    def mount(self, name: str, point: str, number: str) -> None:
        numbers = self.root / "sys/dev/block"
        numbers.mkdir(parents=True, exist_ok=True)
        if not number.startswith("0:"):
            (numbers / number).symlink_to((self.root / "sys/class/block" / name).resolve())
        self.mounts.append(f"30 1 {number} / {point} rw - ext4 /dev/{name} rw\n")
        put(self.root / "proc", self__mountinfo="".join(self.mounts))

    def owner(self, name: str, holder: str) -> None:
        self.add(f"virtual/{holder}", holder)
        (self.root / "sys/class/block" / name / "holders" / holder).mkdir()

    def uses(self, name: str) -> str:
        return "; ".join(Devices(self.root).inspect(name).in_use)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_a_blank_drive_is_free(machine: Machine) -> None:
    found = Devices(machine.root).inspect("nvme1n1")
    assert found.is_free
    assert (found.serial, found.model, found.lba_nbytes) == ("SPARE", "Model", 4096)
    assert found.nbytes == NBYTES
    assert Devices(machine.root).names() == ["nvme0n1", "nvme0n1p1", "nvme0n1p2", "nvme1n1"]


def test_what_is_not_read_to_its_end_is_not_blank(machine: Machine) -> None:
    """A read that meets a bad block ends before it, as it would at the end of the device."""
    os.truncate(machine.root / "dev/nvme1n1", NBYTES - 4096)
    assert Devices(machine.root).inspect("nvme1n1").holds == ("unknown, it cannot be read",)
    for good_nbytes in (0, 512):
        read = iter((bytes(good_nbytes), bytes(MiB)))
        assert contents(lambda at, n, read=read: next(read), NBYTES) != []  # type: ignore[misc]


def test_a_device_without_a_size_cannot_be_used(machine: Machine) -> None:
    """As the kernel leaves a namespace whose blocks are larger than it takes."""
    (machine.root / "sys/class/block/nvme1n1/size").write_text("0\n")
    assert "cannot be used: it has no size" in machine.uses("nvme1n1")
    (machine.root / "sys/class/block/nvme0n1p1/size").write_text("0\n")
    assert "cannot be used" in machine.uses("nvme0n1p1")
    assert machine.uses("nvme0n1") == ""


def test_partitions_are_content_of_their_drive(machine: Machine) -> None:
    drive = Devices(machine.root).inspect("nvme0n1")
    assert drive.holds == ("partitions: nvme0n1p1, nvme0n1p2",)
    part = Devices(machine.root).inspect("nvme0n1p2")
    assert part.is_free
    assert (part.is_partition, part.serial) == (True, "SYSTEM")


def test_what_is_mounted_is_in_use_and_so_is_its_drive(machine: Machine) -> None:
    machine.mount("nvme0n1p2", "/data\\040one", "259:2")
    assert machine.uses("nvme0n1p2") == "mounted at /data one"
    assert machine.uses("nvme0n1") == "nvme0n1p2 mounted at /data one"
    assert machine.uses("nvme0n1p1") == ""
    assert machine.uses("nvme1n1") == ""


def test_a_mount_without_a_number_is_found_by_its_source(machine: Machine) -> None:
    machine.mount("nvme1n1", "/data", "0:45")
    assert machine.uses("nvme1n1") == "mounted at /data"


@pytest.mark.parametrize("point", ["/", "/boot", "/boot/efi"])
def test_nothing_of_the_boot_drive_is_given_out(machine: Machine, point: str) -> None:
    machine.mount("nvme0n1p1", point, "259:1")
    assert "the system is on its drive" in machine.uses("nvme0n1p2")
    assert machine.uses("nvme1n1") == ""


def test_a_system_on_a_volume_is_found_through_its_holders(machine: Machine) -> None:
    machine.owner("nvme0n1p1", "dm-0")
    machine.owner("dm-0", "dm-1")
    machine.mount("dm-1", "/", "253:1")
    assert "the system is on its drive (/)" in machine.uses("nvme0n1p2")
    assert "nvme0n1p1 part of dm-0" in machine.uses("nvme0n1")


def test_holders_and_swap_are_uses(machine: Machine) -> None:
    machine.owner("nvme1n1", "md0")
    put(machine.root / "proc", swaps="Filename\n/dev/nvme0n1p1 partition 1 0 -2\n")
    assert machine.uses("nvme1n1") == "part of md0"
    assert machine.uses("nvme0n1p1") == "swap space"
    assert machine.uses("nvme0n1") == "nvme0n1p1 swap space"


def test_a_read_only_drive_is_refused(machine: Machine) -> None:
    put(machine.root / "sys/devices/pci/nvme1n1", ro="1\n")
    assert machine.uses("nvme1n1") == "read-only"


def test_several_paths_to_a_namespace_are_not_listed(machine: Machine) -> None:
    machine.add("pci/nvme1c1n1", "nvme1c1n1")
    assert "nvme1c1n1" not in Devices(machine.root).names()


@pytest.mark.parametrize(("what", "offset", "magic"), MAGICS)
def test_content_is_recognised(what: str, offset: int, magic: bytes) -> None:
    image = bytearray(NBYTES)
    image[offset : offset + len(magic)] = magic
    found = contents(lambda at, n: bytes(image[at : at + n]), NBYTES)
    assert any(what in text for text in found), found
    image[offset : offset + len(magic)] = bytes(len(magic))
    assert contents(lambda at, n: bytes(image[at : at + n]), NBYTES) == []


def test_any_content_at_all_is_content(seed: int) -> None:
    rng = random.Random(seed)
    for nbytes in (512, 4 * KiB, MiB, MiB + 512, NBYTES):
        place = rng.choice([rng.randrange(min(nbytes, MiB)), nbytes - 1])
        image = bytearray(nbytes)
        image[place] = 0x5A
        assert contents(lambda at, n, image=image: bytes(image[at : at + n]), nbytes)


def test_all_that_is_not_forced_is_named_at_once() -> None:
    full = ("XFS",)
    drives = [
        Held("/a", full, "A"),
        Held("/b", (), "B"),
        Held("/c", full, "C"),
        Held("/d", full, "C"),
    ]
    for force in (False, True, "", "B", "AC", [], ["B"]):
        with pytest.raises(PoolExists, match=r"^/a .*; /c .*; /d .* number, 'A' and 'C' \("):
            check_forced(drives, force)
    with pytest.raises(PoolExists, match=r"^/c .*; /d .* number, 'C' \("):
        check_forced(drives, ["B", "A"])
    check_forced(drives, ["C", "A"])
    check_forced(drives[1:], "C")
    with pytest.raises(PoolExists, match="no serial number for --force on /e: erase it"):
        check_forced([Held("/e", full, "")], ["", "A"])


def test_every_drive_of_a_pool_is_forced_by_its_own_number(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_device, "device_name", lambda path: Path(path).name)
    for name in ("nvme0n1", "nvme1n1"):  # its partitions are content of the first
        with (machine.root / "dev" / name).open("r+b") as file:
            file.write(b"XFSB")
    paths = [str(machine.root / "dev" / name) for name in ("nvme0n1", "nvme1n1")]
    with pytest.raises(PoolExists, match="'SYSTEM' and 'SPARE'"):
        check_devices(paths, True, machine.root)
    with pytest.raises(PoolExists, match="number, 'SYSTEM'"):
        check_devices(paths, "SPARE", machine.root)
    assert len(check_devices(paths, {"SPARE", "SYSTEM"}, machine.root)) == 2
    machine.owner("nvme1n1", "md0")  # which counts more than what the first one holds
    with pytest.raises(PoolInUse, match="part of md0"):
        check_devices(paths, False, machine.root)


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ("by-id", "a path is given twice: "),
        ("ng0n1", "a path is given twice: "),
        ("nvme0n1p1", "nvme0n1p1 is a partition of "),
    ],
)
@pytest.mark.parametrize("words", [["--for-server"], ["--capacity", "6MiB", "--model", "tiny"]])
def test_a_drive_under_two_names_and_with_its_partition_is_refused_unwritten(
    machine: Machine,
    other: str,
    says: str,
    words: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    nodes, stat_of = machine.root / "dev", os.stat
    (nodes / "ng0n1").touch()
    (nodes / "by-id").symlink_to(nodes / "nvme0n1")

    def as_device(path: Any, **options: Any) -> os.stat_result:
        found = stat_of(path, **options)
        if not str(path).startswith(f"{nodes}/"):
            return found
        is_char = Path(path).name.startswith("ng")
        return os.stat_result((0o600 | (stat.S_IFCHR if is_char else stat.S_IFBLK), *found[1:]))

    def in_machine(first: str, *more: str) -> Path:
        is_class = first == "/sys/class/block"
        return Path(f"{machine.root}{first}" if is_class else first, *more)

    monkeypatch.setattr(os, "stat", as_device)
    monkeypatch.setattr(places, "Path", in_machine)
    paths = [str(nodes / name) for name in ("nvme0n1", other)]
    for given in (paths, paths[::-1]):
        assert cli.main(["format", *given, *words]) == 3
        assert says in capsys.readouterr().err
    assert not any(path.read_bytes().strip(b"\0") for path in nodes.iterdir())


def test_a_missing_device_is_never_a_new_file() -> None:
    path = "/dev/nvme99n9"
    for refused in (
        lambda: device_name(path),
        lambda: tutti.store.format(path, LAYOUT, 64 * MiB),
        lambda: tutti.open(path, LAYOUT, 64 * MiB),
    ):
        with pytest.raises(PoolNotFound, match="does not exist; `tutti nvme"):
            refused()
    assert not os.path.exists(path)


def test_other_character_devices_are_refused() -> None:
    with pytest.raises(ConfigError, match="character device"):
        device_name("/dev/null")


def test_files_are_no_devices(tmp_path: Path) -> None:
    path = tmp_path / "ng0n1"
    path.touch()
    assert device_name(str(path)) is None
    assert not is_generic(path)
    assert readable_path(str(path)) == str(path)
    assert check_devices([str(path), str(tmp_path / "new")]) == []


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[Path]:
    """A loop device over a file of zeros, image0."""
    with loop_devices(tmp_path) as make:
        yield Path(make(64 * MiB, block_nbytes=4096))


def test_a_pool_on_a_block_device(loop: Path, tmp_path: Path) -> None:
    tutti.store.format(loop, LAYOUT, 48 * MiB)
    with tutti.open(loop) as store:
        assert store.controller.direct
        assert store.layout == LAYOUT
        with pytest.raises(PoolInUse, match="in use by another program"):
            FileMember(loop)
    serial = str(tmp_path / "image0")
    for force in (False, True, "other"):
        with pytest.raises(PoolExists, match="force with its serial number"):
            tutti.store.format(loop, LAYOUT, 48 * MiB, force=force)
    tutti.store.format(loop, LAYOUT, 48 * MiB, force=serial)


def test_a_device_that_has_left_is_gone_and_not_full(
    loop: Path, tmp_path: Path, executor: str
) -> None:
    """A device whose drive is gone has no size; here a loop device over a file cut to nothing."""
    with FileController([loop], executor=executor) as controller:
        host = NvmeHost(controller)
        assert host.write(5, bytes(LBA)) == nvme.STATUS_OK
        os.truncate(tmp_path / "image0", 0)
        subprocess.run(["losetup", "-c", loop], check=True)
        for opcode in (READ, WRITE):
            fill = host.transfer(opcode, 5, 1, [host.extent(0, LBA)])
            assert host.run(fill) == nvme.STATUS_DEVICE_GONE
        host.close()


def test_a_device_that_becomes_read_only_says_so(loop: Path, executor: str) -> None:
    with FileController([loop], executor=executor) as controller:
        host = NvmeHost(controller)
        assert host.write(5, bytes(LBA)) == nvme.STATUS_OK
        subprocess.run(["blockdev", "--setro", loop], check=True)
        assert host.write(5, bytes(LBA)) == nvme.STATUS_NAMESPACE_WRITE_PROTECTED
        assert not host.read(5, 1).any()
        host.close()
    subprocess.run(["blockdev", "--setrw", loop], check=True)


def test_a_file_system_is_not_overwritten(loop: Path, tmp_path: Path) -> None:
    if subprocess.run(["mkfs.ext4", "-q", loop], check=False).returncode != 0:
        pytest.skip("there is no mkfs.ext4")
    with pytest.raises(PoolExists, match="ext2, ext3 or ext4"):
        tutti.store.format(loop, LAYOUT, 48 * MiB)
    point = tmp_path / "point"
    point.mkdir()
    mounted = subprocess.run(["mount", loop, point], capture_output=True, text=True, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount here: {mounted.stderr.strip()}")
    try:
        with pytest.raises(PoolInUse, match="mounted at"):
            tutti.store.format(loop, LAYOUT, 48 * MiB, force=str(tmp_path / "image0"))
        with pytest.raises(PoolInUse, match="mounted or in use"):
            FileMember(loop)
    finally:
        subprocess.run(["umount", point], check=True)
