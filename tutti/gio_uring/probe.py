"""Detects what a machine offers to the rings, and the tier that follows from it.

Everything is only looked at: no setting changes, no device is opened for writing, and a file that
is needed for a test has no name and is gone afterwards. The tiers are described in
docs/tiers.md.
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
from tutti.gio_uring.drives.mounts import filesystem_of
from tutti.gio_uring.memory import HUGEPAGE_NBYTES, HostBuffer
from tutti.gio_uring.tier import DriveFacts, TierFacts, judge_tiers, probe_mapping

# linux/io_uring.h. The numbers of the system calls are the same on every architecture that came
# after Linux 5.0, and on x86-64 and arm64.
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
    """io_uring. features: opcodes that Tutti uses and the kernel has. reason: why it is refused."""

    available: bool
    features: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class TransferMemoryFacts:
    """Memory for transfers. memlock_nbytes: -1 without a limit. hugetlb: (size, total, free).

    backing: what an ordinary buffer of the rings lies on: "hugetlb", "thp" or "pages".
    collapses: whether memory that was touched already can be put on hugepages.
    """

    memlock_nbytes: int
    hugetlb: tuple[tuple[int, int, int], ...]
    transparent: str
    backing: str
    collapses: bool


@dataclass(frozen=True)
class DirectFacts:
    """Direct I/O at a path. Alignments are 0 where the kernel does not report them (before 6.1, or
    a file system without STATX_DIOALIGN).
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
    """One NVMe controller on the PCI bus or a fabric; without namespaces when vfio has it."""

    name: str
    model: str
    address: str
    driver: str
    namespaces: tuple[NamespaceFacts, ...]


@dataclass(frozen=True)
class IommuFacts:
    """Whether a program may be given a device of its own."""

    groups: int
    vfio: bool
    vfio_pci: bool


@dataclass(frozen=True)
class CudaFacts:
    """CUDA devices; `reason`: why there are none. driver: e.g. "13.0"."""

    driver: str
    devices: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class MachineFacts:
    """Everything together."""

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
    """Looks at everything; `path` is where files of a pool would be, `root` where /sys lies.

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
    """Makes a ring, asks the kernel for its commands, and closes it."""
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
    """Which of _OPCODES the kernel has: io_uring_probe is 16 bytes and 8 for every opcode."""
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
    """Its result, or a negative errno."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    result = int(libc.syscall(ctypes.c_long(number), *(ctypes.c_long(a) for a in arguments)))
    return -ctypes.get_errno() if result < 0 else result


def probe_memory(root: Path = Path("/")) -> TransferMemoryFacts:
    """Limits and settings, and what memory really lies on."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    mm = root / "sys/kernel/mm"
    pools = []
    for folder in sorted(mm.glob("hugepages/hugepages-*kB")):
        nbytes = int(folder.name.removeprefix("hugepages-").removesuffix("kB")) * 1024
        total, free = (
            int(_text(folder / name) or 0) for name in ("nr_hugepages", "free_hugepages")
        )
        pools.append((nbytes, total, free))
    setting = _text(mm / "transparent_hugepage/enabled")
    chosen = setting[setting.find("[") + 1 : setting.find("]")] if "[" in setting else "missing"
    return TransferMemoryFacts(
        memlock_nbytes=-1 if soft == resource.RLIM_INFINITY else soft,
        hugetlb=tuple(pools),
        transparent=chosen,
        backing=HostBuffer(4 * HUGEPAGE_NBYTES).backing,
        collapses=_collapses(),
    )


def _collapses() -> bool:
    """Touches ordinary private memory and asks for it to be put on a hugepage afterwards."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    with mmap.mmap(-1, 2 * HUGEPAGE_NBYTES, flags=flags) as mapping:
        for page in range(0, len(mapping), mmap.PAGESIZE):
            mapping[page] = 1
        start = -_address(mapping) % HUGEPAGE_NBYTES
        try:
            mapping.madvise(_MADV_COLLAPSE, start, HUGEPAGE_NBYTES)
        except OSError:
            return False
        return True


def _address(mapping: mmap.mmap) -> int:
    """Where a mapping lies; nothing keeps it there but the mapping itself."""
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))


def probe_direct(path: str) -> DirectFacts:
    """Reads, and in a folder first writes, one block by direct I/O.

    A file or block device is only read. Raises Unsupported when the path cannot be used at all.
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
    """A file to try with, and whether it is a new one without a name."""
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
    """Why direct I/O does not work; "" when it does."""
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
    """(memory, offset) alignment of direct I/O from statx(2); zeros where it is not reported."""
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
    """NVMe controllers of the kernel's driver, and those that vfio-pci has taken over."""
    found = [_controller(folder) for folder in sorted((root / "sys/class/nvme").glob("nvme*"))]
    for folder in sorted((root / "sys/bus/pci/drivers/vfio-pci").glob("*:*")):
        if _text(folder / "class") == _PCI_CLASS_NVME:
            found.append(ControllerFacts("", "unknown", folder.name, "vfio-pci", ()))
    return tuple(found)


def _controller(folder: Path) -> ControllerFacts:
    namespaces = []
    # With native multipath the heads of namespaces lie elsewhere; paths are named nvme0c0n1.
    for place in sorted(folder.glob("nvme*n*")):
        if "c" not in place.name.removeprefix("nvme"):
            namespaces.append(_namespace(place))
    driver = folder / "device/driver"
    return ControllerFacts(
        name=folder.name,
        model=_text(folder / "model") or "unknown",
        address=_text(folder / "address"),
        driver=driver.resolve().name if driver.exists() else "nvme",
        namespaces=tuple(namespaces),
    )


def _namespace(folder: Path) -> NamespaceFacts:
    sectors = int(_text(folder / "size") or 0)
    generic = folder.name.replace("nvme", "ng", 1)
    return NamespaceFacts(
        name=folder.name,
        nbytes=sectors * 512,  # sysfs counts sectors of 512 bytes, whatever the LBA size
        lba_nbytes=int(_text(folder / "queue/logical_block_size") or 0),
        character_device=f"/dev/{generic}" if os.path.exists(f"/dev/{generic}") else "",
    )


def probe_iommu(root: Path = Path("/")) -> IommuFacts:
    """The kernel's side of giving a device to a program."""
    groups = root / "sys/kernel/iommu_groups"
    return IommuFacts(
        groups=sum(1 for _ in groups.iterdir()) if groups.is_dir() else 0,
        vfio=(root / "dev/vfio/vfio").exists(),
        vfio_pci=(root / "sys/bus/pci/drivers/vfio-pci").is_dir(),
    )


def probe_cuda(load: Callable[[str], ctypes.CDLL] = ctypes.CDLL) -> CudaFacts:
    """Asks the driver's own library, when there is one, for its version and devices."""
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


def _text(path: Path) -> str:
    """What a small file of the kernel says; "" when it is not there."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
