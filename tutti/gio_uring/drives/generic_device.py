"""NVMe generic character devices, /dev/ngXnY: namespaces that accept NVMe commands from programs.

They are identified by ioctl (linux/nvme_ioctl.h). Their block device, /dev/nvmeXnY, is opened
exclusively as well, so that it cannot be mounted meanwhile.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

from tutti.base.units import KiB
from tutti.errors import DeviceGone, MediumError, PoolInUse, Unsupported
from tutti.gio_uring.drives.identify import IDENTIFY_NBYTES, NamespaceIdentity
from tutti.native import members

_NAME = re.compile(r"ng(\d+n\d+)")
_COMMAND_NBYTES = 72  # struct nvme_passthru_cmd
_IOCTL_ID = ord("N") << 8 | 0x40
_IOCTL_ADMIN = 3 << 30 | _COMMAND_NBYTES << 16 | ord("N") << 8 | 0x41
_IDENTIFY, _CNS_NAMESPACE = 0x06, 0x00
_TIMEOUT_MS = 10_000
#: A command from 4 KiB pages has one segment per page, and the kernel's driver accepts at most 128
#: (NVME_MAX_SEGS in its pci.c). It does not split passthrough commands.
REQUEST_NBYTES_MAX = 512 * KiB


class _Command(ctypes.LittleEndianStructure):
    """`struct nvme_passthru_cmd`."""

    _fields_ = (
        *members(ctypes.c_uint8, "opcode flags"),
        ("reserved", ctypes.c_uint16),
        ("nsid", ctypes.c_uint32),
        ("cdw2", ctypes.c_uint32 * 2),
        *members(ctypes.c_uint64, "metadata address"),
        *members(ctypes.c_uint32, "metadata_nbytes data_nbytes"),
        ("cdw10", ctypes.c_uint32 * 6),
        *members(ctypes.c_uint32, "timeout_ms result"),
    )


@dataclass(frozen=True)
class GenericNamespace:
    """Size nlb in blocks of lba_nbytes; a command moves at most request_nbytes_max bytes."""

    nsid: int
    nlb: int
    lba_nbytes: int
    request_nbytes_max: int


def is_generic(path: str | os.PathLike[str]) -> bool:
    """Whether the path is a character device with the name of an NVMe generic device."""
    try:
        is_character = stat.S_ISCHR(os.stat(path).st_mode)
    except OSError:
        return False
    return is_character and _NAME.fullmatch(_kernel_name(path)) is not None


def block_name(path: str | os.PathLike[str]) -> str:
    """The kernel's name of a generic device's block device: nvme0n1 of /dev/ng0n1."""
    return _kernel_name(path).replace("ng", "nvme", 1)


def readable_path(path: str) -> str:
    """The path to read bytes from: the block device of a generic device, else the path itself."""
    return str(_block_path(path)) if is_generic(path) else path


def _block_path(path: str) -> Path:
    return Path(os.path.realpath(path)).with_name(block_name(path))


def _kernel_name(path: str | os.PathLike[str]) -> str:
    return Path(os.path.realpath(path)).name


def identify(fd: int, path: str, root: Path = Path("/")) -> GenericNamespace:
    """Identifies an open generic device.

    Raises Unsupported for a namespace that cannot be used, such as one with metadata; DeviceGone
    and MediumError.
    """
    raw = ctypes.create_string_buffer(IDENTIFY_NBYTES)
    try:
        nsid = int(fcntl.ioctl(fd, _IOCTL_ID))
        command = _Command(
            opcode=_IDENTIFY,
            nsid=nsid,
            address=ctypes.addressof(raw),
            data_nbytes=IDENTIFY_NBYTES,
            timeout_ms=_TIMEOUT_MS,
        )
        command.cdw10[0] = _CNS_NAMESPACE
        status = int(fcntl.ioctl(fd, _IOCTL_ADMIN, command))
    except OSError as error:
        kind = DeviceGone if error.errno in (errno.ENODEV, errno.ENXIO) else MediumError
        raise kind(
            f"{path} does not answer as an NVMe namespace: {error.strerror}; check the drive,"
            " or use its block device"
        ) from error
    if status:
        raise MediumError(f"{path} refuses Identify with status {status:#x}; reset the drive")
    found = NamespaceIdentity.parse(raw.raw)
    if found.refusal:
        raise Unsupported(f"{path} cannot be used: {found.refusal}")
    limit = _kernel_limit(block_name(path), root)
    return GenericNamespace(
        nsid, found.nlb, 1 << found.lba_shift, min(REQUEST_NBYTES_MAX, limit or REQUEST_NBYTES_MAX)
    )


def _kernel_limit(name: str, root: Path) -> int:
    """Most bytes of one command to the block device; 0 if the kernel does not report it."""
    try:
        text = (root / "sys/class/block" / name / "queue/max_hw_sectors_kb").read_text()
    except OSError:
        return 0
    return int(text) * KiB


def claim(path: str) -> int | None:
    """Opens the block device of a generic device exclusively, so that it cannot be mounted.

    None if there is none that can be opened. Raises PoolInUse if another process has it.
    """
    try:
        return os.open(_block_path(path), os.O_RDONLY | os.O_EXCL | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.EBUSY:
            raise PoolInUse(
                f"{block_name(path)}, the block device of {path}, is mounted or in use; unmount"
                " or release it first"
            ) from error
        return None
