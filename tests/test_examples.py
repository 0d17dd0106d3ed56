"""Every example runs, and its files are what their readers (systemd, Kubernetes) take."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
BIN = Path(sys.executable).parent


def run(name: str, *arguments: str | Path) -> str:
    command = [sys.executable, str(EXAMPLES / name), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_server_of_threads(tmp_path: Path) -> None:
    said = run("threaded_server.py", tmp_path / "pool")
    assert said.splitlines()[1] == "second round: 96 pages loaded, 96 of them right"


def test_an_asyncio_program(tmp_path: Path) -> None:
    said = run("asyncio_client.py", tmp_path / "pool")
    assert said.splitlines() == [f"request {n}: 8 of 8 pages right" for n in range(4)]


def test_documents_that_are_precomputed(tmp_path: Path) -> None:
    said = run("precompute.py", tmp_path / "pool")
    assert "handbook: 6 pages pinned" in said
    assert said.splitlines()[-3:] == [
        "handbook: 6 pages found",
        "contract: 6 pages found",
        "draft: 0 pages found",
    ]


def test_replicas_share_an_agent(tmp_path: Path) -> None:
    pytest.importorskip("msgspec")
    said = run("replicas.py", tmp_path)
    assert said.splitlines() == [
        "replica 0: 0 pages loaded, 0 of them right",
        "replica 1: 8 pages loaded, 8 of them right",
    ]


@pytest.mark.parametrize("mode", ["hicache", "linker"])
def test_the_scripts_that_start_sglang(mode: str, tmp_path: Path) -> None:
    pools = [str(tmp_path / "a"), str(tmp_path / "b")]
    place = {"POOLS": " ".join(pools), "CAPACITY": "1GiB", "MODEL": "m", "RUN": "echo"}
    environment = {**os.environ, **place, "PATH": f"{BIN}:{os.environ['PATH']}"}
    done = subprocess.run(
        [EXAMPLES / f"sglang_{mode}.sh", "--tp", "2"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    line = done.stdout.splitlines()[0]
    assert "sglang.launch_server" in line and line.endswith("--tp 2")
    assert ("external-linker" in line) == (mode == "linker")
    assert json.dumps(pools) in line


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="needs systemd-analyze")
def test_systemd_takes_the_unit() -> None:
    command = ["systemd-analyze", "verify", "--man=no", str(EXAMPLES / "tutti.service")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    # Without a running systemd the unit's own lines are all that can be judged.
    own = [line for line in done.stderr.splitlines() if "tutti.service" in line]
    assert not own, own


def test_the_manifest_fits_the_schema() -> None:
    yaml = pytest.importorskip("yaml")
    schemas = pytest.importorskip("kubernetes_validate")
    (found,) = yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text())
    for version in ("1.29", "1.34"):  # the schemas that Kubernetes publishes
        schemas.validate(found, version, strict=True)
    spec = found["spec"]["template"]["spec"]
    labels = found["spec"]["template"]["metadata"]["labels"]
    assert found["spec"]["selector"]["matchLabels"].items() <= labels.items()
    mounted = {mount["name"] for c in spec["containers"] for mount in c["volumeMounts"]}
    assert mounted == {volume["name"] for volume in spec["volumes"]}


@pytest.mark.parametrize("name", ["tutti.service", "kubernetes.yaml"])
def test_an_agent_whose_user_has_no_home_keeps_the_measured_speed(name: str) -> None:
    assert "XDG_CACHE_HOME" in (EXAMPLES / name).read_text()
