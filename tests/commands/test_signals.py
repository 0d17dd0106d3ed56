"""SIGTERM and SIGHUP end a command of the command line as Ctrl-C does."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tutti import cli


@pytest.mark.parametrize(
    ("number", "message"),
    [(signal.SIGTERM, "terminated by SIGTERM"), (signal.SIGHUP, "the terminal was closed")],
)
def test_a_signal_lets_a_command_clear_up(number: int, message: str, tmp_path: Path) -> None:
    script = f"""
import os, signal, sys
from tutti import cli
from tutti.commands import pool as cli_pool

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests' parent may ignore it

def stopped(*_):
    try:
        os.kill(os.getpid(), {int(number)})
        print("went on")
    finally:
        os.kill(os.getpid(), {int(number)})  # `timeout` sends two
        os.kill(os.getpid(), signal.SIGHUP)  # and a terminal may close as well
        print("cleared up")

cli_pool.layout_of = stopped
code = cli.main(sys.argv[1:])
assert signal.getsignal(signal.SIGTERM) is signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
sys.exit(code)
"""
    command = [sys.executable, "-c", script, "format", tmp_path / "p", "--capacity", "16MiB"]
    ended = subprocess.run(command, capture_output=True, timeout=60, text=True)
    assert (ended.returncode, ended.stdout) == (128 + number, "cleared up\n"), ended.stderr
    assert ended.stderr == f"tutti: {message}\n"


def test_a_handler_of_sigterm_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[object] = []
    monkeypatch.setattr(
        "tutti.commands.pool.layout_of", lambda *_: seen.append(signal.getsignal(signal.SIGTERM))
    )
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        cli.main(["format", str(tmp_path / "p"), "--capacity", "16MiB"])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen == [signal.SIG_IGN]
