"""`make bench`: every result from one commit, and none replaced by a failed run."""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tutti.bench import store_results
from tutti.bench.store_results import STEPS, Places, Result, words_of
from tutti.bench.summary import render
from tutti.errors import ConfigError

RING = "tutti.cli bench ring --commands 2000 --repeats 1 --depths 64 --batches 1 --json"
#: What measures no drive, or takes one folder.
ONE_FOLDER = {"threads", "ring", "submit", "slack-file", "decisions", "paths"}
ONE_FOLDER |= {"residency", "residency-moving"}
COMMIT = "0123456789ab"


@pytest.fixture(autouse=True)
def _of_one_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_results, "describe", lambda _: {"commit": COMMIT})


def run(
    tmp_path: Path, *steps: Result, monkeypatch: pytest.MonkeyPatch, **more: Any
) -> dict[str, str]:
    monkeypatch.setattr(store_results, "STEPS", steps)
    manifest = store_results.run(Places(["."], tmp_path), log=lambda _: None, **more)
    assert json.loads((tmp_path / "store-run.json").read_text()) == manifest
    return {step["name"]: step["outcome"] for step in manifest["steps"]}


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module that writes {out}/step.json with the members that are its second argument."""
    text = f"""
import json, sys, time
from pathlib import Path

given = json.loads(sys.argv[2])
try:
    time.sleep(given.pop("sleep_s", 0))
except KeyboardInterrupt:
    Path(sys.argv[0]).with_name("cleaned").write_text("")
    raise
result = {{"machine": {{"commit": "{COMMIT}"}}}} | given
Path(sys.argv[1], "step.json").write_text(json.dumps(result))
Path(sys.argv[1], "step.png").write_text("picture")
"""
    (tmp_path / "stepmodule.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "stepmodule {{out}} {}"


def made(given: dict[str, Any]) -> str:
    return json.dumps(given, separators=(",", ":")).replace("{", "{{").replace("}", "}}")


def test_a_result_of_another_commit_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ring.json").write_text("old")
    steps = (
        Result("ring", RING, 60, prints=True),
        Result("fails", "tutti.cli bench ring --depths 3", 60),
        Result("none", "tutti.cli --version", 60),
        Result("replay", "tutti.cli replay --trace {trace}", 60),
        Result("peers", "tutti.cli bench peers", 60, sglang=True),
    )
    outcomes = run(tmp_path, *steps, monkeypatch=monkeypatch)
    assert "the checkout became" in outcomes["ring"]
    assert (tmp_path / "ring.json").read_text() == "old"
    assert outcomes["fails"].startswith("not measured: tutti: ")
    assert outcomes["none"] == "not measured: no result was written"
    assert "--trace" in outcomes["replay"]
    assert "--sglang" in outcomes["peers"]


def test_a_result_replaces_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    (tmp_path / "step.json").write_text("old")
    step = Result("step", program.format("{{}}"), 60)
    assert run(tmp_path, step, monkeypatch=monkeypatch) == {"step": "measured"}
    assert json.loads((tmp_path / "step.json").read_text())["machine"]["commit"] == COMMIT
    assert not (tmp_path / "step.png").exists(), "no page shows such a picture"
    shown = replace(step, picture="what it shows")
    run(tmp_path, shown, monkeypatch=monkeypatch)
    assert (tmp_path / "step.png").read_text() == "picture"
    (tmp_path / "stepmodule.py").write_text(
        (tmp_path / "stepmodule.py").read_text().replace("step.png", "other.png")
    )
    run(tmp_path, shown, monkeypatch=monkeypatch)
    assert not (tmp_path / "step.png").exists(), "it would be of the old numbers"


@pytest.mark.parametrize(
    "given",
    [
        {"skipped": {"hicache-nixl": "none here", "fio-hugepages": "killed"}},
        {"cells": {"a": {"not_measured": "none here"}, "b": {"speed": 1}}},
        {"cells": {"a": {"not_measured": "none here", "of": "fio"}}},
    ],
)
def test_a_result_that_lacks_a_system_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, given: dict[str, Any]
) -> None:
    (tmp_path / "step.json").write_text("old")
    step = Result("step", program.format(made(given)).replace("none here", "none"), 60)
    outcome = run(tmp_path, step, monkeypatch=monkeypatch)["step"]
    assert outcome.startswith("not measured: ") and outcome.endswith("none")
    assert (tmp_path / "step.json").read_text() == "old"


def test_a_result_without_a_row_of_fio_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    """It names the reason, and what fio stands beside was measured."""
    cells = {"a": {"not_measured": "killed", "of": "fio"}, "b": {"bound": {"not_measured": "too"}}}
    given = {"skipped": {"fio-hugepages": "killed"}, "cells": cells}
    step = Result("step", program.format(made(given)), 60)
    assert run(tmp_path, step, monkeypatch=monkeypatch) == {"step": "measured"}
    assert json.loads((tmp_path / "step.json").read_text())["cells"] == cells


def test_a_step_ends_with_its_time_and_removes_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    slow = Result("step", program.format(made({"sleep_s": 60})), 4)
    outcomes = run(tmp_path, slow, monkeypatch=monkeypatch)
    assert outcomes == {"step": "not measured: no end in 4 s"}
    assert (tmp_path / "cleaned").exists()
    outcomes = run(tmp_path, slow, monkeypatch=monkeypatch, limit_s=0)
    assert outcomes == {"step": "not measured: the time for all results was over"}


def test_a_run_that_is_cut_off_leaves_the_manifest_of_its_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    manifest = tmp_path / "store-run.json"
    manifest.write_text("of another run")
    steps = (Result("step", program.format("{{}}"), 60), Result("late", "module", 60))
    monkeypatch.setattr(store_results, "STEPS", steps)

    def cut_off(line: str) -> None:
        named = [step["name"] for step in json.loads(manifest.read_text())["steps"]]
        assert named == (["step"] if line.startswith(("step: ", "late")) else [])
        if line.startswith("late"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store_results.run(Places([str(tmp_path)], tmp_path), log=cut_off)
    (done,) = json.loads(manifest.read_text())["steps"]
    assert (done["outcome"], done["commit"]) == ("measured", COMMIT)


def test_a_run_of_some_results_leaves_the_manifest_of_the_whole_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    manifest = tmp_path / "store-run.json"
    manifest.write_text("of the whole run")
    step = Result("step", program.format("{{}}"), 60)
    monkeypatch.setattr(store_results, "STEPS", (step, Result("other", "module", 60)))
    (done,) = store_results.run(Places(["."], tmp_path), only=["step"])["steps"]
    assert (done["name"], done["outcome"]) == ("step", "measured")
    assert manifest.read_text() == "of the whole run"
    assert json.loads((tmp_path / "step.json").read_text())


def test_the_page_names_the_results_that_were_measured_again_after_the_run() -> None:
    root = Path(__file__).parents[2]
    results, page = root / "bench/results", (root / "docs/results.md").read_text()
    (of_the_run,) = (part for part in page.split("\n\n") if "`store-run.json`" in part)
    for step in json.loads((results / "store-run.json").read_text())["steps"]:
        if step["outcome"] == "measured":
            result = json.loads((results / f"{step['name']}.json").read_text())
            again = result["machine"]["commit"] != step["commit"]
            assert (f"`{step['name']}`" in of_the_run) == again, step["name"]


def test_a_step_runs_with_the_python_that_has_sglang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    """As `make bench` calls it; the Makefile's command has both folders that SGLang needs."""
    step = Result("step", program.format("{{}}"), 60, sglang=True)
    monkeypatch.setattr(store_results, "STEPS", (step,))
    monkeypatch.delenv("PYTHONPATH")
    python = f"env PYTHONPATH={tmp_path} {sys.executable}"
    command = ["--dir", ".", "--out", str(tmp_path), "--sglang", python]
    assert store_results.main(command) == 0
    makefile = (Path(__file__).parents[2] / "Makefile").read_text().replace("\\\n", "")
    assert '--sglang "$(CPU_SGLANG)"' in makefile
    (words,) = (line for line in makefile.splitlines() if line.startswith("CPU_SGLANG_PATH :="))
    assert "/build/view:" in words and "/tests/sglang/stand_in" in words


@pytest.mark.parametrize("commit", ["unknown", f"{COMMIT}+dirty"])
def test_numbers_have_a_commit(
    commit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_results, "describe", lambda _: {"commit": commit})
    with pytest.raises(ConfigError, match="commit what has changed"):
        store_results.run(Places(["."], tmp_path))
    assert not any(tmp_path.iterdir())


def test_what_is_in_the_way_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_results, "STEPS", ())
    (tmp_path / "compare.tutti").touch()
    said: list[str] = []
    store_results.run(Places([str(tmp_path)], tmp_path), log=said.append)
    assert len(said) == 1 and said[0].startswith(f"{tmp_path}/compare.tutti is there")


def test_names_are_those_of_the_results(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="choose from bandwidth-fio, files, layerwise-fio"):
        store_results.run(Places(["."], tmp_path), only=["bandwith-fio"])
    pages = (Path(__file__).parents[2] / "docs").glob("results*.md")
    shown = set(re.findall(r"<!-- result: (.+) -->", "".join(page.read_text() for page in pages)))
    assert {step.name for step in STEPS} <= shown, "every result has a place on a page"


def test_bandwidth_of_prompts_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tutti import cli

    (step,) = (step for step in STEPS if step.name == "contexts")
    words = words_of(step, Places([str(tmp_path)], tmp_path), "")[1:]
    cut = words.index("--contexts")
    assert [int(word) for word in words[cut + 1 :]] == [1024 << i for i in range(8)]
    small = ["--contexts", "64", "128", "--seconds", "0.01", "--memory", "8MiB"]
    assert cli.main([*words[:cut], *small, "--capacity", "32MiB"]) == 0
    (tmp_path / "contexts.json").write_text(capsys.readouterr().out)
    page = "<!-- result: contexts -->\n<!-- end -->"
    assert "| 128 tokens a prompt |" in render(page, tmp_path)


def test_every_command_is_one_that_exists() -> None:
    """Its parser takes the arguments."""
    from tutti.bench.compare import run as compare
    from tutti.cli import build_parser

    for step in STEPS:
        words = words_of(step, Places(["left", "right"], Path("o"), "t"), "o")
        several = "{dirs}" in step.words
        assert ("right" in words) is several and several is (step.name not in ONE_FOLDER)
        if words[0] == "tutti.cli":
            build_parser(words[1:]).parse_args(words[1:])
        else:
            parser = argparse.ArgumentParser()
            compare.add_arguments(parser)
            assert parser.parse_args(words[1:]).cases == [step.name]
