"""`make bench`: every result from one commit, and none replaced by a failed run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tutti.bench import store_results
from tutti.bench.store_results import STEPS, Step
from tutti.errors import ConfigError

RING = "tutti.cli bench ring --commands 2000 --repeats 1 --depths 64 --batches 1 --json"
COMMIT = "0123456789ab"


@pytest.fixture(autouse=True)
def _of_one_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_results, "describe", lambda _: {"commit": COMMIT})


def run(tmp_path: Path, *steps: Step, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.setattr(store_results, "STEPS", steps)
    manifest = store_results.run(".", tmp_path, log=lambda _: None)
    assert json.loads((tmp_path / "store-run.json").read_text()) == manifest
    return {step["name"]: step["outcome"] for step in manifest["steps"]}


def test_a_result_of_another_commit_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ring.json").write_text("old")
    steps = (
        Step("ring", RING, prints=True),
        Step("fails", "tutti.cli bench ring --depths 3"),
        Step("none", "tutti.cli --version"),
        Step("replay", "tutti.cli replay --trace {trace}"),
    )
    outcomes = run(tmp_path, *steps, monkeypatch=monkeypatch)
    assert "the checkout became" in outcomes["ring"]
    assert (tmp_path / "ring.json").read_text() == "old"
    assert outcomes["fails"].startswith("not measured: tutti: ")
    assert outcomes["none"] == "not measured: no result was written"
    assert "--trace" in outcomes["replay"]


def test_a_result_replaces_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "step.json").write_text("old")
    result = json.dumps({"machine": {"commit": COMMIT}})
    program = "import sys; from pathlib import Path; "
    program += f"Path(sys.argv[1], 'step.json').write_text({result!r})"
    module = tmp_path / "stepmodule.py"
    module.write_text(program)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    outcomes = run(tmp_path, Step("step", "stepmodule {out}"), monkeypatch=monkeypatch)
    assert outcomes == {"step": "measured"}
    assert json.loads((tmp_path / "step.json").read_text())["machine"]["commit"] == COMMIT


@pytest.mark.parametrize("commit", ["unknown", f"{COMMIT}+dirty"])
def test_numbers_have_a_commit(
    commit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_results, "describe", lambda _: {"commit": commit})
    with pytest.raises(ConfigError, match="commit what has changed"):
        store_results.run(".", tmp_path)
    assert not any(tmp_path.iterdir())


def test_names_are_those_of_the_results(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="choose from bandwidth-fio"):
        store_results.run(".", tmp_path, only=["bandwith-fio"])
    results = Path(__file__).parents[2] / "bench/results"
    known = {path.stem for path in results.glob("*.json")} | {"paths"}
    assert {step.name for step in STEPS} <= known


def test_every_command_is_one_that_exists() -> None:
    """Its parser takes the arguments."""
    from tutti.bench.compare.run import CASES
    from tutti.cli import build_parser

    for step in STEPS:
        words = step.words.format(dir=".", out="o", trace="t").split()
        if words[0] == "tutti.cli":
            build_parser(words[1:]).parse_args(words[1:])
        else:
            assert step.name in CASES
