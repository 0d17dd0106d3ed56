"""Tiers from made-up facts; sources of DMA addresses and the proof of one, on software drives."""

from __future__ import annotations

import ctypes
import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from gio_uring.cuda_stand_in import StandInDriver
from gio_uring.data_pointer import Extent
from memory_controller import MemoryController
from nvme_host import LBA, READ, WRITE, NvmeHost
from waiting import wait_until

from tutti.base.units import MiB
from tutti.errors import ConfigError, MediumError, Unsupported
from tutti.gio_uring import nvme_spec as nvme
from tutti.gio_uring.dma_source import KNOWN_SOURCES, choose_source, prove
from tutti.gio_uring.gpu.device_queues import DeviceQueues
from tutti.gio_uring.gpu.doorbells import GpuDoorbells
from tutti.gio_uring.gpu.pinned_memory import TableMemory
from tutti.gio_uring.memory import HostBuffer
from tutti.gio_uring.queue_pair import QueuePair, QueuePairStruct
from tutti.gio_uring.tier import DriveFacts, MappingFacts, judge_tiers, probe_mapping

ON_VFIO = DriveFacts(2, 1, 4, has_vfio=True, has_vfio_pci=True)
MAY_MAP = MappingFacts(
    is_root=True,
    is_open_driver=True,
    driver=(580, 65, 6),
    kernel=(6, 12),
    peer_mapping=False,
    lockdown="none",
)


class Source:
    """A source as a site would give one."""

    name = "of a site"

    def __init__(self, *missing: str) -> None:
        self._missing = missing

    def missing(self) -> Sequence[str]:
        return self._missing

    def map(self, address: int, nbytes: int) -> Sequence[Extent]:
        return [(address, nbytes)]

    def unmap(self, address: int) -> None:
        pass


def names(tiers: Sequence[object], available: bool = True) -> list[str]:
    return [t.name for t in tiers if t.available == available]  # type: ignore[attr-defined]


def test_what_nothing_speaks_against_is_possible() -> None:
    tiers = judge_tiers(ON_VFIO, MAY_MAP, "")
    assert [t.name for t in tiers] == ["T3", "T2", "T1", "T0"]
    assert names(tiers) == ["T1", "T0"]
    assert [t.name for t in tiers if t.is_tried] == ["T0"]
    assert names(judge_tiers(ON_VFIO, MAY_MAP, "", [Source()])) == ["T2", "T1", "T0"]
    tiers = judge_tiers(ON_VFIO, MAY_MAP, "", [Source("a module")])
    assert names(tiers) == ["T1", "T0"]
    assert "of a site lacks a module" in tiers[1].reasons[0]
    assert all(known.name in tiers[1].reasons[0] for known in KNOWN_SOURCES)


@pytest.mark.parametrize(
    ("changes", "hint"),
    [
        ({"drives": 0, "on_vfio": 0, "iommu_groups": 0}, "no NVMe drive"),
        ({"on_vfio": 0, "iommu_groups": 0}, "IOMMU is off"),
        ({"on_vfio": 0, "has_vfio_pci": False}, "modprobe"),
        ({"has_vfio": False}, "modprobe"),
        ({"on_vfio": 0}, "hand a spare one over"),
    ],
)
def test_the_first_step_to_a_drive(changes: dict[str, object], hint: str) -> None:
    tiers = judge_tiers(dataclasses.replace(ON_VFIO, **changes), MAY_MAP, "")  # type: ignore[arg-type]
    assert names(tiers) == ["T0"]
    assert all(hint in tier.reasons[0] for tier in tiers[:3])


@pytest.mark.parametrize(
    ("changes", "hint"),
    [
        ({"is_root": False}, "needs root"),
        ({"lockdown": "integrity"}, "secure boot"),
        ({"is_open_driver": False}, "open NVIDIA kernel modules"),
        ({"driver": (570, 133, 6)}, "570.133.7 or newer"),
    ],
)
def test_the_first_step_to_the_registers(changes: dict[str, object], hint: str) -> None:
    tiers = judge_tiers(ON_VFIO, dataclasses.replace(MAY_MAP, **changes), "")  # type: ignore[arg-type]
    assert names(tiers) == ["T0"]
    assert hint in tiers[2].reasons[0]


@pytest.mark.parametrize(
    "changes", [{"is_root": False, "peer_mapping": True}, {"driver": (535, 1), "kernel": (6, 8)}]
)
def test_other_ways_to_the_registers(changes: dict[str, object]) -> None:
    mapping = dataclasses.replace(MAY_MAP, **changes)  # type: ignore[arg-type]
    assert names(judge_tiers(ON_VFIO, mapping, "")) == ["T1", "T0"]


def test_without_a_gpu_the_reason_is_said() -> None:
    assert judge_tiers(ON_VFIO, MAY_MAP, "no driver")[2].reasons == ("needs a CUDA GPU: no driver",)


def test_what_the_driver_says_is_read(tmp_path: Path) -> None:
    nothing = probe_mapping(tmp_path, "6.1.0-18-amd64", is_root=False)
    assert nothing == MappingFacts(False, None, (), (6, 1), False, "")
    nvidia, security = tmp_path / "proc/driver/nvidia", tmp_path / "sys/kernel/security"
    nvidia.mkdir(parents=True)
    security.mkdir(parents=True)
    (nvidia / "version").write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n"
        "GCC version:  gcc version 12.2.0\n"
    )
    (nvidia / "params").write_text('RegistryDwords: "PeerMappingOverride=1;"\n')
    (security / "lockdown").write_text("none [integrity] confidentiality\n")
    found = probe_mapping(tmp_path, "6.12.9", is_root=True)
    assert found == MappingFacts(True, True, (580, 65, 6), (6, 12), True, "integrity")


def test_the_refusal_names_every_source() -> None:
    with pytest.raises(Unsupported, match="of a site: a module") as refusal:
        choose_source([Source("a module")])
    assert all(known.name in str(refusal.value) for known in KNOWN_SOURCES)
    good = Source()
    assert choose_source([Source("a module"), good]) is good


class SoftwarePath:
    """A drive of software; the GPU's memory is played by host memory that it can reach."""

    lba_nbytes = LBA

    def __init__(self, nbytes: int) -> None:
        self.controller = MemoryController([MiB])
        self.host = NvmeHost(self.controller)
        self.memory = HostBuffer(nbytes)
        self.region = self.controller.register(self.memory)
        self.drops_reads_of_memory = False

    def close(self) -> None:
        self.region.close()
        self.host.close()
        self.controller.close()

    def extents(self, *sizes: int) -> list[Extent]:
        bounds = np.cumsum([0, *sizes])
        return [(self.memory.address + int(a), n) for a, n in zip(bounds, sizes, strict=False)]

    def fill(self, content: bytes) -> None:
        self.memory.array[: len(content)] = np.frombuffer(content, np.uint8)

    def fetch(self) -> bytes:
        return self.memory.array.tobytes()

    def write_direct(self, extents: Sequence[Extent], slba: int) -> None:
        if not self.drops_reads_of_memory:
            self._run(WRITE, extents, slba)

    def read_direct(self, extents: Sequence[Extent], slba: int) -> None:
        self._run(READ, extents, slba)

    def _run(self, opcode: int, extents: Sequence[Extent], slba: int) -> None:
        nlb = sum(size for _, size in extents) // LBA
        assert self.host.run(self.host.transfer(opcode, slba, nlb, extents)) == nvme.STATUS_OK

    def write_host(self, content: bytes, slba: int) -> None:
        assert self.host.write(slba, content) == nvme.STATUS_OK

    def read_host(self, slba: int, nlb: int) -> bytes:
        return self.host.read(slba, nlb).tobytes()


def test_a_right_source_is_proved(seed: int) -> None:
    path = SoftwarePath(16 * LBA)
    prove(path, path.extents(5 * LBA, 512, 11 * LBA - 512), 3, seed)
    path.close()


@pytest.mark.parametrize("wrong", ["swapped", "shifted", "dropped"])
def test_a_wrong_source_is_found_out(seed: int, wrong: str) -> None:
    path = SoftwarePath(16 * LBA)
    extents = path.extents(LBA, *[LBA] * 14, LBA)
    if wrong == "swapped":
        extents[4], extents[9] = extents[9], extents[4]
    elif wrong == "shifted":
        extents = [(address - 64 * (0 < i < 15), size) for i, (address, size) in enumerate(extents)]
    path.drops_reads_of_memory = wrong == "dropped"
    with pytest.raises(MediumError, match="did not read GPU memory"):
        prove(path, extents, 0, seed)
    path.close()


def test_memory_beside_the_extents_is_watched(seed: int) -> None:
    class Spills(SoftwarePath):
        def read_direct(self, extents: Sequence[Extent], slba: int) -> None:
            super().read_direct(extents, slba)
            self.memory.array[random.Random(seed).randrange(LBA)] ^= 1

    path = Spills(16 * LBA)
    with pytest.raises(MediumError, match="outside the memory"):
        prove(path, path.extents(16 * LBA), 0, seed)
    path.close()


def test_loads_are_proved_too(seed: int) -> None:
    class Loses(SoftwarePath):
        def read_direct(self, extents: Sequence[Extent], slba: int) -> None:
            pass

    path = Loses(16 * LBA)
    with pytest.raises(MediumError, match="did not write GPU memory"):
        prove(path, path.extents(16 * LBA), 0, seed)
    path.close()


def test_too_little_memory_proves_nothing(seed: int) -> None:
    path = SoftwarePath(2 * LBA)
    with pytest.raises(MediumError, match="three whole blocks"):
        prove(path, path.extents(2 * LBA), 0, seed)
    path.close()


def test_doorbells_are_mapped_by_whole_pages() -> None:
    driver = StandInDriver()
    registers = HostBuffer(8192, hugepages=False)
    doorbells = GpuDoorbells(driver, registers.address + 4096, 72)
    assert (doorbells.address, doorbells.nbytes) == (registers.address + 4096, 4096)
    place = doorbells.to_device(registers.address + 4096 + 68)
    assert place == driver.device_address(registers.address + 4096) + 68
    for address in (registers.address + 4095, registers.address + 8190):
        with pytest.raises(ConfigError, match="not a doorbell"):
            doorbells.to_device(address)
    doorbells.close()


class OnRegisters(MemoryController):
    """Doorbells in a page of their own, as a drive's."""

    def __init__(self, registers: HostBuffer) -> None:
        super().__init__([MiB])
        self.registers = registers
        self.doorbell_count = 0

    @property
    def doorbell_registers(self) -> list[tuple[int, int]]:
        return [(self.registers.address, 4096)]

    def create_queue_pair(
        self, depth: int, *, is_device: bool = False, service_thread: int = 0
    ) -> QueuePair:
        pair = super().create_queue_pair(depth, is_device=is_device, service_thread=service_thread)
        pair.struct.sq_doorbell = self.registers.address + 8 + 8 * self.doorbell_count
        pair.struct.cq_doorbell = pair.struct.sq_doorbell + 4
        self.doorbell_count += 1
        return pair


def test_kernels_ring_registers_where_a_drive_has_them() -> None:
    driver = StandInDriver()
    stream = driver.create_stream()
    for is_drive in (False, True):
        registers = HostBuffer(4096, hugepages=False)
        controller = OnRegisters(registers) if is_drive else MemoryController([MiB])
        tables = TableMemory(driver, MiB)
        queues = DeviceQueues(driver, controller, tables, stream, 2, 8)
        assert queues.ring == ("mmio" if is_drive else "word")
        wait_until(lambda: driver.is_stream_done(stream))  # the tables are on their way
        place = queues.queues[1].qp
        struct = QueuePairStruct.from_address(driver.host(place, ctypes.sizeof(QueuePairStruct)))
        if is_drive:
            start = driver.device_address(registers.address)
            assert (struct.sq_doorbell, struct.cq_doorbell) == (start + 16, start + 20)
        else:
            pair = controller._queue_pairs[1]
            assert struct.sq_doorbell == driver.device_address(pair.struct.sq_doorbell)
        queues.close()
        controller.close()
        tables.close()


def test_a_refused_mapping_says_what_it_needs() -> None:
    driver = StandInDriver()
    driver.fail["cuMemHostRegister"] = 1
    registers = HostBuffer(4096, hugepages=False)
    with pytest.raises(Unsupported, match="PeerMappingOverride"):
        GpuDoorbells(driver, registers.address, 64)
