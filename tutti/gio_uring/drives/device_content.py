"""Detects data on a block device by its first and last bytes, to warn before overwriting it.

Has a table of well-known magic numbers, with their sources. Bytes that match none of them but are
not zeros are reported too: data of an unknown kind is still data.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Iterable, Sequence, Set
from typing import Any, NamedTuple

from tutti.base.units import KiB, MiB
from tutti.errors import ConfigError, PoolExists

#: Bytes that are read at each end.
HEAD_NBYTES = MiB
TAIL_NBYTES = MiB

#: Reads (offset, nbytes) of the device.
Read = Callable[[int, int], bytes]

#: Permission to overwrite: True for files, serial numbers for drives.
Force = bool | str | Collection[str]


#: First block of a device that `tutti format --for-server` reserved for a server's pools. If only
#: zeros follow, the device counts as blank.
LABEL = b"TUTTIDEV 1\nThis device is for the pools of Tutti.\n".ljust(4096, b"\0")


class Magic(NamedTuple):
    """Bytes at an offset that identify the content of a device."""

    what: str
    offset: int
    magic: bytes


# Offsets and values as the projects document them: the Linux headers of each file system
# (fs/*/super.h, include/uapi/linux/magic.h), UEFI specification 5.3.2 for GPT, LVM2's
# lib/format_text/layout.h, the kernel's include/uapi/linux/raid/md_p.h, cryptsetup's LUKS
# specification, drivers/md/bcache, OpenZFS's uberblock, SNIA DDF.
_HEAD = (
    Magic("a partition table (GPT)", 512, b"EFI PART"),
    Magic("a partition table (GPT)", 4096, b"EFI PART"),
    Magic("a partition table or boot sector", 510, b"\x55\xaa"),
    Magic("an ext2, ext3 or ext4 file system", 0x438, b"\x53\xef"),
    Magic("an XFS file system", 0, b"XFSB"),
    Magic("a Btrfs file system", 0x10040, b"_BHRfS_M"),
    Magic("an F2FS file system", 0x400, b"\x10\x20\xf5\xf2"),
    Magic("an NTFS file system", 3, b"NTFS    "),
    Magic("an exFAT file system", 3, b"EXFAT   "),
    Magic("an EROFS file system", 0x400, b"\xe2\xe1\xf5\xe0"),
    Magic("a SquashFS file system", 0, b"hsqs"),
    Magic("an APFS container", 32, b"NXSB"),
    Magic("an HFS+ file system", 0x400, b"H+"),
    Magic("a JFS file system", 0x8000, b"JFS1"),
    Magic("an ISO 9660 file system", 0x8001, b"CD001"),
    Magic("a GFS2 file system", 0x10000, b"\x01\x16\x19\x70"),
    Magic("a ReiserFS file system", 0x10034, b"ReIsEr"),
    *(Magic("an LVM physical volume", 512 * sector, b"LABELONE") for sector in range(4)),
    Magic("an encrypted volume (LUKS)", 0, b"LUKS\xba\xbe"),
    Magic("a member of a RAID (md 1.1)", 0, b"\xfc\x4e\x2b\xa9"),
    Magic("a member of a RAID (md 1.2)", 4096, b"\xfc\x4e\x2b\xa9"),
    Magic("a bcache device", 4096 + 24, bytes.fromhex("c68573f64e1a45ca8265f57f48ba6d81")),
    Magic("a bcachefs file system", 4096 + 24, bytes.fromhex("c68573f666ce90a9d96a60cf803df7ef")),
    *(Magic("swap space", page - 10, b"SWAPSPACE2") for page in (4096, 8192, 16384, 65536)),
    Magic("a Ceph BlueStore", 0, b"bluestore block device"),
    *(Magic("a ZFS pool", 128 * KiB + KiB * i, struct.pack("<Q", 0x00BAB10C)) for i in range(128)),
)


class Held(NamedTuple):
    """Content of a path; `serial` is the serial number of its drive, "" if it has none."""

    path: str
    holds: Sequence[str]
    serial: str


def check_force(name: str, force: Any) -> None:
    """Raises ConfigError for a `force` that is neither a bool nor serial numbers."""
    several = [force] if isinstance(force, bool | str) else force
    if not isinstance(several, Sequence | Set) or isinstance(several, bytes):
        raise ConfigError(f"{name} is {force!r}; pass True, or serial numbers of drives")
    if not all(isinstance(one, bool | str) for one in several):
        raise ConfigError(f"{name} is {force!r}; serial numbers of drives are strings")


def check_forced(places: Iterable[Held], force: Force) -> None:
    """Raises PoolExists that lists all places with content whose drive is not in `force`."""
    named = {force} if isinstance(force, str) else set() if isinstance(force, bool) else set(force)
    lost = [p for p in places if p.holds and (not p.serial or p.serial not in named)]
    if not lost:
        return
    what = "; ".join(f"{p.path} holds {', '.join(p.holds)}" for p in lost)
    if nameless := [p.path for p in lost if not p.serial]:
        raise PoolExists(
            f"{what}; no serial number for --force on {' and '.join(nameless)}: erase it by hand"
        )
    serials = dict.fromkeys(repr(p.serial) for p in lost)
    raise PoolExists(
        f"{what}, which would be lost; to overwrite it, force with its serial number,"
        f" {' and '.join(serials)} (one --force for each drive)"
    )


def contents(read: Read, nbytes: int) -> list[str]:
    """Descriptions of a device's content; empty when both of its ends are zeros.

    LABEL at the start counts as zeros; bytes that cannot be read count as content.
    """
    head_nbytes = min(HEAD_NBYTES, nbytes)
    head = read(0, head_nbytes)
    if head.startswith(LABEL):
        head = bytes(len(LABEL)) + head[len(LABEL) :]
    start = max(0, nbytes - TAIL_NBYTES)
    tail = read(start, nbytes - start)
    if len(head) != head_nbytes or len(tail) != nbytes - start:
        return ["unknown, it cannot be read"]
    found = [m.what for m in _HEAD if head[m.offset :].startswith(m.magic)]
    for magic in _tail(nbytes):
        if magic.offset >= start and tail[magic.offset - start :].startswith(magic.magic):
            found.append(magic.what)
    if not found and (head.strip(b"\0") or tail.strip(b"\0")):
        found = ["data of an unknown kind"]
    return list(dict.fromkeys(found))


def _tail(nbytes: int) -> list[Magic]:
    """Magic numbers at offsets that depend on the size (md_p.h; UEFI 5.3.2; SNIA DDF 4.2)."""
    sectors = nbytes // 512
    md = b"\xfc\x4e\x2b\xa9"
    return [
        Magic("a partition table (GPT backup)", nbytes - 512, b"EFI PART"),
        Magic("a partition table (GPT backup)", nbytes - 4096, b"EFI PART"),
        Magic("a member of a RAID (md 1.0)", ((sectors - 16) & ~7) * 512, md),
        Magic("a member of a RAID (md 0.90)", (nbytes & ~(64 * KiB - 1)) - 64 * KiB, md),
        Magic("a member of a RAID (Intel)", nbytes - 1024, b"Intel Raid ISM Cfg Sig."),
        Magic("a member of a RAID (DDF)", nbytes - 512, b"\xde\x11\xde\x11"),
    ]
