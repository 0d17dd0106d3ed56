"""The command line: every command, its JSON, its exit codes, and what it says when it fails."""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from tutti import cli, store
from tutti.base.units import MiB
from tutti.commands import demo as cli_demo
from tutti.errors import PoolMismatch
from tutti.medium.geometry import BLOCK_NBYTES
from tutti.medium.layout import MODELS, KVLayout

SMALL = ["--model=test-model", "--layers=2", "--kv-heads=1", "--head-dim=64", "--page-size=32"]
LAYOUT = KVLayout.mha(2, 1, 64, 32, "bfloat16", model="test-model")
LEAVES = [name for name, _, _ in cli.COMMANDS]


def run(*argv: str | Path) -> int:
    """Exit code of one command in this process."""
    try:
        return cli.main([str(word) for word in argv])
    except SystemExit as stop:
        return int(stop.code or 0)


def options_of(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """What the commands below a parser take."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                yield from options_of(child)
        else:
            yield action


def test_every_option_has_a_help_text() -> None:
    found = [a for name in LEAVES for a in options_of(cli.build_parser(name.split()))]
    assert len(found) > 200
    bare = [a.option_strings or a.dest for a in found if not (a.help or "").split("(default")[0]]
    assert bare == []


def test_a_path_may_be_called_like_a_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That command's settings do not matter then, nor what it imports."""
    monkeypatch.setenv("TUTTI_SERVE_CAPACITY", "nonsense")
    assert run("info", "serve") == 3
    assert "serve does not exist" in capsys.readouterr().err


class Json:
    """Runs a command with --json: its exit code and the one object on stdout."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *argv: str | Path) -> tuple[int, dict[str, Any]]:
        self._capsys.readouterr()
        code = run(*argv, "--json")
        result = json.loads(self._capsys.readouterr().out)
        assert isinstance(result, dict)
        return code, result


@pytest.fixture
def run_json(capsys: pytest.CaptureFixture[str]) -> Json:
    return Json(capsys)


@pytest.fixture
def pool(tmp_path: Path) -> Path:
    """A clean pool with five objects."""
    path = tmp_path / "pool"
    store.format(path, LAYOUT, "16MiB")
    put(path, 5)
    return path


def put(path: Path, objects: int) -> None:
    with store.open(path) as opened:
        memory = opened.allocate_memory(objects)
        for page in range(objects):
            memory.write(page, np.random.default_rng(page).bytes(LAYOUT.object_nbytes))
        opened.put([bytes([page + 1]) * 16 for page in range(objects)], range(objects)).wait()


@contextmanager
def owned(path: Path) -> Iterator[None]:
    """A pool that another process has open."""
    fd = os.open(path, os.O_RDWR)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    out = capsys.readouterr().out
    for name in LEAVES:
        assert name.split()[0] in out
    for code in ("0", "1", "2", "3", "130", "143"):
        assert f"\n  {code} " in out


@pytest.mark.parametrize("name", LEAVES)
def test_every_command_explains_itself(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert run(*name.split(), "--help") == 0
    out = capsys.readouterr().out
    assert f"tutti {name}" in out[out.index("example:") :]
    assert "--json" in out
    assert "['" not in out, "a list of Python's"
    assert max(map(len, out.splitlines())) <= 120


def test_help_imports_no_command() -> None:
    program = (
        "import sys, tutti.cli\n"
        "try: tutti.cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        "print('numpy' in sys.modules, file=sys.stderr)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert ended.stderr == "False\n"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out.startswith("tutti ")


@pytest.mark.parametrize(
    ("argv", "hint"),
    [
        ([], "COMMAND"),
        (["nonsense"], "nonsense"),
        (["bench"], "WHAT"),
        (["info"], "PATH"),
        (["format", "p"], "--capacity"),
        (["format", "p", "--capacity", "8G", "--model", "tiny"], "GiB"),
        (["format", "p", "--capacity", "0", "--model", "tiny"], "0 bytes"),
        (["format", "p", "--capacity", "16MiB"], "--model"),
        (["format", "p", "--capacity", "16MiB", "--model", "gpt"], "gpt"),
        (["format", "p", "--capacity", "16MiB", "--model", "tiny", "--layers", "2"], "remove"),
        (["format", "p", "--capacity", "16MiB", "--layers", "2"], "--kv-heads"),
        (["format", "p", "--capacity", "16MiB", "--layers", "2", "--mla", "512"], "512:64"),
        (["format", "p", "--capacity", "16MiB", "--layers", "x"], "positive integer"),
        (["format", "p", "--capacity", "16MiB", *SMALL[:-1], "--page-size=1"], "bundle"),
        (["fsck", "p", "--sample", "0"], "positive integer"),
        (["fsck", "p", "--seed", "-1"], "positive integer"),
        (["replay", "--page-size", "0"], "positive integer"),
        (["replay", "--requests", "0"], "positive integer"),
        (["replay", "--requests", "99999999"], "at most 1000000"),
        (["replay", "--requests", "99999999999999999999"], "0 to 2^63 - 1"),
        (["bench", "serve", "hbm", "--model", "m", "--port", "65536"], "1 to 65535"),
        (["bench", "bandwidth", "--seed", "-1"], "positive integer"),
        (["bench", "bandwidth", "--seconds", "nan"], "above 0"),
        (["bench", "bandwidth", "--seconds", "1e400"], "above 0"),
        (["bench", "bandwidth", "--seconds", "0"], "above 0"),
        (["fsck", "p", "--rep"], "--rep"),
        (["fsck", "p", "--nonsense"], "`tutti fsck --help`"),
        (["bench", "ring", "--depth", "3"], "`tutti bench ring --help`"),
    ],
)
def test_wrong_usage(argv: list[str], hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*argv) == 2
    captured = capsys.readouterr()
    assert hint in captured.err
    assert "tutti: " in captured.err
    assert captured.out == ""
    assert run(*argv, "--json") == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["type"] in ("ConfigError", "LayoutError")
    assert hint in error["message"]


def test_an_error_is_one_line_without_a_traceback(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "tutti.cli", "info", str(tmp_path / "missing")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 3
    assert ended.stderr.startswith("tutti: ")
    assert len(ended.stderr.splitlines()) == 1
    assert ended.stdout == ""


def test_format_and_info(tmp_path: Path, run_json: Json) -> None:
    path = tmp_path / "pool"
    code, made = run_json("format", path, "--capacity", "16MiB", *SMALL)
    assert code == 0
    assert made["layout"]["fingerprint"] == LAYOUT.fingerprint.hex()
    assert path.stat().st_size == made["geometry"]["member_nbytes"]
    code, info = run_json("info", path)
    assert code == 0
    assert (info["state"], info["objects"]) == ("clean", 0)
    assert info["geometry"] == made["geometry"]
    put(path, 3)
    assert run_json("info", path)[1]["objects"] == 3


@pytest.mark.parametrize(
    ("model", "object_nbytes"),
    [
        ("llama-3.1-8b", 32 * 2 * 64 * 8 * 128 * 2),
        ("llama-3.1-70b", 80 * 2 * 64 * 8 * 128 * 2),
        ("qwen3-32b", 64 * 2 * 64 * 8 * 128 * 2),
        ("deepseek-v3", 61 * 64 * (512 + 64) * 2),
        ("tiny", 4 * 2 * 64 * 2 * 64 * 2),
    ],
)
def test_named_models(model: str, object_nbytes: int, tmp_path: Path, run_json: Json) -> None:
    assert model in MODELS
    code, made = run_json("format", tmp_path / "p", "--capacity", "320MiB", "--model", model)
    assert (code, made["layout"]["object_nbytes"]) == (0, object_nbytes)


def test_a_latent_layout(tmp_path: Path, run_json: Json) -> None:
    shape = ["--model=test-model", "--layers=2", "--mla=64:64", "--page-size=64", "--dtype=float16"]
    code, made = run_json("format", tmp_path / "p", "--capacity", "16MiB", *shape)
    assert code == 0
    layout = KVLayout.mla(2, 64, 64, 64, "float16", model="test-model")
    assert made["layout"]["fingerprint"] == layout.fingerprint.hex()


def test_format_overwrites_only_by_force(pool: Path, run_json: Json) -> None:
    argv = ["format", pool, "--capacity", "16MiB", *SMALL]
    code, result = run_json(*argv)
    assert (code, result["error"]["type"]) == (3, "PoolExists")
    assert run_json("info", pool)[1]["objects"] == 5
    assert run_json(*argv, "--force", "--prewrite")[0] == 0
    assert run_json("info", pool)[1]["objects"] == 0


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ([], False),
        (["--force"], True),
        (["--force", ""], False),
        (["--force", "S1"], ["S1"]),
        (["--force", "S1", "--force=S 2"], ["S1", "S 2"]),
        (["--force", "--force", "S1"], ["S1"]),
    ],
)
def test_format_is_forced_drive_by_drive(
    given: list[str], wanted: object, monkeypatch: pytest.MonkeyPatch, run_json: Json
) -> None:
    seen: list[object] = []

    def format_nothing(paths: object, *layout: object, force: object, **options: object) -> None:
        seen.append(force)
        raise PoolMismatch("x")

    monkeypatch.setattr(store, "format", format_nothing)
    run_json("format", "a", "b", "--capacity", "16MiB", *SMALL, *given)
    assert seen == [wanted]


def test_several_members(tmp_path: Path, run_json: Json) -> None:
    paths = [tmp_path / name for name in "ab"]
    assert run_json("format", *paths, "--capacity", "32MiB", *SMALL)[0] == 0
    code, info = run_json("info", *paths)
    assert (code, len(info["members"])) == (0, 2)
    assert run_json("fsck", *paths)[0] == 0
    for given, error in (([paths[1], paths[0]], "MemberSwapped"), (paths[:1], "MemberMissing")):
        for command in ("info", "fsck"):
            code, result = run_json(command, *given)
            assert (code, result["error"]["type"]) == (3, error)


def test_info_and_fsck_of_a_pool_in_use(
    pool: Path, run_json: Json, capsys: pytest.CaptureFixture[str]
) -> None:
    with owned(pool):
        code, info = run_json("info", pool)
        assert code == 0
        assert (info["state"], info["owners"]) == ("in use", [os.getpid()])
        for repair in ([], ["--repair"]):
            code, result = run_json("fsck", pool, *repair)
            assert (code, result["error"]["type"]) == (3, "PoolInUse")
        assert run("info", pool) == 0
        assert f"in use by process {os.getpid()}" in capsys.readouterr().out


def test_info_of_a_running_store(pool: Path, run_json: Json) -> None:
    with store.open(pool):
        code, info = run_json("info", pool)
        assert code == 0
        assert (info["members"][0]["state"], info["objects"]) == ("open", None)
        crashed = shutil.copyfile(pool, pool.with_suffix(".crashed"))
    code, info = run_json("info", crashed)
    assert (info["state"], info["owners"], info["objects"]) == ("not closed", [], None)
    assert run("info", crashed) == 0


def test_info_of_what_is_no_pool(tmp_path: Path, run_json: Json) -> None:
    text = tmp_path / "text"
    text.write_text("no pool at all\n" * 1000)
    assert run_json("info", text)[1]["error"]["type"] == "PoolNotFound"
    assert run_json("info", tmp_path)[1]["error"]["type"] == "PoolNotFound"
    os.mkfifo(tmp_path / "fifo")
    assert run_json("info", tmp_path / "fifo")[1]["error"]["type"] == "PoolNotFound"
    text.write_bytes(bytes(2 * BLOCK_NBYTES))
    code, result = run_json("info", text)
    assert (code, result["error"]["type"]) == (3, "PoolNotFound")


def damage(path: Path) -> None:
    """Flips one byte in the payload of the first object."""
    content = path.read_bytes()
    first = np.random.default_rng(0).bytes(LAYOUT.object_nbytes)[:64]
    at = content.index(first)
    with path.open("r+b") as file:
        file.seek(at + 3)
        file.write(bytes([content[at + 3] ^ 1]))


def test_fsck_finds_and_repairs(
    pool: Path, run_json: Json, capsys: pytest.CaptureFixture[str]
) -> None:
    code, report = run_json("fsck", pool)
    assert (code, report["sound"], report["verified"]) == (0, True, 5)
    damage(pool)
    before = pool.read_bytes()
    code, report = run_json("fsck", pool)
    assert (code, report["damaged"], report["repaired"]) == (1, 1, None)
    assert report["findings"][0]["kind"] == "payload"
    assert run("fsck", pool) == 1
    assert bytes([1]).hex() * 16 in capsys.readouterr().out
    assert pool.read_bytes() == before
    code, report = run_json("fsck", pool, "--repair")
    assert (code, report["repaired"]["quarantined"]) == (0, 1)
    code, report = run_json("fsck", pool)
    assert (code, report["quarantined"], report["objects"]) == (0, 1, 4)
    assert run_json("info", pool)[1]["quarantined"] == 1


def test_fsck_samples(pool: Path, run_json: Json) -> None:
    code, report = run_json("fsck", pool, "--sample", "2", "--seed", "7")
    assert (code, report["verified"], report["objects"]) == (0, 2, 5)


def test_probe(tmp_path: Path, run_json: Json, capsys: pytest.CaptureFixture[str]) -> None:
    code, machine = run_json("probe", "--path", tmp_path)
    assert code == 0
    assert [tier["name"] for tier in machine["tiers"]] == ["T3", "T2", "T1", "T0"]
    assert machine["tiers"][3]["available"]
    assert run("probe", "--path", tmp_path) == 0
    assert "T3 is missing:" in capsys.readouterr().out
    assert run_json("probe", "--path", tmp_path / "missing")[0] == 3


def test_nvme_list(run_json: Json, capsys: pytest.CaptureFixture[str]) -> None:
    code, listed = run_json("nvme", "list", "--all")
    assert code == 0
    for device in listed["devices"]:
        assert device["is_free"] == (not device["in_use"] and not device["holds"])
        assert not (device["in_use"] and device["is_free"])
    assert run("nvme", "list") == 0
    assert "NVMe" in capsys.readouterr().out or listed["devices"]


def test_bench_bandwidth(tmp_path: Path, run_json: Json) -> None:
    argv = ["--dir", tmp_path, "--capacity", "32MiB", "--shapes", "2x32KiB", "--gib", "0.01"]
    code, result = run_json("bench", "bandwidth", *argv, "--memory", "16MiB", "--batch", "1MiB")
    assert (code, result["wrong"]) == (0, 0)
    assert list(tmp_path.iterdir()) == []


def test_replay_fails_on_wrong_bytes(
    tmp_path: Path, run_json: Json, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = ["replay", "--dir", tmp_path, "--capacity", "32MiB", "--requests", "4"]
    code, result = run_json(*argv, "--shape", "2x32KiB", "--pages", "32")
    assert (code, result["wrong"]) == (0, 0)
    from tutti.bench import replay

    monkeypatch.setattr(replay, "run", lambda args, progress: {**result, "wrong": 3})
    assert run_json(*argv)[0] == 1


TINY_DEMO = cli_demo._Size(1, 1, 32 * MiB, 4, launches=1)


def test_demo_works_twice_and_cleans_up(
    tmp_path: Path,
    run_json: Json,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(cli_demo, "_QUICK", TINY_DEMO)
    folder = tmp_path / "demo"
    code, result = run_json("demo", "--dir", folder, "--quick")
    assert (code, result["wrong"]) == (0, 0)
    assert json.loads((folder / "results.json").read_text()) == result
    assert {path.name for path in folder.iterdir()} == {"results.json", "results.svg"}
    assert ElementTree.parse(folder / "results.svg").getroot().tag.endswith("svg")
    monkeypatch.setattr("os.getloadavg", lambda: (900.0, 0.0, 0.0))
    assert run("demo", "--dir", folder, "--quick") == 0
    said = capsys.readouterr().out
    assert re.search(r"Tutti loads [\d.]+ times and stores [\d.]+ times as fast as a file", said)
    assert "every byte was correct" in said
    assert "kept this machine busy (load 900.0" in said
    lines = [line for line in said.splitlines() if str(folder) not in line]
    assert max(map(len, lines)) <= 120


def test_a_demo_takes_a_third_of_a_small_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def disk(free_nbytes: int) -> None:
        usage = shutil._ntuple_diskusage(0, 0, free_nbytes)  # type: ignore[attr-defined]
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)

    small = [cli_demo._FULL, cli_demo._QUICK]
    disk(cli_demo._FULL.needs_nbytes * 3)
    assert cli_demo._affordable(tmp_path, small) is cli_demo._FULL
    disk(cli_demo._FULL.needs_nbytes * 3 - 1)
    assert cli_demo._affordable(tmp_path, small) is cli_demo._QUICK
    disk(90 * MiB)
    assert run("demo", "--dir", tmp_path) == 3
