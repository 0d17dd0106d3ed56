"""The whole chain on the CPU: recipe, SGLang's server, HTTP, the store, results, figures.

The model has four layers of random weights, so that no time here says anything about a GPU.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang.srt", reason="SGLang is not installed here")

from sglang_server import ADMIN_KEY, Server

from tutti.bench import figures, ttft
from tutti.bench.figures_data import read_csv
from tutti.bench.recipes import RECIPES, Options, launch_of
from tutti.bench.ttft_output import read_result
from tutti.integration.sglang.launch import refused_arguments
from tutti.terminal import progress

# Starting a server takes 10 s on an idle machine, and one test waits for another's server.
pytestmark = [pytest.mark.timeout(900)]

PAGE = 16
#: Where SGLang counts hits in the store: a linker's as those of a host cache.
SYSTEMS = {"tutti-hicache": "storage_tokens", "tutti-linker": "host_tokens"}
# Fifteen documents of about 390 tokens: more than the engine's 4096, far less than the store.
WORKLOAD = ["--workload", "leval-synthetic", "--tasks", "tpo", "--scale", "0.1"]


def measured(server: Server, out: Path, *argv: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    ttft.add_arguments(parser)
    common = ["--url", f"http://127.0.0.1:{server.port}", "--api-key", ADMIN_KEY]
    common += ["--vocabulary", "1000", "--out", str(out), "--note", "CPU, random weights"]
    return ttft.run(parser.parse_args([*common, *argv]), progress)


@pytest.mark.parametrize("system", SYSTEMS)
def test_hits_come_from_the_store_and_the_server_says_so(
    system: str, tiny_model: Path, tmp_path: Path
) -> None:
    options = Options(str(tiny_model), PAGE, 10**9, 64 << 20, tmp_path / "pools")
    launch = launch_of(system, options)
    assert not launch.daemon
    with Server(tiny_model, tmp_path / "log", launch.arguments, env=launch.env) as server:
        sweep = measured(
            server,
            tmp_path / "sweep",
            *(*WORKLOAD, "--requests", "16", "--start", "populated"),
            *("--rates", "8", "--seeds", "1", "--system", system, "--slo", "ttft:20000"),
        )
        prefix = measured(
            server,
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


@pytest.mark.parametrize("name", RECIPES)
def test_the_installed_sglang_takes_every_recipe(name: str, tmp_path: Path) -> None:
    options = Options("some/model", PAGE, 10**9, 64 << 20, tmp_path / "pools")
    assert refused_arguments(launch_of(name, options).arguments) == ""


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
