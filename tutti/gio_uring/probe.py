"""Detects the capabilities of a machine, and the tiers that follow from them.

Changes nothing: no settings, no device is opened for writing, and files for tests have no name and
vanish. docs/tiers.md describes the tiers.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import resource
import stat
import struct
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tutti import native
from tutti.errors import Unsupported
from tutti.gio_uring.controller_file import uring_refusal
from tutti.gio_uring.drives.mounts import filesystem_of, text_of
from tutti.gio_uring.memory import HUGEPAGE_NBYTES, HostBuffer
from tutti.gio_uring.tier import DriveFacts, TierFacts, judge_tiers, probe_mapping

# linux/io_uring.h. The system calls' numbers are those of x86-64, arm64, and all architectures
# newer than Linux 5.0.
_SYS_SETUP, _SYS_REGISTER = 425, 427
_PARAMS_NBYTES = 120
_REGISTER_PROBE = 8
_PROBE_OPS = 256
_OPCODES = {"READ": 22, "WRITE": 23, "FALLOCATE": 17, "URING_CMD": 46}

_MADV_COLLAPSE = 25  # linux/mman.h, since Linux 6.1
_STATX_DIOALIGN, _AT_EMPTY_PATH = 0x2000, 0x1000  # linux/stat.h, linux/fcntl.h
_STATX_NBYTES, _DIO_MEM_ALIGN_AT = 256, 152
_BLOCK_NBYTES = 4096
_PCI_CLASS_NVME = "0x010802"  # mass storage, non-volatile memory, NVM Express
_ISA_NAMES = ("portable", "AVX2", "AVX-512")  # TuttiIsa of kernels/native/api.h


@dataclass(frozen=True)
class UringFacts:
    """io_uring. features: opcodes that Tutti uses and the kernel supports. reason: of a refusal."""

    available: bool
    features: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class TransferMemoryFacts:
    """Memory for transfers. memlock_nbytes: limit, -1 for none. hugetlb: (page bytes, total, free).

    backing: page kind of a default buffer: "hugetlb", "thp" or "pages" (4 KiB).
    collapse_refusal: why touched memory cannot be moved to hugepages (MADV_COLLAPSE), or "".
    """

    memlock_nbytes: int
    hugetlb: tuple[tuple[int, int, int], ...]
    transparent: str
    backing: str
    collapse_refusal: str


@dataclass(frozen=True)
class DirectFacts:
    """Direct I/O at a path. Alignments are in bytes, 0 if the kernel does not report them (before
    6.1, or a file system without STATX_DIOALIGN).
    """

    path: str
    filesystem: str
    direct: bool
    reason: str
    memory_alignment: int
    offset_alignment: int


@dataclass(frozen=True)
class NamespaceFacts:
    """One NVMe namespace."""

    name: str
    nbytes: int
    lba_nbytes: int
    character_device: str


@dataclass(frozen=True)
class ControllerFacts:
    """One NVMe controller, on PCI or a fabric; has no namespaces if it is bound to vfio-pci."""

    name: str
    model: str
    address: str
    driver: str
    namespaces: tuple[NamespaceFacts, ...]


@dataclass(frozen=True)
class IommuFacts:
    """Whether a device can be passed to a program (vfio)."""

    groups: int
    vfio: bool
    vfio_pci: bool


@dataclass(frozen=True)
class CudaFacts:
    """CUDA devices. reason: why there are none. driver: its CUDA version, such as "13.0"."""

    driver: str
    devices: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class MachineFacts:
    """All facts about a machine."""

    kernel: str
    machine: str
    cpus: int
    is_root: bool
    digest_isa: str
    uring: UringFacts
    memory: TransferMemoryFacts
    direct: DirectFacts
    controllers: tuple[ControllerFacts, ...]
    iommu: IommuFacts
    cuda: CudaFacts
    tiers: tuple[TierFacts, ...]


def probe_machine(path: str = ".", root: Path = Path("/")) -> MachineFacts:
    """Collects all facts. path: folder or file of a pool. root: folder that contains /sys.

    Raises NativeError when the native library is missing.
    """
    isa = int(native.lib().tutti_isa_best())
    uring, cuda = probe_uring(), probe_cuda()
    controllers, iommu = probe_controllers(root), probe_iommu(root)
    is_root = os.geteuid() == 0
    system = os.uname()
    return MachineFacts(
        kernel=f"{system.sysname} {system.release}",
        machine=system.machine,
        cpus=len(os.sched_getaffinity(0)),
        is_root=is_root,
        digest_isa=_ISA_NAMES[isa] if isa < len(_ISA_NAMES) else f"number {isa}",
        uring=uring,
        memory=probe_memory(root),
        direct=probe_direct(path),
        controllers=controllers,
        iommu=iommu,
        cuda=cuda,
        tiers=judge_tiers(
            _drive_facts(controllers, iommu),
            probe_mapping(root, system.release, is_root=is_root),
            "" if cuda.devices else cuda.reason,
        ),
    )


def probe_uring() -> UringFacts:
    """Creates a ring, reads the supported opcodes, and closes it."""
    refusal = uring_refusal()
    if refusal is not None:
        return UringFacts(False, (), f"{refusal}; threads with pread and pwrite take its place")
    raw = ctypes.create_string_buffer(_PARAMS_NBYTES)
    fd = _syscall(_SYS_SETUP, 4, ctypes.addressof(raw))
    if fd < 0:
        return UringFacts(False, (), os.strerror(-fd))
    try:
        return UringFacts(True, _opcodes(fd), "")
    finally:
        os.close(fd)


def _opcodes(fd: int) -> tuple[str, ...]:
    """Which of _OPCODES the kernel supports: io_uring_probe has 16 bytes, and 8 per opcode."""
    raw = ctypes.create_string_buffer(16 + 8 * _PROBE_OPS)
    if _syscall(_SYS_REGISTER, fd, _REGISTER_PROBE, ctypes.addressof(raw), _PROBE_OPS) < 0:
        return ()
    last = raw.raw[0]
    supported = 1  # IO_URING_OP_SUPPORTED, in io_uring_probe_op::flags
    return tuple(
        name
        for name, opcode in _OPCODES.items()
        if opcode <= last and raw.raw[16 + 8 * opcode + 2] & supported
    )


def _syscall(number: int, *arguments: int) -> int:
    """The result of a system call, or a negative errno."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    result = int(libc.syscall(ctypes.c_long(number), *(ctypes.c_long(a) for a in arguments)))
    return -ctypes.get_errno() if result < 0 else result


def probe_memory(root: Path = Path("/")) -> TransferMemoryFacts:
    """Limits and settings of memory, and the page kind of a real buffer."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    mm = root / "sys/kernel/mm"
    pools = []
    for folder in sorted(mm.glob("hugepages/hugepages-*kB")):
        nbytes = int(folder.name.removeprefix("hugepages-").removesuffix("kB")) * 1024
        total, free = (
            int(text_of(folder / name) or 0) for name in ("nr_hugepages", "free_hugepages")
        )
        pools.append((nbytes, total, free))
    setting = text_of(mm / "transparent_hugepage/enabled")
    chosen = setting[setting.find("[") + 1 : setting.find("]")] if "[" in setting else "missing"
    return TransferMemoryFacts(
        memlock_nbytes=-1 if soft == resource.RLIM_INFINITY else soft,
        hugetlb=tuple(pools),
        transparent=chosen,
        backing=HostBuffer(4 * HUGEPAGE_NBYTES).backing,
        collapse_refusal=_collapse_refusal(),
    )


def _collapse_refusal() -> str:
    """Why touched private memory cannot be moved to a hugepage, or ""; tries it."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    with mmap.mmap(-1, 2 * HUGEPAGE_NBYTES, flags=flags) as mapping:
        for page in range(0, len(mapping), mmap.PAGESIZE):
            mapping[page] = 1
        start = -_address(mapping) % HUGEPAGE_NBYTES
        try:
            mapping.madvise(_MADV_COLLAPSE, start, HUGEPAGE_NBYTES)
        except OSError as error:
            return f"{errno.errorcode[error.errno or 0]}, {error.strerror}"
        return ""


def _address(mapping: mmap.mmap) -> int:
    """The address of a mapping, valid as long as the mapping lives."""
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))


def probe_direct(path: str) -> DirectFacts:
    """Tries direct I/O of one block: reads a file or device, or writes and reads a new file.

    Raises Unsupported if the path cannot be used at all.
    """
    filesystem = filesystem_of(path)
    try:
        with _direct_file(path) as (fd, is_new):
            memory, offset = _dio_alignment(fd)
            reason = _try_direct(fd, is_new)
    except OSError as error:
        raise Unsupported(
            f"cannot use {path}: {error.strerror}; name a folder or file that exists and is yours"
        ) from error
    return DirectFacts(path, filesystem, not reason, reason, memory, offset)


@contextmanager
def _direct_file(path: str) -> Iterator[tuple[int, bool]]:
    """Yields a file descriptor to test, and whether its file is new and nameless."""
    if os.path.isdir(path):
        with tempfile.TemporaryFile(dir=path) as file:
            yield file.fileno(), True
        return
    # Without O_NONBLOCK the open of a FIFO would wait for a writer.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        mode = os.fstat(fd).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISBLK(mode)):
            raise Unsupported(f"{path} is not a folder, file or block device; pass one of those")
        yield fd, False
    finally:
        os.close(fd)


def _try_direct(fd: int, is_new: bool) -> str:
    """The reason why direct I/O does not work; "" if it does."""
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
        with mmap.mmap(-1, _BLOCK_NBYTES) as block:
            if is_new:
                os.pwrite(fd, block, 0)
            os.preadv(fd, [block], 0)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return "the file system refuses O_DIRECT; transfers go through the page cache"
        return f"{error.strerror}; check the disk"
    return ""


def _dio_alignment(fd: int) -> tuple[int, int]:
    """(memory, offset) alignment of direct I/O in bytes, from statx(2); zeros if not reported."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "statx"):
        return 0, 0
    raw = ctypes.create_string_buffer(_STATX_NBYTES)
    result = libc.statx(fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, raw)
    (mask,) = struct.unpack_from("<I", raw.raw, 0)
    if result != 0 or not mask & _STATX_DIOALIGN:
        return 0, 0
    memory, offset = struct.unpack_from("<II", raw.raw, _DIO_MEM_ALIGN_AT)
    return memory, offset


def probe_controllers(root: Path = Path("/")) -> tuple[ControllerFacts, ...]:
    """NVMe controllers bound to the kernel's driver, and those bound to vfio-pci."""
    found = [_controller(folder) for folder in sorted((root / "sys/class/nvme").glob("nvme*"))]
    for folder in sorted((root / "sys/bus/pci/drivers/vfio-pci").glob("*:*")):
        if text_of(folder / "class") == _PCI_CLASS_NVME:
            found.append(ControllerFacts("", "unknown", folder.name, "vfio-pci", ()))
    return tuple(found)


def _controller(folder: Path) -> ControllerFacts:
    namespaces = []
    # With native multipath, this folder has paths (nvme0c0n1) instead of namespaces.
    for place in sorted(folder.glob("nvme*n*")):
        if "c" not in place.name.removeprefix("nvme"):
            namespaces.append(_namespace(place))
    driver = folder / "device/driver"
    return ControllerFacts(
        name=folder.name,
        model=text_of(folder / "model") or "unknown",
        address=text_of(folder / "address"),
        driver=driver.resolve().name if driver.exists() else "nvme",
        namespaces=tuple(namespaces),
    )


def _namespace(folder: Path) -> NamespaceFacts:
    sectors = int(text_of(folder / "size") or 0)
    generic = folder.name.replace("nvme", "ng", 1)
    return NamespaceFacts(
        name=folder.name,
        nbytes=sectors * 512,  # sysfs counts sectors of 512 bytes, whatever the LBA size
        lba_nbytes=int(text_of(folder / "queue/logical_block_size") or 0),
        character_device=f"/dev/{generic}" if os.path.exists(f"/dev/{generic}") else "",
    )


def probe_iommu(root: Path = Path("/")) -> IommuFacts:
    """Whether IOMMU and vfio allow passing a device to a program."""
    groups = root / "sys/kernel/iommu_groups"
    return IommuFacts(
        groups=sum(1 for _ in groups.iterdir()) if groups.is_dir() else 0,
        vfio=(root / "dev/vfio/vfio").exists(),
        vfio_pci=(root / "sys/bus/pci/drivers/vfio-pci").is_dir(),
    )


def probe_cuda(load: Callable[[str], ctypes.CDLL] = ctypes.CDLL) -> CudaFacts:
    """Reads version and devices through the driver's library, if it is installed."""
    try:
        driver = load("libcuda.so.1")
    except OSError:
        return CudaFacts("", (), "libcuda.so.1 is not installed: no NVIDIA driver")
    number, count = ctypes.c_int(0), ctypes.c_int(0)
    driver.cuDriverGetVersion(ctypes.byref(number))  # 1000 * major + 10 * minor
    version = f"{number.value // 1000}.{number.value % 1000 // 10}"
    result = int(driver.cuInit(0))
    if result != 0:
        return CudaFacts(version, (), f"the driver does not start (CUresult {result})")
    driver.cuDeviceGetCount(ctypes.byref(count))
    names = []
    for device in range(count.value):
        name = ctypes.create_string_buffer(256)
        driver.cuDeviceGetName(name, len(name), device)
        names.append(name.value.decode(errors="replace"))
    return CudaFacts(version, tuple(names), "" if names else "the driver reports no device")


def _drive_facts(controllers: tuple[ControllerFacts, ...], iommu: IommuFacts) -> DriveFacts:
    return DriveFacts(
        drives=len(controllers),
        on_vfio=sum(controller.driver == "vfio-pci" for controller in controllers),
        iommu_groups=iommu.groups,
        has_vfio=iommu.vfio,
        has_vfio_pci=iommu.vfio_pci,
    )
