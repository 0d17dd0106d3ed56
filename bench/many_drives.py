"""Models the CPUs that four and eight data-centre drives need, for a page of the documentation.

Every cost comes from a result, so that the model changes with the results.  It assumes that CPU
capacity scales with the number of processors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tutti.base.units import KiB, MiB
from tutti.bench.simulate.hardware import machine

#: The simulator's two drives, of which the model uses one each; the GPU does not matter here.
_PAIR = ("2x D7-PS1010", "H100")
_OBJECTS = {"bandwidth-fio": "32x256KiB", "cpu-fio": "1x256KiB"}
_WORKERS = 2  # digest workers for each drive
_Read = Callable[[str], dict[str, Any]]


def tables(read: _Read) -> str:
    """The tables, in Markdown.  read: returns a result by its name."""
    rate = machine(*_PAIR).drive.read_bytes_per_s / 2 / 1e9
    command_us = read("threads")["cpu_ns_per_command"] / 1e3
    digest = _cpu_s_per_gb(read("digest")["cells"]["1 GiB"])
    hugepages, ordinary = (_reads(read, pages) for pages in ("huge", "ordinary"))
    engine = [rate * 1e9 / size * command_us / 1e6 for size in (MiB, 64 * KiB)]
    service = [commands + rate * hugepages[0] for commands in engine]
    digests = rate * digest
    alone = service[1] + digests
    verified = (rate / max(1, service[0], digests / _WORKERS), rate / max(1, alone))
    one = [
        ("", "1 MiB commands", "64 KiB commands"),
        ("commands per second", *(f"{rate * 1e9 / size:,.0f}" for size in (MiB, 64 * KiB))),
        (f"engine, {command_us:.3f} us per command", *(f"{cores:.3f} cores" for cores in engine)),
        (
            f"io_uring on hugepages, {hugepages[0]:.3f} CPU-s/GB",
            f"{rate * hugepages[0]:.2f} cores",
            f"{rate * hugepages[0]:.2f} cores, more where requests are not merged",
        ),
        ("service thread in all", *(f"{cores:.2f} cores" for cores in service)),
        (
            f"digests, {digest:.3f} CPU-s/GB",
            f"{digests:.2f} cores, by workers",
            f"{digests:.2f} cores, by the service thread",
        ),
        (
            "verified rate of one drive",
            f"{verified[0]:.1f} GB/s",
            f"{verified[1]:.1f} GB/s: one thread does the work of {alone:.2f} cores",
        ),
    ]
    several = [
        ("", "4 drives", "8 drives"),
        ("data", *(f"{n * rate:.0f} GB/s" for n in (4, 8))),
        ("service threads (cores in use)", *(f"{n} ({n * service[0]:.1f})" for n in (4, 8))),
        (
            "digest workers by default (cores in use)",
            *(f"{n * _WORKERS} ({n * digests:.1f})" for n in (4, 8)),
        ),
        (
            "memory traffic, DMA in and one read by the digest",
            *(f"{2 * n * rate:.0f} GB/s" for n in (4, 8)),
        ),
    ]
    cores = [engine[0] + rate * cost for cost in ordinary]
    slow = (
        f"On ordinary pages the service thread of a drive has the work of {cores[0]:.2f} cores"
        f" (objects of {_OBJECTS['bandwidth-fio']}) or {cores[1]:.2f} ({_OBJECTS['cpu-fio']}), so"
        f" it reaches {rate / max(1, cores[0]):.1f} or {rate / max(1, cores[1]):.1f} GB/s."
    )
    return "\n\n".join([_markdown(one), _markdown(several), slow])


def _reads(read: _Read, pages: str) -> list[float]:
    """CPU-s/GB of loads into pages of this kind, for objects of many slices and of one."""
    return [
        _cpu_s_per_gb(read(name)["cells"][f"retrieve {shape}, {pages} pages"])
        for name, shape in _OBJECTS.items()
    ]


def _cpu_s_per_gb(cell: dict[str, Any]) -> float:
    return float(cell["a"]["median_cpu_s_per_gb"])


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
