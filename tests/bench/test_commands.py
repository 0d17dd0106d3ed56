"""Every benchmark that the command line names can be run and shown."""

from __future__ import annotations

import json
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
    shown = ("report",) if hasattr(module, "report") else ("HEAD", "rows_of", "notes_of")
    missing = [what for what in ("add_arguments", "run", *shown) if not hasattr(module, what)]
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


@pytest.mark.parametrize("field", ["system", "workload", "points", "rates", "max_rate", "partial"])
def test_a_compared_result_without_a_field_is_named_with_it(
    field: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = {
        "benchmark": "ttft",
        "workload": {"digest": "d", "seed": 1},
        **dict.fromkeys(("start", "client", "arrivals", "seconds")),
        "points": [{"seed": 1}],
        "rates": [{"rate": 1.0, "unstable": False, "partial": False}],
        "max_rate": {},
        "partial": False,
    }
    files = [tmp_path / f"{system}.json" for system in "ab"]
    command = ["bench", "ttft", "--compare", *map(str, files)]
    for file in files:
        file.write_text(json.dumps({**whole, "system": file.stem}))
    assert cli.main(command) == 0
    left = {name: value for name, value in {**whole, "system": "b"}.items() if name != field}
    files[1].write_text(json.dumps(left))
    assert cli.main(command) == 2
    said = capsys.readouterr().err
    assert f"{files[1]} is not a whole result (KeyError('{field}')); measure it again" in said
