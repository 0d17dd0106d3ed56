"""The runner of the GPU tests: a test that fails, hangs or is cut costs no other."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from gpu import shards

CODES: dict[str, list[tuple[int, str]]] = {
    "a::one": [(0, "1 passed")],
    "a::two": [(1, "1 failed"), (0, "1 passed")],
    "a::three": [(124, "killed after 60 s"), (0, "SKIPPED: needs PyTorch\n1 skipped")],
}


def test_a_run_goes_on_behind_what_passed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = {test: list(codes) for test, codes in CODES.items()}
    ran: list[str] = []

    def run(command: list[str], _: float) -> tuple[int, str]:
        if "--collect-only" in command:
            return 0, "\n".join([*CODES, "3 tests collected"])
        ran.append(command[-1])
        return left[command[-1]].pop(0)

    monkeypatch.setattr(shards, "run", run)
    path = tmp_path / "host_engine.json"

    def result() -> dict[str, Any]:
        content: dict[str, Any] = json.loads(path.read_text())
        return content

    assert shards.main(["--out", str(tmp_path), "--minutes", "0", "host_engine"]) == 1
    assert "no time left" in result()["not_run"]
    assert not ran
    assert shards.main(["--out", str(tmp_path), "host_engine"]) == 1
    assert ran == list(CODES)
    outcomes = [result()["tests"][test]["outcome"] for test in CODES]
    assert outcomes == ["passed", "failed", "hung"]
    assert not result()["passed"]
    assert shards.main(["--out", str(tmp_path), "host_engine"]) == 0
    assert ran[3:] == ["a::two", "a::three"]
    assert result()["passed"]
    assert "PyTorch" in result()["tests"]["a::three"]["why"]


def test_what_hangs_is_killed_with_all_that_it_started() -> None:
    hangs = "import subprocess, sys; print('begun', flush=True); subprocess.run(['sleep', '60'])"
    code, text = shards.run([sys.executable, "-c", hangs], 5.0)
    assert code == 124
    assert "begun" in text
    assert shards.outcome_of(code, text) == "hung"


@pytest.mark.slow
def test_every_shard_has_tests() -> None:
    for name in shards.SHARDS:
        found = shards.tests_of(name)
        is_absent = found[0].endswith("::needs_what_is_absent")  # such as PyTorch
        assert is_absent or len(found) >= 4, found
        assert not [test for test in found if name == "memcheck" and "persistent" in test]


def test_tests_are_found_by_pytest_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a GPU may have neither its plugins nor hypothesis, and no network."""
    (tmp_path / "hypothesis.py").write_text("raise ImportError")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    alone = ("-p", "no:timeout", "-p", "no:hypothesispytest")
    code, text = shards.run(shards.pytest(*alone, "--collect-only", "tests/gpu"), shards.COLLECT_S)
    assert code == 0, text
