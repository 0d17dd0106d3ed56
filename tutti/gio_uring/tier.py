"""Tiers T0 to T3: how much of the path from drive to GPU the GPU can control on this machine.

`judge_tiers` is a pure function of the facts; for every unavailable tier it lists what is missing
and the remedy. docs/tiers.md describes the tiers, their risks and how to undo them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tutti.errors import Unsupported
from tutti.gio_uring.dma_source import KNOWN_SOURCES, DmaAddressSource, choose_source
from tutti.gio_uring.drives.mounts import text_of

#: The first open driver that maps another device's registers on Linux 6.12 and newer
#: (NVIDIA/open-gpu-kernel-modules, os-mlock.c: follow_pfnmap_start).
_DRIVER_MIN = (570, 133, 7)
_KERNEL_PFNMAP = (6, 12)


@dataclass(frozen=True)
class TierFacts:
    """One tier: location of rings and data, writer of the doorbell, and why it is unavailable.

    is_tried: whether this version was run at this tier on hardware.
    """

    name: str
    rings: str
    data: str
    doorbell: str
    available: bool
    is_tried: bool
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class DriveFacts:
    """Drives of the host. on_vfio: NVMe drives bound to vfio-pci; drives: all NVMe drives."""

    drives: int
    on_vfio: int
    iommu_groups: int
    has_vfio: bool
    has_vfio_pci: bool


@dataclass(frozen=True)
class MappingFacts:
    """Whether a GPU may map another device's registers.

    is_open_driver: None without an NVIDIA driver. driver, kernel: versions as numbers.
    peer_mapping: PeerMappingOverride is set. lockdown: the kernel's mode; "" or "none" if off.
    """

    is_root: bool
    is_open_driver: bool | None
    driver: tuple[int, ...]
    kernel: tuple[int, ...]
    peer_mapping: bool
    lockdown: str


def probe_mapping(root: Path, kernel_release: str, *, is_root: bool) -> MappingFacts:
    """Reads facts about the kernel and the NVIDIA driver from /proc and /sys."""
    version = text_of(root / "proc/driver/nvidia/version")
    found = re.search(r"\b(\d{3}(?:\.\d+)+)\b", version)
    parameters = text_of(root / "proc/driver/nvidia/params")
    lockdown = re.search(r"\[(\w+)\]", text_of(root / "sys/kernel/security/lockdown"))
    return MappingFacts(
        is_root=is_root,
        is_open_driver="Open Kernel Module" in version if version else None,
        driver=_numbers(found[1]) if found else (),
        kernel=_numbers(kernel_release)[:2],
        peer_mapping=bool(re.search(r"PeerMappingOverride=0*1\b", parameters)),
        lockdown=lockdown[1] if lockdown else "",
    )


def judge_tiers(
    drives: DriveFacts,
    mapping: MappingFacts,
    why_no_gpu: str,
    sources: Sequence[DmaAddressSource] = (),
) -> tuple[TierFacts, ...]:
    """T3 to T0, each with all reasons why it is not available.

    why_no_gpu: "" if there is a CUDA device. sources: of DMA addresses of GPU memory.
    """
    t1 = [*_why_no_drive(drives), *_why_no_registers(mapping)]
    if why_no_gpu:
        t1.append(f"needs a CUDA GPU: {why_no_gpu}")
    t2 = list(t1)
    try:
        choose_source(sources)
    except Unsupported:
        t2.append(_why_no_source(sources))
    t3 = [
        *t2,
        "needs rings in GPU memory, which this version does not make; T2 moves the same data",
    ]
    pinned, moved = "pinned host memory", "pinned host memory, then GPU"
    register = "GPU to drive"
    return (
        TierFacts("T3", "GPU memory", "GPU memory", register, False, False, tuple(t3)),
        TierFacts("T2", pinned, "GPU memory", register, not t2, False, tuple(t2)),
        TierFacts("T1", pinned, moved, register, not t1, False, tuple(t1)),
        TierFacts("T0", pinned, moved, "a word in host memory", True, True, ()),
    )


def _why_no_source(sources: Sequence[DmaAddressSource]) -> str:
    given = [f"{source.name} lacks {'; '.join(source.missing())}" for source in sources]
    known = ", ".join(source.name for source in KNOWN_SOURCES)
    return (
        f"needs DMA addresses of GPU memory. {'. '.join([*given, f'Known sources ({known})'])} each"
        " lack a kernel module or do not fit; see docs/tiers.md for what each needs"
    )


def _why_no_drive(drives: DriveFacts) -> list[str]:
    what = "needs an NVMe drive bound to vfio-pci"
    if drives.on_vfio and drives.has_vfio:
        return []
    if not drives.drives:
        return [f"{what}: this machine has no NVMe drive; add one, or pass one through to the VM"]
    if not drives.iommu_groups:
        return [
            f"{what}: the IOMMU is off; switch it on in the firmware, and boot with"
            " intel_iommu=on or amd_iommu=on"
        ]
    if not drives.has_vfio_pci or not drives.has_vfio:
        return [f"{what}: vfio is not loaded; run `modprobe -a vfio-pci vfio_iommu_type1`"]
    return [
        f"{what}: the kernel has all of them; hand a spare one over as docs/vfio.md says, all"
        " on it is lost"
    ]


def _why_no_registers(mapping: MappingFacts) -> list[str]:
    """Reasons why the GPU cannot map a drive's registers (driver: osmemdesc.c, os-mlock.c)."""
    reasons = []
    if not mapping.is_root and not mapping.peer_mapping:
        reasons.append(
            "needs root (CAP_SYS_ADMIN) to map the drive's registers for the GPU, or the NVIDIA"
            " driver's option NVreg_RegistryDwords=PeerMappingOverride=1"
        )
    if mapping.lockdown not in ("", "none"):
        reasons.append(
            f"the kernel's lockdown ({mapping.lockdown}) may forbid it; switch secure boot off"
        )
    is_strict = mapping.kernel >= _KERNEL_PFNMAP
    if mapping.driver and is_strict and not mapping.is_open_driver:
        reasons.append("needs the open NVIDIA kernel modules on this kernel; install those")
    if mapping.driver and is_strict and mapping.driver < _DRIVER_MIN:
        wanted = ".".join(map(str, _DRIVER_MIN))
        reasons.append(f"needs an NVIDIA driver of {wanted} or newer on this kernel; update it")
    return reasons


def _numbers(version: str) -> tuple[int, ...]:
    """(570, 133, 7) of "570.133.07"; ends before the first part that is not a number."""
    leading = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(n) for n in leading[0].split(".")) if leading else ()
