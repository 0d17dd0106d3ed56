"""SIGTERM ends a command of the command line as Ctrl-C does."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tutti import cli


def test_sigterm_lets_a_command_clear_up(tmp_path: Path) -> None:
    script = """
import os, signal, sys
from tutti import cli, cli_pool

def stopped(*_):
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        print("went on")
    finally:
        os.kill(os.getpid(), signal.SIGTERM)  # `timeout` sends two
        print("cleared up")

cli_pool.layout_of = stopped
code = cli.main(sys.argv[1:])
assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
sys.exit(code)
"""
    command = [sys.executable, "-c", script, "format", tmp_path / "p", "--capacity", "16MiB"]
    ended = subprocess.run(command, capture_output=True, timeout=60, text=True)
    assert (ended.returncode, ended.stdout) == (143, "cleared up\n"), ended.stderr
    assert ended.stderr == "tutti: ended by SIGTERM\n"


def test_a_handler_of_sigterm_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[object] = []
    monkeypatch.setattr(
        "tutti.cli_pool.layout_of", lambda *_: seen.append(signal.getsignal(signal.SIGTERM))
    )
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        cli.main(["format", str(tmp_path / "p"), "--capacity", "16MiB"])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen == [signal.SIG_IGN]
