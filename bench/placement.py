"""Shows the LBAs of commands to a drive, in the order of submission.

Reads a trace of QEMU's emulated NVMe drive that `tests/qemu/placement.py` records while a guest
stores and loads the same prompts in a pool and in one file per page. Writes STEM.json with every
command, STEM.csv, and STEM.png if matplotlib is installed. The drive is emulated: locations and
order are those of the software, and there are no times.
"""

from __future__ import annotations

import argparse
import csv
import io
import itertools
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from tutti.base.checks import open_regular
from tutti.base.terminal import ProgressFactory, table
from tutti.base.units import KiB
from tutti.bench import environment
from tutti.bench.plots import blank_figure
from tutti.bench.writable import check_writable
from tutti.errors import ConfigError

LABEL = "emulated drive (QEMU)"
PHASES = ("pool write", "pool read", "files write", "files read")
LBA_NBYTES = 4096
_DATA_NSID, _MARK_NSID = 1, 2
# QEMU, hw/nvme/trace-events; nlb is the number of blocks.
_EVENT = re.compile(r"pci_nvme_(read|write) .*?nsid (\d+) nlb (\d+) .*?lba 0x([0-9a-f]+)")


class Command(NamedTuple):
    """One command: its phase, its number there, and the blocks it named."""

    phase: str
    order: int
    opcode: str
    slba: int
    nlb: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", type=Path, help="trace of tests/qemu/placement.py")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="STEM", help="writes STEM.json, .csv and .png"
    )


def run(args: argparse.Namespace, progress: ProgressFactory) -> dict[str, Any]:
    """Reads the trace, sums it up and writes the files."""
    del progress  # done at once
    files = [args.out.with_name(f"{args.out.name}.{kind}") for kind in ("json", "csv", "png")]
    check_writable(*files)
    with io.TextIOWrapper(open_regular(args.trace), errors="replace") as lines:
        commands = read_trace(lines)
    result = {
        "benchmark": "placement",
        "label": LABEL,
        "machine": environment.describe(),
        "lba_nbytes": LBA_NBYTES,
        "phases": [summarise(phase, commands) for phase in PHASES],
        "columns": list(Command._fields),
        "commands": [list(command) for command in commands],
    }
    files[0].write_text(json.dumps(result) + "\n")
    with files[1].open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow((*Command._fields, "label"))
        writer.writerows((*command, LABEL) for command in commands)
    result["plotted"] = plot(commands, files[2])
    return result


def read_trace(lines: Iterable[str]) -> list[Command]:
    """Commands of the data namespace, by phase; a write to LBA n of the other begins phase n.

    Writes during a read phase are those of its file system, and are kept. Raises ConfigError for a
    trace that lacks a phase.
    """
    found: list[Command] = []
    phase, order = "", 0
    for line in lines:
        match = _EVENT.search(line)
        if match is None:
            continue
        opcode, nsid, nlb, slba = match[1], int(match[2]), int(match[3]), int(match[4], 16)
        if nsid == _MARK_NSID and opcode == "write":
            phase, order = PHASES[slba] if slba < len(PHASES) else "", 0
        elif nsid == _DATA_NSID and phase:
            found.append(Command(phase, order, opcode, slba, nlb))
            order += 1
    if missing := [p for p in PHASES if not any(c.phase == p for c in found)]:
        raise ConfigError(f"the trace has no {missing[0]}; record it again with placement.py")
    return found


def summarise(phase: str, commands: Iterable[Command]) -> dict[str, Any]:
    """Number, sizes and continuity of the commands in a phase's own direction.

    sequential: the share of commands that begin where the one before ended. near: within 1 MiB
    after that, which drives and read-ahead treat similarly.
    """
    opcode = phase.rpartition(" ")[2]
    mine = [c for c in commands if c.phase == phase and c.opcode == opcode]
    gaps = [b.slba - (a.slba + a.nlb) for a, b in itertools.pairwise(mine)]
    near_nlb = 1024 * KiB // LBA_NBYTES
    blocks = sum(c.nlb for c in mine)
    return {
        "phase": phase,
        "commands": len(mine),
        "nbytes": blocks * LBA_NBYTES,
        "mean_nbytes": blocks * LBA_NBYTES / len(mine) if mine else 0.0,
        "sequential": sum(gap == 0 for gap in gaps) / len(gaps) if gaps else 0.0,
        "near": sum(0 <= gap <= near_nlb for gap in gaps) / len(gaps) if gaps else 0.0,
        "mean_jump_nbytes": (
            sum(abs(gap) for gap in gaps) * LBA_NBYTES / len(gaps) if gaps else 0.0
        ),
    }


def plot(commands: Iterable[Command], path: Path) -> bool:
    """LBA over the order of submission, a panel for each phase.  False without matplotlib."""
    blank = blank_figure(len(PHASES))
    if blank is None:
        return False
    figure, axes = blank
    for axis, phase in zip(axes, PHASES, strict=True):
        for opcode, colour in (("write", "C1"), ("read", "C0")):
            mine = [c for c in commands if c.phase == phase and c.opcode == opcode]
            axis.plot(
                [c.order for c in mine],
                [c.slba * LBA_NBYTES / 2**20 for c in mine],
                ".",
                markersize=3,
                color=colour,
                label=opcode,
            )
        axis.set(title=f"{phase}\n{LABEL}", xlabel="command, in order", ylabel="place, MiB")
        axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    return True


def report(result: dict[str, Any]) -> str:
    rows = [
        (
            p["phase"],
            p["commands"],
            f"{p['mean_nbytes'] / KiB:.0f} KiB",
            f"{p['sequential']:.0%}",
            f"{p['near']:.0%}",
            f"{p['mean_jump_nbytes'] / KiB:.0f} KiB",
        )
        for p in result["phases"]
    ]
    head = ("phase", "commands", "mean size", "goes on", "within 1 MiB", "mean jump")
    plotted = "" if result["plotted"] else "\nNo picture: matplotlib is not installed."
    return f"{LABEL}; no times.\n\n{table(head, rows)}{plotted}"
