"""`tutti simulate`: what it says, and what it says to wrong arguments and calibrations."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tutti import cli
from tutti.bench.simulate import run as simulate
from tutti.bench.simulate.calibration import FILE, gpu_of, load_calibration
from tutti.bench.traces import Synthetic, generate
from tutti.errors import ConfigError
from tutti.scheduler.profile import TableProfile, estimated_document

CALIBRATION = load_calibration()


def simulated(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any]:
    code = cli.main(["simulate", "--json", *arguments])
    return code, json.loads(capsys.readouterr().out)


def test_the_command_says_that_it_is_simulated(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    trace, csv = tmp_path / "trace.jsonl", tmp_path / "ttft.csv"
    lines = [request.to_json() for request in generate(Synthetic(requests=40))]
    trace.write_text("\n".join(lines))
    arguments = ["--workload", "mooncake", "--data", str(trace), "--systems", "gds", "tutti"]
    code, result = simulated(capsys, *arguments, "--servers", "4", "--csv", str(csv))
    assert code == 0 and result["source"] == "simulated" and len(result["rows"]) == 2
    assert all(row["speed"]["requests_per_s"] > 0 for row in result["rows"])
    assert "simulated" in csv.read_text() and "simulated" in simulate.report(result)
    code, result = simulated(capsys, *arguments, "--rates", "1", "2", "--seeds", "2")
    assert code == 0 and [row["rate"] for row in result["rows"][:4]] == [1, 1, 2, 2]


def test_numbers_have_intervals_over_settings_that_nobody_publishes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    csv = tmp_path / "ttft.csv"
    words = ("--workload", "leval-synthetic", "--requests", "40", "--rates", "0.5")
    code, result = simulated(capsys, *words, "--systems", "tutti", "--csv", str(csv))
    assert code == 0
    [row] = result["rows"]
    assert row["settings"] == 1 + len(result["varied"]) == 10 and not row["settings_unstable"]
    for name, (low, high) in row["intervals"].items():
        assumed = row[name] if name in row else row[name.rpartition("_")[0]][name.split("_")[-1]]
        assert low <= assumed <= high, name
    # Half as many requests leave other pages waiting, and keep the drives busy for another share.
    assert {"backlog_pages_max", "medium_read_busy", "medium_write_busy"} <= row["intervals"].keys()
    low, high = row["intervals"]["medium_write_busy"]
    assert low < high and f"[{low:.1%}, {high:.1%}]" in simulate.report(result)
    low, high = row["intervals"]["ttft_ms_mean"]
    assert low < high and f"[{low:.0f}, {high:.0f}]" in simulate.report(result)
    [point] = csv.read_text().splitlines()[1:]
    assert f"{low},{high}" in point
    _, once = simulated(capsys, *words, "--systems", "tutti", "--as-assumed")
    assert once["rows"][0]["ttft_ms"] == row["ttft_ms"] and "intervals" not in once["rows"][0]
    assert "[" not in simulate.report(once) and "(queue grows)" not in simulate.report(once)
    once["rows"][0]["unstable"] = True
    assert "tutti (queue grows)" in simulate.report(once)
    assert "do not compare them" in simulate.report(once)


def test_a_system_waits_for_whole_loads_or_for_layers_by_its_suffix(
    capsys: pytest.CaptureFixture[str],
) -> None:
    systems = ("dram", "dram-layers", "dram-whole", "ssd", "ssd-layers")
    words = ("--workload", "leval-synthetic", "--requests", "60", "--rates", "0.3", "--as-assumed")
    few = ("--hbm-tokens", "20000", "--warm", "30")
    code, result = simulated(capsys, *words, *few, "--systems", *systems)
    waits = {row["system"]: row["bubble_s"] for row in result["rows"]}
    assert code == 0 and tuple(waits) == systems
    assert waits["dram-layers"] == waits["dram"] < waits["dram-whole"]
    assert waits["ssd-layers"] < waits["ssd"]


def test_a_trace_has_an_order_and_answers_of_its_own(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """And arrivals, unless a rate is given: then they are drawn again four times."""
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(r.to_json() for r in generate(Synthetic(requests=40))))
    words = ("--workload", "mooncake", "--data", str(trace), "--systems", "tutti")
    for software, settings in (("sglang", 2), ("vllm-0.17", 3)):  # sglang's steps are published
        for rates, drawn in ((), 0), (("--rates", "1"), 4):
            _, result = simulated(capsys, *words, "--software", software, *rates)
            assert result["rows"][0]["settings"] == settings + drawn


def test_half_of_a_workload_must_outlast_the_warm_up() -> None:
    words = ["simulate", "--requests", "8", "--rates", "1", "--warm", "5"]
    assert cli.main(words) == 2
    assert cli.main([*words, "--as-assumed", "--systems", "hbm"]) == 0


def test_a_small_gpu_memory_keeps_fewer_prefixes_without_a_store(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    csv = tmp_path / "ttft.csv"
    common = ("--workload", "sharegpt-synthetic", "--requests", "300", "--rates", "2")
    common += ("--systems", "hbm", "tutti", "--csv", str(csv))
    (code, small), (_, large) = (
        simulated(capsys, *common, "--hbm-tokens", tokens) for tokens in ("20000", "400000")
    )
    assert code == 0 and small["hbm_tokens"] == 20_000
    hbm, tutti = small["rows"]
    assert hbm["hit_hbm"] < 0.7 * large["rows"][0]["hit_hbm"], "evicted before it is used again"
    assert tutti["hit_hbm"] + tutti["hit_store"] > 1.5 * hbm["hit_hbm"], "kept below HBM"
    assert "20000 tokens in HBM" in simulate.report(small)
    systems = [line.split(",")[0] for line in csv.read_text().splitlines()[1:]]
    assert systems == ["hbm", "tutti"], "the router is not a part of the name"


def test_a_profile_replaces_compute_and_drive(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    document = estimated_document(CALIBRATION.model, gpu_of("A100"))
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(document))
    common = ("--requests", "12", "--rates", "0.5", "--systems", "tutti")
    code, measured = simulated(capsys, *common, "--profile", str(path))
    _, assumed = simulated(capsys, *common)
    assert code == 0 and measured["gpu"] == "profile" and measured["drive"] == "profile"
    assert "compute is an estimate" in simulate.report(measured)
    slower = measured["rows"][0]["ttft_ms"]["mean"] / assumed["rows"][0]["ttft_ms"]["mean"]
    assert slower > 2  # an A100 takes about three times as long
    assert TableProfile(document).read_gb_per_s < 29


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--systems", "magic"], "the system 'magic' does not exist"),
        (["--systems", "magic-whole"], "the system 'magic' does not exist"),
        (["--systems", "hbm-layers"], "hbm loads nothing"),
        (["--software", "magic"], "the server 'magic' does not exist"),
        (["--rates"], "no times of its own"),
        (["--rates", "0"], "positive rate"),
        (["--warm", "99", "--rates", "1"], "leaves nothing"),
        (["--calibration", "/nowhere.json", "--rates", "1"], "cannot use /nowhere.json"),
        (["--profile", "/nowhere.json", "--rates", "1"], "cannot read"),
    ],
)
def test_bad_arguments_are_named(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["simulate", "--requests", "5", *arguments]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("systems", "gds", "submit_read_us"), -1, "positive"),
        (("systems", "gds", "submit_read_us"), "fast", "give a number"),
        (("systems", "gds", "io_nbytes"), 0, "positive"),
        (("systems", "gds", "tier"), "tape", "tier is one of"),
        (("systems", "gds", "source"), "", "no source"),
        (("servers", "vllm-0.12", "gpu_scale"), None, "give a number"),
        (("servers", "vllm-0.12", "gpu_scale"), 0, "positive"),
        (("link",), {}, "no source"),
        (("capacity",), 3, "another form"),
        (("model",), "unknown", "does not exist"),
    ],
)
def test_a_bad_calibration_is_named(
    path: tuple[str, ...],
    value: object,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    values = json.loads(FILE.read_text())
    place = values
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    file = tmp_path / "calibration.json"
    file.write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=said):
        load_calibration(file)
    del place[path[-1]]
    file.write_text(json.dumps(values))
    assert cli.main(["simulate", "--calibration", str(file), "--rates", "1"]) == 2
    assert re.search(rf"lacks .{path[-1]}.; add it|no source", capsys.readouterr().err)


@pytest.mark.parametrize("content", ["", "[]", "{", '{"model": "llama-3.1-8b"}', "[" * 100_000])
def test_what_is_no_calibration_is_said(content: str, tmp_path: Path) -> None:
    file = tmp_path / "calibration.json"
    file.write_text(content)
    with pytest.raises(ConfigError, match="calibration"):
        load_calibration(file)


def test_a_second_tier_is_compared_with_none(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--workload", "leval-synthetic", "--requests", "40", "--rates", "8", "--servers", "2")
    words += ("--servers-per-node", "1", "--systems", "hbm", "tutti")
    code, result = simulated(
        capsys, *words, "--remote-gb-per-s", "0", "12.5", "--remote-replicate", "first"
    )
    assert code == 0 and len(result["rows"]) == 4
    assert ["remote_fetched" in row for row in result["rows"]] == [False, False, False, True]
    assert result["rows"][3]["remote_copied"] > 0
    assert "tutti, 12.5 GB/s" in simulate.report(result)
    code = cli.main(["simulate", *words, "--remote-gb-per-s", "-1"])
    assert code != 0 and "remote-gb-per-s is -1" in capsys.readouterr().err
