"""Members of every kind: folders, files, devices of the kernel (loop devices here) and labels."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from crash.objects import load_present, put_objects
from loop_devices import Loop, loop_devices
from memory_controller import MemoryController

import tutti
from store.pools import LAYOUT
from tutti import cli
from tutti.base.units import MiB
from tutti.errors import (
    ConfigError,
    MediumError,
    MemberMissing,
    MemberSwapped,
    PoolExists,
    PoolInUse,
    PoolMismatch,
    PoolNotFound,
    TuttiError,
)
from tutti.gio_uring import named_drive, shared_file
from tutti.gio_uring.drives.block_device import Devices
from tutti.gio_uring.file_member import FileMember
from tutti.pool import member_controller, places, pool_format
from tutti.pool.block_io import opened_io
from tutti.pool.places import PlaceKind, check_distinct, place_of
from tutti.pool.pool_format import erase, label
from tutti.profiles import at_open

CAPACITY = 24 * MiB
KEYS = [bytes([i]) * 16 for i in range(8)]


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[Loop]:
    with loop_devices(tmp_path) as make:
        yield make


def test_what_paths_name(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder.tutti").mkdir()
    kinds = {
        tmp_path: PlaceKind.FOLDER,
        tmp_path / "new": PlaceKind.FOLDER,
        tmp_path / "new.tutti": PlaceKind.FILE,
        tmp_path / "file": PlaceKind.FILE,
        tmp_path / "folder.tutti": PlaceKind.FOLDER,
        Path("/dev/nvme77n1"): PlaceKind.DEVICE,
        Path("/dev/shm/pools"): PlaceKind.FOLDER,
    }
    assert {path: place_of(str(path)).kind for path in kinds} == kinds
    assert place_of("nvme:0000:03:00.0").kind is PlaceKind.DEVICE
    with pytest.raises(ConfigError, match="not a drive's address"):
        place_of("nvme:nonsense")


def test_numa_nodes_come_from_the_nearest_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for bdf, node in (("0000:03:00.0", "1\n"), ("0000:04:00.0", "-1\n")):
        (tmp_path / bdf).mkdir()
        (tmp_path / bdf / "numa_node").write_text(node)
    monkeypatch.setattr(places, "PCI_DEVICES", tmp_path)
    assert place_of("nvme:0000:03:00.0").numa_node == 1
    assert place_of("nvme:0000:04:00.0").numa_node is None
    assert place_of("nvme:0000:05:00.0").numa_node is None
    drives = [f"nvme:0000:0{n}:00.0" for n in (3, 4)]
    assert places.shared_node(drives[:1] * 2) == 1
    assert places.shared_node(drives) is None
    namespace = tmp_path / "0000:03:00.0/nvme/nvme0/nvme0n1"
    namespace.mkdir(parents=True)
    (tmp_path / "link").symlink_to(namespace)
    assert places._climb(tmp_path / "link") == 1


class Sysfs:
    """Devices by their numbers, as links to their folders."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._root = root
        monkeypatch.setattr(places, "_NUMBERS", root / "dev")

    def add(self, number: int, device: str, kind: str = "block", below: str = "") -> None:
        folder = self._root / "devices" / device
        (folder / "slaves").mkdir(parents=True, exist_ok=True)
        if device.rpartition("/")[2] in {"sda1", "sda2", "nvme0n1p1"}:
            (folder / "partition").touch()
        if below:
            (folder / "slaves" / Path(below).name).symlink_to(self._root / "devices" / below)
        link = self._root / "dev" / kind / f"{os.major(number)}:{os.minor(number)}"
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(folder)


@pytest.fixture
def sysfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sysfs:
    return Sysfs(tmp_path / "sys", monkeypatch)


def test_media_are_the_drives_behind_files_and_devices(sysfs: Sysfs, tmp_path: Path) -> None:
    here, null = tmp_path.stat().st_dev, os.stat("/dev/null").st_rdev
    number = f"{os.major(here)}:{os.minor(here)}"
    file = str(tmp_path / "not" / "yet.tutti")
    assert places.media_of(file) == {number}, "a file system that sysfs does not know"
    for device, name in {
        "pci/sda": "sda",
        "pci/sda/sda1": "sda",
        "pci/sda/sda2": "sda",
        "pci/0000:03:00.0/nvme/nvme0/nvme0n1/nvme0n1p1": "nvme0",
        "pci/0000:03:00.0/nvme/nvme0/nvme0n2": "nvme0",
        "virtual/nvme-subsystem/nvme-subsys1/nvme1n1": "nvme-subsys1",
    }.items():
        sysfs.add(here, device)
        assert places.media_of(file) == {name}
    sysfs.add(here, "virtual/dm-0", below="pci/sda/sda1")
    sysfs.add(here, "virtual/dm-0", below="pci/0000:03:00.0/nvme/nvme0/nvme0n1/nvme0n1p1")
    assert places.media_of(file) == {"sda", "nvme0"}, "a volume on two drives"
    sysfs.add(null, "pci/0000:03:00.0/nvme/nvme0/ng0n1", kind="char")
    assert places.media_of("/dev/null") == {"nvme0"}, "as the block device of its namespace"
    assert places.media_of("nvme:0000:04:00.0/ns2") == {"nvme:0000:04:00.0"}
    assert at_open.media_of([file, "nvme:0000:04:00.0"]) == (
        [],
        ("nvme0", "nvme:0000:04:00.0", "sda"),
    ), "media are known where nothing can be measured"


def test_pools_on_partitions_of_one_drive_share_a_queue(
    sysfs: Sysfs, loop: Loop, tmp_path: Path
) -> None:
    """A file and a device, each opened on its own."""
    device, file = loop(), str(tmp_path / "pool.tutti")
    for path in (device, file):
        tutti.format(path, LAYOUT, CAPACITY)
    with tutti.open(device) as one, tutti.open(file) as other:
        assert one.scheduler is not other.scheduler
    sysfs.add(tmp_path.stat().st_dev, "pci/sda/sda1")
    sysfs.add(os.stat(device).st_rdev, "pci/sda/sda2")
    with tutti.open(device) as one, tutti.open(file) as other:
        assert one.scheduler is other.scheduler is not None
        put_objects(one, KEYS)
        one._queue.stop(10.0)
        other.scheduler.run_due()  # takes what was posted
        assert other.stats()["scheduler"]["written_pages"] == len(KEYS)


def test_two_names_of_one_place(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    os.link(tmp_path / "a", tmp_path / "hard")
    os.symlink(tmp_path / "a", tmp_path / "soft")
    for other in ("a", "hard", "soft", "../" + tmp_path.name + "/a"):
        with pytest.raises(MemberSwapped, match="given twice"):
            tutti.open([str(tmp_path / "a"), str(tmp_path / other)], LAYOUT, CAPACITY)
    with pytest.raises(MemberSwapped, match="given twice"):
        check_distinct(["nvme:0000:03:00.0", "nvme:0000:03:00.0"])
    assert (tmp_path / "a").stat().st_size == 0


def test_nothing_is_written_before_all_places_are_free(loop: Loop, tmp_path: Path) -> None:
    device, file, taken = loop(), tmp_path / "file", tmp_path / "taken"
    for path in (file, taken):
        path.write_bytes(b"old")
    with open(device, "r+b", buffering=0) as disk:
        disk.write(b"mine".ljust(4096, b"."))
    claim = os.open(device, os.O_RDWR | os.O_EXCL)
    serial = Devices().inspect(Path(device).name).serial
    try:
        with pytest.raises(PoolInUse):
            tutti.format(device, LAYOUT, CAPACITY, force=serial, prewrite=True)
    finally:
        os.close(claim)
    with open(device, "rb") as disk:
        assert disk.read(4) == b"mine"
    with open(taken, "rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(PoolInUse):
            tutti.format([file, tmp_path / "new", taken], LAYOUT, CAPACITY, force=True)
    assert (file.read_bytes(), (tmp_path / "new").exists()) == (b"old", False)


@pytest.mark.parametrize(
    ("code", "error"), [(errno.EIO, MediumError), (errno.ENOLCK, MediumError), (errno.EINVAL, None)]
)
def test_locks_of_clients_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, error: type[MediumError] | None
) -> None:
    path, control = str(tmp_path / "pool"), fcntl.fcntl
    tutti.format(path, LAYOUT, CAPACITY)

    def refuse(fd: int, command: int, *arguments: Any) -> Any:
        if command == fcntl.F_OFD_GETLK:
            raise OSError(code, os.strerror(code))
        return control(fd, command, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "fcntl", refuse)
        assert shared_file.is_open_elsewhere([0], shared_file.lock_place(1))
        with contextlib.nullcontext() if error is None else pytest.raises(error, match="lock"):
            tutti.open(path).close()
    tutti.open(path).close()


def test_two_names_of_one_device(loop: Loop, tmp_path: Path) -> None:
    device = loop()
    (tmp_path / "by-id").symlink_to(device)
    with pytest.raises(MemberSwapped, match="given twice"):
        tutti.format([device, str(tmp_path / "by-id")], LAYOUT, CAPACITY)
    label(device)  # nothing was written


#: Places where other software finds its devices again, see device_content.py.
SIGNATURES = (16 * 1024, 64 * 1024 + 0x40, 128 * 1024, MiB - 4096, -MiB, -64 * 1024, -8192, -512)


def test_a_formatted_device_has_no_signature_of_its_old_owner(loop: Loop) -> None:
    device = loop()
    serial = Devices().inspect(Path(device).name).serial
    with open(device, "r+b") as disk:
        for at in SIGNATURES:
            disk.seek(at, os.SEEK_SET if at >= 0 else os.SEEK_END)
            disk.write(b"_BHRfS_M")
    with pytest.raises(PoolExists, match="Btrfs"):
        tutti.format(device, LAYOUT, CAPACITY)
    tutti.format(device, LAYOUT, CAPACITY, force=serial)
    content = Path(device).read_bytes()
    assert content[8192:MiB] == bytes(MiB - 8192)
    assert content[-MiB:] == bytes(MiB)
    tutti.open(device).close()


def test_a_formatted_drive_has_no_signature_of_its_old_owner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Memory stands in for the drive."""
    controller = MemoryController([32 * MiB])
    medium = controller.medium(1)
    medium[:] = 7
    monkeypatch.setattr(pool_format, "open_controller", lambda names: controller)
    monkeypatch.setattr(member_controller, "serial_of", lambda controller, nsid: "S1")
    monkeypatch.setattr(controller, "close", lambda: None)  # what it holds is looked at below
    tutti.format("nvme:0000:03:00.0", LAYOUT, CAPACITY, force="S1")
    assert not medium[8192:MiB].any()
    assert not medium[-MiB:].any()
    assert medium[0] != 7
    monkeypatch.undo()
    controller.close()


def test_a_labelled_device_is_made_a_pool_and_no_other(loop: Loop) -> None:
    devices = [loop(), loop(block_nbytes=4096)]
    with pytest.raises(TuttiError, match="format"):
        tutti.open(devices, LAYOUT, CAPACITY)
    assert cli.main(["format", *devices, "--for-server"]) == 0
    assert cli.main(["format", *devices, "--for-server"]) == 0, "a label does not count as content"
    assert cli.main(["info", devices[0]]) == 3
    with pytest.raises(PoolNotFound, match="labelled"):
        tutti.open(devices)
    with tutti.open(devices, LAYOUT, CAPACITY) as store:
        put_objects(store, KEYS)
        with pytest.raises(PoolInUse):
            label(devices, force=[Devices().inspect(Path(d).name).serial for d in devices])
    with tutti.open(devices, LAYOUT, CAPACITY) as store:
        assert load_present(store, KEYS) == (set(KEYS), set())
    with pytest.raises(PoolExists):
        label(devices)
    other = tutti.KVLayout.mha(2, 1, 64, 32, "bfloat16")
    with pytest.raises(PoolMismatch):
        tutti.open(devices, other, CAPACITY)


@pytest.mark.parametrize("kind", ["file", "device"])
def test_info_leaves_what_is_in_the_page_cache(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """A running pool keeps objects there."""
    path = str(tmp_path / "pool") if kind == "file" else request.getfixturevalue("loop")()
    tutti.format(path, LAYOUT, CAPACITY)
    with contextlib.closing(FileMember(path)) as member:
        os.fsync(member.fd)
        Path(path).read_bytes()
        cached = member.resident_nbytes(0, member.nbytes)
        assert cached >= member.nbytes // 2
        assert cli.main(["info", path]) == 0
        left = member.resident_nbytes(0, member.nbytes)
        assert left >= cached * 3 // 4, "the kernel itself may reclaim a few of its pages"


def test_a_loop_device_is_forced_by_the_path_of_its_file(
    loop: Loop, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    device, image = loop(), tmp_path / "image0"
    with open(device, "r+b") as disk:
        disk.write(b"mine")
    words = ["format", device, "--capacity", "24MiB", "--model", "tiny", "--force"]
    assert cli.main([*words, str(tmp_path)]) == 2
    assert "is a path, not a serial number" in capsys.readouterr().err
    assert cli.main(words) == 3
    assert f"its serial number, '{image}'" in capsys.readouterr().err
    assert cli.main([*words, str(image)]) == 0
    assert cli.main(["info", device]) == 0


def test_a_device_is_erased_to_its_last_byte(loop: Loop, tmp_path: Path) -> None:
    """Its size is not a multiple of 4096, and a backup of its partition table is at the end."""
    device, nbytes = loop(32 * MiB + 512), 32 * MiB + 512
    with open(device, "r+b") as disk:
        disk.seek(nbytes - 512)
        disk.write(b"EFI PART")
    assert cli.main(["format", device, "--for-server"]) == 3
    words = ["format", device, "--for-server", "--force", str(tmp_path / "image0")]
    assert cli.main(words) == 0
    assert Path(device).read_bytes()[-MiB:] == bytes(MiB)
    assert not Devices().inspect(Path(device).name).holds


def test_a_namespace_is_erased_to_its_last_block() -> None:
    controller = MemoryController([4 * MiB + 512], lba_nbytes=512)
    controller.medium(1)[:] = 1
    with opened_io(controller) as (_, io):
        erase(controller, io, 1)
    medium = controller.medium(1)
    assert not medium[:MiB].any() and not medium[-MiB:].any()
    controller.close()


def test_vfio_drives_of_different_block_sizes_are_refused_unwritten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = {"0000:03:00.0": 512, "0000:04:00.0": 4096}
    made = {bdf: MemoryController([MiB], lba_nbytes=nbytes) for bdf, nbytes in sizes.items()}
    monkeypatch.setattr(named_drive, "VfioController", made.__getitem__)
    monkeypatch.setattr(named_drive, "_check_is_nvme", lambda bdf: None)
    media = [drive.medium(1) for drive in made.values()]
    for medium in media:
        medium[:] = 7
    with monkeypatch.context() as patch:
        for drive in made.values():
            patch.setattr(drive, "close", lambda: None)  # its medium is looked at below
        with pytest.raises(ConfigError, match="the same block size"):
            tutti.open([f"nvme:{bdf}" for bdf in sizes], LAYOUT, CAPACITY)
    assert all((medium == 7).all() for medium in media)
    for drive in made.values():
        drive.close()


def test_half_of_the_members_are_labelled(loop: Loop) -> None:
    devices = [loop(), loop(), loop()]
    label(devices[:2])
    with pytest.raises(MemberMissing, match="label all devices"):
        tutti.open(devices, LAYOUT, CAPACITY)
    tutti.open(devices[:1], LAYOUT, CAPACITY).close()
    with pytest.raises(MemberMissing, match="label all devices"):
        tutti.open(devices[:2], LAYOUT, CAPACITY)


def test_labels_are_for_devices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["format", str(tmp_path / "pool"), "--for-server"]) == 2
    assert "not a device" in capsys.readouterr().err
    for words in (["--capacity", "1GiB"], ["--layers", "2"], ["--any-model"]):
        assert cli.main(["format", "/dev/x", "--for-server", *words]) == 2
    assert "chooses layout and capacity" in capsys.readouterr().err
    assert cli.main(["format", str(tmp_path / "pool"), "--model", "llama-3.1-8b"]) == 2
    assert "--capacity" in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


def test_a_device_that_is_mounted(loop: Loop, tmp_path: Path) -> None:
    device = loop()
    subprocess.run(["mkfs.ext4", "-q", device], check=True, timeout=60)
    (tmp_path / "mount").mkdir()
    done = subprocess.run(
        ["mount", "-oro,noload", device, str(tmp_path / "mount")], capture_output=True
    )
    if done.returncode:
        pytest.skip("nothing can be mounted here")
    try:
        before = Path(device).read_bytes()
        for refused in (
            lambda: label(device),
            lambda: tutti.format([device, loop()], LAYOUT, CAPACITY),
            lambda: tutti.open(device, LAYOUT, CAPACITY),
        ):
            with pytest.raises(PoolInUse, match="mounted"):
                refused()
        assert Path(device).read_bytes() == before
    finally:
        # Lazily, because a ring releases its files some time after it was closed.
        subprocess.run(["umount", "-l", device], check=True, timeout=30)
