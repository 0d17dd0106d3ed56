"""The whole chain on the CPU: recipe, SGLang's server, HTTP, the store, results, figures.

The model has four layers of random weights, so that no time here says anything about a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sglang_server import ADMIN_KEY, HERE, Server, take_turn

from tutti.base.terminal import progress
from tutti.bench.figures import run as figures
from tutti.bench.figures.data import read_csv
from tutti.bench.ttft import run as ttft
from tutti.bench.ttft.output import read_result
from tutti.bench.ttft.recipes import RECIPES, RecipeOptions
from tutti.integration.sglang.launch import refused_arguments

# Starting a server takes 10 s on an idle machine, and one test waits for another's server.
pytestmark = [pytest.mark.timeout(900)]

PAGE = 16
#: Where SGLang counts hits in the store: a linker's as those of a host cache.
SYSTEMS = {"tutti-hicache": "storage_tokens", "tutti-linker": "host_tokens"}
#: What SGLang needs on a CPU; nothing of it belongs to a recipe.
ON_CPU = (
    "--device cpu --attention-backend torch_native --skip-tokenizer-init --context-length 2048 "
    "--max-total-tokens 4096 --mem-fraction-static 0.3"
)
_UP_S = 300.0
# Fifteen documents of about 390 tokens: more than the engine's 4096, far less than the store.
WORKLOAD = ["--workload", "leval-synthetic", "--tasks", "tpo", "--scale", "0.1"]


def measured(port: int, out: Path, *argv: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    ttft.add_arguments(parser)
    common = ["--url", f"http://127.0.0.1:{port}", "--api-key", ADMIN_KEY]
    common += ["--vocabulary", "1000", "--out", str(out), "--note", "CPU, random weights"]
    return ttft.run(parser.parse_args([*common, *argv]), progress)


@pytest.mark.parametrize("system", SYSTEMS)
def test_hits_come_from_the_store_and_the_server_says_so(
    system: str, tiny_model: Path, tmp_path: Path
) -> None:
    options = RecipeOptions(str(tiny_model), PAGE, 10**9, 64 << 20, tmp_path / "pools")
    launch = RECIPES[system].make(options)
    assert not launch.daemon
    with Server(tiny_model, tmp_path / "log", launch.arguments, env=launch.env) as server:
        sweep = measured(
            server.port,
            tmp_path / "sweep",
            *(*WORKLOAD, "--requests", "16", "--start", "populated"),
            *("--rates", "8", "--seeds", "1", "--system", system, "--slo", "ttft:20000"),
        )
        prefix = measured(
            server.port,
            tmp_path / "prefix",
            *("--prefix-tokens", "0", "992", "--total-tokens", "1024"),
            *("--repeats", "1", "--system", system),
        )
        counters = server.metrics()
    _check_sweep(sweep, system)
    assert read_result(tmp_path / "sweep") == json.loads(json.dumps(sweep))
    assert [row["failed"] for row in prefix["rows"]] == [0, 0]
    cached = [row["cached_tokens"] for row in prefix["rows"]]
    assert cached == [0, 992], "exactly the whole pages that were stored"
    assert counters["hit_pages_total"] >= sum(cached) // PAGE, "Tutti counted them, too"
    _check_figures(tmp_path, system)


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_one_command_starts_each_system_and_its_storage_hits(
    name: str, tiny_model: Path, tmp_path: Path
) -> None:
    if needs := RECIPES[name].needs:
        pytest.importorskip(needs, reason=f"{needs} is not installed here")
    with served(name, tiny_model, tmp_path) as port:
        prefix = measured(
            port,
            tmp_path / "prefix",
            *("--prefix-tokens", "0", "1024", "--total-tokens", "1280"),
            *("--repeats", "1", "--system", name),
        )
    # A flush empties what is in memory; what was stored is found again, to the last page.
    cached = [row["cached_tokens"] for row in prefix["rows"]]
    assert cached == [0, 1024 if RECIPES[name].uses_storage else 0]
    facts = json.loads((tmp_path / "info.json").read_text())
    assert facts["system"] == name and facts["server"]["page_size"] == PAGE
    assert facts["server"]["enable_cache_report"] and "--device cpu" in facts["launched"]


@contextmanager
def served(name: str, model: Path, folder: Path) -> Iterator[int]:
    """The port of a server that `tutti bench serve` has started, and ends."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    command = [sys.executable, "-m", "tutti.cli", "bench", "serve", name, "--model", str(model)]
    command += ["--dir", str(folder / "kv"), "--capacity", "64MiB", "--dram", "1GB"]
    command += ["--page-size", str(PAGE), "--port", str(port), "--info", str(folder / "info.json")]
    path = os.pathsep.join(filter(None, [str(HERE / "stand_in"), os.environ.get("PYTHONPATH")]))
    lock, log = take_turn(), (folder / "log").open("w+")
    process = subprocess.Popen(
        [*command, "--json", f"--more={ON_CPU}"],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=log,
    )
    try:
        deadline = time.monotonic() + _UP_S
        while not (folder / "info.json").exists():
            if process.poll() is not None or time.monotonic() > deadline:
                log.seek(0)
                pytest.fail(f"{name} does not start:\n{log.read()[-4000:]}")
            time.sleep(0.2)
        yield port
    finally:
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=120)
        log.close()
        os.close(lock)
    assert process.returncode == 0 and json.loads(output)["ended"] == "interrupted"
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0, "nothing stays behind"


@pytest.mark.parametrize("name", RECIPES)
def test_the_installed_sglang_takes_every_recipe(name: str, tmp_path: Path) -> None:
    options = RecipeOptions("some/model", PAGE, 10**9, 64 << 20, tmp_path / "pools")
    assert refused_arguments(RECIPES[name].make(options).arguments) == ""


def _check_sweep(result: dict[str, Any], system: str) -> None:
    assert not result["partial"] and result["system"] == system
    assert result["server"]["page_size"] == PAGE, "the server's own account of itself"
    assert "api_key" not in json.dumps(result)
    for point in result["points"]:
        assert point["failed"] == 0, point["errors"]
        # A document's pages were flushed from the engine: the first question about it finds them
        # in the store, later ones find them in the engine.
        assert point["cached"][SYSTEMS[system]] > 0, point["cached"]
        assert point["cached"]["hit_rate"] > 0.5, point["cached"]
        assert point["slo"]["ttft:20000"]["attainment"] == 1


def _check_figures(tmp_path: Path, system: str) -> None:
    for kind, source in (("rate", "sweep"), ("prefix", "prefix"), ("hit-rate", "prefix")):
        parser = argparse.ArgumentParser()
        figures.add_arguments(parser)
        argv = [kind, str(tmp_path / source), "--out", str(tmp_path / kind)]
        figures.run(parser.parse_args(argv), progress)
        rows = read_csv(tmp_path / f"{kind}.csv", kind)
        assert {row["system"] for row in rows} == {system}
