"""What the machine offers: on a made-up /sys, on this machine, and with parts taken away."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest

from tutti.errors import Unsupported
from tutti.gio_uring import probe
from tutti.gio_uring.probe import ControllerFacts, CudaFacts, IommuFacts, NamespaceFacts


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A /sys with one NVMe drive of the kernel's driver, and another that vfio-pci has."""
    drive = tmp_path / "sys/class/nvme/nvme0"
    write(drive / "model", "Example SSD")
    write(drive / "address", "0000:01:00.0")
    write(drive / "nvme0n1/size", str((2 << 30) // 512))
    write(drive / "nvme0n1/queue/logical_block_size", "4096")
    write(drive / "nvme0c0n1/size", "8")  # a path of a multipath namespace
    vfio = tmp_path / "sys/bus/pci/drivers/vfio-pci"
    write(vfio / "0000:02:00.0/class", "0x010802")
    write(vfio / "0000:03:00.0/class", "0x030000")
    for group in ("0", "1"):
        (tmp_path / "sys/kernel/iommu_groups" / group).mkdir(parents=True)
    write(tmp_path / "dev/vfio/vfio", "")
    mm = tmp_path / "sys/kernel/mm"
    write(mm / "hugepages/hugepages-2048kB/nr_hugepages", "8")
    write(mm / "hugepages/hugepages-2048kB/free_hugepages", "3")
    write(mm / "transparent_hugepage/enabled", "always [madvise] never")
    return tmp_path


def test_controllers(machine: Path) -> None:
    assert probe.probe_controllers(machine) == (
        ControllerFacts(
            "nvme0",
            "Example SSD",
            "0000:01:00.0",
            "nvme",
            (NamespaceFacts("nvme0n1", 2 << 30, 4096, ""),),
        ),
        ControllerFacts("", "unknown", "0000:02:00.0", "vfio-pci", ()),
    )


def test_a_machine_without_anything(tmp_path: Path) -> None:
    assert probe.probe_controllers(tmp_path) == ()
    assert probe.probe_iommu(tmp_path) == IommuFacts(0, vfio=False, vfio_pci=False)
    memory = probe.probe_memory(tmp_path)
    assert (memory.hugetlb, memory.transparent) == ((), "missing")


def test_iommu_and_memory(machine: Path) -> None:
    assert probe.probe_iommu(machine) == IommuFacts(2, vfio=True, vfio_pci=True)
    memory = probe.probe_memory(machine)
    assert memory.hugetlb == ((2 << 20, 8, 3),)
    assert memory.transparent == "madvise"
    assert memory.backing in ("hugetlb", "thp", "pages")


class _Driver:
    """As much of libcuda as is called; results of cuInit and the devices are given."""

    def __init__(self, result: int, names: list[bytes]) -> None:
        self._result = result
        self._names = names

    def cuDriverGetVersion(self, out: ctypes._CArgObject) -> int:
        out._obj.value = 13020
        return 0

    def cuInit(self, flags: int) -> int:
        return self._result

    def cuDeviceGetCount(self, out: ctypes._CArgObject) -> int:
        out._obj.value = len(self._names)
        return 0

    def cuDeviceGetName(self, out: ctypes.Array[ctypes.c_char], nbytes: int, device: int) -> int:
        out.value = self._names[device]
        return 0


def test_cuda() -> None:
    def missing(name: str) -> ctypes.CDLL:
        raise OSError(name)

    def loads(result: int, names: list[bytes]) -> CudaFacts:
        return probe.probe_cuda(lambda _: _Driver(result, names))  # type: ignore[arg-type,return-value]

    assert "libcuda.so.1" in probe.probe_cuda(missing).reason
    assert loads(0, [b"Example GPU"]) == CudaFacts("13.2", ("Example GPU",), "")
    assert "100" in loads(100, []).reason
    assert loads(0, []).reason


def test_direct_io_in_a_folder_leaves_nothing(tmp_path: Path) -> None:
    facts = probe.probe_direct(str(tmp_path))
    assert list(tmp_path.iterdir()) == []
    assert facts.direct == (facts.reason == "")
    assert facts.filesystem != "unknown"
    assert (facts.memory_alignment > 0) == (facts.offset_alignment > 0)


def test_direct_io_of_a_file_only_reads(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"x" * 8192)
    file.chmod(0o400)
    assert probe.probe_direct(str(file)).direct == probe.probe_direct(str(tmp_path)).direct
    assert file.read_bytes() == b"x" * 8192


def test_direct_io_that_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, command: int, flags: int = 0) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return 0

    monkeypatch.setattr(probe.fcntl, "fcntl", refuse)
    facts = probe.probe_direct(str(tmp_path))
    assert not facts.direct
    assert "page cache" in facts.reason


def test_a_path_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(Unsupported):
        probe.probe_direct(str(tmp_path / "missing"))


def test_io_uring_that_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "uring_refusal", lambda: "Operation not permitted")
    facts = probe.probe_uring()
    assert (facts.available, facts.features) == (False, ())
    assert "threads" in facts.reason


def test_this_machine(tmp_path: Path) -> None:
    facts = probe.probe_machine(str(tmp_path))
    assert facts.kernel.startswith("Linux")
    assert facts.uring.available == (facts.uring.features != ())
    if facts.uring.available:  # every kernel with io_uring that is new enough has these
        assert {"READ", "WRITE"} <= set(facts.uring.features)
    before = len(os.listdir("/proc/self/fd"))
    probe.probe_machine(str(tmp_path))
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(Unsupported, match="not a folder, file or block device"):
        probe.probe_direct(str(tmp_path / "pipe"))
