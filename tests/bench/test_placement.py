"""Traces of an emulated drive: what is read out of them, and what is said about it."""

from __future__ import annotations

import argparse
import csv
import json
from pathlib import Path

import pytest

from tutti import cli
from tutti.base.terminal import progress
from tutti.bench import placement
from tutti.bench.placement import PHASES, Command, read_trace, summarise
from tutti.errors import ConfigError


def event(opcode: str, slba: int, nlb: int, nsid: int = 1) -> str:
    name = " opname 'write'" if opcode == "write" else ""
    size = nlb * 4096
    return f"pci_nvme_{opcode} cid 7{name} nsid {nsid} nlb {nlb} count {size} lba 0x{slba:x}\n"


def trace() -> list[str]:
    lines = [event("write", 5, 1), "pci_nvme_irq_msix raising MSI-X IRQ vector 1\n"]
    for number, phase in enumerate(PHASES):
        lines.append(event("write", number, 1, nsid=2))
        opcode = phase.split()[1]
        step = 256 if phase.startswith("pool") else 5000
        lines += [event(opcode, 0x1000 + step * i, 256) for i in range(4)]
        lines.append(event("read", 9, 1, nsid=2))
    return [*lines, event("write", len(PHASES), 1, nsid=2), event("write", 99, 1)]


def test_a_trace_is_cut_at_its_marks() -> None:
    commands = read_trace(trace())
    assert [c.phase for c in commands] == [p for p in PHASES for _ in range(4)]
    assert commands[1] == Command("pool write", 1, "write", 0x1100, 256)
    assert commands[15] == Command("files read", 3, "read", 0x1000 + 15000, 256)


def test_sequences_are_told_from_jumps() -> None:
    commands = read_trace(trace())
    pool, files = summarise("pool read", commands), summarise("files read", commands)
    assert (pool["sequential"], pool["near"], pool["mean_jump_nbytes"]) == (1.0, 1.0, 0.0)
    assert (files["sequential"], files["near"]) == (0.0, 0.0)
    assert files["mean_jump_nbytes"] == (5000 - 256) * 4096
    assert pool["nbytes"] == files["nbytes"] == 4 * 256 * 4096
    backwards = [Command("pool read", i, "read", 100 - i, 1) for i in range(3)]
    assert summarise("pool read", backwards)["near"] == 0.0
    assert summarise("pool read", [])["commands"] == 0


def test_a_phase_that_is_missing_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no files read"):
        read_trace(trace()[:-7])
    with pytest.raises(ConfigError, match="no pool write"):
        read_trace([])


def test_the_files_that_are_written(tmp_path: Path) -> None:
    (tmp_path / "trace").write_text("".join(trace()))
    args = argparse.Namespace(trace=tmp_path / "trace", out=tmp_path / "figure.b")
    result = placement.run(args, progress)
    assert "emulated" in placement.report(result)
    document = json.loads((tmp_path / "figure.b.json").read_text())
    assert "emulated" in document["label"]
    assert len(document["commands"]) == 16
    with (tmp_path / "figure.b.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 16
    assert all("emulated" in row["label"] for row in rows)
    assert result["plotted"] == (tmp_path / "figure.b.png").exists()


def test_a_trace_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(tmp_path / "missing"), "--out", str(tmp_path / "figure")]
    assert cli.main(["bench", "placement", *words]) == 2
    assert "missing: No such file or directory; correct the path" in capsys.readouterr().err
