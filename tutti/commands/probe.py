"""`tutti probe`: the tiers that work on this machine, and what blocks the others."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from tutti.arguments import options
from tutti.base.terminal import facts, table
from tutti.base.units import format_nbytes
from tutti.commands.outcome import CommandResult
from tutti.gio_uring.probe import MachineFacts, TransferMemoryFacts, probe_machine
from tutti.gio_uring.tier import TierFacts
from tutti.machine import scheduler_form

_DESCRIPTION = """\
Shows which tiers work on this machine and what blocks the others. No setting is changed; one block
of an unnamed file is written to test direct I/O."""
_EXAMPLE = """\
example:
  tutti probe
  tutti probe --path /mnt/nvme"""
_BACKINGS = {
    "hugetlb": "reserved hugepages (hugetlb)",
    "thp": "transparent hugepages",
    "pages": "ordinary pages: one descriptor per 4 KiB, which costs bandwidth",
}
_SCHEDULERS = {
    "compiled": "compiled",
    "interpreted": "interpreted: a decision takes three times as long; install Tutti with mypy",
}


def add_probe(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = _DESCRIPTION, _EXAMPLE
    what = "folder, file or block device on the disk to probe (default: this folder)"
    options(parser)("--path", ".", what)
    parser.set_defaults(run=run_probe)


def run_probe(args: argparse.Namespace) -> CommandResult:
    machine = probe_machine(args.path)
    facts_of = {**asdict(machine), "scheduler": scheduler_form()}
    return CommandResult(facts_of, _text(machine))


def _verdict(tier: TierFacts) -> str:
    if not tier.available:
        return "missing"
    return "available" if tier.is_tried else "possible, but not run on hardware"


def _text(machine: MachineFacts) -> str:
    root = "root" if machine.is_root else "not root"
    uring = machine.uring
    works = f"works, with {', '.join(uring.features)}"
    rows: list[tuple[str, object]] = [
        ("machine", f"{machine.kernel}, {machine.machine}, {machine.cpus} CPUs, {root}"),
        ("digests", f"XXH3 with {machine.digest_isa} instructions"),
        ("scheduler", _SCHEDULERS[scheduler_form()]),
        ("io_uring", works if uring.available else f"refused: {uring.reason}"),
        *_memory_rows(machine.memory),
        ("files", _direct_text(machine)),
        ("IOMMU", _iommu_text(machine)),
        ("GPU", ", ".join(machine.cuda.devices) or machine.cuda.reason),
    ]
    parts = [facts(rows)]
    namespaces = [
        (c.name or "-", c.driver, c.address, c.model, n.name, format_nbytes(n.nbytes), n.lba_nbytes)
        for c in machine.controllers
        for n in c.namespaces
    ]
    if namespaces:
        headers = ("NVMe", "driver", "address", "model", "namespace", "size", "LBA")
        parts.append(table(headers, namespaces))
    else:
        parts.append(f"NVMe: {len(machine.controllers)} controllers, no namespaces.")
    parts.append(
        table(
            ("tier", "rings in", "data to", "doorbell", "verdict"),
            [(t.name, t.rings, t.data, t.doorbell, _verdict(t)) for t in machine.tiers],
        )
    )
    parts += [
        "\n".join([f"{tier.name} is missing:", *(f"  * {reason}" for reason in tier.reasons)])
        for tier in machine.tiers
        if not tier.available
    ]
    return "\n\n".join(parts)


def _memory_rows(memory: TransferMemoryFacts) -> list[tuple[str, object]]:
    limit = "unlimited" if memory.memlock_nbytes < 0 else format_nbytes(memory.memlock_nbytes)
    pools = [
        f"{total} of {format_nbytes(nbytes)} ({free} free)"
        for nbytes, total, free in memory.hugetlb
    ]
    refusal = memory.collapse_refusal
    collapse = f"cannot be collapsed to hugepages: {refusal}" if refusal else "can be collapsed"
    return [
        ("memlock", limit),
        ("hugepages", f"reserved: {', '.join(pools) or 'none'}; transparent: {memory.transparent}"),
        ("", f"allocated memory is backed by {_BACKINGS[memory.backing]}"),
        ("", f"touched memory {collapse}"),
    ]


def _direct_text(machine: MachineFacts) -> str:
    direct = machine.direct
    where = f"{direct.path} ({direct.filesystem})"
    if not direct.direct:
        return f"{where}: buffered, {direct.reason}"
    if not direct.offset_alignment:
        return f"{where}: direct I/O; the kernel does not report its alignment"
    memory, offset = direct.memory_alignment, direct.offset_alignment
    return f"{where}: direct I/O; memory aligned to {memory}, offsets to {offset} bytes"


def _iommu_text(machine: MachineFacts) -> str:
    iommu = machine.iommu
    vfio = "vfio is available" if iommu.vfio else "no vfio"
    module = "vfio-pci is loaded" if iommu.vfio_pci else "vfio-pci is not loaded"
    return f"{iommu.groups} groups, {vfio}, {module}"
