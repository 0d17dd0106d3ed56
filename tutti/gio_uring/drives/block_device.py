"""Checks whether block devices may be overwritten by a pool, and gives the reason if not.

A device that is in use is always refused. One with content is refused unless its serial number is
given. The facts come from sysfs, /proc/self/mountinfo, /proc/swaps (proc(5)) and from the first and
last bytes of the device, see `device_content`.
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

from tutti.errors import ConfigError, MediumError, PoolInUse, PoolNotFound
from tutti.gio_uring.drives.device_content import Force, Held, check_forced, contents
from tutti.gio_uring.drives.generic_device import block_name, is_generic
from tutti.gio_uring.drives.mounts import read_mounts, text_of

_SECTOR_NBYTES = 512  # unit of sizes in sysfs, whatever the block size
# The machine does not boot without these; drives that they are on are always refused.
_SYSTEM_MOUNTS = ("/", "/boot", "/boot/efi", "/efi", "/usr", "/var", "/home")
_HIDDEN_PATH = re.compile(r"nvme\d+c\d+n\d+")  # one path of a namespace with several (multipath)


@dataclass(frozen=True)
class BlockDevice:
    """A drive, namespace or partition.

    in_use: reasons why it must not be touched. holds: content that would be lost. Both empty: free.
    generic: its NVMe generic device, "" if none. serial: serial number to pass as `force`, "" if it
    has none; of a loop device the path of its file.
    """

    name: str
    path: str
    generic: str
    nbytes: int
    lba_nbytes: int
    model: str
    serial: str
    is_partition: bool
    in_use: tuple[str, ...]
    holds: tuple[str, ...]

    @property
    def is_free(self) -> bool:
        """Whether it is unused and blank."""
        return not self.in_use and not self.holds


class Devices:
    """The block devices of a machine; `root`: the folder of /sys, /proc and /dev."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._class = root / "sys/class/block"
        self._mounts = self._read_mounts()
        self._swaps = {
            self._by_path(line.split()[0])
            for line in text_of(root / "proc/swaps").splitlines()[1:]
            if line.startswith("/dev/")
        }

    def names(self) -> list[str]:
        """Names of all block devices that have a size; partitions follow their drives."""
        if not self._class.is_dir():
            return []
        folders = [f for f in self._class.iterdir() if not _HIDDEN_PATH.fullmatch(f.name)]
        return sorted((f.name for f in folders if int(text_of(f / "size") or 0)), key=_natural)

    def inspect(self, name: str) -> BlockDevice:
        """Inspects a device; reads both of its ends. Raises PoolNotFound and MediumError."""
        folder = self._class / name
        if not folder.is_dir():
            raise PoolNotFound(
                f"the block device {name} does not exist; see `tutti nvme list --all`"
            )
        nbytes = int(text_of(folder / "size") or 0) * _SECTOR_NBYTES
        drive = self._drive(name)
        generic = name.replace("nvme", "ng", 1)
        has_generic = generic != name and (self._root / "dev" / generic).exists()
        in_use = self._uses(name)
        return BlockDevice(
            name=name,
            path=f"/dev/{name}",
            generic=f"/dev/{generic}" if has_generic else "",
            nbytes=nbytes,
            lba_nbytes=int(text_of(self._class / drive / "queue/logical_block_size") or 0),
            model=text_of(self._class / drive / "device/model"),
            serial=self._serial(drive),
            is_partition=drive != name,
            in_use=tuple(in_use),
            holds=() if in_use else tuple(self._contents(name, nbytes)),
        )

    def _contents(self, name: str, nbytes: int) -> list[str]:
        path = self._root / "dev" / name
        partitions = self._partitions(name)
        found = [f"partitions: {', '.join(partitions)}"] if partitions else []
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            return [*found, f"unknown, it cannot be read: {error.strerror}"]
        try:
            # The page cache may be stale: writes may have bypassed the block layer.
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            return [*found, *contents(lambda offset, size: os.pread(fd, size, offset), nbytes)]
        except OSError as error:
            raise MediumError(f"cannot read {path}: {error.strerror}; check the drive") from error
        finally:
            os.close(fd)

    def _uses(self, name: str) -> list[str]:
        """Reasons why a device, its partitions or the drive that it is part of are in use."""
        reasons = []
        drive = self._drive(name)
        for part in (name, *self._partitions(name)):
            where = "" if part == name else f"{part} "
            reasons += [f"{where}mounted at {point}" for point in self._mounts.get(part, ())]
            if part in self._swaps:
                reasons.append(f"{where}swap space")
            holders = self._class / part / "holders"
            if holders.is_dir() and (names := sorted(h.name for h in holders.iterdir())):
                reasons.append(f"{where}part of {', '.join(names)}")
        points = [p for part in (drive, *self._partitions(drive)) for p in self._mounts_above(part)]
        if system := [p for p in _SYSTEM_MOUNTS if p in points]:
            reasons.append(f"the system is on its drive ({', '.join(system)})")
        if text_of(self._class / drive / "ro") == "1" or text_of(self._class / name / "ro") == "1":
            reasons.append("read-only")
        if int(text_of(self._class / name / "size") or 0) == 0:
            reasons.append("cannot be used: it has no size; its blocks may be too large")
        return reasons

    def _mounts_above(self, name: str) -> list[str]:
        """Mount points of a device and of everything that is built on it."""
        points: list[str] = []
        left, seen = [name], set[str]()
        while left:  # bounded: every name is visited once
            current = left.pop()
            if current in seen:
                continue
            seen.add(current)
            points += self._mounts.get(current, ())
            holders = self._class / current / "holders"
            left += [h.name for h in holders.iterdir()] if holders.is_dir() else []
        return points

    def _read_mounts(self) -> dict[str, list[str]]:
        """Mount points by device name, found by the device's number, else by the source."""
        found: dict[str, list[str]] = {}
        for mount in read_mounts(self._root):
            entry = self._root / "sys/dev/block" / mount.number
            name = entry.resolve().name if entry.exists() else ""
            if not name and mount.source.startswith("/dev/"):  # Btrfs has numbers of its own
                name = self._by_path(mount.source)
            if name:
                found.setdefault(name, []).append(mount.point)
        return found

    def _by_path(self, path: str) -> str:
        """The kernel's name of a path below /dev; follows links."""
        return Path(os.path.realpath(self._root / path.lstrip("/"))).name

    def _drive(self, name: str) -> str:
        """The drive that a partition is part of; a drive itself."""
        folder = self._class / name
        return folder.resolve().parent.name if (folder / "partition").exists() else name

    def _partitions(self, name: str) -> list[str]:
        folder = (self._class / name).resolve()
        if not folder.is_dir():
            return []
        return sorted((f.parent.name for f in folder.glob("*/partition")), key=_natural)

    def _serial(self, drive: str) -> str:
        for place in ("device/serial", "serial", "device/wwid", "wwid", "loop/backing_file"):
            if text := text_of(self._class / drive / place):
                return text
        return ""


def check_devices(
    paths: list[str], force: Force = False, root: Path = Path("/")
) -> list[BlockDevice]:
    """Refuses devices that must not be overwritten; ignores paths of ordinary files.

    force: serial numbers of drives whose content may be lost; True is not sufficient.
    Raises PoolInUse for devices in use, whatever `force` is, PoolExists for devices with content,
    PoolNotFound for a path below /dev that does not exist.
    """
    names = {path: name for path in paths if (name := device_name(path)) is not None}
    found = {path: Devices(root).inspect(name) for path, name in names.items()}
    for path, device in found.items():
        if device.in_use:
            raise PoolInUse(f"{path} is not touched: {'; '.join(device.in_use)}; choose another")
    check_forced((Held(path, d.holds, d.serial) for path, d in found.items()), force)
    return list(found.values())


def device_name(path: str) -> str | None:
    """The kernel's name of the block device at a path; None for ordinary files.

    Raises PoolNotFound for a missing path below /dev, where a new file would be lost at the next
    boot, and ConfigError for character devices other than NVMe generic ones.
    """
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        real = os.path.realpath(path)
        if real.startswith("/dev/") and not real.startswith("/dev/shm/"):
            raise PoolNotFound(
                f"the device {path} does not exist; `tutti nvme list --all` lists the devices"
            ) from error
        return None
    if stat.S_ISBLK(mode):
        return Path(os.path.realpath(path)).name
    if is_generic(path):
        return block_name(path)
    if stat.S_ISCHR(mode):
        raise ConfigError(f"{path} is a character device, but not /dev/ngXnY; name a namespace")
    return None


def _natural(name: str) -> list[tuple[bool, int, str]]:
    return [(t.isdigit(), int(t) if t.isdigit() else 0, t) for t in re.findall(r"\d+|\D+", name)]
