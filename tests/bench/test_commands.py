"""Every benchmark that the command line names can be run and shown."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tutti import cli, commands
from tutti.commands.bench import bench_module

_SOURCES = Path(commands.__file__).parent.glob("*.py")
_NAMES = re.findall(r"bench_command\(\s*\"([\w.]+)\"", "".join(p.read_text() for p in _SOURCES))


@pytest.mark.parametrize("name", _NAMES)
def test_a_benchmark_has_what_its_command_calls(name: str) -> None:
    module = bench_module(name)
    missing = [what for what in ("add_arguments", "run", "report") if not hasattr(module, what)]
    assert not missing


def test_the_command_line_names_benchmarks() -> None:
    assert len(_NAMES) > 15


def test_what_the_second_tier_needs_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "mooncake", None)
    assert cli.main(["bench", "second-tier", "--remote", "mooncake://127.0.0.1:1"]) == 3
    assert "pip install -e '.[cluster]'" in capsys.readouterr().err
    assert cli.main(["bench", "second-tier"]) == 3
    assert cli.main(["bench", "second-tier", "--remote", "http://127.0.0.1"]) == 2
