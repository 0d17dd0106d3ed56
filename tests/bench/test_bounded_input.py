"""What the measuring commands are given is bounded: rates, and files that never end."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from tutti import cli

USAGE, UNUSABLE = 2, 3
RATE = Path(__file__).parents[2] / "docs" / "figures" / "tutti-fig08-leval.csv"


@pytest.mark.parametrize("rate", ["1e30", "1e-30", "inf", "nan", "-1", "0"])
def test_a_rate_that_no_clock_resolves(rate: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", "--systems", "tutti", f"--rates={rate}"]) == USAGE
    said = capsys.readouterr().err
    assert "; give a positive rate" in said or "; pass a number from 0" in said


@pytest.mark.parametrize(
    "options",
    [
        ["simulate", "--scale=nan"],
        ["simulate", "--scale=inf"],
        ["simulate", "--workload-seed=-1"],
        ["simulate", "--warm=-1"],
        ["simulate", f"--requests={2**63}"],
        ["bench", "slack", "--requests=-1"],
        ["bench", "ring", "--batches=-4"],
    ],
    ids=" ".join,
)
def test_a_number_that_no_option_means(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(options) == USAGE
    assert "; pass a number from 0" in capsys.readouterr().err


COMMANDS = {
    "replay": ["replay", "--dir", "{folder}", "--trace", "{fifo}"],
    "simulate": ["simulate", "--workload", "mooncake", "--data", "{fifo}"],
    "workload": ["bench", "workload", "--workload", "mooncake", "--data", "{fifo}"],
    "rows": ["simulate", "--csv", "{fifo}"],
    "calibration": ["simulate", "--calibration", "{fifo}"],
    "profile": ["simulate", "--profile", "{fifo}"],
    "placement": ["bench", "placement", "{fifo}", "--out", "{folder}/out"],
    "slack": ["bench", "slack", "--recorded", "{fifo}"],
    "figures": ["bench", "figures", "rate", "{fifo}", "--out", "{folder}/out"],
    "figure's rows": ["bench", "figures", "rate", str(RATE), "--out", "{folder}/pipe"],
    "made profile": ["profile", "--medium", "{folder}", "--out", "{fifo}"],
    "paths": ["bench", "paths", "--dir", "{folder}", "--out", "{fifo}"],
    "eviction": ["bench", "eviction", "--out", "{fifo}"],
    "residency": ["bench", "residency", "--dir", "{folder}", "--out", "{folder}/pipe.json"],
    "placement's rows": ["bench", "placement", str(RATE), "--out", "{folder}/pipe"],
    "written workload": ["bench", "workload", "--workload", "mooncake", "--out", "{fifo}"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_pipe_without_another_end(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    fifo = tmp_path / "pipe.csv"
    os.mkfifo(fifo)
    words = [word.format(fifo=fifo, folder=tmp_path) for word in COMMANDS[name]]
    codes: list[int] = []

    def run() -> None:
        try:
            codes.append(cli.main(words))
        except SystemExit as stop:
            codes.append(int(stop.code or 0))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    assert codes == [USAGE], "the command waits for the pipe"
    assert "not a regular file" in capsys.readouterr().err
