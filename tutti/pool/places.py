"""Finds places for members: folders, files and devices.

Facts about devices come from sysfs; what it does not report is None.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from glob import glob
from pathlib import Path

from tutti.base.numa import PCI_DEVICES, node_of
from tutti.base.units import format_nbytes
from tutti.errors import CapacityError, ConfigError, MemberSwapped, PoolExists, PoolNotFound
from tutti.gio_uring.drives.block_device import device_name
from tutti.gio_uring.file_creation import sync_folder
from tutti.gio_uring.named_drive import PREFIX, NamedDrive, is_drive
from tutti.medium.layout import KVLayout

SUFFIX = ".tutti"
#: Name of a pool's file in a folder, without its suffix; that of SGLang where it has one rank.
_NAME = "pool-tp0-pp0-cp0-dp0"
_NUMBERS = Path("/sys/dev")


class FolderFile(str):
    """A pool's file in a folder that the user named.  base: folder that must exist to make it."""

    base: Path


class PlaceKind(StrEnum):
    """Folders hold files of any number of pools; a file or a device is one member of one pool."""

    FOLDER = "folder"
    FILE = "file"
    DEVICE = "device"


@dataclass(frozen=True)
class Place:
    """One path that a user named.  numa_node: of its drive, None where sysfs does not report it."""

    path: str
    kind: PlaceKind
    numa_node: int | None


def place_of(path: str) -> Place:
    """What a path names.  One that does not exist is a file if it ends in ".tutti", else a folder.

    Raises ConfigError for malformed addresses of drives.
    """
    if is_drive(path):
        return Place(path, PlaceKind.DEVICE, node_of(PCI_DEVICES / NamedDrive.parse(path).bdf))
    if is_device(path):
        name = device_name(path) if os.path.exists(path) else None
        node = None if name is None else _climb(Path("/sys/class/block", name))
        return Place(path, PlaceKind.DEVICE, node)
    is_file = os.path.isfile(path) or (path.endswith(SUFFIX) and not os.path.isdir(path))
    return Place(path, PlaceKind.FILE if is_file else PlaceKind.FOLDER, _node_of_file(path))


def is_device(path: str) -> bool:
    """Whether a path names a drive or a device of the kernel, also one that does not exist now."""
    if is_drive(path):
        return True
    real = os.path.realpath(path)
    return real.startswith("/dev/") and not real.startswith("/dev/shm/")


def pool_file(layout: KVLayout, name: str = _NAME) -> str:
    """The path of a pool's file below each of its folders: another layout, another folder."""
    slug = re.sub(r"[^A-Za-z0-9._-]+", "-", layout.model or "").strip("-.") or "model"
    return os.path.join(f"{slug}-{layout.fingerprint.hex()[:16]}", f"{name}{SUFFIX}")


def in_folders(names: Sequence[str], layout: KVLayout | None, is_new: bool = False) -> list[str]:
    """The members behind these paths: a folder is replaced by the path of the pool's file in it.

    A path is a folder if one exists there, or if it ends in "/".  The pool is the only one (of this
    layout, if it is given) in the folders; where there is none, that of ``pool_file``, which may
    not exist yet.  is_new: always the latter; PoolExists where another pool of the layout is there.
    Raises PoolNotFound for neither a pool nor a layout, ConfigError for several pools,
    MemberSwapped.
    """
    folders = [name for name in names if os.path.isdir(name) or name.endswith("/")]
    if not folders:
        return list(names)
    own = None if layout is None else pool_file(layout)
    where = ("", "*/") if own is None else (f"{os.path.dirname(own)}/",)
    found = {
        file
        for folder in folders
        for start in where
        for file in glob(f"{start}*{SUFFIX}", root_dir=folder)
        if os.path.isfile(os.path.join(folder, file))
    }
    if is_new and (others := sorted(found - {own})):
        place = f"{', '.join(folders)}: {others[0]} is there, another pool of this layout"
        raise PoolExists(f"{place}; open that pool, move it, or pass files instead of folders")
    if len(found) > 1:
        files = ", ".join(sorted(found))
        raise ConfigError(f"{folders[0]} has several pools; pass the files of one: {files}")
    file = next(iter(found), own)
    if file is None:
        raise PoolNotFound(
            f"{folders[0]} has no pool; correct the path, or make one: use `tutti format`, or"
            " pass layout and capacity to tutti.open"
        )
    members = [_file_in(name, file) if name in folders else name for name in names]
    check_distinct(members)
    return members


def _file_in(folder: str, file: str) -> FolderFile:
    member = FolderFile(os.path.join(folder, file))
    member.base = Path(folder).parent if folder.endswith("/") else Path(folder)
    return member


def make_folder_of(file: str) -> None:
    """Makes the folder of a pool's file, durably and for its owner only.  Raises ConfigError."""
    folder = Path(file).parent
    try:
        missing = [one for one in (folder, *folder.parents) if not one.exists()]
        for one in reversed(missing):
            one.mkdir(mode=0o700 if one == folder else 0o777, exist_ok=True)
            sync_folder(str(one))
    except OSError as error:
        raise ConfigError(
            f"cannot make the folder {folder}: {error.strerror}; choose another path, or give "
            "this user the right to write there"
        ) from error


def existing_folder(path: str | Path) -> Path:
    """The nearest folder that exists: the path itself, or one above it; links are followed."""
    whole = Path(os.path.realpath(path))
    return next(one for one in (whole, *whole.parents) if os.path.isdir(one))


def media_of(path: str) -> set[str]:
    """Names of the drives behind a path, the same in all processes of a machine.

    A partition or a device of the device mapper counts as its drives, an NVMe namespace as its
    controller.  What sysfs does not list, such as a tmpfs, is named by its device number.
    """
    if is_drive(path):
        return {PREFIX + NamedDrive.parse(path).bdf}
    whole = Path(os.path.realpath(path))
    status = os.stat(next(one for one in (whole, *whole.parents) if one.exists()))
    is_char = stat.S_ISCHR(status.st_mode)
    number = status.st_rdev if is_char or stat.S_ISBLK(status.st_mode) else status.st_dev
    name = f"{os.major(number)}:{os.minor(number)}"
    return _drives(_NUMBERS / ("char" if is_char else "block") / name) or {name}


def _drives(folder: Path) -> set[str]:
    """Names of the drives below a device, by its folder in sysfs; empty if it has no folder."""
    try:
        device = folder.resolve(strict=True)
    except OSError:
        return set()
    device = device.parent if (device / "partition").exists() else device
    below = [name for one in device.glob("slaves/*") for name in _drives(one)]
    # A namespace and its generic device lie in one controller's folder.
    is_nvme = device.name.startswith(("nvme", "ng"))
    return set(below) or {device.parent.name if is_nvme else device.name}


def exists(path: str) -> bool:
    """Whether a file, a device or a drive is there."""
    if is_drive(path):
        return (PCI_DEVICES / NamedDrive.parse(path).bdf).exists()
    try:
        os.stat(path)
    except PermissionError:
        return True  # opening it raises the reason
    except (OSError, ValueError):
        return False
    return True


def check_distinct(names: Sequence[str]) -> None:
    """Raises MemberSwapped for two names of one member, or a drive and a partition of it."""
    seen: dict[tuple[object, ...], str] = {}
    for name in names:
        identity = _identity(name)
        if identity in seen:
            raise MemberSwapped(
                f"a path is given twice: {name} is {seen[identity]}; pass each member once"
            )
        seen[identity] = name
    for identity, name in seen.items():
        whole = ("block", *identity[2:])
        if identity[0] == "block" and len(identity) == 3 and whole in seen:
            raise MemberSwapped(
                f"{name} is a partition of {seen[whole]}; pass either the drive or its partitions"
            )


def check_free(names: Sequence[str], member_nbytes: int, asked_nbytes: int) -> None:
    """Raises CapacityError where new files do not fit.  asked_nbytes: of each, for the message."""
    wanted: dict[int, list[str]] = {}
    for name in names:
        if not os.path.exists(name):
            place = os.path.realpath(name) if os.path.islink(name) else name
            wanted.setdefault(os.stat(existing_folder(place)).st_dev, []).append(place)
    for files in wanted.values():
        room = os.statvfs(existing_folder(files[0]))
        free = room.f_bavail * room.f_frsize
        if room.f_blocks and len(files) * member_nbytes > free:
            raise CapacityError(
                f"no room for {format_nbytes(len(files) * asked_nbytes)} in {', '.join(files)}:"
                f" {format_nbytes(free)} are free; free space or choose a smaller capacity"
            )


def _identity(name: str) -> tuple[object, ...]:
    """Equal for two names of one member; that of a partition ends with the name of its drive."""
    if is_drive(name):
        address = NamedDrive.parse(name)
        return ("drive", address.bdf, address.nsid)
    block = device_name(name)
    if block is not None:
        folder = Path("/sys/class/block", block)
        is_partition = (folder / "partition").exists()
        return ("block", block, folder.resolve().parent.name) if is_partition else ("block", block)
    try:
        status = os.stat(name)
    except OSError:
        return ("path", os.path.realpath(name))
    return ("file", status.st_dev, status.st_ino)


def _node_of_file(path: str) -> int | None:
    there = Path(os.path.realpath(path))
    for place in (there, *there.parents):
        try:
            device = os.stat(place).st_dev
        except OSError:
            continue
        return _climb(Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}"))
    return None


def _climb(folder: Path) -> int | None:
    """The NUMA node of a block device: that of the nearest device above it that has one."""
    try:
        real = folder.resolve(strict=True)
    except OSError:
        return None
    found = (node_of(place) for place in (real, *real.parents) if (place / "numa_node").exists())
    return next(found, None)


def shared_node(paths: Iterable[str]) -> int | None:
    """The NUMA node of all drives behind these paths; None where they have none in common."""
    nodes = {place_of(path).numa_node for path in paths}
    return nodes.pop() if len(nodes) == 1 else None
