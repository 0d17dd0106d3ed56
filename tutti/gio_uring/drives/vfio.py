"""A PCI device driven by this process: vfio's container, group and device (linux/vfio.h).

The IOMMU lets the device access only memory passed to `map`. When the last descriptor is closed,
also when the process is killed, the kernel removes the mappings and resets the device. A forked
child therefore closes its copies at once.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import struct
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

from tutti.base.numa import PCI_DEVICES as PCI_DEVICES
from tutti.base.process import Owned, finalize, own_file
from tutti.errors import ConfigError, DeviceGone, NativeError, PoolInUse, Unsupported

_VFIO = Path("/dev/vfio")

# linux/vfio.h: _IO(';', 100 + n)
_GET_API_VERSION, _CHECK_EXTENSION, _SET_IOMMU = 0x3B64, 0x3B65, 0x3B66
_GROUP_GET_STATUS, _GROUP_SET_CONTAINER, _GROUP_GET_DEVICE_FD = 0x3B67, 0x3B68, 0x3B6A
_DEVICE_GET_REGION_INFO, _DEVICE_GET_IRQ_INFO, _DEVICE_SET_IRQS = 0x3B6C, 0x3B6D, 0x3B6E
_DEVICE_RESET, _IOMMU_GET_INFO, _IOMMU_MAP_DMA, _IOMMU_UNMAP_DMA = 0x3B6F, 0x3B70, 0x3B71, 0x3B72
_TYPE1V2_IOMMU = 3
_GROUP_VIABLE = 1
_REGION_MMAP = 4
_MAP_READ_WRITE = 3
_IRQ_DATA_EVENTFD_TRIGGER = 4 | 32
_IOMMU_INFO_CAPS = 2
_CAP_IOVA_RANGES = 1
_IRQ_MSIX, _IRQ_REQUEST = 2, 4
_REGION_BAR0, _REGION_CONFIG = 0, 7
_CONFIG_COMMAND = 4  # offset in PCI configuration space
_COMMAND_MEMORY, _COMMAND_MASTER = 2, 4
_INFO_NBYTES = 4096

#: (address, nbytes): the device uses the same addresses as this process.
Range = tuple[int, int]


class VfioDevice(Owned):
    """One PCI function bound to vfio-pci; closed by `close`, or when it is garbage-collected.

    bdf: "0000:03:00.0". registers: offset of BAR0 in `fd`, for pread and pwrite. irq_fd: eventfd of
    MSI-X vector 0, -1 if there is none. wake_fd: an eventfd for waiters. request_fd: readable when
    the kernel asks for the device back. iova_ranges: [first, last] device addresses that the IOMMU
    translates.

    Raises ConfigError for a device that does not exist or is not bound to vfio-pci, Unsupported
    without an IOMMU, PoolInUse if another process has it, NativeError if the kernel refuses.
    """

    def __init__(self, bdf: str) -> None:
        self.bdf = bdf
        self._files: list[FileIO] = []
        self._finalizer = finalize(self, _close_all, self._files)
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        group = iommu_group(self.bdf)
        self.container_fd = self._own(_open(_VFIO / "vfio"))
        if fcntl.ioctl(self.container_fd, _CHECK_EXTENSION, _TYPE1V2_IOMMU) == 0:
            raise Unsupported("the kernel has no type 1 IOMMU; run `modprobe vfio_iommu_type1`")
        group_fd = self._own(_open(_VFIO / group))
        status = bytearray(struct.pack("<II", 8, 0))
        fcntl.ioctl(group_fd, _GROUP_GET_STATUS, status)
        if not struct.unpack("<II", status)[1] & _GROUP_VIABLE:
            raise ConfigError(
                f"IOMMU group {group} of {self.bdf} has devices of other drivers; bind all of its"
                " devices to vfio-pci, or use another slot"
            )
        with _explained(f"cannot use IOMMU group {group}"):
            fcntl.ioctl(group_fd, _GROUP_SET_CONTAINER, struct.pack("<i", self.container_fd))
            fcntl.ioctl(self.container_fd, _SET_IOMMU, _TYPE1V2_IOMMU)
            # A bytearray: with bytes, fcntl.ioctl would not return the descriptor's number.
            name = bytearray(self.bdf.encode() + b"\0")
            self.fd = self._own(fcntl.ioctl(group_fd, _GROUP_GET_DEVICE_FD, name))
        self.iova_ranges = self._iova_ranges()
        self._bar_flags, self._bar_nbytes, self.registers = self._region(_REGION_BAR0)
        self._config = self._region(_REGION_CONFIG)[2]
        self.wake_fd = self._own(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))
        self.irq_fd = self._event(_IRQ_MSIX)
        self.request_fd = self._event(_IRQ_REQUEST)

    def _own(self, fd: int) -> int:
        """Registers a descriptor to be closed by `close` and in forked children."""
        self._files.append(own_file(FileIO(fd, "r+")))
        return fd

    def _region(self, index: int) -> tuple[int, int, int]:
        """(flags, nbytes, offset in `fd`) of a region."""
        info = bytearray(struct.pack("<IIIIQQ", 32, 0, index, 0, 0, 0))
        fcntl.ioctl(self.fd, _DEVICE_GET_REGION_INFO, info)
        _, flags, _, _, nbytes, offset = struct.unpack("<IIIIQQ", info)
        return flags, nbytes, offset

    def _event(self, index: int) -> int:
        """An eventfd for the first interrupt of an index; -1 if it has none."""
        info = bytearray(struct.pack("<IIII", 16, 0, index, 0))
        try:
            fcntl.ioctl(self.fd, _DEVICE_GET_IRQ_INFO, info)
            if struct.unpack("<IIII", info)[3] == 0:
                return -1
            fd = self._own(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))
            wanted = struct.pack("<IIIIIi", 24, _IRQ_DATA_EVENTFD_TRIGGER, index, 0, 1, fd)
            fcntl.ioctl(self.fd, _DEVICE_SET_IRQS, wanted)
        except OSError:
            return -1
        return fd

    def _iova_ranges(self) -> list[tuple[int, int]]:
        """The ranges of VFIO_IOMMU_GET_INFO; the kernel's list is validated."""
        info = bytearray(_INFO_NBYTES)
        struct.pack_into("<I", info, 0, _INFO_NBYTES)
        fcntl.ioctl(self.container_fd, _IOMMU_GET_INFO, info)
        flags, _, cap = struct.unpack_from("<IQI", info, 4)
        if not flags & _IOMMU_INFO_CAPS:
            return []
        for _ in range(_INFO_NBYTES // 16):  # a chain cannot be longer than the buffer
            if not 0 < cap <= _INFO_NBYTES - 16:
                return []
            kind, _, following, count = struct.unpack_from("<HHII", info, cap)
            if kind == _CAP_IOVA_RANGES:
                count = min(count, (_INFO_NBYTES - cap - 16) // 16)
                return [struct.unpack_from("<QQ", info, cap + 16 + 16 * i) for i in range(count)]
            cap = following
        return []

    def enable_dma(self) -> None:
        """Enables memory space and bus mastering. Raises DeviceGone if the device is gone."""
        place = self._config + _CONFIG_COMMAND
        try:
            raw = os.pread(self.fd, 2, place)
            if len(raw) == 2:
                command = struct.unpack("<H", raw)[0] | _COMMAND_MEMORY | _COMMAND_MASTER
                os.pwrite(self.fd, struct.pack("<H", command), place)
                return
        except OSError as error:
            raise DeviceGone(f"{self.bdf} does not answer ({error.strerror}); check it") from error
        raise DeviceGone(f"{self.bdf} does not answer; it was removed or has failed: check it")

    def read_register(self, offset: int, nbytes: int) -> int:
        """Reads a register of BAR0. Raises DeviceGone if that fails, or all bits are ones."""
        try:
            raw = os.pread(self.fd, nbytes, self.registers + offset)
        except OSError:
            raw = b""
        if len(raw) != nbytes or raw == b"\xff" * nbytes:
            raise DeviceGone(f"{self.bdf} does not answer; it was removed or has failed: check it")
        return int.from_bytes(raw, "little")

    def write_register(self, offset: int, nbytes: int, content: int) -> None:
        """Writes a register of BAR0. Raises DeviceGone if that fails."""
        try:
            os.pwrite(self.fd, content.to_bytes(nbytes, "little"), self.registers + offset)
        except OSError as error:
            raise DeviceGone(f"{self.bdf} does not answer ({error.strerror}); check it") from error

    def check_mappable(self, offset: int, nbytes: int) -> None:
        """Raises Unsupported if these bytes of BAR0 do not exist or cannot be mapped."""
        if offset + nbytes > self._bar_nbytes or not self._bar_flags & _REGION_MMAP:
            raise Unsupported(
                f"the registers of {self.bdf} cannot be mapped: BAR0 has {self._bar_nbytes} bytes,"
                f" bytes {offset} to {offset + nbytes} are needed"
            )

    def check_iova(self, where: Range) -> None:
        """Raises Unsupported if the IOMMU cannot translate these addresses."""
        address, nbytes = where
        ranges = self.iova_ranges
        if ranges and not any(a <= address and address + nbytes - 1 <= b for a, b in ranges):
            raise Unsupported(
                f"the IOMMU of {self.bdf} cannot translate {address:#x}: it takes"
                f" {', '.join(f'{a:#x} to {b:#x}' for a, b in ranges)}; it needs addresses of 47"
                " bits, as all of a process's memory has them"
            )

    def map(self, where: Range) -> None:
        """Maps whole pages for the device, at this process's addresses.

        They are pinned until they are unmapped. Raises Unsupported for addresses that the IOMMU
        cannot translate, ConfigError if the kernel refuses.
        """
        self.check_iova(where)
        address, nbytes = where
        argument = struct.pack("<IIQQQ", 32, _MAP_READ_WRITE, address, address, nbytes)
        try:
            fcntl.ioctl(self.container_fd, _IOMMU_MAP_DMA, argument)
        except OSError as error:
            hint = "raise RLIMIT_MEMLOCK" if error.errno == errno.ENOMEM else "map memory once"
            raise ConfigError(
                f"cannot map {nbytes} bytes at {address:#x} for {self.bdf}: {error.strerror};"
                f" {hint}"
            ) from error

    def unmap(self, where: Range) -> None:
        """Unmaps pages, exactly as they were mapped; does nothing if they are not mapped."""
        address, nbytes = where
        argument = bytearray(struct.pack("<IIQQ", 24, 0, address, nbytes))
        with contextlib.suppress(OSError):  # the mappings of a device that is gone are gone, too
            fcntl.ioctl(self.container_fd, _IOMMU_UNMAP_DMA, argument)

    def reset(self) -> bool:
        """Resets the PCI function through the kernel; False if that is not supported or failed."""
        try:
            fcntl.ioctl(self.fd, _DEVICE_RESET)
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Releases the device; a second call does nothing."""
        self._finalizer()


class PageMap(Owned):
    """Maps regions of any alignment for a device: every page once, in as few mappings as possible.

    A region's whole pages are one mapping. A page that it shares with a neighbour is a separate
    mapping, kept while either needs it; the device can access all of such a page.
    """

    def __init__(self, device: VfioDevice) -> None:
        self._device = device
        self._shared: dict[int, int] = {}  # number of users by page address

    def map(self, address: int, nbytes: int) -> None:
        """Maps a region. Raises what `VfioDevice.map` raises; nothing of it is mapped then."""
        done: list[Range] = []
        try:
            for piece, is_shared in _pieces(address, nbytes):
                if not is_shared or self._shared.get(piece[0], 0) == 0:
                    self._device.map(piece)
                if is_shared:
                    self._shared[piece[0]] = self._shared.get(piece[0], 0) + 1
                done.append(piece)
        except BaseException:
            self._unmap([p for p in _pieces(address, nbytes) if p[0] in done])
            raise

    def unmap(self, address: int, nbytes: int) -> None:
        """Unmaps a region, exactly as it was mapped."""
        self._unmap(list(_pieces(address, nbytes)))

    def _unmap(self, pieces: list[tuple[Range, bool]]) -> None:
        for piece, is_shared in pieces:
            if is_shared:
                self._shared[piece[0]] -= 1
                if self._shared[piece[0]] != 0:
                    continue
                del self._shared[piece[0]]
            self._device.unmap(piece)


def _pieces(address: int, nbytes: int) -> Iterator[tuple[Range, bool]]:
    """The page-aligned mappings of a region, each with whether a neighbour may share it."""
    page = mmap.PAGESIZE
    first, last = address // page * page, -(-(address + nbytes) // page) * page
    head = first + page if address != first else first
    tail = last - page if address + nbytes != last else last
    if head > tail:  # within one page
        yield (first, page), True
        return
    if head != first:
        yield (first, page), True
    if head < tail:
        yield (head, tail - head), False
    if tail != last:
        yield (tail, page), True


def iommu_group(bdf: str) -> str:
    """The IOMMU group of a device that is bound to vfio-pci.

    Raises ConfigError or Unsupported with the remedy.
    """
    device = PCI_DEVICES / bdf
    if not device.exists():
        raise ConfigError(f"the PCI device {bdf} does not exist; `lspci -D` lists the devices")
    driver = device / "driver"
    name = driver.resolve().name if driver.exists() else "no driver"
    if name != "vfio-pci":
        unbind = f"echo {bdf} > {device}/driver/unbind; " if driver.exists() else ""
        raise ConfigError(
            f"{bdf} is bound to {name}, not to vfio-pci; when it is unused, run as root:"
            f" modprobe vfio-pci; echo vfio-pci > {device}/driver_override; {unbind}"
            f"echo {bdf} > {PCI_DEVICES.parent}/drivers_probe"
        )
    group = device / "iommu_group"
    if not group.exists():
        raise Unsupported(
            f"{bdf} is in no IOMMU group; boot with the IOMMU on (intel_iommu=on, or amd_iommu=on)"
        )
    return group.resolve().name


def _open(path: Path) -> int:
    with _explained(f"cannot open {path}"):
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)


@contextlib.contextmanager
def _explained(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        text = f"{what}: {error.strerror}"
        if error.errno == errno.EBUSY:
            raise PoolInUse(
                f"{text}; another process has it, or this one has another device of its group"
            ) from error
        if error.errno in (errno.EACCES, errno.EPERM):
            raise ConfigError(f"{text}; run as root, or change the owner of {_VFIO}/*") from error
        if error.errno == errno.ENOENT:
            raise Unsupported(f"{text}; run `modprobe -a vfio-pci vfio_iommu_type1`") from error
        raise NativeError(f"{text}; see the kernel's log") from error


def _close_all(files: list[FileIO]) -> None:
    for file in reversed(files):
        with contextlib.suppress(OSError):
            file.close()
    files.clear()
